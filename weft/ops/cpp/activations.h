// The rows that a linear multiplies, made ready: normalised, in the type that its panels want, in the slabs of gemm.h.
//
//   data [padded_in / kSlab][rows][kSlab] float, bf16 or bytes; zeros behind the last input
//   bytes: x = byte * scales[row], with the row's largest |x| at 127; for kI4 also group_sums [padded_in / group][rows]
#pragma once

#include "gemm.h"
#include "norm.h"

namespace weft {
namespace WEFT_NAMESPACE {

enum ActivationType { kFloats, kPairs, kBytes };

WEFT_INLINE ActivationType activation_type(const Weight& w) {
#if defined(WEFT_BF16)
  if (w.format == kBf16) return kPairs;
#endif
  return w.format == kI8 || w.format == kI4 ? kBytes : kFloats;
}

WEFT_INLINE int64_t bytes_of_activation(const Weight& w) {
  const ActivationType type = activation_type(w);
  return type == kFloats ? 4 : type == kPairs ? 2 : 1;
}

struct Activations {
  char* data;
  int64_t slab_stride;  // elements
  float* scales;        // [rows]
  int32_t* group_sums;  // kI4: sum of the bytes of a group times -8, since nibbles stand for nibble - 8
  int64_t rows;
};

// Bytes that `place_activations` wants, a multiple of 64; not more than LinearArgs.scratch has.
static int64_t size_of_activations(const Weight& w, int64_t rows) {
  const int64_t row = w.padded_in * bytes_of_activation(w) + 4 + (w.format == kI4 ? w.padded_in / w.group * 4 : 0);
  return ceil_div(rows * row, 64) * 64;
}

static Activations place_activations(const Weight& w, int64_t rows, void* memory) {
  char* data = static_cast<char*>(memory);
  float* scales = reinterpret_cast<float*>(data + rows * w.padded_in * bytes_of_activation(w));
  return {data, rows * kSlab, scales, reinterpret_cast<int32_t*>(scales + rows), rows};
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

// Returns the scale: that of a row which is not finite is not finite either.
static float make_bytes(const InputRow& row, int64_t padded_in, int64_t slab_stride, bool is_unsigned, int8_t* out) {
  F32 peak = zero(), poison = zero();
  for (int64_t k = 0; k < padded_in; k += kLanes) {
    const F32 x = InputRow::at(row, k);
    peak = larger(peak, magnitude(x));
    poison = muladd(x, zero(), poison);
  }
  const float limit = largest(peak) + sum(poison);
  const F32 inverse = all(limit > 0 ? 127 / limit : 0);
  for (int64_t k = 0; k < padded_in; k += kSlab, out += slab_stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kSlab; i += kLanes) {
      store_i8(out + i, mul(InputRow::at(row, k + i), inverse));
      for (int j = i; j < i + kLanes && is_unsigned; j++) out[j] = int8_t(out[j] ^ 0x80);  // x + 128
    }
  }
  return limit / 127;
}

static void make_group_sums(const Weight& w, const Activations& to, int64_t t) {
  for (int64_t group = 0; group < w.padded_in / w.group; group++) {
    const int64_t k = group * w.group;
    const int8_t* bytes = reinterpret_cast<int8_t*>(to.data) + k / kSlab * to.slab_stride + t * kSlab + k % kSlab;
    int32_t total = 0;
    for (int64_t i = 0; i < w.group; i++) total += bytes[i];
    to.group_sums[group * to.rows + t] = -8 * total;
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
    case kBytes:
      const bool is_unsigned = w.format == kI8 && kUnsignedActivations;
      to.scales[t] = make_bytes(row, w.padded_in, to.slab_stride, is_unsigned, (int8_t*)to.data + t * kSlab);
      if (w.format == kI4) make_group_sums(w, to, t);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
