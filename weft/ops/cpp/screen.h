// The largest logit of each row without computing all of them: a copy of the head in 8 bits says
// which can be it.
//
// w = u + e, where u is a row of the copy; x = y + d, where y is what its product makes of an input
// x in 8 bits. Then, by Cauchy and Schwarz,
//
//   |w x - u y| = |e x + u d| <= |e| |x| + |u| |d|
//
// and to this comes what floats lose. So each quick logit has a margin, and where quick + margin is
// below the largest quick - margin of its row, the exact logit is not the largest one. Those that
// are left have their exact logits computed, with the bits that they have among all others. The
// largest of these is the largest of all.
#pragma once

#include "linear.h"
#include "sampling.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kScreenPanels = 32;  // taken at a time
// Lengths are sums of floats, which may be too small by a part.
constexpr float kRoundedUp = 1.001f;
// With more rows, products of bytes take as long as those of floats, unless there are instructions
// for them; and then, many rows have candidates in nearly all panels.
#if defined(WEFT_VNNI)
constexpr int64_t kScreenedRows = 64;
constexpr int64_t kScreenedFloatRows = 64;
#else
constexpr int64_t kScreenedRows = 2;
constexpr int64_t kScreenedFloatRows = 4;
#endif

// ---------------------------------------------------------------- the copy

constexpr float kMostCode = 127;
// 1.5 * 2^23: a float that this is added to is a whole number of its last bits.
constexpr float kToWhole = 12582912.0f;
constexpr int32_t kBitsOfWhole = 0x4b400000;

// What is known of the outputs of a panel.
struct PanelLengths {
  float exact[kPanel] = {};  // sums of squares
  float copied[kPanel] = {};
  float errors[kPanel] = {};
};

// Inputs k .. k + num, a group of the copy, from floats [num][kPanel].
static void copy_group(const PackedWeight& copy, int64_t panel, int64_t k, int64_t num,
                       const float* floats, PanelLengths& lengths) {
  float peaks[kPanel] = {};
  float scales[kPanel];
  float inverses[kPanel];
  for (int64_t i = 0; i < num; i++) {
    for (int c = 0; c < kPanel; c++) {
      const float size = __builtin_fabsf(floats[i * kPanel + c]);
      peaks[c] = size > peaks[c] ? size : peaks[c];
    }
  }
  bf16* const to_scales =
      reinterpret_cast<bf16*>(address_of_scale(copy, panel_of(copy, panel), k / copy.group, 0));
  for (int c = 0; c < kPanel; c++) {
    to_scales[c] = to_bf16(peaks[c] / kMostCode);
    scales[c] = to_float(to_scales[c]);
    inverses[c] = scales[c] > 0 ? 1 / scales[c] : 0;
  }
  char* const codes = address_in_panel(copy, panel, 0, k);
  for (int64_t i = 0; i < num; i++) {
    const float* const x = floats + i * kPanel;
    int32_t rounded[kPanel];
    for (int c = 0; c < kPanel; c++) {
      const float shifted = x[c] * inverses[c] + kToWhole;
      memcpy(&rounded[c], &shifted, 4);
      rounded[c] -= kBitsOfWhole;
    }
    for (int c = 0; c < kPanel; c++) {
      const float copied = float(rounded[c]) * scales[c];
      const float error = x[c] - copied;
      lengths.exact[c] += x[c] * x[c];
      lengths.copied[c] += copied * copied;
      lengths.errors[c] += error * error;
    }
    char* const to = codes + i / 4 * 4 * kPanel + i % 4;
    for (int c = 0; c < kPanel; c++)
      to[4 * c] = char(rounded[c] + int32_t(copy.offset));
  }
}

