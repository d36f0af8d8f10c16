// The k-th largest, and where a sum of probabilities reaches its share, without sorting: a
// histogram over the bits of the floats, then one of the bin that matters, until the bin is one
// value.
//
// All is about values x <= 0, logits below the largest one. Their bits without the sign are the
// *key*: the smaller the key, the larger the value.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kLastKey = 0x7f800000u;   // of -inf
constexpr uint32_t kFirstBin = 0x3c800000u;  // of -2^-6: what is larger is in bin 0, too
// Of a key, which are together in a bin: an octave has 128 bins.
constexpr int kBinBits = 16;
constexpr int kBins = 14 * 128;  // up to -256: what is smaller is in the last one, too
constexpr float kUnit = 1.0f / (1 << 30) / 8;  // weights are multiples of it

// e^x rounded to a multiple of kUnit. A double holds every sum of such weights up to 2^20 exactly,
// so sums do not depend on their order, on threads or on lanes (e^x does, in its last bit, on
// whether there is fused multiply-add). Floats from 2^-10 on are multiples of kUnit anyway: only
// what is below is rounded.
WEFT_INLINE F32 weight_of(F32 x) {
  const F32 small = all((1 << 23) * kUnit);
  F32 e = exponential(x);
  F32 low = smaller(e, small);
  return add(sub(e, low), sub(add(low, small), small));
}

struct Histogram {
  double weight[kBins];
  int32_t count[kBins];
};

// What is in the bins before a key: the number of values and their weight.
struct Before {
  int64_t count = 0;
  double weight = 0;
};

// Which bin holds which keys: bin 0 those below first + 2^bits, too, and the last one all that come
// after.
struct Bins {
  uint32_t first;
  int bits;

  int64_t of(uint32_t key) const {
    const int64_t bin = key <= first ? 0 : (key - first) >> bits;
    return bin < kBins ? bin : kBins - 1;
  }
  uint32_t begin(int64_t bin) const { return first + (uint32_t(bin) << bits); }
};

constexpr Bins kCoarse = {kFirstBin, kBinBits};

static void count_values(Histogram& histogram, Bins bins, const float* x, int64_t n) {
  float weights[kLanes];
  for (int64_t i = 0; i < n; i += kLanes) {
    const int rest = int(least(kLanes, n - i));
    store(weights, weight_of(load(x + i, rest)));
    for (int lane = 0; lane < rest; lane++) {
      const int64_t bin = bins.of(bits_of(x[i + lane]) & ~kSign);
      histogram.weight[bin] += double(weights[lane]);
      histogram.count[bin]++;
    }
  }
}

// The bin in which the sum reaches the target, a number of values or, `by_weight`, a weight.
// `before` grows by the bins before it.
static int64_t bin_that_reaches(const Histogram& histogram, double target, bool by_weight,
                                Before& before) {
  int64_t last = 0;
  Before at_last = before;
  for (int64_t bin = 0; bin < kBins; bin++) {
    if (!histogram.count[bin])
      continue;
    last = bin, at_last = before;
    before.count += histogram.count[bin];
    before.weight += histogram.weight[bin];
    if ((by_weight ? before.weight : double(before.count)) >= target)
      break;
  }
  before = at_last;
  return last;
}

// Values in pieces: `num` of them from piece * kPiece on.
struct Candidates {
  const float* x;
  const int64_t* num;  // [pieces]
  int64_t num_pieces;
};

// Those of `x` with keys first..last, put side by side. `to` may be `x`; it has room for kLanes
// more.
static int64_t keep_keys(const float* x, int64_t n, uint32_t first, uint32_t last, float* to) {
  const F32 most = all(-float_of(first));
  const F32 fewest = all(-float_of(last));
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int rest = int(least(kLanes, n - i));
    F32 values = load(x + i, rest);
    const Lanes inside =
        at_least(values, fewest) & at_least(most, values) & (kAllLanes >> (kLanes - rest));
    if (inside)
      kept += store_where(to + kept, values, inside);
  }
  return kept;
}

// A value, and what there is up to it, all its equals included.
struct Selected {
  float x;
  double weight;
};

// The largest x such that the candidates from the largest down to x reach the target. `coarse` is
// their histogram; `fine` and `rest` (room for all and kLanes more) are scratch.
static Selected select(const Candidates& candidates, const Histogram& coarse, double target,
                       bool by_weight, Histogram& fine, float* rest) {
  Before before;
  Bins bins = kCoarse;
  uint32_t first = 0;
  uint32_t last = kLastKey;
  int64_t num = -1;
  for (const Histogram* histogram = &coarse;; histogram = &fine) {
    const int64_t bin = bin_that_reaches(*histogram, target, by_weight, before);
    const uint32_t end = bin == kBins - 1 ? last : bins.begin(bin + 1) - 1;
    if (bin > 0)
      first = bins.begin(bin);
    if (end < last)
      last = end;
    if (num < 0) {
      num = 0;
      for (int64_t piece = 0; piece < candidates.num_pieces; piece++) {
        num += keep_keys(candidates.x + piece * kPiece, candidates.num[piece], first, last,
                         rest + num);
      }
    } else {
      num = keep_keys(rest, num, first, last, rest);
    }
    if (first == last)
      break;
    bins = {first, 0};
    while ((last - first) >> bins.bits >= kBins)
      bins.bits++;
    memset(&fine, 0, sizeof fine);
    count_values(fine, bins, rest, num);
  }
  const float x = -float_of(first);
  float weights[kLanes];
  store(weights, weight_of(all(x)));
  return {x, before.weight + double(num) * double(weights[0])};
}

// A value that at least k of n reach, not far below the k-th largest; -inf if there are fewer.
static float reached_by(const float* x, int64_t n, int64_t k, Histogram& scratch) {
  if (n < k)
    return -kInfinity;
  memset(&scratch, 0, sizeof scratch);
  count_values(scratch, kCoarse, x, n);
  Before before;
  const int64_t bin = bin_that_reaches(scratch, double(k), false, before);
  return bin == kBins - 1 ? -kInfinity : -float_of(kCoarse.begin(bin + 1));
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
