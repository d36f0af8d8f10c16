// Products of rows of signed bytes with panels of 4-bit weights, where each group of inputs has a scale.
//
// Within a group the sums are integers (exact); they begin with what the 8 in (nibble - 8) takes away, and end times the
// group's scale in C. For many rows the nibbles are made bytes once, before all passes.
#pragma once

#include "gemm.h"

namespace weft {
namespace WEFT_NAMESPACE {

struct NibbleProduct {
  const int8_t* a;
  int64_t slab_stride;
  int64_t k;
  int64_t group;
  const char* b;  // [k / 8][kPanel][4] nibbles, or made bytes: [k / 4][kPanel][4]
  const float* scales;        // [k / group][kPanel]
  const int32_t* group_sums;  // [k / group][sums_stride], of the rows of A
  int64_t sums_stride;
  float* c;                   // added to
  int64_t c_stride;
  const char* ahead;
  int64_t ahead_step;
};

// One step of 8 nibbles, or of 4 bytes.
template <int R, int V, bool kAreBytes>
WEFT_INLINE void step_i4(I32 (&sums)[R][V], const int8_t* a, const char* b) {
  I32 w[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) hold(w[v] = load_i32((const int32_t*)(b + 4 * v * kLanes)));
#pragma GCC unroll 2
  for (int half = 0; half < (kAreBytes ? 1 : 2); half++) {
    I32 nibbles[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) nibbles[v] = kAreBytes ? w[v] : half ? high_nibbles(w[v]) : low_nibbles(w[v]);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const I32 x = four_bytes(a + r * kSlab + 4 * half);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = dot4_nibbles(sums[r][v], x, nibbles[v]);
    }
  }
}

template <int R, int V, bool kAreBytes>
static __attribute__((noinline)) void tile_i4(const NibbleProduct& p) {
  constexpr int kInputs = kAreBytes ? 4 : 8;
  const char* b = p.b;
  const char* ahead = p.ahead;
  for (int64_t k = 0, index = 0; k < p.k; k += p.group, index++) {
    const int8_t* a = p.a + k / kSlab * p.slab_stride + k % kSlab;
    const int32_t* starts = p.group_sums + index * p.sums_stride;
    I32 sums[R][V];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = all_i32(starts[r]);
    }
    for (int64_t i = 0; i < p.group; i += kInputs) {
      fetch(ahead, p.ahead_step);
      step_i4<R, V, kAreBytes>(sums, a + i, b);
      b += 4 * kPanel;
    }
    const float* scales = p.scales + index * kPanel;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        hold(sums[r][v]);  // else GCC keeps a copy of another type in the stack through the loop
        float* c = p.c + r * p.c_stride + v * kLanes;
        store(c, muladd(to_f32(sums[r][v]), load(scales + v * kLanes), load(c)));
      }
    }
  }
}

template <int R, bool kAreBytes>
static void tile_i4_of(int64_t rows, const NibbleProduct& p) {
  if (rows == R) {
    tile_i4<R, kTileVectors, kAreBytes>(p);
  } else if constexpr (R > 1) {
    tile_i4_of<R - 1, kAreBytes>(rows, p);
  }
}

// The product with one panel, for any number of rows.
template <bool kAreBytes>
static void multiply_i4(NibbleProduct p, int64_t rows) {
  const NibbleProduct whole = p;
  for (int v = 0; v < kVectorsOfPanel; v += kTileVectors) {
    p.b = whole.b + 4 * v * kLanes;
    p.scales = whole.scales + v * kLanes;
    for (int64_t pass = 0; pass < passes_of(rows); pass++) {
      const int64_t row = pass_start(rows, pass);
      p.a = whole.a + row * kSlab;
      p.group_sums = whole.group_sums + row;
      p.c = whole.c + row * p.c_stride + v * kLanes;
      tile_i4_of<kTileRows, kAreBytes>(pass_start(rows, pass + 1) - row, p);
      p.ahead += p.ahead_step * (p.k / (kAreBytes ? 4 : 8));
    }
  }
}

// [k / 8][kPanel][4] nibbles -> [k / 4][kPanel][4] bytes
static void make_bytes_of_nibbles(const char* nibbles, int64_t k, char* bytes) {
  for (int64_t i = 0; i < k; i += 8, nibbles += 4 * kPanel, bytes += 8 * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      const I32 both = load_i32((const int32_t*)nibbles + v * kLanes);
      store_i32((int32_t*)bytes + v * kLanes, low_nibbles(both));
      store_i32((int32_t*)bytes + kPanel + v * kLanes, high_nibbles(both));
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
