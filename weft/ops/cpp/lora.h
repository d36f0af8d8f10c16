// What adapters change in a linear: y = epilogue(gain W norm(x) + scale B (A norm(x)) + shift +
// bias), each row with the adapter of its token.
//
//   shrink   inner = scale A norm(x)     before the product, by block of rows with one adapter
//   expand   sums = gain sums + B inner + shift
//                                        after the product, before the sums of an item are written
//
// So every format of weights and every epilogue has it. Rows without an adapter are left alone. The
// order of every sum is the same for any number of rows: what a token gets does not depend on its
// neighbours, nor on their adapters.
#pragma once

#include "activations.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int kVectorsOfTile = kLoraTile / kLanes;
// Rows whose sums stay in registers: of one tile of ranks, and of two vectors of outputs. There are
// two sums of each number, of the even and the odd terms, so that one does not wait for the last
// one's latency.
constexpr int kShrinkRows = kVectorsOfTile == 1 ? 12 : kVectorsOfTile == 2 ? 3 : 1;
constexpr int kExpandRows = kVectorsOfTile == 1 ? 6 : 2;
constexpr int64_t kShrinkAhead = 4096;  // bytes of A that are prefetched ahead
// Floats between rows: else all of them would share the same lines of a cache.
constexpr int64_t kRowGap = 16;

WEFT_INLINE bool has_adapters(const LinearArgs& args, const StepArgs& step) {
  return args.lora && step.adapters;
}

// Where scale A norm(x) is kept: [parts][slabs of a part][rows][kSlab], after the activations.
static float* lay_out_inner(const LinearArgs& args, int64_t num_rows) {
  return reinterpret_cast<float*>(static_cast<char*>(args.scratch) +
                                  num_rows * (4 * args.weight->padded_in + 64));
}

WEFT_INLINE int64_t inner_of_part(const Lora& lora, int64_t part, int64_t num_rows) {
  return part * ceil_div(lora.max_rank, kSlab) * num_rows * kSlab;
}

// ---------------------------------------------------------------- shrink

// One vector of two neighbouring inputs (or ranks), `width` numbers of each.
WEFT_INLINE void load_two(const float* p, int width, F32& first, F32& second) {
  first = load(p);
  second = load(p + width);
}

WEFT_INLINE void load_two(const bf16* p, int, F32& first, F32& second) {
  const Pairs both = load_pairs(p);
  first = evens(both);
  second = odds(both);
}

// Where vector v of two inputs begins, in elements.
template <class E>
WEFT_INLINE int64_t vector_of_two(int v) {
  return v * kLanes * (sizeof(E) == 2 ? 2 : 1);
}

// `out[r]` gets kLoraTile numbers for each of R rows of x.
template <class E, int R>
static __attribute__((noinline)) void shrink_tile(const float* x, int64_t stride, int64_t in,
                                                  const E* a, float scale, float* const* out) {
  F32 even[R][kVectorsOfTile];
  F32 odd[R][kVectorsOfTile];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsOfTile; v++)
      even[r][v] = odd[r][v] = zero();
  }
  for (int64_t k = 0; k < in; k += 2, a += 2 * kLoraTile) {
    __builtin_prefetch(reinterpret_cast<const char*>(a) + kShrinkAhead);
    F32 first[kVectorsOfTile];
    F32 second[kVectorsOfTile];
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsOfTile; v++)
      load_two(a + vector_of_two<E>(v), kLoraTile, first[v], second[v]);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const F32 x0 = all(x[r * stride + k]);
      const F32 x1 = all(x[r * stride + k + 1]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectorsOfTile; v++) {
        even[r][v] = muladd(x0, first[v], even[r][v]);
        odd[r][v] = muladd(x1, second[v], odd[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsOfTile; v++)
      store(out[r] + v * kLanes, mul(add(even[r][v], odd[r][v]), all(scale)));
  }
}

template <class E, int R>
static void shrink_rows(int64_t rows, const float* x, int64_t stride, int64_t in, const E* a,
                        float scale, float* const* out) {
  if (rows == R) {
    shrink_tile<E, R>(x, stride, in, a, scale, out);
  } else if constexpr (R > 1) {
    shrink_rows<E, R - 1>(rows, x, stride, in, a, scale, out);
  }
}

