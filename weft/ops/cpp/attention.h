// Attention of a step's tokens to what their requests have in the cache, prompts and single tokens
// alike.
//
// The queries of one KV head, `group` for each token, are the rows of two products with a segment
// of its keys and values:
//
//   scores = q k^T,   weights = softmax(scores),   sums = weights v   (attention_softmax.h)
//
// A few of them (one token, a short draft) read the cache directly, all KV heads in one go: that
// takes as long as memory needs to deliver it (attention_direct.h). Many use panels, one KV head at
// a time (attention_packed.h). Both add in the same order, so a token's result does not depend on
// which way it was computed, nor on anything else in the step.
//
// What stands in slots that a block does not see is not read: in a segment, such keys are replaced
// by the nearest that it sees, with weight 0. So what another request left there, numbers or not,
// has no influence.
#pragma once

#include "gemm.h"
#include "kv_format.h"
#include "attention_softmax.h"
#include "attention_direct.h"
#include "attention_packed.h"
#include "attention_plan.h"
#include "attention_tiles.h"

namespace weft {
namespace WEFT_NAMESPACE {

// Hands out parts of one piece of memory; of none, it counts.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(base + used);
    used += ceil_div(count * int64_t(sizeof(T)), 64) * 64;
    return taken;
  }
};

static float* attention_partials = nullptr;  // of the operation that runs, set by thread 0

template <class Kv>
struct Attention {
  using Element = typename Kv::Element;
  using Factor = typename Kv::Factor;
  static constexpr int64_t kSize = sizeof(Element);

  const AttentionArgs& args;
  const KvCache& cache;
  const Shape shape;
  const int64_t head_dim;
  const int64_t slot_bytes;      // from one slot to the next
  const int64_t dims;            // head_dim, padded
  const int64_t q_size;          // factors of a query, padded
  const int64_t head_stride;     // from one query to the next in `q`, and in `gate`
  const int64_t state;           // floats of one
  const int32_t* const sees_to;  // of the step
  Plan plan;

  // Of this thread:
  int64_t* offsets;       // [kSegment] bytes from the start of the cache to a segment's keys
  int64_t* next_offsets;  // of the next segment
  int64_t* padded_offsets;
  Factor* q;        // [q_size / kSlab][queries][kSlab], of each KV head
  float* q_scales;  // [queries], of each KV head, where factors are whole numbers
  float* scores;    // [kSegment / kSlab][queries][kSlab], of each KV head (direct) or of a tile
  Factor* weights;  // the same
  float* states;    // [queries], all segments so far
  float* next;      // [queries], one segment
  Factor* k_panels;
  Factor* v_panels;
  char* gathered;
  float* k_scales;    // [kv_heads][kSegment]
  float* v_scales;    // [kv_heads][kSegment]
  Element* k_padded;  // [kSegment][dims], if head_dim is not dims
  Element* v_padded;  // [kSegment][dims], if head_dim is not dims

  Attention(const AttentionArgs& args, const StepArgs& step)
      : args(args),
        cache(*args.cache),
        shape{cache.kv_heads,          args.heads / cache.kv_heads, args.window,
              args.bidirectional != 0, args.biases != nullptr,      args.chunked != 0,
              args.sees_no_later != 0, args.most_keys},
        head_dim(cache.head_dim),
        slot_bytes((cache.stride ? cache.stride : cache.kv_heads * head_dim) * kSize),
        dims(ceil_div(head_dim, kPanel) * kPanel),
        q_size(ceil_div(dims, kSlab) * kSlab),
        head_stride(args.head_stride ? args.head_stride : head_dim),
        state(state_size(dims)),
        sees_to(args.sees_no_later ? nullptr : step.sees_to) {}

  bool is_padded() const { return head_dim != dims; }

