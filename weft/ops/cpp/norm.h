// RMSNorm of rows of floats.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

// 1 / sqrt(mean + eps) of a mean of squares. Where that is beyond the range of floats it is no
// number: 1 / inf would make a row of zeros, which looks sound, of one that is not.
WEFT_INLINE float inverse_root(float mean, float eps) {
  return (1 + (mean - mean)) / sqrtf(mean + eps);
}

// The mean of x x, summed in an order that depends on the size alone.
static float mean_of_squares(const float* x, int64_t size) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const F32 value = load(x + i + j * kLanes);
      sums[j] = muladd(value, value, sums[j]);
    }
  }
  for (; i < size; i += kLanes) {
    const F32 value = load(x + i, int(least(size - i, kLanes)));
    sums[0] = muladd(value, value, sums[0]);
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / float(size);
}

// 1 / sqrt(mean(x x) + eps)
static float inverse_rms(const float* x, int64_t size, float eps) {
  return inverse_root(mean_of_squares(x, size), eps);
}

static void norm(const NormArgs& args, const StepArgs& step, Team& team) {
  const bool adds = args.add_scale != 0;
  const F32 scale = all(args.add_scale);
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* x = args.x + t * args.x_stride;
    float* out = args.out + t * args.out_stride;
    const F32 factor = all(inverse_rms(x, args.size, args.eps));
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      const F32 normed = mul(mul(load(x + i, n), factor), load(args.weight + i, n));
      store(out + i, adds ? muladd(normed, scale, load(out + i, n)) : normed, n);
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
