// Products of a few queries with keys and values of bytes, for 8 lanes: both are taken as they lie,
// lanes = dims, because whole numbers may be added in any order. So keys need not be turned round,
// and each line of the cache is read once.
//
// Of 32 neighbouring bytes, two are a short: the odd dim is its high half, the even one its low
// half.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

// Sums of the lanes of each of four vectors.
WEFT_INLINE __m128i sums_of_lanes(I32 a, I32 b, I32 c, I32 d) {
  const I32 ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const I32 cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const I32 halves = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

template <>
struct Direct<KvI8> {
  static constexpr int kBlock = 4 * kLanes;  // dims of a vector of bytes

  // Of each block of a query: first its even dims, then its odd ones.
  static void order_queries(int16_t* q, int64_t num) {
    for (int64_t i = 0; i < num; i += kBlock) {
      const F32 a = load(reinterpret_cast<float*>(q + i));
      const F32 b = load(reinterpret_cast<float*>(q + i + kBlock / 2));
      const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
      const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
      InShorts::put(q + i, _mm256_permute4x64_epi64(even, 0xd8));
      InShorts::put(q + i + kBlock / 2, _mm256_permute4x64_epi64(odd, 0xd8));
    }
  }

  // As `direct_scores` has it.
  template <int R>
  static __attribute__((noinline)) void scores(const int16_t* q, int64_t q_slab_stride,
                                               int64_t dims, Range range, Rows k, Ahead& to_bring,
                                               char*, float* scores) {
    Ahead ahead = to_bring;
    constexpr int K = R <= 3 ? 4 : 2;  // keys at once
    // There are registers for a block's factors; else they are operands in memory.
    constexpr bool kKeeps = R <= 2;
    I32 first_of_two = _mm256_set1_epi16(1);
    hold(first_of_two);
    int32_t* const to = reinterpret_cast<int32_t*>(scores);
    for (int64_t key = range.first / K * K; key < range.last; key += K) {
      const char* rows[K];
      repeat<K>([&](auto n) WEFT_UNROLLED { rows[n] = k.base + k.offsets[key + n]; });
      I32 sums[R * K];  // [R][K]
      repeat<R * K>([&](auto i) WEFT_UNROLLED { clear(sums[i]); });
      const int16_t* factors = q;
      const auto add_block = [&](int64_t d, auto half) WEFT_UNROLLED {
        constexpr int kAt = half * kBlock;
        I32 kept[2 * R];
        if constexpr (kKeeps) {
          repeat<2 * R>([&](auto i) WEFT_UNROLLED {
            hold(kept[i] = factors_at(factors + i / 2 * kSlab + kAt + i % 2 * kBlock / 2));
          });
        }
        repeat<K / 2>([&](auto) WEFT_UNROLLED { ahead.bring_line(); });
        repeat<K>([&](auto n) WEFT_UNROLLED {
          const int32_t* const from = reinterpret_cast<const int32_t*>(rows[n] + d + kAt);
          repeat<2>([&](auto odd) WEFT_UNROLLED {
            const I32 x = load_i32(from);
            I32 bytes = odd ? _mm256_srai_epi16(x, 8) : _mm256_maddubs_epi16(first_of_two, x);
            hold(bytes);
            repeat<R>([&](auto r) WEFT_UNROLLED {
              I32& sum = sums[r * K + n];
              const int16_t* const p = factors + r * kSlab + kAt + odd * kBlock / 2;
              hold(sum = dot_shorts(sum, bytes, kKeeps ? kept[2 * r + odd] : factors_at(p)));
            });
            if constexpr (!kKeeps)
              asm volatile("" ::: "memory");
          });
        });
      };
      int64_t d = 0;
      for (; d + kSlab <= dims; d += kSlab, factors += q_slab_stride) {
        add_block(d, Constant<0>());
        add_block(d, Constant<1>());
      }
      if (d < dims)
        add_block(d, Constant<0>());
      repeat<R * K / 4>([&](auto i) WEFT_UNROLLED {
        const I32* four = sums + 4 * i;
        const __m128i found = sums_of_lanes(four[0], four[1], four[2], four[3]);
        if constexpr (K == 4) {
          _mm_storeu_si128((__m128i*)(to + i * kSlab + key), found);
        } else {
          _mm_storel_epi64((__m128i*)(to + 2 * i * kSlab + key), found);
          _mm_storel_epi64((__m128i*)(to + (2 * i + 1) * kSlab + key),
                           _mm_unpackhi_epi64(found, found));
        }
      });
    }
    to_bring = ahead;
  }

  // sums[r][dims] += weights[r * kSlab + key] * values of `key`, as `end_sums` finds them. Of each
  // block:
  //
  //   bytes (low half + 128): 0..3 8..11  4..7 12..15 | high halves: 0..3 8..11  4..7 12..15
  //
  // So the low halves need not be taken out of each short: what the high ones add to them is known
  // in the end.
  template <int R>
  static __attribute__((noinline)) void values(const int16_t* weights, Range range, int64_t dims,
                                               Rows v, Ahead& to_bring, float* sums,
                                               int64_t sums_stride) {
    if constexpr (R == 4) {  // there are not registers enough
      values<2>(weights, range, dims, v, to_bring, sums, sums_stride);
      values<2>(weights + 2 * kSlab, range, dims, v, to_bring, sums + 2 * sums_stride, sums_stride);
    } else {
      Ahead ahead = to_bring;
      const int64_t num_near = near_keys(v.offsets[range.first + 1] - v.offsets[range.first]);
      for (int64_t first = range.first; first < range.last; first += num_near) {
        const Range near = {first, least(first + num_near, range.last)};
        for (int64_t d = 0; d < dims; d += kBlock) {
          add_block<R>(weights, near, v.base + d, v.offsets, ahead,
                       reinterpret_cast<int32_t*>(sums + d), sums_stride);
        }
      }
      to_bring = ahead;
    }
  }

  // What `values` made of a row's weights, of the slabs in `slabs`, becomes sums as other formats
  // have them: of 2 kLanes dims first the even ones, then the odd ones.
  static void end_sums(const int16_t* weights, int64_t slab_stride, Range slabs, int64_t dims,
                       float* sums) {
    I32 total = zero_i32();
    for (int64_t slab = slabs.first; slab < slabs.last; slab += kSlab) {
      const int16_t* p = weights + slab / kSlab * slab_stride;
      for (int i = 0; i < kSlab; i += 2 * kLanes) {
        total =
            dot_shorts(total, _mm256_loadu_si256((const __m256i*)(p + i)), _mm256_set1_epi16(1));
      }
    }
    const __m128i everywhere = sums_of_lanes(total, total, total, total);
    const I32 raised = _mm256_slli_epi32(_mm256_broadcastsi128_si256(everywhere), 7);
    for (int64_t d = 0; d < dims; d += kBlock) {
      int32_t* const p = reinterpret_cast<int32_t*>(sums + d);
      const I32 odd[2] = {load_i32(p + 2 * kLanes), load_i32(p + 3 * kLanes)};
      I32 even[2];
      for (int i = 0; i < 2; i++) {
        const I32 low = _mm256_sub_epi32(load_i32(p + i * kLanes), _mm256_slli_epi32(odd[i], 8));
        even[i] = _mm256_sub_epi32(low, raised);
      }
      store_i32(p, _mm256_permute2x128_si256(even[0], even[1], 0x20));
      store_i32(p + kLanes, _mm256_permute2x128_si256(odd[0], odd[1], 0x20));
      store_i32(p + 2 * kLanes, _mm256_permute2x128_si256(even[0], even[1], 0x31));
      store_i32(p + 3 * kLanes, _mm256_permute2x128_si256(odd[0], odd[1], 0x31));
    }
  }

 private:
  WEFT_INLINE I32 factors_at(const int16_t* p) {
    return load_i32(reinterpret_cast<const int32_t*>(p));
  }

  // Keys this many bytes apart, whose lines stay in the first level cache from one block to the
  // next: what is a large power of two apart shares few of its sets.
  WEFT_INLINE int64_t near_keys(int64_t apart) {
    const int64_t power = apart & -apart;
    return power ? most(least((8 << 10) / power, kSlab), 16) : 16;
  }

  template <int R>
  WEFT_INLINE void add_block(const int16_t* weights, Range range, const char* base,
                             const int64_t* offsets, Ahead& ahead, int32_t* sums,
                             int64_t sums_stride) {
    I32 s[R][4];
    repeat<R>([&](auto r) WEFT_UNROLLED {
      repeat<4>([&](auto i)
                    WEFT_UNROLLED { s[r][i] = load_i32(sums + r * sums_stride + i * kLanes); });
    });
    for (int64_t key = range.first; key < range.last; key += 2) {
      const int32_t* const row = reinterpret_cast<const int32_t*>(base + offsets[key]);
      const int32_t* const next = reinterpret_cast<const int32_t*>(base + offsets[key + 1]);
      ahead.bring_line();
      repeat<2>([&](auto half) WEFT_UNROLLED {
        const I32 x = load_i32(row);
        const I32 y = load_i32(next);
        I32 shorts = half ? _mm256_unpackhi_epi16(x, y) : _mm256_unpacklo_epi16(x, y);
        const I32 high = _mm256_srai_epi16(shorts, 8);
        shorts = _mm256_xor_si256(shorts, _mm256_set1_epi16(0x80));
        repeat<R>([&](auto r) WEFT_UNROLLED {
          const I32 weight = four_bytes(weights + r * kSlab + key);
          s[r][half] = dot_shorts(s[r][half], weight, shorts);
          s[r][2 + half] = dot_shorts(s[r][2 + half], weight, high);
          if constexpr (R > 2) {
            hold(s[r][half]);
            hold(s[r][2 + half]);
          }
        });
        // Load them again: there are not registers enough.
        if constexpr (R > 2)
          asm volatile("" ::: "memory");
      });
    }
    repeat<R>([&](auto r) WEFT_UNROLLED {
      repeat<4>([&](auto i)
                    WEFT_UNROLLED { store_i32(sums + r * sums_stride + i * kLanes, s[r][i]); });
    });
  }
};

}  // namespace WEFT_NAMESPACE
}  // namespace weft
