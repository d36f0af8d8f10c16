// Weights in panels: packing (and quantising) rows of a matrix, giving them back, gathering the
// rows of tokens.
//
// A strip is what the rows of a matrix share with one panel: `count` outputs of it, from `column`.
//
//   matrix, first_row = 40:       row 0 .. 23 | 24 .. 55 | 56 ..
//   interleave 1, panel:     .. | 1: 8 .. 31  |    2     |  3 ..
//                               strip 0: panel 1, row 0, count 24, column 8
//   interleave 2, panel:     .. | 1: 8 .. 31  |    3     |  5 ..
#pragma once

#include "gemm_shorts.h"
#include "quantise.h"

namespace weft {
namespace WEFT_NAMESPACE {

struct Strip {
  int64_t panel;
  int64_t row;  // of the matrix, the first
  int64_t count;
  int64_t column;  // of the panel, the first
};

static int64_t num_strips(const PackArgs& args) {
  return args.num_rows == 0 ? 0 : ceil_div(args.first_row % kPanel + args.num_rows, kPanel);
}

static Strip strip_at(const PackArgs& args, int64_t index) {
  // Where the panel begins, maybe before row 0.
  const int64_t panel_row = index * kPanel - args.first_row % kPanel;
  const int64_t row = most(panel_row, 0);
  const int64_t panel = args.first_row / kPanel + index * args.interleave;
  return {panel, row, least(panel_row + kPanel, args.num_rows) - row, row - panel_row};
}

WEFT_INLINE int64_t bytes_of_panel(const PackedWeight& w) {
  switch (w.format) {
    case kF32:
      return w.padded_in * kPanel * 4;
    case kBf16:
      return w.padded_in * kPanel * 2;
    case kI8:
      return bytes_of_head(w) + w.padded_in * kPanel;
    case kI16:
      return bytes_of_head(w) + w.padded_in * kPanel * 2;
    case kI6:
      return bytes_of_head(w) + w.padded_in / 4 * 3 * kPanel;
    case kI3:
      return bytes_of_head(w) + w.padded_in / 8 * 3 * kPanel;
    case kI2:
      return bytes_of_head(w) + w.padded_in / 4 * kPanel;
    default:
      return bytes_of_head(w) + w.padded_in * kPanel / 2;
  }
}

WEFT_INLINE char* panel_of(const PackedWeight& w, int64_t panel) {
  return static_cast<char*>(w.panels) + panel * bytes_of_panel(w);
}

// Where the elements of an output lie from input k on, a multiple of 8; the output is `column` of
// the panel.
WEFT_INLINE char* address_in_panel(const PackedWeight& w, int64_t panel, int64_t column,
                                   int64_t k) {
  char* start = panel_of(w, panel) + bytes_of_head(w);
  switch (w.format) {
    case kF32:
      return start + (k * kPanel + column) * 4;
    case kBf16:
      return start + (k * kPanel + column * 2) * 2;
    case kI8:
      return start + k * kPanel + column * 4;
    case kI16:
      return start + (k * kPanel + column * 2) * 2;
    case kI6:
      return start + k / 16 * 12 * kPanel + column * 4;
    case kI3:
      return start + k / 32 * 12 * kPanel + column * 4;
    case kI2:
      return start + k / 16 * 4 * kPanel + column * 4;
    default:
      return start + k / 2 * kPanel + column * 4;
  }
}

// ---------------------------------------------------------------- packing

// Elements k .. k + kInStep of a row of the matrix as floats, zeros after its end.
static void read_row(const PackArgs& args, int64_t row, int64_t k, float* out) {
  const int64_t in = args.weight->in_size;
  const int64_t num = least(kInStep, in - k);
  if (args.content == kContentBf16) {
    const bf16* from = static_cast<const bf16*>(args.matrix) + row * in + k;
    for (int64_t i = 0; i < num; i++)
      out[i] = to_float(from[i]);
  } else {
    memcpy(out, static_cast<const float*>(args.matrix) + row * in + k, num * 4);
  }
  for (int64_t i = num; i < kInStep; i++)
    out[i] = 0;
}

static void write_f32(const PackedWeight& w, int64_t panel, int64_t column, int64_t k,
                      const float* x) {
  float* to = (float*)address_in_panel(w, panel, column, k);
  for (int i = 0; i < kInStep; i++)
    to[i * kPanel] = x[i];
}

static void write_bf16(const PackedWeight& w, int64_t panel, int64_t column, int64_t k,
                       const float* x) {
  bf16* to = (bf16*)address_in_panel(w, panel, column, k);
  for (int i = 0; i < kInStep; i++)
    to[i / 2 * 2 * kPanel + i % 2] = to_bf16(x[i]);
}

// The same from bfloat16, as it is.
static void copy_bf16(const PackedWeight& w, int64_t panel, int64_t column, int64_t k,
                      const bf16* x) {
  bf16* to = (bf16*)address_in_panel(w, panel, column, k);
  for (int i = 0; i < kInStep; i += 2)
    memcpy(to + i * kPanel, x + i, 4);
}

// 16 codes of six bits.
static void write_sixes(const uint8_t* codes, char* to) {
  uint32_t fours[4];
  uint32_t twos = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t four;
    memcpy(&four, codes + 4 * i, 4);
    fours[i] = four & 0x0f0f0f0f;
    twos |= (four >> 4 & 0x03030303) << 2 * i;
  }
  const uint32_t rows[3] = {fours[0] | fours[1] << 4, fours[2] | fours[3] << 4, twos};
  for (int i = 0; i < 3; i++)
    memcpy(to + i * 4 * kPanel, &rows[i], 4);
}

// The lower two bits of 16 codes.
static uint32_t twos_of(const uint8_t* codes) {
  uint32_t twos = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t four;
    memcpy(&four, codes + 4 * i, 4);
    twos |= (four & 0x03030303) << 2 * i;
  }
  return twos;
}

