// Experts: which of them each token gets, and the products of all tokens with theirs.
//
// The rows of all experts are concatenated, sorted by expert; a sorted row is one in this order:
//
//   token, rank   0,0 0,1 1,0 1,1 2,0 2,1        k = 2
//   expert         3   0   3   1   0   3
//   sorted row     3   0   4   2   1   5    offsets: expert 0 at 0, 1 at 2, 2 at 3 (none), 3 at 3
//
// The first product is cut as a linear's: an expert's panels times blocks of its rows, and all
// experts' items are in one queue, so that few tokens keep all threads on the memory bus. The
// second is cut by outputs: an item is a unit of panels of every expert that was chosen, so the
// thread that has their sums also adds them up, token by token, the best expert first. No other
// thread writes there, and no sum depends on how many rows an expert has: what a token gets does
// not depend on its neighbours.
#pragma once

#include "linear.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kExpertsAhead = 4;  // rows of sums that are prefetched before they are added up

// ---------------------------------------------------------------- routing

// 1 / (1 + e^-x)
WEFT_INLINE F32 sigmoid(F32 x) {
  return div(all(1.0f), add(all(1.0f), exponential(sub(zero(), x))));
}

// The softmax of `num` numbers; memory is a multiple of kLanes.
static void softmax(float* x, int64_t num) {
  F32 peak = all(-__builtin_inff());
  for (int64_t i = 0; i < num; i += kLanes) {
    peak = larger(peak, first_or(load(x + i, int(least(num - i, kLanes))),
                                 int(least(num - i, kLanes)), -__builtin_inff()));
  }
  const F32 most_of_all = all(largest(peak));
  F32 total = zero();
  for (int64_t i = 0; i < num; i += kLanes) {
    const int n = int(least(num - i, kLanes));
    const F32 power = exponential(sub(load(x + i, n), most_of_all));
    store(x + i, power, n);
    total = add(total, load(x + i, n));
  }
  const F32 inverse = all(1 / sum(total));
  for (int64_t i = 0; i < num; i += kLanes) {
    const int n = int(least(num - i, kLanes));
    store(x + i, mul(load(x + i, n), inverse), n);
  }
}

// The first of the largest numbers that are not taken, which it then is; where none is comparable,
// the first.
static int64_t take_best(const float* x, int64_t num, uint8_t* taken) {
  int64_t best = -1;
  int64_t any = -1;
  for (int64_t i = 0; i < num; i++) {
    if (taken[i])
      continue;
    if (any < 0)
      any = i;
    if (x[i] > (best < 0 ? -__builtin_inff() : x[best]))
      best = i;
  }
  const int64_t found = best < 0 ? any : best;
  taken[found] = 1;
  return found;
}

// What is known of one token's experts.
struct RouteSpace {
  alignas(64) float scores[kMaxExperts];
  alignas(64) float ranks[kMaxExperts];
  float sums[kMaxExperts];  // of groups
  uint8_t taken[kMaxExperts];
  uint8_t taken_groups[kMaxExperts];
};

// Mark the experts of all but the best groups as taken.
static void take_other_groups(const RouteArgs& args, RouteSpace& space) {
  const int64_t size = args.num_experts / args.num_groups;
  for (int64_t g = 0; g < args.num_groups; g++) {
    float first = -__builtin_inff();
    float second = first;
    for (int64_t i = g * size; i < (g + 1) * size; i++) {
      const float rank = space.ranks[i];
      second = rank > first ? first : rank > second ? rank : second;
      first = rank > first ? rank : first;
    }
    space.sums[g] = args.counts_one ? first : first + second;
  }
  memset(space.taken_groups, 0, args.num_groups);
  memset(space.taken, 1, args.num_experts);
  for (int64_t i = 0; i < args.num_groups_chosen; i++) {
    memset(space.taken + take_best(space.sums, args.num_groups, space.taken_groups) * size, 0,
           size);
  }
}

static void score(const RouteArgs& args, const float* logits, RouteSpace& space) {
  const int64_t num = args.num_experts;
  memcpy(space.scores, logits, num * 4);
  if (args.scores == kScoresSoftmax)
    softmax(space.scores, num);
  for (int64_t i = 0; i < num; i += kLanes) {
    const int n = int(least(num - i, kLanes));
    F32 value = load(space.scores + i, n);
    if (args.scores == kScoresSigmoid)
      store(space.scores + i, value = sigmoid(value), n);
    store(space.ranks + i, args.choice_bias ? add(value, load(args.choice_bias + i, n)) : value, n);
  }
}

