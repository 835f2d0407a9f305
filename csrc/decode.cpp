// Decode: a few queries against many keys, bound by reading K and V. Rows of all heads of a group
// share a tile, so each key and value is read once for all of them. Keys are split into parts whose
// size follows from the shape, so that one sequence uses all cores; parts are merged in order, so
// the result does not depend on how many cores there were.
#include "pattern_rows.h"
#include "threads.h"

namespace levelhead::LEVELHEAD_ISA {
namespace {

// Keys per block: many, as going from the stream of keys to that of values and back costs time, but few
// where a block is copied or read more than once and must stay in the L2 cache.
constexpr Index kStreamKeys = 1024, kCachedKeys = 128;

// Parts into which a sequence's keys are split: enough for many cores, but not below 512 keys, and
// as few as that allows: each part starts its two streams anew. Heads and keys alone decide.
constexpr Index kWantedTasks = 64, kLeastKeys = 512;

inline Index split_size(const Problem& p) {
  const Index most = std::max<Index>(1, p.keys / kLeastKeys);
  const Index parts = std::clamp<Index>(kWantedTasks / p.kv_heads, 1, most);
  const Index keys = (p.keys + parts - 1) / parts;
  return std::max<Index>(1, (keys + kCachedKeys - 1) / kCachedKeys) * kCachedKeys;
}

// The order in which the rows of a block are read: from four places at once, as memory delivers up to
// 40 % more then. docs/performance-log.md has the numbers.
constexpr Index kStreams = 4;

struct ReadOrder {
  Index apart;  // rows from one place to the next; what does not fill a turn comes last

