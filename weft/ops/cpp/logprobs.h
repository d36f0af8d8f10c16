// Log probabilities: of the chosen token, and the likeliest tokens with theirs.
#pragma once

#include <cstdlib>

#include "select.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kSmallestBlock = 16;
constexpr int64_t kBlocksEach = 4;  // blocks for each requested token, if the row is long enough

// So long are the blocks of a row whose largest logits are found: a kBlock, or less where a row has
// few of these. The tokens above the num_top largest of the maxima are few only if there are some
// times as many blocks.
static int64_t block_len_for(int64_t vocab_size, int64_t num_top) {
  int64_t length = kBlock;
  while (length > kSmallestBlock && vocab_size < length * num_top * kBlocksEach)
    length /= 2;
  return length;
}

// The log-sum-exp of a row and the maxima of its blocks, both of logits below the peak.
static double survey(const float* logits, float peak, int64_t begin, int64_t end, int64_t block_len,
                     float* maxima) {
  Sum sum;
  for (int64_t block = begin; block < end; block += block_len) {
    const int64_t block_end = least(block + block_len, end);
    F32 most = all(-kInfinity);
    for (int64_t t = block; t < block_end; t += kLanes) {
      const F32 x = sub(logits_at(logits, t, block_end), all(peak));
      most = larger(most, x);
      add_to(sum, exponential(x));
    }
    *maxima++ = largest(most);
  }
  return total(sum);
}

// Sorts by falling logit, then by token: the bits of a float rise with it once those of negative
// ones are turned over (and -0 is 0).
WEFT_INLINE uint64_t rank_of(float logit, int64_t token) {
  const uint32_t bits = bits_of(logit + 0.0f);
  const uint32_t rising = bits & kSign ? ~bits : bits | kSign;
  return uint64_t(~rising) << 32 | uint64_t(token);
}

static int compare_ranks(const void* a, const void* b) {
  const uint64_t x = *static_cast<const uint64_t*>(a);
  const uint64_t y = *static_cast<const uint64_t*>(b);
  return x < y ? -1 : x > y;
}

// RanksArgs of the tokens that are at least `floor` below the peak.
static int64_t ranks_above(const float* logits, int64_t vocab_size, float peak, float floor,
                           uint64_t* ranks) {
  int64_t num = 0;
  for (int64_t t = 0; t < vocab_size; t += kLanes) {
    Lanes above = at_least(sub(logits_at(logits, t, vocab_size), all(peak)), all(floor));
    if (t + kLanes > vocab_size)
      above &= kAllLanes >> (kLanes - (vocab_size - t));
    for (; above; above &= above - 1) {
      const int64_t token = t + __builtin_ctz(above);
      ranks[num++] = rank_of(logits[token], token);
    }
  }
  return num;
}

// Bring the `num_first` least of `ranks` [num], which differ, to the front, in any order (Hoare's
// selection).
static void bring_first(uint64_t* ranks, int64_t num, int64_t num_first) {
  for (int64_t low = 0, high = num - 1; low < high;) {
    const uint64_t pivot = ranks[(low + high) / 2];
    int64_t i = low;
    int64_t j = high;
    while (i <= j) {
      while (ranks[i] < pivot)
        i++;
      while (ranks[j] > pivot)
        j--;
      if (i > j)
        break;
      const uint64_t rank = ranks[i];
      ranks[i++] = ranks[j];
      ranks[j--] = rank;
    }
    if (num_first <= j)
      high = j;
    else if (num_first > i)
      low = i;
    else
      return;
  }
}

static void logprobs(const LogprobsArgs& args, const StepArgs& step, Team& team) {
  const int64_t num_rows = step.num_tokens;
  const int64_t vocab_size = args.vocab_size;
  const int64_t block_len = block_len_for(vocab_size, args.num_top);
  const int64_t blocks_of_piece = kPiece / block_len;
  const int64_t num_pieces = ceil_div(vocab_size, kPiece);
  const int64_t num_blocks = num_pieces * blocks_of_piece;
  char* memory = memory_for_all(team, num_rows * (num_pieces * 8 + num_blocks * 4));
  if (!memory)
    return;
  double* sums = reinterpret_cast<double*>(memory);                        // [L, pieces]
  float* maxima = reinterpret_cast<float*>(sums + num_rows * num_pieces);  // [L, blocks]
  for (int64_t i; (i = team.take()) < num_rows * num_pieces;) {
    const int64_t row = args.rows[i / num_pieces];
    const int64_t begin = i % num_pieces * kPiece;
    const int64_t end = least(begin + kPiece, vocab_size);
    float* const of_piece = maxima + i * blocks_of_piece;
    sums[i] = survey(args.logits + row * args.stride, args.max_logits[row], begin, end, block_len,
                     of_piece);
  }
  team.barrier();
  uint64_t* ranks = nullptr;
  Histogram* scratch = nullptr;
  for (int64_t i; (i = team.take()) < num_rows;) {
    const int64_t row = args.rows[i];
    const int64_t num_top = args.num_top;
    const float* logits = args.logits + row * args.stride;
    const float peak = args.max_logits[row];
    double sum = 0;
    for (int64_t piece = 0; piece < num_pieces; piece++)
      sum += sums[i * num_pieces + piece];
    const double norm = double(peak) + __builtin_log(sum);
    args.logprobs[i] = float(double(logits[args.tokens[row]]) - norm);
    if (!num_top)
      continue;
    if (!ranks) {
      scratch = static_cast<Histogram*>(own_memory(int64_t(sizeof(Histogram)) + vocab_size * 8));
      if (!scratch)
        return;
      ranks = reinterpret_cast<uint64_t*>(scratch + 1);
    }
    // A row that is not finite has no order; its first tokens stand for any.
    const bool finite = __builtin_fabsf(peak) < kInfinity;
    const float floor =
        reached_by(maxima + i * num_blocks, ceil_div(vocab_size, block_len), num_top, *scratch);
    int64_t num = finite ? ranks_above(logits, vocab_size, peak, floor, ranks) : 0;
    for (; num < num_top; num++)
      ranks[num] = uint64_t(num);
    bring_first(ranks, num, num_top);
    qsort(ranks, size_t(num_top), sizeof *ranks, compare_ranks);
    for (int64_t k = 0; k < num_top; k++) {
      const int64_t token = int64_t(uint32_t(ranks[k]));
      args.top_tokens[i * num_top + k] = int32_t(token);
      args.top_logprobs[i * num_top + k] = float(double(logits[token]) - norm);
    }
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