// The experts of token t, the best first, and their weights.
static void choose(const RouteArgs& args, int64_t t, RouteSpace& space) {
  const int64_t k = args.num_chosen;
  score(args, args.logits + t * args.logits_stride, space);
  memset(space.taken, 0, args.num_experts);
  if (args.num_groups > 1)
    take_other_groups(args, space);
  int32_t* const experts = args.experts + t * k;
  float* const weights = args.weights + t * k;
  for (int64_t j = 0; j < k; j++) {
    experts[j] = int32_t(take_best(space.ranks, args.num_experts, space.taken));
    weights[j] = space.scores[experts[j]];
  }
  if (args.scores == kScoresChosen)
    softmax(weights, k);
  float factor = args.scale;
  if (args.is_normed) {
    float total = 0;
    for (int64_t j = 0; j < k; j++)
      total += weights[j];
    factor /= total + 1e-20f;
  }
  for (int64_t j = 0; j < k; j++)
    weights[j] *= args.expert_scale ? factor * args.expert_scale[experts[j]] : factor;
}

// Rows in the order of experts, and of tokens within an expert.
static void sort_by_expert(const RouteArgs& args, int64_t num_tokens) {
  const int64_t num = num_tokens * args.num_chosen;
  int32_t* const offsets = args.offsets;
  memset(offsets, 0, (args.num_experts + 1) * 4);
  for (int64_t i = 0; i < num; i++)
    offsets[args.experts[i] + 1]++;
  for (int64_t e = 0; e < args.num_experts; e++)
    offsets[e + 1] += offsets[e];
  // `offsets[e]` runs through the rows of expert e, and ends where those of e + 1 begin.
  for (int64_t i = 0; i < num; i++) {
    const int32_t sorted_row = offsets[args.experts[i]]++;
    args.sorted_rows[i] = sorted_row;
    args.tokens[sorted_row] = int32_t(i / args.num_chosen);
  }
  memmove(offsets + 1, offsets, args.num_experts * 4);
  offsets[0] = 0;
}

static void route(const RouteArgs& args, const StepArgs& step, Team& team) {
  if (step.num_tokens == 0)
    return;
  RouteSpace space;
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    choose(args, t, space);
    if (step.num_tokens == 1)
      sort_by_expert(args, 1);
  }
  if (step.num_tokens == 1)
    return;
  team.barrier();
  if (team.index == 0)
    sort_by_expert(args, step.num_tokens);
}

// ---------------------------------------------------------------- adapters

WEFT_INLINE bool has_adapters(const ExpertsArgs& args, const StepArgs& step) {
  return args.lora_inner && step.adapters;
}

// Parts of the adapter of a row's token: those of its expert, `num_parts` of each; null if it has
// none.
WEFT_INLINE const PackedLoraPart* lora_of(const ExpertsArgs& args, const StepArgs& step,
                                          const PackedLoraPart* all, int64_t num_parts,
                                          int64_t expert, int64_t sorted_row) {
  const int64_t adapter = step.adapters[args.tokens[sorted_row]];
  return adapter < 0 ? nullptr : all + (adapter * args.num_experts + expert) * num_parts;
}

WEFT_INLINE float* lora_inner_of(const ExpertsArgs& args, int64_t sorted_row, int64_t part) {
  return args.lora_inner + (sorted_row * 2 + part) * args.lora_rank;
}

template <class E>
static void shrink_row(const PackedLoraPart& of, const float* x, int64_t in, float* inner) {
  for (int64_t rank = 0; rank < of.rank; rank += kLoraTile) {
    float* const out = inner + rank;
    shrink_tile<E, 1>(x, 0, in, static_cast<const E*>(of.a) + rank * in, of.scale, &out);
  }
}