// The tiles of one part of an adapter, for some rows that lie at x, [rows][padded_in + kRowGap].
static void shrink_part(const LinearArgs& args, const StepArgs& step, const LoraBlock& block,
                        int64_t part, const float* x, float* inner) {
  const Lora& lora = *args.lora;
  const PackedLoraPart& of = lora.parts[block.adapter * lora.num_parts + part];
  const int64_t num_rows = step.num_tokens;
  const int64_t in = args.weight->padded_in;
  const int64_t stride = in + kRowGap;
  float* const of_part = inner + inner_of_part(lora, part, num_rows);
  for (int64_t rank = 0; rank < of.rank; rank += kLoraTile) {
    float* const slab = of_part + rank / kSlab * num_rows * kSlab + rank % kSlab;
    for (int64_t first = 0; first < block.num_rows; first += kShrinkRows) {
      const int64_t rows = least(kShrinkRows, block.num_rows - first);
      float* out[kShrinkRows];
      for (int64_t r = 0; r < rows; r++)
        out[r] = slab + step.lora_rows[block.first + first + r] * kSlab;
      if (lora.is_bf16) {
        const bf16* const a = static_cast<const bf16*>(of.a) + rank * in;
        shrink_rows<bf16, kShrinkRows>(rows, x + first * stride, stride, in, a, of.scale, out);
      } else {
        const float* const a = static_cast<const float*>(of.a) + rank * in;
        shrink_rows<float, kShrinkRows>(rows, x + first * stride, stride, in, a, of.scale, out);
      }
    }
  }
}

// Rows of x as floats, [rows][padded_in + kRowGap]: normed, zeros after the last input.
static void gather_rows(const LinearArgs& args, const StepArgs& step, const LoraBlock& block,
                        float* to) {
  const PackedWeight& w = *args.weight;
  for (int64_t r = 0; r < block.num_rows; r++, to += w.padded_in + kRowGap) {
    const float* x = args.x + step.lora_rows[block.first + r] * args.x_stride;
    const F32 factor = args.norm_weight ? all(inverse_rms(x, w.in_size, args.eps)) : all(1);
    const InputRow row{x, args.norm_weight, factor, w.in_size, nullptr};
    for (int64_t k = 0; k < w.padded_in; k += kLanes)
      store(to + k, InputRow::at(row, k));
  }
}

// Inner numbers of all rows that have an adapter; they are there after the next barrier.
static void shrink(const LinearArgs& args, const StepArgs& step, Team& team, float* inner) {
  const Lora& lora = *args.lora;
  float* const x =
      static_cast<float*>(own_memory(kLoraRows * (args.weight->padded_in + kRowGap) * 4));
  if (!x)
    return;
  // Few blocks are shared part by part, though then each makes its rows ready for itself.
  const bool is_whole = step.num_lora_blocks >= 2 * team.size;
  const int64_t pieces = is_whole ? 1 : lora.num_parts;
  for (int64_t i; (i = team.take()) < step.num_lora_blocks * pieces;) {
    const LoraBlock& block = step.lora_blocks[i / pieces];
    const PackedLoraPart* const parts = lora.parts + block.adapter * lora.num_parts;
    const int64_t first = is_whole ? 0 : i % pieces;
    const int64_t end = is_whole ? lora.num_parts : first + 1;
    bool has_rows = false;
    for (int64_t part = first; part < end; part++) {
      if (!parts[part].rank)
        continue;
      if (!has_rows)
        gather_rows(args, step, block, x);
      has_rows = true;
      shrink_part(args, step, block, part, x, inner);
    }
  }
}

// ---------------------------------------------------------------- expand

// The panel of a part of B that belongs to a panel of the weight, or -1.
WEFT_INLINE int64_t panel_of_part(const LoraRange& range, int64_t panel) {
  const int64_t offset = panel - range.first_panel;
  if (offset < 0 || offset % range.step || offset / range.step >= range.num_panels)
    return -1;
  return offset / range.step;
}

// Call act(part, its index, panel of B, panel of the item) for all that an adapter adds to these
// panels.
template <class Do>
WEFT_INLINE void for_panels(const Lora& lora, int64_t adapter, int64_t first_panel,
                            int64_t num_panels, const Do& act) {
  for (int64_t i = 0; i < num_panels; i++) {
    for (int64_t part = 0; part < lora.num_parts; part++) {
      const PackedLoraPart& of = lora.parts[adapter * lora.num_parts + part];
      const int64_t panel = panel_of_part(lora.ranges[part], first_panel + i);
      if (of.rank && panel >= 0)
        act(of, part, panel, i);
    }
  }
}

// Rows of an item one after another that have the same adapter, from `row` on.
WEFT_INLINE int64_t rows_alike(const StepArgs& step, int64_t row, int64_t end) {
  int64_t last = row + 1;
  while (last < end && step.adapters[last] == step.adapters[row])
    last++;
  return last - row;
}

// Prefetch those panels of B that an item of few rows will need: they lie far apart.
static void fetch_adapters(const LinearArgs& args, const StepArgs& step, int64_t row,
                           int64_t num_rows, int64_t first_panel, int64_t num_panels) {
  const Lora& lora = *args.lora;
  const int64_t item_bytes = lora.is_bf16 ? 2 : 4;
  for (int64_t r = row, num; r < row + num_rows; r += num) {
    num = rows_alike(step, r, row + num_rows);
    if (step.adapters[r] < 0)
      continue;
    for_panels(lora, step.adapters[r], first_panel, num_panels,
               [&](const PackedLoraPart& of, int64_t, int64_t panel, int64_t) {
                 const int64_t bytes = of.rank * kPanel * item_bytes;
                 const char* const b = static_cast<const char*>(of.b) + panel * bytes;
                 for (int64_t at = 0; at < bytes; at += 64)
                   __builtin_prefetch(b + at, 0, 2);
               });
  }
}

