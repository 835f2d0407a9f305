// From finished rows to the sums of a head, which merge exactly over panels, batches and steps.
#pragma once

#include "exact.h"
#include "health.h"

namespace levelhead::LEVELHEAD_ISA {

inline void merge_sums(double* into, const double* from) {
  const double most = std::max(into[kScoreMax], from[kScoreMax]);
  const double least = std::min(into[kScoreMin], from[kScoreMin]);
  const double widest = std::max(into[kWidestRow], from[kWidestRow]);
  const double n = into[kScoreCount] + from[kScoreCount];
  const double delta = from[kScoreMean] - into[kScoreMean];
  const double share = n > 0 ? from[kScoreCount] / n : 0.0;
  const double mean = into[kScoreMean] + delta * share;
  const double m2 =
      into[kScoreM2] + (from[kScoreM2] + delta * delta * into[kScoreCount] * share);
  for (int f = 0; f < kHealthSums; ++f) into[f] += from[f];  // all others are sums
  into[kScoreMax] = most;
  into[kScoreMin] = least;
  into[kWidestRow] = widest;
  into[kScoreMean] = mean;
  into[kScoreM2] = m2;
}

// The sums of some rows of a head in the making, lane by lane, from row `first` on. Rows are taken in
// order, so that the bits do not depend on who computed them.
template <class T>
class Summary {
 public:
  Summary(const Problem& problem, Index batch, Index head, Index first)
      : p(problem), batch_(batch), head_(head), first_(first), has_sink_(p.sinks),
        has_bias_(p.has_bias()),
        sink_(p.sinks ? static_cast<T>(p.sinks[head] * kLog2e) : -kInf<T>) {
    LH_UNROLL for (int i = 0; i < kColumns; ++i) column_[i] = Vec<T>{};
  }

  // The rows in lanes [from, to) of a panel.
  void take(const RowState<T>& state, int from, int to) {
    rows_ += to - from;
    if (!state.weighed) {
      empty_ += to - from;
      return;
    }
    Vec<T> top[kMaxVectors], log_sum[kMaxVectors];
    // Apart from what waits for them: they take long, and side by side no longer.
    for (int v = from / W; v * W < to; ++v) {
      const Vec<T> tail = load(state.tail + v * W);
      top[v] = T{1} / (tail + T{1});
      log_sum[v] = log1p<T>(tail);
    }
    for (int v = from / W, at = v * W; at < to; ++v, at += W) {
      const Vec<T> keys = load(state.keys + at);
      const IntVec<T> finite = state.finite(at);
      const IntVec<T> chooses = finite & (keys > T{1});
      if (from <= at && at + W <= to && !any(~chooses) && !has_bias_) {  // nearly always
        finite_ += W;
        choosing_ += W;
        widest_ = max(widest_, keys);
        take<true>(state, at, top[v], log_sum[v], chooses, chooses);
        continue;
      }
      const Vec<T> lane = iota<T>() + static_cast<T>(at);
      const IntVec<T> valid = (lane >= static_cast<T>(from)) & (lane < static_cast<T>(to));
      const IntVec<T> some = valid & (keys > T{0}), good = some & finite;
      if (has_bias_) doubtful_ |= any(some & state.doubtful(at));
      widest_ = max(widest_, select<T>(valid, keys, Vec<T>{}));
      empty_ += number_of<T>(valid & ~some);
      nonfinite_ += number_of<T>(some & ~good);
      finite_ += number_of<T>(good);
      choosing_ += number_of<T>(good & chooses);
      lost_pairs_ += sum<T>(select<T>(some & ~good, keys, Vec<T>{}));
      take<false>(state, at, top[v], log_sum[v], good, good & chooses);
    }
    scores_.join(state.pooled);
  }

  void write(double* sums) {
    // Lanes about one of them that has any, as their scores are about their own means.
    int lane = 0;
    while (lane + 1 < W && scores_.count[lane] == T{0}) ++lane;
    const T pivot = scores_.mean[lane];
    const Vec<T> c = scores_.mean - pivot;
    add(kScoreCount, scores_.count);
    add(kScoreMean, scores_.count * c);
    add(kScoreM2, fma(scores_.count * c, c, scores_.m2));
    add(kLargeScores, scores_.large);
    write_columns(sums);
    const double count = sums[kScoreCount], shift = count > 0 ? sums[kScoreMean] / count : 0.0;
    const double m2 = sums[kScoreM2] - sums[kScoreMean] * shift;
    sums[kScoreM2] = (m2 < 0 ? 0.0 : m2) * kLn2 * kLn2;
    sums[kScoreMean] = (pivot + shift) * kLn2;
    auto most = [](T x, T y) { return std::max(x, y); };
    auto least = [](T x, T y) { return std::min(x, y); };
    sums[kScoreMax] = fold<T>(scores_.most, most) * kLn2;
    sums[kScoreMin] = fold<T>(scores_.least, least) * kLn2;
    sums[kWidestRow] = fold<T>(widest_, most);
    sums[kRows] = rows_;
    sums[kPairs] = count + lost_pairs_;
    sums[kEmptyRows] = empty_;
    sums[kNonfiniteRows] = nonfinite_;
    sums[kFiniteRows] = finite_;
    sums[kChoiceRows] = choosing_;
    sums[kSaturated] = saturated_;
    std::fill(sums + kPatternSequences, sums + kSharedKey + 1, 0.0);  // patterns.h has them
    for (int f = 0; f < kHealthSums; ++f)  // squares of scores overflow, or differences of very low ones
      doubtful_ |= f != kScoreMax && f != kScoreMin && !std::isfinite(sums[f]);
    if (doubtful_) measure_exactly(sums);
  }

