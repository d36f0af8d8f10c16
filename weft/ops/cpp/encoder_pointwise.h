// Activations that a linear applies to what it writes, and the cap of logits. What is not a number
// stays so: `larger` and `smaller` then return their second argument.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

// The share of the normal distribution below x, with an error below 2e-7: 1/2 + x h(x x), where
// h(t) = erf(sqrt(t / 2)) / (2 sqrt(t)) by its Chebyshev polynomial of degree 14 for t in 0 ..
// 5.6^2, in u = 2 t / 5.6^2 - 1. Farther out it is 0 or 1, exactly.
WEFT_INLINE F32 normal_share(F32 x) {
  constexpr float kFar = 5.6f;
  constexpr float kSeries[] = {
      0.126259595f,   -0.0630516261f,   0.0469812714f,   -0.0383331813f,  0.0319629125f,
      -0.0264431667f, 0.0209875926f,    -0.0151381595f,  0.0108436914f,   -0.0090256827f,
      0.00555132562f, -0.000949796871f, 0.000633277523f, -0.00188664778f, 0.000894328463f,
  };
  const F32 near = smaller(larger(x, all(-kFar)), all(kFar));
  const F32 u = muladd(mul(near, near), all(2 / (kFar * kFar)), all(-1.0f));
  F32 h = all(kSeries[14]);
#pragma GCC unroll 14
  for (int i = 13; i >= 0; i--)
    h = muladd(h, u, all(kSeries[i]));
  return smaller(larger(muladd(near, h, all(0.5f)), zero()), all(1.0f));
}

// Source: arXiv:1606.08415.
WEFT_INLINE F32 gelu(F32 x) { return mul(x, normal_share(x)); }

// 1 - 2 / (e^2x + 1); of what is not a number, that.
WEFT_INLINE F32 hyperbolic_tangent(F32 x) {
  const F32 near = smaller(all(10.0f), larger(all(-10.0f), x));
  const F32 power = exponential(add(near, near));
  return add(sub(all(1.0f), div(all(2.0f), add(power, all(1.0f)))), sub(near, near));
}

// x (1 + tanh(y)) / 2 = x / (1 + e^-2y)
WEFT_INLINE F32 gelu_by_tanh(F32 x) {
  const F32 inner = muladd(mul(mul(x, x), x), all(0.044715f), x);
  return div(x, add(all(1.0f), exponential(mul(inner, all(-1.59576912f)))));
}

WEFT_INLINE F32 gate_activated(int64_t epilogue, F32 gate) {
  switch (epilogue) {
    case kGatedGelu:
      return gelu(gate);
    case kGatedGeluTanh:
      return gelu_by_tanh(gate);
    default:
      return silu(gate);
  }
}

WEFT_INLINE F32 activated(int64_t epilogue, F32 x) {
  switch (epilogue) {
    case kGelu:
      return gelu(x);
    case kGeluTanh:
      return gelu_by_tanh(x);
    case kRelu:
      return larger(zero(), x);
    case kRelu2: {
      const F32 positive = larger(zero(), x);
      return mul(positive, positive);
    }
    case kQuickGelu:
      return div(x, add(all(1.0f), exponential(mul(x, all(-kQuickGeluSlope)))));
    case kTanh:
      return hyperbolic_tangent(x);
    default:
      return x;
  }
}

static void scale_logits(const ScaleLogitsArgs& args, const StepArgs& step, Team& team) {
  constexpr int64_t kPiece = 8192;
  const int64_t pieces = ceil_div(args.vocab_size, kPiece);
  const F32 inner = all(args.cap == 0 ? args.scale : args.scale / args.cap);
  const F32 cap = all(args.cap);
  for (int64_t index; (index = team.take()) < step.num_tokens * pieces;) {
    const int64_t first = index % pieces * kPiece;
    const int64_t end = least(first + kPiece, args.vocab_size);
    float* row = args.logits + index / pieces * args.stride;
    for (int64_t i = first; i < end; i += kLanes) {
      const int n = int(least(end - i, kLanes));
      const F32 scaled = mul(load(row + i, n), inner);
      store(row + i, args.cap == 0 ? scaled : mul(cap, hyperbolic_tangent(scaled)), n);
    }
  }
}

static void limit(const LimitArgs& args, const StepArgs& step, Team& team) {
  const F32 low = all(args.limits[0]);
  const F32 high = all(args.limits[1]);
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* const x = args.x + t * args.x_stride;
    float* const out = args.out + t * args.out_stride;
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      const F32 limited = smaller(high, larger(low, load(x + i, n)));
      store(out + i, activated(args.activation, limited), n);
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
