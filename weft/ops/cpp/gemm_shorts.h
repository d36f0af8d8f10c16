// Products of rows with panels of 12 bits, both as shorts: about as exact as bfloat16, and twice as
// fast as floats where a processor multiplies 16 pairs of shorts by one instruction and 8 floats by
// another.
//
//   C[r][c] += x_scale[r] * scale[c] * (sum of a * b)        for each kShortGroup inputs
//              `-------------------'   `------------'
//                of group and row       integers, exact
//
// A group's integers are at most kMostOfRow * kMostOfWeight * kShortGroup < 2^31. Every element of
// C is one sum over groups in rising order, whatever the number of rows.
#pragma once

#include "codes.h"
#include "gemm.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr float kMostOfRow = 4095;
constexpr float kMostOfWeight = 2047;

// The largest of `num` floats, a multiple of kLanes; not finite if one of them is not.
WEFT_INLINE float peak_of(const float* x, int64_t num) {
  I32 peak = zero_i32();
  for (int64_t i = 0; i < num; i += kLanes)
    peak = larger(peak, bits_of_magnitude(load(x + i)));
  const int32_t bits = largest(peak);
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

// What numbers up to `peak` are multiplied by to become whole numbers up to `most`; 0 for too small
// ones.
WEFT_INLINE float factor_of_shorts(float peak, float most) {
  return peak > 1e-33f ? most / peak : 0;
}

// What a whole number stands for.
WEFT_INLINE float scale_of_shorts(float peak, float most) {
  return peak <= 1e-33f ? 0 : peak / most;
}

// sums[rows][kPanel] (+)= what the integers of a group say.
static void take_shorts(const int32_t* integers, const float* x_scales, const float* scales,
                        int64_t rows, bool add, float* sums, int64_t sums_stride) {
  for (int64_t r = 0; r < rows; r++) {
    const F32 x = all(x_scales[r]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      float* const to = sums + r * sums_stride + v * kLanes;
      const F32 value = to_f32(load_i32(integers + r * kPanel + v * kLanes));
      store(to, muladd(value, mul(x, load(scales + v * kLanes)), add ? load(to) : zero()));
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
