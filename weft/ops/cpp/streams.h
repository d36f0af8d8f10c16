// Several versions of a token's hidden state side by side, of which a layer computes one and mixes
// the others (arXiv:2301.13310), and an activation that cuts off most of a row.
#pragma once

#include "encoder_pointwise.h"
#include "norm.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr float kLeastSquares = 1e-5f;  // mean of squares of a stream that is scaled up

static void cut_off(const CutOffArgs& args, const StepArgs& step, Team& team) {
  const float share = 1 / float(args.size);
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    float* const x = args.x + t * args.x_stride;
    F32 total = zero();
    for (int64_t i = 0; i < args.size; i += kLanes)
      total = add(total, load(x + i, int(least(args.size - i, kLanes))));
    const float mean = sum(total) * share;
    float squares = 0;
    F32 sums = zero();
    int64_t i = 0;
    for (; i + kLanes <= args.size; i += kLanes) {
      const F32 off = sub(load(x + i), all(mean));
      sums = muladd(off, off, sums);
    }
    squares = sum(sums);
    for (; i < args.size; i++)
      squares += (x[i] - mean) * (x[i] - mean);
    const F32 limit = all(mean + sqrtf(squares * share) * args.deviations);
    for (i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      const F32 left = larger(zero(), sub(load(x + i, n), limit));
      store(x + i, activated(args.activation, left), n);
    }
  }
}

// The factor that gives x the root mean square `wanted`.
static float factor_to(float wanted, const float* x, int64_t size) {
  const float squares = mean_of_squares(x, size);
  return wanted / sqrtf(squares < kLeastSquares ? kLeastSquares : squares);
}

static void open_streams(const OpenStreamsArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* const x = args.x + t * args.x_stride;
    const float* y = args.y + t * args.y_stride;
    float* out = args.out + t * args.out_stride;
    memcpy(out, x, size_t(args.size) * sizeof(float));
    const float wanted = sqrtf(mean_of_squares(x, args.size));
    for (int64_t stream = 1; stream < args.num; stream++, y += args.size) {
      out += args.size;
      const F32 factor = all(factor_to(wanted, y, args.size));
      for (int64_t i = 0; i < args.size; i += kLanes) {
        const int n = int(least(args.size - i, kLanes));
        store(out + i, mul(load(y + i, n), factor), n);
      }
    }
  }
}

static void predict_streams(const PredictStreamsArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* const x = args.x + t * args.x_stride;
    float* const out = args.out + t * args.out_stride;
    const float* factors = args.factors + t * args.factors_stride;
    for (int64_t stream = 0; stream < args.num; stream++, factors += args.num) {
      for (int64_t i = 0; i < args.size; i += kLanes) {
        const int n = int(least(args.size - i, kLanes));
        F32 total = load(x + stream * args.size + i, n);
        for (int64_t j = 0; j < args.num; j++)
          total = muladd(load(x + j * args.size + i, n), all(factors[j]), total);
        store(out + stream * args.size + i, total, n);
      }
    }
  }
}

static void correct_streams(const CorrectStreamsArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    float* const x = args.x + t * args.x_stride;
    const float* const y = args.y + t * args.y_stride;
    const float* const factors = args.factors + t * args.factors_stride;
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      const F32 change = sub(load(y + i, n), load(x + args.active * args.size + i, n));
      for (int64_t stream = 0; stream < args.num; stream++) {
        float* const to = x + stream * args.size + i;
        store(to, muladd(change, all(1 + factors[stream]), load(to, n)), n);
      }
    }
  }
}

static void close_streams(const CloseStreamsArgs& args, const StepArgs& step, Team& team) {
  const float share = 1 / float(args.num);
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* const x = args.x + t * args.x_stride;
    const float* y = args.y + t * args.y_stride;
    float* const out = args.out + t * args.out_stride;
    const float wanted = sqrtf(mean_of_squares(x, args.size));
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      store(out + i, mul(load(x + i, n), all(share)), n);
    }
    for (int64_t stream = 1; stream < args.num; stream++, y += args.size) {
      const F32 factor = all(share * factor_to(wanted, y, args.size));
      for (int64_t i = 0; i < args.size; i += kLanes) {
        const int n = int(least(args.size - i, kLanes));
        store(out + i, muladd(load(y + i, n), factor, load(out + i, n)), n);
      }
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