static void copy_head(const CopyHeadArgs& args, const StepArgs&, Team& team) {
  const PackedWeight& exact = *args.exact;
  const PackedWeight& copy = *args.copy;
  float* const floats = static_cast<float*>(own_memory(copy.group * kPanel * 4));
  if (!floats)
    return;
  for (int64_t panel; (panel = team.take()) < ceil_div(exact.out_size, kPanel);) {
    PanelLengths lengths;
    for (int64_t k = 0; k < exact.padded_in; k += copy.group) {
      const int64_t num = least(copy.group, exact.padded_in - k);
      const char* const from =
          static_cast<const char*>(exact.panels) + panel * bytes_of_panel(exact);
      if (exact.format == kBf16) {
        make_floats_of_bf16(reinterpret_cast<const bf16*>(from) + k * kPanel, num, floats);
      } else {
        memcpy(floats, from + k * kPanel * 4, num * kPanel * 4);
      }
      copy_group(copy, panel, k, num, floats, lengths);
    }
    for (int c = 0; c < kPanel; c++) {
      const float longer =
          lengths.exact[c] > lengths.copied[c] ? lengths.exact[c] : lengths.copied[c];
      args.sizes[panel * kPanel + c] = sqrtf(longer) * kRoundedUp;
      args.errors[panel * kPanel + c] = sqrtf(lengths.errors[c]) * kRoundedUp;
    }
  }
}

// ---------------------------------------------------------------- the margins

// A part of |x| that the exact product may lose: by sums, and by making x bf16.
static float lost_by_products(const PackedWeight& exact) {
  const float by_sums = float(exact.padded_in) / float(1 << 22);
  return by_sums + (activation_type(exact) == kPairs ? 1.01f / float(1 << 9) : 0);
}

// The margin of a row's logits is error |x| + size rest, for an output whose row of the head has
// this error and size.
struct Margin {
  float length;  // |x|
  float rest;
};

static Margin margin_of(const LinearArgs& exact, int64_t row) {
  const PackedWeight& w = *exact.weight;
  const float* const x = exact.x + row * exact.x_stride;
  const F32 factor = exact.norm_weight ? all(inverse_rms(x, w.in_size, exact.eps)) : all(1);
  const InputRow input{x, exact.norm_weight, factor, w.in_size, nullptr};
  float squares = 0;
  float rounded = 0;
  for (int64_t k = 0; k < w.in_size; k += kRowGroup) {
    F32 most = zero();
    F32 of_group = zero();
    for (int64_t i = k; i < least(k + kRowGroup, w.in_size); i += kLanes) {
      const F32 value = InputRow::at(input, i);
      most = larger(most, mul(value, value));
      of_group = muladd(value, value, of_group);
    }
    squares += sum(of_group);
    // Each of the inputs is rounded by half a step of 1 / 127 of the largest one, at most.
    rounded += largest(most) * float(kRowGroup) / (254.0f * 254.0f);
  }
  const float length = sqrtf(squares) * kRoundedUp;
  return {length, sqrtf(rounded) * kRoundedUp + length * lost_by_products(w)};
}

// Memory of a screening, for S rows and P panels.
struct Screen {
  Margin* margins;    // [S]
  float* most;        // [P, S] the largest quick + margin in each panel
  float* least_most;  // [ceil(P / kScreenPanels), S] the largest quick - margin
  float* floors;      // [S] what may be the largest logit is not below
  LinearItem* items;  // [P]
  int64_t* num_items;

  // Divides `memory`; returns the bytes needed.
  int64_t lay_out(char* memory, int64_t rows, int64_t panels) {
    int64_t used = 0;
    auto take = [&](int64_t bytes) {
      char* begin = memory + used;
      used += ceil_div(bytes, 64) * 64;
      return begin;
    };
    margins = (Margin*)take(rows * int64_t(sizeof(Margin)));
    most = (float*)take(panels * rows * 4);
    least_most = (float*)take(ceil_div(panels, kScreenPanels) * rows * 4);
    floors = (float*)take(rows * 4);
    items = (LinearItem*)take(panels * int64_t(sizeof(LinearItem)));
    num_items = (int64_t*)take(8);
    return used;
  }
};

static void find_bounds(const ScreenedHeadArgs& args, int64_t num_rows, int64_t panel,
                        const Screen& screen, float* lows) {
  const LinearArgs& quick = *args.quick;
  const int64_t first = panel * kPanel;
  const int64_t end = quick.weight->out_size;
  for (int64_t row = 0; row < num_rows; row++) {
    const F32 length = all(screen.margins[row].length);
    const F32 rest = all(screen.margins[row].rest);
    F32 most = all(-kInfinity);
    F32 low = all(-kInfinity);
    for (int64_t t = first; t < least(first + kPanel, end); t += kLanes) {
      const F32 logit = logits_at(quick.y + row * quick.y_stride, t, end);
      const F32 margin = muladd(load(args.errors + t), length, mul(load(args.sizes + t), rest));
      most = larger(add(logit, margin), most);
      low = larger(sub(logit, margin), low);
    }
    screen.most[panel * num_rows + row] = largest(most);
    lows[row] = largest(larger(low, all(lows[row])));
  }
}

