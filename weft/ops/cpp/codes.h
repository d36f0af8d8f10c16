// Panels of codes: where their scales stand (program.h draws it), reading them one by one, and a
// piece of them at once.
#pragma once

#include "program.h"
#include "simd.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int kVectorsOfPanel = kPanel / kLanes;
constexpr int kRowGroup = 32;  // inputs of a row that share a scale

WEFT_INLINE bool has_codes(const PackedWeight& w) {
  return w.format == kI8 || w.format == kI6 || w.format == kI4 || w.format == kI3 ||
         w.format == kI2;
}

// Inputs that share both a scale of the weight and one of the rows.
WEFT_INLINE int64_t block_of(const PackedWeight& w) { return least(w.group, kRowGroup); }

// Inputs that tiles multiply by a scale of the weight at once: a block, or several where groups are
// larger. The last span of a row may be shorter.
constexpr int64_t kLongestSpan = 128;
WEFT_INLINE int64_t span_of(const PackedWeight& w) {
  if (w.group == w.padded_in || w.group % kLongestSpan == 0)
    return kLongestSpan;
  return w.group % kInStep ? block_of(w) : kInStep;
}

// Scales of one output.
WEFT_INLINE int64_t groups_of(const PackedWeight& w) { return ceil_div(w.padded_in, w.group); }
WEFT_INLINE int64_t coarse_groups_of(const PackedWeight& w) {
  return w.scale_type == kScaleCoarse ? ceil_div(w.padded_in, kCoarse) : 0;
}
WEFT_INLINE int64_t bytes_of_scale(const PackedWeight& w) {
  return w.scale_type == kScaleF32 ? 4 : w.scale_type == kScaleCoarse ? 1 : 2;
}

// Where scale (or min) `group` of the first output of a panel stands.
WEFT_INLINE char* address_of_scale(const PackedWeight& w, char* panel, int64_t group, bool is_min) {
  const int64_t kinds = w.has_mins ? 2 : 1;
  char* fine = panel + coarse_groups_of(w) * kinds * kPanel * 2;
  return fine + (group * kinds + is_min) * kPanel * bytes_of_scale(w);
}

WEFT_INLINE char* address_of_coarse(const PackedWeight& w, char* panel, int64_t group,
                                    bool is_min) {
  return panel + (group * (w.has_mins ? 2 : 1) + is_min) * kPanel * 2;
}

// Groups of inputs with one scale, of shorts.
WEFT_INLINE int64_t short_groups_of(const PackedWeight& w) {
  return ceil_div(w.padded_in, kShortGroup);
}

WEFT_INLINE int64_t bytes_of_head(const PackedWeight& w) {
  if (w.format == kI16)
    return short_groups_of(w) * kPanel * 4;
  if (!has_codes(w))
    return 0;
  const int64_t end =
      address_of_scale(w, nullptr, groups_of(w), false) - static_cast<char*>(nullptr);
  return ceil_div(end, 64) * 64;
}

// The scale (or min) of an output for input k.
static float scale_of(const PackedWeight& w, char* panel, int64_t column, int64_t k, bool is_min) {
  const char* scale = address_of_scale(w, panel, k / w.group, is_min);
  switch (w.scale_type) {
    case kScaleF32:
      return ((const float*)scale)[column];
    case kScaleF16:
      return half_to_float(((const uint16_t*)scale)[column]);
    case kScaleBf16:
      return to_float(((const bf16*)scale)[column]);
  }
  const char* coarse = address_of_coarse(w, panel, k / kCoarse, is_min);
  const float factor = half_to_float(((const uint16_t*)coarse)[column]) * w.unit;
  return ((const int8_t*)scale)[column] * factor;
}

// kLanes coarse factors from a column on.
WEFT_INLINE F32 coarse_at(const char* coarse, int column, float unit) {
  return mul(load_f16((const uint16_t*)coarse + column), all(unit));
}

