// Prefill: many queries. Lanes are queries; a chunk of panels goes over the keys block by block, so
// that a block of K and V stays in the L2 cache while all the panels use it.
#include <memory>
#include <optional>

#include "patterns.h"
#include "threads.h"

namespace levelhead::LEVELHEAD_ISA {
namespace {

// Keys per block: its share of K and of V stays around 64 KB each. Shape alone decides, so bits do too.
template <class T>
Index key_block(Index dim) {
  const Index keys = 64 * 1024 / (std::max<Index>(dim, 1) * static_cast<Index>(sizeof(T)));
  return std::clamp<Index>(keys / 16 * 16, 64, 256);
}

constexpr Index kChunkPanels = 8;

template <class T>
class Prefill {
 public:
  explicit Prefill(const Problem& problem)
      : p(problem), cut(p.queries), block(key_block<T>(std::max(p.key_dim, p.value_dim))),
        value_rows((p.value_dim + kTileRows - 1) / kTileRows * kTileRows),
        sets_aside(p.keys > kSumBlocks * block), patterns(p, block) {}

  void run() {
    const Index per_group = cut.panels * p.group();
    const Index groups = p.batch * p.kv_heads;
    // Small enough that every thread gets several chunks, large enough to share a block's staging.
    Index chunk = std::clamp<Index>(per_group * groups / (4 * p.threads), 1, kChunkPanels);
    const bool whole_heads = chunk >= cut.panels;  // then a task can sum up its own heads
    if (whole_heads) chunk = chunk / cut.panels * cut.panels;
    const bool leave_rows = p.health && !whole_heads;
    if (leave_rows) {
      states.reset(new RowState<T>[p.batch * p.heads * cut.panels]);
      sampled.reset(new T[p.batch * p.heads * patterns.head_size()]);
    }
    const Index chunks = (per_group + chunk - 1) / chunk;
    parallel_for(groups * chunks, p.threads, [&](Index task) {
      const Index group = task / chunks;
      const Index i = chunks - 1 - task % chunks;  // causal: the long ones first
      run_chunk(group / p.kv_heads, group % p.kv_heads, i * chunk,
                std::min(per_group, (i + 1) * chunk));
    });
    if (leave_rows)
      parallel_for(p.batch * p.heads, p.threads, [&](Index i) {
        Workspace& workspace = thread_workspace();
        workspace.reserve(Workspace::room<T>(patterns.scratch_size()));
        summarise(i, [&](Index panel) { return &states[i * cut.panels + panel]; },
                  &sampled[i * patterns.head_size()], workspace.take<T>(patterns.scratch_size()));
      });
  }

 private:
  struct Work {
    Panel<T> panel;
    RowState<T>* state;
    T* query;   // [key_dim][width], scaled
    T* output;  // [value_rows][width]
    T* aside;   // as much again, if sets_aside
    alignas(64) T aside_max[kMaxLanes<T>], aside_sum[kMaxLanes<T>];  // the state it belongs to
    Index index;  // of the panel in its head
    SampledLanes<T> lanes;
  };

  const Problem& p;
  const PanelCut<T> cut;
  const Index block, value_rows;
  const bool sets_aside;  // so many keys that sums of blocks are set aside now and then
  // All rows' states, if they are summed up after all tasks are done.
  std::unique_ptr<RowState<T>[]> states;
  const Patterns<T> patterns;
  std::unique_ptr<T[]> sampled;  // the rows that they are taken from, in that case

