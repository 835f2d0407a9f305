// The tile of scores of one panel, from raw products to weights. Scores are kept in units of ln 2
// (the queries are packed times scale·log2(e)), so that the exponential is 2^x without a product.
#pragma once

#include "mask.h"
#include "workspace.h"

namespace levelhead::LEVELHEAD_ISA {

// scores[key][lane] for n keys from number `first` on. Keys [masked_first, masked_last) of the
// tile are those that a mask, a bias or the softcap touches; the others are what the product gave.
template <class T>
struct ScoreTile {
  T* scores;
  Index first = 0, n = 0;
  Index masked_first = 0, masked_last = 0;
  TileMask<T> mask = {};  // for the masked keys
  bool hides = false;     // some masked pair is hidden
};

// Memory of one tile of up to `keys` keys.
template <class T>
struct TileBuffer {
  T* scores;
  std::int8_t* visible;
  T* bias;

  static std::size_t room(const Problem& p, Index keys) {
    const Index n = (keys + kTileRows) * kMaxLanes<T>;
    return Workspace::room<T>(n) * (1 + p.mask.operator bool()) + Workspace::room<std::int8_t>(n);
  }
  TileBuffer(const Problem& p, Index keys, Workspace& workspace) {
    const Index n = (keys + kTileRows) * kMaxLanes<T>;
    scores = workspace.take<T>(n);
    visible = workspace.take<std::int8_t>(n);
    bias = p.mask ? workspace.take<T>(n) : nullptr;
  }
};

// Sets up the tile of a panel's scores for keys among [from, to): which of them anyone sees, and
// which need masking. False if nobody sees any.
template <class T>
inline bool prepare_tile(const Problem& p, const Panel<T>& panel, Index from, Index to,
                         const TileBuffer<T>& buffer, ScoreTile<T>& tile) {
  from = std::max(from, panel.first);
  to = std::min(to, panel.last);
  if (from >= to) return false;
  Index mask_from = from, mask_to = to;
  const bool all = p.mask || p.softcap > 0;
  if (!all) {
    if (from >= panel.inner_first) mask_from = std::max(from, panel.inner_last);
    if (to <= panel.inner_last) mask_to = std::min(to, panel.inner_first);
  }
  tile.scores = buffer.scores;
  tile.mask = {buffer.visible, buffer.bias, false};
  tile.hides = false;
  if (mask_from >= mask_to) {
    mask_from = mask_to = from;
  } else if (p.mask || from < panel.inner_first || to > panel.inner_last) {
    const bool at_start = mask_from == from, at_end = mask_to == to;
    tile.hides = fill_mask(p, panel, mask_from, mask_to, tile.mask);
    if (at_start) from = mask_from;
    if (at_end) to = mask_to;
    if (from >= to) return false;
    if (!tile.hides && p.softcap == 0 && !tile.mask.has_bias) mask_from = mask_to = from;
  }
  tile.first = from;
  tile.n = to - from;
  tile.masked_first = mask_from - from;
  tile.masked_last = mask_to - from;
  return true;
}

// A row that has seen nothing has the maximum -inf; 0 in its place keeps -inf - max from being NaN.
template <class T>
LH_INLINE Vec<T> finite_shift(Vec<T> top) {
  return select<T>(top == -kInf<T>, Vec<T>{}, top);
}

// The largest of a tile's scores that were seen so far, lane by lane.
template <int Vectors, class T>
struct RunningMax {
  Vec<T> max[Vectors];

  LH_INLINE RunningMax() {
    LH_UNROLL for (int v = 0; v < Vectors; ++v) max[v] = splat(-kInf<T>);
  }
};

// Scores of the tile's keys [from, to); `keys.row(0)` is the tile's first key. The last step of
// four may repeat a key into up to three rows after `to`, which are written again or not read.
template <int Vectors, class T>
inline void multiply_scores(RowBlock<T> keys, Index from, Index to, const T* packed_query, Index dim,
                            T* scores, RunningMax<Vectors, T>& running) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  Vec<T> top[Vectors];
  LH_UNROLL for (int v = 0; v < Vectors; ++v) top[v] = running.max[v];
  for (Index j = from; j < to; j += kTileRows) {
    const T* a[kTileRows];
    for (int r = 0; r < kTileRows; ++r) a[r] = keys.row(std::min(j + r, to - 1));
    multiply<kTileRows, Vectors, true>(
        dim, a, 1, packed_query, width, [&](int r, int v, Vec<T> x) LH_INLINE_LAMBDA {
          store(scores + (j + r) * width + v * W, x);
          top[v] = max(top[v], x);
        });
  }
  LH_UNROLL for (int v = 0; v < Vectors; ++v) running.max[v] = top[v];
}

