// Drawing tokens: temperature, top-k, top-p, min-p, then the largest of logit + Gumbel noise
// (ops/sampling.py says what each means). Nothing is sorted: the three filters are one threshold,
// and noise is computed only where it can win.
//
// A row is worked on by one thread, or, if there are too few rows, by all; the result is the same,
// for sums are exact:
//
//   logits ─▶ survey ─▶ floor ─▶ candidates, histogram ─▶ threshold ─▶ best of each piece ─▶ token
//             (pieces)           (pieces)                              (pieces)
//
// The *floor* is a cheap bound of the threshold, mostly close enough to leave some hundred
// candidates.
#pragma once

#include "select.h"

namespace weft {
namespace WEFT_NAMESPACE {

// All noise is above; so is the winner's score, for the largest logit takes part.
constexpr float kLeastNoise = -2.9f;
constexpr float kMostNoise = 22.2f;                // all noise is below
constexpr float kRounding = 1e-3f;                 // more than the errors of quick bounds
constexpr float kSmallest = 1.17549435e-38f;       // temperature: what is below may count as 0
constexpr int32_t kGolden = int32_t(0x9E3779B9u);  // the multipliers of ops/noise.py
constexpr int32_t kMixOne = int32_t(0x21F0AAADu);
constexpr int32_t kMixTwo = int32_t(0xD35A2D97u);

// The threads that work on a row: this one alone (team null), or the whole team.
struct Workers {
  Team* team;
  int64_t next = 0;

  int64_t take() { return team ? team->take() : next++; }
  bool leads() const { return !team || team->index == 0; }
  int index() const { return team ? team->index : 0; }
  int size() const { return team ? team->present() : 1; }
  void wait() {
    if (team)
      team->barrier();
    next = 0;
  }
};

struct Row {
  const float* logits;
  int64_t vocab_size;
  float peak;
  float temperature;
  int64_t top_k;  // 0: off
  double top_p;   // 1: off
  float min_x;    // by min-p
  uint32_t key;
  uint32_t other_key;

  int64_t num_pieces() const { return ceil_div(vocab_size, kPiece); }
  int64_t end_of(int64_t piece) const { return least((piece + 1) * kPiece, vocab_size); }
};

struct Best {
  float score;
  int32_t token;
};

// Memory for one row.
struct Scratch {
  float* maxima;    // [blocks] largest x of each block
  double* weights;  // [pieces] of all tokens
  int64_t* num;     // [pieces] candidates
  Best* best;       // [pieces]
  float* bounds;    // the floor, the threshold
  float* found;     // [pieces * kPiece + kLanes] candidates, those of a piece at its beginning
  float* rest;      // the same size
  Histogram* of;    // [workers] of the candidates that each one found
  Histogram* fine;

