// Vectors of floats, for several instruction sets, one per compilation:
//
//   WEFT_ISA_AVX512   16 lanes; with WEFT_BF16 also dot products of bfloat16 pairs
//   WEFT_ISA_AVX2      8 lanes (with FMA and F16C)
//   neither            4 lanes, in the vector extensions of GCC and Clang: any processor
//
// With WEFT_VNNI the first two have an instruction for sums of four products of bytes.
//
// Kernels are written once against these names. Everything is in a namespace of the instruction set
// and has internal linkage, so that no function built for one processor is ever called on another.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(WEFT_ISA_AVX512) || defined(WEFT_ISA_AVX2)
#include <immintrin.h>
#endif

#define WEFT_INLINE static inline __attribute__((always_inline))

using bf16 = uint16_t;  // the upper half of a float

namespace weft {
namespace WEFT_NAMESPACE {

// ---------------------------------------------------------------- scalars

WEFT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
WEFT_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
WEFT_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

WEFT_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Nearest, ties to even; a NaN stays one.
WEFT_INLINE bf16 to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000)
    return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Of a half float, exactly.
WEFT_INLINE float half_to_float(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16;
  const uint32_t rest = x & 0x7fff;
  if (rest < 0x400) {  // below the normal ones: a multiple of 2^-24
    const float value = float(rest) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t bits =
      sign | (rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + 0x38000000);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Nearest, ties to even; a NaN stays one.
WEFT_INLINE uint16_t to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000)
    return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000)
    return uint16_t(sign | 0x7c00);  // 65,520 and more
  // Below the normal ones: a multiple of 2^-24, to which adding 0.5 rounds.
  if (bits < 0x38800000) {
    float size;
    memcpy(&size, &bits, 4);
    size += 0.5f;
    memcpy(&bits, &size, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}

// Sums of 64 signed bytes, 16 by 16.
WEFT_INLINE void sums_of_sixteen(const int8_t* p, int32_t* out) {
#if defined(WEFT_ISA_AVX512) || defined(WEFT_ISA_AVX2)
  const __m256i raise = _mm256_set1_epi8(-128);
  const __m256i none = _mm256_setzero_si256();
  const __m256i low =
      _mm256_sad_epu8(_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p), raise), none);
  const __m256i high =
      _mm256_sad_epu8(_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p + 1), raise), none);
  // Sums of 8 bytes each: 0 1 | 2 3 and 4 5 | 6 7.
  const __m256i pairs =
      _mm256_add_epi64(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
  const __m256i in_order =
      _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6));
  _mm_storeu_si128((__m128i*)out,
                   _mm_sub_epi32(_mm256_castsi256_si128(in_order), _mm_set1_epi32(16 * 128)));
#else
  for (int i = 0; i < 4; i++) {
    out[i] = 0;
    for (int j = 0; j < 16; j++)
      out[i] += p[16 * i + j];
  }
#endif
}

#if defined(WEFT_ISA_AVX512)
// ---------------------------------------------------------------- 16 lanes

constexpr int kLanes = 16;
using F32 = __m512;
using I32 = __m512i;
using Pairs = __m512i;  // 32 bf16: lane i holds elements 2i (low half) and 2i + 1

WEFT_INLINE __mmask16 first(int n) {
  return __mmask16(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1);
}

