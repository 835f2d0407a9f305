// The statistics, from the same pass as the output. HEALTH.md's one-pass form: for each row, sums
// over all keys except one argmax (the tail), which do not cancel on saturated rows.
#pragma once

#include "softmax.h"

namespace levelhead::LEVELHEAD_ISA {

// What is kept of each row while its keys go by. The softmax's own two come first; the rest is
// used only when health is asked for, and never flows back into the output.
template <class T>
struct RowState {
  static constexpr int N = kMaxLanes<T>;
  alignas(64) T max[N];  // in units of ln 2, like every score here
  T sum[N];              // of 2^(score - max)

  T tail[N], tail_d[N], tail_2[N], tail_3[N];  // Σe, Σe·d, Σe², Σe³ without one argmax; d = s - max
  T distance[N];                               // Σe·|i - j|
  T first[N];                                  // the score of key 0
  T count[N], mean[N], m2[N];                  // raw scores of visible pairs
  T least[N], most[N], large[N];

  void start(const Problem& p, const Panel<T>& panel, bool measured) {
    const int width = panel.width;
    std::fill_n(max, width, -kInf<T>);
    std::fill_n(sum, width, T{0});
    if (measured) {
      for (T* zeros : {tail, tail_d, tail_2, tail_3, distance, count, mean, m2, large})
        std::fill_n(zeros, width, T{0});
      for (T* lows : {first, most}) std::fill_n(lows, width, -kInf<T>);
      std::fill_n(least, width, kInf<T>);
    }
    if (!p.sinks) return;
    for (int i = 0; i < panel.n; ++i) {  // a sink is an outcome that was seen before any key
      const T sink = static_cast<T>(p.sinks[panel.head[i]] * kLog2e);
      const bool sound = sink < kInf<T>;  // NaN and +inf make the row NaN, as they would as a key
      max[i] = sound ? sink : -kInf<T>;
      sum[i] = !sound ? std::numeric_limits<T>::quiet_NaN() : sink > -kInf<T> ? T{1} : T{0};
    }
  }
};

// Sums over one tile's keys for one vector of rows.
template <class T>
struct TileSums {
  Vec<T> e = {}, ed = {}, e2 = {}, e3 = {}, distance = {}, m2 = {};
};

// exponentiate() with statistics, for one vector of rows: the same e, added in the same order.
// Where the tile holds raw scores, m2 is taken about `mean` (hidden ones are -inf and left out);
// otherwise measure_dressed() has taken it. `ahead` is how far the first key is behind the query;
// OneSided says that no lane's query lies strictly inside the tile, so |i - j| changes sign nowhere,
// and `distance` may be summed with it (the caller takes the magnitude).
template <bool Raw, bool Hidden, bool OneSided, class T>
inline void exponentiate_measured(T* scores, Index width, Index n, Vec<T> shift, Vec<T> mean,
                                  Vec<T> ahead, TileSums<T>& sums) {
  TileSums<T> s = sums;
  auto weight = [&](T* at) LH_INLINE_LAMBDA {
    const Vec<T> x = load(at);
    const Vec<T> d = clamp_exp2<T>(x - shift);
    const Vec<T> e = exp2_clamped<T>(d), ee = e * e;
    store(at, e);
    s.ed = fma(e, d, s.ed);
    s.e2 += ee;
    s.e3 = fma(ee, e, s.e3);
    if constexpr (Raw) {
      Vec<T> c = x - mean;
      if constexpr (Hidden) c = select<T>(x == -kInf<T>, Vec<T>{}, c);
      s.m2 = fma(c, c, s.m2);
    }
    return e;
  };
  Index j = 0;
  for (; j + 4 <= n; j += 4, scores += 4 * width) {
    const Vec<T> e0 = weight(scores), e1 = weight(scores + width);
    const Vec<T> e2 = weight(scores + 2 * width), e3 = weight(scores + 3 * width);
    const Vec<T> group = (e0 + e1) + (e2 + e3);
    s.e += group;
    if constexpr (OneSided) {
      const Vec<T> e23 = e2 + e3;
      s.distance = fma(group, ahead, s.distance) - ((e1 + e3) + (e23 + e23));
    } else {
      auto magnitude = [](Vec<T> x) LH_INLINE_LAMBDA { return max(x, -x); };
      s.distance = fma(e0, magnitude(ahead), s.distance);
      s.distance = fma(e1, magnitude(ahead - T{1}), s.distance);
      s.distance = fma(e2, magnitude(ahead - T{2}), s.distance);
      s.distance = fma(e3, magnitude(ahead - T{3}), s.distance);
    }
    ahead -= T{4};
  }
  for (; j < n; ++j, scores += width) {
    const Vec<T> e = weight(scores);
    s.e += e;
    s.distance = fma(e, OneSided ? ahead : max(ahead, -ahead), s.distance);
    ahead -= T{1};
  }
  sums = s;
}

// Σe, Σe², Σe³ over a tile that holds the row's maximum, without one argmax. Needed where they are
// small: there the plain sums less 1 would cancel.
template <class T>
inline void tail_sums(const T* weights, Index width, Index n, Vec<T>& e, Vec<T>& e2, Vec<T>& e3) {
  Vec<T> ties = splat(T{-1});
  e = e2 = e3 = Vec<T>{};
  for (Index j = 0; j < n; ++j) {
    const Vec<T> x = load(weights + j * width);
    const IntVec<T> top = x == T{1};
    ties += select<T>(top, splat(T{1}), Vec<T>{});
    const Vec<T> rest = select<T>(top, Vec<T>{}, x);
    e += rest;
    e2 = fma(rest, rest, e2);
    e3 = fma(rest * rest, rest, e3);
  }
  e += ties;
  e2 += ties;
  e3 += ties;
}

// Raw scores beyond ±kLargeScore in one vector's column of a tile; -inf is a hidden one.
template <class T>
inline Vec<T> count_large(const T* scores, Index width, Index n) {
  const T limit = static_cast<T>(kLargeScore * kLog2e);
  Vec<T> count = {};
  for (Index j = 0; j < n; ++j) {
    const Vec<T> x = load(scores + j * width);
    count += select<T>((x > limit) | ((x < -limit) & (x > -kInf<T>)), splat(T{1}), Vec<T>{});
  }
  return count;
}

// Chan's formula: n scores of the given mean and m2 join those of a row.
template <class T>
LH_INLINE void join_scores(RowState<T>& state, int at, Vec<T> n, Vec<T> mean, Vec<T> m2) {
  const Vec<T> before = load(state.count + at), total = before + n;
  const Vec<T> weight = n / max(total, splat(T{1}));
  const Vec<T> delta = mean - load(state.mean + at);
  store(state.count + at, total);
  store(state.mean + at, fma(delta, weight, load(state.mean + at)));
  store(state.m2 + at, load(state.m2 + at) + m2 + delta * delta * before * weight);
}

// The extremes of the raw scores; before softcap and bias change seen.max.
template <int Vectors, class T>
inline void note_extremes(const Seen<Vectors, T>& seen, RowState<T>& state) {
  for (int v = 0; v < Vectors; ++v) {
    const int at = v * kLanes<T>;
    store(state.least + at, min(load(state.least + at), seen.min[v]));
    store(state.most + at, max(load(state.most + at), seen.max[v]));
  }
}

// Raw-score statistics of the dressed keys, before they are dressed: visible pairs only, and a bias
// as low as "hidden" is written counts as hidden.
template <class T>
inline void measure_dressed(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile,
                            RowState<T>& state) {
  constexpr int W = kLanes<T>;
  const T hidden = statistically_hidden<T>(p);
  const T limit = static_cast<T>(kLargeScore * kLog2e);
  for (int v = 0; v < panel.vectors; ++v) {
    auto seen = [&](Index j) {
      const Index at = (j - tile.dressed_first) * panel.width + v * W;
      IntVec<T> see = tile.hides ? load(tile.mask.visible + at) : ~IntVec<T>{};
      if (tile.mask.has_bias) see &= ~(load(tile.mask.bias + at) <= hidden);
      return see;
    };
    Vec<T> n = {}, sum = {}, m2 = {}, large = {};
    Vec<T> least = load(state.least + v * W), most = load(state.most + v * W);
    for (Index j = tile.dressed_first; j < tile.dressed_last; ++j) {
      const Vec<T> x = load(tile.scores + j * panel.width + v * W);
      const IntVec<T> see = seen(j);
      n += select<T>(see, splat(T{1}), Vec<T>{});
      sum += select<T>(see, x, Vec<T>{});
      least = min(least, select<T>(see, x, least));
      most = max(most, select<T>(see, x, most));
    }
    const Vec<T> mean = sum / max(n, splat(T{1}));
    for (Index j = tile.dressed_first; j < tile.dressed_last; ++j) {
      const Vec<T> x = load(tile.scores + j * panel.width + v * W);
      const IntVec<T> see = seen(j);
      const Vec<T> c = select<T>(see, x - mean, Vec<T>{});
      m2 = fma(c, c, m2);
      large += select<T>(see & ((x > limit) | (x < -limit)), splat(T{1}), Vec<T>{});
    }
    store(state.least + v * W, least);
    store(state.most + v * W, most);
    store(state.large + v * W, load(state.large + v * W) + large);
    join_scores<T>(state, v * W, n, mean, m2);
  }
}

// Two parts of the same rows: `b`'s keys join `a`'s (split decoding).
template <class T>
inline void merge_rows(RowState<T>& a, const RowState<T>& b, int vectors, bool measured) {
  for (int at = 0; at < vectors * kLanes<T>; at += kLanes<T>) {
    const Vec<T> ma = load(a.max + at), mb = load(b.max + at);
    const Vec<T> m = max(ma, mb), shift = finite_shift<T>(m);
    const Vec<T> wa = exp2<T>(ma - shift), wb = exp2<T>(mb - shift);
    store(a.max + at, m);
    store(a.sum + at, fma(load(a.sum + at), wa, load(b.sum + at) * wb));
    if (!measured) continue;
    // The part with the larger maximum keeps its argmax out; the other's joins the tail.
    const IntVec<T> rises = mb > ma;
    const Vec<T> zero = {}, one = splat(T{1});
    const Vec<T> join_a = select<T>(rises & (ma > -kInf<T>), one, zero);
    const Vec<T> join_b = select<T>(~rises & (mb > -kInf<T>), one, zero);
    const Vec<T> da = select<T>(ma > -kInf<T>, ma - shift, zero);
    const Vec<T> db = select<T>(mb > -kInf<T>, mb - shift, zero);
    const Vec<T> ta = load(a.tail + at) + join_a, tb = load(b.tail + at) + join_b;
    store(a.tail + at, wa * ta + wb * tb);
    store(a.tail_d + at, wa * fma(da, ta, load(a.tail_d + at)) +
                             wb * fma(db, tb, load(b.tail_d + at)));
    store(a.tail_2 + at, wa * wa * (load(a.tail_2 + at) + join_a) +
                             wb * wb * (load(b.tail_2 + at) + join_b));
    store(a.tail_3 + at, wa * wa * wa * (load(a.tail_3 + at) + join_a) +
                             wb * wb * wb * (load(b.tail_3 + at) + join_b));
    store(a.distance + at, wa * load(a.distance + at) + wb * load(b.distance + at));
    store(a.first + at, max(load(a.first + at), load(b.first + at)));
    store(a.least + at, min(load(a.least + at), load(b.least + at)));
    store(a.most + at, max(load(a.most + at), load(b.most + at)));
    store(a.large + at, load(a.large + at) + load(b.large + at));
    join_scores<T>(a, at, load(b.count + at), load(b.mean + at), load(b.m2 + at));
  }
}

// From raw scores to what enters the softmax, with the statistics of the raw ones on the way.
template <int Vectors, bool Measured, class T>
inline void dress_tile(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile, bool raw,
                       Seen<Vectors, T>& seen, RowState<T>& state) {
  const bool dressed = tile.dressed_first < tile.dressed_last;
  if (dressed && raw) hide_scores<Vectors, Measured>(tile, seen);
  if constexpr (Measured) note_extremes(seen, state);
  if (!dressed || raw) return;
  if constexpr (Measured) measure_dressed(p, panel, tile, state);
  dress_scores(p, panel, tile, seen.max);
}

// One step of the online softmax: the tile's scores become weights relative to the new maximum,
// and the rows' state takes them in. `raw`: the scores have had no softcap or bias. `rescale`
// receives what everything accumulated so far must be multiplied by. True if any of it is not 1.
template <int Vectors, bool Measured, class T>
inline bool softmax_step(const Panel<T>& panel, const ScoreTile<T>& tile, bool raw,
                         const Seen<Vectors, T>& seen, RowState<T>& state, T* rescale) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  Vec<T> before[Vectors], shift[Vectors], scale[Vectors], sum[Vectors];
  IntVec<T> moved = {};
  for (int v = 0; v < Vectors; ++v) {
    before[v] = load(state.max + v * W);
    const Vec<T> top = max(before[v], seen.max[v]);
    shift[v] = finite_shift<T>(top);
    scale[v] = exp2<T>(before[v] - shift[v]);
    moved |= scale[v] != T{1};
    store(state.max + v * W, top);
    store(rescale + v * W, scale[v]);
    sum[v] = Vec<T>{};
  }