// scale A x of each row, as lora.h says; there after the next barrier. `x` has a row for each
// token, or each sorted row.
static void shrink_rows(const ExpertsArgs& args, const StepArgs& step, Team& team,
                        const PackedWeight& w, const PackedLoraPart* all, int64_t num_parts,
                        bool by_token, const float* x, int64_t stride) {
  float* const row = static_cast<float*>(own_memory(w.padded_in * 4));
  if (!row)
    return;
  const int64_t k = args.num_chosen;
  for (int64_t i; (i = team.take()) < step.num_tokens * k;) {
    const int64_t sorted_row = args.sorted_rows[i];
    const PackedLoraPart* const parts =
        lora_of(args, step, all, num_parts, args.experts[i], sorted_row);
    bool is_there = false;
    for (int64_t part = 0; parts && part < num_parts; part++) {
      if (!parts[part].rank)
        continue;
      if (!is_there) {
        memset(row, 0, w.padded_in * 4);
        memcpy(row, x + (by_token ? args.tokens[sorted_row] : sorted_row) * stride, w.in_size * 4);
        is_there = true;
      }
      float* const inner = lora_inner_of(args, sorted_row, part);
      if (args.lora_is_bf16) {
        shrink_row<bf16>(parts[part], row, w.padded_in, inner);
      } else {
        shrink_row<float>(parts[part], row, w.padded_in, inner);
      }
    }
  }
}

// Add B inner to the sums [num_rows][num_panels * kPanel] of an expert's rows, the first of which
// is at `sorted_row`. Panel i of an item belongs to part i % num_parts, as its panel (panel + i) /
// num_parts.
static void expand_rows(const ExpertsArgs& args, const StepArgs& step, const PackedLoraPart* all,
                        int64_t num_parts, int64_t expert, const LinearItem& item,
                        int64_t sorted_row, float* sums) {
  for (int64_t r = 0; r < item.num_rows; r++, sums += item.num_panels * kPanel) {
    const PackedLoraPart* const parts = lora_of(args, step, all, num_parts, expert, sorted_row + r);
    for (int64_t i = 0; parts && i < item.num_panels; i++) {
      const int64_t part = i % num_parts;
      const PackedLoraPart& of = parts[part];
      if (!of.rank)
        continue;
      const int64_t start = (item.panel + i) / num_parts * of.rank * kPanel;
      const float* const inner = lora_inner_of(args, sorted_row + r, part);
      if (args.lora_is_bf16) {
        expand_rows(1, inner, kSlab, of.rank, static_cast<const bf16*>(of.b) + start,
                  sums + i * kPanel, kPanel);
      } else {
        expand_rows(1, inner, kSlab, of.rank, static_cast<const float*>(of.b) + start,
                  sums + i * kPanel, kPanel);
      }
    }
  }
}

// ---------------------------------------------------------------- the first product

// Panels of one expert; those of the next one follow.
WEFT_INLINE int64_t gated_panels(const PackedWeight& w) {
  return 2 * ceil_div(w.out_size / 2, kPanel);
}
WEFT_INLINE int64_t plain_panels(const PackedWeight& w) { return ceil_div(w.out_size, kPanel); }

// Whether an expert has gates beside its ups, or only ups.
WEFT_INLINE bool has_gates(const ExpertsArgs& args) {
  return args.activation == kGatedSilu || args.activation == kGatedGelu ||
         args.activation == kGatedGeluTanh || args.activation == kGatedClamped;
}
WEFT_INLINE int64_t first_panels(const ExpertsArgs& args) {
  return has_gates(args) ? gated_panels(*args.gate_up) : plain_panels(*args.gate_up);
}
// Numbers that the first product makes of a token for one expert.
WEFT_INLINE int64_t inner_size(const ExpertsArgs& args) {
  return has_gates(args) ? args.gate_up->out_size / 2 : args.gate_up->out_size;
}

// Rows made ready, one for each sorted row; a single token has one for all.
struct ExpertRows {
  Activations x;
  bool is_shared;
};

// Runs through the items of all experts that were chosen; indices must not fall.
struct ExpertCursor {
  const ExpertsArgs& args;
  LinearArgs linear;  // of the present expert, from its first row on
  int num_threads;
  int64_t expert;
  int64_t first;  // its first item
  int64_t end;
  LinearCut cut;

  ExpertCursor(const ExpertsArgs& args, const LinearArgs& like, int num_threads)
      : args(args), linear(like), num_threads(num_threads), expert(-1), first(0), end(0) {}

