// The tile of scores of one panel, from raw products to weights. Scores are kept in units of ln 2
// (the queries are packed times scale·log2(e)), so that the exponential is 2^x without a product.
#pragma once

#include "mask.h"
#include "scores.h"
#include "workspace.h"

namespace levelhead::LEVELHEAD_ISA {

// scores[key][lane] for n keys from number `first` on. Keys [dressed_first, dressed_last) of the
// tile are those that a mask, a bias or the softcap touches; the others are what the product gave.
template <class T>
struct ScoreTile {
  T* scores;
  Index first = 0, n = 0;
  Index dressed_first = 0, dressed_last = 0;
  TileMask<T> mask = {};  // for the dressed keys
  bool hides = false;     // some dressed pair is hidden
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
// which need dressing. False if nobody sees any.
template <class T>
inline bool prepare_tile(const Problem& p, const Panel<T>& panel, Index from, Index to,
                         const TileBuffer<T>& buffer, ScoreTile<T>& tile) {
  from = std::max(from, panel.first);
  to = std::min(to, panel.last);
  if (from >= to) return false;
  Index dress_from = from, dress_to = to;
  const bool all = p.mask || p.softcap > 0;
  if (!all) {
    if (from >= panel.inner_first) dress_from = std::max(from, panel.inner_last);
    if (to <= panel.inner_last) dress_to = std::min(to, panel.inner_first);
  }
  tile.scores = buffer.scores;
  tile.mask = {buffer.visible, buffer.bias, false};
  tile.hides = false;
  if (dress_from >= dress_to) {
    dress_from = dress_to = from;
  } else if (p.mask || from < panel.inner_first || to > panel.inner_last) {
    const bool at_start = dress_from == from, at_end = dress_to == to;
    tile.hides = fill_mask(p, panel, dress_from, dress_to, tile.mask);
    if (at_start) from = dress_from;
    if (at_end) to = dress_to;
    if (from >= to) return false;
    if (!tile.hides && p.softcap == 0 && !tile.mask.has_bias) dress_from = dress_to = from;
  }
  tile.first = from;
  tile.n = to - from;
  tile.dressed_first = dress_from - from;
  tile.dressed_last = dress_to - from;
  return true;
}

// A row that has seen nothing has the maximum -inf; 0 in its place keeps -inf - max from being NaN.
template <class T>
LH_INLINE Vec<T> finite_shift(Vec<T> top) {
  return select<T>(top == -kInf<T>, Vec<T>{}, top);
}

// The largest of a tile's scores that were seen so far, lane by lane.
template <int Vectors, class T>
struct Seen {
  Vec<T> max[Vectors];

  LH_INLINE Seen() {
    LH_UNROLL for (int v = 0; v < Vectors; ++v) max[v] = splat(-kInf<T>);
  }
};

// Sums down the columns of a tile go over enough keys side by side that none waits for the one before.
template <int Vectors>
constexpr int kKeysAtOnce = Vectors == 1 ? 4 : Vectors == 2 ? 2 : 1;

// Scores of the tile's keys [from, to); `keys.row(0)` is the tile's first key. The last step of
// four may repeat a key into up to three rows after `to`, which are written again or not read.
template <int Vectors, class T>
inline void multiply_scores(RowBlock<T> keys, Index from, Index to, const T* packed_query, Index dim,
                            T* scores, Seen<Vectors, T>& seen) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  Vec<T> top[Vectors];
  LH_UNROLL for (int v = 0; v < Vectors; ++v) top[v] = seen.max[v];
  for (Index j = from; j < to; j += kTileRows) {
    const T* a[kTileRows];
    for (int r = 0; r < kTileRows; ++r) a[r] = keys.row(std::min(j + r, to - 1));
    multiply<kTileRows, Vectors, true>(
        dim, a, 1, packed_query, width, [&](int r, int v, Vec<T> x) LH_INLINE_LAMBDA {
          store(scores + (j + r) * width + v * W, x);
          top[v] = max(top[v], x);
        });
  }
  LH_UNROLL for (int v = 0; v < Vectors; ++v) seen.max[v] = top[v];
}

// Multiplies a late scale to the products of keys [from, to), and takes in their maximum.
template <int Vectors, class T>
inline void scale_scores(const Panel<T>& panel, T* scores, Index from, Index to,
                         Seen<Vectors, T>& seen) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  for (T* at = scores + from * width; at < scores + to * width; at += width)
    LH_UNROLL for (int v = 0; v < Vectors; ++v) {
      const Vec<T> x = load(at + v * W) * load(panel.late[0] + v * W) * load(panel.late[1] + v * W);
      store(at + v * W, x);
      seen.max[v] = max(seen.max[v], x);
    }
}

// A tile's scores, before they are dressed; `seen` takes in those that stay as they are.
template <int Vectors, class T>
inline void score_tile(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile,
                       RowBlock<T> keys, const T* packed_query, Seen<Vectors, T>& seen) {
  Seen<Vectors, T> ignored;
  auto score = [&](Index from, Index to, Seen<Vectors, T>& takes_in) {
    Seen<Vectors, T>& products = panel.is_late ? ignored : takes_in;
    multiply_scores<Vectors>(keys, from, to, packed_query, p.key_dim, tile.scores, products);
    if (panel.is_late) scale_scores(panel, tile.scores, from, to, takes_in);
  };
  score(0, tile.dressed_first, seen);
  score(tile.dressed_first, tile.dressed_last, ignored);
  score(tile.dressed_last, tile.n, seen);
}