  explicit ReadOrder(Index n) : apart(n / kStreams) {}
  Index turns() const { return apart * kStreams; }
  Index operator()(Index i) const {
    return i < turns() ? i / kStreams + i % kStreams * apart : i;
  }
};

template <class T>
constexpr int kGroupRows = kLanes<T> * 2 < 8 ? kLanes<T> * 2 : 8;

// Keys x Rows dot products, as sums along the lanes. Several rows share the loads of a key, and several
// keys those of a query; with one row the keys are read one after the other, as memory prefers.
template <int Keys, int Rows, class S, class T>
LH_INLINE void dot_products(const S* const (&key)[Keys], const T* query, Index dim,
                            T* const (&scores)[Keys]) {
  constexpr int W = kLanes<T>, AtOnce = Rows == 1 ? 1 : Keys, All = Keys * Rows;
  Vec<T> acc[All] = {};
  LH_UNROLL for (int first = 0; first < Keys; first += AtOnce)
    for (Index c = 0; c < dim; c += W) {
      Vec<T> x[AtOnce];
      LH_UNROLL for (int k = 0; k < AtOnce; ++k) x[k] = load(key[first + k] + c);
      LH_UNROLL for (int r = 0; r < Rows; ++r) {
        const Vec<T> q = load(query + r * dim + c);
        LH_UNROLL for (int k = 0; k < AtOnce; ++k) {
          Vec<T>& sum = acc[(first + k) * Rows + r];
          sum = fma(x[k], q, sum);
        }
      }
    }
  T sums[(All + W - 1) / W * W];
  LH_UNROLL for (int g = 0; g < All; g += W) {
    Vec<T> block[W];
    LH_UNROLL for (int i = 0; i < W; ++i) block[i] = acc[g + i % std::min(W, All - g)];
    store(sums + g, sum_each(block));
  }
  LH_UNROLL for (int k = 0; k < Keys; ++k)
    LH_UNROLL for (int r = 0; r < Rows; ++r) scores[k][r] = sums[k * Rows + r];
}

// Scores of n keys for Rows rows; the last step repeats the last key.
template <int Rows, class S, class T>
inline void multiply_rows(RowBlock<S> keys, Index n, const T* query, Index dim, T* scores,
                          Index width) {
  constexpr int Keys = Rows == 4 ? 3 : 8 / Rows;  // 8 sums hide an FMA's latency barely, 12 do
  const ReadOrder order(n);
  for (Index i = 0; i < n; i += Keys) {
    const S* key[Keys];
    T* to[Keys];
    for (int k = 0; k < Keys; ++k) {
      const Index j = order(std::min(i + k, n - 1));
      key[k] = keys.row(j);
      to[k] = scores + j * width;
    }
    dot_products<Keys, Rows>(key, query, dim, to);
  }
}

// The maximum of n keys' scores.
template <int Vectors, class T>
inline void update_max(const T* scores, Index n, RunningMax<Vectors, T>& running) {
  for (Index j = 0; j < n; ++j)
    LH_UNROLL for (int v = 0; v < Vectors; ++v, scores += kLanes<T>)
      running.max[v] = max(running.max[v], load(scores));
}

// output[row][columns] += weights[key][row] * values[key][columns] for Keys keys, Vectors vectors at a
// time. `step` is the distance from one key's weights to the next.
template <int Keys, int Rows, int Vectors, class S, class T>
LH_INLINE Index accumulate_columns(const T* weights, Index step, RowBlock<S> values, Index from,
                                   Index columns, T* output, Index stride) {
  constexpr int W = kLanes<T>;
  for (; from + Vectors * W <= columns; from += Vectors * W) {
    T* to = output + from;
    Vec<T> acc[Rows][Vectors];
    LH_UNROLL for (int r = 0; r < Rows; ++r)
      LH_UNROLL for (int v = 0; v < Vectors; ++v) acc[r][v] = load(to + r * stride + v * W);
    const T* weight = weights;
    const S* value = values.data + from;
    LH_UNROLL for (int k = 0; k < Keys; ++k, weight += step, value += values.stride) {
      Vec<T> x[Vectors];
      LH_UNROLL for (int v = 0; v < Vectors; ++v) x[v] = in_register(load(value + v * W));
      LH_UNROLL for (int r = 0; r < Rows; ++r)
        LH_UNROLL for (int v = 0; v < Vectors; ++v)
          acc[r][v] = fma(splat(weight[r]), x[v], acc[r][v]);
    }
    LH_UNROLL for (int r = 0; r < Rows; ++r)
      LH_UNROLL for (int v = 0; v < Vectors; ++v) store(to + r * stride + v * W, acc[r][v]);
  }
  return from;
}
template <int Keys, int Rows, class S, class T>
LH_INLINE void add_keys(const T* weights, Index step, RowBlock<S> values, Index columns, T* output,
                        Index stride) {
  const Index at =
      accumulate_columns<Keys, Rows, 8 / Rows>(weights, step, values, 0, columns, output, stride);
  accumulate_columns<Keys, Rows, 1>(weights, step, values, at, columns, output, stride);
}

// The keys from number `from` to number `to` in the order of reading: all columns of a turn before the
// next.
template <int Rows, class S, class T>
inline void accumulate_rows(const T* weights, Index width, RowBlock<S> values, ReadOrder order,
                            Index from, Index to, Index columns, T* output, Index stride) {
  for (Index i = from; i < to;) {
    const Index j = order(i);
    const T* w = weights + j * width;
    const S* v = values.row(j);
    if (i < order.turns()) {
      add_keys<kStreams, Rows>(w, width * order.apart, RowBlock<S>{v, values.stride * order.apart},
                               columns, output, stride);
      i += kStreams;
    } else {
      add_keys<1, Rows>(w, width, RowBlock<S>{v, values.stride}, columns, output, stride);
      ++i;
    }
  }
}

// sums[row] = sums[row]·rescale[row] + Σ weights[key][row], where keys j, j + 8, j + 16, ... are added
// up one after the other and then the eight of them as a tree: the same order for any width, so that
// a row's bits do not depend on how many rows share its tile.
template <int Width, class T>
inline void add_weights(const T* weights, Index n, const T* rescale, T* sums) {
  constexpr int W = kLanes<T>, Vectors = 8 * Width / W;
  Vec<T> acc[Vectors] = {};
  Index j = 0;
  for (; j + 8 <= n; j += 8, weights += 8 * Width)
    LH_UNROLL for (int v = 0; v < Vectors; ++v) acc[v] += load(weights + v * W);
  alignas(64) T part[8 * Width];
  LH_UNROLL for (int v = 0; v < Vectors; ++v) store(part + v * W, acc[v]);
  for (Index x = 0; x < (n - j) * Width; ++x) part[x] += weights[x];
  for (int half = 4 * Width; half >= Width; half /= 2)
    for (int x = 0; x < half; ++x) part[x] += part[x + half];
  for (int r = 0; r < Width; ++r) sums[r] = sums[r] * rescale[r] + part[r];
}
template <class T>
inline void add_weights(const T* weights, Index n, Index width, const T* rescale, T* sums) {
  switch (width) {
    case 1: return add_weights<1>(weights, n, rescale, sums);
    case 2: return add_weights<2>(weights, n, rescale, sums);
    case 4: return add_weights<4>(weights, n, rescale, sums);
    default: return add_weights<kGroupRows<T>>(weights, n, rescale, sums);
  }
}

template <class T>
class Decode {
 public:
  explicit Decode(const Problem& problem)
      : p(problem), rows(p.group() * p.queries), groups((rows + kGroupRows<T> - 1) / kGroupRows<T>),
        once(groups == 1 && p.key_dim % kLanes<T> == 0 && p.value_dim % kLanes<T> == 0),
        in_place(once && can_read_in_place()), block(once ? kStreamKeys : kCachedKeys),
        split_keys(split_size(p)),
        splits(std::max<Index>(1, (p.keys + split_keys - 1) / split_keys)),
        key_stride(padded(p.key_dim)), value_stride(padded(p.value_dim)),
        keeps_rows(has_patterns(p) && p.queries > 1), kept(p, kCachedKeys) {
    const std::size_t parts =
        static_cast<std::size_t>(p.batch * p.kv_heads * splits * groups) * part_bytes();
    const std::size_t bytes =
        parts + Workspace::room<T>(keeps_rows ? p.batch * p.heads * kept.head_size() : 0);
    if (bytes > sizeof few_ &&
        posix_memalign(reinterpret_cast<void**>(&parts_), 64, bytes) != 0)
      throw std::bad_alloc();
    kept_ = reinterpret_cast<T*>(parts_ + parts);
  }
  ~Decode() {
    if (parts_ != few_) std::free(parts_);
  }
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;