 private:
  static constexpr int W = kLanes<T>;
  // What is summed up in lanes; the others are counted.
  static constexpr HealthSum kSummed[] = {
      kEntropy,  kEntropyRatio, kEffectiveKeys, kTopWeight, kSignal,  kJacobianNorm, kFirstKey,
      kDistance, kNullMass,     kScoreCount,    kScoreMean, kScoreM2, kLargeScores};
  static constexpr int kSums = sizeof kSummed / sizeof *kSummed, kColumns = (kSums + W - 1) / W * W;

  const Problem& p;
  const Index batch_, head_, first_;
  const bool has_sink_, has_bias_;
  const T sink_;
  bool doubtful_ = false;  // the rows must be measured one by one
  Vec<T> column_[kColumns], widest_ = {};
  Scores<T> scores_ = Scores<T>::none();
  int rows_ = 0, empty_ = 0, nonfinite_ = 0, finite_ = 0, choosing_ = 0, saturated_ = 0;
  double lost_pairs_ = 0;                  // those of rows that are not finite
  Vec<T> logged_ = {}, inverse_log_ = {};  // 1 / ln of the outcomes, for these numbers of them

  static constexpr int column_of(HealthSum f) {
    int i = 0;
    while (kSummed[i] != f) ++i;
    return i;
  }
  LH_INLINE void add(HealthSum f, Vec<T> x) { column_[column_of(f)] += x; }

  void measure_exactly(double* sums) const {
    clear_sums(sums);
    double row[kHealthSums];
    for (Index i = 0; i < rows_; ++i) {
      measure_row(p, batch_, head_, first_ + i, row);
      merge_sums(sums, row);
    }
  }

  // One vector of rows: `good` ones are finite and see a key, `chooses` says which see several. All
  // do both if Whole.
  template <bool Whole>
  LH_INLINE void take(const RowState<T>& state, int at, Vec<T> h, Vec<T> log_sum, IntVec<T> good,
                      IntVec<T> chooses) {
    const Vec<T> zero = {}, one = splat(T{1});
    auto only = [&](IntVec<T> rows, Vec<T> x) LH_INLINE_LAMBDA {
      return Whole ? x : select<T>(rows, x, zero);
    };
    const Vec<T> keys = only(good, load(state.keys + at));
    const Vec<T> outcomes = has_sink_ ? keys + one : keys;
    if (any(outcomes != logged_)) {  // most rows all see the same keys
      logged_ = outcomes;
      inverse_log_ = one / log<T>(max(outcomes, splat(T{2})));
    }
    const IntVec<T> saturated = chooses & (h > static_cast<T>(kSaturatedWeight));
    if (any(saturated)) saturated_ += number_of<T>(saturated);

    const Vec<T> tail = load(state.tail + at), tail_2 = load(state.tail_2 + at);
    const Vec<T> l = tail + one, h2 = h * h, r = tail * h;
    const Vec<T> t2 = tail_2 * h2, t3 = load(state.tail_3 + at) * h2 * h;
    const Vec<T> entropy =
        fma(load(state.tail_d + at) * h, splat(static_cast<T>(-kLn2)), log_sum);
    const Vec<T> j2 = fma(h2 * r, r, fma(t2, one + (h2 + h2), t2 * t2 - (t3 + t3)));
    add(kEntropy, only(good, entropy));
    add(kEntropyRatio, only(chooses, entropy * inverse_log_));
    add(kEffectiveKeys, only(good, l * l / (one + tail_2)));
    add(kTopWeight, only(good, h));
    add(kSignal, only(good, r + (r - r * r) - t2));
    add(kJacobianNorm, only(good, sqrt(max(j2, zero))));
    add(kFirstKey, only(chooses, load(state.first + at) * h));
    add(kDistance, only(good, load(state.distance + at) * h));
    if (has_sink_)
      add(kNullMass, only(good, exp2<T>(sink_ - finite_shift<T>(load(state.max + at))) * h));
    if (state.by_row) scores_.join(Whole ? state.scores(at) : state.scores(at).only(good));
  }

  // What the lanes of each column have together, W columns at a time.
  LH_INLINE void write_columns(double* sums) const {
    typedef double Wide __attribute__((vector_size(W * sizeof(double))));
    alignas(64) double all[kColumns];
    LH_UNROLL for (int at = 0; at < kColumns; at += W) {
      Vec<T> block[W];
      LH_UNROLL for (int i = 0; i < W; ++i) block[i] = column_[at + i];
      transpose(block);
      Wide added = __builtin_convertvector(block[0], Wide);
      LH_UNROLL for (int i = 1; i < W; ++i) added += __builtin_convertvector(block[i], Wide);
      std::memcpy(all + at, &added, sizeof added);
    }
    LH_UNROLL for (int i = 0; i < kSums; ++i) sums[kSummed[i]] = all[i];
  }
};

}  // namespace levelhead::LEVELHEAD_ISA