  if constexpr (Measured) {
    const Vec<T> one = splat(T{1}), zero = {};
    const T limit = static_cast<T>(kLargeScore * kLog2e);
    const Index last = tile.first + tile.n - 1;
    for (int v = 0; v < Vectors; ++v) {
      T* column = tile.scores + v * W;
      if (tile.first == 0) store(state.first + v * W, load(column));
      const Vec<T> mean = seen.sum[v] / max(seen.count[v], one);
      if (raw && any((seen.min[v] < -limit) | (seen.max[v] > limit)))
        store(state.large + v * W,
              load(state.large + v * W) + count_large<T>(column, width, tile.n));
      TileSums<T> s;
      const Vec<T> position = load(panel.position + v * W);
      const Vec<T> ahead = position - static_cast<T>(tile.first);
      const bool one_sided = !any((position > static_cast<T>(tile.first)) &
                                  (position < static_cast<T>(last)));
      auto measure = [&](auto is_raw, auto hidden, auto side) LH_INLINE_LAMBDA {
        exponentiate_measured<is_raw, hidden, side, T>(column, width, tile.n, shift[v], mean, ahead, s);
      };
      const std::true_type yes;
      const std::false_type no;
      if (!raw) one_sided ? measure(no, no, yes) : measure(no, no, no);
      else if (tile.hides) one_sided ? measure(yes, yes, yes) : measure(yes, yes, no);
      else one_sided ? measure(yes, no, yes) : measure(yes, no, no);
      s.distance = max(s.distance, -s.distance);
      sum[v] = s.e;

      const IntVec<T> rises = seen.max[v] > before[v];
      Vec<T> e = s.e - select<T>(rises, one, zero), e2 = s.e2 - select<T>(rises, one, zero);
      Vec<T> e3 = s.e3 - select<T>(rises, one, zero);
      if (const IntVec<T> cancels = rises & (e < T{1}); any(cancels)) {
        Vec<T> t, t2, t3;
        tail_sums<T>(column, width, tile.n, t, t2, t3);
        e = select<T>(cancels, t, e);
        e2 = select<T>(cancels, t2, e2);
        e3 = select<T>(cancels, t3, e3);
      }
      const IntVec<T> displaced = rises & (before[v] > -kInf<T>);
      const Vec<T> join = select<T>(displaced, one, zero);
      const Vec<T> delta = select<T>(displaced, before[v] - shift[v], zero);
      const Vec<T> w = scale[v], w2 = w * w, t = load(state.tail + v * W) + join;
      store(state.tail + v * W, fma(w, t, e));
      store(state.tail_d + v * W, fma(w, fma(delta, t, load(state.tail_d + v * W)), s.ed));
      store(state.tail_2 + v * W, fma(w2, load(state.tail_2 + v * W) + join, e2));
      store(state.tail_3 + v * W, fma(w2 * w, load(state.tail_3 + v * W) + join, e3));
      store(state.distance + v * W, fma(w, load(state.distance + v * W), s.distance));
      if (raw) join_scores<T>(state, v * W, seen.count[v], mean, s.m2);
    }
  } else {
    exponentiate<Vectors>(tile.scores, tile.n, shift, sum);
  }

  for (int v = 0; v < Vectors; ++v)
    store(state.sum + v * W, fma(load(state.sum + v * W), scale[v], sum[v]));
  return any(moved);
}

}  // namespace levelhead::LEVELHEAD_ISA