  void run() {
    const Index sequences = p.batch * p.kv_heads;
    parallel_for(sequences * splits, work_threads(), [&](Index task) {
      const Index sequence = task / splits;
      read_keys(sequence / p.kv_heads, sequence % p.kv_heads, task % splits);
      if (splits == 1) finish(sequence / p.kv_heads, sequence % p.kv_heads);
    });
    if (splits > 1)
      parallel_for(sequences, work_threads(), [&](Index sequence) {
        finish(sequence / p.kv_heads, sequence % p.kv_heads);
      });
  }

 private:
  // One group of rows after one split of the keys.
  struct Part {
    Panel<T> panel;
    RowState<T> state;
    SampledLanes<T> lanes;
    LoneRows<T> lone;
    T* output() { return reinterpret_cast<T*>(this + 1); }  // [row][value_stride]
  };

  const Problem& p;
  const Index rows, groups;
  const bool once;  // the shape lets keys and values be read once, without a copy
  const bool in_place;  // and so does their layout; else they are copied, a block at a time
  const Index block, split_keys, splits, key_stride, value_stride;
  const bool keeps_rows;  // that patterns are taken from
  const KeptRows<T> kept;
  T* kept_;
  alignas(64) char few_[10240];  // a tiny call would feel an allocation
  char* parts_ = few_;

  bool can_read_in_place() const {
    bool all = false;
    with_type(p.key.dtype, [&](auto* type) {
      using S = std::remove_pointer_t<decltype(type)>;
      all = RowsIn(p.key, 0, 0).are<S>(p.key_dim, kLanes<T>) &&
            RowsIn(p.value, 0, 0).are<S>(p.value_dim, kLanes<T>);
    });
    return all;
  }
  static Index padded(Index n) { return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }
  // Waking a thread takes longer than a few thousand multiply-adds.
  int work_threads() const {
    return p.batch * p.kv_heads * rows * p.keys * (p.key_dim + p.value_dim) < 1 << 17 ? 1 : p.threads;
  }
  std::size_t part_bytes() const {
    return Workspace::room<char>(sizeof(Part)) + Workspace::room<T>(kGroupRows<T> * value_stride);
  }
  Part& part(Index batch, Index kv_head, Index split, Index group) {
    const Index i = ((batch * p.kv_heads + kv_head) * splits + split) * groups + group;
    return *reinterpret_cast<Part*>(parts_ + static_cast<std::size_t>(i) * part_bytes());
  }

