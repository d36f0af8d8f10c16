// Weights in panels: packing (and quantising) rows of a matrix, giving them back, gathering the rows of tokens.
//
// A strip is what the rows of a matrix share with one panel: `count` outputs of it, from `column`.
//
//   matrix, first_row = 40:       row 0 .. 23 | 24 .. 55 | 56 ..
//   interleave 1, panel:     .. | 1: 8 .. 31  |    2     |  3 ..       strip 0 is (panel 1, row 0, count 24, column 8)
//   interleave 2, panel:     .. | 1: 8 .. 31  |    3     |  5 ..
#pragma once

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
  const int64_t panel_row = index * kPanel - args.first_row % kPanel;  // where the panel begins, maybe before row 0
  const int64_t row = most(panel_row, 0);
  const int64_t panel = args.first_row / kPanel + index * args.interleave;
  return {panel, row, least(panel_row + kPanel, args.num_rows) - row, row - panel_row};
}

WEFT_INLINE int64_t bytes_of_panel(const Weight& w) {
  switch (w.format) {
    case kF32: return w.padded_in * kPanel * 4;
    case kBf16: return w.padded_in * kPanel * 2;
    case kI8: return w.padded_in * kPanel;
    default: return w.padded_in * kPanel / 2;
  }
}

// Where the elements of an output lie from input k on, a multiple of 8; the output is `column` of the panel.
WEFT_INLINE char* place_in_panel(const Weight& w, int64_t panel, int64_t column, int64_t k) {
  char* start = static_cast<char*>(w.panels) + panel * bytes_of_panel(w);
  switch (w.format) {
    case kF32: return start + (k * kPanel + column) * 4;
    case kBf16: return start + (k * kPanel + column * 2) * 2;
    case kI8: return start + k * kPanel + column * 4;
    default: return start + k / 2 * kPanel + column * 4;
  }
}

WEFT_INLINE float& group_scale(const Weight& w, int64_t panel, int64_t column, int64_t k) {
  return w.scales[(panel * (w.padded_in / w.group) + k / w.group) * kPanel + column];
}

// ---------------------------------------------------------------- packing

// Elements k .. k + kInStep of a row of the matrix as floats, zeros behind its end.
static void read_row(const PackArgs& args, int64_t row, int64_t k, float* out) {
  const int64_t in = args.weight->in, num = least(kInStep, in - k);
  if (args.matrix_is_bf16) {
    const bf16* from = static_cast<const bf16*>(args.matrix) + row * in + k;
    for (int64_t i = 0; i < num; i++) out[i] = to_float(from[i]);
  } else {
    memcpy(out, static_cast<const float*>(args.matrix) + row * in + k, num * 4);
  }
  for (int64_t i = num; i < kInStep; i++) out[i] = 0;
}

static void write_f32(const Weight& w, int64_t panel, int64_t column, int64_t k, const float* x) {
  float* to = (float*)place_in_panel(w, panel, column, k);
  for (int i = 0; i < kInStep; i++) to[i * kPanel] = x[i];
}

static void write_bf16(const Weight& w, int64_t panel, int64_t column, int64_t k, const float* x) {
  bf16* to = (bf16*)place_in_panel(w, panel, column, k);
  for (int i = 0; i < kInStep; i++) to[i / 2 * 2 * kPanel + i % 2] = to_bf16(x[i]);
}

// Returns the sum of the bytes.
static int32_t write_i8(const Weight& w, int64_t panel, int64_t column, int64_t k, const float* x, float inverse) {
  int8_t bytes[kInStep];
  for (int i = 0; i < kInStep; i += kLanes) store_i8(bytes + i, mul(load(x + i), all(inverse)));
  char* to = place_in_panel(w, panel, column, k);
  int32_t total = 0;
  for (int i = 0; i < kInStep; i += 4) {
    memcpy(to + i * kPanel, bytes + i, 4);
    total += bytes[i] + bytes[i + 1] + bytes[i + 2] + bytes[i + 3];
  }
  return total;
}

WEFT_INLINE F32 quantise_i4(F32 x, F32 inverse_scale) {
  return smaller(larger(round_nearest(mul(x, inverse_scale)), all(-8)), all(7));
}

// Which scale loses least for a group x[size]. For each of some first scales, which put the largest element at one of
// `ends`, x is rounded to q; the best scale for this q is sum(x q) / sum(q q), and then the squared error is
// sum(x x) - sum(x q)^2 / sum(q q). Gives the scale, and the inverse of the first scale, by which q is found again.
static void choose_scale_i4(const float* x, int64_t size, float* scale, float* inverse_first) {
  const float ends[] = {-9, -8.5f, -8, -7.5f, -7, -6.5f, -6, 8, 7.5f, 7, 6.5f, 6};
  float extreme = 0, best = 0;
  for (int64_t i = 0; i < size; i++) extreme = __builtin_fabsf(x[i]) > __builtin_fabsf(extreme) ? x[i] : extreme;
  *scale = *inverse_first = 0;
  if (extreme == 0) return;
  for (float end : ends) {
    const F32 inverse = all(end / extreme);
    F32 products = zero(), squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
      const F32 value = load(x + i), q = quantise_i4(value, inverse);
      products = muladd(value, q, products);
      squares = muladd(q, q, squares);
    }
    const float xq = sum(products), qq = sum(squares), explained = xq * xq / qq;
    if (explained > best) {
      best = explained;
      *scale = xq / qq;
      *inverse_first = end / extreme;
    }
  }
}

