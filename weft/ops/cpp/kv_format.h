// How keys and values lie in the cache, and how they become factors of products.
//
// A slot of one head is a row of head_dim elements: float, bf16, or signed bytes or shorts with one
// scale. Attention wants keys the other way round, lanes = keys, and values as they are, lanes =
// dims:
//
//   keys:    x[i], lane t = word i of row t; a word is 32 bits: 1 float, 2 bf16 or 4 bytes of
//            neighbouring dims
//   values:  two vectors for each 2 kLanes dims of a row: the first and the second half, but
//            of narrow numbers, where taking words apart costs least, the even and the odd dims.
//            `finish` puts the result in order.
//
// With WEFT_BF16_PRODUCTS, bf16 stays in pairs, which dot_pairs multiplies: pairs of dims for keys,
// pairs of rows for values. Bytes become pairs of shorts, and so do queries and weights, with a
// scale for each row of them: products are whole numbers, exact in any order. Scales of bytes and
// shorts are no part of the factors: they multiply whole scores and weights.
#pragma once

#include "gemm.h"

namespace weft {
namespace WEFT_NAMESPACE {

// The step with the slots of a cache. No member of StepArgs: there is one of those for all
// instruction sets.
static StepArgs step_of(const KvCache& cache, const StepArgs& step) {
  StepArgs own = step;
  if (cache.windowed) {
    own.slots = step.window_slots;
    own.table = step.window_table;
  }
  return own;
}

using Words = Pairs;  // kLanes times 32 bits

constexpr int kMaxHeadDim = 640;

// ---------------------------------------------------------------- four words of rows, transposed

#if defined(WEFT_ISA_AVX512)

WEFT_INLINE __m128i sixteen_bytes(const char* p) { return _mm_loadu_si128((const __m128i*)p); }
WEFT_INLINE Words words_of(F32 x) { return _mm512_castps_si512(x); }
WEFT_INLINE F32 floats_of(Words x) { return _mm512_castsi512_ps(x); }
// Words 0..3 of rows 0, 4, 8, 12, side by side.
WEFT_INLINE Words every_fourth(const char* p, int64_t stride) {
  __m512i x = _mm512_castsi128_si512(sixteen_bytes(p));
  x = _mm512_inserti32x4(x, sixteen_bytes(p + 4 * stride), 1);
  x = _mm512_inserti32x4(x, sixteen_bytes(p + 8 * stride), 2);
  return _mm512_inserti32x4(x, sixteen_bytes(p + 12 * stride), 3);
}
WEFT_INLINE Words low_words(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
WEFT_INLINE Words high_words(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
WEFT_INLINE Words low_doubles(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
WEFT_INLINE Words high_doubles(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
// Byte i of each word as a number.
// Of four bytes, 0 and 2, or 1 and 3, as two shorts.
WEFT_INLINE Words even_bytes(Words x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
WEFT_INLINE Words odd_bytes(Words x) { return _mm512_srai_epi16(x, 8); }
// 2 kLanes bytes as shorts.
WEFT_INLINE Words widened(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
// The low halves of two words as one, or the high ones.
WEFT_INLINE Words low_halves(Words a, Words b) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
}
WEFT_INLINE Words high_halves(Words a, Words b) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
}
// Of each four neighbours: 0, 2, 1, 3.
WEFT_INLINE F32 evens_first(F32 x) { return _mm512_permute_ps(x, 0xd8); }
// a0 b0 a1 b1 ..
WEFT_INLINE void alternate(F32 a, F32 b, F32& low, F32& high) {
  const __m512i first_half =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  low = _mm512_permutex2var_ps(a, first_half, b);
  high = _mm512_permutex2var_ps(a, _mm512_add_epi32(first_half, _mm512_set1_epi32(8)), b);
}

#elif defined(WEFT_ISA_AVX2)

WEFT_INLINE __m128i sixteen_bytes(const char* p) { return _mm_loadu_si128((const __m128i*)p); }
WEFT_INLINE Words words_of(F32 x) { return _mm256_castps_si256(x); }
WEFT_INLINE F32 floats_of(Words x) { return _mm256_castsi256_ps(x); }
WEFT_INLINE Words every_fourth(const char* p, int64_t stride) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen_bytes(p)),
                                 sixteen_bytes(p + 4 * stride), 1);
}
WEFT_INLINE Words low_words(Words a, Words b) { return _mm256_unpacklo_epi32(a, b); }
WEFT_INLINE Words high_words(Words a, Words b) { return _mm256_unpackhi_epi32(a, b); }
WEFT_INLINE Words low_doubles(Words a, Words b) { return _mm256_unpacklo_epi64(a, b); }
WEFT_INLINE Words high_doubles(Words a, Words b) { return _mm256_unpackhi_epi64(a, b); }
WEFT_INLINE Words even_bytes(Words x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
WEFT_INLINE Words odd_bytes(Words x) { return _mm256_srai_epi16(x, 8); }
WEFT_INLINE Words widened(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
WEFT_INLINE Words low_halves(Words a, Words b) {
  return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
}
WEFT_INLINE Words high_halves(Words a, Words b) {
  return _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
}
WEFT_INLINE F32 evens_first(F32 x) { return _mm256_permute_ps(x, 0xd8); }
WEFT_INLINE void alternate(F32 a, F32 b, F32& low, F32& high) {
  const __m256 x = _mm256_unpacklo_ps(a, b);
  const __m256 y = _mm256_unpackhi_ps(a, b);
  low = _mm256_permute2f128_ps(x, y, 0x20);
  high = _mm256_permute2f128_ps(x, y, 0x31);
}

#else

WEFT_INLINE Words words_of(F32 x) { return (Words)x; }
WEFT_INLINE F32 floats_of(Words x) { return (F32)x; }
WEFT_INLINE Words every_fourth(const char* p, int64_t) {
  Words x;
  memcpy(&x, p, sizeof x);
  return x;
}
WEFT_INLINE Words low_words(Words a, Words b) { return Words{a[0], b[0], a[1], b[1]}; }
WEFT_INLINE Words high_words(Words a, Words b) { return Words{a[2], b[2], a[3], b[3]}; }
WEFT_INLINE Words low_doubles(Words a, Words b) { return Words{a[0], a[1], b[0], b[1]}; }
WEFT_INLINE Words high_doubles(Words a, Words b) { return Words{a[2], a[3], b[2], b[3]}; }
typedef int16_t Shorts __attribute__((vector_size(16)));
WEFT_INLINE Words even_bytes(Words x) { return (Words)((Shorts)((Shorts)x << 8) >> 8); }
WEFT_INLINE Words odd_bytes(Words x) { return (Words)((Shorts)x >> 8); }
WEFT_INLINE Words widened(const int8_t* p) {
  return (Words)Shorts{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]};
}
WEFT_INLINE Words low_halves(Words a, Words b) { return (a & 0xffffu) | (b << 16); }
WEFT_INLINE Words high_halves(Words a, Words b) { return (a >> 16) | (b & 0xffff0000u); }
WEFT_INLINE F32 evens_first(F32 x) { return F32{x[0], x[2], x[1], x[3]}; }
WEFT_INLINE void alternate(F32 a, F32 b, F32& low, F32& high) {
  low = F32{a[0], b[0], a[1], b[1]};
  high = F32{a[2], b[2], a[3], b[3]};
}

#endif

// x[i], lane t = word i of the row at p + t kStride bytes, for 4 words and kLanes rows.
//
//   every_fourth:  x[j] = | row j | row j + 4 | ..  4 words of each; then each 4 x 4 is transposed
template <int64_t kStride>
WEFT_INLINE void transpose(const char* p, Words (&x)[4]) {
  const Words a = every_fourth(p, kStride);
  const Words b = every_fourth(p + kStride, kStride);
  const Words c = every_fourth(p + 2 * kStride, kStride);
  const Words d = every_fourth(p + 3 * kStride, kStride);
  const Words ab_low = low_words(a, b);
  const Words ab_high = high_words(a, b);
  const Words cd_low = low_words(c, d);
  const Words cd_high = high_words(c, d);
  x[0] = low_doubles(ab_low, cd_low);
  x[1] = high_doubles(ab_low, cd_low);
  x[2] = low_doubles(ab_high, cd_high);
  x[3] = high_doubles(ab_high, cd_high);
}

// to[h stride + t] = from[at[t] + h], for 4 slots and the first `num` (at most 4) of their heads.
// No more is read.
WEFT_INLINE void turn_scales(const float* from, const int64_t (&at)[4], int num, float* to,
                             int64_t stride) {
#if defined(WEFT_ISA_AVX512) || defined(WEFT_ISA_AVX2)
  if (num > 1) {
    const __m128i here = _mm_cmpgt_epi32(_mm_set1_epi32(num), _mm_setr_epi32(0, 1, 2, 3));
    __m128 x[4];
    for (int t = 0; t < 4; t++)
      x[t] = _mm_maskload_ps(from + at[t], here);
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
    _mm_storeu_ps(to, x[0]);
    _mm_storeu_ps(to + stride, x[1]);
    if (num > 2)
      _mm_storeu_ps(to + 2 * stride, x[2]);
    if (num > 3)
      _mm_storeu_ps(to + 3 * stride, x[3]);
    return;
  }
#endif
  for (int h = 0; h < num; h++) {
    for (int t = 0; t < 4; t++)
      to[h * stride + t] = from[at[t] + h];
  }
}

// ---------------------------------------------------------------- formats

// Queries and weights are numbers of type Factor; those of kFactors neighbouring dims or rows are
// multiplied at once.
struct OneByOne {
  using Factor = float;
  using Vector = F32;
  using Sum = F32;
  using Panel = FloatPanel;
  static constexpr int kFactors = 1;
  WEFT_INLINE F32 everywhere(const float* p) { return all(*p); }
  WEFT_INLINE F32 add_product(F32 sum, F32 a, F32 b) { return muladd(a, b, sum); }
  // a vector, as `key` and `values` give it.
  WEFT_INLINE void put(float* p, F32 x) { store(p, x); }
  WEFT_INLINE void put_floats(float* p, F32 x) { store(p, x); }  // kLanes factors
};

// Of shorts: whole numbers, from floats that were multiplied by an inverse scale.
struct InShorts {
  using Factor = int16_t;
  using Vector = Words;
  using Sum = I32;
  using Panel = ShortPanel;
  static constexpr int kFactors = 2;
  WEFT_INLINE Words everywhere(const int16_t* p) { return (Words)four_bytes(p); }
  WEFT_INLINE I32 add_product(I32 sum, Words a, Words b) { return dot_shorts(sum, (I32)a, (I32)b); }
  WEFT_INLINE void put(int16_t* p, Words x) { memcpy(p, &x, sizeof x); }
  WEFT_INLINE void put_floats(int16_t* p, F32 x) { store_shorts(p, x); }
};

#if defined(WEFT_BF16_PRODUCTS)
struct InPairs {
  using Factor = bf16;
  using Vector = Pairs;
  using Sum = F32;
  using Panel = PairPanel;
  static constexpr int kFactors = 2;
  WEFT_INLINE Pairs everywhere(const bf16* p) { return four_bytes(p); }
  WEFT_INLINE F32 add_product(F32 sum, Pairs a, Pairs b) { return dot_pairs(sum, a, b); }
  WEFT_INLINE void put(bf16* p, Pairs x) { _mm512_storeu_si512(p, x); }
  WEFT_INLINE void put_floats(bf16* p, F32 x) { store_bf16(p, x); }
};
#endif

// How large the floats of a row are, that are to become shorts. Its largest becomes `most`. The
// scale of a row that is not finite is not finite either.
struct Extent {
  F32 top = zero();
  F32 poison = zero();

  __attribute__((always_inline)) void take(F32 x) {
    top = larger(top, magnitude(x));
    poison = muladd(x, zero(), poison);
  }
  float scale(float most) const { return largest(top) / most + sum(poison); }
};
WEFT_INLINE F32 inverse_scale(float scale) { return all(scale > 1e-34f ? 1 / scale : 0.0f); }

// Each format has: Element, as the cache has them; kDims of a word, which become kDims / kFactors
// vectors of factors, `key<0>` and after; and `values`, the two vectors of 2 kLanes dims of
// kFactors rows. kReadsDirectly: a few queries take keys and values straight from the cache
// (attention_direct.h). Where products are whole numbers, kMost is the largest of a row of queries
// or weights: the sum of a head's dims, or of a segment's keys, has to fit into 32 bits.

struct KvF32 : OneByOne {
  using Element = float;
  static constexpr int kDims = 1;
  static constexpr bool kReadsDirectly = true;
  static constexpr bool kHasScales = false;
  static constexpr bool kAlternates = false;  // the two vectors hold the even and the odd dims
  template <int i>
  WEFT_INLINE F32 key(Words x) {
    return floats_of(x);
  }
  WEFT_INLINE void values(const float* row, const float*, F32& a, F32& b) {
    a = load(row);
    b = load(row + kLanes);
  }
};

// Of the four dims of a word, 0 and 2 are one vector, 1 and 3 the other: queries have them in that
// order, too.
struct KvI8 : InShorts {
  using Element = int8_t;
  static constexpr float kMost = 32767;  // times 127 and 512
  static constexpr int kDims = 4;
  static constexpr bool kReadsDirectly = true;
  static constexpr bool kHasScales = true;
  static constexpr bool kAlternates = true;
  template <int i>
  WEFT_INLINE Words key(Words x) {
    return i ? odd_bytes(x) : even_bytes(x);
  }
  WEFT_INLINE void values(const int8_t* row, const int8_t* next, Words& a, Words& b) {
    const Words x = widened(row);
    const Words y = widened(next);
    a = low_halves(x, y);
    b = high_halves(x, y);
  }
};

// Of encoders, which have them for a step alone: heads of at most 256 dims.
struct KvI16 : InShorts {
  using Element = int16_t;
  static constexpr float kMost = 4095;  // times kMostOfShort and 256
  static constexpr int kDims = 2;
  static constexpr bool kReadsDirectly = false;
  static constexpr bool kHasScales = true;
  static constexpr bool kAlternates = true;
  template <int i>
  WEFT_INLINE Words key(Words x) {
    return x;
  }
  WEFT_INLINE void values(const int16_t* row, const int16_t* next, Words& a, Words& b) {
    Words x;
    Words y;
    memcpy(&x, row, sizeof x);
    memcpy(&y, next, sizeof y);
    a = low_halves(x, y);
    b = high_halves(x, y);
  }
};

#if defined(WEFT_BF16_PRODUCTS)
struct KvBf16 : InPairs {
  using Element = bf16;
  static constexpr int kDims = 2;
  static constexpr bool kReadsDirectly = true;
  static constexpr bool kHasScales = false;
  static constexpr bool kAlternates = true;
  template <int i>
  WEFT_INLINE Pairs key(Words x) {
    return x;
  }
  WEFT_INLINE void values(const bf16* row, const bf16* next, Pairs& a, Pairs& b) {
    const Pairs x = load_pairs(row);
    const Pairs y = load_pairs(next);
    a = low_halves(x, y);
    b = high_halves(x, y);
  }
};
#else
struct KvBf16 : OneByOne {
  using Element = bf16;
  static constexpr int kDims = 2;
  static constexpr bool kReadsDirectly = true;
  static constexpr bool kHasScales = false;
  static constexpr bool kAlternates = true;
  template <int i>
  WEFT_INLINE F32 key(Words x) {
    return i ? odds(x) : evens(x);
  }
  WEFT_INLINE void values(const bf16* row, const bf16*, F32& a, F32& b) {
    const Pairs x = load_pairs(row);
    a = evens(x);
    b = odds(x);
  }
};
#endif

// ---------------------------------------------------------------- storing

WEFT_INLINE void store_row(const float* x, int64_t dim, float* row) {
  memcpy(row, x, dim * sizeof(float));
}

WEFT_INLINE void store_row(const float* x, int64_t dim, bf16* row) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    store_bf16(row + i, load(x + i));
  for (; i < dim; i++)
    row[i] = to_bf16(x[i]);
}

constexpr float kMostOfByte = 127;
constexpr float kMostOfShort = 2047;

WEFT_INLINE float most_of(const int8_t*) { return kMostOfByte; }
WEFT_INLINE float most_of(const int16_t*) { return kMostOfShort; }
WEFT_INLINE void store_whole(int8_t* p, F32 x) { store_i8(p, x); }
WEFT_INLINE void store_whole(int16_t* p, F32 x) { store_shorts(p, x); }

// Bytes or shorts. Returns the scale: that of a row which is not finite is not finite either.
template <class Whole>
WEFT_INLINE float store_row(const float* x, int64_t dim, Whole* row) {
  const float most = most_of(row);
  F32 top = zero();
  F32 poison = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F32 v = load(x + i, int(dim - i));
    top = larger(top, magnitude(v));
    poison = muladd(v, zero(), poison);
  }
  const float peak = largest(top);
  const F32 inverse = all(peak > 1e-30f ? most / peak : 0.0f);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    store_whole(row + i, mul(load(x + i), inverse));
  if (i < dim) {
    Whole rest[kLanes];
    store_whole(rest, mul(load(x + i, int(dim - i)), inverse));
    memcpy(row + i, rest, (dim - i) * sizeof(Whole));
  }
  return peak / most + sum(poison);
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
