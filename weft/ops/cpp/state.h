// Layers that keep a state of fixed size for each request in place of K and V: short convolutions,
// the gated delta rule, Mamba 1 and 2, and lightning attention.
//
// The state of a layer is made of blocks of kStateLanes neighbours: channels, or values of a head.
// No block needs another one, so a work item is one block of all requests:
//
//   slot   | block 0 | block 1 | ..                 of a convolution  [taps - 1][kStateLanes]
//                                                   of the delta rule [key_dim][kStateLanes], 8 KB:
//                                                   they stay in the L1 cache for a chunk of tokens
//                                                   of Mamba 1 and 2  [state_dim][kStateLanes]
//                                                   of lightning attention, as of the delta rule
//
// Token follows token with the same arithmetic in prompts and in single steps: how a prompt is cut
// changes no bit.
#pragma once

#include <cmath>
#include <cstring>

#include "moe.h"
#include "norm.h"

namespace weft {
namespace WEFT_NAMESPACE {

// ---------------------------------------------------------------- slots

// The same block of all slots.
struct StateBlock {
  float* first;    // of slot 0
  int64_t stride;  // floats from one slot to the next
  int64_t size;    // floats of the block

  float* at(int64_t slot) const { return first + slot * stride; }
};

// After how many of its tokens, more than `done`, a copy of a request's state is wanted; or all of
// its tokens.
static int64_t next_kept(const StepArgs& step, int64_t r, int64_t done) {
  int64_t next = step.lens[r];
  for (int64_t i = 0; i < step.num_kept; i++) {
    if (step.kept_rows[i] == r && step.kept_lens[i] > done)
      next = least(next, step.kept_lens[i]);
  }
  return next;
}

static void keep(const StepArgs& step, const StateBlock& block, int64_t r, int64_t done) {
  for (int64_t i = 0; i < step.num_kept; i++) {
    if (step.kept_rows[i] != r || step.kept_lens[i] != done)
      continue;
    memcpy(block.at(step.kept_slots[i]), block.at(step.state_writes[r]), size_t(block.size) * 4);
  }
}

// Take the block of each request from the slot that it reads to the one that it writes.
// advance(state, t, num) takes a state over `num` tokens, the first of which is t of the step.
template <class Advance>
static void advance_all(const StepArgs& step, const StateBlock& block, const Advance& advance) {
  int64_t t = 0;
  for (int64_t r = 0; r < step.num_requests; r++) {
    float* const state = block.at(step.state_writes[r]);
    const int32_t read = step.state_reads[r];
    if (read < 0) {
      memset(state, 0, size_t(block.size) * 4);
    } else if (read != step.state_writes[r]) {
      memcpy(state, block.at(read), size_t(block.size) * 4);
    }
    for (int64_t done = 0; done < step.lens[r];) {
      const int64_t next = next_kept(step, r, done);
      advance(state, t + done, next - done);
      done = next;
      keep(step, block, r, done);
    }
    t += step.lens[r];
  }
}

// ---------------------------------------------------------------- convolutions

// One block of channels: the state is the last taps - 1 inputs, the oldest first.
template <int taps>
static void advance_conv(const ConvArgs& args, int64_t channel, float* state, int64_t t,
                         int64_t num) {
  for (int64_t c = 0; c < kStateLanes; c += kLanes) {
    F32 past[taps - 1];
    F32 weight[taps];
    for (int j = 0; j < taps; j++)
      weight[j] = load(args.weight + j * args.channels + channel + c);
    for (int j = 0; j < taps - 1; j++)
      past[j] = load(state + j * kStateLanes + c);
    const F32 bias = args.bias ? load(args.bias + channel + c) : zero();
    for (int64_t i = t; i < t + num; i++) {
      const int64_t at = i * args.x_stride + channel + c;
      F32 x = load(args.x + at);
      if (args.in_gate)
        x = mul(x, load(args.in_gate + at));
      F32 y = bias;
      for (int j = 0; j < taps - 1; j++)
        y = muladd(past[j], weight[j], y);
      y = muladd(x, weight[taps - 1], y);
      if (args.has_silu)
        y = silu(y);
      if (args.out_gate)
        y = mul(y, load(args.out_gate + at));
      store(args.y + i * args.y_stride + channel + c, y);
      for (int j = 0; j + 1 < taps - 1; j++)
        past[j] = past[j + 1];
      past[taps - 2] = x;
    }
    for (int j = 0; j < taps - 1; j++)
      store(state + j * kStateLanes + c, past[j]);
  }
}

static void conv(const ConvArgs& args, const StepArgs& step, Team& team) {
  const auto advance = args.taps == 2   ? advance_conv<2>
                       : args.taps == 3 ? advance_conv<3>
                                        : advance_conv<4>;
  const int64_t size = (args.taps - 1) * kStateLanes;
  const int64_t num_blocks = args.channels / kStateLanes;
  // Neighbours together: the rows of a few tokens lie on one page each.
  constexpr int64_t kTogether = 4;
  for (int64_t first; (first = team.take(kTogether)) < num_blocks;) {
    for (int64_t b = first; b < least(first + kTogether, num_blocks); b++) {
      const StateBlock block = {args.states + b * size, args.state_stride, size};
      advance_all(step, block, [&](float* state, int64_t t, int64_t num) {
        advance(args, b * kStateLanes, state, t, num);
      });
    }
  }
}

// ---------------------------------------------------------------- the gated delta rule

// What a token does to the state of a head.
struct DeltaFactors {
  float decay;
  float rate;         // how much of the difference is written
  float key_scale;    // 1 / |k|
  float query_scale;  // 1 / |q| / sqrt(key_dim)
  float product;      // q k, both as they come
};
static_assert(sizeof(DeltaFactors) <= kDeltaFactors * 4, "the factors of a head have room");

WEFT_INLINE DeltaFactors& factors_of(const DeltaArgs& args, int64_t t, int64_t head) {
  return *reinterpret_cast<DeltaFactors*>(args.factors +
                                          (t * args.value_heads + head) * kDeltaFactors);
}

WEFT_INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

WEFT_INLINE int64_t key_head_of(const DeltaArgs& args, int64_t head) {
  return args.is_tiled ? head % args.key_heads : head / (args.value_heads / args.key_heads);
}

// The factors of all value heads that share a key head.
static void find_factors(const DeltaArgs& args, int64_t t, int64_t key_head) {
  const float* q = args.qkv + t * args.qkv_stride + key_head * args.key_dim;
  const float* k = q + args.key_heads * args.key_dim;
  F32 qq = zero();
  F32 kk = zero();
  F32 qk = zero();
  for (int64_t i = 0; i < args.key_dim; i += kLanes) {
    const F32 query = load(q + i);
    const F32 key = load(k + i);
    qq = muladd(query, query, qq);
    kk = muladd(key, key, kk);
    qk = muladd(query, key, qk);
  }
  DeltaFactors found;
  found.key_scale = 1 / sqrtf(sum(kk) + kDeltaEps);
  found.query_scale = 1 / sqrtf(sum(qq) + kDeltaEps) / sqrtf(float(args.key_dim));
  found.product = sum(qk);
  const float* const rates = args.rates + t * args.rates_stride;
  const int64_t shared = args.value_heads / args.key_heads;
  const int64_t first = args.is_tiled ? key_head : key_head * shared;
  const int64_t step = args.is_tiled ? args.key_heads : 1;
  for (int64_t i = 0; i < shared; i++) {
    const int64_t h = first + i * step;
    found.rate = 1 / (1 + expf(-rates[h]));
    found.decay =
        expf(-expf(args.decay_log[h]) * softplus(rates[args.value_heads + h] + args.decay_bias[h]));
    factors_of(args, t, h) = found;
  }
}

// kStateLanes values of a head over `num` tokens, maybe prefetching the block after this one: S <-
// decay S + k d, d = rate (v - decay S k), out = S q.
template <bool asks_ahead>
static void advance_delta(const DeltaArgs& args, int64_t head, int64_t value, float* state,
                          int64_t t, int64_t num) {
  const int64_t key_size = args.key_heads * args.key_dim;
  const int64_t key_at = key_head_of(args, head) * args.key_dim;
  const int64_t value_at = head * args.value_dim + value;
  for (int64_t c = 0; c < kStateLanes; c += kLanes) {
    float* const s = state + c;
    for (int64_t i = t; i < t + num; i++) {
      const float* const q = args.qkv + i * args.qkv_stride + key_at;
      const float* const k = q + key_size;
      const DeltaFactors by = factors_of(args, i, head);
      F32 of_key[4] = {zero(), zero(), zero(), zero()};
      F32 of_query[4] = {zero(), zero(), zero(), zero()};
      for (int64_t j = 0; j < args.key_dim; j += 4) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          if (asks_ahead)
            __builtin_prefetch(s + (args.key_dim + j + u) * kStateLanes, 1);
          const F32 row = load(s + (j + u) * kStateLanes);
          of_key[u] = muladd(all(k[j + u]), row, of_key[u]);
          of_query[u] = muladd(all(q[j + u]), row, of_query[u]);
        }
      }
      const F32 seen = add(add(of_key[0], of_key[1]), add(of_key[2], of_key[3]));
      const F32 asked = add(add(of_query[0], of_query[1]), add(of_query[2], of_query[3]));
      const F32 decay = all(by.decay);
      const F32 key_scale = all(by.key_scale);
      const F32 v = load(args.qkv + i * args.qkv_stride + 2 * key_size + value_at + c);
      const F32 known = mul(mul(decay, key_scale), seen);
      // The key's scale belongs to what is written, too.
      const F32 change = mul(key_scale, mul(all(by.rate), sub(v, known)));
      const F32 out = mul(all(by.query_scale), muladd(all(by.product), change, mul(decay, asked)));
      store(args.out + i * args.value_heads * args.value_dim + value_at + c, out);
      for (int64_t j = 0; j < args.key_dim; j += 4) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          float* const row = s + (j + u) * kStateLanes;
          store(row, muladd(all(k[j + u]), change, mul(decay, load(row))));
        }
      }
    }
  }
}

