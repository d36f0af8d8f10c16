// What sampling needs of an instruction set besides simd.h: lanes as bits and as integers, sums in
// double.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

using Lanes = uint32_t;  // one bit for each lane

WEFT_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
WEFT_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

#if defined(WEFT_ISA_AVX512)

// Lanes with a >= b.
WEFT_INLINE Lanes at_least(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
WEFT_INLINE bool any_nan(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }

WEFT_INLINE I32 add_i32(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
WEFT_INLINE I32 mul_i32(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
WEFT_INLINE I32 and_i32(I32 a, I32 b) { return _mm512_and_si512(a, b); }
template <int n>
WEFT_INLINE I32 xor_shifted(I32 a) {  // a ^ (a >> n), unsigned
  return _mm512_xor_si512(a, _mm512_srli_epi32(a, n));
}
WEFT_INLINE I32 as_i32(F32 a) { return _mm512_castps_si512(a); }

// The lanes of `a` whose bit is set, side by side; all kLanes floats of `p` may be written. Returns
// how many there are.
WEFT_INLINE int store_where(float* p, F32 a, Lanes where) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(__mmask16(where), a));
  return __builtin_popcount(where);
}
// -inf where the bit is 0.
WEFT_INLINE void forbid(float* p, Lanes allowed) {
  _mm512_mask_storeu_ps(p, __mmask16(~allowed), _mm512_set1_ps(-__builtin_inff()));
}

struct Sum {
  __m512d low = _mm512_setzero_pd();
  __m512d high = _mm512_setzero_pd();
};
WEFT_INLINE void add_to(Sum& sum, F32 a) {
  sum.low = _mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(a)));
  sum.high = _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)));
}
WEFT_INLINE double total(Sum sum) { return _mm512_reduce_add_pd(_mm512_add_pd(sum.low, sum.high)); }

#elif defined(WEFT_ISA_AVX2)

WEFT_INLINE Lanes at_least(F32 a, F32 b) {
  return Lanes(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}
WEFT_INLINE bool any_nan(F32 a, F32 b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}

WEFT_INLINE I32 add_i32(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
WEFT_INLINE I32 mul_i32(I32 a, I32 b) { return _mm256_mullo_epi32(a, b); }
WEFT_INLINE I32 and_i32(I32 a, I32 b) { return _mm256_and_si256(a, b); }
template <int n>
WEFT_INLINE I32 xor_shifted(I32 a) {
  return _mm256_xor_si256(a, _mm256_srli_epi32(a, n));
}
WEFT_INLINE I32 as_i32(F32 a) { return _mm256_castps_si256(a); }

WEFT_INLINE int store_where(float* p, F32 a, Lanes where) {
  if (where == 0xff) {
    store(p, a);
    return 8;
  }
  float values[8];
  store(values, a);
  int n = 0;
  for (; where; where &= where - 1)
    p[n++] = values[__builtin_ctz(where)];
  return n;
}
WEFT_INLINE void forbid(float* p, Lanes allowed) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(int(allowed)), bit);
  const __m256i forbidden = _mm256_cmpeq_epi32(set, _mm256_setzero_si256());
  _mm256_maskstore_ps(p, forbidden, _mm256_set1_ps(-__builtin_inff()));
}

struct Sum {
  __m256d low = _mm256_setzero_pd();
  __m256d high = _mm256_setzero_pd();
};
WEFT_INLINE void add_to(Sum& sum, F32 a) {
  sum.low = _mm256_add_pd(sum.low, _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
  sum.high = _mm256_add_pd(sum.high, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
}
WEFT_INLINE double total(Sum sum) {
  double x[4];
  _mm256_storeu_pd(x, _mm256_add_pd(sum.low, sum.high));
  return (x[0] + x[1]) + (x[2] + x[3]);
}

#else

WEFT_INLINE Lanes lanes_of(I32 comparison) {
  return Lanes((comparison[0] & 1) | (comparison[1] & 2) | (comparison[2] & 4) |
               (comparison[3] & 8));
}
WEFT_INLINE Lanes at_least(F32 a, F32 b) { return lanes_of(a >= b); }
WEFT_INLINE bool any_nan(F32 a, F32 b) { return lanes_of((a != a) | (b != b)) != 0; }

WEFT_INLINE I32 add_i32(I32 a, I32 b) { return (I32)((U32)a + (U32)b); }
WEFT_INLINE I32 mul_i32(I32 a, I32 b) { return (I32)((U32)a * (U32)b); }
WEFT_INLINE I32 and_i32(I32 a, I32 b) { return a & b; }
template <int n>
WEFT_INLINE I32 xor_shifted(I32 a) {
  return a ^ (I32)((U32)a >> n);
}
WEFT_INLINE I32 as_i32(F32 a) { return (I32)a; }

WEFT_INLINE int store_where(float* p, F32 a, Lanes where) {
  int n = 0;
  for (; where; where &= where - 1)
    p[n++] = a[__builtin_ctz(where)];
  return n;
}
WEFT_INLINE void forbid(float* p, Lanes allowed) {
  for (int i = 0; i < 4; i++) {
    p[i] = allowed >> i & 1 ? p[i] : -__builtin_inff();
  }
}

struct Sum {
  double lanes[4] = {};
};
WEFT_INLINE void add_to(Sum& sum, F32 a) {
  for (int i = 0; i < 4; i++)
    sum.lanes[i] += double(a[i]);
}
WEFT_INLINE double total(Sum sum) {
  return (sum.lanes[0] + sum.lanes[1]) + (sum.lanes[2] + sum.lanes[3]);
}

#endif

constexpr Lanes kAllLanes = kLanes == 32 ? ~Lanes(0) : (Lanes(1) << kLanes) - 1;

}  // namespace WEFT_NAMESPACE
}  // namespace weft