  T* rows_of(Index batch, Index head) {
    return kept_ + (batch * p.heads + head) * kept.head_size();
  }

  void read_keys(Index batch, Index kv_head, Index split) {
    Workspace& workspace = thread_workspace();
    const Index query_room = kGroupRows<T> * key_stride, copied = in_place ? 0 : block;
    workspace.reserve(TileBuffer<T>::room(p, block) + Workspace::room<T>(groups * query_room) +
                      Workspace::room<T>(copied * key_stride) +
                      Workspace::room<T>(copied * value_stride) +
                      Workspace::room<T>(block * kMaxLanes<T>) +
                      Workspace::room<T>(kGroupRows<T> * value_stride));
    const TileBuffer<T> buffer(p, block, workspace);
    T* queries = workspace.take<T>(groups * query_room);
    T* key_scratch = workspace.take<T>(copied * key_stride);
    T* value_scratch = workspace.take<T>(copied * value_stride);
    T* factors = workspace.take<T>(block * kMaxLanes<T>);
    T* block_sum = workspace.take<T>(kGroupRows<T> * value_stride);
    std::fill_n(queries, groups * query_room, T{0});

    const Band band(p, batch);
    Index from = p.keys, to = 0;
    for (Index g = 0; g < groups; ++g) {
      Part& w = *new (&part(batch, kv_head, split, g)) Part;
      w.panel.batch = batch;
      w.panel.n = static_cast<int>(std::min<Index>(kGroupRows<T>, rows - g * kGroupRows<T>));
      w.panel.vectors = (w.panel.n + kLanes<T> - 1) / kLanes<T>;
      w.panel.width = w.panel.vectors * kLanes<T>;
      for (int lane = 0; lane < w.panel.n; ++lane) {
        const Index row = g * kGroupRows<T> + lane;
        const Index head = kv_head * p.group() + row / p.queries, query = row % p.queries;
        w.panel.head[lane] = head;
        w.panel.query[lane] = query;
        T* q = queries + g * query_room + lane * key_stride;
        read_row(p.query.dtype, RowsIn(p.query, batch, head).row(query), p.query.column_stride,
                 p.key_dim, q);
      }
      w.panel.place(p, band);
      for (int lane = 0; lane < w.panel.n; ++lane) {
        T* q = queries + g * query_room + lane * key_stride;
        const T factor = w.panel.query_factor(p, w.panel.head[lane]);
        for (Index c = 0; c < p.key_dim; ++c) q[c] *= factor;
      }
      const bool measured = p.health != nullptr;
      if (split == 0)
        w.state.start(p, w.panel, measured);
      else  // the first part has seen the sink
        w.state.start(measured);
      if (measured) {
        w.state.clear();
        w.lone.start();
      }
      if (keeps_rows) {
        for (int lane = 0; lane < w.panel.n; ++lane)
          kept.place(w.lanes, w.panel, lane, lane + 1, rows_of(batch, w.panel.head[lane]));
        kept.start(w.lanes, split * split_keys, std::min((split + 1) * split_keys, p.keys));
      }
      std::fill_n(w.output(), kGroupRows<T> * value_stride, T{0});
      from = std::min(from, w.panel.first);
      to = std::max(to, w.panel.last);
    }

    const RowsIn key_rows(p.key, batch, kv_head), value_rows(p.value, batch, kv_head);
    from = std::max(from, split * split_keys);
    to = std::min(to, (split + 1) * split_keys);
    for (Index k = from / block * block; k < to; k += block) {
      checkpoint();
      const Index first = std::max(k, from), end = std::min(k + block, to);
      auto attend_block = [&](auto keys, auto values) {
        for (Index g = 0; g < groups; ++g) {
          Part& w = part(batch, kv_head, split, g);
          ScoreTile<T> tile;
          if (!prepare_tile(p, w.panel, first, end, buffer, tile)) continue;
          decltype(keys) tile_keys{keys.row(tile.first - first), keys.stride};
          decltype(values) tile_values{values.row(tile.first - first), values.stride};
          const T* q = queries + g * query_room;
          with_vectors(w.panel.vectors, [&](auto vectors) {
            if constexpr (vectors <= 2) {
              if (p.health)
                attend<vectors, true>(w, tile, q, tile_keys, tile_values, factors, block_sum);
              else
                attend<vectors, false>(w, tile, q, tile_keys, tile_values, factors, block_sum);
            }
          });
        }
      };
      if (in_place)
        with_type(p.key.dtype, [&](auto* type) {
          using S = std::remove_pointer_t<decltype(type)>;
          if constexpr (std::is_same_v<decltype(widen(S{})), T>)
            attend_block(key_rows.from<S>(first), value_rows.from<S>(first));
        });
      else
        attend_block(stage(key_rows, first, end, p.key_dim, kLanes<T>, true, key_scratch),
                     stage(value_rows, first, end, p.value_dim, kLanes<T>, true, value_scratch));
    }
  }

