// The softmax of attention, a segment of keys at a time.
//
// A sequence is cut into segments at multiples of kSegment tokens, wherever its queries, its chunks
// and its cached prefix begin or end. A segment is computed alone: its weights are 2^(score - the
// segment's largest score). The segments of a query are then merged in rising order. So a query's
// result depends on what it sees alone, and whether one thread took its segments one after the
// other or several took one each makes no difference.
//
// Scores and weights of R queries lie as the rows of a product do (gemm.h):
//
//            keys 0 .. 63      64 .. 127         kSegment
//   query 0  ............  |  ............  |  ..      `slab_stride` = R * kSlab between slabs
//   query 1  ............  |  ............  |  ..
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int kSegment = 256;
// The largest score of no key: finite, so that differences are numbers.
constexpr float kNothingSeen = -1e30f;
constexpr float kLog2E = 1.44269504f;  // scores are multiplied by it, through the queries

struct Range {
  int64_t first;
  int64_t last;  // is not in it
};

// 2^x for x <= 0, with a relative error below 2e-7; 2^-126 for what is smaller; NaN for NaN.
WEFT_INLINE F32 power_of_two(F32 x) {
  const F32 limited = larger(all(-126.0f), x);
  const F32 n = round_nearest(limited);
  const F32 r = sub(limited, n);
  // The polynomial of least relative error, 1 at 0.
  F32 p = muladd(all(0.00132647272f), r, all(0.00967151264f));
  p = muladd(p, r, all(0.05550733743f));
  p = muladd(p, r, all(0.2402224209f));
  p = muladd(p, r, all(0.6931469776f));
  p = muladd(p, r, all(1.0f));
  return times_power_of_two(p, n);
}

constexpr int kChains = 4;  // running maxima and sums of a row, so that none waits for the last

// A slab of one query's scores, whole numbers where `scaled`: those of keys that are not seen are
// taken out.
template <bool scaled, bool all_seen>
WEFT_INLINE void limit_slab(float* p, float q_scale, const float* k_scales, Range seen,
                            F32 (&tops)[kChains]) {
#pragma GCC unroll 16  // wholly, so that the chains are registers
  for (int i = 0; i < kSlab; i += kLanes) {
    F32 x;
    if constexpr (scaled) {
      x = mul(to_f32(load_i32(reinterpret_cast<const int32_t*>(p + i))),
              mul(all(q_scale), load(k_scales + i)));
    } else {
      x = load(p + i);
    }
    if (!all_seen)
      x = only(x, int(seen.first) - i, int(seen.last) - i, kNothingSeen);
    if (!all_seen || scaled)
      store(p + i, x);
    tops[i / kLanes % kChains] = larger(tops[i / kLanes % kChains], x);
  }
}

// A slab of scores -> weights; with scales, they stay floats in `p`, times those of the values, and
// `extent` learns how large they are.
template <class Kv, bool all_seen>
WEFT_INLINE void weigh_slab(float* p, typename Kv::Factor* to, const float* v_scales, Range seen,
                            F32 peak, F32 (&sums)[kChains], Extent& extent) {
#pragma GCC unroll 16
  for (int i = 0; i < kSlab; i += kLanes) {
    F32 x = power_of_two(sub(load(p + i), peak));
    if (!all_seen)
      x = only(x, int(seen.first) - i, int(seen.last) - i, 0.0f);
    sums[i / kLanes % kChains] = add(sums[i / kLanes % kChains], x);
    if constexpr (Kv::kHasScales) {
      x = mul(x, load(v_scales + i));
      if (!all_seen)
        x = only(x, int(seen.first) - i, int(seen.last) - i, 0.0f);
      extent.take(x);
      store(p + i, x);
    } else {
      Kv::put_floats(to + i, x);
    }
  }
}

// A slab of whole numbers as scores.
WEFT_INLINE void scale_slab(float* p, float q_scale, const float* k_scales) {
  for (int i = 0; i < kSlab; i += kLanes) {
    const F32 x = to_f32(load_i32(reinterpret_cast<const int32_t*>(p + i)));
    store(p + i, mul(x, mul(all(q_scale), load(k_scales + i))));
  }
}

