// From finished rows to the sums of a head, which merge exactly over panels, batches and steps.
#pragma once

#include <utility>

#include "health.h"

namespace levelhead::LEVELHEAD_ISA {

inline void clear_sums(double* sums) {
  std::fill(sums, sums + kHealthSums, 0.0);
  sums[kScoreMax] = -kInf<double>;
  sums[kScoreMin] = kInf<double>;
}

inline void merge_sums(double* into, const double* from) {
  const double n = into[kScoreCount] + from[kScoreCount];
  if (n > 0) {
    const double delta = from[kScoreMean] - into[kScoreMean], share = from[kScoreCount] / n;
    into[kScoreM2] += from[kScoreM2] + delta * delta * into[kScoreCount] * share;
    into[kScoreMean] += delta * share;
  }
  into[kScoreMax] = std::max(into[kScoreMax], from[kScoreMax]);
  into[kScoreMin] = std::min(into[kScoreMin], from[kScoreMin]);
  into[kWidestRow] = std::max(into[kWidestRow], from[kWidestRow]);
  for (int f : {kRows, kPairs, kEmptyRows, kNonfiniteRows, kFiniteRows, kChoiceRows, kScoreCount,
                kLargeScores, kEntropy, kEntropyRatio, kEffectiveKeys, kTopWeight, kSaturated,
                kSignal, kJacobianNorm, kFirstKey, kDistance, kNullMass})
    into[f] += from[f];
}

// The sums over lanes [from, to) of a panel, all of one head.
template <class T>
inline void summarise(const Problem& p, const Panel<T>& panel, const RowState<T>& state, int from,
                      int to, double* sums) {
  constexpr int W = kLanes<T>;
  const Vec<T> zero = {}, one = splat(T{1});
  const T ln2 = static_cast<T>(kLn2);
  const Index head = panel.head[from];
  const T sink = p.sinks ? static_cast<T>(p.sinks[head] * kLog2e) : -kInf<T>;
  const T outcomes = p.sinks ? T{1} : T{0};  // besides the keys

  Vec<T> empty = zero, nonfinite = zero, finite = zero, choice = zero, score_sum = zero, m2 = zero;
  Vec<T> large = zero, entropy = zero, ratio = zero, effective = zero, top = zero, saturated = zero;
  Vec<T> signal = zero, jacobian = zero, first = zero, distance = zero, null = zero;
  Vec<T> most = splat(-kInf<T>), least = splat(kInf<T>), widest = zero, weighted = zero, pairs = zero;
  for (int v = from / W; v * W < to; ++v) {
    const int at = v * W;
    const Vec<T> lane = iota<T>() + static_cast<T>(at);
    const IntVec<T> valid = (lane >= static_cast<T>(from)) & (lane < static_cast<T>(to));
    const Vec<T> count = load(state.count + at), mean = load(state.mean + at);
    const IntVec<T> some = valid & (count > T{0});
    const Vec<T> weight_sum = load(state.sum + at);
    const IntVec<T> good = some & (mean > -kInf<T>) & (mean < kInf<T>) & (weight_sum == weight_sum);
    const IntVec<T> chooses = good & (count > T{1});
    auto add = [&](Vec<T>& to_sum, IntVec<T> rows, Vec<T> x) { to_sum += select<T>(rows, x, zero); };
    add(empty, valid & ~some, one);
    add(nonfinite, some & ~good, one);
    add(finite, good, one);
    add(choice, chooses, one);
    widest = max(widest, select<T>(valid, count, zero));
    add(pairs, valid, count);

    most = max(most, select<T>(good, load(state.most + at), most));
    least = min(least, select<T>(good, load(state.least + at), least));
    add(weighted, good, count);
    add(score_sum, good, count * mean);
    add(large, good, load(state.large + at));

    const Vec<T> tail = load(state.tail + at), max_score = load(state.max + at);
    const Vec<T> h = one / (tail + one), h2 = h * h, r = tail * h;
    const Vec<T> t2 = load(state.tail_2 + at) * h2, t3 = load(state.tail_3 + at) * h2 * h;
    const Vec<T> H = fma(load(state.tail_d + at) * h, splat(-ln2), log1p<T>(tail));
    const Vec<T> squares = h2 + t2;
    add(entropy, good, H);
    add(ratio, chooses, H / log<T>(max(count + outcomes, splat(T{2}))));
    add(effective, good, one / squares);
    add(top, good, h);
    add(saturated, chooses & (h > static_cast<T>(kSaturatedWeight)), one);
    add(signal, good, r + (r - r * r) - t2);
    const Vec<T> j2 = fma(h2 * r, r, fma(t2, one + (h2 + h2), t2 * t2 - (t3 + t3)));
    add(jacobian, good, sqrt(max(j2, zero)));
    add(first, chooses, exp2<T>(load(state.first + at) - finite_shift<T>(max_score)) * h);
    add(distance, good, load(state.distance + at) * h);
    if (p.sinks) add(null, good, exp2<T>(sink - finite_shift<T>(max_score)) * h);
  }
  const T n = sum<T>(weighted);
  const T mean = n > T{0} ? sum<T>(score_sum) / n : T{0};
  for (int v = from / W; v * W < to; ++v) {
    const Vec<T> lane = iota<T>() + static_cast<T>(v * W), c = load(state.mean + v * W) - mean;
    const Vec<T> count = load(state.count + v * W);
    const IntVec<T> good = (lane >= static_cast<T>(from)) & (lane < static_cast<T>(to)) &
                           (count > T{0}) & (c > -kInf<T>) & (c < kInf<T>) &
                           (load(state.sum + v * W) == load(state.sum + v * W));
    m2 += select<T>(good, fma(c * c, count, load(state.m2 + v * W)), zero);
  }

  T highest = -kInf<T>, lowest = kInf<T>, broadest = 0;
  for (int i = 0; i < W; ++i) {
    highest = std::max(highest, T(most[i]));
    lowest = std::min(lowest, T(least[i]));
    broadest = std::max(broadest, T(widest[i]));
  }
  sums[kRows] = to - from;
  sums[kWidestRow] = broadest;
  sums[kScoreMax] = highest * kLn2;
  sums[kScoreMin] = lowest * kLn2;
  sums[kScoreMean] = mean * kLn2;
  sums[kScoreM2] = sum<T>(m2) * kLn2 * kLn2;
  const std::pair<HealthSum, Vec<T>> fields[] = {
      {kEmptyRows, empty}, {kPairs, pairs}, {kScoreCount, weighted}, {kNonfiniteRows, nonfinite}, {kFiniteRows, finite},
      {kChoiceRows, choice}, {kLargeScores, large}, {kEntropy, entropy}, {kEntropyRatio, ratio},
      {kEffectiveKeys, effective}, {kTopWeight, top}, {kSaturated, saturated}, {kSignal, signal},
      {kJacobianNorm, jacobian}, {kFirstKey, first}, {kDistance, distance}, {kNullMass, null}};
  constexpr int n_fields = sizeof fields / sizeof fields[0];
  for (int f = 0; f < n_fields; f += W) {  // W sums over lanes at once
    Vec<T> block[W] = {};
    for (int i = 0; i < W && f + i < n_fields; ++i) block[i] = fields[f + i].second;
    transpose(block);
    for (int half = W / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) block[i] += block[i + half];
    for (int i = 0; i < W && f + i < n_fields; ++i)
      sums[fields[f + i].first] = static_cast<double>(block[0][i]);
  }
}

}  // namespace levelhead::LEVELHEAD_ISA