  void lay_out(Arena& arena, const StepArgs& step, int threads) {
    const int64_t direct_rows = shape.kv_heads * kDirectRows;
    const int64_t rows = most(tokens_of_block(shape) * shape.group, direct_rows);
    const int64_t score_rows = most(kTileRows, direct_rows);
    plan.items = arena.take<Item>(most_items(step, shape, threads));
    offsets = arena.take<int64_t>(kSegment);
    next_offsets = arena.take<int64_t>(kSegment);
    padded_offsets = arena.take<int64_t>(kSegment);
    q = arena.take<Factor>(rows * q_size);
    q_scales = arena.take<float>(rows);
    scores = arena.take<float>(score_rows * kSegment);
    weights = Kv::kFactors == 1 ? reinterpret_cast<Factor*>(scores)
                                : arena.take<Factor>(score_rows * kSegment);
    states = arena.take<float>(rows * state);
    next = arena.take<float>(score_rows * state);
    k_panels = arena.take<Factor>(kSegment * dims);
    v_panels = arena.take<Factor>(kSegment * dims);
    gathered = arena.take<char>(kSlab * kGatheredStride<Kv>);
    k_scales = arena.take<float>(Kv::kHasScales ? shape.kv_heads * kSegment : 0);
    v_scales = arena.take<float>(Kv::kHasScales ? shape.kv_heads * kSegment : 0);
    k_padded = arena.take<Element>(is_padded() ? kSegment * dims : 0);
    v_padded = arena.take<Element>(is_padded() ? kSegment * dims : 0);
  }

  // ---------------------------------------------------------------- a segment

  // `keys` of the sequence that are in a segment, from its start.
  static Range within(Range keys, int64_t segment) {
    const int64_t start = segment * kSegment;
    return {most(least(keys.first - start, kSegment), 0),
            most(least(keys.last - start, kSegment), 0)};
  }
  // Whole slabs.
  static Range slabs_of(Range keys) {
    return {keys.first / kSlab * kSlab, ceil_div(keys.last, kSlab) * kSlab};
  }

  // Those that the query in this row of a block sees.
  Range seen_by(const Block& block, int64_t row, int64_t segment) const {
    const int64_t token = row / shape.group;
    const int64_t position = block.position + token;
    if (shape.bidirectional && !shape.window)
      return within(block.seen, segment);
    if (shape.bidirectional) {
      const int64_t end = least(position + shape.window, block.seen.last);
      return within({most(position + 1 - shape.window, 0), end}, segment);
    }
    const int64_t last = sees_to ? sees_to[block.token + token] : position + 1;
    return within({shape.first_seen(position), last}, segment);
  }

  // What the scores of the query in this row of a block get, from the segment's first key on; null:
  // nothing.
  const float* biases_of(const Block& block, int64_t head, int64_t row, int64_t segment) const {
    if (!args.biases)
      return nullptr;
    const int64_t query = head * shape.group + row % shape.group;
    const int64_t position = block.position + row / shape.group;
    return args.biases + query * args.bias_stride + segment * kSegment - position;
  }

  // Where the keys of a segment are. For those that are not seen: where the nearest one is.
  void find(const Block& block, int64_t segment, int64_t* to) {
    const Range seen = within(block.seen, segment);
    const int32_t* from = block.slots + segment * kSegment;
    for (int64_t i = seen.first; i < seen.last; i++)
      to[i] = from[i] * slot_bytes;
    for (int64_t i = 0; i < seen.first; i++)
      to[i] = to[seen.first];
    for (int64_t i = seen.last; i < kSegment; i++)
      to[i] = to[seen.last - 1];
  }

  // Go to an item's segment: its offsets, those of the next one, its scales.
  void enter(const Block& block, const Item& item, int64_t segment) {
    if (segment == item.first_segment) {
      find(block, segment, offsets);
    } else {
      memcpy(offsets, next_offsets, kSegment * sizeof(int64_t));
    }
    const bool is_last = segment + 1 == item.first_segment + item.num_segments;
    if (!is_last)
      find(block, segment + 1, next_offsets);
    if (is_last)
      memcpy(next_offsets, offsets, kSegment * sizeof(int64_t));
  }

