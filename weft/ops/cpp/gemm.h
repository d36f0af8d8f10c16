// Products of a few rows with panels of kPanel columns: the micro-kernels under linear and
// attention.
//
// B is a panel as program.h draws it: [k][kPanel], or with 2 or 4 neighbouring inputs together. A
// is kept in slabs of kSlab inputs, so that the rows of a tile lie side by side, at distances that
// the compiler knows:
//
//              slab 0             slab 1              k / kSlab slabs (last in part), `slab_stride`
//   row 0   0 ........ 63  |  64 ....... 127  | ..     elements from one to the next
//   row 1   0 ........ 63  |  64 ....... 127  | ..
//
// A tile of C stays in registers while its rows go through all of k:
//
//                         kPanel columns of B, one step of k:   b0 b1   (kTileVectors registers)
//   kTileRows rows of A,  a0  -> everywhere in a register  x    c00 c01
//   the same step of k:   a1                               x    c10 c11 ...
//
// Every element of C is one sum over k in rising order, whatever the number of rows and the shape
// of the tile: what a token gets does not depend on its neighbours. Cutting k into several calls
// with `add` does not change it either.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

#if defined(WEFT_ISA_AVX512)
constexpr int kTileRows = 12;  // 12 x 2 sums, 2 registers of B, 1 of A, of 32
// Up to this many take twice the columns: one sum must not wait for the latency of the one before.
constexpr int kFewRows = 3;
#else
constexpr int kTileRows = 6;  // 6 x 2 + 2 + 1 of 16
constexpr int kFewRows = 2;
#endif
constexpr int kTileVectors = 2;

// C[rows][columns] = A[rows][k] B[k][columns], or += if `add`.
template <class A, class B, class C>
struct Product {
  const A* a;
  int64_t slab_stride;
  int64_t k;
  const B* b;
  int64_t panel_stride;  // elements from one panel of B to the next, if there are several
  C* c;
  int64_t c_stride;
  bool add;
  const char* ahead = nullptr;  // memory that is wanted soon: brought to the cache on the way, ..
  int64_t ahead_step = 0;       // .. this many bytes with each step of k
  // Where the rows will be written, `target_bytes` of each: prefetched tile by tile, ..
  const char* target = nullptr;
  int64_t target_stride = 0;  // .. because other cores have these lines (bytes)
  int64_t target_bytes = 0;
};

// ---------------------------------------------------------------- one step of k, by kind of panel

WEFT_INLINE void load_vector(const float* p, F32& x) { x = load(p); }
WEFT_INLINE void store_vector(float* p, F32 x) { store(p, x); }
WEFT_INLINE void clear(F32& x) { x = zero(); }
WEFT_INLINE void load_vector(const int32_t* p, I32& x) { x = load_i32(p); }
WEFT_INLINE void store_vector(int32_t* p, I32 x) { store_i32(p, x); }
WEFT_INLINE void clear(I32& x) { x = zero_i32(); }

WEFT_INLINE I32 four_bytes(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return all_i32(x);
}

// Keep a vector that several rows use in its register: compilers tend to load it again for each of
// them.
template <class Vector>
WEFT_INLINE void hold(Vector& x) {
#if defined(WEFT_ISA_AVX512)
  asm("" : "+v"(x));
#elif defined(WEFT_ISA_AVX2)
  asm("" : "+x"(x));
#endif
}

// Prefetch the lines of one step, and go on to the next.
WEFT_INLINE void fetch(const char*& ahead, int64_t step) {
  __builtin_prefetch(ahead, 0, 2);
  __builtin_prefetch(ahead + step / 2, 0, 2);
  ahead += step;
}

// Where vector v of a step begins, in elements; kInputs of them are together.
template <int kInputs>
WEFT_INLINE int64_t vector_at(int v, int64_t panel_stride) {
  return v / kVectorsOfPanel * panel_stride + v % kVectorsOfPanel * kLanes * kInputs;
}

// A float, B [k][kPanel] float.
struct FloatPanel {
  using A = float;
  using B = float;
  using C = float;
  using Sum = F32;
  static constexpr int kInputs = 1;

  template <int R, int V>
  WEFT_INLINE void step(Sum (&sums)[R][V], const A* a, const B* b, int64_t panel_stride) {
    F32 w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      hold(w[v] = load(b + vector_at<1>(v, panel_stride)));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const F32 x = all(a[r * kSlab]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        sums[r][v] = muladd(x, w[v], sums[r][v]);
    }
  }
};

// A float, B [k / 2][kPanel][2] bf16, made floats on the way.
struct Bf16Panel {
  using A = float;
  using B = bf16;
  using C = float;
  using Sum = F32;
  static constexpr int kInputs = 2;

  template <int R, int V>
  WEFT_INLINE void step(Sum (&sums)[R][V], const A* a, const B* b, int64_t panel_stride) {
    Pairs w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      hold(w[v] = load_pairs(b + vector_at<2>(v, panel_stride)));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      F32 half[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        half[v] = i ? odds(w[v]) : evens(w[v]);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const F32 x = all(a[r * kSlab + i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
          sums[r][v] = muladd(x, half[v], sums[r][v]);
      }
    }
  }
};

#if defined(WEFT_BF16)
// A bf16, B [k / 2][kPanel][2] bf16, by the instruction for pairs.
struct PairPanel {
  using A = bf16;
  using B = bf16;
  using C = float;
  using Sum = F32;
  static constexpr int kInputs = 2;