  // Divides `memory`; returns the bytes needed.
  int64_t lay_out(char* memory, int64_t vocab_size, int num_workers) {
    const int64_t pieces = ceil_div(vocab_size, kPiece);
    int64_t used = 0;
    auto take = [&](int64_t bytes) {
      char* begin = memory + used;
      used += ceil_div(bytes, 64) * 64;
      return begin;
    };
    maxima = (float*)take(ceil_div(vocab_size, kBlock) * 4);
    weights = (double*)take(pieces * 8);
    num = (int64_t*)take(pieces * 8);
    best = (Best*)take(pieces * int64_t(sizeof(Best)));
    bounds = (float*)take(2 * 4);
    of = (Histogram*)take(num_workers * int64_t(sizeof(Histogram)));
    fine = (Histogram*)take(sizeof(Histogram));
    found = (float*)take((pieces * kPiece + kLanes) * 4);
    rest = (float*)take((pieces * kPiece + kLanes) * 4);
    return used;
  }
};

// x = (logit - peak) / temperature >= bound implies logit - peak >= this.
static float below_peak(const Row& row, float bound) { return bound * row.temperature * 1.000001f; }

// ---------------------------------------------------------------- the threshold of top-k and top-p

static void find_maxima(const Row& row, const Scratch& scratch, Workers& workers) {
  for (int64_t piece; (piece = workers.take()) < row.num_pieces();) {
    for (int64_t begin = piece * kPiece; begin < row.end_of(piece); begin += kBlock) {
      const float most = peak_of(row.logits, begin, least(begin + kBlock, row.vocab_size));
      scratch.maxima[begin / kBlock] = (most - row.peak) / row.temperature;
    }
  }
}

static void sum_weights(const Row& row, const Scratch& scratch, Workers& workers) {
  const F32 peak = all(row.peak);
  const F32 temperature = all(row.temperature);
  for (int64_t piece; (piece = workers.take()) < row.num_pieces();) {
    Sum sum;
    for (int64_t t = piece * kPiece, end = row.end_of(piece); t < end; t += kLanes) {
      add_to(sum, weight_of(div(sub(logits_at(row.logits, t, end), peak), temperature)));
    }
    scratch.weights[piece] = total(sum);
  }
}

static double sum_over(const double* values, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++)
    sum += values[i];
  return sum;
}

// Top-k: at least k blocks have a token that is not below the floor. Top-p: the tokens below e^x =
// (1 - p) total / V have less than 1 - p of the weight, even if nearly all V are.
static float floor_of(const Row& row, const Scratch& scratch) {
  if (row.top_k)
    return reached_by(scratch.maxima, ceil_div(row.vocab_size, kBlock), row.top_k, *scratch.fine);
  const double total = sum_over(scratch.weights, row.num_pieces());
  const double left = (1 - row.top_p) * total / double(row.vocab_size) - kUnit;
  return left > 0 ? float(__builtin_log(left)) - kRounding : -kInfinity;
}

static void find_candidates(const Row& row, const Scratch& scratch, Workers& workers) {
  const float floor = scratch.bounds[0];
  const F32 peak = all(row.peak);
  const F32 temperature = all(row.temperature);
  const F32 near = all(below_peak(row, floor));
  Histogram& histogram = scratch.of[workers.index()];
  memset(&histogram, 0, sizeof histogram);
  for (int64_t piece; (piece = workers.take()) < row.num_pieces();) {
    float* found = scratch.found + piece * kPiece;
    int64_t num = 0;
    for (int64_t t = piece * kPiece, end = row.end_of(piece); t < end; t += kLanes) {
      const F32 below = sub(logits_at(row.logits, t, end), peak);
      if (!at_least(below, near))
        continue;
      const F32 x = div(below, temperature);
      Lanes above = at_least(x, all(floor));
      if (t + kLanes > end)
        above &= kAllLanes >> (kLanes - (end - t));
      num += store_where(found + num, x, above);
    }
    scratch.num[piece] = num;
    count_values(histogram, kCoarse, found, num);
  }
}

static float threshold_of(const Row& row, const Scratch& scratch, int num_workers) {
  Histogram& coarse = scratch.of[0];
  for (int i = 1; i < num_workers; i++) {
    for (int bin = 0; bin < kBins; bin++) {
      coarse.weight[bin] += scratch.of[i].weight[bin];
      coarse.count[bin] += scratch.of[i].count[bin];
    }
  }
  const Candidates candidates = {scratch.found, scratch.num, row.num_pieces()};
  Selected kept = {-kInfinity, 0};
  if (row.top_k) {
    kept = select(candidates, coarse, double(row.top_k), false, *scratch.fine, scratch.rest);
  } else {
    kept.weight = sum_over(scratch.weights, row.num_pieces());
  }
  if (row.top_p >= 1)
    return kept.x;
  const double target = row.top_p * kept.weight;
  return select(candidates, coarse, target > 0 ? target : kUnit, true, *scratch.fine, scratch.rest)
      .x;
}

// The smallest x that top-k and top-p keep.
static float top_threshold(const Row& row, const Scratch& scratch, Workers& workers) {
  if (row.top_k) {
    find_maxima(row, scratch, workers);
  } else {
    sum_weights(row, scratch, workers);
  }
  workers.wait();
  if (workers.leads())
    scratch.bounds[0] = floor_of(row, scratch);
  workers.wait();
  find_candidates(row, scratch, workers);
  workers.wait();
  if (workers.leads())
    scratch.bounds[1] = threshold_of(row, scratch, workers.size());
  workers.wait();
  return scratch.bounds[1];
}

// ---------------------------------------------------------------- noise

// Uniform numbers in (0, 1) for tokens t and after.
WEFT_INLINE F32 uniform(const Row& row, int64_t t, I32 steps) {
  I32 x = add_i32(all_i32(int32_t(uint32_t(t) * uint32_t(kGolden) + row.key)), steps);
  x = mul_i32(xor_shifted<16>(x), all_i32(kMixOne));
  x = add_i32(x, all_i32(int32_t(row.other_key)));
  x = mul_i32(xor_shifted<15>(x), all_i32(kMixTwo));
  x = and_i32(xor_shifted<15>(x), all_i32(0x7fffffff));
  const F32 u = mul(add(to_f32(x), all(0.5f)), all(1.0f / (1u << 31)));
  return smaller(u, all(1.0f - 1.0f / (1 << 24)));
}

// -log(-log(1 - u)), each step rounded to float; in double, so that every processor finds the same.
static float gumbel(float u) {
  const float e = float(-__builtin_log1p(-double(u)));
  return float(-__builtin_log(double(e)));
}

// The best token of a piece. What cannot win is passed over by a bound that needs no logarithm:
//
//   noise = -log(-log(1 - u)) <= -log(u) <= ln 2 * (127 - bits(u) / 2^23)
//
// since the bits of a float, taken as a number, are its logarithm with straight lines between
// powers of two.
static Best best_of(const Row& row, float threshold, int64_t piece, I32 steps) {
  const float ln2 = 0.693147181f;
  const F32 peak = all(row.peak);
  const F32 slope = all(-ln2 / (1 << 23));
  const F32 inverse = all(1 / row.temperature);
  Best best = {kLeastNoise, -1};
  float lowest = threshold;  // x below cannot win
  F32 bar;
  F32 near;
  auto raise = [&] {
    if (best.score - kMostNoise > lowest)
      lowest = best.score - kMostNoise;
    near = all(below_peak(row, lowest));
    bar = all(best.score - kRounding - 127 * ln2);
  };
  raise();
  for (int64_t t = piece * kPiece, end = row.end_of(piece); t < end; t += kLanes) {
    const F32 below = sub(logits_at(row.logits, t, end), peak);
    Lanes near_enough = at_least(below, near);
    if (!near_enough)
      continue;
    const F32 u = uniform(row, t, steps);
    const F32 bound = muladd(to_f32(as_i32(u)), slope, mul(below, inverse));
    Lanes likely = at_least(bound, bar) & near_enough;
    if (!likely)
      continue;
    float uniforms[kLanes];
    store(uniforms, u);
    for (; likely; likely &= likely - 1) {
      const int lane = __builtin_ctz(likely);
      if (t + lane >= end)
        break;
      const float x = (row.logits[t + lane] - row.peak) / row.temperature;
      if (!(x >= threshold))
        continue;
      const float score = x + gumbel(uniforms[lane]);
      if (score > best.score) {
        best = {score, int32_t(t + lane)};
        raise();
      }
    }
  }
  return best;
}

// ---------------------------------------------------------------- rows

static uint64_t splitmix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

static Row row_of(const DrawArgs& args, int64_t i) {
  const uint64_t key =
      splitmix(splitmix(uint64_t(args.seeds[i])) ^ uint64_t(int64_t(args.positions[i])));
  const int64_t top_k = args.top_k[i] < args.vocab_size ? args.top_k[i] : 0;
  const float temperature = args.temperature[i];
  Row row;
  row.logits = args.logits + i * args.stride;
  row.vocab_size = args.vocab_size;
  row.peak = args.max_logits[i];
  row.temperature = temperature > kSmallest ? temperature : kSmallest;
  row.top_k = top_k > 0 ? top_k : 0;
  row.top_p = args.top_p[i];
  row.min_x = float(__builtin_log(double(args.min_p[i])));
  row.key = uint32_t(key);
  row.other_key = uint32_t(key >> 32);
  return row;
}

static bool draws(const DrawArgs& args, int64_t i) {
  return args.temperature[i] > 0 && __builtin_fabsf(args.max_logits[i]) < kInfinity;
}

// The token, to the leader of the workers.
static int64_t draw_row(const Row& row, const Scratch& scratch, Workers& workers) {
  float threshold = row.top_k || row.top_p < 1 ? top_threshold(row, scratch, workers) : -kInfinity;
  if (row.min_x > threshold)
    threshold = row.min_x;
  int32_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; lane++)
    lanes[lane] = int32_t(uint32_t(lane) * uint32_t(kGolden));
  const I32 steps = load_i32(lanes);
  for (int64_t piece; (piece = workers.take()) < row.num_pieces();) {
    scratch.best[piece] = best_of(row, threshold, piece, steps);
  }
  workers.wait();
  Best best = {-kInfinity, 0};
  for (int64_t piece = 0; piece < row.num_pieces() && workers.leads(); piece++) {
    if (scratch.best[piece].score > best.score && scratch.best[piece].token >= 0)
      best = scratch.best[piece];
  }
  return best.token;
}

