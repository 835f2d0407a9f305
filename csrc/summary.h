// From finished rows to the sums of a head, which merge exactly over panels, batches and steps.
#pragma once

#include "health.h"

namespace levelhead::LEVELHEAD_ISA {

inline void clear_sums(double* sums) {
  std::fill(sums, sums + kHealthSums, 0.0);
  sums[kScoreMax] = -kInf<double>;
  sums[kScoreMin] = kInf<double>;
}

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

// Lane by lane, the columns of a head's sums.
template <class T>
struct LaneSums {
  static constexpr int W = kLanes<T>;
  static constexpr int N = (kHealthSums + W - 1) / W * W;
  Vec<T> column[N], most = splat(-kInf<T>), least = splat(kInf<T>), widest = {};

  LH_INLINE LaneSums() {
    LH_UNROLL for (int f = 0; f < N; ++f) column[f] = Vec<T>{};
  }
  LH_INLINE void add(HealthSum f, IntVec<T> rows, Vec<T> x) {
    column[f] += select<T>(rows, x, Vec<T>{});
  }
  LH_INLINE void write(double* sums) const {
    alignas(64) double all[N], highest[M];
    join_lanes<N>(column, [](Vec<T> a, Vec<T> b) { return a + b; }, all);
    Vec<T> extremes[M];
    LH_UNROLL for (int i = 0; i < M; ++i) extremes[i] = i == 0 ? most : i == 1 ? -least : widest;
    join_lanes<M>(extremes, [](Vec<T> a, Vec<T> b) { return max(a, b); }, highest);
    std::copy(all, all + kHealthSums, sums);
    sums[kScoreMax] = highest[0] * kLn2;
    sums[kScoreMin] = -highest[1] * kLn2;
    sums[kWidestRow] = highest[2];
  }

 private:
  static constexpr int M = std::max(4, W);  // three extremes, in whole blocks of W

  // to[i] = what the lanes of rows[i] give together, W rows at a time.
  template <int Rows, class F>
  static LH_INLINE void join_lanes(const Vec<T>* rows, F join, double* to) {
    typedef double Wide __attribute__((vector_size(W * sizeof(double))));
    LH_UNROLL for (int at = 0; at < Rows; at += W) {
      Vec<T> block[W];
      LH_UNROLL for (int i = 0; i < W; ++i) block[i] = rows[at + i];
      transpose(block);
      for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) block[i] = join(block[i], block[i + half]);
      const Wide wide = __builtin_convertvector(block[0], Wide);
      std::memcpy(to + at, &wide, sizeof wide);
    }
  }
};

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

  LaneSums<T> s;
  IntVec<T> finite[kMaxVectors];
  Vec<T> logged = zero, inverse_log = zero;  // 1 / ln of the outcomes, for these counts
  for (int v = from / W; v * W < to; ++v) {
    const int at = v * W;
    const Vec<T> lane = iota<T>() + static_cast<T>(at);
    const IntVec<T> valid = (lane >= static_cast<T>(from)) & (lane < static_cast<T>(to));
    const Vec<T> count = load(state.count + at), mean = load(state.mean + at);
    const IntVec<T> some = valid & (count > T{0});
    const Vec<T> weight_sum = load(state.sum + at);
    const IntVec<T> good = some & (mean > -kInf<T>) & (mean < kInf<T>) & (weight_sum == weight_sum);
    const IntVec<T> chooses = good & (count > T{1});
    finite[v] = good;
    s.add(kEmptyRows, valid & ~some, one);
    s.add(kNonfiniteRows, some & ~good, one);
    s.add(kFiniteRows, good, one);
    s.add(kChoiceRows, chooses, one);
    s.widest = max(s.widest, select<T>(valid, count, zero));
    s.add(kPairs, valid, count);

    s.most = max(s.most, select<T>(good, load(state.most + at), s.most));
    s.least = min(s.least, select<T>(good, load(state.least + at), s.least));
    s.add(kScoreCount, good, count);
    s.add(kScoreMean, good, count * mean);
    s.add(kLargeScores, good, load(state.large + at));

    const Vec<T> tail = load(state.tail + at);
    const Vec<T> h = one / (tail + one), h2 = h * h, r = tail * h;
    const Vec<T> t2 = load(state.tail_2 + at) * h2, t3 = load(state.tail_3 + at) * h2 * h;
    const Vec<T> H = fma(load(state.tail_d + at) * h, splat(-ln2), log1p<T>(tail));
    if (any(count != logged)) {  // most panels' rows all see the same keys
      logged = count;
      inverse_log = one / log<T>(max(count + outcomes, splat(T{2})));
    }
    s.add(kEntropy, good, H);
    s.add(kEntropyRatio, chooses, H * inverse_log);
    s.add(kEffectiveKeys, good, one / (h2 + t2));
    s.add(kTopWeight, good, h);
    s.add(kSaturated, chooses & (h > static_cast<T>(kSaturatedWeight)), one);
    s.add(kSignal, good, r + (r - r * r) - t2);
    const Vec<T> j2 = fma(h2 * r, r, fma(t2, one + (h2 + h2), t2 * t2 - (t3 + t3)));
    s.add(kJacobianNorm, good, sqrt(max(j2, zero)));
    s.add(kFirstKey, chooses, load(state.first + at) * h);
    s.add(kDistance, good, load(state.distance + at) * h);
    if (p.sinks) s.add(kNullMass, good, exp2<T>(sink - finite_shift<T>(load(state.max + at))) * h);
  }
  s.write(sums);
  sums[kRows] = to - from;
  const double mean = sums[kScoreCount] > 0 ? sums[kScoreMean] / sums[kScoreCount] : 0.0;
  Vec<T> m2 = {};
  for (int v = from / W; v * W < to; ++v) {
    const Vec<T> c = load(state.mean + v * W) - static_cast<T>(mean);
    m2 += select<T>(finite[v], fma(c * c, load(state.count + v * W), load(state.m2 + v * W)), zero);
  }
  sums[kScoreMean] = mean * kLn2;
  sums[kScoreM2] = sum<T>(m2) * kLn2 * kLn2;
}

}  // namespace levelhead::LEVELHEAD_ISA
