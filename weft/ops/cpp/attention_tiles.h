// Attention of encoders by the matrix unit, in bfloat16: of tokens that see all of their stretch.
//
// Keys and values of all stretches become panels first, each stretch filled up to blocks of 32
// tokens:
//
//   keys    [head][block of 32 keys][dims / 2][32][2]   scores = q k^T, of 32 queries and all keys
//   values  [head][32 dims][keys / 2][32][2]            sums = weights v
//
// What stands in rows that are not there is computed with, and never read.
#pragma once

#include "attention_softmax.h"
#include "kv_format.h"
#include "tiles.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kTileBlock = kMatrixRows;

// Numbers of queries or weights in a step.
constexpr int64_t kTileStep = kTileBlock * kMatrixInputs;

static bf16* tile_panels = nullptr;  // of the operation that runs, set by thread 0

// Where the panels of the step's keys and values are, for a head: of `keys` in all, each stretch
// filled up to whole blocks.
struct TilePanels {
  int64_t keys;
  int64_t dims;

  WEFT_INLINE bf16* of_keys(const TilePanels& p, int64_t head) {
    return tile_panels + 2 * head * p.keys * p.dims;
  }
  // Of kPanel dims from `dim` on.
  WEFT_INLINE bf16* of_values(const TilePanels& p, int64_t head, int64_t dim) {
    return of_keys(p, head) + p.keys * p.dims + dim * p.keys;
  }
};

// A block of kTileBlock tokens of a stretch.
struct TileRows {
  int64_t token;   // of the step, with which the stretch begins
  int64_t len;     // of the stretch
  int64_t row;     // of the block's first token, in the stretch
  int64_t padded;  // tokens of the stretches before, filled up
};

// The block with this number; row -1: there are fewer.
static TileRows tile_rows_at(const StepArgs& step, int64_t number) {
  int64_t padded = 0;
  for (int64_t r = 0; r < step.num_requests; r++) {
    const int64_t blocks = ceil_div(step.lens[r], kTileBlock);
    if (number < blocks)
      return {step.rows[r], step.lens[r], number * kTileBlock, padded};
    number -= blocks;
    padded += blocks * kTileBlock;
  }
  return {0, 0, -1, padded};
}

// The `dim` numbers of a row as bfloat16, zeros after them up to `dims`; null: zeros alone.
static void make_tile_row(const float* x, int64_t dim, int64_t dims, float scale, bf16* to) {
  for (int64_t i = 0; i < dims; i += kLanes) {
    const int n = int(most(least(dim - i, kLanes), 0));
    const F32 v = !x || n == 0 ? zero() : n == kLanes ? load(x + i) : load(x + i, n);
    store_bf16(to + i, mul(v, all(scale)));
  }
}

// Keys and values of a block become panels: pairs of dims of keys, pairs of rows of values.
static void pack_tile_rows(const AttentionArgs& args, const TilePanels& panels,
                           const TileRows& block, int64_t head) {
  const KvCache& cache = *args.cache;
  const float* const of_keys = static_cast<const float*>(cache.k) + head * cache.head_dim;
  const float* const of_values = static_cast<const float*>(cache.v) + head * cache.head_dim;
  const int64_t dim = cache.head_dim;
  const int64_t dims = panels.dims;
  const int64_t first = block.padded + block.row;
  bf16 rows[2][kMaxHeadDim];
  uint32_t* keys = reinterpret_cast<uint32_t*>(TilePanels::of_keys(panels, head) + first * dims);
  for (int64_t i = 0; i < kTileBlock; i += 2) {
    for (int64_t half = 0; half < 2; half++) {
      const bool is_there = block.row + i + half < block.len;
      const int64_t at = (block.token + block.row + i + half) * cache.stride;
      make_tile_row(is_there ? of_keys + at : nullptr, dim, dims, 1.0f, rows[half]);
      const uint32_t* pairs = reinterpret_cast<const uint32_t*>(rows[half]);
      for (int64_t d = 0; d < dims / 2; d++)
        keys[d * kPanel + i + half] = pairs[d];
    }
    for (int64_t half = 0; half < 2; half++) {
      const bool is_there = block.row + i + half < block.len;
      const int64_t at = (block.token + block.row + i + half) * cache.stride;
      make_tile_row(is_there ? of_values + at : nullptr, dim, dims, 1.0f, rows[half]);
    }
    const uint16_t* even = reinterpret_cast<const uint16_t*>(rows[0]);
    const uint16_t* odd = reinterpret_cast<const uint16_t*>(rows[1]);
    for (int64_t d = 0; d < dims; d += kPanel) {
      uint32_t* to = reinterpret_cast<uint32_t*>(TilePanels::of_values(panels, head, d) +
                                                 (first + i) * kPanel);
      for (int64_t j = 0; j < kPanel; j++)
        to[j] = uint32_t(even[d + j]) | uint32_t(odd[d + j]) << 16;
    }
  }
}

// 2^x for x <= 0 with a relative error below 2e-4, which is less than bfloat16 tells apart.
WEFT_INLINE F32 rough_power_of_two(F32 x) {
  const F32 limited = larger(all(-126.0f), x);
  const F32 n = round_nearest(limited);
  const F32 r = sub(limited, n);
  F32 p = muladd(all(0.05500847f), r, all(0.24221123f));
  p = muladd(p, r, all(0.69328301f));
  p = muladd(p, r, all(1.0f));
  return times_power_of_two(p, n);
}