// 32 codes of three bits.
static void write_threes(const uint8_t* codes, char* to) {
  uint32_t ones = 0;
  for (int i = 0; i < 8; i++) {
    uint32_t four;
    memcpy(&four, codes + 4 * i, 4);
    ones |= (four >> 2 & 0x01010101) << i;
  }
  const uint32_t rows[3] = {twos_of(codes), twos_of(codes + 16), ones};
  for (int i = 0; i < 3; i++)
    memcpy(to + i * 4 * kPanel, &rows[i], 4);
}

static void write_codes(const PackedWeight& w, int64_t panel, int64_t column, int64_t k,
                        const uint8_t* codes) {
  char* to = address_in_panel(w, panel, column, k);
  if (w.format == kI8) {
    for (int i = 0; i < kInStep; i += 4)
      memcpy(to + i * kPanel, codes + i, 4);
    return;
  }
  if (w.format == kI6) {
    for (int i = 0; i < kInStep; i += 16, to += 12 * kPanel)
      write_sixes(codes + i, to);
    return;
  }
  if (w.format == kI3) {
    for (int i = 0; i < kInStep; i += 32, to += 12 * kPanel)
      write_threes(codes + i, to);
    return;
  }
  if (w.format == kI2) {
    for (int i = 0; i < kInStep; i += 16, to += 4 * kPanel) {
      const uint32_t twos = twos_of(codes + i);
      memcpy(to, &twos, 4);
    }
    return;
  }
  for (int i = 0; i < kInStep; i += 8) {  // four bytes at once: none has more than four bits
    uint32_t low;
    uint32_t high;
    memcpy(&low, codes + i, 4);
    memcpy(&high, codes + i + 4, 4);
    const uint32_t both = low | high << 4;
    memcpy(to + i / 2 * kPanel, &both, 4);
  }
}