// A slab of scores: cap tanh(score / cap).
static __attribute__((noinline)) void cap_slab(float* p, float cap) {
  for (int i = 0; i < kSlab; i += kLanes) {
    store(p + i, mul(all(cap), hyperbolic_tangent(mul(load(p + i), all(1 / cap)))));
  }
}

// A slab of scores, in powers of two, plus their biases, in powers of e.
static __attribute__((noinline)) void bias_slab(float* p, const float* biases) {
  for (int i = 0; i < kSlab; i += kLanes)
    store(p + i, muladd(load(biases + i), all(kLog2E), load(p + i)));
}

// One query's scores of the slabs `slabs` (multiples of kSlab), of which it sees the keys `seen`.
// With scales, those of keys and that of the query multiply the scores. `cap` limits scores, 0 does
// not; then `biases` of the segment are added, unless it is null. Returns the largest.
template <class Kv>
static __attribute__((noinline)) float limit(float* scores, int64_t slab_stride, Range slabs,
                                             Range seen, float q_scale, const float* k_scales,
                                             float cap, const float* biases) {
  constexpr bool kScaled = Kv::kHasScales;
  F32 tops[kChains];
  for (int i = 0; i < kChains; i++)
    tops[i] = all(kNothingSeen);
  for (int64_t slab = slabs.first; slab < slabs.last; slab += kSlab) {
    float* p = scores + slab / kSlab * slab_stride;
    const float* scales = k_scales + slab;
    const Range here = {seen.first - slab, seen.last - slab};
    if (cap != 0 || biases) {
      if (kScaled)
        scale_slab(p, q_scale, scales);
      if (cap != 0)
        cap_slab(p, cap);
      if (biases)
        bias_slab(p, biases + slab);
      limit_slab<false, false>(p, q_scale, scales, here, tops);
    } else if (here.first <= 0 && here.last >= kSlab) {
      limit_slab<kScaled, true>(p, q_scale, scales, here, tops);
    } else {
      limit_slab<kScaled, false>(p, q_scale, scales, here, tops);
    }
  }
  return largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
}

// Scores -> weights, those of keys that are not seen 0. With scales, those of values multiply them,
// and they stay in `scores`. `total` becomes their sum without scales. Returns the scale that they
// have as whole numbers.
template <class Kv>
static __attribute__((noinline)) float weigh(float* scores, typename Kv::Factor* weights,
                                             int64_t slab_stride, Range slabs, Range seen,
                                             const float* v_scales, float peak, float& total) {
  F32 sums[kChains];
  for (int i = 0; i < kChains; i++)
    sums[i] = zero();
  Extent extent;
  for (int64_t slab = slabs.first; slab < slabs.last; slab += kSlab) {
    float* p = scores + slab / kSlab * slab_stride;
    typename Kv::Factor* to = weights + slab / kSlab * slab_stride;
    const Range here = {seen.first - slab, seen.last - slab};
    if (here.first <= 0 && here.last >= kSlab) {
      weigh_slab<Kv, true>(p, to, v_scales + slab, here, all(peak), sums, extent);
    } else {
      weigh_slab<Kv, false>(p, to, v_scales + slab, here, all(peak), sums, extent);
    }
  }
  total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  if constexpr (Kv::kHasScales)
    return extent.scale(Kv::kMost);
  return 1;
}

// Weights that stayed in `scores` -> whole numbers.
template <class Kv>
static __attribute__((noinline)) void put_weights(const float* scores, typename Kv::Factor* weights,
                                                  int64_t slab_stride, Range slabs, float scale) {
  const F32 inverse = inverse_scale(scale);
  for (int64_t slab = slabs.first; slab < slabs.last; slab += kSlab) {
    const int64_t at = slab / kSlab * slab_stride;
    for (int i = 0; i < kSlab; i += kLanes)
      Kv::put_floats(weights + at + i, mul(load(scores + at + i), inverse));
  }
}