  // Go to the expert of an item; false after the last one.
  bool seek(int64_t index) {
    while (index >= end) {
      if (++expert >= args.num_experts)
        return false;
      const int64_t num_rows = args.offsets[expert + 1] - args.offsets[expert];
      first = end;
      if (num_rows == 0)
        continue;
      cut = cut_work(linear, num_rows, num_threads);
      end = first + cut.num_units * cut.num_blocks;
    }
    return true;
  }

  LinearItem item(int64_t index) const { return LinearCut::item(cut, index - first); }
};

WEFT_INLINE F32 gated_value(int64_t epilogue, F32 gate, F32 up) {
  if (epilogue != kGatedClamped)
    return mul(gate_activated(epilogue, gate), up);
  // What is not a number stays so: `larger` and `smaller` then return their second argument.
  const F32 low_gate = smaller(all(kClamp), gate);
  const F32 low_up = larger(all(-kClamp), smaller(all(kClamp), up));
  return mul(mul(add(low_up, all(1.0f)), low_gate), sigmoid(mul(all(kClampedAlpha), low_gate)));
}

// From the sums of gates and ups to `inner`. `sorted_row` is that of the item's first row.
static void write_gated(const ExpertsArgs& args, int64_t expert, const LinearItem& item,
                        int64_t sorted_row, const float* sums) {
  const int64_t size = args.gate_up->out_size / 2;
  const int64_t unit = item.panel * kPanel / 2;
  const int64_t valid = size - unit;
  const float* bias = nullptr;
  if (args.gate_up_bias)
    bias = args.gate_up_bias + (expert * gated_panels(*args.gate_up) + item.panel) * kPanel;
  for (int64_t r = 0; r < item.num_rows; r++, sums += 2 * kPanel) {
    float* y = args.inner + (sorted_row + r) * size + unit;
    for (int64_t i = 0; i < kPanel && i < valid; i += kLanes) {
      F32 gate = load(sums + i);
      F32 up = load(sums + kPanel + i);
      if (bias) {
        gate = add(gate, load(bias + i));
        up = add(up, load(bias + kPanel + i));
      }
      put(y + i, gated_value(args.activation, gate, up), valid - i);
    }
  }
}

// The same without gates: inner = activation(sums).
static void write_plain(const ExpertsArgs& args, int64_t expert, const LinearItem& item,
                        int64_t sorted_row, const float* sums) {
  const int64_t size = args.gate_up->out_size;
  const int64_t first = item.panel * kPanel;
  const int64_t columns = item.num_panels * kPanel;
  const int64_t valid = size - first;
  const float* bias = nullptr;
  if (args.gate_up_bias)
    bias = args.gate_up_bias + expert * plain_panels(*args.gate_up) * kPanel + first;
  for (int64_t r = 0; r < item.num_rows; r++, sums += columns) {
    float* y = args.inner + (sorted_row + r) * size + first;
    for (int64_t i = 0; i < columns && i < valid; i += kLanes) {
      F32 up = load(sums + i);
      if (bias)
        up = add(up, load(bias + i));
      put(y + i, activated(args.activation, up), valid - i);
    }
  }
}

// inner[sorted_row] = activation(gate x) * (up x) of the row's expert and token, or activation(up
// x).
static void first_product(const ExpertsArgs& args, const StepArgs& step, const ExpertRows& rows,
                          Team& team) {
  LinearArgs like = {};
  like.weight = args.gate_up;
  // With any gate, units are pairs of panels.
  like.epilogue = has_gates(args) ? kGatedSilu : kStore;
  const int64_t panels = first_panels(args);
  const int64_t longest = most(kLinearCodeRows, kLinearRows) + kTileRows;
  char* memory =
      static_cast<char*>(own_memory(kPieceBytes + kScaleBytes + longest * 2 * kPanel * 4));
  if (!memory)
    return;
  char* const sums = memory + kPieceBytes + kScaleBytes;
  const LinearSpace space{sums, memory, reinterpret_cast<float*>(memory + kPieceBytes)};
  ExpertCursor now(args, like, team.size);
  ExpertCursor later(args, like, team.size);
  for (int64_t index = team.take(), next; now.seek(index); index = next) {
    next = team.take();
    const LinearItem item = now.item(index);
    const int64_t panel = now.expert * panels + item.panel;
    const int64_t next_panel =
        later.seek(next) ? later.expert * panels + later.item(next).panel : panel;
    const int64_t sorted_row = args.offsets[now.expert] + item.row;
    const LinearItem global{panel, item.num_panels, rows.is_shared ? 0 : sorted_row, item.num_rows};
    multiply_item(*args.gate_up, rows.x, global, next_panel, space);
    if (has_adapters(args, step)) {
      expand_rows(args, step, args.lora_gate_up, has_gates(args) ? 2 : 1, now.expert, item,
                  sorted_row, reinterpret_cast<float*>(sums));
    }
    const auto write = has_gates(args) ? write_gated : write_plain;
    write(args, now.expert, item, sorted_row, reinterpret_cast<const float*>(sums));
  }
}

