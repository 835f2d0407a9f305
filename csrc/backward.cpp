// Backward: with P the weights and δ = Σ dO·O of each row,
//
//     dV = PᵀdO,   dP = dO·Vᵀ,   dS = P∘(dP - δ),   dQ = scale·dS·K,   dK = scale·dSᵀQ
//
// tile by tile: P comes back as 2^(score - lse), so nothing of size L×S is kept. Slabs of queries
// go over all keys; dQ is complete when its slab is done, dK and dV when all slabs are.
//
// The lse is rounded, and its rounding error is a relative error of P. It does not matter while the lse
// is small. Panels with a large one are normalised anew: a pass of their own over the keys finds their
// rows' maxima, sums and δ, and P = 2^(score - maximum) / sum. Heads with a very large one are
// differentiated in float64.
#include "backward.h"

#include <memory>
#include <vector>

#include "forward.h"
#include "threads.h"

namespace levelhead::LEVELHEAD_ISA {
namespace {

constexpr Index kSlabPanels = 4;  // long enough sums over queries for dK and dV
constexpr Index kMaxChunks = 8;   // parts of dK and dV that are summed up in order
constexpr Index kChunkSlabs = 4;

// An lse up to this size is trusted: half a unit in its last place is then at most 2^-21 in float32. One
// of 2048 standard normal scores is 8.
constexpr double kTrustedLse = 16;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T, Free>;
template <class T>
Buffer<T> zeros(Index n) {
  Buffer<T> buffer(static_cast<T*>(std::calloc(static_cast<std::size_t>(n) + 1, sizeof(T))));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

// Asks for n numbers that are about to be added to, ahead of time: they are met in strips of columns, and
// the CPU does not see that coming.
template <class T>
void prefetch(const T* at, Index n) {
  for (const T* end = at + n; at < end; at += 64 / sizeof(T)) __builtin_prefetch(at, 1, 2);
}

template <class T>
class Backward {
 public:
  explicit Backward(const Problem& problem)
      : p(problem), cut(p.queries), slabs((cut.panels + kSlabPanels - 1) / kSlabPanels),
        chunks(std::clamp<Index>(slabs * p.group() / kChunkSlabs, 1, kMaxChunks)),
        block(std::clamp<Index>(64 * 1024 / (std::max(p.key_dim, p.value_dim) * Index(sizeof(T))) /
                                    16 * 16, 32, 128)),
        key_stride(padded(p.key_dim)), value_stride(padded(p.value_dim)),
        sets_aside(p.keys > kSumBlocks * block),
        grad_sums(zeros<double>(p.batch * p.heads * chunks * kGradSums)) {}

  // Which thread does what depends on the number of threads; the order of sums does not: dK and dV
  // are always the sum over the same chunks of queries, in order.
  void run() {
    const Index groups = p.batch * p.kv_heads;
    if (groups >= p.threads || chunks == 1)
      parallel_for(groups, p.threads, [&](Index group) { run_group(group, 1); });
    else
      for (Index group = 0; group < groups; ++group) run_group(group, p.threads);
  }

  void run_group(Index group, int threads) {
    if (sizeof(T) == 4 && has_large_scores(group))
      return Backward<double>(p).run_group(group, threads);
    const Index part = p.keys * (key_stride + value_stride);
    Buffer<T> total = zeros<T>(threads > 1 ? part * chunks : part), next;
    if (threads > 1)
      parallel_for(chunks, threads, [&](Index c) { run_chunk(group, c, total.get() + c * part); });
    else
      run_chunk(group, 0, total.get());
    for (Index c = 1; c < chunks; ++c) {
      if (threads == 1) {
        next = zeros<T>(part);
        run_chunk(group, c, next.get());
      }
      add(total.get(), threads > 1 ? total.get() + c * part : next.get(), part);
    }
    write(group, total.get(), 0, p.keys);
    const Index first = group * p.group();
    for (Index i = first; p.grad_health && i < first + p.group(); ++i)
      for (int f = 0; f < kGradSums; ++f) {
        double& sum = p.grad_health[i * kGradSums + f] = 0;
        for (Index c = 0; c < chunks; ++c) sum += grad_sums.get()[(i * chunks + c) * kGradSums + f];
      }
  }

 private:
  const Problem& p;
  const PanelCut<T> cut;
  const Index slabs, chunks, block, key_stride, value_stride;
  const bool sets_aside;  // so many keys that sums of blocks are set aside now and then
  Buffer<double> grad_sums;  // (batch, head, chunk, kGradSums)

  static constexpr double kMost = std::numeric_limits<T>::max();

  static Index padded(Index n) { return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }

  static void add(T* to, const T* from, Index n) {
    for (Index i = 0; i < n; ++i) to[i] += from[i];
  }

  void write(Index group, const T* sums, Index from, Index to) {
    const Index batch = group / p.kv_heads, head = group % p.kv_heads;
    const RowsIn dk(p.grad_key, batch, head), dv(p.grad_value, batch, head);
    const T* values = sums + p.keys * key_stride;
    for (Index j = from; j < to; ++j) {
      write_row(dk.dtype, const_cast<char*>(dk.row(j)), p.key_dim, sums + j * key_stride);
      write_row(dv.dtype, const_cast<char*>(dv.row(j)), p.value_dim, values + j * value_stride);
    }
  }

  // What one slab of queries needs. Lane i of the slab is its row i; only the last panel of a head
  // has lanes without a row.
  struct Slab {
    Index batch, head, first_panel, panels, first, rows, width;
    Panel<T> panel[kSlabPanels];
    T* query[kSlabPanels];       // packed, in units of ln 2
    T* grad[kSlabPanels];        // packed dO
    T* grad_query[kSlabPanels];  // [key_dim][width]
    T* aside[kSlabPanels];       // sums of many blocks of it, if sets_aside
    RowBlock<T> query_rows, grad_rows;
    alignas(64) T lse[kSlabPanels * kMaxLanes<T>];
    alignas(64) T shift[kSlabPanels * kMaxLanes<T>];  // P = 2^(score - shift)·inverse
    alignas(64) T inverse[kSlabPanels * kMaxLanes<T>];
    alignas(64) T delta[kSlabPanels * kMaxLanes<T>];
    T *weights, *grad_scores;  // [key][slab width]
    T *grad_weights, *slope, *factors;  // [key][panel width]
    bool finite;
    double* sums;
  };

  // All of a group's slabs that belong to chunk c: dK and dV of it go to `part`.
  void run_chunk(Index group, Index c, T* part) {
    constexpr Index lanes = kMaxLanes<T>, slab_lanes = kSlabPanels * lanes;
    const Index query_rows = (p.key_dim + kTileRows - 1) / kTileRows * kTileRows;
    Workspace& workspace = thread_workspace();
    workspace.reserve(
        Workspace::room<Slab>(1) + TileBuffer<T>::room(p, block) +
        kSlabPanels * (Workspace::room<T>(lanes * p.key_dim) +
                       Workspace::room<T>(lanes * p.value_dim) +
                       Workspace::room<T>(lanes * query_rows) * (1 + sets_aside)) +
        Workspace::room<T>(slab_lanes * spread<T>(key_stride)) +
        2 * Workspace::room<T>(slab_lanes * spread<T>(value_stride)) +
        2 * Workspace::room<T>(block * slab_lanes) +
        3 * Workspace::room<T>((block + kTileRows) * lanes) +
        Workspace::room<T>(block * spread<T>(p.key_dim)) +
        Workspace::room<T>(block * p.value_dim) +
        Workspace::room<T>(kLanes<T> * p.key_dim));
    Slab& slab = *new (workspace.take<Slab>(1)) Slab;
    const TileBuffer<T> buffer(p, block, workspace);
    for (Index i = 0; i < kSlabPanels; ++i) {
      slab.query[i] = workspace.take<T>(lanes * p.key_dim);
      slab.grad[i] = workspace.take<T>(lanes * p.value_dim);
      slab.grad_query[i] = workspace.take<T>(lanes * query_rows);
      slab.aside[i] = sets_aside ? workspace.take<T>(lanes * query_rows) : slab.grad_query[i];
    }
    T* query_scratch = workspace.take<T>(slab_lanes * spread<T>(key_stride));
    T* grad_scratch = workspace.take<T>(slab_lanes * spread<T>(value_stride));
    T* output_scratch = workspace.take<T>(slab_lanes * spread<T>(value_stride));
    slab.weights = workspace.take<T>(block * slab_lanes);
    slab.grad_scores = workspace.take<T>(block * slab_lanes);
    slab.grad_weights = workspace.take<T>((block + kTileRows) * lanes);
    slab.slope = workspace.take<T>((block + kTileRows) * lanes);
    slab.factors = workspace.take<T>((block + kTileRows) * lanes);
    T* key_scratch = workspace.take<T>(block * spread<T>(p.key_dim));
    T* value_scratch = workspace.take<T>(block * p.value_dim);
    T* unpack_scratch = workspace.take<T>(kLanes<T> * p.key_dim);

    const Index batch = group / p.kv_heads, kv_head = group % p.kv_heads;
    const RowsIn key_rows(p.key, batch, kv_head), value_rows(p.value, batch, kv_head);
    const Index all = slabs * p.group();
    for (Index s = all * c / chunks; s < all * (c + 1) / chunks; ++s) {
      slab.batch = batch;
      slab.head = kv_head * p.group() + s / slabs;
      slab.sums = grad_sums.get() + ((batch * p.heads + slab.head) * chunks + c) * kGradSums;
      load_slab(slab, s % slabs, query_scratch, grad_scratch, output_scratch, query_rows);
      for (Index i = 0, at = 0; i < slab.panels; at += slab.panel[i++].width)
        if (distrusts(slab.lse + at, slab.panel[i].n))
          with_vectors(slab.panel[i].vectors, [&](auto vectors) {
            normalise<vectors>(slab, i, at, buffer, key_rows, value_rows, key_scratch, value_scratch);
          });
      Index from = p.keys, to = 0;
      for (Index i = 0; i < slab.panels; ++i) {
        if (slab.panel[i].first >= slab.panel[i].last) continue;
        from = std::min(from, slab.panel[i].first);
        to = std::max(to, slab.panel[i].last);
      }
      for (Index k = from / block * block; k < to; k += block) {
        const Index first = std::max(k, from), end = std::min(k + block, to);
        const RowBlock<T> keys =
            stage(key_rows, first, end, p.key_dim, 1, false, key_scratch, true);
        const RowBlock<T> values = stage(value_rows, first, end, p.value_dim, 1, false, value_scratch);
        T* grad_keys = part + first * key_stride;
        T* grad_values = part + p.keys * key_stride + first * value_stride;
        prefetch(grad_keys, (end - first) * key_stride);
        prefetch(grad_values, (end - first) * value_stride);
        checkpoint();
        run_block(slab, first, end, keys, values, buffer, grad_keys, grad_values);
        if (sets_aside && (k / block + 1) % kSumBlocks == 0) set_aside(slab, query_rows);
      }
      if (sets_aside) set_aside(slab, query_rows);
      alignas(64) T ones[lanes];
      std::fill_n(ones, lanes, T{1});
      for (Index i = 0; i < slab.panels; ++i) {
        RowsIn out(p.grad_query, batch, slab.head);
        out.data = out.row(slab.panel[i].query[0]);
        unpack_lanes(slab.aside[i], slab.panel[i].width, ones, slab.panel[i].n, p.key_dim, out,
                     unpack_scratch);
      }
    }
  }

  void load_slab(Slab& slab, Index index, T* query_scratch, T* grad_scratch, T* output_scratch,
                 Index query_rows) {
    slab.first_panel = index * kSlabPanels;
    slab.panels = std::min(kSlabPanels, cut.panels - slab.first_panel);
    slab.first = cut.start(slab.first_panel);
    slab.rows = slab.width = 0;
    for (Index i = 0; i < slab.panels; ++i) {
      Panel<T>& panel = slab.panel[i];
      cut.cut(p, slab.batch, slab.head, slab.first_panel + i, panel);
      slab.rows += panel.n;
      slab.width += panel.width;
    }
    const Index last = slab.first + slab.rows;
    const RowsIn query(p.query, slab.batch, slab.head), grad(p.grad_output, slab.batch, slab.head);
    const RowsIn output(p.output, slab.batch, slab.head);
    slab.query_rows =
        stage(query, slab.first, last, p.key_dim, kLanes<T>, false, query_scratch, true);
    slab.grad_rows =
        stage(grad, slab.first, last, p.value_dim, kLanes<T>, false, grad_scratch, true);
    const RowBlock<T> outputs =
        stage(output, slab.first, last, p.value_dim, kLanes<T>, true, output_scratch);
    for (Index r = 0; r < slab.rows; ++r)
      slab.lse[r] = lse_of((slab.batch * p.heads + slab.head) * p.queries + slab.first + r);
    std::fill_n(slab.shift, slab.width, kInf<T>);  // weights of lanes without a row are 0
    std::fill_n(slab.inverse, slab.width, T{1});
    std::fill_n(slab.delta, slab.width, T{0});
    for (Index r = 0; r < slab.rows; ++r) {
      if (slab.lse[r] != -kInf<T>) {  // in units of ln 2; the inverse makes up for the rounding
        const double exact = double{slab.lse[r]} * kLog2e;
        slab.shift[r] = static_cast<T>(exact);
        if (std::abs(exact) < kInf<T>) slab.inverse[r] -= static_cast<T>((exact - slab.shift[r]) * kLn2);
      }
      Vec<T> dot = {};
      for (Index c = 0; c < value_stride; c += kLanes<T>)
        dot = fma(load(slab.grad_rows.row(r) + c), load(outputs.row(r) + c), dot);
      slab.delta[r] = sum<T>(dot);
    }
    for (Index i = 0, row = 0; i < slab.panels; row += slab.panel[i++].n) {
      Panel<T>& panel = slab.panel[i];
      const Index width = panel.width;
      panel.set_scale(p, distrusts(slab.lse + row, panel.n));
      pack_lanes({slab.query_rows.row(row), slab.query_rows.stride}, panel.n, p.key_dim,
                 panel.query_factor(p, slab.head), slab.query[i], width, width);
      pack_lanes({slab.grad_rows.row(row), slab.grad_rows.stride}, panel.n, p.value_dim, T{1},
                 slab.grad[i], width, width);
      for (T* sums : {slab.grad_query[i], slab.aside[i]}) std::fill_n(sums, query_rows * width, T{0});
    }
    slab.finite = all_finite(slab.query_rows, 0, slab.rows, p.key_dim) &&
                  all_finite(slab.grad_rows, 0, slab.rows, p.value_dim);
  }

  T lse_of(Index row) const {
    if (p.query.dtype == Dtype::f64) return static_cast<T>(static_cast<const double*>(p.lse)[row]);
    return static_cast<const float*>(p.lse)[row];
  }
  bool has_large_scores(Index group) const {
    for (Index row = group * p.group() * p.queries, n = p.group() * p.queries; n > 0; ++row, --n)
      if (lse_of(row) > T{kLargestFloatScore} && lse_of(row) < kInf<T>) return true;
    return false;
  }

  // Is one of n rows' lse no good here? It may be large; or of lower precision; or of decode, which adds up
  // its scores in another order, so that they are not quite those that are made here.
  bool distrusts(const T* lse, Index n) const {
    const bool other = p.queries <= kDecodeQueries || (sizeof(T) == 8 && p.query.dtype != Dtype::f64);
    const T trusted = other ? T{0} : T{kTrustedLse};
    return std::any_of(lse, lse + n, [&](T x) {
      return std::abs(x) > trusted && std::abs(x) < kInf<T>;
    });
  }

  // Finds shift, inverse and δ of a panel's rows by a pass over its keys.
  template <int Vectors>
  void normalise(Slab& slab, Index i, Index at, const TileBuffer<T>& buffer, const RowsIn& key_rows,
                 const RowsIn& value_rows, T* key_scratch, T* value_scratch) {
    constexpr int W = kLanes<T>;
    constexpr Index width = Vectors * W;
    const Panel<T>& panel = slab.panel[i];
    RowState<T> state;
    state.start(p, panel, false);
    alignas(64) T rescale[width], delta[width] = {};  // Σ e·dP
    for (Index k = panel.first / block * block; k < panel.last; k += block) {
      checkpoint();
      ScoreTile<T> tile;
      if (!prepare_tile(p, panel, k, std::min(k + block, panel.last), buffer, tile)) continue;
      const Index end = tile.first + tile.n;
      const RowBlock<T> keys = stage(key_rows, tile.first, end, p.key_dim, 1, true, key_scratch);
      const RowBlock<T> values = stage(value_rows, tile.first, end, p.value_dim, 1, true, value_scratch);
      RunningMax<Vectors, T> running;
      score_tile<Vectors>(p, panel, tile, keys, slab.query[i], running);
      mask_tile<Vectors, false>(p, panel, tile, running, state);
      T* const dp = slab.grad_weights;
      multiply_weight_grads<Vectors>(slab, i, tile, values);
      if (tile.hides)  // a hidden value may be NaN
        for (Index x = 0; x < tile.n * width; x += W)
          store(dp + x, select<T>(load(tile.scores + x) == -kInf<T>, Vec<T>{}, load(dp + x)));
      softmax_step<Vectors, false>(panel, tile, running, state, rescale);
      for (int v = 0; v < Vectors; ++v) {
        Vec<T> sum = {};
        for (Index x = v * W; x < tile.n * width; x += width)
          sum = fma(load(tile.scores + x), load(dp + x), sum);
        store(delta + v * W, fma(load(delta + v * W), load(rescale + v * W), sum));
      }
    }
    for (int lane = 0; lane < panel.n; ++lane) {
      if (slab.lse[at + lane] == -kInf<T>) continue;  // sees nothing
      slab.shift[at + lane] = state.max[lane];
      slab.inverse[at + lane] = T{1} / state.sum[lane];
      slab.delta[at + lane] = delta[lane] / state.sum[lane];
    }
  }

  // dP of a panel's tile, with what dropout leaves of it.
  template <int Vectors>
  void multiply_weight_grads(Slab& slab, Index i, const ScoreTile<T>& tile, RowBlock<T> values) {
    constexpr int W = kLanes<T>;
    RunningMax<Vectors, T> ignored;
    multiply_scores<Vectors>(values, 0, tile.n, slab.grad[i], p.value_dim, slab.grad_weights, ignored);
    if (p.dropout == 0) return;
    dropout_factors(p, slab.panel[i], tile.first, tile.n, slab.factors);
    for (Index x = 0; x < tile.n * Vectors * W; x += W)
      store(slab.grad_weights + x, load(slab.grad_weights + x) * load(slab.factors + x));
  }

  // Adds dQ to what was set aside, and lets it begin anew.
  static void set_aside(Slab& slab, Index query_rows) {
    for (Index i = 0; i < slab.panels; ++i) {
      const Index n = query_rows * slab.panel[i].width;
      add(slab.aside[i], slab.grad_query[i], n);
      std::fill_n(slab.grad_query[i], n, T{0});
    }
  }

  // Keys [first, end) and all queries of the slab.
  void run_block(Slab& slab, Index first, Index end, RowBlock<T> keys, RowBlock<T> values,
                 const TileBuffer<T>& buffer, T* grad_keys, T* grad_values) {
    Index from = end, to = first;  // what some panel sees
    bool hides = false;
    struct Part { ScoreTile<T> tile; bool seen; } part[kSlabPanels];
    for (Index i = 0, at = 0; i < slab.panels; at += slab.panel[i++].width) {
      part[i].seen = prepare_tile(p, slab.panel[i], first, end, buffer, part[i].tile);
      if (!part[i].seen) continue;
      const ScoreTile<T>& tile = part[i].tile;
      from = std::min(from, tile.first);
      to = std::max(to, tile.first + tile.n);
      hides = hides || tile.hides;
      with_vectors(slab.panel[i].vectors, [&](auto vectors) {
        differentiate<vectors>(slab, i, at, tile, first, keys, values);
      });
    }
    if (from >= to) return;
    // Keys of [from, to) that a panel did not look at have no weight there.
    for (Index i = 0, at = 0; i < slab.panels; at += slab.panel[i++].width) {
      const ScoreTile<T>& tile = part[i].tile;
      auto clear = [&](Index a, Index b) {
        for (Index j = a; j < b; ++j)
          for (T* x : {slab.weights, slab.grad_scores})
            std::fill_n(x + (j - first) * slab.width + at, slab.panel[i].width, T{0});
      };
      hides = hides || !part[i].seen || tile.first > from || tile.first + tile.n < to;
      if (!part[i].seen) {
        clear(from, to);
        continue;
      }
      clear(from, tile.first);
      clear(tile.first + tile.n, to);
    }

    const Index offset = from - first, n = to - from;
    const T* weights = slab.weights + offset * slab.width;
    const T* grad_scores = slab.grad_scores + offset * slab.width;
    const RowBlock<T> seen_keys{keys.row(offset), keys.stride};
    if (hides && !(slab.finite && all_finite(seen_keys, 0, n, p.key_dim)))
      return accumulate_seen(slab, offset, n, seen_keys, grad_keys, grad_values);
    accumulate_keys(weights, slab.width, n, slab.grad_rows, slab.rows, value_stride,
                    grad_values + offset * value_stride, value_stride);
    accumulate_keys(grad_scores, slab.width, n, slab.query_rows, slab.rows, key_stride,
                    grad_keys + offset * key_stride, key_stride);
    alignas(64) T ones[kMaxLanes<T>];
    std::fill_n(ones, kMaxLanes<T>, T{1});
    for (Index i = 0, at = 0; i < slab.panels; at += slab.panel[i++].width)
      if (part[i].seen)
        with_vectors(slab.panel[i].vectors, [&](auto vectors) {
          accumulate_lanes<vectors>(seen_keys, n, p.key_dim, grad_scores + at, slab.width, ones,
                                    slab.grad_query[i]);
        });
  }

  // The same three sums in the same order, leaving out pairs of weight 0, where the rows hold a NaN or
  // an infinity that hidden pairs must not pass on.
  void accumulate_seen(Slab& slab, Index offset, Index n, RowBlock<T> keys, T* grad_keys,
                       T* grad_values) {
    std::vector<T> sum(static_cast<std::size_t>(std::max(p.key_dim, p.value_dim)));
    // to[c * step] += Σ factors(i)·rows.row(i)[c] over the pairs (key(i), row(i)) of weight.
    auto add = [&](Index count, Index columns, auto pair, const T* factors, RowBlock<T> rows, T* to,
                   Index step) {
      std::fill_n(sum.begin(), columns, T{0});
      for (Index i = 0; i < count; ++i) {
        const Index at = pair(i);
        if (slab.weights[at] == T{0} && slab.grad_scores[at] == T{0}) continue;
        for (Index c = 0; c < columns; ++c)
          sum[c] = fma(splat(factors[at]), splat(rows.row(i)[c]), splat(sum[c]))[0];
      }
      for (Index c = 0; c < columns; ++c) to[c * step] += sum[c];
    };
    for (Index j = 0; j < n; ++j) {
      auto row = [&](Index i) { return (offset + j) * slab.width + i; };
      add(slab.rows, p.value_dim, row, slab.weights, slab.grad_rows,
          grad_values + (offset + j) * value_stride, 1);
      add(slab.rows, p.key_dim, row, slab.grad_scores, slab.query_rows,
          grad_keys + (offset + j) * key_stride, 1);
    }
    for (Index i = 0, at = 0; i < slab.panels; at += slab.panel[i++].width)
      for (Index lane = 0; lane < slab.panel[i].n; ++lane)
        add(n, p.key_dim, [&](Index j) { return (offset + j) * slab.width + at + lane; },
            slab.grad_scores, keys, slab.grad_query[i] + lane, slab.panel[i].width);
  }

  // P and scale·dS of one panel's tile, into columns [at, at + width) of the slab's.
  template <int Vectors>
  void differentiate(Slab& slab, Index i, Index at, const ScoreTile<T>& tile, Index block_first,
                     RowBlock<T> keys, RowBlock<T> values) {
    constexpr int W = kLanes<T>;
    constexpr Index width = Vectors * W;
    const Panel<T>& panel = slab.panel[i];
    const RowBlock<T> tile_keys{keys.row(tile.first - block_first), keys.stride};
    const RowBlock<T> tile_values{values.row(tile.first - block_first), values.stride};
    RunningMax<Vectors, T> ignored;
    score_tile<Vectors>(p, panel, tile, tile_keys, slab.query[i], ignored);
    multiply_weight_grads<Vectors>(slab, i, tile, tile_values);
    if (p.softcap > 0) {  // d/ds c·tanh(s/c) = 1 - tanh²
      const T per_cap = static_cast<T>(1.0 / (p.softcap * kLog2e));
      for (Index x = 0; x < tile.n * width; x += W) {
        const Vec<T> t = tanh<T>(load(tile.scores + x) * per_cap);
        store(slab.slope + x, (T{1} - t) * (T{1} + t));
      }
    }
    if (tile.masked_first < tile.masked_last) mask_scores(p, panel, tile, ignored.max);
    const T scale = static_cast<T>(std::clamp(p.scale_of(slab.head), -kMost, kMost));
    T* weights = slab.weights + (tile.first - block_first) * slab.width + at;
    T* grad_scores = slab.grad_scores + (tile.first - block_first) * slab.width + at;
    Vec<T> weight_sq = {}, score_sq = {};
    for (int v = 0; v < Vectors; ++v) {
      const Vec<T> shift = load(slab.shift + at + v * W), delta = load(slab.delta + at + v * W);
      const Vec<T> inverse = load(slab.inverse + at + v * W);
      for (Index j = 0; j < tile.n; ++j) {
        const Index x = j * width + v * W;
        const Vec<T> score = load(tile.scores + x);
        const Vec<T> weight = exp2<T>(score - shift) * inverse;
        Vec<T> dp = load(slab.grad_weights + x), kept = weight;
        if (p.dropout > 0) kept *= load(slab.factors + x);
        Vec<T> ds = weight * (dp - delta);
        if (tile.hides) {
          const IntVec<T> hidden = score == -kInf<T>;
          ds = select<T>(hidden, Vec<T>{}, ds);
          dp = select<T>(hidden, Vec<T>{}, dp);
          kept = select<T>(hidden, Vec<T>{}, kept);
        }
        if (p.grad_health) {
          const IntVec<T> counts = counted(panel, tile, j, v);
          weight_sq += select<T>(counts, dp * dp, Vec<T>{});
          score_sq += select<T>(counts, ds * ds, Vec<T>{});
        }
        if (p.grad_scores) write_grad_scores(panel, slab.batch, slab.head, tile.first + j, v, ds);
        if (p.softcap > 0) ds *= load(slab.slope + x);
        store(weights + j * slab.width + v * W, kept);
        store(grad_scores + j * slab.width + v * W, ds * scale);
      }
    }
    if (p.grad_health) {
      slab.sums[kWeightGradSq] += static_cast<double>(sum<T>(weight_sq));
      slab.sums[kScoreGradSq] += static_cast<double>(sum<T>(score_sq));
    }
  }

  // dS of one key and one vector of queries, for those who want the gradient of a float mask.
  void write_grad_scores(const Panel<T>& panel, Index batch, Index head, Index key, int v,
                         Vec<T> ds) const {
    const Index row = (batch * p.heads + head) * p.queries + panel.query[0];
    const Index first = v * kLanes<T>, end = std::min<Index>(panel.n, first + kLanes<T>);
    for (Index lane = first; lane < end; ++lane) {
      const T x = ds[static_cast<int>(lane - first)];
      const Index at = (row + lane) * p.keys + key;
      if (p.query.dtype == Dtype::f64) static_cast<double*>(p.grad_scores)[at] = x;
      else static_cast<float*>(p.grad_scores)[at] = static_cast<float>(x);
    }
  }

  // Pairs that the statistics count: those of lanes with a row, unless the bias says "hidden".
  IntVec<T> counted(const Panel<T>& panel, const ScoreTile<T>& tile, Index j, int v) const {
    constexpr int W = kLanes<T>;
    IntVec<T> counts = iota<Int<T>>() + Int<T>(v * W) < Int<T>(panel.n);
    if (tile.mask.has_bias)
      counts &= ~(load(tile.mask.bias + (j - tile.masked_first) * panel.width + v * W) <=
                  statistically_hidden<T>(p));
    return counts;
  }
};

}  // namespace

template <class T>
void run_backward(const Problem& p) {
  if (p.batch * p.heads > 0) Backward<T>(p).run();
}
template void run_backward<float>(const Problem&);
template void run_backward<double>(const Problem&);

}  // namespace levelhead::LEVELHEAD_ISA