// Do the dressed keys keep their raw score or lose it to -inf, and nothing else?
template <class T>
LH_INLINE bool only_hides(const Problem& p, const ScoreTile<T>& tile) {
  return p.softcap == 0 && !tile.mask.has_bias;
}

// Hides what the mask hides among the dressed keys, and takes in the maximum of the others.
template <int Vectors, class T>
inline void hide_scores(const ScoreTile<T>& tile, Seen<Vectors, T>& seen) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  Vec<T> top[Vectors];
  LH_UNROLL for (int v = 0; v < Vectors; ++v) top[v] = seen.max[v];
  const std::int8_t* visible = tile.mask.visible;
  T* const end = tile.scores + tile.dressed_last * width;
  for (T* at = tile.scores + tile.dressed_first * width; at < end;)
    LH_UNROLL for (int v = 0; v < Vectors; ++v, at += W, visible += W) {
      const Vec<T> x = select<T>(load_mask<T>(visible), load(at), splat(-kInf<T>));
      store(at, x);
      top[v] = max(top[v], x);
    }
  LH_UNROLL for (int v = 0; v < Vectors; ++v) seen.max[v] = top[v];
}

// Statistics of a tile's visible scores, row by row, in one pass after hide_scores(). The pivots are
// the middle of three of the scores (the maximum for one that is hidden).
template <int Vectors, class T>
inline void measure_scores(const ScoreTile<T>& tile, const Seen<Vectors, T>& seen,
                           Scores<T> (&scores)[Vectors]) {
  constexpr int W = kLanes<T>, Keys = kKeysAtOnce<Vectors>, N = Keys * Vectors;
  constexpr Index width = Vectors * W;
  Vec<T> pivot[Vectors], least[N], sum[N], squares[N];  // key k, vector v: at k * Vectors + v
  IntVec<T> shown[N];  // of the dressed keys
  const Vec<T> one = splat(T{1});
  LH_UNROLL for (int v = 0; v < Vectors; ++v) {
    auto sample = [&](Index j) LH_INLINE_LAMBDA {
      const Vec<T> x = load(tile.scores + j * width + v * W);
      return tile.hides ? select<T>(x == -kInf<T>, finite_shift<T>(seen.max[v]), x) : x;
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
    const std::int8_t* visible = tile.mask.visible;  // of the dressed keys
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
  take_in(0, tile.dressed_first, std::false_type{});
  take_in(tile.dressed_first, tile.dressed_last, std::true_type{});
  take_in(tile.dressed_last, tile.n, std::false_type{});
  const T undressed = static_cast<T>(tile.n - (tile.dressed_last - tile.dressed_first));
  LH_UNROLL for (int v = 0; v < Vectors; ++v) {
    LH_UNROLL for (int i = v + Vectors; i < N; i += Vectors) {
      least[v] = min(least[v], least[i]);
      sum[v] += sum[i];
      squares[v] += squares[i];
      shown[v] += shown[i];
    }
    const Vec<T> count = __builtin_convertvector(shown[v], Vec<T>) + undressed;
    const Vec<T> shift = sum[v] / max(count, splat(T{1}));
    const Vec<T> m2 = max(Vec<T>{}, fma(-sum[v], shift, squares[v]));
    const Vec<T> lowest = select<T>(count == T{0}, splat(kInf<T>), least[v] + pivot[v]);
    scores[v] = {count, pivot[v] + shift, m2, lowest, seen.max[v], Vec<T>{}};
  }
}

// Statistics of a tile that every row sees whole, for all rows of a lane together. The pivot is the
// middle of three of the scores here too.
template <int Vectors, class T>
inline Scores<T> pooled_scores(const ScoreTile<T>& tile, const Seen<Vectors, T>& seen) {
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
  Vec<T> most = seen.max[0];
  LH_UNROLL for (int v = 1; v < Vectors; ++v) most = max(most, seen.max[v]);
  return {count, pivot + shift, max(Vec<T>{}, m2), pivot + min(least[0], least[1]), most, Vec<T>{}};
}

// Softcap, bias and hiding on the dressed keys: raw scores become what enters the softmax.
template <class T>
inline void dress_scores(const Problem& p, const Panel<T>& panel, const ScoreTile<T>& tile,
                         Vec<T>* top) {
  constexpr int W = kLanes<T>;
  const T cap = static_cast<T>(p.softcap * kLog2e), per_cap = T{1} / cap;
  const T uncapped = cap * static_cast<T>(sizeof(T) == 4 ? 0x1p-12 : 0x1p-26);  // tanh t = t - t³/3
  for (int v = 0; v < panel.vectors; ++v) {
    Vec<T> highest = top[v];
    for (Index j = tile.dressed_first; j < tile.dressed_last; ++j) {
      T* at = tile.scores + j * panel.width + v * W;
      const Index mask_at = (j - tile.dressed_first) * panel.width + v * W;
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

}  // namespace levelhead::LEVELHEAD_ISA
