// Attention to the keys that an indexer chooses. Scores are products of panels of keys with the
// heads of a token (gemm.h), so a lane is a key, and a score depends on nothing else. Those of some
// tokens are kept at a time, and one thread chooses the keys of a token. Then it attends to them as
// a request of one token does that has no others (attention.h).
#pragma once

#include "lanes.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kScoresKept = 1 << 21;  // floats, or those of one token
constexpr int64_t kScoredTogether = 8;    // tokens that share a panel of keys
constexpr int64_t kIndexedTokens = 64;    // of a call of attention

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

// The product of floats with packed keys: queries are not rounded.
template <class Factor>
struct IndexPanel {
  using Type = FloatPanel;
};
template <>
struct IndexPanel<bf16> {
  using Type = Bf16Panel;
};

// Scores of the tokens of a step.
template <class Kv>
struct Scorer {
  using Factor = typename Kv::Factor;
  using Panel = typename IndexPanel<Factor>::Type;

  const IndexedArgs& args;
  const StepArgs& step;
  const int64_t head_dim;
  const int64_t dims;    // head_dim, padded
  const int64_t q_size;  // floats of a head, padded

  // Of this thread:
  int64_t* offsets;  // [kSegment]
  char* gathered;
  Factor* panels;  // of a segment's keys
  float* q;         // [q_size / kSlab][index_heads][kSlab]
  float* products;  // [index_heads][kPanel]
  typename Kv::Element* rows;  // [kSegment][dims], if head_dim is not dims

  Scorer(const IndexedArgs& args, const StepArgs& step)
      : args(args),
        step(step),
        head_dim(args.index->head_dim),
        dims(ceil_div(head_dim, kPanel) * kPanel),
        q_size(ceil_div(dims, kSlab) * kSlab) {}

  void lay_out(Arena& arena) {
    offsets = arena.take<int64_t>(kSegment);
    gathered = arena.take<char>(kSlab * kGatheredStride<Kv>);
    panels = arena.take<Factor>(kSegment * dims);
    q = arena.take<float>(args.index_heads * q_size);
    products = arena.take<float>(args.index_heads * kPanel);
    rows = arena.take<typename Kv::Element>(head_dim == dims ? 0 : kSegment * dims);
  }

  // The first `num` keys of a segment become panels.
  void pack(const int32_t* slots, int64_t num) {
    constexpr int64_t kSize = sizeof(typename Kv::Element);
    const char* base = static_cast<const char*>(args.index->k);
    for (int64_t i = 0; i < kSegment; i++)
      offsets[i] = slots[least(i, num - 1)] * head_dim * kSize;
    if (head_dim != dims) {
      for (int64_t i = 0; i < kSegment; i++) {
        char* const row = reinterpret_cast<char*>(rows) + i * dims * kSize;
        memcpy(row, base + offsets[i], size_t(head_dim * kSize));
        memset(row + head_dim * kSize, 0, size_t((dims - head_dim) * kSize));
        offsets[i] = i * dims * kSize;
      }
      base = reinterpret_cast<const char*>(rows);
    }
    pack_keys<Kv>({base, offsets}, {0, ceil_div(num, kPanel) * kPanel}, dims, gathered, panels);
  }

  void load_heads(int64_t t) {
    const float* from = args.index_q + t * args.q_stride;
    for (int64_t h = 0; h < args.index_heads; h++, from += head_dim) {
      for (int64_t d = 0; d < dims; d += kLanes) {
        const int n = int(most(least(head_dim - d, kLanes), 0));
        store(q + (d / kSlab * args.index_heads + h) * kSlab + d % kSlab, load(from + d, n));
      }
    }
  }

  // scores[i] = sum over heads of weight relu(q k) of the first `num` packed keys.
  void score(int64_t t, int64_t num, float* scores) {
    const float* const weights = args.weights + t * args.q_stride;
    load_heads(t);
    Product<float, typename Panel::B, float> product{};
    product.a = q;
    product.slab_stride = args.index_heads * kSlab;
    product.k = dims;
    product.c = products;
    product.c_stride = kPanel;
    for (int64_t key = 0; key < num; key += kPanel) {
      product.b = panels + key * dims;
      multiply<Panel>(product, args.index_heads);
      for (int64_t i = 0; i < least(num - key, kPanel); i += kLanes) {
        F32 sums = zero();
        for (int64_t h = 0; h < args.index_heads; h++) {
          const F32 of_head = larger(zero(), load(products + h * kPanel + i));
          sums = muladd(all(weights[h]), of_head, sums);
        }
        store(scores + key + i, sums, int(least(num - key - i, kLanes)));
      }
    }
  }

