// The two ways through the forward pass, and what they share.
#pragma once

#include "dropout.h"
#include "summary.h"

namespace levelhead::LEVELHEAD_ISA {

// With this many queries or fewer a call is bound by reading K and V (decode); above, by arithmetic
// (prefill). It depends on nothing but the number of queries, so a row's bits do not depend on the
// batch or the threads.
constexpr Index kDecodeQueries = 8;

// Weighted values are summed up by so many keys: shorter chains of sums round less. In prefill they
// end where the number of a key is a multiple of it, so that hidden keys move no end. The sums of so
// many blocks of keys are then set aside, and those added up. In decode, where keys are read once,
// shorter chains would cost time.
constexpr Index kSumKeys = 64, kDecodeSumKeys = 128, kSumBlocks = 16;

template <class T>
void prefill(const Problem& p);
template <class T>
void decode(const Problem& p);
template <class T>
void write_weights(const Problem& p);

// Float32 scores of this size are off by 2^-16, and so are the weights of keys that compete, and their
// gradients. They are computed in float64 then. (Very negative ones come from a bias that means "hidden".)
constexpr double kLargestFloatScore = 256;

// The value of x / sum for rows that saw nothing is 0; NaN stays NaN.
template <class T>
LH_INLINE Vec<T> inverse_sum(Vec<T> sum) {
  return select<T>(sum == T{0}, Vec<T>{}, T{1} / sum);
}

// ln Σ exp(score): -inf for a row that saw nothing. sum - sum carries a NaN over.
template <class T>
LH_INLINE Vec<T> row_lse(Vec<T> top, Vec<T> sum) {
  const Vec<T> lse = fma(top, splat(static_cast<T>(kLn2)), log<T>(sum)) + (sum - sum);
  return select<T>(sum == T{0}, splat(-kInf<T>), lse);
}

// No element of rows [from, to) is NaN or infinite.
template <class S>
inline bool all_finite(RowBlock<S> rows, Index from, Index to, Index columns) {
  using T = decltype(widen(S{}));
  constexpr int W = kLanes<T>;
  Vec<T> probe = {};  // x·0 is NaN for those, and NaN stays
  T rest = 0;
  for (Index i = from; i < to; ++i) {
    Index c = 0;
    for (; c + W <= columns; c += W) probe = fma(load(rows.row(i) + c), Vec<T>{}, probe);
    for (; c < columns; ++c) rest += widen(rows.row(i)[c]) * T{0};
  }
  return sum<T>(probe) + rest == T{0};
}

}  // namespace levelhead::LEVELHEAD_ISA
