// Which pieces the attention of a step is cut into. Every thread makes the same plan for itself.
//
// A block is some successive tokens of one request. An item is what one thread takes: a block, some
// of the KV heads, some of the segments of keys that the block sees. Where an item has not all
// segments of its block, each segment's result is kept (a partial), and they are merged when all
// items are done. How a step is cut decides only who does what: results are the same
// (attention_softmax.h).
//
// Requests side by side that begin with the same slots, as those after one system prompt do, are a
// group. The segments that they have in common are one block of all their queries, whose results
// are partials; the rest of each request is a block after it:
//
//              segment 0   1   2   3   4
//   request 0  [ common       ][ own  ]
//   request 1  [  block       ][ own     ]
//   request 2  [              ][ own  ]
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

// Queries of one KV head in a block: they share packed keys and values.
constexpr int64_t kBlockRows = 32 * kTileRows;
// So that a thread that is delayed leaves more to others.
constexpr int64_t kItemsPerThread = 4;
// Reading a segment costs about as much as computing this many queries.
constexpr int64_t kSegmentCost = 10;
constexpr int64_t kMostGroups = 64;  // of a step; requests of any more are by themselves
// Segments that a group need not read: below, it does not pay.
constexpr int64_t kLeastSaved = 4;

struct Shape {
  int64_t kv_heads;
  int64_t group;       // queries of a token that share a KV head
  int64_t window;      // 0: none
  bool bidirectional;  // tokens see those after them
  bool biased;         // scores depend on distances
  bool chunked;        // the window ends at its multiples
  bool sees_no_later;  // tokens see up to themselves, whatever the step says
  int64_t most_keys;   // tokens that see more are left out; 0: none

  // The first key that a token at this position sees.
  int64_t first_seen(int64_t position) const {
    if (!window)
      return 0;
    return chunked ? position - position % window : most(position + 1 - window, 0);
  }
};

// Requests first .. first + num - 1 of a step, the first `num_segments` segments of which are the
// same.
struct Group {
  int64_t first;
  int64_t num;
  int64_t num_segments;
  int64_t num_tokens;
  int64_t partials;  // number of the first that the common block has
};

// Results of a block's rows that a common block has: those of segment 0, 1 .. num_segments - 1.
struct Common {
  int64_t num_segments = 0;
  int64_t partials = 0;  // number of the first, [kv_heads][rows][num_segments]
  int64_t rows = 0;
  int64_t row = 0;  // of the block's first row
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
  Common before;
  bool is_common;

  bool is_direct() const { return rows <= kDirectRows; }
  int64_t cost() const { return num_segments * (rows + kSegmentCost); }  // of one KV head
};

struct Item {
  Block block;
  int64_t first_head;  // of KV
  int64_t num_heads;   // of KV
  int64_t first_segment;
  int64_t num_segments;
};

struct Plan {
  Item* items;                // null: they are only counted
  Group groups[kMostGroups];  // in the order of their requests
  int64_t num_groups;
  int64_t num_items;
  int64_t num_partials;
};

WEFT_INLINE int64_t tokens_of_block(Shape shape) { return most(kBlockRows / shape.group, 1); }

// No plan has more items.
WEFT_INLINE int64_t most_items(const StepArgs& step, Shape shape, int threads) {
  const int64_t most_blocks = 2 * step.num_requests + step.num_tokens / tokens_of_block(shape);
  return most_blocks * (shape.kv_heads + 1) + 2 * kItemsPerThread * threads;
}

// ---------------------------------------------------------------- groups

// Whole segments that stand before request r's tokens, if it may join a group: it has few queries,
// which see all of that.
static int64_t segments_to_share(const StepArgs& step, Shape shape, int64_t r) {
  const bool is_few = step.lens[r] > 0 && step.lens[r] * shape.group <= kDirectRows;
  const bool is_left_out = shape.most_keys && step.starts[r] + step.lens[r] > shape.most_keys;
  const bool sees_all = !shape.window && !shape.bidirectional && !is_left_out;
  // A common block does not know where its queries stand.
  return is_few && sees_all && !shape.biased ? step.starts[r] / kSegment : 0;
}

