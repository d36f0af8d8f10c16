// Products of rows of signed bytes with panels of codes, where each block of inputs has scales.
//
//   C[r][c] += x_scale[r] * scale[c]  *  (sum of a * code - offset * sum of a)
//              `-------------------'     `-----------------------------------'
//                of block and row                 integers, exact
//            + x_scale[r] * (sum of a)  *  min[c]
//              `---------------------'
//                `BlockOfRow::factor`
//
// A block is the 32 inputs that share a scale of the rows, or 16 where groups of weights are so
// small. Where groups are of 64 inputs and more, 2 or 4 blocks are a span: their sums are added
// times x_scale, and multiplied by the weight's scale once. What the offset takes away
// (`BlockOfRow::start`) is added to the integers. Every element of C is one sum over blocks in
// rising order, whatever the number of rows: C stays in registers while a tile goes through a piece
// of k, and cutting k into pieces with `add` does not change it.
#pragma once

#include "codes.h"
#include "gemm.h"

namespace weft {
namespace WEFT_NAMESPACE {

#if defined(WEFT_ISA_AVX512)
constexpr int kCodeRows = 6;  // 6 x 2 sums and as many of C, 4 registers of B, 1 of A, of 32
#elif defined(WEFT_ISA_AVX2) && defined(WEFT_VNNI)
constexpr int kCodeRows = 5;  // C in memory: an instruction is waited for by ten sums
#else
constexpr int kCodeRows = 3;
#endif

// Bytes from one prefetch of what is wanted next to the following one. Where one instruction
// multiplies bytes, loads come so fast that they need the processor's buffers themselves, and it
// brings every other line on its own: one thread read at 23 GB/s, and at 18 with all lines
// prefetched. Elsewhere the lines in between come late: with AVX2 two threads read 1.2 to 1.4 times
// as fast if all are prefetched.
constexpr int64_t kAskEvery = kSameDot ? 128 : 64;

// Where several passes go through a panel, the first would wait for the second-level cache: codes
// are requested this many bytes ahead. Codes of few bits are worth that with a single pass, too,
// of more than one row. All others wait for memory, and longer if they ask.
constexpr int64_t kAskedBytes = 1024;

// Of a piece at most, so that their scales have room; mins stand a fixed way after them: a pointer
// less to keep in a register.
constexpr int64_t kBlocksOfPiece = 64;
constexpr int64_t kMinsAt = kBlocksOfPiece * kPanel;

// A block of a row, beside its bytes.
struct BlockOfRow {
  float scale;
  int32_t start;  // sum of the bytes times what the weight's offset takes away
  float factor;   // sum of the bytes times their scale, for mins
};

struct CodesProduct {
  const int8_t* a;
  int64_t slab_stride;
  int64_t k;
  int64_t block;
  int64_t span;
  const char* b;
  const float* scales;  // [k / span][kPanel]; kMinsAt after them as many mins
  bool has_mins;
  bool has_starts;
  const BlockOfRow* x;  // [k / block][x_stride]
  int64_t x_stride;
  float* c;
  int64_t c_stride;
  bool add;
  bool asks;  // B may not be in the first-level cache
  const char* ahead;
  int64_t ahead_step;
  const uint8_t* table;  // of kinds that have one
};

// ---------------------------------------------------------------- one step of k, by kind of codes

// What a step of k adds to the sums: R rows times codes of four inputs. `kLow`: none is above 128.
// Sums are held: GCC would add the products of several steps first, and there is no room for them
// in the registers of AVX2.
template <bool kLow, int R, int V>
WEFT_INLINE void add_four(I32 (&sums)[R][V], const int8_t* a, const I32 (&codes)[V]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const I32 x = four_bytes(a + r * kSlab);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      hold(sums[r][v] = kLow ? dot4_low(sums[r][v], x, codes[v]) : dot4(sums[r][v], x, codes[v]));
  }
}

// B [k / 8][kPanel][4] of two codes each; with `kTable` they are indices.
template <bool kTable = false, bool kLow = true>
struct NibbleCodes {
  static constexpr int kInputs = 8;
  static constexpr int kBytes = 4 * kPanel;
  static constexpr bool kIsNarrow = true;
  static constexpr bool kHasTable = kTable;
  // Those of a block fit into 16 bits: 16 products of at most 15 * 127.
  static constexpr bool kAddsPairs = kHasPairs && !kTable;