// kLanes scales from a column on.
template <int64_t kType>
WEFT_INLINE F32 scales_at(const char* scale, const char* coarse, int column, float unit) {
  if constexpr (kType == kScaleF32)
    return load((const float*)scale + column);
  if constexpr (kType == kScaleF16)
    return load_f16((const uint16_t*)scale + column);
  if constexpr (kType == kScaleBf16)
    return load_bf16((const bf16*)scale + column);
  if constexpr (kType == kScaleCoarse) {
    return mul(load_i8((const int8_t*)scale + column), coarse_at(coarse, column, unit));
  }
}

// Without a division for each span: with one row they would be seen.
template <int64_t kType>
static void spread_scales_of(const PackedWeight& w, char* panel, int64_t k, int64_t num,
                             bool is_min, float* out) {
  const int64_t span = span_of(w);
  const int64_t stride = (w.has_mins ? 2 : 1) * kPanel * bytes_of_scale(w);
  int64_t group = k / w.group;
  int64_t group_end = (group + 1) * w.group;
  const char* scale = address_of_scale(w, panel, group, is_min);
  for (int64_t i = k; i < k + num; i += span, out += kPanel) {
    if (i >= group_end) {
      group_end += w.group;
      scale += stride;
    }
    const char* coarse =
        kType == kScaleCoarse ? address_of_coarse(w, panel, i / kCoarse, is_min) : nullptr;
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      store(out + v * kLanes, scales_at<kType>(scale, coarse, v * kLanes, w.unit));
    }
  }
}

// Those of inputs k .. k + num as floats, one row for each span: out[num / span][kPanel].
static void spread_scales(const PackedWeight& w, char* panel, int64_t k, int64_t num, bool is_min,
                          float* out) {
  switch (w.scale_type) {
    case kScaleF32:
      return spread_scales_of<kScaleF32>(w, panel, k, num, is_min, out);
    case kScaleF16:
      return spread_scales_of<kScaleF16>(w, panel, k, num, is_min, out);
    case kScaleBf16:
      return spread_scales_of<kScaleBf16>(w, panel, k, num, is_min, out);
    default:
      return spread_scales_of<kScaleCoarse>(w, panel, k, num, is_min, out);
  }
}

// [k / 8][kPanel][4] nibbles -> [k / 4][kPanel][4] bytes: what they stand for, if there is a table.
static void make_bytes_of_nibbles(const PackedWeight& w, const char* nibbles, int64_t k,
                                  char* bytes) {
  const I32 table = load_table(w.table);
  for (int64_t i = 0; i < k; i += 8, nibbles += 4 * kPanel, bytes += 8 * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      const I32 both = load_i32((const int32_t*)nibbles + v * kLanes);
      I32 low = low_nibbles(both);
      I32 high = high_nibbles(both);
      if (w.has_table) {
        low = shuffle_bytes(table, low);
        high = shuffle_bytes(table, high);
      }
      store_i32((int32_t*)bytes + v * kLanes, low);
      store_i32((int32_t*)bytes + kPanel + v * kLanes, high);
    }
  }
}

// [k / 16][3][kPanel][4] -> [k / 4][kPanel][4] bytes
static void make_bytes_of_sixes(const char* sixes, int64_t k, char* bytes) {
  for (int64_t i = 0; i < k; i += 16, sixes += 12 * kPanel, bytes += 16 * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      const int32_t* from = (const int32_t*)sixes + v * kLanes;
      int32_t* to = (int32_t*)bytes + v * kLanes;
      const I32 first = load_i32(from);
      const I32 second = load_i32(from + kPanel);
      const I32 twos = load_i32(from + 2 * kPanel);
      store_i32(to, six_bits<0>(first, twos));
      store_i32(to + kPanel, six_bits<1>(first, twos));
      store_i32(to + 2 * kPanel, six_bits<2>(second, twos));
      store_i32(to + 3 * kPanel, six_bits<3>(second, twos));
    }
  }
}

