// What ranks do together: sums of terms that each of them has computed, and parts of rows side by
// side.
#pragma once

#include "ranks.h"

namespace weft {
namespace WEFT_NAMESPACE {

constexpr int64_t kShownPiece = 2048;  // floats of a row that a thread takes at a time

// to = sum of the terms, or to += scale times that. The order of the sum is that of the ranks, on
// each of them.
static void put_sum(const float* const* terms, int64_t num_terms, int64_t first, int64_t num,
                    float scale, bool adds, float* to) {
  for (int64_t i = 0; i < num; i++) {
    float sum = terms[0][first + i];
    for (int64_t r = 1; r < num_terms; r++)
      sum += terms[r][first + i];
    to[i] = adds ? to[i] + scale * sum : sum;
  }
}

static void sum_by_call(const SumRanksArgs& args, const StepArgs& step, Team& team) {
  const int64_t num = step.num_tokens * args.columns;
  if (team.index == 0)
    call(*args.ranks, kCallSum, args.x, num, args.x);
  team.barrier();
  if (!args.add)
    return;
  const float* terms[1] = {args.x};
  for (int64_t t; (t = team.take()) < step.num_tokens;) {
    put_sum(terms, 1, t * args.columns, args.columns, args.scale, true,
            args.add + t * args.add_stride);
  }
}

static void sum_ranks(const SumRanksArgs& args, const StepArgs& step, Team& team) {
  const RanksArgs& ranks = *args.ranks;
  if (!ranks.shared)
    return sum_by_call(args, step, team);
  const int64_t columns = args.columns;
  const int64_t rows_at_once = ranks.chunk / columns;
  const int64_t pieces = (columns + kShownPiece - 1) / kShownPiece;
  for (int64_t first = 0; first < step.num_tokens; first += rows_at_once) {
    const int64_t rows = least(rows_at_once, step.num_tokens - first);
    float* const mine = shown_next(ranks);
    for (int64_t i; (i = team.take()) < rows * pieces;) {
      const int64_t begin = i / pieces * columns + i % pieces * kShownPiece;
      const int64_t num = least(kShownPiece, columns - i % pieces * kShownPiece);
      memcpy(mine + begin, args.x + first * columns + begin, num * sizeof(float));
    }
    team.barrier();
    if (team.index == 0)
      meet(ranks);
    team.barrier();
    const float* terms[kMaxRanks];
    for (int64_t r = 0; r < ranks.size; r++)
      terms[r] = shown_by(ranks, r);
    for (int64_t i; (i = team.take()) < rows * pieces;) {
      const int64_t row = i / pieces;
      const int64_t column = i % pieces * kShownPiece;
      float* const to =
          args.add ? args.add + (first + row) * args.add_stride : args.x + (first + row) * columns;
      const int64_t num = least(kShownPiece, columns - column);
      put_sum(terms, ranks.size, row * columns + column, num, args.scale, args.add != nullptr,
              to + column);
    }
    team.barrier();
  }
}

// Rank r has the columns from r * columns on.
static void put_part(const GatherRanksArgs& args, const float* part, int64_t rank, int64_t first,
                     int64_t rows) {
  const int64_t begin = rank * args.columns;
  const int64_t num = least(args.columns, args.out_columns - begin);
  for (int64_t t = 0; num > 0 && t < rows; t++) {
    memcpy(args.out + (first + t) * args.out_stride + begin, part + t * args.columns,
           num * sizeof(float));
  }
}

static void gather_ranks(const GatherRanksArgs& args, const StepArgs& step, Team& team) {
  const RanksArgs& ranks = *args.ranks;
  const int64_t columns = args.columns;
  if (!ranks.shared) {
    if (team.index != 0)
      return;
    const int64_t num = step.num_tokens * columns;
    float* out = nullptr;
    if (ranks.rank == 0) {
      out = static_cast<float*>(shared_memory(num * ranks.size * int64_t(sizeof(float))));
      if (!out)
        return;
    }
    if (!call(ranks, kCallGather, args.x, num, out) || !out)
      return;
    for (int64_t r = 0; r < ranks.size; r++)
      put_part(args, out + r * num, r, 0, step.num_tokens);
    return;
  }
  const int64_t rows_at_once = ranks.chunk / columns;
  for (int64_t first = 0; first < step.num_tokens; first += rows_at_once) {
    const int64_t rows = least(rows_at_once, step.num_tokens - first);
    float* const mine = shown_next(ranks);
    for (int64_t t; (t = team.take()) < rows;) {
      memcpy(mine + t * columns, args.x + (first + t) * columns, columns * sizeof(float));
    }
    team.barrier();
    if (team.index == 0)
      meet(ranks);
    team.barrier();
    if (ranks.rank == 0) {
      for (int64_t r; (r = team.take()) < ranks.size;)
        put_part(args, shown_by(ranks, r), r, first, rows);
    }
    team.barrier();
  }
}

}  // namespace WEFT_NAMESPACE
}  // namespace weft
