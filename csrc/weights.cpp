// The attention matrix itself, for those who ask for it: recomputed from the lse of the forward
// pass, panel by panel. The only place that writes queries x keys numbers.
#include "forward.h"

#include "threads.h"

namespace levelhead::LEVELHEAD_ISA {

template <class T>
void write_weights(const Problem& p) {
  constexpr int W = kLanes<T>;
  constexpr Index block = 128, lanes = kMaxLanes<T>;
  const PanelCut<T> cut(p.queries);
  parallel_for(p.batch * p.heads * cut.panels, p.threads, [&](Index task) {
    const Index panel_index = task % cut.panels, head = task / cut.panels % p.heads;
    const Index batch = task / cut.panels / p.heads;
    Workspace& workspace = thread_workspace();
    workspace.reserve(TileBuffer<T>::room(p, block) + 2 * Workspace::room<T>(lanes * p.key_dim) +
                      Workspace::room<T>(block * p.key_dim) + Workspace::room<T>(W * block));
    const TileBuffer<T> buffer(p, block, workspace);
    T* rows = workspace.take<T>(lanes * p.key_dim);
    T* query = workspace.take<T>(lanes * p.key_dim);
    T* key_scratch = workspace.take<T>(block * p.key_dim);
    T* out_scratch = workspace.take<T>(W * block);

    Panel<T> panel;
    cut.cut(p, batch, head, panel_index, panel);
    const Index q = panel.query[0];
    pack_lanes(stage<T>(RowsIn(p.query, batch, head), q, q + panel.n, p.key_dim, 1, true, rows),
               panel.n, p.key_dim, static_cast<T>(p.scale_of(head) * kLog2e), query, panel.width,
               panel.width);
    alignas(64) T shift[lanes], ones[lanes];
    std::fill_n(shift, lanes, T{0});
    std::fill_n(ones, lanes, T{1});
    const T* lse = static_cast<const T*>(p.lse) + (batch * p.heads + head) * p.queries + q;
    for (int lane = 0; lane < panel.n; ++lane)
      shift[lane] = lse[lane] == -kInf<T> ? kInf<T> : lse[lane] * static_cast<T>(kLog2e);

    const RowsIn key_rows(p.key, batch, head / p.group());
    RowsIn out(p.weights, batch, head);
    out.data = out.row(q);
    const Index size = static_cast<Index>(size_of(out.dtype));
    for (int lane = 0; lane < panel.n; ++lane)  // what nobody sees is 0, whatever the dtype
      std::memset(const_cast<char*>(out.row(lane)), 0, static_cast<std::size_t>(p.keys * size));
    for (Index k = panel.first / block * block; k < panel.last; k += block) {
      ScoreTile<T> tile;
      if (!prepare_tile(p, panel, k, k + block, buffer, tile)) continue;
      const RowBlock<T> keys =
          stage(key_rows, tile.first, tile.first + tile.n, p.key_dim, 1, true, key_scratch);
      with_vectors(panel.vectors, [&](auto vectors) {
        Seen<vectors, T> seen;
        multiply_scores<vectors>(keys, 0, tile.n, query, p.key_dim, tile.scores, seen);
        dress_scores(p, panel, tile, seen.max);
      });
      for (Index j = 0; j < tile.n; ++j)
        for (int at = 0; at < panel.width; at += W) {
          T* x = tile.scores + j * panel.width + at;
          const Vec<T> score = load(x);  // what is hidden weighs 0 in a row of NaN too
          store(x, select<T>(score == -kInf<T>, Vec<T>{}, exp2<T>(score - load(shift + at))));
        }
      RowsIn to = out;
      to.data += tile.first * size;
      unpack_lanes(tile.scores, panel.width, ones, panel.n, tile.n, to, out_scratch);
    }
  });
}
template void write_weights<float>(const Problem&);
template void write_weights<double>(const Problem&);

}  // namespace levelhead::LEVELHEAD_ISA