  void run_chunk(Index batch, Index kv_head, Index first, Index last) {
    constexpr Index lanes = kMaxLanes<T>;
    const Index n = last - first;
    const Index own_heads = states ? 0 : n / cut.panels;
    Workspace& workspace = thread_workspace();
    const Index dims = std::max(p.key_dim, p.value_dim);
    workspace.reserve(Workspace::room<Work>(n) + Workspace::room<RowState<T>>(n) +
                      TileBuffer<T>::room(p, block) +
                      n * (Workspace::room<T>(lanes * p.key_dim) +
                           Workspace::room<T>(lanes * value_rows) * (1 + sets_aside)) +
                      Workspace::room<T>(lanes * dims) + Workspace::room<T>(block * p.key_dim) +
                      Workspace::room<T>(block * p.value_dim) +
                      Workspace::room<T>(p.dropout > 0 ? block * lanes : 0) +
                      Workspace::room<T>(own_heads * patterns.head_size()) +
                      Workspace::room<T>(patterns.scratch_size()));
    Work* works = workspace.take<Work>(n);
    RowState<T>* own_states = workspace.take<RowState<T>>(n);
    const TileBuffer<T> buffer(p, block, workspace);
    T* rows = workspace.take<T>(lanes * dims);
    T* key_scratch = workspace.take<T>(block * p.key_dim);
    T* value_scratch = workspace.take<T>(block * p.value_dim);
    T* factors = p.dropout > 0 ? workspace.take<T>(block * lanes) : nullptr;
    T* own_sampled = workspace.take<T>(own_heads * patterns.head_size());
    T* scratch = workspace.take<T>(patterns.scratch_size());

    Index from = p.keys, to = 0;
    for (Index i = 0; i < n; ++i) {
      Work& w = *new (&works[i]) Work;
      const Index head = kv_head * p.group() + (first + i) / cut.panels;
      w.index = (first + i) % cut.panels;
      cut.cut(p, batch, head, w.index, w.panel);
      w.state = states ? &states[(batch * p.heads + head) * cut.panels + w.index]
                       : new (&own_states[i]) RowState<T>;
      w.state->start(p, w.panel, p.health != nullptr);
      patterns.place(w.lanes, w.panel, 0, w.panel.n,
                     sampled ? &sampled[(batch * p.heads + head) * patterns.head_size()]
                             : own_sampled + i / cut.panels * patterns.head_size());
      patterns.start(w.lanes, 0, p.keys);
      w.query = workspace.take<T>(lanes * p.key_dim);
      w.output = workspace.take<T>(lanes * value_rows);
      if (sets_aside) {
        w.aside = workspace.take<T>(lanes * value_rows);
        std::fill_n(w.aside, lanes * value_rows, T{0});
        std::fill_n(w.aside_max, lanes, -kInf<T>);
        std::fill_n(w.aside_sum, lanes, T{0});
      }
      const Index q = w.panel.query[0];
      pack_lanes(stage<T>(RowsIn(p.query, batch, head), q, q + w.panel.n, p.key_dim, 1, true, rows),
                 w.panel.n, p.key_dim, w.panel.query_factor(p, head), w.query, w.panel.width, w.panel.width);
      std::fill(w.output, w.output + value_rows * w.panel.width, T{0});
      if (w.panel.first < w.panel.last) {
        from = std::min(from, w.panel.first);
        to = std::max(to, w.panel.last);
      }
    }

    const RowsIn key_rows(p.key, batch, kv_head), value_rows_in(p.value, batch, kv_head);
    for (Index k = from / block * block; k < to; k += block) {
      checkpoint();
      const Index end = std::min(k + block, to);
      const RowBlock<T> keys = stage(key_rows, k, end, p.key_dim, 1, n == 1, key_scratch);
      const RowBlock<T> values = stage(value_rows_in, k, end, p.value_dim, 1, n == 1, value_scratch);
      std::optional<bool> finite;  // are the block's values? Asked only where some are hidden
      auto values_finite = [&] {
        if (!finite) finite = all_finite(values, 0, end - k, p.value_dim);
        return *finite;
      };
      for (Index i = 0; i < n; ++i) {
        Work& w = works[i];
        ScoreTile<T> tile;
        if (!prepare_tile(p, w.panel, k, end, buffer, tile)) continue;
        const RowBlock<T> tile_keys{keys.row(tile.first - k), keys.stride};
        const RowBlock<T> tile_values{values.row(tile.first - k), values.stride};
        with_vectors(w.panel.vectors, [&](auto vectors) {
          alignas(64) T rescale[vectors * kLanes<T>];
          if (p.health)
            weigh<vectors, true>(w, tile, tile_keys, factors, rescale);
          else
            weigh<vectors, false>(w, tile, tile_keys, factors, rescale);
          accumulate<vectors>(w, tile, tile_values, tile.hides && !values_finite(), rescale);
        });
      }
      if (sets_aside && (k / block + 1) % kSumBlocks == 0)
        for (Index i = 0; i < n; ++i) set_aside(works[i]);
    }
    for (Index i = 0; i < n; ++i) {
      Work& w = works[i];
      if (sets_aside) {
        set_aside(w);
        w.output = w.aside;
        std::copy_n(w.aside_sum, w.panel.width, w.state->sum);
      }
      if (p.health && w.state->has_lost_rows(w.panel.width)) measure_again(w, buffer, key_scratch);
      patterns.finish(w.lanes, w.panel, *w.state);
      finish(w, rows);
    }
    if (p.health && !states)
      for (Index i = 0; i < n; i += cut.panels)
        summarise(batch * p.heads + works[i].panel.head[0],
                  [&](Index panel) { return works[i + panel].state; },
                  own_sampled + i / cut.panels * patterns.head_size(), scratch);
  }