// out = out / rms(out) * weight * silu(gate), over the values of a head.
static void norm_and_gate(const DeltaArgs& args, int64_t t, int64_t head) {
  float* const out = args.out + (t * args.value_heads + head) * args.value_dim;
  const float* const gate = args.gate + t * args.gate_stride + head * args.value_dim;
  const F32 factor = all(inverse_rms(out, args.value_dim, args.eps));
  for (int64_t i = 0; i < args.value_dim; i += kLanes) {
    const F32 normed = mul(mul(load(out + i), factor), load(args.norm_weight + i));
    store(out + i, mul(normed, silu(load(gate + i))));
  }
}

static void delta(const DeltaArgs& args, const StepArgs& step, Team& team) {
  const int64_t num_keys = step.num_tokens * args.key_heads;
  const int64_t num_values = step.num_tokens * args.value_heads;
  for (int64_t i; (i = team.take()) < num_keys;)
    find_factors(args, i / args.key_heads, i % args.key_heads);
  team.barrier();
  const int64_t size = args.key_dim * kStateLanes;
  const int64_t in_head = args.value_dim / kStateLanes;
  // Blocks of a head lie together: where there are heads enough for all threads, an item is a head.
  const int64_t together = args.value_heads >= 4 * team.size ? in_head : 1;
  for (int64_t b; (b = team.take(together)) < args.value_heads * in_head;) {
    const StateBlock block = {args.states + b * size, args.state_stride, together * size};
    advance_all(step, block, [&](float* state, int64_t t, int64_t num) {
      for (int64_t i = 0; i < together; i++) {
        const int64_t value = (b + i) % in_head * kStateLanes;
        if (num == 1) {
          advance_delta<true>(args, b / in_head, value, state + i * size, t, num);
        } else {
          advance_delta<false>(args, b / in_head, value, state + i * size, t, num);
        }
      }
    });
  }
  team.barrier();
  for (int64_t i; (i = team.take()) < num_values;)
    norm_and_gate(args, i / args.value_heads, i % args.value_heads);
}

