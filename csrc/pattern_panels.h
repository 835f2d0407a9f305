// Patterns from sums over the rows of panels, where all keys are in one tile: then its weights are those of the
// softmax but for a factor per row, and can be added up where they are, rows side by side in lanes.
#pragma once

#include "pattern_rows.h"

namespace levelhead::LEVELHEAD_ISA {

// Sums over the sampled rows of a panel: by key from `first_key` on, and by row - key from `first_offset` on.
template <class T>
struct PanelSums {
  Index rows = 0, first_key, keys, first_offset, offsets;

  T* by_key() { return reinterpret_cast<T*>(this + 1); }
  T* by_offset() { return by_key() + keys; }

  static constexpr int W = kLanes<T>;
  static constexpr Index blocks(Index keys) { return (keys + W - 1) / W; }
  static constexpr Index size(Index keys) {
    return (static_cast<Index>(sizeof(PanelSums) / sizeof(T)) + (2 * blocks(keys) + kMaxVectors + 1) * W +
            15) / 16 * 16;
  }
  static constexpr Index scratch_size(Index keys) { return (blocks(keys) + kMaxVectors + 1) * W * W; }

  // A tile of all keys after its step of the softmax, which says by what its rows must be multiplied; `taken`
  // says which of them to add.
  template <int Vectors>
  void add(const Panel<T>& panel, const ScoreTile<T>& tile, const T* factors, const Int<T>* taken,
           T* scratch) {
    constexpr Index width = Vectors * W;
    Vec<T> factor[Vectors];
    IntVec<T> take[Vectors];
    LH_UNROLL for (int v = 0; v < Vectors; ++v) {
      factor[v] = load(factors + v * W);
      take[v] = load(taken + v * W);
    }
    // Key a·W + m of the tile and vector v of the rows lie on W diagonals next to each other, and on the same
    // ones W keys and a vector further. So for each m and v - a there is a vector of sums, in that order, with
    // zeros around those of an m: their diagonals are one apart from those of the next.
    const Index last = blocks(tile.n) - 1, stride = (last + Vectors + 2) * W;
    auto sums = [&](int m, Index a, int v) { return scratch + m * stride + (last + 1 - a + v) * W; };
    for (int m = 0; m < W; ++m) {
      store(sums(m, last + 1, 0), Vec<T>{});
      for (int v = 1; v <= Vectors; ++v) store(sums(m, 0, v), Vec<T>{});
    }
    first_key = tile.first;
    keys = (last + 1) * W;
    auto add_key = [&](Index a, int m) LH_INLINE_LAMBDA {
      const T* from = tile.scores + (a * W + m) * width;
      Vec<T> key = {};
      LH_UNROLL for (int v = 0; v < Vectors; ++v) {
        // What a row that is left out holds may be NaN.
        const Vec<T> weight = (Vec<T>)((IntVec<T>)(load(from + v * W) * factor[v]) & take[v]);
        key += weight;
        T* diagonal = sums(m, a, v);
        store(diagonal, v == 0 ? weight : load(diagonal) + weight);  // none were there before the first rows'
      }
      return key;
    };
    for (Index a = 0; a < tile.n / W; ++a) {
      Vec<T> key[W];
      LH_UNROLL for (int m = 0; m < W; ++m) key[m] = add_key(a, m);
      store(by_key() + a * W, sum_each(key));
    }
    if (const int rest = static_cast<int>(tile.n % W)) {
      store(by_key() + last * W, Vec<T>{});
      for (int m = 0; m < rest; ++m) by_key()[last * W + m] = sum<T>(add_key(last, m));
      for (int m = rest; m < W; ++m) store(sums(m, last, 0), Vec<T>{});
    }
    first_offset = panel.query[0] - tile.first - keys + 1;
    offsets = (last + Vectors + 1) * W;
    for (Index x = 0; x < offsets; x += W) {
      Vec<T> sum = {};
      LH_UNROLL for (int m = 0; m < W; ++m) sum += load(scratch + m * stride + x + 1 + m);
      store(by_offset() + x, sum);
    }
  }

  // A row of the panel by itself.
  void add_exactly(const Problem& p, const Panel<T>& panel, int lane) {
    const Index query = panel.query[lane];
    rows += exact_weights<T>(p, panel.batch, panel.head[lane], query, [&](Index key, double weight) {
      by_key()[key - first_key] += static_cast<T>(weight);
      by_offset()[query - key - first_offset] += static_cast<T>(weight);
    });
  }
};

// The patterns of a prefill: from sums of its panels, if all keys are in one block and panels are not mostly of
// rows that are not sampled; else from rows.
template <class T>
class PrefillPatterns {
 public:
  struct Work {
    PanelSums<T>* sums = nullptr;
    T* scratch;
    SampledLanes<T> lanes;
  };

  PrefillPatterns(const Problem& problem, const PanelCut<T>& cut, Index block)
      : p(problem), panels(cut.panels), wanted(has_patterns(p)),
        by_panel(p.keys <= block && p.queries <= 4 * most_sampled_rows(p)), kept(p, block) {}

