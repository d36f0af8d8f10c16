// Choosing codes and scales for weights that come as floats; ops/quantize.py says the same in
// torch.
//
// kI8: the largest of a group is 127 steps from the offset. kI4 with mins: the least squared error
// of a few ways to lay 16 steps over a group. Lanes are outputs: nothing is summed across them, so
// that the result does not depend on their number.
#pragma once

#include "codes.h"

namespace weft {
namespace WEFT_NAMESPACE {

// How many steps the range of a group has: with 15 at most, the first of them is the smallest
// weight; with more, the outermost weights are cut off on both sides.
constexpr float kStepsOfRange[] = {15, 14, 13, 12, 15.6f, 16.3f, 17.1f, 18};
constexpr float kMostSteps = 15;

constexpr int kChosenAtOnce = 2 * kInStep;  // inputs; groups divide them

// The codes of kChosenAtOnce inputs of one panel, and their scales.
struct Quantiser {
  const PackedWeight& w;
  float x[kChosenAtOnce][kPanel] = {};
  uint8_t codes[kChosenAtOnce][kPanel];
  float scales[kChosenAtOnce / 16][kPanel];
  float mins[kChosenAtOnce / 16][kPanel];

  explicit Quantiser(const PackedWeight& weight) : w(weight) {}

  void run() {
    for (int64_t start = 0; start < kChosenAtOnce; start += w.group) {
      for (int64_t column = 0; column < kPanel; column += kLanes) {
        if (w.format == kI8) {
          choose_eight_bits(start, column);
        } else {
          choose_four_bits(start, column);
        }
      }
    }
  }

  // As the weight's type keeps them, for outputs column .. column + count of a panel; those of x
  // begin at 0.
  void write_scales(char* panel, int64_t group, int64_t index, int64_t column,
                    int64_t count) const {
    write(address_of_scale(w, panel, group, false), scales[index], column, count);
    if (w.has_mins)
      write(address_of_scale(w, panel, group, true), mins[index], column, count);
  }

 private:
  void write(char* address, const float* values, int64_t column, int64_t count) const {
    uint16_t kept[kPanel];
    for (int v = 0; v < kPanel; v += kLanes)
      keep(load(values + v), kept + v);
    const int64_t bytes = bytes_of_scale(w);
    const void* from = w.scale_type == kScaleF32 ? static_cast<const void*>(values) : kept;
    memcpy(address + column * bytes, from, count * bytes);
  }

  void keep(F32 values, uint16_t* kept) const {
    if (w.scale_type == kScaleF16) {
      store_f16(kept, values);
    } else {
      store_bf16(kept, values);
    }
  }

  // As the weight's type has it.
  F32 rounded(F32 values) const {
    if (w.scale_type == kScaleF32)
      return values;
    uint16_t kept[kLanes];
    keep(values, kept);
    return w.scale_type == kScaleF16 ? load_f16(kept) : load_bf16(kept);
  }

  // Steps of `scale` from `start` on, within the range.
  static F32 steps_of(F32 value, F32 start, F32 scale, float least, float most) {
    const F32 steps = div(sub(value, start), where_less(zero(), scale, scale, all(1)));
    return smaller(larger(round_nearest(steps), all(least)), all(most));
  }

  void write_codes(int64_t input, int64_t column, F32 steps, float offset) {
    float values[kLanes];
    store(values, add(steps, all(offset)));
    for (int i = 0; i < kLanes; i++)
      codes[input][column + i] = uint8_t(values[i]);
  }

  void choose_eight_bits(int64_t start, int64_t column) {
    F32 peak = zero();
    for (int64_t k = start; k < start + w.group; k++)
      peak = larger(peak, magnitude(load(&x[k][column])));
    const F32 scale = rounded(div(peak, all(127)));
    store(&scales[start / w.group][column], scale);
    for (int64_t k = start; k < start + w.group; k++) {
      F32 steps = steps_of(load(&x[k][column]), zero(), scale, -127, 127);
      steps = where_less(zero(), scale, steps, zero());
      write_codes(k, column, steps, float(w.offset));
    }
  }

  // For the codes q of some steps, the best scale and min are those of a line through (q, x); what
  // this line explains of the squares of x, which are measured from the middle of their range, is
  // what its error leaves of them.
  void choose_four_bits(int64_t start, int64_t column) {
    const int64_t end = start + w.group;
    F32 low = load(&x[start][column]);
    F32 high = low;
    for (int64_t k = start + 1; k < end; k++) {
      low = smaller(low, load(&x[k][column]));
      high = larger(high, load(&x[k][column]));
    }
    const F32 num = all(float(w.group));
    const F32 range = sub(high, low);
    const F32 middle = mul(add(low, high), all(0.5f));
    F32 best = all(-1);
    F32 best_scale = zero();
    F32 best_min = middle;
    for (float steps : kStepsOfRange) {
      const F32 scale = div(range, all(steps));
      const F32 first = steps <= kMostSteps ? sub(low, middle) : mul(scale, all(-kMostSteps / 2));
      F32 total = zero();
      F32 total_q = zero();
      F32 squares = zero();
      F32 products = zero();
      for (int64_t k = start; k < end; k++) {
        const F32 value = sub(load(&x[k][column]), middle);
        const F32 q = steps_of(value, first, scale, 0, kMostSteps);
        total = add(total, value);
        total_q = add(total_q, q);
        squares = muladd(q, q, squares);
        products = muladd(q, value, products);
      }
      const F32 spread = sub(mul(num, squares), mul(total_q, total_q));
      const F32 slope = div(sub(mul(num, products), mul(total_q, total)),
                            where_less(zero(), spread, spread, all(1)));
      const F32 base = div(sub(total, mul(slope, total_q)), num);
      const F32 explained = add(mul(slope, products), mul(base, total));
      best_scale = where_less(best, explained, slope, best_scale);
      best_min = where_less(best, explained, add(base, middle), best_min);
      best = larger(best, explained);
    }
    const F32 scale = rounded(best_scale);
    const F32 least = rounded(best_min);
    store(&scales[start / w.group][column], scale);
    store(&mins[start / w.group][column], least);
    for (int64_t k = start; k < end; k++) {
      F32 steps = steps_of(load(&x[k][column]), least, scale, 0, kMostSteps);
      steps = where_less(zero(), scale, steps, zero());
      write_codes(k, column, steps, 0);
    }
  }
};

}  // namespace WEFT_NAMESPACE
}  // namespace weft