// Quantise the rows of a strip: all of them for kChosenAtOnce inputs at once, zeros after the last.
static void quantise_strip(const PackArgs& args, const Strip& strip) {
  const PackedWeight& w = *args.weight;
  float x[kInStep];
  uint8_t codes[kInStep];
  Quantiser quantiser(w);
  for (int64_t k = 0; k < w.padded_in; k += kChosenAtOnce) {
    const int64_t num = least(kChosenAtOnce, w.padded_in - k);
    for (int64_t i = 0; i < strip.count; i++) {
      for (int64_t first = 0; first < kChosenAtOnce; first += kInStep) {
        if (first < num) {
          read_row(args, strip.row + i, k + first, x);
        } else {
          memset(x, 0, sizeof x);
        }
        for (int64_t j = 0; j < kInStep; j++)
          quantiser.x[first + j][i] = x[j];
      }
    }
    quantiser.run();
    for (int64_t start = 0; start < num; start += w.group) {
      quantiser.write_scales(panel_of(w, strip.panel), (k + start) / w.group, start / w.group,
                             strip.column, strip.count);
    }
    for (int64_t i = 0; i < strip.count; i++) {
      for (int64_t first = 0; first < num; first += kInStep) {
        for (int64_t j = 0; j < kInStep; j++)
          codes[j] = quantiser.codes[first + j][i];
        write_codes(w, strip.panel, strip.column + i, k + first, codes);
      }
    }
  }
}

// The rows of a strip as shorts.
static void write_shorts(const PackArgs& args, const Strip& strip) {
  const PackedWeight& w = *args.weight;
  float x[kShortGroup];
  int16_t shorts[kShortGroup];
  for (int64_t k = 0; k < w.padded_in; k += kShortGroup) {
    const int64_t num = least(kShortGroup, w.padded_in - k);
    for (int64_t i = 0; i < strip.count; i++) {
      const int64_t column = strip.column + i;
      for (int64_t first = 0; first < num; first += kInStep)
        read_row(args, strip.row + i, k + first, x + first);
      const float peak = peak_of(x, num);
      const F32 factor = all(factor_of_shorts(peak, kMostOfWeight));
      for (int64_t j = 0; j < num; j += kLanes)
        store_shorts(shorts + j, mul(load(x + j), factor));
      reinterpret_cast<float*>(panel_of(w, strip.panel))[k / kShortGroup * kPanel + column] =
          scale_of_shorts(peak, kMostOfWeight);
      int16_t* to = reinterpret_cast<int16_t*>(address_in_panel(w, strip.panel, column, k));
      for (int64_t j = 0; j < num; j += 2)
        memcpy(to + j * kPanel, shorts + j, 4);
    }
  }
}

// What stands for a row in one of the arrays of scales, [num_rows, num] elements of `bytes` each.
static void copy_scales(const void* from, int64_t row, int64_t num, int64_t bytes, char* to,
                        int64_t stride) {
  const char* element = static_cast<const char*>(from) + row * num * bytes;
  for (int64_t i = 0; i < num; i++)
    memcpy(to + i * stride, element + i * bytes, bytes);
}

static void copy_codes(const PackArgs& args, const Strip& strip) {
  const PackedWeight& w = *args.weight;
  char* const panel = panel_of(w, strip.panel);
  const int64_t kinds = w.has_mins ? 2 : 1;
  const int64_t bytes = bytes_of_scale(w);
  const int64_t groups = ceil_div(w.in_size, w.group);
  const int64_t coarse_groups = ceil_div(w.in_size, kCoarse);
  for (int64_t i = 0; i < strip.count; i++) {
    const int64_t row = strip.row + i;
    const int64_t column = strip.column + i;
    for (int64_t kind = 0; kind < kinds; kind++) {
      copy_scales(kind ? args.mins : args.scales, row, groups, bytes,
                  address_of_scale(w, panel, 0, kind) + column * bytes, kinds * kPanel * bytes);
      if (w.scale_type != kScaleCoarse)
        continue;
      copy_scales(kind ? args.coarse_mins : args.coarse, row, coarse_groups, 2,
                  address_of_coarse(w, panel, 0, kind) + column * 2, kinds * kPanel * 2);
    }
  }
  uint8_t filled_up[kInStep];
  for (int64_t k = 0; k < w.padded_in; k += kInStep) {
    for (int64_t i = 0; i < strip.count; i++) {
      const uint8_t* codes =
          static_cast<const uint8_t*>(args.matrix) + (strip.row + i) * w.in_size + k;
      if (k + kInStep > w.in_size) {
        memset(filled_up, 0, kInStep);
        memcpy(filled_up, codes, most(w.in_size - k, 0));
        codes = filled_up;
      }
      write_codes(w, strip.panel, strip.column + i, k, codes);
    }
  }
}

