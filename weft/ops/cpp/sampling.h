// Rows of logits: the largest of each, what a grammar forbids. draw.h and logprobs.h go on from
// here.
//
// A row is cut into pieces of kPiece tokens, whatever the number of threads, so that one long row
// is work for all.
#pragma once

#include "lanes.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kPiece = 4096;
constexpr int64_t kBlock = 256;  // of a piece: what a row's survey tells the largest logit of
constexpr float kInfinity = __builtin_inff();

static char* handed = nullptr;  // shared memory, from thread 0 to the others

// The same shared memory for every thread, or null for all. All threads must call it.
static char* memory_for_all(Team& team, int64_t bytes) {
  if (team.index == 0)
    handed = static_cast<char*>(shared_memory(bytes));
  team.barrier();
  return handed;
}

// The logits at t and after, up to the end of the vocabulary; -inf in the lanes after.
WEFT_INLINE F32 logits_at(const float* logits, int64_t t, int64_t end) {
  if (t + kLanes <= end)
    return load(logits + t);
  return first_or(load(logits + t, int(end - t)), int(end - t), -kInfinity);
}

// The largest of some logits, NaN if one of them is.
static float peak_of(const float* logits, int64_t begin, int64_t end) {
  F32 most[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
  bool nan = false;
  int64_t t = begin;
  for (; t + 4 * kLanes <= end; t += 4 * kLanes) {
    F32 a = load(logits + t);
    F32 b = load(logits + t + kLanes);
    F32 c = load(logits + t + 2 * kLanes);
    F32 d = load(logits + t + 3 * kLanes);
    nan |= any_nan(a, b) | any_nan(c, d);
    most[0] = larger(most[0], a);
    most[1] = larger(most[1], b);
    most[2] = larger(most[2], c);
    most[3] = larger(most[3], d);
  }
  for (; t < end; t += kLanes) {
    F32 a = logits_at(logits, t, end);
    nan |= any_nan(a, a);
    most[0] = larger(most[0], a);
  }
  return nan ? __builtin_nanf("")
             : largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

static void argmax(const ArgmaxArgs& args, const StepArgs& step, Team& team) {
  const int64_t num_rows = step.num_tokens;
  const int64_t vocab_size = args.vocab_size;
  const int64_t num_pieces = ceil_div(vocab_size, kPiece);
  // [S, pieces].
  float* peaks = reinterpret_cast<float*>(memory_for_all(team, num_rows * num_pieces * 4));
  if (!peaks)
    return;
  for (int64_t i; (i = team.take()) < num_rows * num_pieces;) {
    const int64_t row = i / num_pieces;
    const int64_t begin = i % num_pieces * kPiece;
    peaks[i] = peak_of(args.logits + row * args.stride, begin, least(begin + kPiece, vocab_size));
  }
  team.barrier();
  for (int64_t row; (row = team.take()) < num_rows;) {
    const float* of_row = peaks + row * num_pieces;
    int64_t best = 0;  // the first piece with the largest peak; a NaN is larger than all
    for (int64_t i = 1; i < num_pieces && of_row[best] == of_row[best]; i++) {
      if (!(of_row[i] <= of_row[best]))
        best = i;
    }
    const float peak = of_row[best];
    const float* logits = args.logits + row * args.stride;
    int64_t token = best * kPiece;
    while (peak == peak ? logits[token] != peak : logits[token] == logits[token])
      token++;
    args.tokens[row] = token;
    args.max_logits[row] = peak;
  }
}

// Tokens after the words of the mask are forbidden, too: a head may have more outputs than the
// tokenizer has tokens.
static void mask(const MaskArgs& args, const StepArgs&, Team& team) {
  constexpr int64_t kWords = kPiece / 32;
  const int64_t num_words = ceil_div(args.vocab_size, 32);
  const int64_t num_pieces = ceil_div(num_words, kWords);
  for (int64_t i; (i = team.take()) < args.num_masks * num_pieces;) {
    const int64_t which = i / num_pieces;
    const int64_t first_word = i % num_pieces * kWords;
    const int32_t* words = args.masks + which * args.mask_stride;
    float* logits = args.logits + args.rows[which] * args.stride;
    for (int64_t w = first_word; w < least(first_word + kWords, num_words); w++) {
      const uint32_t allowed = w < args.mask_stride ? uint32_t(words[w]) : 0;
      if (allowed == ~0u)
        continue;
      const int64_t t = w * 32;
      if (t + 32 <= args.vocab_size) {
        for (int lane = 0; lane < 32; lane += kLanes)
          forbid(logits + t + lane, allowed >> lane & kAllLanes);
      } else {
        for (int64_t k = t; k < args.vocab_size; k++) {
          if (!(allowed >> (k - t) & 1))
            logits[k] = -kInfinity;
        }
      }
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