  // f(rows as a constant, first row) for all rows of a panel: 4, 2 or 1 at a time.
  template <class F>
  static LH_INLINE void by_rows(int n, F f) {
    if (n == 1) return f(std::integral_constant<int, 1>{}, 0);
    if (n == 2) return f(std::integral_constant<int, 2>{}, 0);
    for (int r = 0; r < n; r += 4) f(std::integral_constant<int, 4>{}, r);
  }

  template <int Vectors, bool Measured, class S>
  void attend(Part& w, ScoreTile<T>& tile, const T* query, RowBlock<S> keys,
              RowBlock<S> values, T* factors, T* block_sum) {
    constexpr int W = kLanes<T>;
    const Index width = tile_width(w.panel, tile);
    // Lanes that no row uses hold numbers that nobody looks at; they must only be finite.
    if (w.panel.n < width) std::fill_n(tile.scores, tile.n * width, T{0});
    by_rows(w.panel.n, [&](auto rows_at_once, int r) LH_INLINE_LAMBDA {
      multiply_rows<rows_at_once>(keys, tile.n, query + r * key_stride, key_stride,
                                  tile.scores + r, width);
    });
    if (w.panel.is_late) {
      RunningMax<Vectors, T> ignored;
      scale_scores(w.panel, tile.scores, 0, tile.n, ignored);
    }
    alignas(64) T rescale[Vectors * W], sums[Vectors * W];
    std::copy_n(w.state.sum, Vectors * W, sums);
    if (width < W)
      weigh_side_by_side<Measured>(w, tile, static_cast<int>(width), rescale);
    else
      weigh<Vectors, Measured>(w, tile, rescale);
    if constexpr (Measured) {
      kept.take(w.lanes, tile, width, w.state.max);
      if (p.queries == 1) w.lone.take(tile, width, w.panel.n, p.offset(w.panel.batch), rescale);
    }
    add_weights(tile.scores, tile.n, width, rescale, sums);
    std::copy_n(sums, w.panel.n, w.state.sum);
    if (p.dropout > 0) {
      dropout_factors(p, w.panel, tile.first, tile.n, factors);
      for (Index x = 0; x < tile.n * width; x += W)
        store(tile.scores + x, load(tile.scores + x) * load(factors + x));
    }
    const bool guard = tile.hides && !all_finite(values, tile.masked_first, tile.masked_last,
                                                 p.value_dim);
    const ReadOrder order(tile.n);
    for (Index from = 0; from < tile.n; from += kDecodeSumKeys) {
      const Index to = std::min(from + kDecodeSumKeys, tile.n);
      std::fill_n(block_sum, kGroupRows<T> * value_stride, T{0});
      if (guard)
        accumulate_seen(w, tile, values, order, from, to, block_sum);
      else
        by_rows(w.panel.n, [&](auto rows_at_once, int r) LH_INLINE_LAMBDA {
          accumulate_rows<rows_at_once>(tile.scores + r, width, values, order, from, to,
                                        value_stride, block_sum + r * value_stride, value_stride);
        });
      T* output = w.output();
      for (int r = 0; r < w.panel.n; ++r) {
        const Vec<T> before = splat(from == 0 ? rescale[r] : T{1});
        for (Index c = r * value_stride; c < (r + 1) * value_stride; c += W)
          store(output + c, fma(load(output + c), before, load(block_sum + c)));
      }
    }
  }

