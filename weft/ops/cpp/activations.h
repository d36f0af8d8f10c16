// The rows that a linear multiplies, made ready: normalised, in the type that its panels want, in the slabs of gemm.h.
//
//   data [padded_in / kSlab][rows][kSlab] float, bf16 or bytes; zeros behind the last input
//   bytes: x = byte * scale, with a scale for each 32 inputs of a row that puts the largest |x| of them at 127
#pragma once

#include "codes.h"
#include "gemm.h"
#include "norm.h"

namespace weft {
namespace WEFT_NAMESPACE {

enum ActivationType { kFloats, kPairs, kBytes };

WEFT_INLINE ActivationType activation_type(const Weight& w) {
#if defined(WEFT_BF16)
  if (w.format == kBf16) return kPairs;
#endif
  return has_codes(w) ? kBytes : kFloats;
}

WEFT_INLINE int64_t bytes_of_activation(const Weight& w) {
  const ActivationType type = activation_type(w);
  return type == kFloats ? 4 : type == kPairs ? 2 : 1;
}

// The last three are for each block of the weight, [padded_in / block][rows], as gemm_codes.h wants them.
struct Activations {
  char* data;
  int64_t slab_stride;  // elements
  float* scales;
  int32_t* starts;  // sum of the bytes times what the weight's offset takes away
  float* factors;   // sum of the bytes times their scale, for mins
  int64_t rows;
};

WEFT_INLINE int64_t blocks_of(const Weight& w) { return has_codes(w) ? w.padded_in / block_of(w) : 0; }

// Bytes that `place_activations` wants, a multiple of 64; not more than LinearArgs.scratch has.
static int64_t size_of_activations(const Weight& w, int64_t rows) {
  const int64_t row = w.padded_in * bytes_of_activation(w) + blocks_of(w) * 12;
  return ceil_div(rows * row, 64) * 64;
}

static Activations place_activations(const Weight& w, int64_t rows, void* memory) {
  char* data = static_cast<char*>(memory);
  float* scales = reinterpret_cast<float*>(data + rows * w.padded_in * bytes_of_activation(w));
  int32_t* starts = reinterpret_cast<int32_t*>(scales + blocks_of(w) * rows);
  float* factors = reinterpret_cast<float*>(starts + blocks_of(w) * rows);
  return {data, rows * kSlab, scales, starts, factors, rows};
}

// One row on its way: x, or x times factor times the norm's weight.
struct InputRow {
  const float* x;
  const float* norm_weight;  // or null
  F32 factor;
  int64_t in;

  // Elements i .. i + kLanes, 0 behind the last.
  WEFT_INLINE F32 at(const InputRow& row, int64_t i) {
    const int n = int(least(row.in - i, kLanes));
    if (n <= 0) return zero();
    const F32 x = n == kLanes ? load(row.x + i) : load(row.x + i, n);
    if (!row.norm_weight) return x;
    return mul(mul(x, row.factor), n == kLanes ? load(row.norm_weight + i) : load(row.norm_weight + i, n));
  }
};

static void make_floats(const InputRow& row, int64_t padded_in, int64_t slab_stride, float* out) {
  for (int64_t k = 0; k < padded_in; k += kSlab, out += slab_stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kSlab; i += kLanes) store(out + i, InputRow::at(row, k + i));
  }
}

static void make_pairs(const InputRow& row, int64_t padded_in, int64_t slab_stride, bf16* out) {
  for (int64_t k = 0; k < padded_in; k += kSlab, out += slab_stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kSlab; i += kLanes) store_bf16(out + i, InputRow::at(row, k + i));
  }
}

// What one block of a row adds to the sums of its products; the kernels take `offset` off each code.
WEFT_INLINE void note_block(const Activations& to, int64_t at, int32_t offset, float scale, int32_t total) {
  to.scales[at] = scale;
  to.starts[at] = -offset * total;
  to.factors[at] = scale * float(total);
}

// Where a number is not finite, the scale of its block is not, and then no product of the row is.
static void make_bytes(const Weight& w, const InputRow& row, const Activations& to, int64_t t) {
  constexpr int kVectors = kRowGroup / kLanes;
  constexpr float kLeast = 1e-36f;  // below, the inverse of a scale would be infinite
  constexpr float kStep = 1 / 127.0f;
  const bool is_whole = block_of(w) == kRowGroup;
  const int32_t offset = int32_t(w.offset) - (has_low_codes(w) ? 0 : kTakenOff);
  int64_t at = t;
  for (int64_t k = 0; k < w.padded_in; k += kRowGroup) {
    F32 x[kVectors];
    I32 peak = all_i32(0);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
      x[v] = InputRow::at(row, k + v * kLanes);
      peak = larger(peak, bits_of_magnitude(x[v]));  // as integers: then infinities and NaN are the largest
    }
    const int32_t bits = largest(peak);
    float limit;
    memcpy(&limit, &bits, 4);
    const F32 inverse = all(limit > kLeast ? 127 / limit : 0);
    int8_t* bytes = reinterpret_cast<int8_t*>(to.data) + k / kSlab * to.slab_stride + t * kSlab + k % kSlab;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) store_i8(bytes + v * kLanes, mul(x[v], inverse));
    const float scale = limit <= kLeast ? 0 : limit * kStep;
    const int32_t first = sum_of_bytes(bytes), second = sum_of_bytes(bytes + 16);
    note_block(to, at, offset, scale, is_whole ? first + second : first);
    at += to.rows;
    if (is_whole) continue;
    note_block(to, at, offset, scale, second);
    at += to.rows;
  }
}

// Make row t of x ready.
static void make_ready(const LinearArgs& args, int64_t t, const Activations& to) {
  const Weight& w = *args.weight;
  const float* x = args.x + t * args.x_stride;
  const InputRow row{x, args.norm_weight, args.norm_weight ? all(inverse_rms(x, w.in, args.eps)) : all(1), w.in};
  switch (activation_type(w)) {
    case kFloats: make_floats(row, w.padded_in, to.slab_stride, (float*)to.data + t * kSlab); break;
    case kPairs: make_pairs(row, w.padded_in, to.slab_stride, (bf16*)to.data + t * kSlab); break;
    case kBytes: make_bytes(w, row, to, t);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
