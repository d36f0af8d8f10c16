// The rows that a linear multiplies, made ready: normalised, in the type that its panels want, in
// the slabs of gemm.h.
//
//   data [padded_in / kSlab][rows][kSlab] float, bf16, shorts or bytes; zeros after the last input
//   shorts: x = short * scale; a scale for kShortGroup inputs, their largest |x| at kMostOfRow
//   bytes: x = byte * scale; a scale for 32 inputs, their largest |x| at 127
#pragma once

#include "gemm_codes.h"
#include "gemm_shorts.h"
#include "norm.h"

namespace weft {
namespace WEFT_NAMESPACE {

enum ActivationType { kFloats, kPairs, kShorts, kBytes };

WEFT_INLINE ActivationType activation_type(const PackedWeight& w) {
#if defined(WEFT_BF16_PRODUCTS)
  if (w.format == kBf16)
    return kPairs;
#endif
  if (w.format == kI16)
    return kShorts;
  return has_codes(w) ? kBytes : kFloats;
}

WEFT_INLINE int64_t bytes_of_activation(const PackedWeight& w) {
  const ActivationType type = activation_type(w);
  if (type == kFloats)
    return 4;
  return type == kBytes ? 1 : 2;
}

// Bytes have what gemm_codes.h wants for each block of the weight, shorts a scale for each group.
struct Activations {
  char* data;
  int64_t slab_stride;  // elements
  BlockOfRow* blocks;   // [padded_in / block][rows]
  float* scales;        // [padded_in / kShortGroup][rows], at the same place
  int64_t rows;
};

WEFT_INLINE int64_t blocks_of(const PackedWeight& w) {
  if (w.format == kI16)
    return short_groups_of(w);
  return has_codes(w) ? w.padded_in / block_of(w) : 0;
}

// Bytes that `lay_out_activations` wants, a multiple of 64; not more than LinearArgs.scratch has.
static int64_t size_of_activations(const PackedWeight& w, int64_t rows) {
  const int64_t row = w.padded_in * bytes_of_activation(w) + blocks_of(w) * sizeof(BlockOfRow);
  return ceil_div(rows * row, 64) * 64;
}

static Activations lay_out_activations(const PackedWeight& w, int64_t rows, void* memory) {
  char* data = static_cast<char*>(memory);
  char* const beside = data + rows * w.padded_in * bytes_of_activation(w);
  return {data, rows * kSlab, reinterpret_cast<BlockOfRow*>(beside),
          reinterpret_cast<float*>(beside), rows};
}

// One row on its way: x, or x times factor times the norm's weight.
struct InputRow {
  const float* x;
  const float* norm_weight;  // or null
  F32 factor;
  int64_t in;
  const int32_t* order;  // of the weight

  // Elements i .. i + kLanes, all of which are there, in the order of x.
  WEFT_INLINE F32 inside(const InputRow& row, int64_t i) {
    const F32 x = load(row.x + i);
    return row.norm_weight ? mul(mul(x, row.factor), load(row.norm_weight + i)) : x;
  }

  // The same in any order, 0 after the last.
  WEFT_INLINE F32 at(const InputRow& row, int64_t i) {
    const int n = int(least(row.in - i, kLanes));
    if (n <= 0)
      return zero();
    const F32 x = some(row, row.x, i, n);
    if (!row.norm_weight)
      return x;
    return mul(mul(x, row.factor), some(row, row.norm_weight, i, n));
  }

 private:
  WEFT_INLINE F32 some(const InputRow& row, const float* values, int64_t i, int n) {
    if (!row.order)
      return n == kLanes ? load(values + i) : load(values + i, n);
    float found[kLanes] = {};
    for (int j = 0; j < n; j++)
      found[j] = values[row.order[i + j]];
    return load(found);
  }
};

static void make_floats(const InputRow& row, int64_t padded_in, int64_t slab_stride, float* out) {
  for (int64_t k = 0; k < padded_in; k += kSlab, out += slab_stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kSlab; i += kLanes)
      store(out + i, InputRow::at(row, k + i));
  }
}

static void make_pairs(const InputRow& row, int64_t padded_in, int64_t slab_stride, bf16* out) {
  for (int64_t k = 0; k < padded_in; k += kSlab, out += slab_stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kSlab; i += kLanes)
      store_bf16(out + i, InputRow::at(row, k + i));
  }
}

static void make_shorts(const InputRow& row, int64_t padded_in, const Activations& to, int64_t t) {
  float x[kShortGroup];
  int16_t* out = reinterpret_cast<int16_t*>(to.data) + t * kSlab;
  for (int64_t k = 0; k < padded_in; k += kShortGroup) {
    const int64_t num = least(kShortGroup, padded_in - k);
    for (int64_t i = 0; i < num; i += kLanes)
      store(x + i, InputRow::at(row, k + i));
    const float peak = peak_of(x, num);
    const F32 factor = all(factor_of_shorts(peak, kMostOfRow));
    to.scales[k / kShortGroup * to.rows + t] = scale_of_shorts(peak, kMostOfRow);
    for (int64_t slab = 0; slab < num; slab += kSlab, out += to.slab_stride) {
#pragma GCC unroll 16
      for (int i = 0; i < kSlab; i += kLanes)
        store_shorts(out + i, mul(load(x + slab + i), factor));
    }
  }
}