  // The tile's scores, as they enter the softmax. Their statistics are those of all rows of a lane
  // together where every row sees every key, unless they are asked for row by row.
  template <int Vectors, bool Measured>
  void score(Work& w, const ScoreTile<T>& tile, RowBlock<T> keys, bool by_row,
             RunningMax<Vectors, T>& running) {
    score_tile<Vectors>(p, w.panel, tile, keys, w.query, running);
    const bool whole = tile.masked_first == tile.masked_last && w.panel.n == w.panel.width;
    if (Measured && whole && !by_row)
      w.state->pool_scores(tile, Vectors, pooled_scores<Vectors>(tile, running));
    else
      mask_tile<Vectors, Measured>(p, w.panel, tile, running, *w.state);
  }

  // The tile becomes weights, relative to the rows' maximum so far. `rescale` receives what the output
  // so far must be multiplied by.
  template <int Vectors, bool Measured>
  void weigh(Work& w, const ScoreTile<T>& tile, RowBlock<T> keys, T* factors, T* rescale) {
    constexpr int W = kLanes<T>;
    constexpr Index width = Vectors * W;
    RunningMax<Vectors, T> running;
    score<Vectors, Measured>(w, tile, keys, false, running);
    softmax_step<Vectors, Measured>(w.panel, tile, running, *w.state, rescale);
    if constexpr (Measured) patterns.take(w.lanes, tile, width, w.state->max);
    if (factors) {
      dropout_factors(p, w.panel, tile.first, tile.n, factors);
      for (Index x = 0; x < tile.n * width; x += W)
        store(tile.scores + x, load(tile.scores + x) * load(factors + x));
    }
  }

  // Adds the output and the sums of weights to what was set aside, and lets them begin anew.
  void set_aside(Work& w) {
    constexpr int W = kLanes<T>;
    for (int at = 0; at < w.panel.width; at += W) {
      const Vec<T> top = load(w.state->max + at);
      const Vec<T> rescale = rescale_factor<T>(load(w.aside_max + at), top);
      auto add = [&](T* sum, T* more) {
        store(sum, fma(load(sum), rescale, load(more)));
        store(more, Vec<T>{});
      };
      add(w.aside_sum + at, w.state->sum + at);
      for (Index d = 0; d < value_rows; ++d)
        add(w.aside + d * w.panel.width + at, w.output + d * w.panel.width + at);
      store(w.aside_max + at, top);
    }
  }

  // The statistics of a panel's scores once more, row by row: a row with a NaN or an infinite score is
  // left out of them.
  void measure_again(Work& w, const TileBuffer<T>& buffer, T* key_scratch) {
    const RowsIn key_rows(p.key, w.panel.batch, w.panel.head[0] / p.group());
    w.state->forget_scores();
    for (Index k = w.panel.first / block * block; k < w.panel.last; k += block) {
      const Index end = std::min(k + block, w.panel.last);
      ScoreTile<T> tile;
      if (!prepare_tile(p, w.panel, k, end, buffer, tile)) continue;
      const RowBlock<T> keys = stage(key_rows, tile.first, end, p.key_dim, 1, true, key_scratch);
      with_vectors(w.panel.vectors, [&](auto vectors) {
        RunningMax<vectors, T> running;
        score<vectors, true>(w, tile, keys, true, running);
      });
    }
  }