// Multiplies a late scale to the products of keys [from, to), and takes in their maximum.
template <int Vectors, class T>
inline void scale_scores(const Panel<T>& panel, T* scores, Index from, Index to,
                         RunningMax<Vectors, T>& running) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  for (T* at = scores + from * width; at < scores + to * width; at += width)
    LH_UNROLL for (int v = 0; v < Vectors; ++v) {
      const Vec<T> x = load(at + v * W) * load(panel.late[0] + v * W) * load(panel.late[1] + v * W);
      store(at + v * W, x);
      running.max[v] = max(running.max[v], x);
    }
}

// A tile's scores, before they are masked; `running` takes in those that stay as they are.
template <int Vectors, class T>
inline void score_tile(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile,
                       RowBlock<T> keys, const T* packed_query, RunningMax<Vectors, T>& running) {
  RunningMax<Vectors, T> ignored;
  auto score = [&](Index from, Index to, RunningMax<Vectors, T>& takes_in) {
    RunningMax<Vectors, T>& products = panel.is_late ? ignored : takes_in;
    multiply_scores<Vectors>(keys, from, to, packed_query, p.key_dim, tile.scores, products);
    if (panel.is_late) scale_scores(panel, tile.scores, from, to, takes_in);
  };
  score(0, tile.masked_first, running);
  score(tile.masked_first, tile.masked_last, ignored);
  score(tile.masked_last, tile.n, running);
}

// Do the masked keys keep their raw score or lose it to -inf, and nothing else?
template <class T>
LH_INLINE bool only_hides(const Problem& p, const ScoreTile<T>& tile) {
  return p.softcap == 0 && !tile.mask.has_bias;
}

// Hides what the mask hides among the masked keys, and takes in the maximum of the others.
template <int Vectors, class T>
inline void hide_scores(const ScoreTile<T>& tile, RunningMax<Vectors, T>& running) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  Vec<T> top[Vectors];
  LH_UNROLL for (int v = 0; v < Vectors; ++v) top[v] = running.max[v];
  const std::int8_t* visible = tile.mask.visible;
  T* const end = tile.scores + tile.masked_last * width;
  for (T* at = tile.scores + tile.masked_first * width; at < end;)
    LH_UNROLL for (int v = 0; v < Vectors; ++v, at += W, visible += W) {
      const Vec<T> x = select<T>(load_mask<T>(visible), load(at), splat(-kInf<T>));
      store(at, x);
      top[v] = max(top[v], x);
    }
  LH_UNROLL for (int v = 0; v < Vectors; ++v) running.max[v] = top[v];
}

// Softcap, bias and hiding on the masked keys: raw scores become what enters the softmax.
template <class T>
inline void mask_scores(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile,
                         Vec<T>* top) {
  constexpr int W = kLanes<T>;
  const T cap = static_cast<T>(p.softcap * kLog2e), per_cap = T{1} / cap;
  const T uncapped = cap * static_cast<T>(sizeof(T) == 4 ? 0x1p-12 : 0x1p-26);  // tanh t = t - t³/3
  for (int v = 0; v < panel.vectors; ++v) {
    Vec<T> highest = top[v];
    for (Index j = tile.masked_first; j < tile.masked_last; ++j) {
      T* at = tile.scores + j * panel.width + v * W;
      const Index mask_at = (j - tile.masked_first) * panel.width + v * W;
      Vec<T> x = load(at);
      if (p.softcap > 0)  // far below the cap there is none, and x / cap may be too small a number
        x = select<T>(abs<T>(x) < uncapped, x, tanh<T>(x * per_cap) * cap);
      if (tile.mask.has_bias) x += load(tile.mask.bias + mask_at);
      if (tile.hides) x = select<T>(load_mask<T>(tile.mask.visible + mask_at), x, splat(-kInf<T>));
      store(at, x);
      highest = max(highest, x);
    }
    top[v] = highest;
  }
}

