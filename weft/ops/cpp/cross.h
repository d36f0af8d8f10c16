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

// What turns at a time: dims of kLanes positions, side by side in a buffer, because in the rows
// they are often a power of two apart.
constexpr int64_t kTurnedDims = 64;
constexpr int64_t kTurnedStride = (kTurnedDims + kLanes) * int64_t(sizeof(float));

// The keys of a head at the positions from `first` on, as columns; zeros after the last one.
static void turn_keys(const WriteEncodedArgs& args, const float* from, int64_t first,
                      float* to) {
  alignas(64) char gathered[kLanes * kTurnedStride];
  const int64_t num = most(least(args.num_positions - first, kLanes), 0);
  for (int64_t d = 0; d < args.head_dim; d += kTurnedDims) {
    const int64_t dims = least(kTurnedDims, args.head_dim - d);
    for (int64_t t = 0; t < kLanes; t++) {
      char* const row = gathered + t * kTurnedStride;
      if (t < num && dims == kTurnedDims) {
        memcpy(row, from + t * args.stride + d, kTurnedDims * sizeof(float));
      } else {
        memset(row, 0, kTurnedDims * sizeof(float));
        if (t < num)
          memcpy(row, from + t * args.stride + d, size_t(dims) * sizeof(float));
      }
    }
    for (int64_t i = 0; i < dims; i += 4) {
      Words turned[4];
      transpose<kTurnedStride>(gathered + i * int64_t(sizeof(float)), turned);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        if (i + j < dims)
          memcpy(to + (d + i + j) * args.padded + first, &turned[j], sizeof turned[j]);
      }
    }
  }
}

static void write_encoded(const WriteEncodedArgs& args, const StepArgs&, Team& team) {
  const int64_t size = args.head_dim * args.padded;
  for (int64_t item; (item = team.take()) < args.padded / kLanes;) {
    const int64_t first = item * kLanes;
    for (int64_t head = 0; head < args.heads; head++) {
      const float* const keys = args.rows + first * args.stride + head * args.head_dim;
      turn_keys(args, keys, first, args.keys + head * size);
      for (int64_t t = 0; t < kLanes; t++) {
        float* const to = args.values + head * size + (first + t) * args.head_dim;
        const float* const from = keys + t * args.stride + args.heads * args.head_dim;
        if (first + t < args.num_positions) {
          memcpy(to, from, size_t(args.head_dim) * sizeof(float));
        } else {
          memset(to, 0, size_t(args.head_dim) * sizeof(float));
        }
      }
    }
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
