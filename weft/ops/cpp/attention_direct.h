// Products of a few queries with keys and values straight from the cache, whose rows stand
// anywhere: memory is read once, and while one head's rows of a slab are computed with, those of
// the next are on their way. Every sum is taken in the order of gemm.h's: over dims, or keys,
// rising.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

#if defined(WEFT_ISA_AVX512)
constexpr int kSums = 24;     // registers for sums
constexpr int kPassRows = 8;  // queries that are computed at once
#else
constexpr int kSums = 12;
constexpr int kPassRows = 4;
#endif
// Queries more than these, and packing keys and values into panels pays.
constexpr int kDirectRows = 3 * kPassRows;

// Rows of one head in the cache: the key or value `i` is at `base` + offsets[i] bytes.
struct Rows {
  const char* base;
  const int64_t* offsets;
};

// Rows that are wanted next, of all heads. They are brought nearer line by line while others are
// computed with, in the order in which they lie in memory: it delivers neighbours faster than lines
// that are far from each other.
class Ahead {
 public:
  Ahead(Rows rows, Range range, int64_t row_bytes)
      : base_(rows.base),
        next_(rows.offsets + range.first),
        end_(rows.offsets + range.last),
        row_bytes_(row_bytes) {
    go_to_row();
  }

  __attribute__((always_inline)) void bring_line() {
    __builtin_prefetch(line_, 0, 2);
    line_ += 64;
    if (line_ >= row_end_)
      go_to_row();
  }

 private:
  __attribute__((always_inline)) void go_to_row() {
    if (next_ == end_) {  // all are there: prefetch the last line again
      line_ = row_end_ - 64;
      return;
    }
    line_ = base_ + *next_++;
    row_end_ = line_ + row_bytes_;
  }

  const char* base_;
  const int64_t* next_;
  const int64_t* end_;
  int64_t row_bytes_;
  const char* line_ = nullptr;
  const char* row_end_ = nullptr;
};

// f(0), f(1), .. f(count - 1) with constants, so that the arrays which they index are registers.
template <int n>
struct Constant {
  constexpr operator int() const { return n; }
};
template <int count, int i = 0, class F>
WEFT_INLINE void repeat(F f) {
  if constexpr (i < count) {
    f(Constant<i>());
    repeat<count, i + 1>(f);
  }
}
#define WEFT_UNROLLED __attribute__((always_inline))

// ---------------------------------------------------------------- keys side by side

// Lanes are keys, so a word of each of kLanes rows is wanted at a time. In the cache these rows are
// often a power of two apart, and a first level cache has room for only some of such lines. So rows
// are copied next to each other first.
template <class Kv>
constexpr int64_t kGatheredStride = kMaxHeadDim * int64_t(sizeof(typename Kv::Element)) + 64;

// Rows first..last - 1, of `bytes` (a multiple of 32) each.
template <class Kv>
WEFT_INLINE void gather(Rows rows, Range range, int64_t bytes, char* to) {
  for (int64_t i = range.first; i < range.last; i++, to += kGatheredStride<Kv>) {
    const char* from = rows.base + rows.offsets[i];
    int64_t at = 0;
    for (; at + 4 * kLanes <= bytes; at += 4 * kLanes) {
      const Words x = load_pairs(reinterpret_cast<const bf16*>(from + at));
      memcpy(to + at, &x, sizeof x);
    }
    if (at < bytes)
      memcpy(to + at, from + at, 32);
  }
}

// ---------------------------------------------------------------- scores

// Scores of R queries for the keys of a slab in `range` (and perhaps some more), to scores[r *
// kSlab ..]. Brings as much of `ahead` nearer as it reads.
//
//   at: 16 bytes of each row (4 words);  n: kLanes keys;  i: a word;  part: a vector of its factors
template <class Kv, int R>
static __attribute__((noinline)) void direct_scores(const typename Kv::Factor* q,
                                                    int64_t q_slab_stride, int64_t dims,
                                                    Range range, Rows k, Ahead& to_bring,
                                                    char* gathered, float* scores) {
  Ahead ahead = to_bring;  // in registers
  auto* to = reinterpret_cast<typename Kv::Panel::C*>(scores);
  constexpr int kParts = Kv::kDims / Kv::kFactors;
  // Sums enough that none waits for its last addition.
  constexpr int N = R == 1 ? 4 : 2 * R <= kSums ? 2 : 1;
  constexpr int64_t kStride = kGatheredStride<Kv>;
  const int64_t bytes = dims * int64_t(sizeof(typename Kv::Element));
  for (int64_t key = range.first / (N * kLanes) * (N * kLanes); key < range.last;
       key += N * kLanes) {
    gather<Kv>(k, {key, key + N * kLanes}, bytes, gathered);
    typename Kv::Sum sums[N][R];
    repeat<N>([&](auto n)
                  WEFT_UNROLLED { repeat<R>([&](auto r) WEFT_UNROLLED { clear(sums[n][r]); }); });
    for (int64_t at = 0; at < bytes; at += 16) {
      const int64_t d = at / int64_t(sizeof(typename Kv::Element));
      const typename Kv::Factor* factors = q + d / kSlab * q_slab_stride + d % kSlab;
      repeat<N>([&](auto n) WEFT_UNROLLED {
        repeat<kLanes / 4>([&](auto) WEFT_UNROLLED { ahead.bring_line(); });
        Words x[4];
        transpose<kStride>(gathered + n * kLanes * kStride + at, x);
        repeat<4>([&](auto i) WEFT_UNROLLED {
          repeat<kParts>([&](auto part) WEFT_UNROLLED {
            const auto key_factors = Kv::template key<part>(x[i]);
            const typename Kv::Factor* p = factors + i * Kv::kDims + part * Kv::kFactors;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
              sums[n][r] = Kv::add_product(sums[n][r], Kv::everywhere(p + r * kSlab), key_factors);
            }
          });
        });
        // Load the query's factors again: there are not registers enough to keep them.
        asm volatile("" ::: "memory");
      });
    }
    repeat<N>([&](auto n) WEFT_UNROLLED {
      repeat<R>([&](auto r)
                    WEFT_UNROLLED { store_vector(to + r * kSlab + key + n * kLanes, sums[n][r]); });
    });
  }
  to_bring = ahead;
}

