// Statistics of raw scores, lane by lane: how many, their mean and spread, extremes, how many are large.
#pragma once

#include "softmax.h"

namespace levelhead::LEVELHEAD_ISA {

// Number, mean, Σ(s - mean)² and extremes of some scores, and how many of them are large.
template <class T>
struct Scores {
  Vec<T> count, mean, m2, least, most, large;

  static LH_INLINE Scores none() {
    const Vec<T> zero = {};
    return {zero, zero, zero, splat(kInf<T>), splat(-kInf<T>), zero};
  }
  LH_INLINE Scores only(IntVec<T> lanes) const {
    const Scores none = Scores::none();
    return {select<T>(lanes, count, none.count), select<T>(lanes, mean, none.mean),
            select<T>(lanes, m2, none.m2),       select<T>(lanes, least, none.least),
            select<T>(lanes, most, none.most),   select<T>(lanes, large, none.large)};
  }
  LH_INLINE void join(const Scores& other) {  // Chan's formula
    const Vec<T> total = count + other.count, weight = other.count / max(total, splat(T{1}));
    const Vec<T> delta = other.mean - mean;
    m2 = m2 + other.m2 + delta * delta * count * weight;
    mean = fma(delta, weight, mean);
    count = total;
    least = min(least, other.least);
    most = max(most, other.most);
    large += other.large;
  }
};

template <class T>
LH_INLINE Vec<T> middle(Vec<T> a, Vec<T> b, Vec<T> c) {
  return max(min(a, b), min(max(a, b), c));
}

// Sums down the columns of a tile go over enough keys side by side that none waits for the one before.
template <int Vectors>
constexpr int kKeysAtOnce = Vectors == 1 ? 4 : Vectors == 2 ? 2 : 1;

// Statistics of a tile's visible scores, row by row, in one pass after hide_scores(). The pivots are
// the middle of three of the scores (the maximum for one that is hidden).
template <int Vectors, class T>
inline void measure_scores(const ScoreTile<T>& tile, const RunningMax<Vectors, T>& running,
                           Scores<T> (&scores)[Vectors]) {
  constexpr int W = kLanes<T>, Keys = kKeysAtOnce<Vectors>, N = Keys * Vectors;
  constexpr Index width = Vectors * W;
  Vec<T> pivot[Vectors], least[N], sum[N], squares[N];  // key k, vector v: at k * Vectors + v
  IntVec<T> shown[N];  // of the masked keys
  const Vec<T> one = splat(T{1});
  LH_UNROLL for (int v = 0; v < Vectors; ++v) {
    auto sample = [&](Index j) LH_INLINE_LAMBDA {
      const Vec<T> x = load(tile.scores + j * width + v * W);
      return tile.hides ? select<T>(x == -kInf<T>, finite_shift<T>(running.max[v]), x) : x;
    };
    pivot[v] = middle<T>(sample(tile.n / 4), sample(tile.n / 2), sample(3 * tile.n / 4));
  }
  LH_UNROLL for (int i = 0; i < N; ++i) {
    least[i] = splat(kInf<T>);
    sum[i] = squares[i] = Vec<T>{};
    shown[i] = IntVec<T>{};
  }
  auto take_in = [&](Index from, Index to, auto masked) LH_INLINE_LAMBDA {
    const T* at = tile.scores + from * width;
    const std::int8_t* visible = tile.mask.visible;  // of the masked keys
    auto add = [&](int i) LH_INLINE_LAMBDA {
      Vec<T> c = load(at + i * W) - pivot[i % Vectors];
      if constexpr (masked) {  // a hidden score counts as the pivot, a score that was seen
        const IntVec<T> see = load_mask<T>(visible + i * W);
        c = (Vec<T>)((IntVec<T>)c & see);
        shown[i] -= see;
      }
      least[i] = min(least[i], c);
      sum[i] = fma(c, one, sum[i]);  // x - pivot and min keep the adders busy
      squares[i] = fma(c, c, squares[i]);
    };
    Index j = from;
    for (; j + Keys <= to; j += Keys, at += N * W, visible += N * W)
      LH_UNROLL for (int i = 0; i < N; ++i) add(i);
    LH_UNROLL for (int k = 0; k + 1 < Keys; ++k)
      if (j + k < to)
        LH_UNROLL for (int v = 0; v < Vectors; ++v) add(k * Vectors + v);
  };
  take_in(0, tile.masked_first, std::false_type{});
  take_in(tile.masked_first, tile.masked_last, std::true_type{});
  take_in(tile.masked_last, tile.n, std::false_type{});
  const T unmasked = static_cast<T>(tile.n - (tile.masked_last - tile.masked_first));
  LH_UNROLL for (int v = 0; v < Vectors; ++v) {
    LH_UNROLL for (int i = v + Vectors; i < N; i += Vectors) {
      least[v] = min(least[v], least[i]);
      sum[v] += sum[i];
      squares[v] += squares[i];
      shown[v] += shown[i];
    }
    const Vec<T> count = __builtin_convertvector(shown[v], Vec<T>) + unmasked;
    const Vec<T> shift = sum[v] / max(count, splat(T{1}));
    const Vec<T> m2 = max(Vec<T>{}, fma(-sum[v], shift, squares[v]));
    const Vec<T> lowest = select<T>(count == T{0}, splat(kInf<T>), least[v] + pivot[v]);
    scores[v] = {count, pivot[v] + shift, m2, lowest, running.max[v], Vec<T>{}};
  }
}

// Statistics of a tile that every row sees whole, for all rows of a lane together. The pivot is the
// middle of three of the scores here too.
template <int Vectors, class T>
inline Scores<T> pooled_scores(const ScoreTile<T>& tile, const RunningMax<Vectors, T>& running) {
  constexpr int W = kLanes<T>;
  auto sample = [&](Index key, int v) LH_INLINE_LAMBDA {
    return load(tile.scores + (key * Vectors + v) * W);
  };
  const Vec<T> pivot = middle<T>(sample(tile.n / 4, 0), sample(tile.n / 2, Vectors / 2),
                                 sample(3 * tile.n / 4, Vectors - 1));
  const Vec<T> one = splat(T{1});
  Vec<T> least[2], sum[4], squares[4];  // as many side by side as keep the CPU busy
  LH_UNROLL for (int i = 0; i < 2; ++i) least[i] = splat(kInf<T>);
  LH_UNROLL for (int i = 0; i < 4; ++i) sum[i] = squares[i] = Vec<T>{};
  auto add = [&](int i, const T* at) LH_INLINE_LAMBDA {
    const Vec<T> c = load(at) - pivot;
    least[i % 2] = min(least[i % 2], c);
    sum[i] = fma(c, one, sum[i]);  // x - pivot and min keep the adders busy
    squares[i] = fma(c, c, squares[i]);
  };
  const T *at = tile.scores, *const end = at + tile.n * Vectors * W;
  for (; at + 4 * W <= end; at += 4 * W)
    LH_UNROLL for (int i = 0; i < 4; ++i) add(i, at + i * W);
  LH_UNROLL for (int i = 0; i < 3; ++i)
    if (at + i * W < end) add(i, at + i * W);
  const Vec<T> all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  const Vec<T> count = splat(static_cast<T>(tile.n * Vectors)), shift = all / count;
  const Vec<T> m2 = fma(-all, shift, (squares[0] + squares[1]) + (squares[2] + squares[3]));
  Vec<T> most = running.max[0];
  LH_UNROLL for (int v = 1; v < Vectors; ++v) most = max(most, running.max[v]);
  return {count, pivot + shift, max(Vec<T>{}, m2), pivot + min(least[0], least[1]), most, Vec<T>{}};
}

template <class T>
constexpr T kLarge = static_cast<T>(kLargeScore * kLog2e);  // in units of ln 2

template <class T>
LH_INLINE bool has_large(const Scores<T>& scores) {
  return any((scores.least < -kLarge<T>) | (scores.most > kLarge<T>));
}
// Raw scores beyond ±kLargeScore in one vector's column of a tile; -inf is a hidden one.
template <class T>
inline Vec<T> count_large(const T* scores, Index width, Index n) {
  const T limit = kLarge<T>;
  Vec<T> count = {};
  for (Index j = 0; j < n; ++j) {
    const Vec<T> x = load(scores + j * width);
    count += select<T>((x > limit) | ((x < -limit) & (x > -kInf<T>)), splat(T{1}), Vec<T>{});
  }
  return count;
}

}  // namespace levelhead::LEVELHEAD_ISA
