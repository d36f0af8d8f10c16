// What stands around the operations of a whole step: from the numbers of a plan to the step that
// `body` runs on, from there to what `head` reads, and from what was chosen to the result.
// (inputs.py and sampler.py say the same in torch.)
#pragma once

#include <cstring>

#include "program.h"

namespace weft {

// The numbers of states, which follow those of all tokens: reads.
static const int32_t* state_numbers(const FusedStep& fused) {
  const int64_t of_token = fused.window_table ? 3 : 2;
  return fused.numbers + 4 * fused.num_requests + of_token * fused.num_tokens;
}

static bool has_sound_states(const FusedStep& fused) {
  if (!fused.num_state_slots)
    return true;
  const int64_t num = fused.num_requests;
  const int64_t num_slots = fused.num_state_slots;
  const int32_t* reads = state_numbers(fused);
  const int32_t* writes = reads + num;
  const int32_t* lens = fused.numbers + 2 * num;
  for (int64_t r = 0; r < num; r++) {
    if (reads[r] < -1 || reads[r] >= num_slots || writes[r] < 0 || writes[r] >= num_slots)
      return false;
  }
  const int32_t* kept_rows = writes + num;
  const int32_t* kept_lens = kept_rows + fused.num_kept;
  const int32_t* const kept_slots = kept_lens + fused.num_kept;
  for (int64_t i = 0; i < fused.num_kept; i++) {
    if (kept_rows[i] < 0 || kept_rows[i] >= num || kept_slots[i] < 0 || kept_slots[i] >= num_slots)
      return false;
    if (kept_lens[i] < 1 || kept_lens[i] > lens[kept_rows[i]])
      return false;
  }
  return true;
}

static bool has_sound_rotation(const FusedStep& fused) {
  if (!fused.rotation)
    return true;
  for (int64_t i = 0; i < 3 * fused.num_tokens; i++) {
    if (fused.rotation[i] < 0 || fused.rotation[i] >= fused.table_stride)
      return false;
  }
  return true;
}

// Whether the plan holds together and stays inside the table.
static bool is_sound(const FusedStep& fused) {
  const int64_t num = fused.num_requests;
  const int32_t* rows = fused.numbers;
  const int32_t* starts = rows + num;
  const int32_t* lens = starts + num;
  const int32_t* samples = lens + num;
  int64_t num_tokens = 0;
  int64_t num_sampling = 0;
  for (int64_t r = 0; r < num; r++) {
    if (rows[r] < 0 || rows[r] >= fused.num_rows || starts[r] < 0 || lens[r] < 1)
      return false;
    if (int64_t(starts[r]) + lens[r] > fused.table_stride)
      return false;
    if (samples[r] < 0 || samples[r] > lens[r])
      return false;
    num_tokens += lens[r];
    num_sampling += samples[r];
  }
  if (num_tokens != fused.num_tokens || num_sampling != fused.num_sampling)
    return false;
  return has_sound_states(fused) && has_sound_rotation(fused);
}

// Write the plan's slots into the table; its columns, widened, are what the step points to.
static StepArgs lay_out(const FusedStep& fused) {
  const int64_t num = fused.num_requests;
  const int64_t num_tokens = fused.num_tokens;
  const int32_t* rows = fused.numbers;
  const int32_t* starts = rows + num;
  const int32_t* lens = starts + num;
  const int32_t* planned = lens + 2 * num;
  const int32_t* new_slots = planned + num_tokens;
  int64_t* tokens = fused.columns;
  int64_t* positions = tokens + num_tokens;
  int64_t* slots = positions + num_tokens;
  const int32_t* const new_window_slots = new_slots + num_tokens;
  int64_t* const window_slots = slots + num_tokens;
  int64_t t = 0;
  for (int64_t r = 0; r < num; r++) {
    int32_t* const of_row = fused.table + rows[r] * fused.table_stride;
    for (int64_t i = 0; i < lens[r]; i++, t++) {
      tokens[t] = planned[t] < 0 ? fused.last_tokens[rows[r]] : planned[t];
      positions[t] = starts[r] + i;
      slots[t] = of_row[positions[t]] = new_slots[t];
      if (!fused.window_table)
        continue;
      window_slots[t] = new_window_slots[t];
      fused.window_table[rows[r] * fused.table_stride + positions[t]] = new_window_slots[t];
    }
  }
  StepArgs step = {num_tokens,
                   num,
                   tokens,
                   positions,
                   slots,
                   rows,
                   starts,
                   lens,
                   fused.table,
                   fused.table_stride,
                   nullptr,
                   window_slots,
                   fused.window_table};
  if (fused.num_state_slots) {
    step.state_reads = state_numbers(fused);
    step.state_writes = step.state_reads + num;
    step.num_kept = fused.num_kept;
    step.kept_rows = step.state_writes + num;
    step.kept_lens = step.kept_rows + fused.num_kept;
    step.kept_slots = step.kept_lens + fused.num_kept;
  }
  step.adapters = fused.adapters;
  step.num_lora_blocks = fused.num_lora_blocks;
  step.lora_blocks = fused.lora_blocks;
  step.lora_rows = fused.lora_rows;
  step.rotation = fused.rotation;
  return step;
}

// The step of the tokens after which one is sampled, the last ones of each request.
static StepArgs narrowed_step(const FusedStep& fused, const StepArgs& all) {
  const int64_t num = fused.num_sampling;
  const int64_t num_all = all.num_tokens;
  const int32_t* const samples = all.lens + fused.num_requests;
  int64_t* tokens = fused.columns + 4 * num_all;
  int64_t* positions = tokens + num;
  int64_t* token_indices = positions + num;
  int32_t* rows = reinterpret_cast<int32_t*>(token_indices + num);
  int32_t* starts = rows + num;
  int32_t* lens = starts + num;
  int64_t n = 0;
  int64_t end = 0;
  int64_t num_requests = 0;
  for (int64_t r = 0; r < fused.num_requests; r++) {
    end += all.lens[r];
    if (!samples[r])
      continue;
    rows[num_requests] = all.rows[r];
    starts[num_requests] = all.starts[r] + all.lens[r] - samples[r];
    lens[num_requests++] = samples[r];
    for (int64_t index = end - samples[r]; index < end; index++, n++) {
      tokens[n] = all.tokens[index];
      positions[n] = all.positions[index];
      token_indices[n] = index;
    }
  }
  StepArgs step = {num,  num_requests, tokens, positions, nullptr,
                   rows, starts,       lens,   all.table, all.table_stride};
  step.window_table = all.window_table;
  step.adapters = fused.head_adapters;
  step.num_lora_blocks = fused.head_num_lora_blocks;
  step.lora_blocks = fused.head_lora_blocks;
  step.lora_rows = fused.head_lora_rows;
  step.token_indices = token_indices;
  if (!all.rotation)
    return step;
  int32_t* const rotation = lens + num;
  for (int64_t axis = 0; axis < 3; axis++)
    for (int64_t i = 0; i < num; i++)
      rotation[axis * num + i] = all.rotation[axis * num_all + token_indices[i]];
  step.rotation = rotation;
  return step;
}

// Put what is left of the tokens after which one is sampled, the last ones of each request, side by
// side.
static void gather_last(const FusedStep& fused) {
  const int32_t* lens = fused.numbers + 2 * fused.num_requests;
  const int32_t* samples = lens + fused.num_requests;
  int64_t num = 0;
  int64_t end = 0;
  for (int64_t r = 0; r < fused.num_requests; r++) {
    end += lens[r];
    const float* const first = fused.hidden + (end - samples[r]) * fused.hidden_size;
    memcpy(fused.last + num * fused.hidden_size, first, size_t(samples[r] * fused.hidden_size) * 4);
    num += samples[r];
  }
}

// The result, which the next step may begin with.
static void keep_tokens(FusedStep& fused) {
  const int32_t* rows = fused.numbers;
  const int32_t* samples = rows + 3 * fused.num_requests;
  int64_t num = 0;
  for (int64_t r = 0; r < fused.num_requests; r++)
    for (int64_t i = 0; i < samples[r]; i++, num++) {
      // Infinities and NaN.
      const bool invalid = fused.max_logits[num] - fused.max_logits[num] != 0;
      fused.num_invalid += invalid;
      fused.invalid[num] = invalid;
      fused.tokens[num] = invalid ? 0 : int32_t(fused.chosen[num]);
      fused.last_tokens[rows[r]] = fused.tokens[num];
    }
}

// The request's share of the arrays of `Guesses`: `begin` of its drawn tokens, `slot` of their
// slots.
template <class Take>
static void for_each_request(const FusedStep& fused, const Guesses& guesses, Take take) {
  int64_t begin = 0;
  int64_t slot = 0;
  for (int64_t r = 0; r < fused.num_requests; r++) {
    take(r, begin, slot);
    begin += guesses.counts[r];
    slot += guesses.counts[r] ? guesses.counts[r] - 1 : 0;
  }
}

// Let the head of step `i` of the chain draw as the i-th token of each request wants it.
static void choose_draws(const FusedStep& first, const Guesses& guesses, int64_t i) {
  if (!guesses.all)
    return;
  const DrawColumns& all = *guesses.all;
  const DrawColumns& here = *guesses.step;
  int64_t num = 0;
  for_each_request(first, guesses, [&](int64_t r, int64_t begin, int64_t) {
    if (guesses.counts[r] <= i)
      return;
    here.temperature[num] = all.temperature[begin + i];
    here.top_k[num] = all.top_k[begin + i];
    here.top_p[num] = all.top_p[begin + i];
    here.min_p[num] = all.min_p[begin + i];
    here.seeds[num] = all.seeds[begin + i];
    here.positions[num] = all.positions[begin + i];
    num++;
  });
}

// StepArgs `i` of the chain, after the first one: one token of each request that draws more than i.
static FusedStep later_step(const FusedStep& first, const Guesses& guesses, int64_t i) {
  const int32_t* rows = first.numbers;
  const int32_t* starts = rows + first.num_requests;
  const int32_t* lens = starts + first.num_requests;
  int64_t num = 0;
  int64_t n = 0;
  for (int64_t r = 0; r < first.num_requests; r++)
    num += guesses.counts[r] > i;
  int32_t* const to = guesses.numbers;
  for_each_request(first, guesses, [&](int64_t r, int64_t, int64_t slot) {
    if (guesses.counts[r] <= i)
      return;
    to[n] = rows[r];
    to[num + n] = starts[r] + lens[r] + int32_t(i) - 1;
    to[2 * num + n] = to[3 * num + n] = 1;
    to[4 * num + n] = -1;  // the token that was drawn last
    to[5 * num + n] = guesses.slots[slot + i - 1];
    n++;
  });
  FusedStep step = first;
  if (guesses.later) {
    step.body = guesses.later;
    step.num_body = guesses.num_later;
    step.hidden = guesses.later_hidden;
  }
  step.numbers = to;
  step.num_tokens = step.num_requests = step.num_sampling = num;
  return step;
}

static void keep_guesses(const FusedStep& first, const Guesses& guesses, int64_t i) {
  int64_t num = 0;
  for_each_request(first, guesses, [&](int64_t r, int64_t begin, int64_t) {
    if (guesses.counts[r] > i)
      guesses.tokens[begin + i] = first.tokens[num++];
  });
}

// Leave what the head has read of each request's last token for the next step of the chain.
static void carry(const FusedStep& step, const Guesses& guesses) {
  if (!guesses.carried)
    return;
  const int32_t* const rows = step.numbers;
  const int32_t* const samples = rows + 3 * step.num_requests;
  int64_t num = 0;
  for (int64_t r = 0; r < step.num_requests; r++) {
    if (!samples[r])
      continue;
    memcpy(guesses.carried + rows[r] * step.hidden_size, step.last + num++ * step.hidden_size,
           size_t(step.hidden_size) * sizeof(float));
  }
}

static int64_t num_steps(const FusedStep& first, const Guesses& guesses) {
  int64_t most = 1;
  for (int64_t r = 0; r < first.num_requests; r++)
    most = guesses.counts[r] > most ? guesses.counts[r] : most;
  return most;
}

}  // namespace weft