// ---------------------------------------------------------------- values

// sums[r][2 V kLanes dims] += weights[r * kSlab + key] * values of `key`, for the keys of a slab in
// `range`.
template <class Kv, int R, int V>
WEFT_INLINE void add_values(const typename Kv::Factor* weights, Range range, Rows v,
                            Ahead& to_bring, float* sums, int64_t sums_stride) {
  Ahead ahead = to_bring;
  using Element = typename Kv::Element;
  constexpr int kBytes = 2 * V * kLanes * int(sizeof(Element));
  auto* to = reinterpret_cast<typename Kv::Panel::C*>(sums);
  typename Kv::Sum s[R][2 * V];
  repeat<R>([&](auto r) WEFT_UNROLLED {
    repeat<2 * V>([&](auto i)
                      WEFT_UNROLLED { load_vector(to + r * sums_stride + i * kLanes, s[r][i]); });
  });
  for (int64_t key = range.first; key < range.last; key += Kv::kFactors) {
    const Element* row = reinterpret_cast<const Element*>(v.base + v.offsets[key]);
    const Element* next =
        reinterpret_cast<const Element*>(v.base + v.offsets[key + Kv::kFactors - 1]);
    repeat<(Kv::kFactors * (kBytes + 63) / 64)>([&](auto) WEFT_UNROLLED { ahead.bring_line(); });
    repeat<V>([&](auto i) WEFT_UNROLLED {
      typename Kv::Vector a;
      typename Kv::Vector b;
      Kv::values(row + i * 2 * kLanes, next + i * 2 * kLanes, a, b);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const auto weight = Kv::everywhere(weights + r * kSlab + key);
        s[r][2 * i] = Kv::add_product(s[r][2 * i], weight, a);
        s[r][2 * i + 1] = Kv::add_product(s[r][2 * i + 1], weight, b);
      }
    });
  }
  repeat<R>([&](auto r) WEFT_UNROLLED {
    repeat<2 * V>([&](auto i)
                      WEFT_UNROLLED { store_vector(to + r * sums_stride + i * kLanes, s[r][i]); });
  });
  to_bring = ahead;
}

// sums[r][dims] += the same, as many dims at a time as there are registers for.
template <class Kv, int R,
          int V = R * 8 <= kSums   ? 4
                  : R * 4 <= kSums ? 2
                                   : 1>
static void direct_values(const typename Kv::Factor* weights, Range range, int64_t dims, Rows v,
                          Ahead& ahead, float* sums, int64_t sums_stride) {
  constexpr int64_t kStep = 2 * V * kLanes;
  constexpr int64_t kBytes = kStep * int64_t(sizeof(typename Kv::Element));
  for (; dims >= kStep; dims -= kStep) {
    add_values<Kv, R, V>(weights, range, v, ahead, sums, sums_stride);
    v.base += kBytes;
    sums += kStep;
  }
  if constexpr (V > 1) {
    if (dims > 0)
      direct_values<Kv, R, V / 2>(weights, range, dims, v, ahead, sums, sums_stride);
  }
}

// ---------------------------------------------------------------- of a format

// How queries meet a format's keys and values. A format that is better taken in another way has its
// own.
template <class Kv>
struct Direct {
  using Factor = typename Kv::Factor;

  // Queries as `load_queries` leaves them, `num` factors in all, become what `scores` wants.
  static void order_queries(Factor*, int64_t) {}

  template <int R, class... Args>
  WEFT_INLINE void scores(Args&&... args) {
    direct_scores<Kv, R>(args...);
  }
  template <int R, class... Args>
  WEFT_INLINE void values(Args&&... args) {
    direct_values<Kv, R>(args...);
  }

  // After `values` of all `slabs` of a segment: a row's sums become what products of panels give.
  static void end_sums(const Factor*, int64_t, Range, int64_t, float*) {}
};

// ---------------------------------------------------------------- any number of rows to kPassRows

template <class Kv, int R = kPassRows, class... Args>
static void direct_scores_of(int64_t rows, Args&&... args) {
  if (rows == R) {
    Direct<Kv>::template scores<R>(args...);
  } else if constexpr (R > 1) {
    direct_scores_of<Kv, R - 1>(rows, args...);
  }
}

template <class Kv, int R = kPassRows, class... Args>
static void direct_values_of(int64_t rows, Args&&... args) {
  if (rows == R) {
    Direct<Kv>::template values<R>(args...);
  } else if constexpr (R > 1) {
    direct_values_of<Kv, R - 1>(rows, args...);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft

#if defined(WEFT_ISA_AVX2)
#include "attention_bytes.h"
#endif