// What one block of a row adds to the sums of its products; the kernels take `offset` off each
// code.
WEFT_INLINE BlockOfRow block_of_row(int32_t offset, float scale, int32_t total) {
  return {scale, -offset * total, scale * float(total)};
}

// Groups of a row that are rounded at once: their peaks are found together, by fewer instructions
// than one by one.
constexpr int kGroupsAtOnce = 4;
constexpr int64_t kInputsAtOnce = kGroupsAtOnce * kRowGroup;
constexpr int kHalvesAtOnce = 2 * kGroupsAtOnce;  // 16 inputs each: the smallest block

// Round kGroupsAtOnce groups from x[k] on. Where a number is not finite, the scale of its group is
// not.
template <bool kIsInside>
WEFT_INLINE void round_groups(const InputRow& row, int64_t k, int64_t num_slabs,
                              int64_t slab_stride, int8_t* to, float (&scales)[kGroupsAtOnce],
                              int32_t (&halves)[kHalvesAtOnce]) {
  constexpr int kVectors = kRowGroup / kLanes;  // of a group
  constexpr float kLeast = 1e-36f;              // below, the inverse of a scale would be infinite
  constexpr float kStep = 1 / 127.0f;
  F32 x[kGroupsAtOnce * kVectors];
  I32 peaks[kGroupsAtOnce];
#pragma GCC unroll 32
  for (int v = 0; v < kGroupsAtOnce * kVectors; v++) {
    x[v] = kIsInside ? InputRow::inside(row, k + v * kLanes) : InputRow::at(row, k + v * kLanes);
    // As integers: then infinities and NaN are the largest.
    const I32 magnitude = bits_of_magnitude(x[v]);
    peaks[v / kVectors] = v % kVectors ? larger(peaks[v / kVectors], magnitude) : magnitude;
  }
  float limits[kGroupsAtOnce];
  float inverses[kGroupsAtOnce];
  largest_of_four(peaks, reinterpret_cast<int32_t*>(limits));
  for (int g = 0; g < kGroupsAtOnce; g++) {
    const float limit = limits[g];
    inverses[g] = limit > kLeast ? 127 / limit : 0;
    scales[g] = limit <= kLeast ? 0 : limit * kStep;
  }
  int8_t bytes[kInputsAtOnce];
#pragma GCC unroll 32
  for (int v = 0; v < kGroupsAtOnce * kVectors; v++)
    x[v] = mul(x[v], all(inverses[v / kVectors]));
#pragma GCC unroll 8
  for (int v = 0; v < kGroupsAtOnce * kVectors; v += 4)
    store_i8(bytes + v * kLanes, x[v], x[v + 1], x[v + 2], x[v + 3]);
  for (int64_t slab = 0; slab < num_slabs; slab++)
    memcpy(to + slab * slab_stride, bytes + slab * kSlab, kSlab);
  sums_of_sixteen(bytes, halves);
  sums_of_sixteen(bytes + kSlab, halves + 4);
}

static void make_bytes(const PackedWeight& w, const InputRow& row, const Activations& to,
                       int64_t t) {
  const bool is_whole = block_of(w) == kRowGroup;
  const int32_t offset = offset_left(w);
  int8_t* data = reinterpret_cast<int8_t*>(to.data) + t * kSlab;
  BlockOfRow* block = to.blocks + t;
  for (int64_t k = 0; k < w.padded_in; k += kInputsAtOnce) {
    const int64_t num_slabs = least(kInputsAtOnce, w.padded_in - k) / kSlab;
    float scales[kGroupsAtOnce];
    int32_t halves[kHalvesAtOnce];
    if (!row.order && k + kInputsAtOnce <= row.in) {
      round_groups<true>(row, k, num_slabs, to.slab_stride, data, scales, halves);
    } else {
      round_groups<false>(row, k, num_slabs, to.slab_stride, data, scales, halves);
    }
    data += num_slabs * to.slab_stride;
    for (int g = 0; g < num_slabs * (kSlab / kRowGroup); g++) {
      const int32_t first = halves[2 * g];
      const int32_t second = halves[2 * g + 1];
      *block = block_of_row(offset, scales[g], is_whole ? first + second : first);
      block += to.rows;
      if (is_whole)
        continue;
      *block = block_of_row(offset, scales[g], second);
      block += to.rows;
    }
  }
}

static void make_row_ready(const LinearArgs& args, int64_t t, const Activations& to) {
  const PackedWeight& w = *args.weight;
  const float* x = args.x + t * args.x_stride;
  const InputRow row{x, args.norm_weight,
                     args.norm_weight ? all(inverse_rms(x, w.in_size, args.eps)) : all(1),
                     w.in_size, w.order};
  switch (activation_type(w)) {
    case kFloats:
      make_floats(row, w.padded_in, to.slab_stride, (float*)to.data + t * kSlab);
      break;
    case kPairs:
      make_pairs(row, w.padded_in, to.slab_stride, (bf16*)to.data + t * kSlab);
      break;
    case kShorts:
      make_shorts(row, w.padded_in, to, t);
      break;
    case kBytes:
      make_bytes(w, row, to, t);
  }
}

// Make rows first .. end - 1 of x ready.
static void make_ready(const LinearArgs& args, int64_t first, int64_t end, const Activations& to) {
  for (int64_t t = first; t < end; t++)
    make_row_ready(args, t, to);
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