  template <int R, int V>
  WEFT_INLINE void step(I32 (&sums)[R][V], const int8_t* a, const char* b, I32 table, int) {
    I32 w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      hold(w[v] = load_i32((const int32_t*)(b + 4 * v * kLanes)));
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      I32 codes[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        codes[v] = half ? high_nibbles(w[v]) : low_nibbles(w[v]);
        if (kTable)
          codes[v] = shuffle_bytes(table, codes[v]);
      }
      if constexpr (!kAddsPairs) {
        add_four<kLow>(sums, a + 4 * half, codes);
        continue;
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const I32 x = four_bytes(a + r * kSlab + 4 * half);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
          hold(sums[r][v] = add_pairs(sums[r][v], x, codes[v]));
      }
    }
  }
};

// B [k / 16][kPanel][4] of four codes each.
struct TwoCodes {
  static constexpr int kInputs = 16;
  static constexpr int kBytes = 4 * kPanel;
  static constexpr bool kIsNarrow = true;
  static constexpr bool kHasTable = false;
  static constexpr bool kAddsPairs = false;

  template <int R, int V>
  WEFT_INLINE void step(I32 (&sums)[R][V], const int8_t* a, const char* b, I32, int) {
    quarter<0>(sums, a, b);
    quarter<1>(sums, a, b);
    quarter<2>(sums, a, b);
    quarter<3>(sums, a, b);
  }

 private:
  template <int kPart, int R, int V>
  WEFT_INLINE void quarter(I32 (&sums)[R][V], const int8_t* a, const char* b) {
    I32 codes[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      codes[v] = two_bits<kPart>(load_i32((const int32_t*)b + v * kLanes));
    add_four<true>(sums, a + 4 * kPart, codes);
  }
};

// B [k / 32][3][kPanel][4], in halves of 16 inputs; with `kTable` codes are indices.
template <bool kTable, bool kLow>
struct ThreeCodes {
  static constexpr int kInputs = 16;
  static constexpr int kBytes = 6 * kPanel;  // of a half: a row of low bits, and half a row
  static constexpr bool kIsNarrow = true;
  static constexpr bool kHasTable = kTable;
  static constexpr bool kAddsPairs = false;

  template <int R, int V>
  WEFT_INLINE void step(I32 (&sums)[R][V], const int8_t* a, const char* b, I32 table, int half) {
    const char* const start = b - half * kBytes;
    I32 twos[V];
    I32 ones[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const int32_t* from = (const int32_t*)start + v * kLanes;
      hold(twos[v] = load_i32(from + half * kPanel));
      hold(ones[v] = moved_right(load_i32(from + 2 * kPanel), 4 * half));
    }
    quarter<0>(sums, a, twos, ones, table);
    quarter<1>(sums, a, twos, ones, table);
    quarter<2>(sums, a, twos, ones, table);
    quarter<3>(sums, a, twos, ones, table);
  }

 private:
  template <int kPart, int R, int V>
  WEFT_INLINE void quarter(I32 (&sums)[R][V], const int8_t* a, const I32 (&twos)[V],
                           const I32 (&ones)[V], I32 table) {
    I32 codes[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      codes[v] = three_bits<kPart>(twos[v], ones[v]);
      if (kTable)
        codes[v] = shuffle_bytes(table, codes[v]);
    }
    add_four<kLow>(sums, a + 4 * kPart, codes);
  }
};

// B [k / 16][3][kPanel][4]
struct SixCodes {
  static constexpr int kInputs = 16;
  static constexpr int kBytes = 12 * kPanel;
  static constexpr bool kIsNarrow = true;
  static constexpr bool kHasTable = false;
  static constexpr bool kAddsPairs = false;