// Replaces scores by e = 2^d, d = score - shift, and gives Σe; if measured, Σe·d too.
template <int Vectors, bool Measured, class T>
LH_INLINE void exponentiate(T* scores, Index n, const Vec<T>* shift, Vec<T>* sum, Vec<T>* sum_d) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  constexpr int Chains = Measured ? 2 : 4;  // as many as there are registers for
  Vec<T> s[Vectors], sd[Vectors], m[Vectors];
  LH_UNROLL for (int v = 0; v < Vectors; ++v) {
    s[v] = sd[v] = Vec<T>{};
    m[v] = shift[v];
  }
  auto weigh = [&](auto chains, T* at, int v, Vec<T>* e) LH_INLINE_LAMBDA {
    Vec<T> d[chains], weights[chains];
    for (int i = 0; i < chains; ++i) d[i] = clamp_exp2<T>(load(at + i * width) - m[v]);
    exp2_clamped<chains, T>(d, weights);
    for (int i = 0; i < chains; ++i) {
      e[i] = weights[i];
      store(at + i * width, e[i]);
      if constexpr (Measured) sd[v] = fma(e[i], d[i], sd[v]);
    }
  };
  Index j = 0;
  for (; j + 4 <= n; j += 4)
    LH_UNROLL for (int v = 0; v < Vectors; ++v) {
      Vec<T> e[4];
      LH_UNROLL for (int i = 0; i < 4; i += Chains)
        weigh(std::integral_constant<int, Chains>{}, scores + (j + i) * width + v * W, v, e + i);
      s[v] += (e[0] + e[1]) + (e[2] + e[3]);
    }
  for (; j < n; ++j)
    LH_UNROLL for (int v = 0; v < Vectors; ++v) {
      Vec<T> e[1];
      weigh(std::integral_constant<int, 1>{}, scores + j * width + v * W, v, e);
      s[v] += e[0];
    }
  LH_UNROLL for (int v = 0; v < Vectors; ++v) {
    sum[v] = s[v];
    sum_d[v] = sd[v];
  }
}

// The factor that brings what was accumulated relative to one maximum to a larger one.
template <class T>
LH_INLINE Vec<T> rescale_factor(Vec<T> before, Vec<T> top) {
  return exp2<T>(before - finite_shift<T>(top));
}

// The softmax of rows whose keys go by: their largest score so far, in units of ln 2, and the sum of
// 2^(score - max).
template <class T>
struct OnlineSoftmax {
  static constexpr int N = kMaxLanes<T>;
  alignas(64) T max[N];
  T sum[N];

  void start() {
    LH_UNROLL for (int at = 0; at < N; at += kLanes<T>) {
      store(max + at, splat(-kInf<T>));
      store(sum + at, Vec<T>{});
    }
  }
};

// One step of the online softmax: the tile's scores become weights relative to the new maximum, and the
// rows take them in. `rescale` receives what everything accumulated so far must be multiplied by. What
// the statistics need of the step stays here.
template <int Vectors, bool Measured, class T>
struct SoftmaxStep {
  Vec<T> before[Vectors], shift[Vectors], scale[Vectors];  // the maximum before; the new one; rescale
  Vec<T> sum[Vectors], sum_d[Vectors];                     // Σe and, if measured, Σe·d of the tile

  LH_INLINE SoftmaxStep(const ScoreTile<T>& tile, const RunningMax<Vectors, T>& running,
                        OnlineSoftmax<T>& rows, T* rescale) {
    constexpr int W = kLanes<T>;
    for (int v = 0; v < Vectors; ++v) {
      before[v] = load(rows.max + v * W);
      const Vec<T> top = max(before[v], running.max[v]);
      shift[v] = finite_shift<T>(top);
      scale[v] = rescale_factor<T>(before[v], top);
      store(rows.max + v * W, top);
      store(rescale + v * W, scale[v]);
    }
    exponentiate<Vectors, Measured>(tile.scores, tile.n, shift, sum, sum_d);
    for (int v = 0; v < Vectors; ++v)
      store(rows.sum + v * W, fma(load(rows.sum + v * W), scale[v], sum[v]));
  }
};

}  // namespace levelhead::LEVELHEAD_ISA