// ---------------------------------------------------------------- Mamba 2

// What a token does to the state of a head.
struct ScanFactors {
  float decay;
  float step;
};
static_assert(sizeof(ScanFactors) <= kScanFactors * 4, "the factors of a head have room");

WEFT_INLINE ScanFactors& scan_factors_of(const ScanArgs& args, int64_t t, int64_t head) {
  return *reinterpret_cast<ScanFactors*>(args.factors + (t * args.heads + head) * kScanFactors);
}

// S <- decay S + into value, of kLanes values of a head. Returns S out_of.
WEFT_INLINE F32 take_in(float* state, int64_t dim, F32 decay, const float* into, F32 value,
                        const float* out_of) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  for (int64_t j = 0; j < dim; j += 4) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) {
      float* const row = state + (j + u) * kStateLanes;
      const F32 next = muladd(all(into[j + u]), value, mul(decay, load(row)));
      store(row, next);
      sums[u] = muladd(all(out_of[j + u]), next, sums[u]);
    }
  }
  return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

// kStateLanes values of a head over `num` tokens: S <- decay S + b (step x), out = S c + skip x.
static void advance_scan(const ScanArgs& args, int64_t head, int64_t value, float* state, int64_t t,
                         int64_t num) {
  const int64_t inner = args.heads * args.head_dim;
  const int64_t value_at = head * args.head_dim + value;
  const int64_t group = head / (args.heads / args.groups);
  const F32 skip = all(args.skip[head]);
  for (int64_t c = 0; c < kStateLanes; c += kLanes) {
    float* const s = state + c;
    for (int64_t i = t; i < t + num; i++) {
      const float* const row_of_x = args.x + i * args.x_stride;
      const float* const into = row_of_x + inner + group * args.state_dim;
      const float* const out_of = into + args.groups * args.state_dim;
      const ScanFactors by = scan_factors_of(args, i, head);
      const F32 x = load(row_of_x + value_at + c);
      const F32 stepped = mul(all(by.step), x);
      const F32 asked = take_in(s, args.state_dim, all(by.decay), into, stepped, out_of);
      store(args.out + i * inner + value_at + c, muladd(skip, x, asked));
    }
  }
}