// ---------------------------------------------------------------- the second product, and the sum

// y[t] = scale * sum over ranks of weight * row, for some columns; sums [sorted_rows][columns].
static void add_up(const ExpertsArgs& args, const LinearItem& item, int64_t padded_out,
                   int64_t num_tokens, const float* sums) {
  const int64_t first = item.panel * kPanel;
  const int64_t columns = item.num_panels * kPanel;
  const int64_t k = args.num_chosen;
  const int64_t valid = args.down->out_size - first;
  const F32 scale = all(args.scale);
  for (int64_t t = 0; t < num_tokens; t++) {
    const int32_t* const sorted_rows = args.sorted_rows + t * k;
    const float* const weights = args.weights + t * k;
    float* y = args.y + t * args.y_stride + first;
    if (t + kExpertsAhead < num_tokens) {
      for (int64_t j = 0; j < k; j++)
        __builtin_prefetch(sums + sorted_rows[kExpertsAhead * k + j] * columns);
    }
    for (int64_t i = 0; i < columns && i < valid; i += kLanes) {
      F32 total = zero();
      for (int64_t j = 0; j < k; j++) {
        F32 value = load(sums + sorted_rows[j] * columns + i);
        if (args.down_bias)
          value =
              add(value, load(args.down_bias + args.experts[t * k + j] * padded_out + first + i));
        total = muladd(value, all(weights[j]), total);
      }
      put(y + i, args.adds ? muladd(total, scale, get(y + i, valid - i)) : mul(total, scale),
          valid - i);
    }
  }
}

// The first expert from `expert` on that was chosen.
WEFT_INLINE int64_t chosen_from(const ExpertsArgs& args, int64_t expert) {
  while (expert < args.num_experts && args.offsets[expert] == args.offsets[expert + 1])
    expert++;
  return expert;
}

static void second_product(const ExpertsArgs& args, const StepArgs& step, const Activations& x,
                           Team& team) {
  const int64_t num_tokens = step.num_tokens;
  const PackedWeight& w = *args.down;
  const int64_t panels = plain_panels(w);
  const int64_t num_sorted = num_tokens * args.num_chosen;
  // Few rows take two panels, as a linear's do: then sums are there before the next ones begin.
  const int64_t unit = num_tokens <= kFewRows && panels >= 8 * team.size ? 2 : 1;
  const int64_t longest = has_codes(w) ? kLinearCodeRows : kLinearRows;
  char* memory =
      static_cast<char*>(own_memory(kPieceBytes + kScaleBytes + num_sorted * unit * kPanel * 4));
  if (!memory)
    return;
  char* const sums = memory + kPieceBytes + kScaleBytes;
  LinearSpace space{sums, memory, reinterpret_cast<float*>(memory + kPieceBytes)};
  const int64_t num_units = ceil_div(panels, unit);
  const int64_t first = chosen_from(args, 0);
  for (int64_t index = team.take(), next; index < num_units; index = next) {
    next = team.take();
    const int64_t panel = index * unit;
    const int64_t num_panels = least(unit, panels - panel);
    for (int64_t expert = first, after; expert < args.num_experts; expert = after) {
      after = chosen_from(args, expert + 1);
      const int64_t begin = args.offsets[expert];
      const int64_t num_rows = args.offsets[expert + 1] - begin;
      const int64_t num_blocks = ceil_div(num_rows, longest);
      for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t row = num_rows * block / num_blocks;
        const int64_t end = num_rows * (block + 1) / num_blocks;
        int64_t wanted = expert * panels + panel;
        if (block + 1 == num_blocks) {
          wanted = after < args.num_experts ? after * panels + panel
                                            : first * panels + least(next, num_units - 1) * unit;
        }
        space.sums = sums + (begin + row) * num_panels * kPanel * 4;
        multiply_item(w, x, {expert * panels + panel, num_panels, begin + row, end - row}, wanted,
                      space);
        if (has_adapters(args, step)) {
          expand_rows(args, step, args.lora_down, 1, expert, {panel, num_panels, row, end - row},
                      begin + row, reinterpret_cast<float*>(space.sums));
        }
      }
    }
    add_up(args, {panel, num_panels, 0, num_tokens}, panels * kPanel, num_tokens,
           reinterpret_cast<const float*>(sums));
  }
}

