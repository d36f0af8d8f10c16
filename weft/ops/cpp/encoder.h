// What encoders have besides linears and attention: the sum of up to three embeddings, and norms
// with a mean and a bias.
#pragma once

#include "norm.h"

namespace weft {
namespace WEFT_NAMESPACE {

// The sum of a row's f(i, n), n the number of valid lanes from element i on, in an order that
// depends on the size alone.
template <class Of>
WEFT_INLINE float sum_of(int64_t size, Of f) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
      sums[j] = add(sums[j], f(i + j * kLanes, kLanes));
  }
  for (; i < size; i += kLanes)
    sums[0] = add(sums[0], f(i, int(least(size - i, kLanes))));
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias; out may be x.
static void layer_norm_row(const float* x, const LayerNormWeights& norm, int64_t size, float* out) {
  const float mean = sum_of(size, [&](int64_t i, int n) { return load(x + i, n); }) / float(size);
  const F32 middle = all(mean);
  const float squares = sum_of(size, [&](int64_t i, int n) {
    const F32 away =
        n == kLanes ? sub(load(x + i), middle) : only(sub(load(x + i, n), middle), 0, n, 0.0f);
    return mul(away, away);
  });
  const F32 factor = all(inverse_root(squares / float(size), norm.eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = int(least(size - i, kLanes));
    const F32 scaled = mul(sub(load(x + i, n), middle), factor);
    store(out + i, muladd(scaled, load(norm.weight + i, n), load(norm.bias + i, n)), n);
  }
}

static void layer_norm(const LayerNormArgs& args, const StepArgs& step, Team& team) {
  constexpr int64_t kTokens = 4;  // taken at a time
  for (int64_t first = team.take(kTokens); first < step.num_tokens; first = team.take(kTokens)) {
    for (int64_t t = first; t < least(first + kTokens, step.num_tokens); t++) {
      layer_norm_row(args.x + t * args.x_stride, args.norm, args.size,
                     args.out + t * args.out_stride);
    }
  }
}

WEFT_INLINE F32 load_element(const float* row, int64_t i, int n) { return load(row + i, n); }
WEFT_INLINE F32 load_element(const bf16* row, int64_t i, int n) {
  if (n == kLanes)
    return load_bf16(row + i);
  bf16 rest[kLanes] = {};
  memcpy(rest, row + i, n * sizeof(bf16));
  return load_bf16(rest);
}

template <class Element>
static void embed_sum_of(const EmbedSumArgs& args, const StepArgs& step, Team& team) {
  const auto row_of = [&](const void* table, int64_t row) {
    return static_cast<const Element*>(table) + row * args.size;
  };
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const Element* word = row_of(args.words, step.tokens[t]);
    const Element* kind = args.kinds ? row_of(args.kinds, args.kind_ids[t]) : nullptr;
    const Element* position =
        args.positions ? row_of(args.positions, step.positions[t] + args.first_position) : nullptr;
    float* out = args.out + t * args.size;
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const int n = int(least(args.size - i, kLanes));
      F32 x = load_element(word, i, n);
      if (kind)
        x = add(x, load_element(kind, i, n));
      if (position)
        x = add(x, load_element(position, i, n));
      store(out + i, x, n);
    }
    if (args.norm.weight)
      layer_norm_row(out, args.norm, args.size, out);
  }
}

static void embed_sum(const EmbedSumArgs& args, const StepArgs& step, Team& team) {
  if (args.is_bf16)
    return embed_sum_of<bf16>(args, step, team);
  return embed_sum_of<float>(args, step, team);
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
