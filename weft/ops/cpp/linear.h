// y = epilogue(W norm(x) + bias).
//
// Work is cut into items: a unit of panels (one; two for a gate and its up, or for few tokens)
// times a block of rows. The items of one block come one after another, so that all threads read
// the same rows:
//
//             panels:   unit 0   unit 1   ..           for a block of rows in the cache:
//   rows of   block 0   item 0   item 1   ..             for each panel of the unit:
//   x         block 1   item n   item n+1   ..             for each piece of k (or made floats):
//             ..                                             for each pass over kTileRows rows
//
// Many tokens are limited by arithmetic: a piece of a panel is made floats (or bytes) once for all
// rows of a block. Few are limited by memory: the panel is read as it is. While a thread works, it
// prefetches the panel of its next item.
#pragma once

#include "activations.h"
#include "encoder_pointwise.h"
#include "gemm_codes.h"
#include "gemm_shorts.h"
#include "gemm_stored.h"
#include "lora.h"
#include "tiles.h"

namespace weft {
namespace WEFT_NAMESPACE {

// Of a panel, for all rows of a block: about the first-level cache.
constexpr int64_t kPieceBytes = 16 * 1024;
// Of rows, for all panels: about the second-level cache.
constexpr int64_t kBlockBytes = 512 * 1024;
// Of a block at most: their sums stay in the first-level cache.
constexpr int64_t kLinearRows = 96;
// After products of codes: prefetch this many rows of y before writing them.
constexpr int64_t kRowsAhead = 8;
// Made ready by one thread: their scales share lines of memory.
constexpr int64_t kRowsTogether = 16;
// Up to this many inputs in all, each thread makes all rows ready itself.
constexpr int64_t kOwnActivations = 8 * 1024;
// Up to this many rows, panels are read as they are.
constexpr int64_t kReadAsTheyAre = 2 * kTileRows;
// With codes: their sums stay in registers through a piece.
constexpr int64_t kLinearCodeRows = 256;
// Up to this many rows, sixes and twos are read as they are, and pieces are long.
constexpr int64_t kFewCodeRows = 4 * kCodeRows;
constexpr int64_t kScaleBytes = 2 * kMinsAt * 4;

struct LinearItem {
  int64_t panel;
  int64_t num_panels;
  int64_t row;
  int64_t num_rows;
};

// Where the first row of an item will be written, in bytes; null: not said.
struct Target {
  const char* rows;
  int64_t stride;
  int64_t bytes;
};

// How a linear is cut.
struct LinearCut {
  int64_t num_panels;
  int64_t unit;  // panels
  int64_t num_units;
  int64_t num_rows;
  int64_t num_blocks;