  // A segment's scales lie apart from its keys and values: they are prefetched before these are
  // computed with.
  void bring_scales(const Block& block, int64_t segment) const {
    if (!Kv::kHasScales)
      return;
    const Range seen = within(block.seen, segment);
    for (int64_t i = seen.first; i < seen.last; i++) {
      const int64_t at = block.slots[segment * kSegment + i] * shape.kv_heads;
      __builtin_prefetch(cache.k_scale + at, 0, 2);
      __builtin_prefetch(cache.v_scale + at, 0, 2);
    }
  }

  void load_scales(const Block& block, int64_t segment, int64_t first_head, int64_t num_heads) {
    if (!Kv::kHasScales)
      return;
    const Range seen = within(block.seen, segment);
    const Range slabs = slabs_of(seen);
    const int32_t* from = block.slots + segment * kSegment;
    for (int64_t i = slabs.first; i < slabs.last; i += 4) {
      int64_t at[4];
      for (int t = 0; t < 4; t++)
        at[t] = from[most(least(i + t, seen.last - 1), seen.first)] * shape.kv_heads;
      for (int64_t head = first_head; head < first_head + num_heads; head += 4) {
        const int num = int(least(first_head + num_heads - head, 4));
        turn_scales(cache.k_scale + head, at, num, k_scales + head * kSegment + i, kSegment);
        turn_scales(cache.v_scale + head, at, num, v_scales + head * kSegment + i, kSegment);
      }
    }
  }

  Rows rows_of(const void* data, int64_t head) const {
    return {static_cast<const char*>(data) + head * head_dim * kSize, offsets};
  }

  // The same rows, filled up with zeros to `dims`.
  Rows padded(Rows rows, Range range, Element* copy) {
    for (int64_t i = 0; i < kSegment; i++) {
      padded_offsets[i] = i * dims * kSize;
      if (i < range.first || i >= range.last)
        continue;
      memcpy(copy + i * dims, rows.base + rows.offsets[i], head_dim * kSize);
      memset(static_cast<void*>(copy + i * dims + head_dim), 0, (dims - head_dim) * kSize);
    }
    return {reinterpret_cast<const char*>(copy), padded_offsets};
  }

  // ---------------------------------------------------------------- queries and results

  // The queries of one KV head, times the scale.
  void load_queries(const Block& block, int64_t head, Factor* to, float* scales) {
    for (int64_t row = 0; row < block.rows; row++) {
      const int64_t token = block.token + row / shape.group;
      const float* from =
          args.q + token * args.q_stride + (head * shape.group + row % shape.group) * head_stride;
      F32 scale = all(args.scale * kLog2E);
      if constexpr (Kv::kHasScales) {
        Extent extent;
        for (int64_t d = 0; d < dims; d += kLanes)
          extent.take(mul(load(from + d, int(head_dim - d)), scale));
        scales[row] = extent.scale(Kv::kMost);
        scale = mul(scale, inverse_scale(scales[row]));
      }
      for (int64_t d = 0; d < dims; d += kLanes) {
        Factor* p = to + d / kSlab * block.rows * kSlab + row * kSlab + d % kSlab;
        F32 x = mul(load(from + d, int(head_dim - d)), scale);
        if constexpr (Kv::kDims == 4)
          x = evens_first(x);
        Kv::put_floats(p, x);
      }
    }
  }

  void store_results(const Block& block, int64_t head, const float* from) {
    for (int64_t row = 0; row < block.rows; row++) {
      const int64_t token = block.token + row / shape.group;
      const int64_t query = head * shape.group + row % shape.group;
      float* out = args.out + (token * args.heads + query) * head_dim;
      finish<Kv>(from + row * state, dims, out, head_dim);
      if (args.gate)
        gate_result(args.gate + token * args.q_stride + query * head_stride, out, head_dim);
    }
  }

  // What the group of a block has of its query in this row.
  float* common_partial(const Common& before, int64_t head, int64_t row, int64_t segment) const {
    const int64_t number = (head * before.rows + before.row + row) * before.num_segments + segment;
    return attention_partials + (before.partials + number) * state;
  }