  // Lanes that a key takes in a tile. Fewer rows than lanes stand side by side for several keys, if there
  // are enough of them and no mask, dropout or late scale has its say, which know one key per vector.
  Index tile_width(const Panel<T>& panel, const ScoreTile<T>& tile) const {
    const bool masked = tile.masked_first < tile.masked_last;
    if (tile.n < 32 || masked || p.dropout > 0 || panel.is_late) return panel.width;
    return panel.n <= 2 ? panel.n : panel.n <= 4 ? 4 : panel.width;
  }

  // The tile becomes weights, relative to the rows' maximum so far.
  template <int Vectors, bool Measured>
  void weigh(Part& w, const ScoreTile<T>& tile, T* rescale) {
    constexpr Index width = Vectors * kLanes<T>;
    RunningMax<Vectors, T> running;
    update_max<Vectors>(tile.scores, tile.masked_first, running);
    update_max<Vectors>(tile.scores + tile.masked_last * width, tile.n - tile.masked_last,
                            running);
    mask_tile<Vectors, Measured>(p, w.panel, tile, running, w.state);
    softmax_step<Vectors, Measured>(w.panel, tile, running, w.state, rescale);
  }

  // The same with `rows` lanes per key, several keys per vector: to the softmax a step of such keys is
  // one, and each lane a part of a row.
  template <bool Measured>
  void weigh_side_by_side(Part& w, const ScoreTile<T>& tile, int rows, T* rescale) {
    constexpr int W = kLanes<T>;
    const int keys = W / rows;
    const Index whole = tile.n / keys;
    ScoreTile<T> steps{tile.scores, (tile.first + keys - 1) / keys, (tile.n + keys - 1) / keys,
                       whole, whole, tile.mask, false};
    Panel<T> lanes;
    lanes.vectors = 1;
    lanes.width = lanes.n = W;
    for (int lane = 0; lane < W; ++lane)  // positions in steps
      lanes.position[lane] =
          static_cast<T>(steps.first) +
          (w.panel.position[lane % rows] - static_cast<T>(tile.first + lane / rows)) / keys;
    if (whole < steps.n) {  // lanes past the last key are hidden
      std::fill(tile.scores + tile.n * rows, tile.scores + steps.n * W, T{0});
      steps.masked_last = steps.n;
      steps.hides = true;
      for (int lane = 0; lane < W; ++lane)
        steps.mask.visible[lane] = whole * keys + lane / rows < tile.n ? -1 : 0;
    }
    RowState<T>& state = w.state;
    spread_lanes(state, rows, Measured);
    RunningMax<1, T> running;
    update_max<1>(steps.scores, whole, running);
    mask_tile<1, Measured>(p, lanes, steps, running, state);
    alignas(64) T own[W], top[W];
    Int<T> has_argmax[W] = {};
    store(own, running.max[0]);
    for (int row = 0; row < rows; ++row) {
      int best = row;
      for (int lane = row; lane < W; lane += rows) best = own[lane] > own[best] ? lane : best;
      for (int lane = row; lane < W; lane += rows) top[lane] = own[best];
      has_argmax[best] = -1;
    }
    running.max[0] = load(top);
    if constexpr (Measured) store(state.distance, load(state.distance) / static_cast<T>(keys));
    softmax_step<1, Measured>(lanes, steps, running, state, rescale, load(has_argmax));
    if constexpr (Measured) {
      store(state.distance, load(state.distance) * static_cast<T>(keys));
      merge_lanes(state, rows);
    }
  }

  // The same sums, leaving out hidden values that hold a NaN or an infinity (see forward.cpp).
  template <class S>
  void accumulate_seen(const Part& w, const ScoreTile<T>& tile, RowBlock<S> values,
                       ReadOrder order, Index from, Index to, T* sums) {
    constexpr int W = kLanes<T>;
    const Index width = w.panel.width;
    for (int r = 0; r < w.panel.n; ++r)
      for (Index i = from; i < to; ++i) {
        const Index j = order(i);
        const bool masked = j >= tile.masked_first && j < tile.masked_last;
        if (masked && !tile.mask.visible[(j - tile.masked_first) * width + r]) continue;
        const Vec<T> weight = splat(tile.scores[j * width + r]);
        T* to = sums + r * value_stride;
        for (Index c = 0; c < value_stride; c += W)
          store(to + c, fma(weight, load(values.row(j) + c), load(to + c)));
      }
  }