  WEFT_INLINE LinearItem item(const LinearCut& cut, int64_t index) {
    const int64_t block = index / cut.num_units;
    const int64_t panel = index % cut.num_units * cut.unit;
    const int64_t row = cut.num_rows * block / cut.num_blocks;
    const int64_t end = cut.num_rows * (block + 1) / cut.num_blocks;
    return {panel, least(cut.unit, cut.num_panels - panel), row, end - row};
  }
};

WEFT_INLINE bool is_gated(const LinearArgs& args) {
  return args.epilogue == kGatedSilu || args.epilogue == kGatedGelu ||
         args.epilogue == kGatedGeluTanh;
}

static LinearCut cut_work(const LinearArgs& args, int64_t num_rows, int num_threads) {
  const PackedWeight& w = *args.weight;
  LinearCut cut;
  cut.num_panels =
      is_gated(args) ? 2 * ceil_div(w.out_size / 2, kPanel) : ceil_div(w.out_size, kPanel);
  const bool pairs = num_rows <= kFewRows && cut.num_panels >= 8 * num_threads;
  cut.unit = is_gated(args) || pairs ? 2 : 1;
  cut.num_units = ceil_div(cut.num_panels, cut.unit);
  cut.num_rows = num_rows;
  const int64_t rows_in_cache = kBlockBytes / (w.padded_in * bytes_of_activation(w));
  const int64_t rows_of_block =
      least(most(rows_in_cache, 4 * kTileRows), has_codes(w) ? kLinearCodeRows : kLinearRows);
  const int64_t for_cache = ceil_div(num_rows, rows_of_block);
  const int64_t for_threads =
      least(ceil_div(4 * num_threads, cut.num_units), ceil_div(num_rows, 4 * kTileRows));
  cut.num_blocks = most(for_cache, for_threads);
  return cut;
}

// A thread's memory for one item: sums [rows][unit * kPanel], and a piece of a panel made ready.
struct LinearSpace {
  char* sums;
  char* piece;
  float* scales;  // [kBlocksOfPiece][kPanel], and as many mins
};

// ---------------------------------------------------------------- products

// Bytes to prefetch with each step of k, so that `bytes` a step are there after all passes over
// these rows.
WEFT_INLINE int64_t ahead_step(int64_t bytes, int64_t num_rows) {
  return ceil_div(bytes, passes_of(num_rows) * (kVectorsOfPanel / kTileVectors));
}

// [k / 2][kPanel][2] bf16 -> [k][kPanel] float
static void make_floats_of_bf16(const bf16* pairs, int64_t k, float* floats) {
  for (int64_t i = 0; i < k; i += 2, pairs += 2 * kPanel, floats += 2 * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      const Pairs both = load_pairs(pairs + 2 * v * kLanes);
      store(floats + v * kLanes, evens(both));
      store(floats + kPanel + v * kLanes, odds(both));
    }
  }
}

// sums[num_rows][..] of one panel at `b`, piece by piece of k; or of several panels, if the rows
// are few.
template <class Panel>
static void multiply_panel(const PackedWeight& w, const Activations& x, const LinearItem& item,
                           const char* b, const char* ahead, const Target& target,
                           typename Panel::C* sums, int64_t num_panels) {
  using B = typename Panel::B;
  constexpr int64_t kRowBytes = kPanel * int64_t(sizeof(B));  // of one input
  constexpr int64_t kPiece = kPieceBytes / kRowBytes;
  for (int64_t k = 0; k < w.padded_in; k += kPiece) {
    const bool is_last = k + kPiece >= w.padded_in;
    const char* wanted = is_last ? ahead : b + (k + kPiece) * kRowBytes;
    const auto* a = reinterpret_cast<const typename Panel::A*>(x.data) + k / kSlab * x.slab_stride +
                    item.row * kSlab;
    multiply<Panel>({a, x.slab_stride, least(kPiece, w.padded_in - k),
                     reinterpret_cast<const B*>(b + k * kRowBytes), w.padded_in * kPanel, sums,
                     item.num_panels * kPanel, k > 0, wanted,
                     ahead_step(Panel::kInputs * kRowBytes, item.num_rows),
                     is_last ? target.rows : nullptr, target.stride, target.bytes},
                    item.num_rows, num_panels);
  }
}

// The same for bf16, made floats first.
static void multiply_as_floats(const PackedWeight& w, const Activations& x, const LinearItem& item,
                               const char* b, const char* ahead, const Target& target,
                               const LinearSpace& space, float* sums) {
  constexpr int64_t kRowBytes = kPanel * 2;
  constexpr int64_t kPiece = kPieceBytes / (kPanel * 4);
  float* floats = reinterpret_cast<float*>(space.piece);
  for (int64_t k = 0; k < w.padded_in; k += kPiece) {
    const float* a =
        reinterpret_cast<const float*>(x.data) + k / kSlab * x.slab_stride + item.row * kSlab;
    const int64_t num = least(kPiece, w.padded_in - k);
    const bool is_last = k + kPiece >= w.padded_in;
    const char* wanted = is_last ? ahead : b + (k + kPiece) * kRowBytes;
    make_floats_of_bf16(reinterpret_cast<const bf16*>(b + k * kRowBytes), num, floats);
    multiply<FloatPanel>({a, x.slab_stride, num, floats, 0, sums, item.num_panels * kPanel, k > 0,
                          wanted, ahead_step(kRowBytes, item.num_rows),
                          is_last ? target.rows : nullptr, target.stride, target.bytes},
                         item.num_rows);
  }
}

// Shorts, a group of inputs at a time: its integers go where other formats have a piece made ready.
static void multiply_panel_of_shorts(const PackedWeight& w, const Activations& x,
                                     const LinearItem& item, const char* panel, const char* ahead,
                                     const Target& target, const LinearSpace& space, float* sums) {
  constexpr int64_t kRowBytes = kPanel * 2;                  // of one input
  constexpr int64_t kMostRows = kPieceBytes / (kPanel * 4);  // whose integers have room
  int32_t* const integers = reinterpret_cast<int32_t*>(space.piece);
  const char* const b = panel + bytes_of_head(w);
  for (int64_t k = 0; k < w.padded_in; k += kShortGroup) {
    const int64_t num = least(kShortGroup, w.padded_in - k);
    const int64_t group = k / kShortGroup;
    const bool is_last = k + kShortGroup >= w.padded_in;
    const char* wanted = is_last ? ahead : b + (k + num) * kRowBytes;
    const auto* a =
        reinterpret_cast<const int16_t*>(x.data) + k / kSlab * x.slab_stride + item.row * kSlab;
    const float* const scales = reinterpret_cast<const float*>(panel) + group * kPanel;
    for (int64_t row = 0; row < item.num_rows; row += kMostRows) {
      const int64_t rows = least(kMostRows, item.num_rows - row);
      const char* const written =
          is_last && target.rows ? target.rows + row * target.stride : nullptr;
      multiply<ShortPanel>(
          {a + row * kSlab, x.slab_stride, num, reinterpret_cast<const int16_t*>(b + k * kRowBytes),
           0, integers, kPanel, false, wanted, ahead_step(2 * kRowBytes, rows), written,
           target.stride, target.bytes},
          rows);
      take_shorts(integers, x.scales + group * x.rows + item.row + row, scales, rows, k > 0,
                  sums + row * item.num_panels * kPanel, item.num_panels * kPanel);
    }
  }
}

// A few rows, with codes as they are stored.
static void multiply_panel_as_stored(const PackedWeight& w, const Activations& x,
                                     const LinearItem& item, char* panel, const char* ahead,
                                     float* sums) {
  const int64_t num_blocks = w.padded_in / block_of(w);
  const StoredProduct product{
      item.num_rows,
      reinterpret_cast<const int8_t*>(x.data) + item.row * kSlab,
      x.slab_stride,
      w.padded_in,
      panel + bytes_of_head(w),
      w.table,
      address_of_scale(w, panel, 0, false),
      panel,
      w.unit,
      offset_left(w) != 0,
      x.blocks + item.row,
      x.rows,
      sums,
      item.num_panels * kPanel,
      ahead,
      ceil_div(bytes_of_panel(w), num_blocks * kLine),
  };
  multiply_stored(w, product);
}

static void multiply_bytes(const PackedWeight& w, const CodesProduct& product, int64_t rows,
                           int64_t bytes_ahead) {
  const int most_code = kSameDot ? 128 : most_code_of(w);
  if (kHasPairs && most_code == 15) {
    multiply_codes<ByteCodes<kHasPairs ? 15 : 128>>(product, rows, bytes_ahead);
  } else if (kHasPairs && most_code == 63) {
    multiply_codes<ByteCodes<kHasPairs ? 63 : 128>>(product, rows, bytes_ahead);
  } else if (most_code <= 128) {
    multiply_codes<ByteCodes<128>>(product, rows, bytes_ahead);
  } else {
    multiply_codes<ByteCodes<kSameDot ? 128 : 255>>(product, rows, bytes_ahead);
  }
}

// Codes are cut into pieces of nearly the same size: what they are made, and their scales, stay in
// the cache.
static void multiply_panel_of_codes(const PackedWeight& w, const Activations& x,
                                    const LinearItem& item, char* panel, const char* ahead,
                                    const LinearSpace& space, float* sums) {
  if (item.num_rows <= most_stored_rows(w))
    return multiply_panel_as_stored(w, x, item, panel, ahead, sums);
  // Of kInStep inputs.
  const int64_t step_bytes = (bytes_of_panel(w) - bytes_of_head(w)) / (w.padded_in / kInStep);
  const int64_t block = block_of(w);
  const int64_t head = bytes_of_head(w);
  const bool few = item.num_rows <= kFewCodeRows;
  const bool nibbles = w.format == kI4 && !w.has_table && few;
  const bool sixes = w.format == kI6 && few;
  const bool twos = w.format == kI2 && few;
  const bool signs = kHasSizes && !few && !has_low_codes(w);
  const bool has_starts = offset_left(w) != 0;
  const bool as_it_is = (w.format == kI8 && !signs) || nibbles || sixes || twos;
  const int64_t longest =
      few && as_it_is ? kBlocksOfPiece * block : kPieceBytes / kPanel / (signs ? 2 : 1);
  const int64_t step = most(kInStep, span_of(w));
  const int64_t piece = ceil_div(w.padded_in, ceil_div(w.padded_in, longest) * step) * step;
  for (int64_t k = 0; k < w.padded_in; k += piece) {
    const int64_t num = least(piece, w.padded_in - k);
    const int64_t first = k / block;
    const char* codes = panel + head + k / kInStep * step_bytes;
    const bool is_last = k + piece >= w.padded_in;
    const int64_t bytes_ahead = (is_last ? head : 0) + piece / kInStep * step_bytes;
    spread_scales(w, panel, k, num, false, space.scales);
    if (w.has_mins)
      spread_scales(w, panel, k, num, true, space.scales + kMinsAt);
    char* const bytes = signs ? space.piece + num * kPanel : space.piece;
    if (!as_it_is && w.format != kI8)
      make_bytes_of_codes(w, codes, num, bytes);
    if (signs)
      make_signed(w.format == kI8 ? codes : bytes, num, space.piece);
    const CodesProduct product{
        reinterpret_cast<const int8_t*>(x.data) + k / kSlab * x.slab_stride + item.row * kSlab,
        x.slab_stride,
        num,
        block,
        span_of(w),
        as_it_is ? codes : space.piece,
        space.scales,
        bool(w.has_mins),
        has_starts,
        x.blocks + first * x.rows + item.row,
        x.rows,
        sums,
        item.num_panels * kPanel,
        k > 0,
        as_it_is,
        is_last ? ahead : codes + num / kInStep * step_bytes,
        0,
        w.table,
    };
    if (nibbles) {
      multiply_codes<NibbleCodes<>>(product, item.num_rows, bytes_ahead);
    } else if (sixes) {
      multiply_codes<SixCodes>(product, item.num_rows, bytes_ahead);
    } else if (twos) {
      multiply_codes<TwoCodes>(product, item.num_rows, bytes_ahead);
    } else if (signs) {
      multiply_codes<SignedBytes>(product, item.num_rows, bytes_ahead);
    } else {
      multiply_bytes(w, product, item.num_rows, bytes_ahead);
    }
  }
}

static void multiply_item(const PackedWeight& w, const Activations& x, const LinearItem& item,
                          int64_t next_panel, const LinearSpace& space, const Target& target = {}) {
  const int64_t panel_bytes = bytes_of_panel(w);
  // Few rows take the panels of a unit together.
  const bool is_float = w.format == kF32 || w.format == kBf16;
  const int64_t together = item.num_rows <= kFewRows && is_float ? item.num_panels : 1;
  for (int64_t i = 0; i < item.num_panels; i += together) {
    char* b = static_cast<char*>(w.panels) + (item.panel + i) * panel_bytes;
    // What is read next: the panel after these, or the first of the next item.
    const bool is_last = i + together >= item.num_panels;
    const char* ahead = is_last ? static_cast<const char*>(w.panels) + next_panel * panel_bytes
                                : b + together * panel_bytes;
    char* sums = space.sums + i * kPanel * 4;
    const Target now = i + together < item.num_panels ? Target{} : target;
    switch (w.format) {
      case kF32:
        multiply_panel<FloatPanel>(w, x, item, b, ahead, now, (float*)sums, together);
        break;
      case kBf16:
#if defined(WEFT_BF16_PRODUCTS)
        multiply_panel<PairPanel>(w, x, item, b, ahead, now, (float*)sums, together);
#else
        if (item.num_rows > kReadAsTheyAre) {
          multiply_as_floats(w, x, item, b, ahead, now, space, (float*)sums);
        } else {
          multiply_panel<Bf16Panel>(w, x, item, b, ahead, now, (float*)sums, together);
        }
#endif
        break;
      case kI16:
        multiply_panel_of_shorts(w, x, item, b, ahead, now, space, (float*)sums);
        break;
      default:
        multiply_panel_of_codes(w, x, item, b, ahead, space, (float*)sums);
    }
  }
}

// ---------------------------------------------------------------- epilogue

// W x + bias of one row and kLanes outputs from `output` on, from the sums.
WEFT_INLINE F32 finished(const LinearArgs& args, int64_t output, const char* sums) {
  const F32 value = load(reinterpret_cast<const float*>(sums));
  return args.bias ? add(value, load(args.bias + output)) : value;
}

// The first `valid` elements, if these are fewer than kLanes.
WEFT_INLINE F32 get(const float* y, int64_t valid) {
  return valid >= kLanes ? load(y) : load(y, int(valid));
}
WEFT_INLINE void put(float* y, F32 x, int64_t valid) {
  if (valid >= kLanes) {
    store(y, x);
  } else {
    store(y, x, int(valid));
  }
}

// Where an item will be written.
static Target target_of(const LinearArgs& args, const LinearItem& item) {
  const int64_t columns = is_gated(args) ? kPanel : item.num_panels * kPanel;
  const int64_t first = item.panel * kPanel / (is_gated(args) ? 2 : 1);
  const int64_t size = is_gated(args) ? args.weight->out_size / 2 : args.weight->out_size;
  const float* y = args.y + item.row * args.y_stride + first;
  return {reinterpret_cast<const char*>(y), args.y_stride * 4, least(columns, size - first) * 4};
}

static void write_item(const LinearArgs& args, const LinearItem& item, const LinearSpace& space) {
  const int64_t first = item.panel * kPanel;
  const int64_t columns = item.num_panels * kPanel;
  const bool gated = is_gated(args);
  const bool asks_for_lines = has_codes(*args.weight);  // the other products have done so
  for (int64_t r = 0; r < item.num_rows; r++) {
    const int64_t row = item.row + r;
    const char* sums = space.sums + r * columns * 4;
    if (asks_for_lines && r + kRowsAhead < item.num_rows) {
      const float* later =
          args.y + (row + kRowsAhead) * args.y_stride + (gated ? first / 2 : first);
      for (int64_t i = 0; i < (gated ? kPanel : columns); i += 16)
        __builtin_prefetch(later + i, 1);
    }
    if (gated) {
      const int64_t unit = first / 2;
      const int64_t valid = args.weight->out_size / 2 - unit;
      float* y = args.y + row * args.y_stride + unit;
      for (int64_t i = 0; i < kPanel && i < valid; i += kLanes) {
        const F32 gate = finished(args, first + i, sums + i * 4);
        const F32 up = finished(args, first + kPanel + i, sums + (kPanel + i) * 4);
        put(y + i, mul(gate_activated(args.epilogue, gate), up), valid - i);
      }
      continue;
    }
    float* y = args.y + row * args.y_stride + first;
    const int64_t valid = args.weight->out_size - first;
    for (int64_t i = 0; i < columns && i < valid; i += kLanes) {
      const F32 value = finished(args, first + i, sums + i * 4);
      switch (args.epilogue) {
        case kAdd:
          put(y + i, add(get(y + i, valid - i), value), valid - i);
          break;
        case kAddScaled:
          put(y + i, muladd(value, all(args.scale), get(y + i, valid - i)), valid - i);
          break;
        default:
          put(y + i, activated(args.epilogue, value), valid - i);
      }
    }
  }
}

// ---------------------------------------------------------------- the kernel

// By the matrix unit. Items are cut as those of the other products, in blocks of whole steps.
static void linear_by_tiles(const LinearArgs& args, int64_t num_rows, Team& team) {
  const PackedWeight& w = *args.weight;
  const int64_t unit = is_gated(args) ? 2 : 1;
  const int64_t num_panels =
      is_gated(args) ? 2 * ceil_div(w.out_size / 2, kPanel) : ceil_div(w.out_size, kPanel);
  const int64_t num_units = ceil_div(num_panels, unit);
  const int64_t columns = unit * kPanel;
  const int64_t in_cache = kMatrixBlockBytes / (w.padded_in * 2) / kMatrixRows * kMatrixRows;
  const int64_t block = least(most(in_cache, kMatrixRows), kMatrixBlockRows);
  bf16* const x = static_cast<bf16*>(args.scratch);
  for (int64_t first; (first = team.take(kRowsTogether)) < num_rows;) {
    round_rows(args, first, least(first + kRowsTogether, num_rows), x);
  }
  team.barrier();
  float* const sums = static_cast<float*>(own_memory(block * columns * 4));
  if (!sums)
    return;

  const Tiles tiles;
  const int64_t num_items = num_units * ceil_div(num_rows, block);
  for (int64_t index; (index = team.take()) < num_items;) {
    const int64_t row = index / num_units * block;
    const LinearItem item{index % num_units * unit, unit, row, least(block, num_rows - row)};
    for (int64_t i = 0; i < unit; i++) {
      const bf16* panel =
          static_cast<const bf16*>(w.panels) + (item.panel + i) * w.padded_in * kPanel;
      for (int64_t k = 0; k < w.padded_in; k += kMatrixPiece) {
        const bf16* rows = x + row * w.padded_in + k * kMatrixRows;
        const int64_t num = least(kMatrixPiece, w.padded_in - k);
        // The next piece, which mostly follows this one, comes to the cache meanwhile.
        const char* ahead = reinterpret_cast<const char*>(panel + (k + num) * kPanel);
        const int64_t num_tiles = ceil_div(item.num_rows, kMatrixRows) * (num / kMatrixInputs);
        const int64_t lines = ceil_div(kMatrixPiece * kPanel * 2 / 64, num_tiles);
        for (int64_t r = 0; r < item.num_rows; r += kMatrixRows) {
          multiply_tiles(rows + r * w.padded_in, num, panel + k * kPanel, k > 0,
                         sums + r * columns + i * kPanel, columns, ahead, lines);
          ahead += lines * (num / kMatrixInputs) * 64;
        }
      }
    }
    write_item(args, item, {reinterpret_cast<char*>(sums), nullptr, nullptr});
  }
}

// Whether one row can be read where it stands.
WEFT_INLINE bool is_ready(const LinearArgs& args, int64_t num_rows) {
  const PackedWeight& w = *args.weight;
  return num_rows == 1 && activation_type(w) == kFloats && !args.norm_weight &&
         w.in_size == w.padded_in;
}

// What a thread works with: its memory for items, and the rows of all threads.
struct LinearWork {
  LinearSpace space;
  Activations x;
  bool has_memory;
};

// Make all rows ready, for items of up to `sums_bytes`. All threads must call it.
static LinearWork begin_linear(const LinearArgs& args, int64_t num_rows, int64_t sums_bytes,
                               Team& team) {
  const PackedWeight& w = *args.weight;
  const bool as_it_is = is_ready(args, num_rows);
  const bool own = num_rows * w.padded_in <= kOwnActivations;
  const int64_t activation_bytes = own && !as_it_is ? size_of_activations(w, num_rows) : 0;
  char* memory =
      static_cast<char*>(own_memory(kPieceBytes + kScaleBytes + sums_bytes + activation_bytes));
  char* const sums = memory + kPieceBytes + kScaleBytes;
  LinearWork work{{sums, memory, reinterpret_cast<float*>(memory + kPieceBytes)},
                  {(char*)args.x, kSlab, nullptr, nullptr, 1},
                  memory != nullptr};
  if (own && memory && !as_it_is) {
    work.x = lay_out_activations(w, num_rows, sums + sums_bytes);
    make_ready(args, 0, num_rows, work.x);
  } else if (!own && !as_it_is) {
    work.x = lay_out_activations(w, num_rows, args.scratch);
    for (int64_t first; (first = team.take(kRowsTogether)) < num_rows;) {
      make_ready(args, first, least(first + kRowsTogether, num_rows), work.x);
    }
    team.barrier();
  }
  return work;
}

static void linear(const LinearArgs& args, const StepArgs& step, Team& team) {
  const PackedWeight& w = *args.weight;
  const int64_t num_rows = step.num_tokens;
  if (num_rows == 0)
    return;
  if (takes_tiles(args, num_rows) && !has_adapters(args, step))
    return linear_by_tiles(args, num_rows, team);
  const LinearCut cut = cut_work(args, num_rows, team.size);
  float* inner = nullptr;
  if (has_adapters(args, step)) {
    inner = lay_out_inner(args, num_rows);
    shrink(args, step, team, inner);
    team.barrier();
  }

  const int64_t sums_bytes = ceil_div(num_rows, cut.num_blocks) * cut.unit * kPanel * 4;
  const LinearWork work = begin_linear(args, num_rows, sums_bytes, team);
  if (!work.has_memory)
    return;

  const int64_t num_items = cut.num_units * cut.num_blocks;
  for (int64_t index = team.take(), next; index < num_items; index = next) {
    next = team.take();
    const LinearItem item = LinearCut::item(cut, index);
    const int64_t next_panel = LinearCut::item(cut, least(next, num_items - 1)).panel;
    if (inner)
      fetch_adapters(args, step, item.row, item.num_rows, item.panel, item.num_panels);
    multiply_item(w, work.x, item, next_panel, work.space, target_of(args, item));
    if (inner)
      expand(args, step, item.row, item.num_rows, item.panel, item.num_panels, inner,
             (float*)work.space.sums);
    write_item(args, item, work.space);
  }
}

// Only these items, of one panel each, without adapters.
static void linear_of_items(const LinearArgs& args, int64_t num_rows, const LinearItem* items,
                            int64_t num_items, Team& team) {
  const LinearWork work = begin_linear(args, num_rows, num_rows * kPanel * 4, team);
  if (!work.has_memory)
    return;
  for (int64_t index = team.take(), next; index < num_items; index = next) {
    next = team.take();
    multiply_item(*args.weight, work.x, items[index], items[least(next, num_items - 1)].panel,
                  work.space);
    write_item(args, items[index], work.space);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