static void copy_floats(const PackArgs& args, const Strip& strip) {
  const PackedWeight& w = *args.weight;
  float x[kInStep];
  const bool is_bf16 = w.format == kBf16 && args.content == kContentBf16;
  // All rows of a slab before the next: it stays in the cache.
  for (int64_t k = 0; k < w.padded_in; k += kInStep) {
    for (int64_t i = 0; i < strip.count; i++) {
      if (is_bf16 && k + kInStep <= w.in_size) {
        copy_bf16(w, strip.panel, strip.column + i, k,
                  static_cast<const bf16*>(args.matrix) + (strip.row + i) * w.in_size + k);
        continue;
      }
      read_row(args, strip.row + i, k, x);
      if (w.format == kF32) {
        write_f32(w, strip.panel, strip.column + i, k, x);
      } else {
        write_bf16(w, strip.panel, strip.column + i, k, x);
      }
    }
  }
}

static void pack_strip(const PackArgs& args, const Strip& strip) {
  if (args.content == kContentCodes)
    return copy_codes(args, strip);
  if (has_codes(*args.weight))
    return quantise_strip(args, strip);
  if (args.weight->format == kI16)
    return write_shorts(args, strip);
  copy_floats(args, strip);
}

static void pack_weight(const PackArgs& args, const StepArgs&, Team& team) {
  const int64_t count = num_strips(args);
  for (int64_t i; (i = team.take()) < count;)
    pack_strip(args, strip_at(args, i));
}

// ---------------------------------------------------------------- reading

// What the codes of an output say, the first of which are at `from`.
WEFT_INLINE int code_at(const PackedWeight& w, const char* from, int64_t i) {
  if (w.format == kI8)
    return uint8_t(from[i / 4 * 4 * kPanel + i % 4]);
  if (w.format == kI6) {
    const char* of = from + i / 16 * 12 * kPanel + i % 4;
    const int fours = uint8_t(of[i / 8 % 2 * 4 * kPanel]);
    const int twos = uint8_t(of[8 * kPanel]);
    return (i / 4 % 2 ? fours >> 4 : fours & 15) | (twos >> i / 4 % 4 * 2 & 3) << 4;
  }
  if (w.format == kI2)
    return uint8_t(from[i / 16 * 4 * kPanel + i % 4]) >> i / 4 % 4 * 2 & 3;
  if (w.format == kI3) {
    const char* of = from + i / 32 * 12 * kPanel + i % 4;
    const int twos = uint8_t(of[i / 16 % 2 * 4 * kPanel]) >> i / 4 % 4 * 2 & 3;
    const int code = twos | (uint8_t(of[8 * kPanel]) >> i / 4 % 8 & 1) << 2;
    return w.has_table ? w.table[code] : code;
  }
  const int both = uint8_t(from[i / 8 * 4 * kPanel + i % 4]);
  const int code = i / 4 % 2 ? both >> 4 : both & 15;
  return w.has_table ? w.table[code] : code;
}

// By itself: else a product and this sum would become one instruction, which rounds once.
static __attribute__((noinline)) void add_to_all(float* values, int64_t num, float value) {
  for (int64_t i = 0; i < num; i++)
    values[i] += value;
}