WEFT_INLINE F32 zero() { return _mm512_setzero_ps(); }
WEFT_INLINE F32 all(float x) { return _mm512_set1_ps(x); }
WEFT_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
// The first n, else 0.
WEFT_INLINE F32 load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
WEFT_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
WEFT_INLINE void store(float* p, F32 x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
WEFT_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
WEFT_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
WEFT_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
WEFT_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
WEFT_INLINE F32 larger(F32 a, F32 b) { return _mm512_max_ps(a, b); }
WEFT_INLINE F32 smaller(F32 a, F32 b) { return _mm512_min_ps(a, b); }
WEFT_INLINE F32 magnitude(F32 a) { return _mm512_abs_ps(a); }
WEFT_INLINE F32 muladd(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }      // a b + c
WEFT_INLINE F32 negmuladd(F32 a, F32 b, F32 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
WEFT_INLINE float sum(F32 a) { return _mm512_reduce_add_ps(a); }
WEFT_INLINE float largest(F32 a) { return _mm512_reduce_max_ps(a); }
WEFT_INLINE F32 first_or(F32 a, int n, float other) {
  return _mm512_mask_mov_ps(all(other), first(n), a);
}
// Lanes from..to - 1 of a, elsewhere `other`.
WEFT_INLINE F32 only(F32 a, int from, int to, float other) {
  return _mm512_mask_mov_ps(all(other), __mmask16(first(to) & ~first(from)), a);
}

WEFT_INLINE F32 round_nearest(F32 a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
WEFT_INLINE F32 times_power_of_two(F32 a, F32 n) { return _mm512_scalef_ps(a, n); }

WEFT_INLINE F32 load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
WEFT_INLINE void store_bf16(bf16* p, F32 x) {
#if defined(WEFT_BF16) && !defined(WEFT_EMULATE)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd_bit = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd_bit);
  __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
WEFT_INLINE F32 load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
WEFT_INLINE F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
// Nearest, ties to even.
WEFT_INLINE void store_f16(uint16_t* p, F32 x) {
  _mm256_storeu_si256((__m256i*)p,
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The nearest whole numbers.
WEFT_INLINE void store_shorts(int16_t* p, F32 x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
// Round to nearest, limit to -128..127.
WEFT_INLINE void store_i8(int8_t* p, F32 x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
// The same for four contiguous vectors.
WEFT_INLINE void store_i8(int8_t* p, F32 a, F32 b, F32 c, F32 d) {
  const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  const __m512i cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(ab, cd)));
}

WEFT_INLINE Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
WEFT_INLINE F32 evens(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
WEFT_INLINE F32 odds(Pairs x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000))));
}

WEFT_INLINE I32 zero_i32() { return _mm512_setzero_si512(); }
WEFT_INLINE I32 all_i32(int32_t x) { return _mm512_set1_epi32(x); }
WEFT_INLINE I32 load_i32(const int32_t* p) { return _mm512_loadu_si512(p); }
WEFT_INLINE void store_i32(int32_t* p, I32 x) { _mm512_storeu_si512(p, x); }
WEFT_INLINE I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
WEFT_INLINE I32 larger(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
WEFT_INLINE I32 bits_of_magnitude(F32 a) { return _mm512_castps_si512(magnitude(a)); }
WEFT_INLINE int32_t largest(I32 a) { return _mm512_reduce_max_epi32(a); }
// The largest lane of each.
WEFT_INLINE void largest_of_four(const I32 (&a)[4], int32_t* out) {
  const __m512i ab = larger(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i cd = larger(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  const __m512i all_four = larger(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half =
      _mm256_max_epi32(_mm512_castsi512_si256(all_four), _mm512_extracti64x4_epi64(all_four, 1));
  _mm_storeu_si128((__m128i*)out,
                   _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
WEFT_INLINE F32 to_f32(I32 a) { return _mm512_cvtepi32_ps(a); }
// a where x < y, else b.
WEFT_INLINE F32 where_less(F32 x, F32 y, F32 a, F32 b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a);
}

// ---------------------------------------------------------------- 8 lanes
#elif defined(WEFT_ISA_AVX2)

constexpr int kLanes = 8;
using F32 = __m256;
using I32 = __m256i;
using Pairs = __m256i;  // 16 bf16

WEFT_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

WEFT_INLINE F32 zero() { return _mm256_setzero_ps(); }
WEFT_INLINE F32 all(float x) { return _mm256_set1_ps(x); }
WEFT_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
WEFT_INLINE F32 load(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
WEFT_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
WEFT_INLINE void store(float* p, F32 x, int n) { _mm256_maskstore_ps(p, first(n), x); }
WEFT_INLINE F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
WEFT_INLINE F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
WEFT_INLINE F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
WEFT_INLINE F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
WEFT_INLINE F32 larger(F32 a, F32 b) { return _mm256_max_ps(a, b); }
WEFT_INLINE F32 smaller(F32 a, F32 b) { return _mm256_min_ps(a, b); }
WEFT_INLINE F32 magnitude(F32 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
WEFT_INLINE F32 muladd(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
WEFT_INLINE F32 negmuladd(F32 a, F32 b, F32 c) { return _mm256_fnmadd_ps(a, b, c); }
WEFT_INLINE float sum(F32 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
WEFT_INLINE float largest(F32 a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
WEFT_INLINE F32 first_or(F32 a, int n, float other) {
  return _mm256_blendv_ps(all(other), a, _mm256_castsi256_ps(first(n)));
}
WEFT_INLINE F32 only(F32 a, int from, int to, float other) {
  return _mm256_blendv_ps(all(other), a,
                          _mm256_castsi256_ps(_mm256_andnot_si256(first(from), first(to))));
}

WEFT_INLINE F32 round_nearest(F32 a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// n in -126..127
WEFT_INLINE F32 times_power_of_two(F32 a, F32 n) {
  __m256i exponent =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}

WEFT_INLINE F32 load_bf16(const bf16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
WEFT_INLINE void store_bf16(bf16* p, F32 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd_bit);
  __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  rounded =
      _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  __m256i halves = _mm256_srli_epi32(rounded, 16);
  halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(halves));
}
WEFT_INLINE F32 load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
WEFT_INLINE F32 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
WEFT_INLINE void store_f16(uint16_t* p, F32 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
WEFT_INLINE void store_shorts(int16_t* p, F32 x) {
  const __m256i words = _mm256_cvtps_epi32(x);
  const __m128i low = _mm256_castsi256_si128(words);
  const __m128i high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(low, high));
}
WEFT_INLINE void store_i8(int8_t* p, F32 x) {
  __m256i rounded = _mm256_cvtps_epi32(x);
  __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
WEFT_INLINE void store_i8(int8_t* p, F32 a, F32 b, F32 c, F32 d) {
  const __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  const __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order));
}

WEFT_INLINE Pairs load_pairs(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
WEFT_INLINE F32 evens(Pairs x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
WEFT_INLINE F32 odds(Pairs x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))));
}

WEFT_INLINE I32 zero_i32() { return _mm256_setzero_si256(); }
WEFT_INLINE I32 all_i32(int32_t x) { return _mm256_set1_epi32(x); }
WEFT_INLINE I32 load_i32(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
WEFT_INLINE void store_i32(int32_t* p, I32 x) { _mm256_storeu_si256((__m256i*)p, x); }
WEFT_INLINE I32 add(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
WEFT_INLINE I32 larger(I32 a, I32 b) { return _mm256_max_epi32(a, b); }
WEFT_INLINE I32 bits_of_magnitude(F32 a) { return _mm256_castps_si256(magnitude(a)); }
WEFT_INLINE int32_t largest(I32 a) {
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
WEFT_INLINE void largest_of_four(const I32 (&a)[4], int32_t* out) {
  const __m256i ab = larger(_mm256_unpacklo_epi32(a[0], a[1]), _mm256_unpackhi_epi32(a[0], a[1]));
  const __m256i cd = larger(_mm256_unpacklo_epi32(a[2], a[3]), _mm256_unpackhi_epi32(a[2], a[3]));
  const __m256i all_four = larger(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  const __m128i high = _mm256_extracti128_si256(all_four, 1);
  _mm_storeu_si128((__m128i*)out, _mm_max_epi32(_mm256_castsi256_si128(all_four), high));
}
WEFT_INLINE F32 to_f32(I32 a) { return _mm256_cvtepi32_ps(a); }
WEFT_INLINE F32 where_less(F32 x, F32 y, F32 a, F32 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}

// ---------------------------------------------------------------- 4 lanes
#else

constexpr int kLanes = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));
typedef uint32_t U32 __attribute__((vector_size(16)));
using Pairs = U32;  // 8 bf16

WEFT_INLINE F32 zero() { return F32{}; }
WEFT_INLINE F32 all(float x) { return F32{x, x, x, x}; }
WEFT_INLINE F32 load(const float* p) {
  F32 x;
  memcpy(&x, p, sizeof x);
  return x;
}
WEFT_INLINE F32 load(const float* p, int n) {
  F32 x{};
  for (int i = 0; i < n && i < 4; i++)
    x[i] = p[i];
  return x;
}
WEFT_INLINE void store(float* p, F32 x) { memcpy(p, &x, sizeof x); }
WEFT_INLINE void store(float* p, F32 x, int n) {
  for (int i = 0; i < n && i < 4; i++)
    p[i] = x[i];
}
WEFT_INLINE F32 add(F32 a, F32 b) { return a + b; }
WEFT_INLINE F32 sub(F32 a, F32 b) { return a - b; }
WEFT_INLINE F32 mul(F32 a, F32 b) { return a * b; }
WEFT_INLINE F32 div(F32 a, F32 b) { return a / b; }
WEFT_INLINE F32 larger(F32 a, F32 b) { return a > b ? a : b; }
WEFT_INLINE F32 smaller(F32 a, F32 b) { return a < b ? a : b; }
WEFT_INLINE F32 magnitude(F32 a) { return (F32)((U32)a & 0x7fffffffu); }
WEFT_INLINE F32 muladd(F32 a, F32 b, F32 c) { return a * b + c; }
WEFT_INLINE F32 negmuladd(F32 a, F32 b, F32 c) { return c - a * b; }
WEFT_INLINE float sum(F32 a) { return (a[0] + a[1]) + (a[2] + a[3]); }
WEFT_INLINE float largest(F32 a) {
  float x = a[0] > a[1] ? a[0] : a[1];
  float y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
WEFT_INLINE F32 first_or(F32 a, int n, float other) {
  for (int i = n < 0 ? 0 : n; i < 4; i++)
    a[i] = other;
  return a;
}
WEFT_INLINE F32 only(F32 a, int from, int to, float other) {
  for (int i = 0; i < 4; i++)
    a[i] = from <= i && i < to ? a[i] : other;
  return a;
}

WEFT_INLINE F32 round_nearest(F32 a) {
  for (int i = 0; i < 4; i++)
    a[i] = __builtin_rintf(a[i]);
  return a;
}
// n in -126..127
WEFT_INLINE F32 times_power_of_two(F32 a, F32 n) {
  return a * (F32)((__builtin_convertvector(n, I32) + 127) << 23);
}

WEFT_INLINE F32 load_bf16(const bf16* p) {
  return F32{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
WEFT_INLINE void store_bf16(bf16* p, F32 x) {
  for (int i = 0; i < 4; i++)
    p[i] = to_bf16(x[i]);
}
WEFT_INLINE F32 load_i8(const int8_t* p) {
  return F32{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
}
WEFT_INLINE F32 load_f16(const uint16_t* p) {
  return F32{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
WEFT_INLINE void store_f16(uint16_t* p, F32 x) {
  for (int i = 0; i < 4; i++)
    p[i] = to_half(x[i]);
}
WEFT_INLINE void store_shorts(int16_t* p, F32 x) {
  const F32 nearest = round_nearest(x);
  for (int i = 0; i < kLanes; i++)
    p[i] = int16_t(nearest[i]);
}
WEFT_INLINE void store_i8(int8_t* p, F32 x) {
  for (int i = 0; i < 4; i++) {
    float y = __builtin_rintf(x[i]);
    p[i] = int8_t(y > 127 ? 127 : y < -128 ? -128 : y);
  }
}
WEFT_INLINE void store_i8(int8_t* p, F32 a, F32 b, F32 c, F32 d) {
  store_i8(p, a);
  store_i8(p + 4, b);
  store_i8(p + 8, c);
  store_i8(p + 12, d);
}

WEFT_INLINE Pairs load_pairs(const bf16* p) {
  Pairs x;
  memcpy(&x, p, sizeof x);
  return x;
}
WEFT_INLINE F32 evens(Pairs x) { return (F32)(x << 16); }
WEFT_INLINE F32 odds(Pairs x) { return (F32)(x & 0xffff0000u); }

WEFT_INLINE I32 zero_i32() { return I32{}; }
WEFT_INLINE I32 all_i32(int32_t x) { return I32{x, x, x, x}; }
WEFT_INLINE I32 load_i32(const int32_t* p) {
  I32 x;
  memcpy(&x, p, sizeof x);
  return x;
}
WEFT_INLINE void store_i32(int32_t* p, I32 x) { memcpy(p, &x, sizeof x); }
WEFT_INLINE I32 add(I32 a, I32 b) { return a + b; }
WEFT_INLINE I32 larger(I32 a, I32 b) { return a > b ? a : b; }
WEFT_INLINE I32 bits_of_magnitude(F32 a) { return (I32)magnitude(a); }
WEFT_INLINE int32_t largest(I32 a) {
  int32_t x = a[0] > a[1] ? a[0] : a[1];
  int32_t y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
WEFT_INLINE void largest_of_four(const I32 (&a)[4], int32_t* out) {
  for (int i = 0; i < 4; i++)
    out[i] = largest(a[i]);
}
WEFT_INLINE F32 to_f32(I32 a) { return __builtin_convertvector(a, F32); }
WEFT_INLINE F32 where_less(F32 x, F32 y, F32 a, F32 b) { return x < y ? a : b; }

#endif

// ---------------------------------------------------------------- products of small types

#if defined(WEFT_BF16)
// acc + low a * low b + high a * high b in each lane. WEFT_EMULATE computes the same without the
// instruction, so that the kernels which use it can be tested on any processor.
WEFT_INLINE F32 dot_pairs(F32 acc, Pairs a, Pairs b) {
#if defined(WEFT_EMULATE)
  return muladd(odds(a), odds(b), muladd(evens(a), evens(b), acc));
#else
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#endif
}
#endif

// sum + low a * low b + high a * high b in each lane, of shorts.
WEFT_INLINE I32 dot_shorts(I32 sum, I32 a, I32 b) {
#if defined(WEFT_ISA_AVX512) && defined(WEFT_VNNI)
  return _mm512_dpwssd_epi32(sum, a, b);
#elif defined(WEFT_ISA_AVX512)
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#elif defined(WEFT_ISA_AVX2) && defined(WEFT_VNNI)
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#elif defined(WEFT_ISA_AVX2)
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#else
  const I32 low = ((I32)((U32)a << 16) >> 16) * ((I32)((U32)b << 16) >> 16);
  return sum + low + (a >> 16) * (b >> 16);
#endif
}

// Sums of four products of bytes in each lane: `activation` holds 4 signed bytes a lane, -127..127,
// `code` 4 unsigned ones, 0..255. `dot4_low` is for codes of at most 128, where fewer instructions
// do. `dot4` takes kTakenOff off each code, where that is cheaper than not to.
#if defined(WEFT_ISA_AVX512) && defined(WEFT_VNNI)
constexpr int kTakenOff = 0;
constexpr bool kSameDot = true;  // of low codes and of all
WEFT_INLINE I32 dot4(I32 acc, I32 activation, I32 code) {
  return _mm512_dpbusd_epi32(acc, code, activation);
}
WEFT_INLINE I32 dot4_low(I32 acc, I32 activation, I32 code) { return dot4(acc, activation, code); }
#elif defined(WEFT_ISA_AVX512)
constexpr int kTakenOff = 128;
constexpr bool kSameDot = false;
WEFT_INLINE I32 less_128(I32 code) { return _mm512_xor_si512(code, _mm512_set1_epi8(-128)); }
WEFT_INLINE I32 sizes_of(I32 weight) { return _mm512_abs_epi8(weight); }  // 0..128
WEFT_INLINE I32 dot4_signed(I32 acc, I32 activation, I32 size, I32 weight) {
  const __m512i zero = _mm512_setzero_si512();
  const __mmask64 is_negative = _mm512_movepi8_mask(weight);
  __m512i turned = _mm512_mask_sub_epi8(activation, is_negative, zero, activation);
  __m512i words = _mm512_maddubs_epi16(size, turned);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
}
WEFT_INLINE I32 dot4(I32 acc, I32 activation, I32 code) {
  const I32 weight = less_128(code);
  return dot4_signed(acc, activation, sizes_of(weight), weight);
}
WEFT_INLINE I32 dot4_low(I32 acc, I32 activation, I32 code) {
  __m512i words = _mm512_maddubs_epi16(code, activation);  // at most 2 * 128 * 127
  return _mm512_add_epi32(acc, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
}
#elif defined(WEFT_ISA_AVX2) && defined(WEFT_VNNI)
constexpr int kTakenOff = 0;
constexpr bool kSameDot = true;
WEFT_INLINE I32 dot4(I32 acc, I32 activation, I32 code) {
  return _mm256_dpbusd_avx_epi32(acc, code, activation);
}
WEFT_INLINE I32 dot4_low(I32 acc, I32 activation, I32 code) { return dot4(acc, activation, code); }
#elif defined(WEFT_ISA_AVX2)
constexpr int kTakenOff = 128;
constexpr bool kSameDot = false;
WEFT_INLINE I32 less_128(I32 code) { return _mm256_xor_si256(code, _mm256_set1_epi8(-128)); }
WEFT_INLINE I32 sizes_of(I32 weight) { return _mm256_sign_epi8(weight, weight); }  // 0..128
WEFT_INLINE I32 dot4_signed(I32 acc, I32 activation, I32 size, I32 weight) {
  __m256i words = _mm256_maddubs_epi16(size, _mm256_sign_epi8(activation, weight));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
WEFT_INLINE I32 dot4(I32 acc, I32 activation, I32 code) {
  const I32 weight = less_128(code);
  return dot4_signed(acc, activation, sizes_of(weight), weight);
}
WEFT_INLINE I32 dot4_low(I32 acc, I32 activation, I32 code) {
  __m256i words = _mm256_maddubs_epi16(code, activation);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
#else
constexpr int kTakenOff = 0;
constexpr bool kSameDot = true;
WEFT_INLINE I32 dot4(I32 acc, I32 activation, I32 code) {
  for (int k = 0; k < 4; k++)
    acc += ((activation << (24 - 8 * k)) >> 24) * ((code >> (8 * k)) & 255);
  return acc;
}
WEFT_INLINE I32 dot4_low(I32 acc, I32 activation, I32 code) { return dot4(acc, activation, code); }
#endif

// `dot4` of codes that many rows use: what it makes of a code is made once.
#if (defined(WEFT_ISA_AVX512) || defined(WEFT_ISA_AVX2)) && !defined(WEFT_VNNI)
constexpr bool kHasSizes = true;
#else
constexpr bool kHasSizes = false;
WEFT_INLINE I32 less_128(I32 code) { return code; }
WEFT_INLINE I32 sizes_of(I32 weight) { return weight; }
WEFT_INLINE I32 dot4_signed(I32 acc, I32, I32, I32) { return acc; }
#endif

// The same in two steps, for codes that are small enough for many products to fit into 16 bits:
// products of pairs are added as 16 bits, and their sums are made sums of four at the end. With an
// instruction for sums of four there is nothing to gain.
#if defined(WEFT_ISA_AVX512) && !defined(WEFT_VNNI)
constexpr bool kHasPairs = true;
WEFT_INLINE I32 add_pairs(I32 pairs, I32 activation, I32 code) {
  return _mm512_add_epi16(pairs, _mm512_maddubs_epi16(code, activation));
}
WEFT_INLINE I32 sum_of_pairs(I32 acc, I32 pairs) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#elif defined(WEFT_ISA_AVX2) && !defined(WEFT_VNNI)
constexpr bool kHasPairs = true;
WEFT_INLINE I32 add_pairs(I32 pairs, I32 activation, I32 code) {
  return _mm256_add_epi16(pairs, _mm256_maddubs_epi16(code, activation));
}
WEFT_INLINE I32 sum_of_pairs(I32 acc, I32 pairs) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
constexpr bool kHasPairs = false;
WEFT_INLINE I32 add_pairs(I32 pairs, I32, I32) { return pairs; }
WEFT_INLINE I32 sum_of_pairs(I32 acc, I32) { return acc; }
#endif

// The low and high halves of bytes, 0..15 each.
WEFT_INLINE I32 low_nibbles(I32 bytes) {
#if defined(WEFT_ISA_AVX512)
  return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
#elif defined(WEFT_ISA_AVX2)
  return _mm256_and_si256(bytes, _mm256_set1_epi8(15));
#else
  return bytes & 0x0f0f0f0f;
#endif
}
WEFT_INLINE I32 high_nibbles(I32 bytes) {
#if defined(WEFT_ISA_AVX512)
  return _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
#elif defined(WEFT_ISA_AVX2)
  return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
#else
  return (I32)((U32)bytes >> 4) & 0x0f0f0f0f;
#endif
}

// Six bits of each byte: four of `fours`, the low ones if `part` is even, with two of `twos` above
// them, the lowest for part 0, then upwards.
template <int kPart>
WEFT_INLINE I32 six_bits(I32 fours, I32 twos) {
  constexpr int kShift = 4 - 2 * kPart;  // to the left, that brings the two to their place
#if defined(WEFT_ISA_AVX512)
  const I32 low = kPart % 2 ? _mm512_srli_epi16(fours, 4) : fours;
  const I32 moved =
      kShift >= 0 ? _mm512_slli_epi16(twos, kShift & 15) : _mm512_srli_epi16(twos, -kShift & 15);
  const I32 high = _mm512_and_si512(moved, _mm512_set1_epi8(0x30));
  return _mm512_ternarylogic_epi32(low, _mm512_set1_epi8(15), high, 0xea);  // low & 15 | high
#elif defined(WEFT_ISA_AVX2)
  const I32 low = kPart % 2 ? high_nibbles(fours) : low_nibbles(fours);
  const I32 moved =
      kShift >= 0 ? _mm256_slli_epi16(twos, kShift & 15) : _mm256_srli_epi16(twos, -kShift & 15);
  return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
#else
  const I32 low = kPart % 2 ? high_nibbles(fours) : low_nibbles(fours);
  const U32 moved = kShift >= 0 ? (U32)twos << (kShift & 15) : (U32)twos >> (-kShift & 15);
  return low | ((I32)moved & 0x30303030);
#endif
}

// The bits of `mask` of each byte, moved to the right (to the left, if kRight is below 0); none may
// come from another byte.
template <int kRight>
WEFT_INLINE I32 moved_bits(I32 bytes, int8_t mask) {
#if defined(WEFT_ISA_AVX512)
  const I32 moved = kRight >= 0 ? _mm512_srli_epi16(bytes, kRight & 15)
                                : _mm512_slli_epi16(bytes, -kRight & 15);
  return _mm512_and_si512(moved, _mm512_set1_epi8(mask));
#elif defined(WEFT_ISA_AVX2)
  const I32 moved = kRight >= 0 ? _mm256_srli_epi16(bytes, kRight & 15)
                                : _mm256_slli_epi16(bytes, -kRight & 15);
  return _mm256_and_si256(moved, _mm256_set1_epi8(mask));
#else
  const U32 moved = kRight >= 0 ? (U32)bytes >> (kRight & 15) : (U32)bytes << (-kRight & 15);
  return (I32)moved & (mask * 0x01010101);
#endif
}

// Bits n and above of each byte at its lowest place; above them are bits of another one.
WEFT_INLINE I32 moved_right(I32 bytes, int n) {
#if defined(WEFT_ISA_AVX512)
  return _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(n));
#elif defined(WEFT_ISA_AVX2)
  return _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(n));
#else
  return (I32)((U32)bytes >> n);
#endif
}

// Two bits of each byte, the lowest for part 0, then upwards.
template <int kPart>
WEFT_INLINE I32 two_bits(I32 bytes) {
  return moved_bits<2 * kPart>(bytes, 3);
}

// Three bits of each byte: two of `twos`, and bit `kPart` of `ones` above them.
template <int kPart>
WEFT_INLINE I32 three_bits(I32 twos, I32 ones) {
#if defined(WEFT_ISA_AVX512)
  // low & 3 | high & 4
  return _mm512_ternarylogic_epi32(moved_bits<kPart % 4 * 2>(twos, -1), _mm512_set1_epi8(3),
                                   moved_bits<kPart - 2>(ones, 4), 0xea);
#else
  return two_bits<kPart % 4>(twos) | moved_bits<kPart - 2>(ones, 4);
#endif
}

// A table of 16 bytes for `shuffle_bytes`.
WEFT_INLINE I32 load_table(const uint8_t* table) {
#if defined(WEFT_ISA_AVX512)
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
#elif defined(WEFT_ISA_AVX2)
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
#else
  return load_i32((const int32_t*)table);
#endif
}

// What bytes 0..15 stand for in the table.
WEFT_INLINE I32 shuffle_bytes(I32 table, I32 indices) {
#if defined(WEFT_ISA_AVX512)
  return _mm512_shuffle_epi8(table, indices);
#elif defined(WEFT_ISA_AVX2)
  return _mm256_shuffle_epi8(table, indices);
#else
  uint8_t values[16];
  uint8_t bytes[16];
  memcpy(values, &table, 16);
  memcpy(bytes, &indices, 16);
  for (int i = 0; i < 16; i++)
    bytes[i] = values[bytes[i] & 15];
  memcpy(&indices, bytes, 16);
  return indices;
#endif
}

// ---------------------------------------------------------------- functions

// e^x with a relative error below 2e-7, for x limited to -87.3..88.3 (so never quite 0). Powers of
// two are taken out first; what remains, at most ln 2 / 2, is given to the Taylor polynomial.
WEFT_INLINE F32 exponential(F32 x) {
  F32 limited = smaller(larger(x, all(-87.3f)), all(88.3f));
  F32 n = round_nearest(mul(limited, all(1.44269504f)));
  F32 r = negmuladd(n, all(0.693145752f), limited);
  r = negmuladd(n, all(1.42860677e-6f), r);
  F32 p = all(1.0f / 720);
  p = muladd(p, r, all(1.0f / 120));
  p = muladd(p, r, all(1.0f / 24));
  p = muladd(p, r, all(1.0f / 6));
  p = muladd(p, r, all(0.5f));
  p = muladd(p, r, all(1.0f));
  p = muladd(p, r, all(1.0f));
  return times_power_of_two(p, n);
}

WEFT_INLINE F32 silu(F32 x) { return div(x, add(all(1.0f), exponential(sub(zero(), x)))); }

}  // namespace WEFT_NAMESPACE
}  // namespace weft
