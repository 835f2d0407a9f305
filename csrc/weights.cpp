// The attention matrix itself, for those who ask for it. The only place that writes queries x keys
// numbers. A panel's scores are kept for all keys, so that its weights come from one maximum and one sum
// and add up to 1 whatever the size of the scores.
#include "forward.h"

#include "threads.h"

namespace levelhead::LEVELHEAD_ISA {
namespace {

template <class T>
class Weights {
 public:
  // Of n rows from number `first` on.
  Weights(const Problem& problem, Index first, Index n) : p(problem), cut(n, first) {}

  void run() {
    parallel_for(p.batch * p.heads * cut.panels, p.threads, [&](Index task) {
      const Index head = task / cut.panels;
      run_panel(head / p.heads, head % p.heads, task % cut.panels);
    });
  }
  void run_head(Index batch, Index head) {
    for (Index i = 0; i < cut.panels; ++i) run_panel(batch, head, i);
  }

 private:
  static constexpr int W = kLanes<T>;
  static constexpr Index kBlock = 128;  // keys

  const Problem& p;
  const PanelCut<T> cut;

  void run_panel(Index batch, Index head, Index i) {
    Panel<T> panel;
    cut.cut(p, batch, head, i, panel, true);
    with_vectors(panel.vectors, [&](auto vectors) { write<vectors>(panel); });
  }

  template <int Vectors>
  void write(const Panel<T>& panel) {
    constexpr Index lanes = kMaxLanes<T>, width = Vectors * W;
    Workspace& workspace = thread_workspace();
    workspace.reserve(TileBuffer<T>::room(p, kBlock) + 2 * Workspace::room<T>(lanes * p.key_dim) +
                      Workspace::room<T>(kBlock * p.key_dim) +
                      Workspace::room<T>((p.keys + kTileRows) * lanes) +
                      Workspace::room<T>(W * kBlock));
    const TileBuffer<T> buffer(p, kBlock, workspace);
    T* rows = workspace.take<T>(lanes * p.key_dim);
    T* query = workspace.take<T>(lanes * p.key_dim);
    T* key_scratch = workspace.take<T>(kBlock * p.key_dim);
    T* scores = workspace.take<T>((p.keys + kTileRows) * lanes);
    T* out_scratch = workspace.take<T>(W * kBlock);

    const Index head = panel.head[0], q = panel.query[0];
    pack_lanes(stage<T>(RowsIn(p.query, panel.batch, head), q, q + panel.n, p.key_dim, 1, true, rows),
               panel.n, p.key_dim, panel.query_factor(p, head), query, width, width);
    const RowsIn key_rows(p.key, panel.batch, head / p.group());
    RowState<T> state;  // knows of a sink
    state.start(p, panel, false);
    RunningMax<Vectors, T> running;
    auto hide = [&](Index from, Index to) {
      std::fill(scores + from * width, scores + std::max(from, to) * width, -kInf<T>);
    };
    for (Index k = panel.first; k < panel.last; k += kBlock) {
      checkpoint();
      const Index end = std::min(k + kBlock, panel.last);
      ScoreTile<T> tile;
      if (!prepare_tile(p, panel, k, end, buffer, tile)) {
        hide(k, end);
        continue;
      }
      tile.scores = scores + tile.first * width;
      const RowBlock<T> keys =
          stage(key_rows, tile.first, tile.first + tile.n, p.key_dim, 1, true, key_scratch);
      score_tile<Vectors>(p, panel, tile, keys, query, running);
      mask_tile<Vectors, false>(p, panel, tile, running, state);
      hide(k, tile.first);
      hide(tile.first + tile.n, end);
    }

    alignas(64) T top[width];
    for (int v = 0; v < Vectors; ++v)
      store(top + v * W, finite_shift<T>(max(load(state.max + v * W), running.max[v])));
    const bool large = std::any_of(
        top, top + panel.n, [](T x) { return x > static_cast<T>(kLargestFloatScore * kLog2e); });
    if (large && sizeof(T) == 4) return Weights<double>(p, q, panel.n).run_head(panel.batch, head);

    Vec<T> shift[Vectors], inverse[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      const Vec<T> sink = load(state.max + v * W);
      shift[v] = load(top + v * W);
      Vec<T> total = load(state.sum + v * W) * exp2<T>(sink - shift[v]);
      for (Index k = panel.first; k < panel.last; k += kBlock)
        total += exponentiate_column(scores + k * width + v * W, width,
                                     std::min(kBlock, panel.last - k), shift[v]);
      inverse[v] = inverse_sum<T>(total);
    }

    RowsIn out(p.weights, panel.batch, head);
    out.data = out.row(q);
    const Index size = static_cast<Index>(size_of(out.dtype));
    for (int lane = 0; lane < panel.n; ++lane)  // what nobody sees is 0, whatever the dtype
      std::memset(const_cast<char*>(out.row(lane)), 0, static_cast<std::size_t>(p.keys * size));
    alignas(64) T ones[lanes];
    std::fill_n(ones, lanes, T{1});
    for (Index k = panel.first; k < panel.last; k += kBlock) {
      const Index n = std::min(kBlock, panel.last - k);
      for (Index j = k; j < k + n; ++j)
        for (int v = 0; v < Vectors; ++v) {
          T* at = scores + j * width + v * W;
          const Vec<T> e = load(at);
          store(at, select<T>(e < T{0}, Vec<T>{}, e * inverse[v]));
        }
      RowsIn to = out;
      to.data += k * size;
      unpack_lanes(scores + k * width, width, ones, panel.n, n, to, out_scratch);
    }
  }

  // Scores of n keys become 2^(score - shift), and -1 where they are hidden: 0·NaN would show in a row
  // that has a NaN. The sum of the others.
  static Vec<T> exponentiate_column(T* scores, Index width, Index n, Vec<T> shift) {
    Vec<T> sum = {};
    for (Index j = 0; j < n; ++j) {
      const Vec<T> x = load(scores + j * width), e = exp2<T>(x - shift);
      sum += e;
      store(scores + j * width, select<T>(x == -kInf<T>, splat(T{-1}), e));
    }
    return sum;
  }
};

}  // namespace

template <class T>
void write_weights(const Problem& p) {
  Weights<T>(p, 0, p.queries).run();
}
template void write_weights<float>(const Problem&);
template void write_weights<double>(const Problem&);

}  // namespace levelhead::LEVELHEAD_ISA