static void draw(const DrawArgs& args, const StepArgs& step, Team& team) {
  const int64_t num_rows = step.num_tokens;
  const bool few_rows = num_rows == 1 || 2 * num_rows <= team.size;
  Scratch scratch;
  if (team.size > 1 && few_rows && args.vocab_size > kPiece) {
    char* memory = memory_for_all(team, scratch.lay_out(nullptr, args.vocab_size, team.size));
    if (!memory)
      return;
    scratch.lay_out(memory, args.vocab_size, team.size);
    Workers workers = {&team};
    for (int64_t i = 0; i < num_rows; i++) {
      if (!draws(args, i))
        continue;
      const int64_t token = draw_row(row_of(args, i), scratch, workers);
      if (workers.leads())
        args.tokens[i] = token;
      workers.wait();
    }
    return;
  }
  char* memory = nullptr;
  for (int64_t i; (i = team.take()) < num_rows;) {
    if (!draws(args, i))
      continue;
    if (!memory) {
      memory = static_cast<char*>(own_memory(scratch.lay_out(nullptr, args.vocab_size, 1)));
      if (!memory)
        return;
      scratch.lay_out(memory, args.vocab_size, 1);
    }
    Workers workers = {nullptr};
    args.tokens[i] = draw_row(row_of(args, i), scratch, workers);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