// ---------------------------------------------------------------- the kernel

// Make row `from` of `source` ready as row `to`.
static void make_row_ready(const PackedWeight& w, const float* source, int64_t stride, int64_t from,
                           int64_t to, const Activations& x) {
  LinearArgs args = {};
  args.weight = &w;
  args.x = source + (from - to) * stride;
  args.x_stride = stride;
  make_ready(args, to, to + 1, x);
}

// Memory of a thread that outlives `own_memory` of what it calls: rows of few tokens, which each
// thread makes ready itself. kOwnActivations inputs of 4 bytes at most, with their scales.
constexpr int64_t kOwnBytes = kOwnActivations * 4 + kOwnActivations / kRowGroup * 2 * 12 + 64;

static void experts(const ExpertsArgs& args, const StepArgs& step, Team& team) {
  const int64_t num_tokens = step.num_tokens;
  const int64_t num_sorted = num_tokens * args.num_chosen;
  if (num_tokens == 0)
    return;
  alignas(64) char own[kOwnBytes];
  const PackedWeight& gate_up = *args.gate_up;
  const PackedWeight& down = *args.down;
  const int64_t size = inner_size(args);

  if (has_adapters(args, step)) {
    shrink_rows(args, step, team, gate_up, args.lora_gate_up, has_gates(args) ? 2 : 1, true,
                args.x, args.x_stride);
    team.barrier();
  }
  ExpertRows rows{{}, num_tokens == 1};
  if (rows.is_shared && gate_up.padded_in <= kOwnActivations) {
    rows.x = lay_out_activations(gate_up, 1, own);
    make_row_ready(gate_up, args.x, args.x_stride, args.tokens[0], 0, rows.x);
  } else if (rows.is_shared) {
    rows.x = lay_out_activations(gate_up, 1, args.scratch);
    if (team.take() == 0)
      make_row_ready(gate_up, args.x, args.x_stride, args.tokens[0], 0, rows.x);
    team.barrier();
  } else {
    rows.x = lay_out_activations(gate_up, num_sorted, args.scratch);
    for (int64_t p; (p = team.take()) < num_sorted;) {
      make_row_ready(gate_up, args.x, args.x_stride, args.tokens[p], p, rows.x);
    }
    team.barrier();
  }
  first_product(args, step, rows, team);
  team.barrier();
  if (has_adapters(args, step)) {
    shrink_rows(args, step, team, down, args.lora_down, 1, false, args.inner, size);
    team.barrier();
  }

  Activations inner;
  if (num_sorted * down.padded_in <= kOwnActivations) {
    inner = lay_out_activations(down, num_sorted, own);
    for (int64_t p = 0; p < num_sorted; p++)
      make_row_ready(down, args.inner, size, p, p, inner);
  } else {
    inner = lay_out_activations(down, num_sorted, args.scratch);
    for (int64_t p; (p = team.take()) < num_sorted;)
      make_row_ready(down, args.inner, size, p, p, inner);
    team.barrier();
  }
  second_product(args, step, inner, team);
}

// ---------------------------------------------------------------- the gate of shared experts

static void gate_rows(const GateRowsArgs& args, const StepArgs& step, Team& team) {
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    const float* x = args.x + t * args.x_stride;
    float* y = args.y + t * args.y_stride;
    F32 total = zero();
    for (int64_t i = 0; i < args.in_size; i += kLanes) {
      const int n = int(least(args.in_size - i, kLanes));
      total = muladd(load(x + i, n), load(args.weight + i, n), total);
    }
    const F32 factor = sigmoid(all(sum(total)));
    for (int64_t i = 0; i < args.columns; i += kLanes) {
      const int n = int(least(args.columns - i, kLanes));
      store(y + i, mul(load(y + i, n), factor), n);
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