  template <int R, int V>
  WEFT_INLINE void step(I32 (&sums)[R][V], const int8_t* a, const char* b, I32, int) {
    quarter<0>(sums, a, b);
    quarter<1>(sums, a, b);
    quarter<2>(sums, a, b);
    quarter<3>(sums, a, b);
  }

 private:
  template <int kPart, int R, int V>
  WEFT_INLINE void quarter(I32 (&sums)[R][V], const int8_t* a, const char* b) {
    I32 codes[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const int32_t* from = (const int32_t*)b + v * kLanes;
      hold(codes[v] =
               six_bits<kPart>(load_i32(from + kPart / 2 * kPanel), load_i32(from + 2 * kPanel)));
    }
    add_four<true>(sums, a + 4 * kPart, codes);
  }
};

// B [k / 4][kPanel][4] of codes of at most kMost: 15, 63, 128 or 255.
template <int kMost>
struct ByteCodes {
  // How many products fit into 16 bits together.
  static constexpr int kNumPairs = kHasPairs ? 32767 / (2 * 127 * kMost) : 1;
  static constexpr bool kAddsPairs = kNumPairs >= kRowGroup / 4;
  static constexpr bool kAddsTwo = kNumPairs >= 2 && !kAddsPairs;
  static constexpr int kInputs = kAddsTwo ? 8 : 4;
  static constexpr int kBytes = kInputs * kPanel;
  static constexpr bool kIsNarrow = false;
  static constexpr bool kHasTable = false;

  template <int R, int V>
  WEFT_INLINE void step(I32 (&sums)[R][V], const int8_t* a, const char* b, I32, int) {
    I32 w[V];
    load_codes(b, w);
    if constexpr (kAddsTwo) {
      I32 next[V];
      load_codes(b + 4 * kPanel, next);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const I32 x = four_bytes(a + r * kSlab);
        const I32 y = four_bytes(a + r * kSlab + 4);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          const I32 pairs = add_pairs(add_pairs(zero_i32(), x, w[v]), y, next[v]);
          hold(sums[r][v] = sum_of_pairs(sums[r][v], pairs));
        }
      }
    } else if constexpr (kAddsPairs) {
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const I32 x = four_bytes(a + r * kSlab);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
          hold(sums[r][v] = add_pairs(sums[r][v], x, w[v]));
      }
    } else {
      add_four<kMost <= 128>(sums, a, w);
    }
  }

 private:
  template <int V>
  WEFT_INLINE void load_codes(const char* b, I32 (&codes)[V]) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      hold(codes[v] = load_i32((const int32_t*)(b + 4 * v * kLanes)));
  }
};

// B [k / 4][2][kPanel][4] of codes less 128: their sizes, then they themselves.
struct SignedBytes {
  static constexpr int kInputs = 4;
  static constexpr int kBytes = 8 * kPanel;
  static constexpr bool kIsNarrow = false;
  static constexpr bool kHasTable = false;
  static constexpr bool kAddsPairs = false;

  template <int R, int V>
  WEFT_INLINE void step(I32 (&sums)[R][V], const int8_t* a, const char* b, I32, int) {
    I32 sizes[V];
    I32 codes[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const int32_t* from = (const int32_t*)b + v * kLanes;
      hold(sizes[v] = load_i32(from));
      hold(codes[v] = load_i32(from + kPanel));
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const I32 x = four_bytes(a + r * kSlab);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        hold(sums[r][v] = dot4_signed(sums[r][v], x, sizes[v], codes[v]));
    }
  }
};

// ---------------------------------------------------------------- tiles

// Whether starts are added to sums at the end, and then only if there are some. Where one
// instruction multiplies four bytes and adds them to a sum, sums begin with starts instead: that
// takes no addition.
constexpr bool kStartsAtEnd = kHasPairs;

