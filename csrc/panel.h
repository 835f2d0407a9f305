// The rows that share one tile of scores, and which keys they see. Causal, window, query_offset and
// key_lengths together leave every query one interval of keys (the band); a dense mask (mask.h) cuts
// further holes into it.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace levelhead::LEVELHEAD_ISA {

template <class T>
constexpr int kMaxLanes = kMaxVectors * kLanes<T>;

// The keys [low(i), high(i)) that query i of a batch entry may see. Both ends grow with i.
struct Band {
  Index left, right, offset, length;

  Band(const Problem& p, Index batch)
      : left(p.left), right(p.right), offset(p.offset(batch)), length(p.length(batch)) {}
  Index low(Index i) const { return std::clamp<Index>(offset + i - left, 0, length); }
  Index high(Index i) const {
    return std::max(low(i), std::clamp<Index>(offset + i + right + 1, 0, length));
  }
};

// The rows that share one tile of scores, one per lane; their number is at most `width`, a multiple
// of the vector length. Lanes past `n` compute on zeros and are never looked at.
template <class T>
struct Panel {
  int vectors = 0, width = 0, n = 0;
  Index batch = 0;
  Index head[kMaxLanes<T>], query[kMaxLanes<T>];
  alignas(64) Int<T> low[kMaxLanes<T>], high[kMaxLanes<T>];  // the band, by lane
  alignas(64) T position[kMaxLanes<T>];
  Index first = 0, last = 0;              // keys that some lane sees
  Index inner_first = 0, inner_last = 0;  // keys that every lane sees (before a dense mask)
  // Queries are multiplied by the scale when they are packed, which is quick and rounds them. The scale is
  // late, and multiplied to the products by two factors, where it is so large that queries might
  // overflow, or where that rounding would matter.
  bool is_late = false;
  alignas(64) T late[2][kMaxLanes<T>];

  void set_scale(const Problem& p, bool exact) {
    constexpr double large = 0x1p20, small = 0x1p-20;  // a small one must go to the queries
    auto size = [&](int lane) { return std::abs(p.scale_of(head[std::min(lane, n - 1)])); };
    is_late = false;
    for (int lane = 0; lane < n && (lane == 0 || p.scales); ++lane)
      is_late |= size(lane) > large || (exact && size(lane) > small);
    for (int lane = 0; is_late && lane < width; ++lane) {
      const double whole = p.scale_of(head[std::min(lane, n - 1)]) * kLog2e;
      const double part = size(lane) > large ? std::scalbn(1.0, std::ilogb(whole) / 2) : 1.0;
      constexpr double most = std::numeric_limits<T>::max();
      late[0][lane] = static_cast<T>(std::clamp(whole / part, -most, most));
      late[1][lane] = static_cast<T>(std::min(part, most));
    }
  }
  // What a query of this head is multiplied by, so that scores are in units of ln 2.
  T query_factor(const Problem& p, Index h) const {
    return is_late ? T{1} : static_cast<T>(p.scale_of(h) * kLog2e);
  }

  // After n, head and query are set. `exact`: see set_scale().
  void place(const Problem& p, const Band& band, bool exact = false) {
    set_scale(p, exact);
    for (int lane = 0; lane < width; ++lane)
      position[lane] = static_cast<T>(band.offset + query[std::min(lane, n - 1)]);
    if (p.left == kOpen && p.right == kOpen) {
      first = inner_first = 0;
      last = inner_last = band.length;
      std::fill_n(low, width, Int<T>{0});
      std::fill_n(high, width, static_cast<Int<T>>(band.length));
      return;
    }
    first = inner_last = p.keys;
    last = inner_first = 0;
    for (int lane = 0; lane < width; ++lane) {
      const Index i = query[std::min(lane, n - 1)];
      const Index l = band.low(i), h = band.high(i);
      low[lane] = static_cast<Int<T>>(l);
      high[lane] = static_cast<Int<T>>(h);
      if (l < h) {
        first = std::min(first, l);
        last = std::max(last, h);
      }
      inner_first = std::max(inner_first, l);
      inner_last = std::min(inner_last, h);
    }
    if (last < first) first = last = 0;
    if (inner_last < inner_first) inner_first = inner_last = last;
  }
};

// Rows are cut into panels of 3 vectors, with a remainder of 2s: 8 vectors are 3 + 3 + 2 and 7 are
// 3 + 2 + 2, because a panel of one vector cannot keep the multipliers busy.
template <class T>
struct PanelCut {
  Index rows, origin, threes, panels;

  explicit PanelCut(Index n, Index first = 0) : rows(n), origin(first) {
    const Index vectors = (n + kLanes<T> - 1) / kLanes<T>;
    const Index twos = vectors % 3 == 0 ? 0 : vectors % 3 == 2 ? 1 : vectors >= 4 ? 2 : 0;
    threes = (vectors - 2 * twos) / 3;
    panels = threes + twos + (vectors == 1);
  }
  Index start(Index i) const {
    return std::min(rows, kLanes<T> * (i <= threes ? 3 * i : 3 * threes + 2 * (i - threes)));
  }
  void cut(const Problem& p, Index batch, Index head, Index i, Panel<T>& panel,
           bool exact = false) const {
    const Index first = start(i);
    panel.n = static_cast<int>((i + 1 == panels ? rows : start(i + 1)) - first);
    panel.vectors = (panel.n + kLanes<T> - 1) / kLanes<T>;
    panel.width = panel.vectors * kLanes<T>;
    panel.batch = batch;
    for (int lane = 0; lane < panel.n; ++lane) {
      panel.head[lane] = head;
      panel.query[lane] = origin + first + lane;
    }
    panel.place(p, Band(p, batch), exact);
  }
};

// Calls f.template operator()<Vectors>() with the panel's number of vectors.
template <class F>
LH_INLINE void with_vectors(int vectors, F f) {
  switch (vectors) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    default: return f(std::integral_constant<int, 3>{});
  }
}

}  // namespace levelhead::LEVELHEAD_ISA
