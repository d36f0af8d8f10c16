// Penalties on tokens that a request has seen before.
//
// A table of counts by token is as long as the vocabulary, but only the entries of tokens in the
// history are ever touched: they are set to 0, counted, and marked as done once their logit has
// been lowered.
#pragma once

namespace weft {
namespace WEFT_NAMESPACE {

// Products of two floats are exact in double: it does not matter whether they are fused with the
// subtraction.
WEFT_INLINE float lowered(float logit, double repetition, double frequency, double presence,
                          int32_t count) {
  double x = double(logit);
  x = x > 0 ? x / repetition : x * repetition;
  return float(count > 0 ? x - double(count) * frequency - presence : x);
}

// Every token of a piece of history, then the one after it, unless that is below 0.
template <class Visit>
WEFT_INLINE void each_token(const int32_t* begin, const int32_t* end, int32_t after, Visit visit) {
  for (const int32_t* token = begin; token < end; token++)
    visit(*token);
  if (after >= 0)
    visit(after);
}

static void penalise(const PenaliseArgs& args, const StepArgs& step, Team& team) {
  constexpr int32_t kDone = -1;
  int32_t* counts = nullptr;  // [vocabulary] how often a token stands in the output
  for (int64_t i; (i = team.take()) < step.num_tokens;) {
    if (!counts)
      counts = static_cast<int32_t*>(own_memory(args.vocab_size * 4));
    if (!counts)
      return;
    const int64_t row = args.rows[i];
    float* logits = args.logits + row * args.stride;
    const double repetition = args.repetition[i];
    const double frequency = args.frequency[i];
    const double presence = args.presence[i];
    const int32_t* output = args.history + args.output_starts[i];
    const int32_t* end = args.history + args.offsets[i + 1];
    // 1: the prompt does not matter.
    const int32_t* begin = repetition == 1 ? output : args.history + args.offsets[i];
    const int32_t last = args.lacks_last[i] ? int32_t(args.last_tokens[row]) : -1;

    each_token(begin, end, last, [&](int32_t token) { counts[token] = 0; });
    each_token(output, end, last, [&](int32_t token) { counts[token]++; });
    each_token(begin, end, last, [&](int32_t token) {
      if (counts[token] == kDone)
        return;
      logits[token] = lowered(logits[token], repetition, frequency, presence, counts[token]);
      counts[token] = kDone;
    });
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