// [k / 16][kPanel][4] -> [k / 4][kPanel][4] bytes
static void make_bytes_of_twos(const char* twos, int64_t k, char* bytes) {
  for (int64_t i = 0; i < k; i += 16, twos += 4 * kPanel, bytes += 16 * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      const I32 four = load_i32((const int32_t*)twos + v * kLanes);
      int32_t* to = (int32_t*)bytes + v * kLanes;
      store_i32(to, two_bits<0>(four));
      store_i32(to + kPanel, two_bits<1>(four));
      store_i32(to + 2 * kPanel, two_bits<2>(four));
      store_i32(to + 3 * kPanel, two_bits<3>(four));
    }
  }
}

// Codes of three bits of inputs 4 kPart and after, or what they stand for, if there is a table.
template <int kPart>
WEFT_INLINE I32 threes_at(const char* threes, int column, bool has_table, I32 table) {
  const int32_t* from = (const int32_t*)threes + column;
  const I32 codes =
      three_bits<kPart>(load_i32(from + kPart / 4 * kPanel), load_i32(from + 2 * kPanel));
  return has_table ? shuffle_bytes(table, codes) : codes;
}

template <int kPart>
WEFT_INLINE void store_threes(const char* threes, int column, bool has_table, I32 table,
                              char* bytes) {
  if constexpr (kPart < 8) {
    store_i32((int32_t*)bytes + kPart * kPanel + column,
              threes_at<kPart>(threes, column, has_table, table));
    store_threes<kPart + 1>(threes, column, has_table, table, bytes);
  }
}

// [k / 32][3][kPanel][4] -> [k / 4][kPanel][4] bytes: what they stand for, if there is a table.
static void make_bytes_of_threes(const PackedWeight& w, const char* threes, int64_t k,
                                 char* bytes) {
  const I32 table = load_table(w.table);
  for (int64_t i = 0; i < k; i += 32, threes += 12 * kPanel, bytes += 32 * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++)
      store_threes<0>(threes, v * kLanes, w.has_table, table, bytes);
  }
}

// A piece of a panel of codes of fewer than eight bits -> [k / 4][kPanel][4] bytes.
static void make_bytes_of_codes(const PackedWeight& w, const char* codes, int64_t k, char* bytes) {
  switch (w.format) {
    case kI6:
      return make_bytes_of_sixes(codes, k, bytes);
    case kI3:
      return make_bytes_of_threes(w, codes, k, bytes);
    case kI2:
      return make_bytes_of_twos(codes, k, bytes);
    default:
      return make_bytes_of_nibbles(w, codes, k, bytes);
  }
}

// [k / 4][kPanel][4] bytes -> [k / 4][2][kPanel][4]: less 128, their sizes first. The bytes may
// stand in the second half of `out`.
static void make_signed(const char* bytes, int64_t k, char* out) {
  for (int64_t i = 0; i < k; i += 4, bytes += 4 * kPanel, out += 8 * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfPanel; v++) {
      const I32 weight = less_128(load_i32((const int32_t*)bytes + v * kLanes));
      store_i32((int32_t*)out + v * kLanes, sizes_of(weight));
      store_i32((int32_t*)out + kPanel + v * kLanes, weight);
    }
  }
}

// The largest code (of a table: what one stands for), or the next bound that kernels know.
static int most_code_of(const PackedWeight& w) {
  if (w.format == kI8)
    return 255;
  if (!w.has_table)
    return w.format == kI6 ? 63 : 15;
  bool is_low = true;
  for (int i = 0; i < 16; i++)
    is_low &= w.table[i] <= 128;
  return is_low ? 128 : 255;
}

WEFT_INLINE bool has_low_codes(const PackedWeight& w) { return most_code_of(w) <= 128; }

// What is left of a weight's offset to take off each code: products of large codes take off
// kTakenOff themselves.
WEFT_INLINE int32_t offset_left(const PackedWeight& w) {
  return int32_t(w.offset) - (has_low_codes(w) ? 0 : kTakenOff);
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