// The sums of integers of one block, from input `at` of a slab on.
template <class Kind, int kBlock, int R, int V>
WEFT_INLINE void sum_block(const int8_t* slab, int at, const BlockOfRow* x, bool has_starts,
                           const uint8_t* table_bytes, const char*& b, I32 (&sums)[R][V]) {
  const I32 table = Kind::kHasTable ? load_table(table_bytes) : zero_i32();
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      sums[r][v] = kStartsAtEnd ? zero_i32() : all_i32(x[r].start);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kBlock; i += Kind::kInputs) {
    const int half = (kBlock == kRowGroup ? i : at) / (kRowGroup / 2) % 2;
    Kind::template step<R, V>(sums, slab + at + i, b, table, half);
    b += Kind::kBytes;
  }
  if constexpr (Kind::kAddsPairs) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        sums[r][v] = sum_of_pairs(zero_i32(), sums[r][v]);
    }
  }
  if (!kStartsAtEnd || !has_starts)
    return;
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const I32 start = all_i32(x[r].start);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      sums[r][v] = add(sums[r][v], start);
  }
}

// What a block's sums of integers add to C.
template <int R, int V>
WEFT_INLINE void add_block(const BlockOfRow* x, const float* scales, bool has_mins,
                           I32 (&sums)[R][V], F32 (&c)[R][V]) {
  F32 w[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++)
    w[v] = load(scales + v * kLanes);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const F32 scale = all(x[r].scale);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      // Else GCC copies all sums to registers of another type, and back, at every step of k.
      hold(sums[r][v]);
      c[r][v] = muladd(to_f32(sums[r][v]), mul(scale, w[v]), c[r][v]);
    }
  }
  if (!has_mins)
    return;
#pragma GCC unroll 4
  for (int v = 0; v < V; v++)
    w[v] = load(scales + kMinsAt + v * kLanes);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const F32 factor = all(x[r].factor);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      c[r][v] = muladd(factor, w[v], c[r][v]);
  }
}

// R rows and V vectors of columns, in blocks of kBlock inputs. What a slab does has no loop at run
// time: one that ends after few steps would be mispredicted too often. Few addresses are kept, so
// that they stay in registers.
template <class Kind, int kBlock, int R, int V>
static __attribute__((noinline)) void tile_codes(const CodesProduct& p) {
  F32 c[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      c[r][v] = p.add ? load(p.c + r * p.c_stride + v * kLanes) : zero();
  }
  const int8_t* slab = p.a;
  const char* b = p.b;
  const char* ahead = p.ahead;
  const float* scales = p.scales;
  const BlockOfRow* x = p.x;
  for (int64_t k = 0; k < p.k; k += kSlab, slab += p.slab_stride) {
#pragma GCC unroll 4
    for (int at = 0; at < kSlab; at += kBlock) {
      for (const char* end = ahead + p.ahead_step; ahead < end; ahead += kAskEvery)
        __builtin_prefetch(ahead, 0, 2);
      if (R > 1 && p.asks) {
        const char* soon = b + kAskedBytes;
#pragma GCC unroll 16
        for (int i = 0; i < kBlock / Kind::kInputs * Kind::kBytes; i += 64)
          __builtin_prefetch(soon + i, 0, 3);
      }
      I32 sums[R][V];
      sum_block<Kind, kBlock, R, V>(slab, at, x, p.has_starts, p.table, b, sums);
      add_block<R, V>(x, scales, p.has_mins, sums, c);
      x += p.x_stride;
      scales += kPanel;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      store(p.c + r * p.c_stride + v * kLanes, c[r][v]);
  }
}

// The same in spans of several blocks. C is in memory: registers hold what the blocks of a span
// give.
template <class Kind, int R, int V>
static __attribute__((noinline)) void tile_spans(const CodesProduct& p) {
  const int8_t* slab = p.a;
  const char* b = p.b;
  const char* ahead = p.ahead;
  const float* scales = p.scales;
  const BlockOfRow* x = p.x;
  bool adds = p.add;
  for (int64_t k = 0; k < p.k; adds = true, scales += kPanel) {
    F32 total[R][V];
    float factors[R] = {};
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        total[r][v] = zero();
    }
    for (const int64_t end = least(k + p.span, p.k); k < end; k += kSlab, slab += p.slab_stride) {
#pragma GCC unroll 2
      for (int at = 0; at < kSlab; at += kRowGroup) {
        for (const char* last = ahead + p.ahead_step; ahead < last; ahead += kAskEvery)
          __builtin_prefetch(ahead, 0, 2);
        I32 sums[R][V];
        sum_block<Kind, kRowGroup, R, V>(slab, at, x, p.has_starts, p.table, b, sums);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          const F32 scale = all(x[r].scale);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) {
            hold(sums[r][v]);
            total[r][v] = muladd(to_f32(sums[r][v]), scale, total[r][v]);
          }
        }
        for (int r = 0; p.has_mins && r < R; r++)
          factors[r] += x[r].factor;
        x += p.x_stride;
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const F32 scale = load(scales + v * kLanes);
      const F32 least_weight = p.has_mins ? load(scales + kMinsAt + v * kLanes) : zero();
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        float* c = p.c + r * p.c_stride + v * kLanes;
        const F32 value = muladd(total[r][v], scale, adds ? load(c) : zero());
        store(c, p.has_mins ? muladd(all(factors[r]), least_weight, value) : value);
      }
    }
  }
}

