// Products of a few rows with a panel of codes as it is stored: all outputs at once, so that its
// codes are read once, from their beginning to their end, and its scales where they stand.
//
// It computes what gemm_codes.h does, by the same operations in the same order: a row has the same
// bits by itself and among others. What differs is what the processor waits for. With few rows that
// is memory: a pass of its own that makes scales floats, or one pass for each half of the outputs,
// would be seen.
#pragma once

#include "gemm_codes.h"

namespace weft {
namespace WEFT_NAMESPACE {

// With more vectors, their sums and those of integers are too many for the registers.
constexpr bool kHasStoredTiles = kVectorsOfPanel <= 4;
constexpr int64_t kLine = 64;
// Where one instruction multiplies bytes, several rows still wait for memory. So they have
// tiles, too, with the codes of most files.
#if defined(WEFT_ISA_AVX512) && defined(WEFT_VNNI)
constexpr int kStoredRows = kCodeRows;
#else
constexpr int kStoredRows = 1;
#endif

template <class Kind>
constexpr int kRowsOf = 1;
template <>
constexpr int kRowsOf<NibbleCodes<>> = kStoredRows;
template <>
constexpr int kRowsOf<SixCodes> = kStoredRows;

struct StoredProduct {
  int64_t rows;
  const int8_t* a;
  int64_t slab_stride;
  int64_t k;
  const char* codes;
  const uint8_t* table;
  const char* scales;   // as program.h draws them
  const char* coarse;   // the same
  float unit;           // of coarse factors
  bool has_starts;
  const BlockOfRow* x;  // [k / block][x_stride]
  int64_t x_stride;
  float* c;           // [rows][c_stride]
  int64_t c_stride;
  const char* ahead;  // memory that is wanted next, ..
  int64_t num_ahead;  // .. and how many lines of it to prefetch with each block
};

// The most rows that there is a tile for, with these codes. Where one instruction multiplies bytes,
// codes of eight bits are read faster by the other tiles, which prefetch less.
WEFT_INLINE int64_t most_stored_rows(const PackedWeight& w) {
  if (!kHasStoredTiles || w.scale_type == kScaleF32)
    return 0;
  if (w.format == kI4 && w.group == kRowGroup)
    return w.has_table ? 1 : kStoredRows;
  if (w.format == kI4 || w.format == kI8)
    return w.format == kI8 && w.group == kRowGroup && !kSameDot;
  if (w.group != kRowGroup && w.group != kRowGroup / 2)
    return 0;
  return w.format == kI6 ? kStoredRows : 1;
}

// Scales (or mins) of a block times `factors`, which only coarse ones have.
template <int64_t kType>
WEFT_INLINE void load_scales(const char* at, const F32 (&factors)[kVectorsOfPanel],
                             F32 (&scales)[kVectorsOfPanel]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectorsOfPanel; v++) {
    if constexpr (kType == kScaleCoarse) {
      scales[v] = mul(load_i8((const int8_t*)at + v * kLanes), factors[v]);
    } else {
      scales[v] = scales_at<kType>(at, nullptr, v * kLanes, 1);
    }
  }
}

template <class Kind, int kBlock, int64_t kType, bool kMins, int R>
static __attribute__((noinline)) void tile_stored(const StoredProduct& p) {
  constexpr int V = kVectorsOfPanel;
  constexpr int64_t kKinds = kMins ? 2 : 1;
  constexpr int64_t kBytes = kPanel * (kType == kScaleCoarse ? 1 : 2);  // of a group's scales
  const char* b = p.codes;
  const char* scales = p.scales;
  const char* coarse = p.coarse;
  const char* ahead = p.ahead;
  F32 c[R][V];
  F32 factors[V];
  F32 factors_of_mins[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    factors[v] = factors_of_mins[v] = zero();
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
      c[r][v] = zero();
  }
  const BlockOfRow* x = p.x;
  for (int64_t k = 0; k < p.k; coarse += kKinds * kPanel * 2) {
    if constexpr (kType == kScaleCoarse) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        factors[v] = coarse_at(coarse, v * kLanes, p.unit);
        if (kMins)
          factors_of_mins[v] = coarse_at(coarse, kPanel + v * kLanes, p.unit);
      }
    }
    for (const int64_t end = least(k + kCoarse, p.k); k < end; k += kBlock, x += p.x_stride) {
      for (const char* last = ahead + p.num_ahead * kLine; ahead < last; ahead += kLine)
        __builtin_prefetch(ahead, 0, 2);
      I32 sums[R][V];
      F32 w[V];
      const int8_t* slab = p.a + k / kSlab * p.slab_stride;
      sum_block<Kind, kBlock, R, V>(slab, int(k % kSlab), x, p.has_starts, p.table, b, sums);
      load_scales<kType>(scales, factors, w);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const F32 scale = all(x[r].scale);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          hold(sums[r][v]);
          c[r][v] = muladd(to_f32(sums[r][v]), mul(scale, w[v]), c[r][v]);
        }
      }
      if constexpr (kMins) {
        load_scales<kType>(scales + kBytes, factors_of_mins, w);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          const F32 factor = all(x[r].factor);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++)
            c[r][v] = muladd(factor, w[v], c[r][v]);
        }
      }
      scales += kKinds * kBytes;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      store(p.c + r * p.c_stride + v * kLanes, c[r][v]);
  }
}

