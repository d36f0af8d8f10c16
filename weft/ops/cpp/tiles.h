// Products of many rows of bf16 with panels of bf16 by the matrix unit of a core (AMX), in tiles of
// 16 x 16 sums:
//
//                             kPanel columns of B, 32 inputs:   tile 6   tile 7
//   16 rows of A, 32 inputs:  tile 4                            tile 0   tile 1
//   the next 16 rows:         tile 5                            tile 2   tile 3
//
// The panels of program.h are made as the unit wants them. A is kept so that it is read from its
// beginning to its end: [rows / kMatrixRows][k / kMatrixInputs][kMatrixRows][kMatrixInputs]. Every
// sum is over k in rising order, whatever the number of rows.
#pragma once

#include "activations.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kMatrixRows = 32;    // of a step: two tiles
constexpr int64_t kMatrixInputs = 32;  // of a tile, 64 bytes
// That go through a panel before the next one, at most; ..
constexpr int64_t kMatrixBlockRows = 384;
// .. half of the second-level cache of processors with the unit.
constexpr int64_t kMatrixBlockBytes = 1 << 20;
// Inputs of a panel, 32 KB: they stay in the first-level cache for these rows.
constexpr int64_t kMatrixPiece = 512;

#if defined(WEFT_BF16) && !defined(WEFT_EMULATE) && defined(__linux__)

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// While it lives, this thread uses the unit.
class Tiles {
 public:
  Tiles() {
    const TileShapes shapes;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~Tiles() { asm volatile("tilerelease"); }
};

#define WEFT_TILE_CLEAR(tile) asm volatile("tilezero %%tmm" #tile : :)
#define WEFT_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(int64_t(stride)) : "memory")
#define WEFT_TILE_STORE(tile, to, stride)             \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" \
               :                                      \
               : "r"(to), "r"(int64_t(stride))        \
               : "memor"                              \
                 "y")
#define WEFT_TILE_DOT(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)

// sums[kMatrixRows][kPanel] of rows at `a` and k inputs of a panel; added to the sums if `add`. On
// the way `lines` of memory at `ahead` are prefetched with each step.
static void multiply_tiles(const bf16* a, int64_t k, const bf16* panel, bool add, float* sums,
                           int64_t sums_stride, const char* ahead, int64_t lines) {
  constexpr int64_t kRowBytes = kMatrixInputs * 2;
  constexpr int64_t kPairBytes = kPanel * 4;
  constexpr int64_t kSumBytes = 16 * 4;
  char* const to = reinterpret_cast<char*>(sums);
  const int64_t stride = sums_stride * 4;
  if (add) {
    WEFT_TILE_LOAD(0, to, stride);
    WEFT_TILE_LOAD(1, to + kSumBytes, stride);
    WEFT_TILE_LOAD(2, to + 16 * stride, stride);
    WEFT_TILE_LOAD(3, to + 16 * stride + kSumBytes, stride);
  } else {
    WEFT_TILE_CLEAR(0);
    WEFT_TILE_CLEAR(1);
    WEFT_TILE_CLEAR(2);
    WEFT_TILE_CLEAR(3);
  }
  for (int64_t i = 0; i < k; i += kMatrixInputs) {
    const char* rows = reinterpret_cast<const char*>(a + i * kMatrixRows);
    const char* pairs = reinterpret_cast<const char*>(panel + i * kPanel);
    for (int64_t line = 0; line < lines; line++, ahead += 64)
      __builtin_prefetch(ahead, 0, 2);
    WEFT_TILE_LOAD(4, rows, kRowBytes);
    WEFT_TILE_LOAD(6, pairs, kPairBytes);
    WEFT_TILE_DOT(0, 4, 6);
    WEFT_TILE_LOAD(7, pairs + 64, kPairBytes);
    WEFT_TILE_DOT(1, 4, 7);
    WEFT_TILE_LOAD(5, rows + 16 * kRowBytes, kRowBytes);
    WEFT_TILE_DOT(2, 5, 6);
    WEFT_TILE_DOT(3, 5, 7);
  }
  WEFT_TILE_STORE(0, to, stride);
  WEFT_TILE_STORE(1, to + kSumBytes, stride);
  WEFT_TILE_STORE(2, to + 16 * stride, stride);
  WEFT_TILE_STORE(3, to + 16 * stride + kSumBytes, stride);
}

#undef WEFT_TILE_CLEAR
#undef WEFT_TILE_LOAD
#undef WEFT_TILE_STORE
#undef WEFT_TILE_DOT

WEFT_INLINE bool takes_tiles(const LinearArgs& args, int64_t num_rows) {
  // Rows are made ready as bf16, with those that fill up the last step: there is memory for that
  // from 32 rows on.
  return args.may_round && args.weight->format == kBf16 && num_rows >= kMatrixRows &&
         has_matrix_unit();
}

#else

class Tiles {};

static void multiply_tiles(const bf16*, int64_t, const bf16*, bool, float*, int64_t, const char*,
                           int64_t) {}

WEFT_INLINE bool takes_tiles(const LinearArgs&, int64_t) { return false; }

#endif

// Rows first .. end - 1 of x, rounded to bf16.
static void round_rows(const LinearArgs& args, int64_t first, int64_t end, bf16* to) {
  const PackedWeight& w = *args.weight;
  for (int64_t t = first; t < end; t++) {
    const float* x = args.x + t * args.x_stride;
    const F32 factor = args.norm_weight ? all(inverse_rms(x, w.in_size, args.eps)) : all(1);
    const InputRow row{x, args.norm_weight, factor, w.in_size, w.order};
    bf16* out = to + t / kMatrixRows * kMatrixRows * w.padded_in + t % kMatrixRows * kMatrixInputs;
    for (int64_t k = 0; k < w.padded_in; k += kMatrixInputs, out += kMatrixRows * kMatrixInputs) {
#pragma GCC unroll 8
      for (int i = 0; i < kMatrixInputs; i += kLanes)
        store_bf16(out + i, InputRow::at(row, k + i));
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