template <class Kind, int R>
static void tile_codes_of(int64_t rows, const CodesProduct& p) {
  if (rows == R) {
    if (p.span > kRowGroup) {
      tile_spans<Kind, R, kTileVectors>(p);
    } else if (p.block == kRowGroup) {
      tile_codes<Kind, kRowGroup, R, kTileVectors>(p);
    } else {
      tile_codes<Kind, kRowGroup / 2, R, kTileVectors>(p);
    }
  } else if constexpr (R > 1) {
    tile_codes_of<Kind, R - 1>(rows, p);
  }
}

// Rows are cut into passes as `pass_start` cuts them, of up to kCodeRows.
WEFT_INLINE int64_t code_passes_of(int64_t rows) { return ceil_div(rows, kCodeRows); }

// Bytes to prefetch with each block, a multiple of kAskEvery, so that all `bytes` are there after
// all passes.
WEFT_INLINE int64_t ahead_step_of_codes(int64_t bytes, int64_t num_blocks, int64_t rows) {
  const int64_t times = num_blocks * code_passes_of(rows) * (kVectorsOfPanel / kTileVectors);
  return ceil_div(bytes, times * kAskEvery) * kAskEvery;
}

// The product with one panel, for any number of rows. `p.ahead` are `bytes_ahead` that are wanted
// next.
template <class Kind>
static void multiply_codes(CodesProduct p, int64_t rows, int64_t bytes_ahead) {
  const CodesProduct all = p;
  const int64_t passes = code_passes_of(rows);
  const int64_t num_blocks = p.k / p.block;
  const char* const end = p.ahead + bytes_ahead;
  p.asks &= passes > 1 || Kind::kIsNarrow;
  p.ahead_step = ahead_step_of_codes(bytes_ahead, num_blocks, rows);
  for (int v = 0; v < kVectorsOfPanel; v += kTileVectors) {
    p.b = all.b + 4 * v * kLanes;
    p.scales = all.scales + v * kLanes;
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t row = rows * pass / passes;
      p.a = all.a + row * kSlab;
      p.x = all.x + row;
      p.c = all.c + row * p.c_stride + v * kLanes;
      tile_codes_of<Kind, kCodeRows>(rows * (pass + 1) / passes - row, p);
      p.ahead += p.ahead_step * num_blocks;
      if (p.ahead >= end)
        p.ahead_step = 0;
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