template <class Kind, int kBlock, int64_t kType, bool kMins, int R>
static void stored_by_rows(const StoredProduct& p) {
  if (p.rows == R) {
    tile_stored<Kind, kBlock, kType, kMins, R>(p);
  } else if constexpr (R > 1) {
    stored_by_rows<Kind, kBlock, kType, kMins, R - 1>(p);
  }
}

template <class Kind, int kBlock, int64_t kType>
static void stored_by_mins(const PackedWeight& w, const StoredProduct& p) {
  constexpr int R = kRowsOf<Kind>;
  return w.has_mins ? stored_by_rows<Kind, kBlock, kType, true, R>(p)
                    : stored_by_rows<Kind, kBlock, kType, false, R>(p);
}

template <class Kind, int kBlock>
static void stored_by_scales(const PackedWeight& w, const StoredProduct& p) {
  switch (w.scale_type) {
    case kScaleF16:
      return stored_by_mins<Kind, kBlock, kScaleF16>(w, p);
    case kScaleBf16:
      return stored_by_mins<Kind, kBlock, kScaleBf16>(w, p);
    default:
      return stored_by_mins<Kind, kBlock, kScaleCoarse>(w, p);
  }
}

template <class Kind>
static void stored_by_block(const PackedWeight& w, const StoredProduct& p) {
  if (w.group == kRowGroup)
    return stored_by_scales<Kind, kRowGroup>(w, p);
  stored_by_scales<Kind, kRowGroup / 2>(w, p);
}

// The product of a few rows with one panel.
static void multiply_stored(const PackedWeight& w, const StoredProduct& p) {
  if constexpr (kHasStoredTiles) {
    const bool low = kSameDot || has_low_codes(w);
    switch (w.format) {
      case kI4:
        if (!w.has_table)
          return stored_by_scales<NibbleCodes<>, kRowGroup>(w, p);
        return low ? stored_by_scales<NibbleCodes<true, true>, kRowGroup>(w, p)
                   : stored_by_scales<NibbleCodes<true, kSameDot>, kRowGroup>(w, p);
      case kI3:
        if (!w.has_table)
          return stored_by_block<ThreeCodes<false, true>>(w, p);
        return low ? stored_by_block<ThreeCodes<true, true>>(w, p)
                   : stored_by_block<ThreeCodes<true, kSameDot>>(w, p);
      case kI2:
        return stored_by_block<TwoCodes>(w, p);
      case kI6:
        return stored_by_block<SixCodes>(w, p);
      default:
        return stored_by_scales<ByteCodes<kSameDot ? 128 : 255>, kRowGroup>(w, p);
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