// The first segments that two requests have in common, of `num`.
static int64_t common_segments(const StepArgs& step, int64_t a, int64_t b, int64_t num) {
  const int32_t* const slots = step.table + step.rows[a] * step.table_stride;
  const int32_t* const others = step.table + step.rows[b] * step.table_stride;
  int64_t found = 0;
  for (; found < num; found++) {
    const int64_t first = found * kSegment;
    if (memcmp(slots + first, others + first, kSegment * sizeof *slots))
      break;
  }
  return found;
}

// The group that begins with request `first`, maybe alone. One more joins if that saves more
// segments than it costs those before it.
static Group group_from(const StepArgs& step, Shape shape, int64_t first) {
  Group group{first, 1, segments_to_share(step, shape, first), step.lens[first], 0};
  for (int64_t r = first + 1; r < step.num_requests && group.num_segments > 0; r++) {
    if (group.num_tokens + step.lens[r] > tokens_of_block(shape))
      break;
    const int64_t most_segments = least(group.num_segments, segments_to_share(step, shape, r));
    const int64_t common = common_segments(step, first, r, most_segments);
    if (common * group.num <= group.num_segments * (group.num - 1))
      break;
    group.num++;
    group.num_segments = common;
    group.num_tokens += step.lens[r];
  }
  return group;
}

static void find_groups(const StepArgs& step, Shape shape, Plan& plan) {
  plan.num_groups = plan.num_partials = 0;
  for (int64_t r = 0; r < step.num_requests && plan.num_groups < kMostGroups;) {
    Group group = group_from(step, shape, r);
    r += group.num;
    if (group.num_segments * (group.num - 1) < kLeastSaved)
      continue;
    group.partials = plan.num_partials;
    plan.num_partials += shape.kv_heads * group.num_tokens * shape.group * group.num_segments;
    plan.groups[plan.num_groups++] = group;
  }
}

// ---------------------------------------------------------------- blocks

// The position after what is seen by some token of first .. last - 1 of request r.
static int64_t end_of_seen(const StepArgs& step, Shape shape, int64_t r, int64_t token,
                           int64_t last) {
  if (shape.bidirectional) {
    const int64_t end = step.starts[r] + step.lens[r];
    return shape.window ? least(step.starts[r] + last - 1 + shape.window, end) : end;
  }
  const bool sees_later = step.sees_to && !shape.sees_no_later;
  return sees_later ? step.sees_to[token + last - 1] : step.starts[r] + last;
}

// Tokens first .. last - 1 of request r, which has `token` tokens of the step before it.
static Block block_of_request(const StepArgs& step, Shape shape, int64_t r, int64_t token,
                              int64_t first, int64_t last) {
  Block block;
  block.token = token + first;
  block.num_tokens = last - first;
  block.rows = block.num_tokens * shape.group;
  block.position = step.starts[r] + first;
  block.slots = step.table + step.rows[r] * step.table_stride;
  block.seen = {shape.first_seen(block.position), end_of_seen(step, shape, r, token, last)};
  block.first_segment = block.seen.first / kSegment;
  block.num_segments = ceil_div(block.seen.last, kSegment) - block.first_segment;
  block.partials = -1;
  block.before = Common();
  block.is_common = false;
  return block;
}

// What the requests of a group have in common: queries that stand after it and see it all.
static Block common_block(const StepArgs& step, Shape shape, const Group& group, int64_t token) {
  Block block = block_of_request(step, shape, group.first, token, 0, group.num_tokens);
  block.position = group.num_segments * kSegment;
  block.seen = {0, block.position};
  block.num_segments = group.num_segments;
  block.partials = group.partials;
  block.is_common = true;
  return block;
}