// Inputs k .. k + num of an output, as floats; k a multiple of kInStep.
static void read_output(const PackedWeight& w, int64_t panel, int64_t column, int64_t k,
                        int64_t num, float* out) {
  const char* from = address_in_panel(w, panel, column, k);
  char* const start = panel_of(w, panel);
  switch (w.format) {
    case kF32:
      for (int64_t i = 0; i < num; i++)
        out[i] = ((const float*)from)[i * kPanel];
      break;
    case kBf16:
      for (int64_t i = 0; i < num; i++)
        out[i] = to_float(((const bf16*)from)[i / 2 * 2 * kPanel + i % 2]);
      break;
    case kI16: {
      const float scale = reinterpret_cast<const float*>(start)[k / kShortGroup * kPanel + column];
      for (int64_t i = 0; i < num; i++)
        out[i] = float(((const int16_t*)from)[i / 2 * 2 * kPanel + i % 2]) * scale;
      break;
    }
    default:
      for (int64_t i = 0, end; i < num; i = end) {
        end = least(((k + i) / w.group + 1) * w.group - k, num);
        const float scale = scale_of(w, start, column, k + i, false);
        const float least_weight = w.has_mins ? scale_of(w, start, column, k + i, true) : 0;
        for (int64_t j = i; j < end; j++)
          out[j] = float(code_at(w, from, j) - w.offset) * scale;
        if (w.has_mins)
          add_to_all(out + i, end - i, least_weight);
      }
  }
}

static void unpack_weight(const PackArgs& args, const StepArgs&, Team& team) {
  const PackedWeight& w = *args.weight;
  const int64_t count = num_strips(args);
  for (int64_t index; (index = team.take()) < count;) {
    const Strip strip = strip_at(args, index);
    for (int64_t k = 0; k < w.in_size; k += kInStep) {
      for (int64_t i = 0; i < strip.count; i++) {
        float* to = static_cast<float*>(args.matrix) + (strip.row + i) * w.in_size + k;
        read_output(w, strip.panel, strip.column + i, k, least(kInStep, w.in_size - k), to);
      }
    }
  }
}

// Change `num` numbers of row `id` of a table, from the k-th on, as an adapter does.
static void add_lora_row(const LoraTable& table, const LoraRows& of, int64_t id, int64_t in,
                         int64_t k, int64_t num, float* row) {
  for (int64_t i = 0; of.gain && of.rank && i < num; i++)
    row[i] *= of.gain[k + i];
  for (int64_t r = 0; r < of.rank; r++) {
    const int64_t at = id * of.rank + r;
    const float factor = table.is_bf16 ? to_float(static_cast<const bf16*>(of.a)[at])
                                       : static_cast<const float*>(of.a)[at];
    const float* const b = of.b + r * in + k;
    for (int64_t i = 0; i < num; i++)
      row[i] += factor * b[i];
  }
}

// Elements of one output are 4 bytes in each 128: nearly every one is a line of its own, prefetched
// ahead of its use. A token below 0 is no output of the weight: its vector came with the step.
static void embed(const EmbedArgs& args, const StepArgs& step, Team& team) {
  constexpr int64_t kPiece = 4 * kInStep;
  const PackedWeight& w = *args.weight;
  const int64_t pieces = ceil_div(w.in_size, kPiece);
  const int64_t vectors_stride = step.vectors_stride ? step.vectors_stride : w.in_size;
  for (int64_t i; (i = team.take()) < step.num_tokens * pieces;) {
    const int64_t token = i / pieces;
    const int64_t k = i % pieces * kPiece;
    const int64_t num = least(kPiece, w.in_size - k);
    int64_t id = step.tokens[token];
    if (id < 0 && args.unknown_token)
      id = args.unknown_token - 1;
    if (args.num_rows) {
      const bool is_mine =
          id < 0 ? args.first == 0 : id >= args.first && id < args.first + args.num_rows;
      if (!is_mine) {
        memset(args.out + token * w.in_size + k, 0, num * 4);
        continue;
      }
      if (id >= 0)
        id -= args.first;
    }
    const int64_t panel = id / kPanel;
    const int64_t column = id % kPanel;
    if (id < 0) {
      memcpy(args.out + token * w.in_size + k, step.vectors + (-1 - id) * vectors_stride + k,
             num * 4);
      continue;
    }
    const char* end = address_in_panel(w, panel, column, k + ceil_div(num, 8) * 8);
    const char* line = address_in_panel(w, panel, column, k);
    for (; line < end; line += 4 * kPanel)
      __builtin_prefetch(line);
    for (int64_t done = 0; done < num; done += kInStep) {
      read_output(w, panel, column, k + done, least(kInStep, num - done),
                  args.out + token * w.in_size + k + done);
    }
    float* row = args.out + token * w.in_size + k;
    if (args.lora && step.adapters && step.adapters[token] >= 0) {
      add_lora_row(*args.lora, args.lora->adapters[step.adapters[token]], id, w.in_size, k, num,
                   row);
    }
    if (args.scale == 0)
      continue;
    for (int64_t i = 0; i < num; i++)
      row[i] *= args.scale;
  }
}

