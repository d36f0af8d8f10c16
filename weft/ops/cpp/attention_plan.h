// Which pieces the attention of a step is cut into. Every thread makes the same plan for itself.
//
// A block is some successive tokens of one request. An item is what one thread takes: a block, some of the KV heads,
// some of the segments of keys that the block sees. Where an item has not all segments of its block, each segment's
// result is kept (a partial), and they are merged when all items are done. How a step is cut decides nothing but who
// does what: results are the same (attention_softmax.h).
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kBlockRows = 32 * kTileRows;  // queries of one KV head in a block: they share packed keys and values
constexpr int64_t kItemsPerThread = 4;          // so that a thread which is held up leaves more to others
constexpr int64_t kSegmentCost = 10;            // reading a segment costs about as much as computing so many queries

struct Shape {
  int64_t kv_heads;
  int64_t group;   // queries of a token that share a KV head
  int64_t window;  // 0: none
  bool bidirectional;  // tokens see those behind them
};

struct Block {
  int64_t token;  // the first, in the step
  int64_t num_tokens;
  int64_t rows;           // queries of one KV head
  int64_t position;       // of the first token
  const int32_t* slots;   // of its request
  Range seen;             // keys that some token of it sees
  int64_t first_segment;  // the segments that these are in
  int64_t num_segments;
  int64_t partials;  // number of its first partial, -1: none; [kv_heads][rows][num_segments]

  bool is_direct() const { return rows <= kDirectRows; }
  int64_t cost() const { return num_segments * (rows + kSegmentCost); }  // of one KV head
};

struct Item {
  Block block;
  int64_t first_head, num_heads;  // of KV
  int64_t first_segment, num_segments;
};

struct Plan {
  Item* items;  // null: they are only counted
  int64_t num_items;
  int64_t num_partials;
};

WEFT_INLINE int64_t tokens_of_block(Shape shape) { return most(kBlockRows / shape.group, 1); }

// No plan has more items.
WEFT_INLINE int64_t most_items(const Step& step, Shape shape, int threads) {
  const int64_t most_blocks = step.num_requests + step.num_tokens / tokens_of_block(shape);
  return most_blocks * (shape.kv_heads + 1) + 2 * kItemsPerThread * threads;
}

template <class Use>
WEFT_INLINE void for_each_block(const Step& step, Shape shape, Use use) {
  int64_t token = 0;
  for (int64_t r = 0; r < step.num_requests; r++) {
    const int64_t len = step.lens[r], most_tokens = tokens_of_block(shape);
    const int64_t num_blocks = len <= most_tokens ? len > 0 : ceil_div(len, most_tokens);
    for (int64_t i = 0; i < num_blocks; i++) {
      const int64_t first = num_blocks == 1 ? 0 : len * i / num_blocks;
      const int64_t last = num_blocks == 1 ? len : len * (i + 1) / num_blocks;
      Block block;
      block.token = token + first;
      block.num_tokens = last - first;
      block.rows = block.num_tokens * shape.group;
      block.position = step.starts[r] + first;
      block.slots = step.table + step.rows[r] * step.table_stride;
      block.seen = {shape.window ? most(block.position + 1 - shape.window, 0) : 0,
                    step.starts[r] + (shape.bidirectional ? len : last)};
      block.first_segment = block.seen.first / kSegment;
      block.num_segments = ceil_div(block.seen.last, kSegment) - block.first_segment;
      block.partials = -1;
      use(block);
    }
    token += len;
  }
}

// A block as items of about `cost`: a direct one as a whole if that is small enough, others head by head; then cut by
// segments; then, a direct one, by heads.
static void add_items(Block& block, Shape shape, int64_t cost, Plan& plan) {
  const bool direct = block.is_direct();
  const int64_t whole = block.cost() * (direct ? shape.kv_heads : 1);
  const int64_t pieces = whole <= cost ? 1 : ceil_div(whole, cost);
  const int64_t by_segments = least(pieces, block.num_segments);
  const int64_t by_heads = direct ? least(ceil_div(pieces, by_segments), shape.kv_heads) : shape.kv_heads;
  if (by_segments > 1) {
    block.partials = plan.num_partials;
    plan.num_partials += shape.kv_heads * block.rows * block.num_segments;
  }
  for (int64_t s = 0; s < by_segments; s++) {
    const int64_t segment = block.first_segment + block.num_segments * s / by_segments;
    const int64_t next_segment = block.first_segment + block.num_segments * (s + 1) / by_segments;
    for (int64_t h = 0; h < by_heads; h++) {
      const int64_t head = shape.kv_heads * h / by_heads, next_head = shape.kv_heads * (h + 1) / by_heads;
      if (plan.items) {
        plan.items[plan.num_items] = {block, head, next_head - head, segment, next_segment - segment};
      }
      plan.num_items++;
    }
  }
}

// Items are to be taken from the last to the first: what is left at the end is then small.
static void make_plan(const Step& step, Shape shape, int threads, Plan& plan) {
  int64_t cost = 0, num_packed = 0;
  for_each_block(step, shape, [&](const Block& block) {
    cost += block.cost() * shape.kv_heads;
    num_packed += !block.is_direct();
  });
  plan.num_items = plan.num_partials = 0;
  const int64_t cost_of_item = cost / (kItemsPerThread * threads) + 1;
  for (int packed = 0; packed <= (num_packed > 0); packed++) {
    for_each_block(step, shape, [&](Block& block) {
      if (block.is_direct() != bool(packed)) add_items(block, shape, cost_of_item, plan);
    });
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
