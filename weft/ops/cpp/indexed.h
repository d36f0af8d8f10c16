// Attention to the keys that an indexer chooses. The keys of a token are chosen by one thread; then
// some heads of a token are a work item. A result depends on nothing else, whichever thread takes
// it.
#pragma once

#include "lanes.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kIndexedHeads = 8;  // heads that read a key together

WEFT_INLINE F32 lanes_of(const float* p) { return load(p); }
WEFT_INLINE F32 lanes_of(const bf16* p) { return load_bf16(p); }

template <class Key>
WEFT_INLINE float product(const float* q, const Key* key, int64_t dim) {
  F32 sums = zero();
  for (int64_t d = 0; d < dim; d += kLanes)
    sums = muladd(load(q + d), lanes_of(key + d), sums);
  return sum(sums);
}

// The keys that a token sees.
struct SeenKeys {
  const int32_t* slots;
  int64_t num;
};

static SeenKeys keys_seen_by(const StepArgs& step, int64_t t) {
  int64_t r = 0;
  int64_t first = 0;
  while (t >= first + step.lens[r])
    first += step.lens[r++];
  return {step.table + step.rows[r] * step.table_stride, step.starts[r] + t - first + 1};
}

// The larger the number, the larger this.
WEFT_INLINE uint32_t order_of(float x) {
  const uint32_t bits = bits_of(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The number of which `rank` - 1 are larger, by its order. `rank` becomes how many of those that
// equal it are among the first `rank`. Byte by byte, from the highest.
static uint32_t order_of_rank(const float* x, int64_t num, int64_t& rank) {
  uint32_t found = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t counts[256] = {};
    for (int64_t i = 0; i < num; i++) {
      const uint32_t order = order_of(x[i]);
      if (uint64_t(order ^ found) >> (shift + 8) == 0)
        counts[order >> shift & 255]++;
    }
    uint32_t byte = 255;
    for (; rank > counts[byte]; byte--)
      rank -= counts[byte];
    found |= byte << shift;
  }
  return found;
}

// `scores`: seen.num floats.
template <class Key>
static void choose_keys(const IndexedArgs& args, SeenKeys seen, int64_t t, float* scores) {
  const int64_t dim = args.index->head_dim;
  const Key* const keys = static_cast<const Key*>(args.index->k);
  const float* const q = args.index_q + t * args.q_stride;
  const float* const weights = args.weights + t * args.q_stride;
  for (int64_t i = 0; i < seen.num; i++) {
    const Key* const key = keys + seen.slots[i] * dim;
    float score = 0;
    for (int64_t h = 0; h < args.index_heads; h++) {
      const float of_head = product(q + h * dim, key, dim);
      if (!(of_head <= 0))
        score += weights[h] * of_head;
    }
    // What is not a number comes last.
    scores[i] = score == score ? score : -INFINITY;
  }
  int64_t num_equal = args.num_chosen;
  const uint32_t last = order_of_rank(scores, seen.num, num_equal);
  int32_t* chosen = args.chosen + t * args.num_chosen;
  for (int64_t i = 0; i < seen.num; i++) {
    const uint32_t order = order_of(scores[i]);
    if (order > last || (order == last && num_equal-- > 0))
      *chosen++ = seen.slots[i];
  }
}

// Scores in powers of two -> weights. Returns their sum.
static float weigh(float* scores, int64_t num) {
  float peak = -INFINITY;
  for (int64_t i = 0; i < num; i++)
    peak = scores[i] > peak ? scores[i] : peak;
  F32 sums = zero();
  for (int64_t i = 0; i < num; i += kLanes) {
    const int n = int(least(num - i, kLanes));
    const F32 weight = only(power_of_two(sub(load(scores + i, n), all(peak))), 0, n, 0.0f);
    store(scores + i, weight, n);
    sums = add(sums, weight);
  }
  return sum(sums);
}

// Some heads of a token. `weights`: num_heads num_chosen floats.
template <class Key>
static void attend_to_chosen(const IndexedArgs& args, int64_t t, int64_t head, int64_t num_heads,
                             float* weights) {
  const int64_t dim = args.cache->head_dim;
  const int64_t num = args.num_chosen;
  const Key* const keys = static_cast<const Key*>(args.cache->k);
  const int32_t* const chosen = args.chosen + t * num;
  const float* const q = args.q + t * args.q_stride + head * dim;
  float* const out = args.out + (t * args.heads + head) * dim;
  for (int64_t i = 0; i < num; i++) {
    const Key* const key = keys + chosen[i] * dim;
    for (int64_t h = 0; h < num_heads; h++)
      weights[h * num + i] = product(q + h * dim, key, dim) * (args.scale * kLog2E);
  }
  float factors[kIndexedHeads];
  for (int64_t h = 0; h < num_heads; h++)
    factors[h] = 1 / weigh(weights + h * num, num);
  memset(out, 0, size_t(num_heads * dim) * sizeof(float));
  for (int64_t i = 0; i < num; i++) {
    const Key* const key = keys + chosen[i] * dim;
    for (int64_t h = 0; h < num_heads; h++) {
      const F32 weight = all(weights[h * num + i] * factors[h]);
      float* const to = out + h * dim;
      for (int64_t d = 0; d < dim; d += kLanes)
        store(to + d, muladd(weight, lanes_of(key + d), load(to + d)));
    }
  }
}

template <class Key>
static void indexed_of(const IndexedArgs& args, const StepArgs& step, Team& team) {
  int64_t most_seen = 0;
  for (int64_t r = 0; r < step.num_requests; r++)
    most_seen = most(most_seen, int64_t(step.starts[r]) + step.lens[r]);
  if (most_seen <= args.num_chosen)
    return;
  const int64_t num_floats = most(most_seen, kIndexedHeads * args.num_chosen);
  float* const memory = static_cast<float*>(own_memory(num_floats * int64_t(sizeof(float))));
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const SeenKeys seen = keys_seen_by(step, t);
    if (memory && seen.num > args.num_chosen)
      choose_keys<Key>(args, seen, t, memory);
  }
  team.barrier();
  const int64_t parts = ceil_div(args.heads, kIndexedHeads);
  for (int64_t i; (i = team.take()) < step.num_tokens * parts;) {
    const int64_t head = i % parts * kIndexedHeads;
    const int64_t num_heads = least(kIndexedHeads, args.heads - head);
    if (memory && keys_seen_by(step, i / parts).num > args.num_chosen)
      attend_to_chosen<Key>(args, i / parts, head, num_heads, memory);
  }
}

static void indexed(const IndexedArgs& args, const StepArgs& step, Team& team) {
  if (args.cache->format == kKvBf16) {
    indexed_of<bf16>(args, step, team);
  } else {
    indexed_of<float>(args, step, team);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