// c[R][2 vectors] += inner[R][rank] B.
template <class E, int R>
static __attribute__((noinline)) void expand_tile(const float* inner, int64_t slab, int64_t rank,
                                                  const E* b, float* c, int64_t c_stride) {
  F32 even[R][2];
  F32 odd[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      even[r][v] = load(c + r * c_stride + v * kLanes);
      odd[r][v] = zero();
    }
  }
  for (int64_t first_rank = 0; first_rank < rank; first_rank += kSlab, inner += slab) {
    const int64_t num = least(kSlab, rank - first_rank);
    for (int64_t k = 0; k < num; k += 2, b += 2 * kPanel) {
      F32 first[2];
      F32 second[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++)
        load_two(b + vector_of_two<E>(v), kPanel, first[v], second[v]);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const F32 x0 = all(inner[r * kSlab + k]);
        const F32 x1 = all(inner[r * kSlab + k + 1]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          even[r][v] = muladd(x0, first[v], even[r][v]);
          odd[r][v] = muladd(x1, second[v], odd[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++)
      store(c + r * c_stride + v * kLanes, add(even[r][v], odd[r][v]));
  }
}

template <class E, int R>
static void expand_some(int64_t rows, const float* inner, int64_t slab, int64_t rank, const E* b,
                        float* c, int64_t c_stride) {
  if (rows == R) {
    expand_tile<E, R>(inner, slab, rank, b, c, c_stride);
  } else if constexpr (R > 1) {
    expand_some<E, R - 1>(rows, inner, slab, rank, b, c, c_stride);
  }
}

// The same for a whole panel and any number of rows.
template <class E>
static void expand_rows(int64_t rows, const float* inner, int64_t slab, int64_t rank, const E* b,
                        float* c, int64_t c_stride) {
  for (int v = 0; v < kVectorsOfPanel; v += 2) {
    for (int64_t first = 0; first < rows; first += kExpandRows) {
      expand_some<E, kExpandRows>(least(kExpandRows, rows - first), inner + first * kSlab, slab,
                                  rank, b + vector_of_two<E>(v), c + first * c_stride + v * kLanes,
                                  c_stride);
    }
  }
}

// One panel of rows times `gain`, which may be null.
WEFT_INLINE void apply_gain(int64_t rows, const float* gain, float* c, int64_t c_stride) {
  for (int64_t r = 0; gain && r < rows; r++, c += c_stride) {
    for (int64_t i = 0; i < kPanel; i += kLanes)
      store(c + i, mul(load(c + i), load(gain + i)));
  }
}

// The same plus `shift`.
WEFT_INLINE void apply_shift(int64_t rows, const float* shift, float* c, int64_t c_stride) {
  for (int64_t r = 0; shift && r < rows; r++, c += c_stride) {
    for (int64_t i = 0; i < kPanel; i += kLanes)
      store(c + i, add(load(c + i), load(shift + i)));
  }
}

// Change the sums [num_rows][num_panels * kPanel] of an item as the adapters of its rows do.
static void expand(const LinearArgs& args, const StepArgs& step, int64_t row, int64_t num_rows,
                   int64_t first_panel, int64_t num_panels, const float* inner, float* sums) {
  const Lora& lora = *args.lora;
  const int64_t columns = num_panels * kPanel;
  const int64_t slab = step.num_tokens * kSlab;
  for (int64_t r = row, num; r < row + num_rows; r += num) {
    num = rows_alike(step, r, row + num_rows);
    if (step.adapters[r] < 0)
      continue;
    float* const of_rows = sums + (r - row) * columns;
    for_panels(
        lora, step.adapters[r], first_panel, num_panels,
        [&](const PackedLoraPart& of, int64_t part, int64_t panel, int64_t i) {
          const float* const a = inner + inner_of_part(lora, part, step.num_tokens) + r * kSlab;
          const int64_t start = panel * of.rank * kPanel;
          float* const c = of_rows + i * kPanel;
          apply_gain(num, of.gain ? of.gain + panel * kPanel : nullptr, c, columns);
          if (lora.is_bf16) {
            expand_rows(num, a, slab, of.rank, static_cast<const bf16*>(of.b) + start, c, columns);
          } else {
            expand_rows(num, a, slab, of.rank, static_cast<const float*>(of.b) + start, c, columns);
          }
          apply_shift(num, of.shift ? of.shift + panel * kPanel : nullptr, c, columns);
        });
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