  // How many numbers a head leaves, and how many a panel or write() need for themselves.
  Index head_size() const {
    return !wanted ? 0 : by_panel ? panels * PanelSums<T>::size(p.keys) : kept.head_size();
  }
  Index scratch_size() const {
    constexpr int W = kLanes<T>;
    if (!wanted) return 0;
    if (!by_panel) return kept.scratch_size();
    return std::max(PanelSums<T>::scratch_size(p.keys), 2 * p.keys + p.queries + kMaxLanes<T> + 4 * W);
  }

  // Panel number i of a head begins, which leaves its rows at `head`.
  void start(Work& work, const Panel<T>& panel, Index i, T* head, T* scratch) const {
    if (!wanted) return;
    if (by_panel) {
      work.sums = new (head + i * PanelSums<T>::size(p.keys)) PanelSums<T>;
      work.scratch = scratch;
    } else {
      kept.place(work.lanes, panel, 0, panel.n, head);
      kept.start(work.lanes, 0, p.keys);
    }
  }
  void take(Work& work, const Panel<T>& panel, const ScoreTile<T>& tile, const RowState<T>& state) const {
    if (work.sums)
      add_rows(work, panel, tile, state);
    else
      kept.take(work.lanes, tile, panel.width, state.max);
  }
  void finish(const Work& work, const Panel<T>& panel, const RowState<T>& state) const {
    kept.finish(work.lanes, panel, state);
  }
  void write(Index batch, T* head, T* scratch, double* sums) const {
    if (!wanted) return;
    if (by_panel)
      write_panels(batch, head, scratch, sums);
    else
      kept.write(batch, head, scratch, sums);
  }

 private:
  const Problem& p;
  const Index panels;
  const bool wanted, by_panel;
  const KeptRows<T> kept;

  __attribute__((noinline)) void add_rows(Work& work, const Panel<T>& panel, const ScoreTile<T>& tile,
                                          const RowState<T>& state) const {
    constexpr int W = kLanes<T>;
    alignas(64) T factor[kMaxLanes<T>];
    alignas(64) Int<T> sampled[kMaxLanes<T>] = {}, doubtful[kMaxLanes<T>];
    const Index first = panel.query[0];
    Sample(p, panel.batch).among(first, first + panel.n, [&](Index, Index row) { sampled[row - first] = -1; });
    // Which rows were lost is known only after their scores are measured again.
    const IntVec<T> lost = splat(static_cast<Int<T>>(state.has_lost_rows(panel.width) ? -1 : 0));
    IntVec<T> any_doubt = {};
    for (int at = 0; at < panel.width; at += W) {
      IntVec<T> doubts = row_factors(p, state, at, factor + at) | lost;
      doubts &= load(sampled + at);
      store(doubtful + at, doubts);
      any_doubt |= doubts;
      const IntVec<T> taken = load(sampled + at) & ~doubts & (load(factor + at) != T{0});
      store(sampled + at, taken);
      work.sums->rows += number_of<T>(taken);
    }
    with_vectors(panel.vectors, [&](auto vectors) {
      work.sums->template add<vectors>(panel, tile, factor, sampled, work.scratch);
    });
    for (int lane = 0; any(any_doubt) && lane < panel.n; ++lane)
      if (doubtful[lane]) work.sums->add_exactly(p, panel, lane);
  }

  void write_panels(Index batch, T* head, T* scratch, double* sums) const {
    constexpr int W = kLanes<T>;
    auto panel = [&](Index i) -> PanelSums<T>& {
      return *reinterpret_cast<PanelSums<T>*>(head + i * PanelSums<T>::size(p.keys));
    };
    Index rows = 0, first = p.queries, last = -p.keys;  // offsets
    for (Index i = 0; i < panels; ++i)
      if (PanelSums<T>& part = panel(i); part.rows > 0) {
        rows += part.rows;
        first = std::min(first, part.first_offset);
        last = std::max(last, part.first_offset + part.offsets);
      }
    if (rows == 0) return;
    const Index keys = p.keys + W;
    T *by_key = scratch, *by_offset = scratch + keys;
    std::fill_n(scratch, keys + last - first, T{0});
    auto add = [](T* to, const T* more, Index n) {
      for (Index x = 0; x < n; x += W) store(to + x, load(to + x) + load(more + x));
    };
    for (Index i = 0; i < panels; ++i)
      if (PanelSums<T>& part = panel(i); part.rows > 0) {
        add(by_key + part.first_key, part.by_key(), part.keys);
        add(by_offset + part.first_offset - first, part.by_offset(), part.offsets);
      }
    auto behind = [&](Index offset) {
      const Index at = offset - p.offset(batch);
      return at >= first && at < last ? by_offset[at - first] : T{0};
    };
    by_key[0] = 0;
    write_patterns(sums, static_cast<double>(rows), behind(0), behind(1), largest(by_offset, last - first),
                   largest(by_key, keys));
  }
};

}  // namespace levelhead::LEVELHEAD_ISA