  // A segment's result of a query.
  float* partial(const Block& block, int64_t head, int64_t row, int64_t segment) const {
    const int64_t number =
        (head * block.rows + row) * block.num_segments + segment - block.first_segment;
    return attention_partials + (block.partials + number) * state;
  }

  // A query before its first segment: it has seen nothing but its head's sink, if there are sinks.
  void begin(int64_t head, int64_t row, float* to) const {
    clear_state(to, dims);
    if (!args.sinks)
      return;
    to[dims] = args.sinks[head * shape.group + row % shape.group] * kLog2E;
    to[dims + 1] = 1;
  }

  // `next` of a query goes to its partial, or to what it has seen so far.
  void take_next(const Block& block, int64_t head, int64_t row, int64_t segment, const float* from,
                 float* to) {
    if (block.partials >= 0) {
      memcpy(partial(block, head, row, segment), from, state * sizeof(float));
    } else if (segment == block.first_segment && !args.sinks) {  // what merging with nothing gives
      memcpy(to, from, state * sizeof(float));
    } else {
      merge(to, from, dims);
    }
  }

  // ---------------------------------------------------------------- few queries

  void direct(const Item& item, int64_t first_head, int64_t num_heads) {
    const Block& block = item.block;
    const int64_t rows = block.rows;
    for (int64_t h = 0; h < num_heads; h++)
      load_queries(block, first_head + h, q + h * rows * q_size, q_scales + h * rows);
    Direct<Kv>::order_queries(q, num_heads * rows * q_size);
    for (int64_t i = 0; i < num_heads * rows; i++)
      begin(first_head + i / rows, i % rows, states + i * state);
    for (int64_t segment = item.first_segment; segment < item.first_segment + item.num_segments;
         segment++) {
      enter(block, item, segment);
      direct_segment(block, segment, first_head, num_heads);
      for (int64_t i = 0; i < num_heads * rows; i++) {
        take_next(block, first_head + i / rows, i % rows, segment, next + i * state,
                  states + i * state);
      }
    }
    for (int64_t h = 0; h < num_heads && block.partials < 0; h++) {
      store_results(block, first_head + h, states + h * rows * state);
    }
  }

