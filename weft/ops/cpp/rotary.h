// What happens to a token's heads between their projection and attention: norm, rotation, storing
// of K and V.
#pragma once

#include "kv_format.h"
#include "norm.h"

namespace weft {
namespace WEFT_NAMESPACE {

// x = x / rms(x) * weight; without a weight if it is null.
static void norm_head(float* x, const float* weight, int64_t dim, float eps) {
  F32 squares = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F32 v = load(x + i, int(dim - i));
    squares = muladd(v, v, squares);
  }
  const F32 scale = all(inverse_root(sum(squares) / float(dim), eps));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int n = int(dim - i);
    const F32 normed = mul(load(x + i, n), scale);
    store(x + i, weight ? mul(normed, load(weight + i, n)) : normed, n);
  }
}

// Pairs (i, i + half) are turned by the angle whose cos and sin stand at i.
static void rotate_head(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = int(half - i);
    const F32 a = load(x + i, n);
    const F32 b = load(x + half + i, n);
    const F32 c = load(cos + i, n);
    const F32 s = load(sin + i, n);
    store(x + i, negmuladd(b, s, mul(a, c)), n);
    store(x + half + i, muladd(a, s, mul(b, c)), n);
  }
}

// Pairs (2 i, 2 i + 1) are.
static void rotate_neighbours(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

static void scale_head(float* x, int64_t dim, float scale) {
  for (int64_t i = 0; i < dim; i++)
    x[i] *= scale;
}

// One head of K or V into its slot.
static void store_head(const KvCache& cache, void* data, float* scales, int64_t slot, int64_t head,
                       const float* x) {
  const int64_t at = slot * cache.kv_heads + head;
  const int64_t first = at * cache.head_dim;
  switch (cache.format) {
    case kKvF32:
      store_row(x, cache.head_dim, static_cast<float*>(data) + first);
      break;
    case kKvBf16:
      store_row(x, cache.head_dim, static_cast<bf16*>(data) + first);
      break;
    case kKvI8:
      scales[at] = store_row(x, cache.head_dim, static_cast<int8_t*>(data) + first);
      break;
    case kKvI16:
      scales[at] = store_row(x, cache.head_dim, static_cast<int16_t*>(data) + first);
      break;
  }
}

// Angles of a token whose positions in time, height and width are those of its column of
// StepArgs.rotation.
struct Angles {
  const float* cos;
  const float* sin;
  float mixed[kMaxHeadDim];
};

static void find_angles(const RotaryStoreArgs& args, const StepArgs& step, int64_t token,
                        Angles& angles) {
  const int64_t half = args.rotary_dim / 2;
  int64_t first = 0;
  if (args.axes && step.rotation) {
    const int32_t* const at = step.rotation + token;
    const int64_t firsts[3] = {at[0] * half, at[step.num_tokens] * half,
                               at[2 * step.num_tokens] * half};
    first = firsts[0];
    if (firsts[1] != first || firsts[2] != first) {
      for (int64_t i = 0; i < half; i++) {
        angles.mixed[i] = args.cos[firsts[args.axes[i]] + i];
        angles.mixed[half + i] = args.sin[firsts[args.axes[i]] + i];
      }
      angles.cos = angles.mixed;
      angles.sin = angles.mixed + half;
      return;
    }
  } else if (half) {
    first = step.positions[token] * half;
  }
  angles.cos = args.cos + first;
  angles.sin = args.sin + first;
}

static void store_value(const RotaryStoreArgs& args, int64_t slot, int64_t head, float* x) {
  const KvCache& cache = *args.cache;
  if (args.v_eps != 0)
    norm_head(x, nullptr, cache.head_dim, args.v_eps);
  store_head(cache, cache.v, cache.v_scale, slot, head, x);
}

static void rotary_store_token(const RotaryStoreArgs& args, const StepArgs& step, int64_t token) {
  const KvCache& cache = *args.cache;
  const int64_t dim = cache.head_dim;
  const int64_t half = args.rotary_dim / 2;
  const int64_t slot = cache.kv_heads ? step.slots[token] : 0;
  Angles angles;
  find_angles(args, step, token, angles);
  float* x = args.qkv + token * args.qkv_stride;
  const int64_t q_stride = args.q_head_stride ? args.q_head_stride : dim;
  for (int64_t head = 0; head < args.heads + cache.kv_heads; head++) {
    const bool is_key = head >= args.heads;
    const float* norm = is_key ? args.k_norm : args.q_norm;
    if (is_key && args.values_are_keys) {
      alignas(64) float value[kMaxHeadDim];
      memcpy(value, x, dim * sizeof(float));
      store_value(args, slot, head - args.heads, value);
    }
    if (norm)
      norm_head(x, norm, dim, args.eps);
    if (args.side_by_side) {
      rotate_neighbours(x, angles.cos, angles.sin, half);
    } else {
      rotate_head(x, angles.cos, angles.sin, half);
    }
    if (args.q_scale && !is_key)
      scale_head(x, dim, args.q_scale[step.positions[token]]);
    if (is_key)
      store_head(cache, cache.k, cache.k_scale, slot, head - args.heads, x);
    x += is_key ? dim : q_stride;
  }
  if (cache.v == cache.k || args.values_are_keys)
    return;
  for (int64_t head = 0; head < cache.kv_heads; head++, x += dim)
    store_value(args, slot, head, x);
}

static void rotary_store(const RotaryStoreArgs& args, const StepArgs& all, Team& team) {
  const StepArgs step = step_of(*args.cache, all);
  constexpr int64_t kTokens = 4;  // taken at a time
  for (int64_t first = team.take(kTokens); first < step.num_tokens; first = team.take(kTokens)) {
    for (int64_t t = first; t < least(first + kTokens, step.num_tokens); t++)
      rotary_store_token(args, step, t);
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
