// Attention to the vectors of an encoder, whose keys and values are written once for a request:
// keys as columns, so that a lane is a position, and values as rows.
//
// A work item is one head of one token. Its result depends on nothing else, whichever thread takes
// it.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

static void add_positions(const AddPositionsArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    float* const x = args.x + t * args.x_stride;
    const float* const row = args.table + step.positions[t] * args.size;
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      store(x + i, add(load(x + i, n), load(row + i, n)), n);
    }
  }
}

// The weights, not divided by their sum, of one query: returns that sum. Scores are in powers of
// two.
static float cross_weights(const CrossArgs& args, const float* q, const float* keys,
                           float* weights) {
  constexpr int kParts = int(kCrossStep) / kLanes;
  const float factor = args.scale * kLog2E;
  F32 tops = all(kNothingSeen);
  for (int64_t first = 0; first < args.padded; first += kCrossStep) {
    F32 scores[kParts];
    for (int i = 0; i < kParts; i++)
      scores[i] = zero();
    for (int64_t d = 0; d < args.head_dim; d++) {
      const float* const column = keys + d * args.padded + first;
      const F32 of_query = all(q[d] * factor);
#pragma GCC unroll 16
      for (int i = 0; i < kParts; i++)
        scores[i] = muladd(of_query, load(column + i * kLanes), scores[i]);
    }
    for (int i = 0; i < kParts; i++) {
      const int64_t left = args.num_positions - first - i * kLanes;
      if (left < kLanes)
        scores[i] = only(scores[i], 0, int(most(left, 0)), kNothingSeen);
      tops = larger(tops, scores[i]);
      store(weights + first + i * kLanes, scores[i]);
    }
  }
  const F32 peak = all(largest(tops));
  F32 sums = zero();
  for (int64_t i = 0; i < args.padded; i += kLanes) {
    F32 weight = power_of_two(sub(load(weights + i), peak));
    if (args.num_positions - i < kLanes)
      weight = only(weight, 0, int(most(args.num_positions - i, 0)), 0.0f);
    sums = add(sums, weight);
    store(weights + i, weight);
  }
  return sum(sums);
}

// out = weights * values / total, kParts registers of a head at a time.
template <int kParts>
static void cross_sums(const CrossArgs& args, const float* weights, const float* values,
                       float total, float* out, int64_t size) {
  F32 sums[2][kParts];
  for (int i = 0; i < kParts; i++)
    sums[0][i] = sums[1][i] = zero();
  const int rest = int(size - (kParts - 1) * kLanes);
  // Two chains of sums, so that neither waits for the other.
  for (int64_t p = 0; p < args.padded; p += 2) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const F32 weight = all(weights[p + j]);
      const float* const row = values + (p + j) * args.head_dim;
#pragma GCC unroll 16
      for (int i = 0; i < kParts - 1; i++)
        sums[j][i] = muladd(weight, load(row + i * kLanes), sums[j][i]);
      const float* const last = row + (kParts - 1) * kLanes;
      const F32 value = rest == kLanes ? load(last) : load(last, rest);
      sums[j][kParts - 1] = muladd(weight, value, sums[j][kParts - 1]);
    }
  }
  const F32 factor = all(1 / total);
  for (int i = 0; i < kParts; i++) {
    const int n = i == kParts - 1 ? rest : kLanes;
    store(out + i * kLanes, mul(add(sums[0][i], sums[1][i]), factor), n);
  }
}

static void cross(const CrossArgs& args, const StepArgs& step, Team& team) {
  const int64_t size = args.heads * args.head_dim;
  const int64_t num_items = step.num_tokens * args.heads;
  alignas(64) float weights[kMaxCross];
  int64_t request = 0;
  int64_t end = step.num_requests ? step.lens[0] : 0;  // of the request's tokens
  for (int64_t item; (item = team.take()) < num_items;) {
    const int64_t t = item / args.heads;
    const int64_t head = item % args.heads;
    while (t >= end)
      end += step.lens[++request];
    const int64_t slot = step.rows[request];
    const int64_t of_head = (slot * args.heads + head) * args.head_dim * args.padded;
    const float* const q = args.q + t * args.q_stride + head * args.head_dim;
    float* const out = args.out + t * size + head * args.head_dim;
    if (args.kept)
      memcpy(args.kept + t * size + head * args.head_dim, q, size_t(args.head_dim) * sizeof(float));
    const float total = cross_weights(args, q, args.keys + of_head, weights);
    const float* const values = args.values + of_head;
    constexpr int64_t kColumns = 4 * kLanes;
    for (int64_t first = 0; first < args.head_dim; first += kColumns) {
      const int64_t num = least(kColumns, args.head_dim - first);
      switch (ceil_div(num, kLanes)) {
        case 1:
          cross_sums<1>(args, weights, values + first, total, out + first, num);
          break;
        case 2:
          cross_sums<2>(args, weights, values + first, total, out + first, num);
          break;
        case 3:
          cross_sums<3>(args, weights, values + first, total, out + first, num);
          break;
        default:
          cross_sums<4>(args, weights, values + first, total, out + first, num);
      }
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