static void copy(const CopyArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    for (int64_t i = 0; i < args.num; i++) {
      const float* from = args.x + t * args.x_stride + i * args.x_step;
      memcpy(args.out + t * args.out_stride + i * args.out_step, from, args.size * sizeof(float));
    }
  }
}

static void keep_rows(const KeepRowsArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* const x = args.x + t * args.x_stride;
    bf16* const kept = static_cast<bf16*>(args.kept) + step.slots[t] * args.kept_stride;
    for (int64_t i = 0; i < args.size; i++)
      kept[i] = to_bf16(x[i]);
  }
}

static void take_rows(const TakeRowsArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    float* const out = args.out + t * args.out_stride;
    if (args.carried) {
      memcpy(out, args.carried + step.rows[t] * args.size, args.size * sizeof(float));
      continue;
    }
    const bf16* const kept = static_cast<const bf16*>(args.kept);
    const bf16* const row = kept + step.slots[t] * args.kept_stride;
    for (int64_t i = 0; i < args.size; i++)
      out[i] = to_float(row[i]);
  }
}

static void spread(const SpreadArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* const x = args.x + t * args.x_stride;
    float* const logits = args.logits + t * args.stride;
    for (int64_t i = 0; i < args.vocab_size; i++)
      logits[i] = -INFINITY;
    for (int64_t i = 0; i < args.num; i++)
      logits[args.ids[i]] = x[i];
  }
}

// Threads take columns, because a row may go to where another one has stood.
static void narrow(const NarrowArgs& args, const StepArgs& step, Team& team) {
  constexpr int64_t kColumns = 256;  // taken at a time
  if (!step.token_indices)
    return;
  for (int64_t first = team.take(kColumns); first < args.size; first = team.take(kColumns)) {
    const size_t num_bytes = size_t(least(kColumns, args.size - first)) * sizeof(float);
    float* const x = args.x + first;
    for (int64_t t = 0; t < step.num_tokens; t++) {
      if (step.token_indices[t] != t)
        memcpy(x + t * args.x_stride, x + step.token_indices[t] * args.x_stride, num_bytes);
    }
  }
}

static void multiply(const MultiplyArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    float* const x = args.x + t * args.x_stride;
    const float* const by = args.by + t * args.by_stride;
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      store(x + i, mul(load(x + i, n), args.by_step ? load(by + i, n) : all(*by)), n);
    }
  }
}

static void add_vectors(const AddVectorsArgs& args, const StepArgs& step, Team& team) {
  constexpr int64_t kTokens = 8;  // taken at a time
  const int64_t begin = args.part * args.size;
  if (!step.vectors || begin + args.size > step.vectors_stride)
    return;
  for (int64_t first = team.take(kTokens); first < step.num_tokens; first = team.take(kTokens)) {
    for (int64_t t = first; t < least(first + kTokens, step.num_tokens); t++) {
      if (step.tokens[t] >= 0)
        continue;
      const float* const row = step.vectors + (-1 - step.tokens[t]) * step.vectors_stride + begin;
      float* const x = args.x + t * args.x_stride;
      for (int64_t i = 0; i < args.size; i++)
        x[i] += row[i];
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