  // The scores of tokens first .. last - 1, `most_seen` floats each, of the keys of a segment.
  void score_segment(int64_t first, int64_t last, int64_t segment, int64_t most_seen,
                     float* scores) {
    const int64_t start = segment * kSegment;
    const int32_t* packed = nullptr;
    for (int64_t t = first; t < last; t++) {
      const SeenKeys seen = keys_seen_by(step, t);
      if (seen.num <= args.num_chosen || seen.num <= start)
        continue;
      if (packed != seen.slots) {
        // Later tokens of the request see more.
        int64_t num = seen.num;
        for (int64_t next = t + 1; next < last; next++) {
          const SeenKeys other = keys_seen_by(step, next);
          num = other.slots == seen.slots ? other.num : num;
        }
        pack(seen.slots + start, least(num - start, kSegment));
        packed = seen.slots;
      }
      score(t, least(seen.num - start, kSegment), scores + (t - first) * most_seen + start);
    }
  }
};

// `scores`: seen.num floats.
static void choose_keys(const IndexedArgs& args, SeenKeys seen, int64_t t, float* scores) {
  // What is not a number comes last.
  for (int64_t i = 0; i < seen.num; i++)
    scores[i] = scores[i] == scores[i] ? scores[i] : -INFINITY;
  int64_t num_equal = args.num_chosen;
  const uint32_t last = order_of_rank(scores, seen.num, num_equal);
  int32_t* chosen = args.chosen + t * args.num_chosen;
  for (int64_t i = 0; i < seen.num; i++) {
    const uint32_t order = order_of(scores[i]);
    if (order > last || (order == last && num_equal-- > 0))
      *chosen++ = seen.slots[i];
  }
}

static float* index_scores = nullptr;  // of the operation that runs, set by thread 0

// Returns whether there was memory.
template <class Kv>
static bool choose_all(const IndexedArgs& args, const StepArgs& step, int64_t most_seen,
                       Team& team) {
  Scorer<Kv> scorer(args, step);
  Arena counter{nullptr};
  scorer.lay_out(counter);
  Arena arena{static_cast<char*>(own_memory(counter.used))};
  scorer.lay_out(arena);
  const int64_t num_kept = least(most(kScoresKept / most_seen, 1), step.num_tokens);
  if (team.index == 0) {
    index_scores =
        static_cast<float*>(shared_memory(num_kept * most_seen * int64_t(sizeof(float))));
  }
  team.barrier();
  const bool can_work = arena.base && index_scores;
  const int64_t segments = ceil_div(most_seen, kSegment);
  for (int64_t first = 0; first < step.num_tokens; first += num_kept) {
    const int64_t last = least(first + num_kept, step.num_tokens);
    const int64_t blocks = ceil_div(last - first, kScoredTogether);
    for (int64_t i; (i = team.take()) < blocks * segments && can_work;) {
      const int64_t t = first + i / segments * kScoredTogether;
      scorer.score_segment(t, least(t + kScoredTogether, last), i % segments, most_seen,
                           index_scores + (t - first) * most_seen);
    }
    team.barrier();
    for (int64_t i; (i = team.take()) < last - first && can_work;) {
      const SeenKeys seen = keys_seen_by(step, first + i);
      if (seen.num > args.num_chosen)
        choose_keys(args, seen, first + i, index_scores + i * most_seen);
    }
    team.barrier();
  }
  return index_scores;
}

// Attention of the tokens first .. first + num - 1 (at most kIndexedTokens) to their chosen keys:
// each is a request by itself.
template <class Kv>
static void attend_to_chosen(const IndexedArgs& args, int64_t first, int64_t num, Team& team) {
  int32_t numbers[3][kIndexedTokens];
  for (int64_t i = 0; i < num; i++) {
    numbers[0][i] = int32_t(i);
    numbers[1][i] = int32_t(args.num_chosen - 1);
    numbers[2][i] = 1;
  }
  StepArgs step{};
  step.num_tokens = step.num_requests = num;
  step.rows = numbers[0];
  step.starts = numbers[1];
  step.lens = numbers[2];
  step.table = args.chosen + first * args.num_chosen;
  step.table_stride = args.num_chosen;
  AttentionArgs own{};
  own.cache = args.cache;
  own.q = args.q + first * args.q_stride;
  own.q_stride = args.q_stride;
  own.out = args.out + first * args.heads * args.cache->head_dim;
  own.heads = args.heads;
  own.scale = args.scale;
  attention_of<Kv>(own, step, team);
}

template <class Kv>
static void indexed_of(const IndexedArgs& args, const StepArgs& step, Team& team) {
  int64_t most_seen = 0;
  for (int64_t r = 0; r < step.num_requests; r++)
    most_seen = most(most_seen, int64_t(step.starts[r]) + step.lens[r]);
  if (most_seen <= args.num_chosen || !choose_all<Kv>(args, step, most_seen, team))
    return;
  for (int64_t first = 0; first < step.num_tokens;) {
    int64_t num = 0;
    while (num < least(kIndexedTokens, step.num_tokens - first) &&
           keys_seen_by(step, first + num).num > args.num_chosen)
      num++;
    if (num) {
      attend_to_chosen<Kv>(args, first, num, team);
      team.barrier();
    }
    first += most(num, 1);
  }
}

static void indexed(const IndexedArgs& args, const StepArgs& step, Team& team) {
  if (args.cache->format == kKvBf16) {
    indexed_of<KvBf16>(args, step, team);
  } else {
    indexed_of<KvF32>(args, step, team);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