// What follows the scan: the gate, and maybe a norm over the values of a group's heads.
static void gate_and_norm(const ScanArgs& args, int64_t t, int64_t group) {
  const int64_t inner = args.heads * args.head_dim;
  const int64_t size = inner / args.groups;
  const int64_t first = group * size;
  float* const out = args.out + t * inner + first;
  const float* const gate = args.gate + t * args.gate_stride + first;
  const auto apply_gate = [&] {
    for (int64_t i = 0; i < size; i += kLanes)
      store(out + i, mul(load(out + i), silu(load(gate + i))));
  };
  if (!args.norm_is_first)
    apply_gate();
  if (args.norm_weight) {
    const F32 factor = all(inverse_rms(out, size, args.eps));
    for (int64_t i = 0; i < size; i += kLanes)
      store(out + i, mul(mul(load(out + i), factor), load(args.norm_weight + first + i)));
  }
  if (args.norm_is_first)
    apply_gate();
}

static void scan(const ScanArgs& args, const StepArgs& step, Team& team) {
  const int64_t num_heads = step.num_tokens * args.heads;
  const int64_t num_groups = step.num_tokens * args.groups;
  for (int64_t i; (i = team.take()) < num_heads;) {
    const int64_t t = i / args.heads;
    const int64_t h = i % args.heads;
    ScanFactors& found = scan_factors_of(args, t, h);
    found.step = softplus(args.steps[t * args.steps_stride + h] + args.step_bias[h]);
    found.decay = expf(-expf(args.decay_log[h]) * found.step);
  }
  team.barrier();
  const int64_t size = args.state_dim * kStateLanes;
  const int64_t in_head = args.head_dim / kStateLanes;
  const int64_t together = args.heads >= 4 * team.size ? in_head : 1;
  for (int64_t b; (b = team.take(together)) < args.heads * in_head;) {
    const StateBlock block = {args.states + b * size, args.state_stride, together * size};
    advance_all(step, block, [&](float* state, int64_t t, int64_t num) {
      for (int64_t i = 0; i < together; i++) {
        advance_scan(args, b / in_head, (b + i) % in_head * kStateLanes, state + i * size, t, num);
      }
    });
  }
  team.barrier();
  for (int64_t i; (i = team.take()) < num_groups;)
    gate_and_norm(args, i / args.groups, i % args.groups);
}

// ---------------------------------------------------------------- Mamba 1

