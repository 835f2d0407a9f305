// Patterns: what the rows of a sequence have in common, from the weights of a sample of them. These are added up
// by key and by offset, in an order that does not depend on who computed them. The forward pass has the weights
// for a moment only, tile by tile:
// - pattern_panels.h adds them up at once, where all keys are in one tile
// - pattern_rows.h keeps them until all keys have gone by
// levelhead/_health/sampling.py says which rows are sampled, docs/health.md what the columns mean.
#pragma once

#include "forward.h"

namespace levelhead::LEVELHEAD_ISA {

// A float32 score of this size is off by 2^-10 or so, and its weight with it if other keys compete. That is well
// for a mean over rows. Of larger scores the share of all other keys must be as much smaller; a score of the
// second size is off by 1, and no weight is certain. Such rows are computed exactly, as slow as that is.
constexpr double kLargestPatternScore = 4096, kUncertainScore = 0x1p20;

inline bool has_patterns(const Problem& p) { return p.health && p.keys >= kPatternKeys; }

inline Index most_sampled_rows(const Problem& p) {
  return std::clamp<Index>(kPatternWeights / std::max<Index>(p.keys, 1), kPatternLeastRows, kPatternRows);
}

// The rows of a sequence: spread evenly over those that may see enough keys, which follow one another. Of a
// sequence with no more rows than that it has all: those that do not see enough keys are left out in the end.
struct Sample {
  Index first = 0, candidates, rows;

  Sample(const Problem& p, Index batch) : candidates(p.queries), rows(most_sampled_rows(p)) {
    if (candidates > rows) {
      // A query at position i sees from max(0, i - left) to min(length, i + right + 1).
      const Index length = p.length(batch), offset = p.offset(batch);
      const bool wide = length >= kPatternKeys && p.left + p.right + 1 >= kPatternKeys;
      first = std::max<Index>(0, kPatternKeys - 1 - p.right - offset);
      const Index last = std::min(p.queries, length + p.left - kPatternKeys - offset + 1);
      candidates = wide ? std::max<Index>(0, last - first) : 0;
    }
    rows = std::min(rows, candidates);
  }
  Index row(Index i) const { return first + (rows == candidates ? i : i * candidates / rows); }

  // f(i, row(i)) for those among the rows [from, to).
  template <class F>
  LH_INLINE void among(Index from, Index to, F f) const {
    const Index before = std::clamp<Index>(from - first, 0, candidates);
    Index i = rows == candidates ? before : (before * rows + candidates - 1) / candidates;
    for (Index at; i < rows && (at = row(i)) < to; ++i) f(i, at);
  }
};

// The columns, from sums over rows that are to be divided by `whole`.
inline void write_patterns(double* sums, double whole, double self, double previous, double offset,
                           double key) {
  sums[kPatternSequences] = 1;
  sums[kSelfWeight] = self / whole;
  sums[kPreviousWeight] = previous / whole;
  sums[kOffsetWeight] = offset / whole;
  sums[kSharedKey] = key / whole;
}

template <class T>
inline T largest(const T* x, Index n) {
  constexpr int W = kLanes<T>;
  Vec<T> most = {};
  Index i = 0;
  for (; i + W <= n; i += W) most = max(most, load(x + i));
  T rest = fold<T>(most, [](T a, T b) { return std::max(a, b); });
  for (; i < n; ++i) rest = std::max(rest, x[i]);
  return rest;
}

// What the weights of rows must be multiplied by when their keys have gone by, 0 for those to leave out; and of
// which rows this is to be doubted, so that they must be computed exactly.
template <class T>
inline IntVec<T> row_factors(const Problem& p, const RowState<T>& state, int at, T* factor) {
  const IntVec<T> enough = load(state.keys + at) >= static_cast<T>(kPatternKeys);
  const Vec<T> inverse = inverse_sum<T>(load(state.sum + at));
  const IntVec<T> finite = state.finite(at);
  store(factor, select<T>(enough & finite, inverse, Vec<T>{}));
  IntVec<T> doubtful = {};
  if constexpr (sizeof(T) == 4) {
    const Vec<T> size = abs<T>(load(state.max + at)), others = load(state.tail + at);
    const Vec<T> limit = splat(static_cast<T>(kLargestPatternScore * kLog2e));
    doubtful = finite & ((size * others > limit * (others + T{1})) |
                         (size > static_cast<T>(kUncertainScore * kLog2e)));
  }
  if (p.has_bias()) doubtful |= state.doubtful(at);
  return enough & doubtful;
}

// f(key, weight) for the weights of a row, if it counts: a score that T does not hold is not finite here either.
template <class T, class F>
inline bool exact_weights(const Problem& p, Index batch, Index head, Index query, F f) {
  const ExactRow row(p, batch, head, query);
  if (!row.finite || row.pairs.size() < kPatternKeys) return false;
  for (const double score : row.scores)
    if (!std::isfinite(static_cast<T>(score * kLog2e))) return false;
  const std::vector<double> weights = row.weights();
  for (std::size_t i = 0; i < weights.size(); ++i) f(row.pairs[i].key, weights[i]);
  return true;
}

}  // namespace levelhead::LEVELHEAD_ISA