  void finish(Index batch, Index kv_head) {
    constexpr int W = kLanes<T>;
    for (Index g = 0; g < groups; ++g) {
      Part& w = part(batch, kv_head, 0, g);
      T* output = w.output();
      for (Index split = 1; split < splits; ++split) {
        Part& other = part(batch, kv_head, split, g);
        alignas(64) T before[kMaxLanes<T>];
        std::copy_n(w.state.max, w.panel.width, before);
        merge_rows(w.state, other.state, w.panel.vectors, p.health != nullptr);
        alignas(64) T mine[kMaxLanes<T>], theirs[kMaxLanes<T>];
        for (int at = 0; at < w.panel.width; at += W) {
          const Vec<T> top = load(w.state.max + at);
          store(mine + at, rescale_factor<T>(load(before + at), top));
          store(theirs + at, rescale_factor<T>(load(other.state.max + at), top));
        }
        if (p.health) w.lone.merge(other.lone, mine, theirs, w.panel.n);
        for (int r = 0; r < w.panel.n; ++r)
          for (Index c = 0; c < value_stride; c += W) {
            T* to = output + r * value_stride + c;
            const Vec<T> part_of_it = load(other.output() + r * value_stride + c) * theirs[r];
            store(to, fma(load(to), splat(mine[r]), part_of_it));
          }
      }
      alignas(64) T inverse[kMaxLanes<T>], lse[kMaxLanes<T>];
      for (int at = 0; at < w.panel.width; at += W) {
        const Vec<T> sum = load(w.state.sum + at);
        store(inverse + at, inverse_sum<T>(sum));
        store(lse + at, row_lse<T>(load(w.state.max + at), sum));
      }
      for (int r = 0; r < w.panel.n; ++r) {
        for (Index c = 0; c < value_stride; c += W)
          store(output + r * value_stride + c, load(output + r * value_stride + c) * inverse[r]);
        const Index head = w.panel.head[r], query = w.panel.query[r];
        const RowsIn out(p.output, batch, head);
        write_row(p.output.dtype, const_cast<char*>(out.row(query)), p.value_dim,
                  output + r * value_stride);
        if (p.lse) static_cast<T*>(p.lse)[(batch * p.heads + head) * p.queries + query] = lse[r];
      }
    }
    if (!p.health) return;
    Workspace& workspace = thread_workspace();
    workspace.reserve(Workspace::room<T>(kept.scratch_size()));
    T* scratch = workspace.take<T>(kept.scratch_size());
    for (Index g = 0; g < groups; ++g) {
      const Part& w = part(batch, kv_head, 0, g);
      kept.finish(w.lanes, w.panel, w.state);
    }
    for (Index h = 0; h < p.group(); ++h) {  // its rows may lie in several groups
      const Index head = kv_head * p.group() + h;
      Summary<T> summary(p, batch, head, 0);
      for (Index g = h * p.queries / kGroupRows<T>; g * kGroupRows<T> < (h + 1) * p.queries; ++g) {
        const Index first = g * kGroupRows<T>;
        summary.take(part(batch, kv_head, 0, g).state,
                     static_cast<int>(std::max(h * p.queries - first, Index{0})),
                     static_cast<int>(std::min<Index>((h + 1) * p.queries - first, kGroupRows<T>)));
      }
      double* sums = p.health + (batch * p.heads + head) * kHealthSums;
      summary.write(sums);
      if (keeps_rows) kept.write(batch, rows_of(batch, head), scratch, sums);
    }
    for (Index g = 0; g < groups && p.queries == 1; ++g) {
      const Part& w = part(batch, kv_head, 0, g);
      w.lone.write(p, w.panel, w.state);
    }
  }
};

}  // namespace

template <class T>
void decode(const Problem& p) {
  Decode<T>(p).run();
}
template void decode<float>(const Problem&);
template void decode<double>(const Problem&);

}  // namespace levelhead::LEVELHEAD_ISA