// use(block) for all blocks of a group, the common one first.
template <class Use>
WEFT_INLINE void for_blocks_of_group(const StepArgs& step, Shape shape, const Group& group,
                                     int64_t token, Use use) {
  Block common = common_block(step, shape, group, token);
  use(common);
  Common before{group.num_segments, group.partials, common.rows, 0};
  for (int64_t r = group.first; r < group.first + group.num; r++) {
    Block block = block_of_request(step, shape, r, token, 0, step.lens[r]);
    block.first_segment += group.num_segments;
    block.num_segments -= group.num_segments;
    block.before = before;
    use(block);
    before.row += block.rows;
    token += step.lens[r];
  }
}

// The same for the pieces of a request by itself.
template <class Use>
WEFT_INLINE void for_blocks_of_request(const StepArgs& step, Shape shape, int64_t r, int64_t token,
                                       Use use) {
  int64_t len = step.lens[r];
  if (shape.most_keys)
    len = least(len, most(shape.most_keys - step.starts[r], 0));
  const int64_t most_tokens = tokens_of_block(shape);
  const int64_t num_blocks = len <= most_tokens ? len > 0 : ceil_div(len, most_tokens);
  for (int64_t i = 0; i < num_blocks; i++) {
    const int64_t first = num_blocks == 1 ? 0 : len * i / num_blocks;
    const int64_t last = num_blocks == 1 ? len : len * (i + 1) / num_blocks;
    Block block = block_of_request(step, shape, r, token, first, last);
    use(block);
  }
}

template <class Use>
WEFT_INLINE void for_each_block(const StepArgs& step, Shape shape, const Plan& plan, Use use) {
  int64_t token = 0;
  int64_t g = 0;
  for (int64_t r = 0; r < step.num_requests;) {
    if (g < plan.num_groups && plan.groups[g].first == r) {
      const Group& group = plan.groups[g++];
      for_blocks_of_group(step, shape, group, token, use);
      token += group.num_tokens;
      r += group.num;
    } else {
      for_blocks_of_request(step, shape, r, token, use);
      token += step.lens[r++];
    }
  }
}

// A block as items of about `cost`: a direct one as a whole if that is small enough, others head by
// head; then cut by segments; then, a direct one, by heads.
static void add_items(Block& block, Shape shape, int64_t cost, Plan& plan) {
  const bool direct = block.is_direct();
  const int64_t total = block.cost() * (direct ? shape.kv_heads : 1);
  const int64_t pieces = total <= cost ? 1 : ceil_div(total, cost);
  const int64_t by_segments = least(pieces, block.num_segments);
  const int64_t by_heads =
      direct ? least(ceil_div(pieces, by_segments), shape.kv_heads) : shape.kv_heads;
  if (!block.is_common && (by_segments > 1 || block.before.num_segments > 0)) {
    block.partials = plan.num_partials;
    plan.num_partials += shape.kv_heads * block.rows * block.num_segments;
  }
  for (int64_t s = 0; s < by_segments; s++) {
    const int64_t segment = block.first_segment + block.num_segments * s / by_segments;
    const int64_t next_segment = block.first_segment + block.num_segments * (s + 1) / by_segments;
    for (int64_t h = 0; h < by_heads; h++) {
      const int64_t head = shape.kv_heads * h / by_heads;
      const int64_t next_head = shape.kv_heads * (h + 1) / by_heads;
      if (plan.items) {
        plan.items[plan.num_items] = {block, head, next_head - head, segment,
                                      next_segment - segment};
      }
      plan.num_items++;
    }
  }
}

// Items are to be taken from the last to the first: what is left at the end is then small.
static void make_plan(const StepArgs& step, Shape shape, int threads, Plan& plan) {
  int64_t cost = 0;
  int64_t num_packed = 0;
  find_groups(step, shape, plan);
  for_each_block(step, shape, plan, [&](const Block& block) {
    cost += block.cost() * shape.kv_heads;
    num_packed += !block.is_direct();
  });
  plan.num_items = 0;
  const int64_t cost_of_item = cost / (kItemsPerThread * threads) + 1;
  for (int packed = 0; packed <= (num_packed > 0); packed++) {
    for_each_block(step, shape, plan, [&](Block& block) {
      if (block.is_direct() != bool(packed))
        add_items(block, shape, cost_of_item, plan);
    });
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