  // One segment -> `next`. Slab by slab, all heads of it: they are side by side in memory.
  void direct_segment(const Block& block, int64_t segment, int64_t first_head, int64_t num_heads) {
    const int64_t rows = block.rows;
    const int64_t size = rows * kSegment;
    const int64_t bytes = head_dim * kSize;
    const Range seen = within(block.seen, segment);
    const Range slabs = slabs_of(seen);
    bring_scales(block, segment);
    const Rows keys_there = rows_of(cache.k, first_head);
    const Rows values_there = rows_of(cache.v, first_head);
    const Rows next_keys = {keys_there.base, next_offsets};
    Rows k = keys_there;
    Rows v = values_there;
    if (is_padded()) {
      k = padded(k, slabs, k_padded);
      v = padded(v, slabs, v_padded);
    }
    const Range first_slab = {slabs.first, slabs.first + kSlab};
    // While a slab is computed with: the next one of the same, or what comes after the last.
    const auto ahead_of = [&](Rows of, int64_t slab, Rows after, Range slab_after) {
      const bool is_last = slab + kSlab >= slabs.last;
      return Ahead(is_last ? after : of,
                   is_last ? slab_after : Range{slab + kSlab, slab + 2 * kSlab}, num_heads * bytes);
    };
    for (int64_t slab = slabs.first; slab < slabs.last; slab += kSlab) {
      const Range keys = {most(seen.first - slab, 0), least(seen.last - slab, kSlab)};
      Ahead ahead = ahead_of(keys_there, slab, values_there, first_slab);
      for (int64_t h = 0; h < num_heads; h++) {
        const Rows here = {k.base + h * bytes, k.offsets + slab};
        for (int64_t first = 0; first < rows; first += kPassRows) {
          const int64_t num = least(kPassRows, rows - first);
          direct_scores_of<Kv>(num, q + h * rows * q_size + first * kSlab, rows * kSlab, dims, keys,
                               here, ahead, gathered,
                               scores + h * size + slab * rows + first * kSlab);
        }
      }
    }
    load_scales(block, segment, first_head, num_heads);
    for (int64_t i = 0; i < num_heads * rows; i++)
      memset(next + i * state, 0, dims * sizeof(float));
    for (int64_t h = 0; h < num_heads; h++) {
      const int64_t scales = (first_head + h) * kSegment;
      const auto seen_of = [&](int64_t row) { return seen_by(block, row, segment); };
      const auto biases = [&](int64_t row) {
        return biases_of(block, first_head + h, row, segment);
      };
      softmax<Kv>(scores + h * size, weights + h * size, rows, rows * kSlab, slabs, seen_of,
                  q_scales + h * rows, k_scales + scales, v_scales + scales, args.cap * kLog2E,
                  biases, next + h * rows * state + dims, state);
    }
    for (int64_t slab = slabs.first; slab < slabs.last; slab += kSlab) {
      const Range keys = {most(seen.first - slab, 0) / Kv::kFactors * Kv::kFactors,
                          ceil_div(least(seen.last - slab, kSlab), Kv::kFactors) * Kv::kFactors};
      Ahead ahead = ahead_of(values_there, slab, next_keys, {0, kSlab});
      for (int64_t h = 0; h < num_heads; h++) {
        const Rows here = {v.base + h * bytes, v.offsets + slab};
        for (int64_t first = 0; first < rows; first += kPassRows) {
          const int64_t num = least(kPassRows, rows - first);
          direct_values_of<Kv>(num, weights + h * size + slab * rows + first * kSlab, keys, dims,
                               here, ahead, next + (h * rows + first) * state, state);
        }
      }
    }
    for (int64_t i = 0; i < num_heads * rows; i++) {
      float* const sums = next + i * state;
      Direct<Kv>::end_sums(weights + i / rows * size + i % rows * kSlab, rows * kSlab, slabs, dims,
                           sums);
      scale_sums<Kv>(sums, dims);
    }
  }

  // ---------------------------------------------------------------- many queries