// Weights 2^(score - largest) of the first `len` of `keys` scores, as a row of the product; returns
// their sum.
static float tile_softmax(float* scores, int64_t len, int64_t keys, bf16* to) {
  F32 tops[4] = {all(kNothingSeen), all(kNothingSeen), all(kNothingSeen), all(kNothingSeen)};
  for (int64_t i = len; i < keys; i++)
    scores[i] = kNothingSeen;
  for (int64_t i = 0; i < keys; i += 2 * kLanes) {
    tops[0] = larger(tops[0], load(scores + i));
    tops[1] = larger(tops[1], load(scores + i + kLanes));
  }
  const F32 peak = all(largest(larger(tops[0], tops[1])));
  F32 sums[2] = {zero(), zero()};
  for (int64_t i = 0; i < keys; i += kLanes) {
    const int n = int(most(least(len - i, kLanes), 0));
    F32 x = rough_power_of_two(sub(load(scores + i), peak));
    if (n < kLanes)
      x = only(x, 0, n, 0.0f);
    sums[i / kLanes % 2] = add(sums[i / kLanes % 2], x);
    store_bf16(to + i / kMatrixInputs * kTileStep + i % kMatrixInputs, x);
  }
  return sum(add(sums[0], sums[1]));
}

struct TileMemory {
  bf16* q;        // [dims / kMatrixInputs][kTileBlock][kMatrixInputs]
  bf16* weights;  // [keys / kMatrixInputs][kTileBlock][kMatrixInputs]
  float* scores;  // [kTileBlock][keys]
  float* sums;    // [kTileBlock][dims]
};

static void attend_tile_rows(const AttentionArgs& args, const TilePanels& panels,
                             const TileRows& block, int64_t head, const TileMemory& memory) {
  const int64_t dim = args.cache->head_dim;
  const int64_t dims = panels.dims;
  const int64_t num = least(kTileBlock, block.len - block.row);
  const int64_t keys = ceil_div(block.len, kTileBlock) * kTileBlock;
  bf16 row[kMaxHeadDim];
  for (int64_t r = 0; r < num; r++) {
    const float* from = args.q + (block.token + block.row + r) * args.q_stride + head * dim;
    make_tile_row(from, dim, dims, args.scale * kLog2E, row);
    for (int64_t d = 0; d < dims; d += kMatrixInputs) {
      memcpy(memory.q + d * kTileBlock + r * kMatrixInputs, row + d, kMatrixInputs * sizeof(bf16));
    }
  }
  const bf16* k = TilePanels::of_keys(panels, head) + block.padded * dims;
  for (int64_t key = 0; key < keys; key += kPanel) {
    multiply_tiles(memory.q, dims, k + key * dims, false, memory.scores + key, keys, nullptr, 0);
  }
  float totals[kTileBlock];
  for (int64_t r = 0; r < num; r++) {
    totals[r] =
        tile_softmax(memory.scores + r * keys, block.len, keys, memory.weights + r * kMatrixInputs);
  }
  for (int64_t d = 0; d < dims; d += kPanel) {
    const bf16* v = TilePanels::of_values(panels, head, d) + block.padded * kPanel;
    multiply_tiles(memory.weights, keys, v, false, memory.sums + d, dims, nullptr, 0);
  }
  for (int64_t r = 0; r < num; r++) {
    const F32 share = all(1 / totals[r]);
    float* out = args.out + ((block.token + block.row + r) * args.heads + head) * dim;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int n = int(least(dim - d, kLanes));
      store(out + d, mul(load(memory.sums + r * dims + d, n), share), n);
    }
  }
}

static void attention_by_tiles(const AttentionArgs& args, const StepArgs& step, Team& team) {
  const TilePanels panels{tile_rows_at(step, step.num_tokens).padded,
                          ceil_div(args.cache->head_dim, kPanel) * kPanel};
  const int64_t num_blocks = panels.keys / kTileBlock;
  if (team.index == 0) {
    tile_panels = static_cast<bf16*>(
        shared_memory(2 * args.heads * panels.keys * panels.dims * int64_t(sizeof(bf16))));
  }
  team.barrier();
  int64_t longest = 0;
  for (int64_t r = 0; r < step.num_requests; r++)
    longest = most(longest, step.lens[r]);
  const int64_t keys = ceil_div(longest, kTileBlock) * kTileBlock;
  const int64_t bytes = kTileBlock * (2 * panels.dims + 2 * keys + 4 * keys + 4 * panels.dims);
  char* memory = static_cast<char*>(own_memory(bytes));
  const bool can_work = memory && tile_panels;
  TileMemory own;
  own.q = reinterpret_cast<bf16*>(memory);
  own.weights = own.q + kTileBlock * panels.dims;
  own.scores = reinterpret_cast<float*>(own.weights + kTileBlock * keys);
  own.sums = own.scores + kTileBlock * keys;
  for (int64_t i; (i = team.take()) < num_blocks * args.heads && can_work;) {
    pack_tile_rows(args, panels, tile_rows_at(step, i / args.heads), i % args.heads);
  }
  team.barrier();
  const Tiles tiles;
  // Head by head: its panels stay in the cache.
  for (int64_t i; (i = team.take()) < num_blocks * args.heads && can_work;) {
    attend_tile_rows(args, panels, tile_rows_at(step, i % num_blocks), i / num_blocks, own);
  }
}

WEFT_INLINE bool attends_by_tiles(const AttentionArgs& args) {
#if defined(WEFT_BF16) && !defined(WEFT_EMULATE) && defined(__linux__)
  const KvCache& cache = *args.cache;
  const bool is_plain =
      !args.gate && !args.sinks && args.cap == 0 && !args.biases && !args.window &&
      cache.kv_heads == args.heads && cache.stride;
  return args.may_round && args.bidirectional && cache.format == kKvF32 && is_plain &&
         has_matrix_unit();
#else
  (void)args;
  return false;
#endif
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