  template <int R, int V>
  WEFT_INLINE void step(Sum (&sums)[R][V], const A* a, const B* b, int64_t panel_stride) {
    Pairs w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      hold(w[v] = load_pairs(b + vector_at<2>(v, panel_stride)));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Pairs x = four_bytes(a + r * kSlab);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        sums[r][v] = dot_pairs(sums[r][v], x, w[v]);
    }
  }
};
#endif

// A short, B [k / 2][kPanel][2] short, by the instruction for pairs.
struct ShortPanel {
  using A = int16_t;
  using B = int16_t;
  using C = int32_t;
  using Sum = I32;
  static constexpr int kInputs = 2;

  template <int R, int V>
  WEFT_INLINE void step(Sum (&sums)[R][V], const A* a, const B* b, int64_t panel_stride) {
    I32 w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      hold(w[v] = load_i32(reinterpret_cast<const int32_t*>(b + vector_at<2>(v, panel_stride))));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const I32 x = four_bytes(a + r * kSlab);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        sums[r][v] = dot_shorts(sums[r][v], x, w[v]);
    }
  }
};

// ---------------------------------------------------------------- tiles

// R rows and V vectors of columns.
template <class Panel, int R, int V>
static __attribute__((noinline)) void tile(
    const Product<typename Panel::A, typename Panel::B, typename Panel::C>& p) {
  typename Panel::Sum sums[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      if (p.add) {
        load_vector(p.c + r * p.c_stride + v * kLanes, sums[r][v]);
      } else {
        clear(sums[r][v]);
      }
    }
  }
  const typename Panel::B* b = p.b;
  const char* ahead = p.ahead;
  for (int64_t done = 0; done < p.k; done += kSlab) {
    const typename Panel::A* a = p.a + done / kSlab * p.slab_stride;
    const int64_t inputs = least(kSlab, p.k - done);
    const char* below = reinterpret_cast<const char*>(a + R * kSlab);  // the rows of the next tile
    for (int64_t i = 0; i < inputs; i += Panel::kInputs) {
      fetch(ahead, p.ahead_step);
      if constexpr (sizeof(*a) == 4) {  // narrower rows come fast enough by themselves
        __builtin_prefetch(below);
        below += R * Panel::kInputs * int64_t(sizeof(*a));
      }
      Panel::template step<R, V>(sums, a + i, b, p.panel_stride);
      b += kPanel * Panel::kInputs;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      store_vector(p.c + r * p.c_stride + v * kLanes, sums[r][v]);
  }
}

// The tile for that many rows, 1..R.
template <class Panel, int R, int V>
static void tile_of(int64_t rows,
                    const Product<typename Panel::A, typename Panel::B, typename Panel::C>& p) {
  if (rows == R) {
    tile<Panel, R, V>(p);
  } else if constexpr (R > 1) {
    tile_of<Panel, R - 1, V>(rows, p);
  }
}

// Rows are cut into passes of nearly the same size, as few as kTileRows allows: 13 rows are 7 and
// 6.
WEFT_INLINE int64_t passes_of(int64_t rows) { return ceil_div(rows, kTileRows); }
WEFT_INLINE int64_t pass_start(int64_t rows, int64_t pass) { return rows * pass / passes_of(rows); }

// Prefetch what `num` rows will be written to, from row `row` on.
template <class P>
WEFT_INLINE void fetch_target(const P& p, int64_t row, int64_t num) {
  for (int64_t r = row; r < row + num; r++) {
    const char* line = p.target + r * p.target_stride;
    for (int64_t at = 0; at < p.target_bytes; at += 64)
      __builtin_prefetch(line + at, 1);
  }
}

// The whole product, for any number of rows and 1 or 2 panels; or only its first vectors of
// columns, a multiple of kTileVectors.
template <class Panel>
static void multiply(Product<typename Panel::A, typename Panel::B, typename Panel::C> p,
                     int64_t rows, int64_t panels = 1, int64_t num_vectors = 2 * kVectorsOfPanel) {
  const auto* a = p.a;
  const auto* b = p.b;
  auto* c = p.c;
  // Nothing is wanted: prefetch what is there.
  if (!p.ahead)
    p.ahead = reinterpret_cast<const char*>(b);
  const bool few = rows <= kFewRows && panels * kVectorsOfPanel >= 2 * kTileVectors;
  const int vectors = few ? 2 * kTileVectors : kTileVectors;
  for (int64_t v = 0; v < least(num_vectors, panels * kVectorsOfPanel); v += vectors) {
    p.b = b + vector_at<Panel::kInputs>(int(v), p.panel_stride);
    if (few) {
      p.c = c + v * kLanes;
      tile_of<Panel, kFewRows, 2 * kTileVectors>(rows, p);
      continue;
    }
    for (int64_t pass = 0; pass < passes_of(rows); pass++) {
      const int64_t row = pass_start(rows, pass);
      p.a = a + row * kSlab;
      p.c = c + row * p.c_stride + v * kLanes;
      const int64_t num = pass_start(rows, pass + 1) - row;
      if (p.target && v == 0)
        fetch_target(p, row, num);
      tile_of<Panel, kTileRows, kTileVectors>(num, p);
      p.ahead += p.ahead_step * ceil_div(p.k, Panel::kInputs);
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