// kStateLanes channels over `num` tokens. `rates`: memory for state_dim * kLanes floats.
static void advance_selective(const SelectiveArgs& args, int64_t channel, float* state, int64_t t,
                              int64_t num, float* rates) {
  for (int64_t c = 0; c < kStateLanes; c += kLanes) {
    const int64_t at = channel + c;
    float* const s = state + c;
    for (int64_t j = 0; j < args.state_dim; j++) {
      const F32 decay_log = load(args.decay_log + j * args.channels + at);
      store(rates + j * kLanes, sub(zero(), exponential(decay_log)));
    }
    const F32 skip = load(args.skip + at);
    for (int64_t i = t; i < t + num; i++) {
      alignas(64) float steps[kLanes];
      for (int64_t lane = 0; lane < kLanes; lane++)
        steps[lane] = softplus(args.steps[i * args.steps_stride + at + lane]);
      const F32 step = load(steps);
      const F32 x = load(args.x + i * args.x_stride + at);
      const F32 stepped = mul(step, x);
      const float* const into = args.shared + i * args.shared_stride;
      const float* const out_of = into + args.state_dim;
      F32 sums[4] = {zero(), zero(), zero(), zero()};
      for (int64_t j = 0; j < args.state_dim; j += 4) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          float* const row = s + (j + u) * kStateLanes;
          const F32 decay = exponential(mul(step, load(rates + (j + u) * kLanes)));
          const F32 next = muladd(all(into[j + u]), stepped, mul(decay, load(row)));
          store(row, next);
          sums[u] = muladd(all(out_of[j + u]), next, sums[u]);
        }
      }
      const F32 asked = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
      const F32 gate = silu(load(args.gate + i * args.gate_stride + at));
      store(args.out + i * args.channels + at, mul(muladd(skip, x, asked), gate));
    }
  }
}

static void selective(const SelectiveArgs& args, const StepArgs& step, Team& team) {
  float* const rates = static_cast<float*>(own_memory(args.state_dim * kLanes * 4));
  if (!rates)
    return;
  const int64_t size = args.state_dim * kStateLanes;
  for (int64_t b; (b = team.take()) < args.channels / kStateLanes;) {
    const StateBlock block = {args.states + b * size, args.state_stride, size};
    advance_all(step, block, [&](float* state, int64_t t, int64_t num) {
      advance_selective(args, b * kStateLanes, state, t, num, rates);
    });
  }
}

// ---------------------------------------------------------------- lightning attention

// kStateLanes values of a head over `num` tokens: S <- decay S + k v, out = S q.
static void advance_lightning(const LightningArgs& args, int64_t head, int64_t value, float* state,
                              int64_t t, int64_t num) {
  const int64_t size = args.heads * args.head_dim;
  const int64_t head_at = head * args.head_dim;
  const F32 decay = all(args.decay[head]);
  for (int64_t c = 0; c < kStateLanes; c += kLanes) {
    for (int64_t i = t; i < t + num; i++) {
      const float* const q = args.qkv + i * args.qkv_stride + head_at;
      const float* const k = q + size;
      const F32 v = load(k + size + value + c);
      const F32 asked = take_in(state + c, args.head_dim, decay, k, v, q);
      store(args.out + i * size + head_at + value + c, asked);
    }
  }
}

// out = out / rms(out) * weight * sigmoid(gate), over the values of all heads.
static void norm_and_gate(const LightningArgs& args, int64_t t) {
  const int64_t size = args.heads * args.head_dim;
  float* const out = args.out + t * size;
  const float* const gate = args.gate + t * args.gate_stride;
  const F32 factor = all(inverse_rms(out, size, args.eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32 normed = mul(mul(load(out + i), factor), load(args.norm_weight + i));
    store(out + i, mul(normed, sigmoid(load(gate + i))));
  }
}

static void lightning(const LightningArgs& args, const StepArgs& step, Team& team) {
  const int64_t num_heads = step.num_tokens * args.heads;
  for (int64_t i; (i = team.take()) < num_heads;) {
    float* const row = args.qkv + i / args.heads * args.qkv_stride;
    float* const own = row + i % args.heads * 3 * args.head_dim;
    for (int64_t j = 0; j < 3 * args.head_dim; j += kLanes)
      store(own + j, silu(load(own + j)));
  }
  team.barrier();
  const int64_t size = args.head_dim * kStateLanes;
  const int64_t in_head = args.head_dim / kStateLanes;
  const int64_t together = args.heads >= 4 * team.size ? in_head : 1;
  for (int64_t b; (b = team.take(together)) < args.heads * in_head;) {
    const StateBlock block = {args.states + b * size, args.state_stride, together * size};
    advance_all(step, block, [&](float* state, int64_t t, int64_t num) {
      for (int64_t i = 0; i < together; i++) {
        const int64_t value = (b + i) % in_head * kStateLanes;
        advance_lightning(args, b / in_head, value, state + i * size, t, num);
      }
    });
  }
  team.barrier();
  for (int64_t t; (t = team.take()) < step.num_tokens;)
    norm_and_gate(args, t);
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