  void packed(const Item& item, int64_t head) {
    const Block& block = item.block;
    const int64_t passes = passes_of(block.rows);
    load_queries(block, head, q, q_scales);
    for (int64_t i = 0; i < block.rows; i++)
      begin(head, i, states + i * state);
    for (int64_t segment = item.first_segment; segment < item.first_segment + item.num_segments;
         segment++) {
      enter(block, item, segment);
      pack(block, segment, head);
      const int64_t products = passes * (kSegment + dims) / kPanel;
      Upcoming upcoming(rows_of(cache.k, head).base, rows_of(cache.v, head).base, next_offsets,
                        head_dim * kSize, products);
      for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t first = pass_start(block.rows, pass);
        const int64_t last = pass_start(block.rows, pass + 1);
        packed_tile(block, segment, head, first, last - first, upcoming);
        for (int64_t row = first; row < last; row++) {
          take_next(block, head, row, segment, next + (row - first) * state, states + row * state);
        }
      }
    }
    if (block.partials < 0)
      store_results(block, head, states);
  }

  void pack(const Block& block, int64_t segment, int64_t head) {
    const Range slabs = slabs_of(within(block.seen, segment));
    Rows k = rows_of(cache.k, head);
    Rows v = rows_of(cache.v, head);
    if (is_padded()) {
      k = padded(k, slabs, k_padded);
      v = padded(v, slabs, v_padded);
    }
    pack_keys<Kv>(k, slabs, dims, gathered, k_panels);
    pack_values<Kv>(v, slabs, dims, v_panels);
    load_scales(block, segment, head, 1);
  }

  // One segment of a tile of queries -> `next`.
  void packed_tile(const Block& block, int64_t segment, int64_t head, int64_t first, int64_t rows,
                   Upcoming& upcoming) {
    const Range seen = {seen_by(block, first, segment).first,
                        seen_by(block, first + rows - 1, segment).last};
    const Range slabs = slabs_of(seen);
    packed_scores<Kv>(q + first * kSlab, block.rows * kSlab, rows, dims, head_dim, k_panels, seen,
                      upcoming, scores);
    const auto seen_of = [&](int64_t row) { return seen_by(block, first + row, segment); };
    const auto biases = [&](int64_t row) { return biases_of(block, head, first + row, segment); };
    softmax<Kv>(scores, weights, rows, rows * kSlab, slabs, seen_of, q_scales + first,
                k_scales + head * kSegment, v_scales + head * kSegment, args.cap * kLog2E, biases,
                next + dims, state);
    const Range keys = {slabs.first, ceil_div(seen.last, Kv::kFactors) * Kv::kFactors};
    packed_values<Kv>(weights, keys, rows, dims, head_dim, v_panels, upcoming, next, state);
    for (int64_t row = 0; row < rows; row++)
      scale_sums<Kv>(next + row * state, dims);
  }

  // ---------------------------------------------------------------- items

  void run(const Item& item) {
    const int64_t last_head = item.first_head + item.num_heads;
    if constexpr (Kv::kReadsDirectly) {
      if (item.block.is_direct()) {
        // The padded copies have room for one head.
        const int64_t together = is_padded() ? 1 : item.num_heads;
        for (int64_t head = item.first_head; head < last_head; head += together)
          direct(item, head, together);
        return;
      }
    }
    for (int64_t head = item.first_head; head < last_head; head++)
      packed(item, head);
  }

  // The results of an item's heads, when all their partials are there.
  void merge_partials(const Item& item) {
    const Block& block = item.block;
    for (int64_t head = item.first_head; head < item.first_head + item.num_heads; head++) {
      for (int64_t row = 0; row < block.rows; row++) {
        float* const to = states + row * state;
        begin(head, row, to);
        for (int64_t s = 0; s < block.before.num_segments; s++) {
          merge(to, common_partial(block.before, head, row, s), dims);
        }
        for (int64_t s = 0; s < block.num_segments; s++) {
          merge(to, partial(block, head, row, block.first_segment + s), dims);
        }
      }
      store_results(block, head, states);
    }
  }
};

template <class Kv>
static void attention_of(const AttentionArgs& args, const StepArgs& step, Team& team) {
  Attention<Kv> work(args, step);
  Arena counter{nullptr};
  Arena arena{nullptr};
  work.lay_out(counter, step, team.size);
  arena.base = static_cast<char*>(own_memory(counter.used));
  work.lay_out(arena, step, team.size);
  Plan& plan = work.plan;
  if (!arena.base)
    plan.items = nullptr;
  make_plan(step, work.shape, team.size, plan);
  if (plan.num_partials) {
    if (team.index == 0) {
      attention_partials = static_cast<float*>(
          shared_memory(plan.num_partials * work.state * int64_t(sizeof(float))));
    }
    team.barrier();
  }
  const bool can_work = plan.items && (attention_partials || !plan.num_partials);
  for (int64_t i = team.take(); i < plan.num_items && can_work; i = team.take()) {
    work.run(plan.items[plan.num_items - 1 - i]);
  }
  if (!plan.num_partials)
    return;
  team.barrier();
  for (int64_t i = team.take(); i < plan.num_items && can_work; i = team.take()) {
    const Item& item = plan.items[i];
    const Block& block = item.block;
    const bool is_first = item.first_segment == block.first_segment;
    if (block.partials >= 0 && is_first && !block.is_common)
      work.merge_partials(item);
  }
}

static void attention(const AttentionArgs& args, const StepArgs& all, Team& team) {
  if (attends_by_tiles(args))
    return attention_by_tiles(args, all, team);
  const StepArgs step = step_of(*args.cache, all);
  switch (args.cache->format) {
    case kKvF32:
      return attention_of<KvF32>(args, step, team);
    case kKvBf16:
      return attention_of<KvBf16>(args, step, team);
    case kKvI8:
      return attention_of<KvI8>(args, step, team);
    case kKvI16:
      return attention_of<KvI16>(args, step, team);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
