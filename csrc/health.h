// The statistics, from the same pass as the output. The one-pass form of docs/numerics.md: for each row, sums
// over all keys except one argmax (the tail), which do not cancel on saturated rows.
#pragma once

#include <array>

#include "score_statistics.h"

namespace levelhead::LEVELHEAD_ISA {

// What is kept of each row while its keys go by. All but the softmax itself is used only when health is
// asked for, and never flows back into the output. Scores are in units of ln 2.
template <class T>
struct RowState : OnlineSoftmax<T> {
  using OnlineSoftmax<T>::N, OnlineSoftmax<T>::max, OnlineSoftmax<T>::sum;

  T tail[N], tail_d[N], tail_2[N], tail_3[N];  // Σe, Σe·d, Σe², Σe³ without one argmax; d = s - max
  T distance[N];                               // Σe·|i - j|
  T first[N];                                  // e of key 0
  T keys[N];                                   // number of visible pairs
  Scores<T> pooled;  // their raw scores, where they were measured for all rows of a lane together...
  T count[N], mean[N], m2[N], least[N], most[N], large[N];  // ...and where they were row by row
  T hidden_top[N];  // the largest logit, or more, of pairs that a bias hides from the statistics
  bool weighed;  // the first keys set the tail, the distance and the first; they are not set before
  bool by_row;   // nor are the lines above before scores were measured row by row

  // Before any key. A sink is an outcome that was seen before them.
  void start(const Problem& p, const Panel<T>& panel, bool measured) {
    start(measured);
    if (!p.sinks) return;
    if (measured) clear();
    for (int i = 0; i < panel.n; ++i) {
      const T sink = static_cast<T>(p.sinks[panel.head[i]] * kLog2e);
      const bool sound = sink < kInf<T>;  // NaN and +inf make the row NaN, as they would as a key
      max[i] = sound ? sink : -kInf<T>;
      sum[i] = !sound ? std::numeric_limits<T>::quiet_NaN() : sink > -kInf<T> ? T{1} : T{0};
    }
  }
  void start(bool measured) {
    OnlineSoftmax<T>::start();
    weighed = false;
    if (measured) forget_scores();
  }
  // Sets what the first keys would.
  void clear() {
    weighed = true;
    LH_UNROLL for (int at = 0; at < N; at += kLanes<T>)
      for (T* x : {tail, tail_d, tail_2, tail_3, distance, first}) store(x + at, Vec<T>{});
    clear_rows();
  }
  void clear_rows() {
    by_row = true;
    LH_UNROLL for (int at = 0; at < N; at += kLanes<T>) {
      for (T* x : {count, mean, m2, large}) store(x + at, Vec<T>{});
      store(most + at, splat(-kInf<T>));
      store(least + at, splat(kInf<T>));
      store(hidden_top + at, splat(-kInf<T>));
    }
  }
  LH_INLINE void forget_scores() {
    pooled = Scores<T>::none();
    by_row = false;
    LH_UNROLL for (int at = 0; at < N; at += kLanes<T>) store(keys + at, Vec<T>{});
  }