  // The tile's weighted values join the output, some keys at a time. `guard` says that the values hold
  // a NaN or an infinity that some row must not see.
  template <int Vectors>
  void accumulate(Work& w, const ScoreTile<T>& tile, RowBlock<T> values, bool guard, T* rescale) {
    constexpr Index width = Vectors * kLanes<T>;
    for (Index from = 0, to; from < tile.n; from = to) {
      to = std::min(tile.n, (tile.first + from) / kSumKeys * kSumKeys + kSumKeys - tile.first);
      if (guard)
        accumulate_seen<Vectors>(w, tile, values, from, to, rescale);
      else
        accumulate_lanes<Vectors>({values.row(from), values.stride}, to - from, p.value_dim,
                                  tile.scores + from * width, width, rescale, w.output);
      std::fill_n(rescale, width, T{1});
    }
  }

  // The same sums in the same order, without what a row does not see: 0·NaN would show.
  template <int Vectors>
  void accumulate_seen(Work& w, const ScoreTile<T>& tile, RowBlock<T> values, Index from, Index to,
                       const T* rescale) {
    constexpr int W = kLanes<T>;
    constexpr Index width = Vectors * W;
    for (Index d = 0; d < p.value_dim; ++d)
      for (int v = 0; v < Vectors; ++v) {
        Vec<T> sum = {};
        for (Index j = from; j < to; ++j) {
          const Vec<T> next =
              fma(splat(values.row(j)[d]), load(tile.scores + j * width + v * W), sum);
          const bool masked = j >= tile.masked_first && j < tile.masked_last;
          const Index mask_at = (j - tile.masked_first) * width + v * W;
          sum = masked ? select<T>(load_mask<T>(tile.mask.visible + mask_at), next, sum) : next;
        }
        T* at = w.output + d * width + v * W;
        store(at, fma(load(at), load(rescale + v * W), sum));
      }
  }

  void finish(Work& w, T* scratch) {
    constexpr int W = kLanes<T>;
    const Index head = w.panel.head[0], query = w.panel.query[0];
    alignas(64) T inverse[kMaxLanes<T>];
    for (int at = 0; at < w.panel.width; at += W)
      store(inverse + at, inverse_sum<T>(load(w.state->sum + at)));
    RowsIn out(p.output, w.panel.batch, head);
    out.data = out.row(query);
    unpack_lanes(w.output, w.panel.width, inverse, w.panel.n, p.value_dim, out, scratch);
    if (p.lse) {
      alignas(64) T lse[kMaxLanes<T>];
      for (int at = 0; at < w.panel.width; at += W)
        store(lse + at, row_lse<T>(load(w.state->max + at), load(w.state->sum + at)));
      T* to = static_cast<T*>(p.lse) + (w.panel.batch * p.heads + head) * p.queries + query;
      std::copy(lse, lse + w.panel.n, to);
    }
  }

  // A head's sums from its panels' rows. Sums of floats are taken of a few panels only.
  template <class StateOf>
  void summarise(Index head, StateOf state_of, T* rows, T* scratch) {
    double* sums = p.health + head * kHealthSums;
    for (Index first = 0; first < cut.panels; first += kChunkPanels) {
      Summary<T> summary(p, head / p.heads, head % p.heads, cut.start(first));
      for (Index i = first; i < std::min(first + kChunkPanels, cut.panels); ++i)
        summary.take(*state_of(i), 0, static_cast<int>(cut.start(i + 1) - cut.start(i)));
      double next[kHealthSums];
      summary.write(first == 0 ? sums : next);
      if (first > 0) merge_sums(sums, next);
    }
    patterns.write(head / p.heads, rows, scratch, sums);
  }
};

}  // namespace

template <class T>
void prefill(const Problem& p) {
  Prefill<T>(p).run();
}
template void prefill<float>(const Problem&);
template void prefill<double>(const Problem&);

}  // namespace levelhead::LEVELHEAD_ISA
