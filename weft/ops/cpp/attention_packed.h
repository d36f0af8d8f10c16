// Products of many queries with keys and values: those of a segment are packed into the panels of
// gemm.h once, for all queries of a block, and stay in the second level cache while tiles of
// queries pass by.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

// Keys and values of one head that will be packed next. They are brought nearer a few lines at a
// time, between products: a core can wait for only some lines at once, and does not compute while
// it wants to wait for more.
class Upcoming {
 public:
  Upcoming(const char* k, const char* v, const int64_t* offsets, int64_t row_bytes,
           int64_t products)
      : k_(k),
        v_(v),
        offsets_(offsets),
        lines_(ceil_div(row_bytes, 64)),
        share_(ceil_div(kSegment * lines_, products)) {}

  // To be called before each of the products.
  void bring_share() {
    for (int64_t i = 0; i < share_ && row_ < kSegment; i++) {
      __builtin_prefetch(k_ + offsets_[row_] + line_ * 64, 0, 2);
      __builtin_prefetch(v_ + offsets_[row_] + line_ * 64, 0, 2);
      if (++line_ == lines_) {
        line_ = 0;
        row_++;
      }
    }
  }

 private:
  const char* k_;
  const char* v_;
  const int64_t* offsets_;
  int64_t lines_;
  int64_t share_;
  int64_t row_ = 0;
  int64_t line_ = 0;
};

template <class Kv, int part = 0>
WEFT_INLINE void put_keys(Words x, typename Kv::Factor* to) {
  Kv::put(to, Kv::template key<part>(x));
  if constexpr ((part + 1) * Kv::kFactors < Kv::kDims)
    put_keys<Kv, part + 1>(x, to + Kv::kFactors * kPanel);
}

// Keys `range` (multiples of kPanel) of a segment -> [kSegment / kPanel][dims /
// kFactors][kPanel][kFactors].
template <class Kv>
static __attribute__((noinline)) void pack_keys(Rows k, Range range, int64_t dims, char* gathered,
                                                typename Kv::Factor* panels) {
  constexpr int64_t kStride = kGatheredStride<Kv>;
  for (int64_t key = range.first; key < range.last; key += kPanel) {
    gather<Kv>(k, {key, key + kPanel}, dims * int64_t(sizeof(typename Kv::Element)), gathered);
    for (int64_t d = 0; d < dims; d += 4 * Kv::kDims) {
      for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
        Words x[4];
        transpose<kStride>(
            gathered + lane * kStride + d * int64_t(sizeof(typename Kv::Element)), x);
        typename Kv::Factor* to = panels + key * dims + d * kPanel + lane * Kv::kFactors;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
          put_keys<Kv>(x[i], to + i * Kv::kDims * kPanel);
      }
    }
  }
}

// Values of the keys `range` (multiples of kFactors) -> [dims / kPanel][kSegment /
// kFactors][kPanel][kFactors].
template <class Kv>
static __attribute__((noinline)) void pack_values(Rows v, Range range, int64_t dims,
                                                  typename Kv::Factor* panels) {
  using Element = typename Kv::Element;
  for (int64_t key = range.first; key < range.last; key += Kv::kFactors) {
    const Element* row = reinterpret_cast<const Element*>(v.base + v.offsets[key]);
    const Element* next =
        reinterpret_cast<const Element*>(v.base + v.offsets[key + Kv::kFactors - 1]);
    for (int64_t d = 0; d < dims; d += 2 * kLanes) {
      typename Kv::Vector a;
      typename Kv::Vector b;
      Kv::values(row + d, next + d, a, b);
      typename Kv::Factor* to =
          panels + d / kPanel * kPanel * kSegment + key * kPanel + d % kPanel * Kv::kFactors;
      Kv::put(to, a);
      Kv::put(to + kLanes * Kv::kFactors, b);
    }
  }
}

// Scores of a tile's queries, of the slabs in `slabs`, as far as some query sees their keys.
template <class Kv>
static void packed_scores(const typename Kv::Factor* q, int64_t q_slab_stride, int64_t rows,
                          int64_t dims, int64_t head_dim, const typename Kv::Factor* k_panels,
                          Range seen, Upcoming& upcoming, float* scores) {
  Product<typename Kv::Factor, typename Kv::Factor, typename Kv::Panel::C> product{};
  product.a = q;
  product.slab_stride = q_slab_stride;
  product.k = ceil_div(head_dim, 4) * 4;  // formats order four dims as they like
  product.c_stride = kSlab;
  for (int64_t key = seen.first / kPanel * kPanel; key < seen.last; key += kPanel) {
    upcoming.bring_share();
    product.b = k_panels + key * dims;
    product.ahead = reinterpret_cast<const char*>(product.b);
    product.c =
        reinterpret_cast<typename Kv::Panel::C*>(scores) + key / kSlab * rows * kSlab + key % kSlab;
    multiply<typename Kv::Panel>(product, rows);
  }
}

// sums = weights of a tile's queries * values, of the keys `range`, which begins at a slab.
template <class Kv>
static void packed_values(const typename Kv::Factor* weights, Range range, int64_t rows,
                          int64_t dims, int64_t head_dim, const typename Kv::Factor* v_panels,
                          Upcoming& upcoming, float* sums, int64_t sums_stride) {
  Product<typename Kv::Factor, typename Kv::Factor, typename Kv::Panel::C> product{};
  product.a = weights + range.first / kSlab * rows * kSlab;
  product.slab_stride = rows * kSlab;
  product.k = range.last - range.first;
  product.c_stride = sums_stride;
  for (int64_t d = 0; d < dims; d += kPanel) {
    upcoming.bring_share();
    product.b = v_panels + d * kSegment + range.first * kPanel;
    product.ahead = reinterpret_cast<const char*>(product.b);
    product.c = reinterpret_cast<typename Kv::Panel::C*>(sums) + d;
    multiply<typename Kv::Panel>(product, rows, 1,
                                 ceil_div(head_dim - d, kTileVectors * kLanes) * kTileVectors);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