  LH_INLINE std::array<T*, 11> sums() {  // what begins at 0
    return {tail, tail_d, tail_2, tail_3, distance, first, keys, count, mean, m2, large};
  }
  LH_INLINE Scores<T> scores(int at) const {
    return {load(count + at), load(mean + at), load(m2 + at),
            load(least + at), load(most + at), load(large + at)};
  }
  LH_INLINE void join_scores(int at, const Scores<T>& more) {
    if (!by_row) clear_rows();
    Scores<T> all = scores(at);
    all.join(more);
    store(keys + at, load(keys + at) + more.count);
    store(count + at, all.count);
    store(mean + at, all.mean);
    store(m2 + at, all.m2);
    store(least + at, all.least);
    store(most + at, all.most);
    store(large + at, all.large);
  }
  // Scores of a tile that every row sees, all rows of a lane together.
  LH_INLINE void pool_scores(const ScoreTile<T>& tile, int vectors, Scores<T> more) {
    constexpr int W = kLanes<T>;
    for (int v = 0; v < vectors; ++v) {
      store(keys + v * W, load(keys + v * W) + static_cast<T>(tile.n));
      if (has_large(more)) more.large += count_large<T>(tile.scores + v * W, vectors * W, tile.n);
    }
    if (!weighed) pooled = more;  // the first
    else pooled.join(more);
  }
  // Rows of which neither the sum of weights nor the mean of scores is NaN or infinite.
  LH_INLINE IntVec<T> finite(int at) const {
    Vec<T> probe = load(sum + at);
    if (by_row) probe += load(mean + at);
    return probe * T{0} == T{0};
  }
  // Under a bias, a NaN may be at a pair that it hides from the statistics; and such a pair may have weight.
  LH_INLINE IntVec<T> doubtful(int at) const {
    const IntVec<T> broken = ~finite(at);
    if (!by_row) return broken;
    return broken | (load(hidden_top + at) > load(max + at) + Exp2<T>::floor);
  }
  // Are some scores pooled that belong to a row which is to be left out?
  bool has_lost_rows(int width) const {
    Vec<T> probe = pooled.mean + pooled.least;
    for (int at = 0; at < width; at += kLanes<T>) probe += load(sum + at);
    return any(pooled.count != T{0}) && any(probe * T{0} != T{0});
  }
};

// Σe², Σe³ and Σe·|i - j| of a tile's weights, lane by lane.
template <int Vectors, class T>
struct WeightSums {
  Vec<T> squares[Vectors], cubes[Vectors], distance[Vectors];