// Scores -> weights of the queries 0 .. rows - 1 of one head, `seen(row)` being the keys that one
// sees, and `biases(row)` what its scores get. Each step is taken for all of them before the next:
// what one waits for at its end, the others have no need of. `results` of a query, which are
// `stride` floats apart, become the peak, the sum of the weights and their scale.
template <class Kv, class Seen, class Biases>
WEFT_INLINE void softmax(float* scores, typename Kv::Factor* weights, int64_t rows,
                         int64_t slab_stride, Range slabs, Seen seen, const float* q_scales,
                         const float* k_scales, const float* v_scales, float cap, Biases biases,
                         float* results, int64_t stride) {
  for (int64_t row = 0; row < rows; row++) {
    results[row * stride] = limit<Kv>(scores + row * kSlab, slab_stride, slabs, seen(row),
                                      q_scales[row], k_scales, cap, biases(row));
  }
  for (int64_t row = 0; row < rows; row++) {
    float* const result = results + row * stride;
    result[2] = weigh<Kv>(scores + row * kSlab, weights + row * kSlab, slab_stride, slabs,
                          seen(row), v_scales, result[0], result[1]);
  }
  for (int64_t row = 0; row < rows && Kv::kHasScales; row++) {
    put_weights<Kv>(scores + row * kSlab, weights + row * kSlab, slab_stride, slabs,
                    results[row * stride + 2]);
  }
}

// ---------------------------------------------------------------- what a query has seen so far

// A row of floats: the sums over values of `dims`, the peak, the sum of weights; of a segment, the
// scale of its weights.
WEFT_INLINE int64_t state_size(int64_t dims) { return dims + 16; }

static void clear_state(float* state, int64_t dims) {
  memset(state, 0, state_size(dims) * sizeof(float));
  state[dims] = kNothingSeen;
}

// state = both, relative to the larger peak. What has seen nothing changes nothing.
static __attribute__((noinline)) void merge(float* state, const float* next, int64_t dims) {
  const float peak = next[dims] > state[dims] ? next[dims] : state[dims];
  const F32 keep = power_of_two(all(state[dims] - peak));
  const F32 take = power_of_two(all(next[dims] - peak));
  for (int64_t d = 0; d < dims; d += kLanes) {
    store(state + d, muladd(load(state + d), keep, mul(load(next + d), take)));
  }
  float totals[kLanes];
  store(totals, muladd(all(state[dims + 1]), keep, mul(all(next[dims + 1]), take)));
  state[dims] = peak;
  state[dims + 1] = totals[0];
}

// The sums of a segment, whole numbers that become floats.
template <class Kv>
WEFT_INLINE void scale_sums(float* next, int64_t dims) {
  if constexpr (Kv::kHasScales) {
    for (int64_t d = 0; d < dims; d += kLanes) {
      const F32 x = to_f32(load_i32(reinterpret_cast<const int32_t*>(next + d)));
      store(next + d, mul(x, all(next[dims + 2])));
    }
  }
}

// The result of a query: head_dim of the `dims` sums, in the order of the dims.
template <class Kv>
static void finish(const float* state, int64_t dims, float* out, int64_t head_dim) {
  const F32 share = div(all(1.0f), all(state[dims + 1]));
  for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
    F32 a = mul(load(state + d), share);
    F32 b = mul(load(state + d + kLanes), share);
    if (Kv::kAlternates)
      alternate(a, b, a, b);
    store(out + d, a, int(head_dim - d));
    store(out + d + kLanes, b, int(head_dim - d - kLanes));
  }
}

// out = out sigmoid(gate); what is not finite makes it not finite, too.
static void gate_result(const float* gate, float* out, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const int n = int(head_dim - d);
    const F32 x = load(gate + d, n);
    const F32 gated = div(load(out + d, n), add(all(1.0f), exponential(sub(zero(), x))));
    store(out + d, muladd(x, zero(), gated), n);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