// The items of the panels in which a row's largest logit may be: of each, from the first such row
// to the last.
static int64_t list_items(const Screen& screen, int64_t num_rows, int64_t num_panels) {
  int64_t num = 0;
  for (int64_t panel = 0; panel < num_panels; panel++) {
    int64_t first = num_rows;
    int64_t last = -1;
    for (int64_t row = 0; row < num_rows; row++) {
      if (screen.most[panel * num_rows + row] < screen.floors[row])
        continue;
      first = least(first, row);
      last = row;
    }
    if (last >= 0)
      screen.items[num++] = {panel, 1, first, last + 1 - first};
  }
  return num;
}

static void find_floors(const Screen& screen, int64_t num_rows, int64_t num_panels) {
  const int64_t num_pieces = ceil_div(num_panels, kScreenPanels);
  for (int64_t row = 0; row < num_rows; row++) {
    float floor = -kInfinity;
    for (int64_t piece = 0; piece < num_pieces; piece++) {
      const float low = screen.least_most[piece * num_rows + row];
      floor = low > floor ? low : floor;
    }
    // Where the input is not finite, or so small that squares vanish, every logit may be the
    // largest.
    const float length = screen.margins[row].length;
    const bool is_sound = length - length == 0 && length > 1e-15f;
    screen.floors[row] = is_sound ? floor : -kInfinity;
  }
}

// As `argmax` has it, of the exact logits alone.
static void best_of_items(const ScreenedHeadArgs& args, const Screen& screen, int64_t num_rows,
                          int64_t row) {
  const ArgmaxArgs& to = *args.argmax;
  const float* const logits = to.logits + row * to.stride;
  int64_t token = -1;
  for (int64_t i = 0; i < *screen.num_items; i++) {
    const int64_t panel = screen.items[i].panel;
    if (screen.most[panel * num_rows + row] < screen.floors[row])
      continue;
    for (int64_t t = panel * kPanel; t < least((panel + 1) * kPanel, to.vocab_size); t++) {
      if (token >= 0 && logits[t] <= logits[token])
        continue;
      token = t;
      if (logits[t] != logits[t])
        break;  // a NaN is larger than all
    }
    if (logits[token] != logits[token])
      break;
  }
  to.tokens[row] = token;
  to.max_logits[row] = logits[token] == logits[token] ? logits[token] : __builtin_nanf("");
}

// ---------------------------------------------------------------- the head

static void screened_head(const ScreenedHeadArgs& args, const StepArgs& step, Team& team) {
  const LinearArgs& exact = *args.exact;
  const int64_t num_rows = step.num_tokens;
  const int64_t num_panels = ceil_div(exact.weight->out_size, kPanel);
  if (num_rows > (exact.weight->format == kF32 ? kScreenedFloatRows : kScreenedRows)) {
    linear(exact, step, team);
    team.barrier();
    argmax(*args.argmax, step, team);
    return;
  }
  linear(*args.quick, step, team);
  Screen screen;
  char* const memory = memory_for_all(team, screen.lay_out(nullptr, num_rows, num_panels));
  if (!memory)
    return;
  screen.lay_out(memory, num_rows, num_panels);
  for (int64_t row; (row = team.take()) < num_rows;)
    screen.margins[row] = margin_of(exact, row);
  team.barrier();
  for (int64_t piece; (piece = team.take()) < ceil_div(num_panels, kScreenPanels);) {
    float* const lows = screen.least_most + piece * num_rows;
    for (int64_t row = 0; row < num_rows; row++)
      lows[row] = -kInfinity;
    const int64_t first = piece * kScreenPanels;
    for (int64_t p = first; p < least(first + kScreenPanels, num_panels); p++)
      find_bounds(args, num_rows, p, screen, lows);
  }
  team.barrier();
  if (team.index == 0) {
    find_floors(screen, num_rows, num_panels);
    *screen.num_items = list_items(screen, num_rows, num_panels);
  }
  team.barrier();
  linear_of_items(exact, num_rows, screen.items, *screen.num_items, team);
  team.barrier();
  for (int64_t row; (row = team.take()) < num_rows;)
    best_of_items(args, screen, num_rows, row);
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