  LH_INLINE WeightSums(const ScoreTile<T>& tile, const Panel<T>& panel) {
    constexpr int W = kLanes<T>, Keys = kKeysAtOnce<Vectors>, N = Keys * Vectors;
    Vec<T> s2[N], s3[N], sd[N], away[N];  // key k, vector v: at k * Vectors + v
    LH_UNROLL for (int i = 0; i < N; ++i) {
      s2[i] = s3[i] = sd[i] = Vec<T>{};
      away[i] = load(panel.position + i % Vectors * W) - static_cast<T>(tile.first + i / Vectors);
    }
    const T* weights = tile.scores;
    auto add = [&](int i) LH_INLINE_LAMBDA {
      const Vec<T> e = load(weights + i * W), ee = e * e;
      s2[i] += ee;
      s3[i] = fma(ee, e, s3[i]);
      sd[i] = fma(e, abs<T>(away[i]), sd[i]);
      away[i] -= T{Keys};
    };
    Index j = 0;
    for (; j + Keys <= tile.n; j += Keys, weights += N * W)
      LH_UNROLL for (int i = 0; i < N; ++i) add(i);
    LH_UNROLL for (int k = 0; k + 1 < Keys; ++k)
      if (j + k < tile.n)
        LH_UNROLL for (int v = 0; v < Vectors; ++v) add(k * Vectors + v);
    LH_UNROLL for (int v = 0; v < Vectors; ++v) {
      LH_UNROLL for (int i = v + Vectors; i < N; i += Vectors) {
        s2[v] += s2[i];
        s3[v] += s3[i];
        sd[v] += sd[i];
      }
      squares[v] = s2[v];
      cubes[v] = s3[v];
      distance[v] = sd[v];
    }
  }
};

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

// Raw-score statistics of the masked keys, before they are masked: visible pairs only, and a bias
// as low as "hidden" is written counts as hidden.
template <class T>
inline void measure_masked(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile,
                            RowState<T>& state) {
  constexpr int W = kLanes<T>;
  const T hidden = statistically_hidden<T>(p);
  const T limit = kLarge<T>;
  for (int v = 0; v < panel.vectors; ++v) {
    auto seen = [&](Index j) {
      const Index at = (j - tile.masked_first) * panel.width + v * W;
      IntVec<T> see = tile.hides ? load_mask<T>(tile.mask.visible + at) : ~IntVec<T>{};
      if (tile.mask.has_bias) see &= ~(load(tile.mask.bias + at) <= hidden);
      return see;
    };
    Scores<T> s = Scores<T>::none();
    Vec<T> sum = {}, hidden_top = splat(-kInf<T>);
    for (Index j = tile.masked_first; j < tile.masked_last; ++j) {
      const Vec<T> x = load(tile.scores + j * panel.width + v * W);
      const IntVec<T> see = seen(j);
      s.count += select<T>(see, splat(T{1}), Vec<T>{});
      sum += select<T>(see, x, Vec<T>{});
      s.least = min(s.least, select<T>(see, x, s.least));
      s.most = max(s.most, select<T>(see, x, s.most));
      if (tile.mask.has_bias) {  // |x| is more than what a softcap leaves of it
        const Index at = (j - tile.masked_first) * panel.width + v * W;
        const Vec<T> logit = abs<T>(x) + load(tile.mask.bias + at);
        const IntVec<T> visible = load_mask<T>(tile.mask.visible + at);
        hidden_top = max(select<T>(~see & visible, logit, hidden_top), hidden_top);
      }
    }
    s.mean = sum / max(s.count, splat(T{1}));
    for (Index j = tile.masked_first; j < tile.masked_last; ++j) {
      const Vec<T> x = load(tile.scores + j * panel.width + v * W);
      const IntVec<T> see = seen(j);
      const Vec<T> c = select<T>(see, x - s.mean, Vec<T>{});
      s.m2 = fma(c, c, s.m2);
      s.large += select<T>(see & ((x > limit) | (x < -limit)), splat(T{1}), Vec<T>{});
    }
    state.join_scores(v * W, s);
    store(state.hidden_top + v * W, max(hidden_top, load(state.hidden_top + v * W)));
  }
}

// Two parts of the same rows: `b`'s keys join `a`'s (split decoding).
template <class T>
inline void merge_rows(RowState<T>& a, const RowState<T>& b, int vectors, bool measured) {
  for (int at = 0; at < vectors * kLanes<T>; at += kLanes<T>) {
    const Vec<T> ma = load(a.max + at), mb = load(b.max + at);
    const Vec<T> m = max(ma, mb), shift = finite_shift<T>(m);
    const Vec<T> wa = rescale_factor<T>(ma, m), wb = rescale_factor<T>(mb, m);
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
    store(a.first + at, wa * load(a.first + at) + wb * load(b.first + at));
    a.join_scores(at, b.scores(at));
    store(a.hidden_top + at, max(load(a.hidden_top + at), load(b.hidden_top + at)));
  }
}

// One vector's lanes as parts of `rows` rows, row r in lanes r, r + rows, ... spread_lanes() leaves the
// first of them what the row has and lets the others begin at the row's maximum; merge_lanes() brings
// back to the first what all of them took in since, and the others begin again.
template <class T>
inline void spread_lanes(RowState<T>& state, int rows, bool measured) {
  const IntVec<T> own = iota<T>() < static_cast<T>(rows);
  auto keep = [&](T* x, T others) { store(x, select<T>(own, load(x), splat(others))); };
  for (int lane = rows; lane < kLanes<T>; ++lane) state.max[lane] = state.max[lane - rows];
  keep(state.sum, T{0});
  if (!measured) return;
  for (T* x : state.sums()) keep(x, T{0});
  keep(state.most, -kInf<T>);
  keep(state.least, kInf<T>);
  keep(state.hidden_top, -kInf<T>);
}
template <class T>
inline void merge_lanes(RowState<T>& state, int rows) {
  for (int half = kLanes<T> / 2; half >= rows; half /= 2) {
    for (T* x : {state.tail, state.tail_d, state.tail_2, state.tail_3, state.distance})
      store(x, load(x) + load(x + half));
    state.join_scores(0, state.scores(half));
  }
  spread_lanes(state, rows, true);
}

// From raw scores to what enters the softmax, with the statistics of the raw ones on the way.
template <int Vectors, bool Measured, class T>
inline void mask_tile(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile,
                       RunningMax<Vectors, T>& running, RowState<T>& state) {
  constexpr int W = kLanes<T>;
  if (!only_hides(p, tile)) {
    if constexpr (Measured) measure_masked(p, panel, tile, state);
    return mask_scores(p, panel, tile, running.max);
  }
  if (tile.hides) hide_scores<Vectors>(tile, running);
  if constexpr (Measured) {
    Scores<T> scores[Vectors];
    measure_scores<Vectors>(tile, running, scores);
    LH_UNROLL for (int v = 0; v < Vectors; ++v) {
      if (has_large(scores[v]))
        scores[v].large = count_large<T>(tile.scores + v * W, panel.width, tile.n);
      state.join_scores(v * W, scores[v]);
    }
  }
}

// A step of the online softmax that the rows' statistics take part in, if measured. Where several lanes
// are one row's, one of them has its argmax.
template <int Vectors, bool Measured, class T>
inline void softmax_step(const Panel<T>& panel, const ScoreTile<T>& tile,
                         const RunningMax<Vectors, T>& running, RowState<T>& state, T* rescale,
                         IntVec<T> has_argmax = ~IntVec<T>{}) {
  constexpr int W = kLanes<T>;
  const SoftmaxStep<Vectors, Measured, T> step(tile, running, state, rescale);
  if constexpr (Measured) {
    const Vec<T> one = splat(T{1}), zero = {};
    const WeightSums<Vectors, T> s(tile, panel);
    for (int v = 0; v < Vectors; ++v) {
      const T* column = tile.scores + v * W;
      const IntVec<T> started = step.before[v] > -kInf<T>;
      const IntVec<T> rises = (running.max[v] > step.before[v]) & has_argmax;
      const Vec<T> argmax = select<T>(rises, one, zero);
      Vec<T> e = step.sum[v] - argmax, e2 = s.squares[v] - argmax, e3 = s.cubes[v] - argmax;
      if (const IntVec<T> cancels = rises & (e < T{1}); any(cancels)) {
        Vec<T> t, t2, t3;
        tail_sums<T>(column, Vectors * W, tile.n, t, t2, t3);
        e = select<T>(cancels, t, e);
        e2 = select<T>(cancels, t2, e2);
        e3 = select<T>(cancels, t3, e3);
      }
      if (!state.weighed) {
        store(state.first + v * W, tile.first == 0 ? load(column) : zero);
        store(state.tail + v * W, e);
        store(state.tail_d + v * W, step.sum_d[v]);
        store(state.tail_2 + v * W, e2);
        store(state.tail_3 + v * W, e3);
        store(state.distance + v * W, s.distance[v]);
        continue;
      }
      const Vec<T> join = select<T>(rises & started, one, zero);
      const Vec<T> delta = select<T>(started, step.before[v] - step.shift[v], zero);
      const Vec<T> w = step.scale[v], w2 = w * w, t = load(state.tail + v * W) + join;
      store(state.first + v * W, tile.first == 0 ? load(column) : w * load(state.first + v * W));
      store(state.tail + v * W, fma(w, t, e));
      store(state.tail_d + v * W, fma(w, fma(delta, t, load(state.tail_d + v * W)), step.sum_d[v]));
      store(state.tail_2 + v * W, fma(w2, load(state.tail_2 + v * W) + join, e2));
      store(state.tail_3 + v * W, fma(w2 * w, load(state.tail_3 + v * W) + join, e3));
      store(state.distance + v * W, fma(w, load(state.distance + v * W), s.distance[v]));
    }
    state.weighed = true;
  }
}

}  // namespace levelhead::LEVELHEAD_ISA