static void write_i4(const Weight& w, int64_t panel, int64_t column, int64_t k, const float* x) {
  int8_t q[kInStep];
  for (int64_t start = 0; start < kInStep; start += w.group) {
    float inverse;
    choose_scale_i4(x + start, w.group, &group_scale(w, panel, column, k + start), &inverse);
    for (int64_t i = start; i < start + w.group; i += kLanes) {
      store_i8(q + i, add(quantise_i4(load(x + i), all(inverse)), all(8)));
    }
  }
  char* to = place_in_panel(w, panel, column, k);
  for (int i = 0; i < kInStep; i += 8) {
    for (int j = 0; j < 4; j++) to[i / 2 * kPanel + j] = char(q[i + j] | q[i + 4 + j] << 4);
  }
}

static void pack_strip(const PackArgs& args, const Strip& strip) {
  const Weight& w = *args.weight;
  float x[kInStep];
  float inverse_scales[kPanel];
  int32_t totals[kPanel] = {};
  for (int64_t i = 0; i < strip.count && w.format == kI8; i++) {
    F32 peak = zero();
    for (int64_t k = 0; k < w.padded_in; k += kInStep) {
      read_row(args, strip.row + i, k, x);
      for (int j = 0; j < kInStep; j += kLanes) peak = larger(peak, magnitude(load(x + j)));
    }
    const float limit = largest(peak);
    w.scales[strip.panel * kPanel + strip.column + i] = limit / 127;
    inverse_scales[i] = limit > 0 ? 127 / limit : 0;
  }
  for (int64_t k = 0; k < w.padded_in; k += kInStep) {  // all rows of a slab before the next: it stays in the cache
    for (int64_t i = 0; i < strip.count; i++) {
      const int64_t column = strip.column + i;
      read_row(args, strip.row + i, k, x);
      switch (w.format) {
        case kF32: write_f32(w, strip.panel, column, k, x); break;
        case kBf16: write_bf16(w, strip.panel, column, k, x); break;
        case kI8: totals[i] += write_i8(w, strip.panel, column, k, x, inverse_scales[i]); break;
        default: write_i4(w, strip.panel, column, k, x);
      }
    }
  }
  for (int64_t i = 0; i < strip.count && w.format == kI8; i++) {
    w.sums[strip.panel * kPanel + strip.column + i] = totals[i] * 128;
  }
}

static void pack_weight(const PackArgs& args, const Step&, Team& team) {
  const int64_t count = num_strips(args);
  for (int64_t i; (i = team.take()) < count;) pack_strip(args, strip_at(args, i));
}

// ---------------------------------------------------------------- reading

// Inputs k .. k + num of an output, as floats; k a multiple of kInStep.
static void read_output(const Weight& w, int64_t panel, int64_t column, int64_t k, int64_t num, float* out) {
  const char* from = place_in_panel(w, panel, column, k);
  const int64_t output = panel * kPanel + column;
  switch (w.format) {
    case kF32:
      for (int64_t i = 0; i < num; i++) out[i] = ((const float*)from)[i * kPanel];
      break;
    case kBf16:
      for (int64_t i = 0; i < num; i++) out[i] = to_float(((const bf16*)from)[i / 2 * 2 * kPanel + i % 2]);
      break;
    case kI8:
      for (int64_t i = 0; i < num; i++) out[i] = int8_t(from[i / 4 * 4 * kPanel + i % 4]) * w.scales[output];
      break;
    default:
      for (int64_t i = 0; i < num; i++) {
        const int byte = uint8_t(from[i / 8 * 4 * kPanel + i % 4]), nibble = i / 4 % 2 ? byte >> 4 : byte & 15;
        out[i] = float(nibble - 8) * group_scale(w, panel, column, k + i);
      }
  }
}

static void unpack_weight(const PackArgs& args, const Step&, Team& team) {
  const Weight& w = *args.weight;
  const int64_t count = num_strips(args);
  for (int64_t index; (index = team.take()) < count;) {
    const Strip strip = strip_at(args, index);
    for (int64_t k = 0; k < w.in; k += kInStep) {
      for (int64_t i = 0; i < strip.count; i++) {
        float* to = static_cast<float*>(args.matrix) + (strip.row + i) * w.in + k;
        read_output(w, strip.panel, strip.column + i, k, least(kInStep, w.in - k), to);
      }
    }
  }
}

// Elements of one output are 4 bytes in each 128: nearly every one is a line of its own, asked for ahead of its use.
// A token below 0 is no output of the weight: its vector came with the step.
static void embed(const EmbedArgs& args, const Step& step, Team& team) {
  constexpr int64_t kPiece = 4 * kInStep;
  const Weight& w = *args.weight;
  const int64_t pieces = ceil_div(w.in, kPiece);
  for (int64_t i; (i = team.take()) < step.num_tokens * pieces;) {
    const int64_t token = i / pieces, k = i % pieces * kPiece, num = least(kPiece, w.in - k);
    const int64_t id = step.tokens[token], panel = id / kPanel, column = id % kPanel;
    if (id < 0) {
      memcpy(args.out + token * w.in + k, step.vectors + (-1 - id) * w.in + k, num * 4);
      continue;
    }
    const char* end = place_in_panel(w, panel, column, k + ceil_div(num, 8) * 8);
    const char* line = place_in_panel(w, panel, column, k);
    for (; line < end; line += 4 * kPanel) __builtin_prefetch(line);
    for (int64_t done = 0; done < num; done += kInStep) {
      read_output(w, panel, column, k + done, least(kInStep, num - done), args.out + token * w.in + k + done);
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
