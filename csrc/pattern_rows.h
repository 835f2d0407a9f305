// Patterns from the weights of sampled rows, which are copied as they go by, or from those of lone rows.
#pragma once

#include "patterns.h"

namespace levelhead::LEVELHEAD_ISA {

// The sampled rows among the lanes of a panel, in their order, and where what is kept of each goes.
template <class T>
struct SampledLanes {
  struct Row {
    int lane;
    T *weights, *factors;
  };
  int n = 0;
  Row row[kMaxLanes<T>];
};

// The weights of sampled rows, and for each row a factor per block of keys. While the keys go by, that is the
// maximum which the weights are relative to, -inf if nobody saw the block; in the end it is what they must be
// multiplied by. One more is that of the whole row, 0 if it is left out.
template <class T>
class KeptRows {
 public:
  using Lanes = SampledLanes<T>;

  // No two tiles have keys of the same block.
  KeptRows(const Problem& problem, Index keys_per_block)
      : p(problem), block(keys_per_block), keys(padded(p.keys)), blocks((p.keys + block - 1) / block),
        rows(std::min(p.queries, most_sampled_rows(p))) {}

  // How many numbers the rows of a head take, and write().
  Index head_size() const { return rows * (keys + factors()); }
  Index scratch_size() const { return 2 * keys + padded(p.queries); }

  // The panel's lanes [from, to) are rows of the head that is kept at `head`.
  void place(Lanes& lanes, const Panel<T>& panel, int from, int to, T* head) const {
    const Index first = panel.query[from];
    Sample(p, panel.batch).among(first, first + to - from, [&](Index i, Index row) {
      lanes.row[lanes.n++] = {static_cast<int>(row - first) + from, weights_of(head, i),
                              factors_of(head, i)};
    });
  }
  // Nobody has seen the keys [from, to) yet.
  void start(const Lanes& lanes, Index from, Index to) const {
    for (int i = 0; i < lanes.n && blocks > 1; ++i) {
      T* factors = lanes.row[i].factors;
      std::fill(factors + from / block, factors + (to + block - 1) / block, -kInf<T>);
    }
  }

  // A tile after its step of the softmax, `width` lanes to a key; its weights are relative to `max`.
  void take(const Lanes& lanes, const ScoreTile<T>& tile, Index width, const T* max) const {
    if (lanes.n > 0) keep(lanes, tile, width, max);
  }

  // When all keys have gone by.
  void finish(const Lanes& lanes, const Panel<T>& panel, const RowState<T>& state) const {
    if (lanes.n > 0) settle(lanes, panel, state);
  }

  // The columns of a head from its rows.
  void write(Index batch, T* head, T* scratch, double* sums) const {
    const Sample sample(p, batch);
    if (sample.rows == 0) return;
    const Index last = sample.row(sample.rows - 1), offsets = keys + last;
    T *by_key = scratch, *by_offset = scratch + keys;  // the latter by key - row + last
    std::fill_n(scratch, keys + offsets, T{0});
    int taken = 0;
    for (Index i = 0; i < sample.rows; ++i) {
      const T *weights = weights_of(head, i), *factor = factors_of(head, i);
      if (factor[factors() - 1] == T{0}) continue;
      ++taken;
      T* ahead = by_offset + last - sample.row(i);
      for (Index b = 0; b < blocks; ++b)
        if (factor[b] != T{0})  // else there may be no numbers
          for (Index j = b * block; j < std::min((b + 1) * block, keys); j += W) {
            const Vec<T> weight = load(weights + j) * factor[b];
            store(by_key + j, load(by_key + j) + weight);
            store(ahead + j, load(ahead + j) + weight);
          }
    }
    if (taken == 0) return;
    auto behind = [&](Index offset) {
      const Index at = p.offset(batch) - offset + last;
      return at >= 0 && at < offsets ? by_offset[at] : T{0};
    };
    by_key[0] = 0;
    write_patterns(sums, taken, behind(0), behind(1), largest(by_offset, offsets), largest(by_key, keys));
  }

 private:
  static constexpr int W = kLanes<T>;
  static constexpr Index padded(Index n) { return (n + W - 1) / W * W; }

  const Problem& p;
  const Index block, keys, blocks, rows;

  Index factors() const { return padded(blocks) + W; }
  T* weights_of(T* head, Index i) const { return head + i * (keys + factors()); }
  T* factors_of(T* head, Index i) const { return weights_of(head, i) + keys; }

  // Not inlined, like what follows: the loops around would be slower.
  __attribute__((noinline)) void keep(const Lanes& lanes, const ScoreTile<T>& tile, Index width,
                                      const T* max) const {
    const Index end = tile.first + tile.n, from = tile.first / block, to = (end + block - 1) / block;
    const Index block_first = from * block, block_end = std::min(to * block, keys);
    for (int i = 0, next; i < lanes.n; i = next) {  // those of one vector
      const int lane = lanes.row[i].lane / W * W;
      for (next = i + 1; next < lanes.n && lanes.row[next].lane < lane + W; ++next) {}
      if (next - i > 1 && lane + W <= width) {
        T* weights[W] = {};
        for (int x = i; x < next; ++x) weights[lanes.row[x].lane - lane] = lanes.row[x].weights + tile.first;
        unpack(tile.scores + lane, width, tile.n, weights);
      } else {
        for (int x = i; x < next; ++x)
          copy(tile.scores + lanes.row[x].lane, width, tile.n, lanes.row[x].weights + tile.first);
      }
    }
    for (int i = 0; i < lanes.n; ++i) {
      const auto& row = lanes.row[i];
      if (block_first < tile.first) std::fill(row.weights + block_first, row.weights + tile.first, T{0});
      if (end < block_end) std::fill(row.weights + end, row.weights + block_end, T{0});
      for (Index b = from; b < to; ++b) row.factors[b] = max[row.lane];
    }
  }

  // Every `width`-th of n weights, several at a time.
  static void copy(const T* from, Index width, Index n, T* to) {
    Index j = 0;
    for (; j + W <= n; j += W, from += W * width) {
      Vec<T> part;
      LH_UNROLL for (int i = 0; i < W; ++i) part[i] = from[i * width];
      store(to + j, part);
    }
    for (; j < n; ++j, from += width) to[j] = *from;
  }
  // Those of a vector's lanes, where they are to go somewhere.
  static void unpack(const T* from, Index width, Index n, T* const (&to)[W]) {
    Index j = 0;
    for (; j + W <= n; j += W, from += W * width) {
      Vec<T> part[W];
      LH_UNROLL for (int i = 0; i < W; ++i) part[i] = load(from + i * width);
      transpose(part);
      LH_UNROLL for (int i = 0; i < W; ++i)
        if (to[i]) store(to[i] + j, part[i]);
    }
    for (; j < n; ++j, from += width)
      for (int i = 0; i < W; ++i)
        if (to[i]) to[i][j] = from[i];
  }

  __attribute__((noinline)) void settle(const Lanes& lanes, const Panel<T>& panel,
                                        const RowState<T>& state) const {
    alignas(64) T factor[kMaxLanes<T>];
    alignas(64) Int<T> doubtful[kMaxLanes<T>];
    for (int at = 0; at < panel.n; at += W)
      store(doubtful + at, row_factors(p, state, at, factor + at));
    for (int i = 0; i < lanes.n; ++i) {
      const auto& row = lanes.row[i];
      const T whole = row.factors[factors() - 1] = factor[row.lane];
      if (blocks == 1)
        *row.factors = whole;
      else
        for (T* b = row.factors; b < row.factors + blocks; b += W)
          store(b, exp2<T>(load(b) - state.max[row.lane]) * whole);
      if (doubtful[row.lane]) compute_exactly(panel, row);
    }
  }

  void compute_exactly(const Panel<T>& panel, const typename Lanes::Row& row) const {
    std::fill_n(row.weights, keys, T{0});
    const bool counts = exact_weights<T>(
        p, panel.batch, panel.head[row.lane], panel.query[row.lane],
        [&](Index key, double weight) { row.weights[key] = static_cast<T>(weight); });
    std::fill_n(row.factors, factors(), static_cast<T>(counts));
  }
};

// The rows of a panel if each is the only one of its sequence: then a mean over rows is the row's own weight, and
// of all its weights only these are asked for. They are relative to the maximum so far.
template <class T>
struct LoneRows {
  T most[kMaxLanes<T>];  // the largest, key 0 aside
  T own[kMaxLanes<T>], previous[kMaxLanes<T>];

  void start() {
    for (T* x : {most, own, previous}) std::fill_n(x, kMaxLanes<T>, T{0});
  }

  // A tile after its step of the softmax, `width` lanes to a key, of n rows at this position.
  void take(const ScoreTile<T>& tile, Index width, int n, Index position, const T* rescale) {
    constexpr int W = kLanes<T>, Step = 4 * W;  // a multiple of the width
    const T *from = tile.scores + (tile.first == 0 ? width : 0), *end = tile.scores + tile.n * width;
    Vec<T> top[4] = {};
    for (; from + Step <= end; from += Step)
      LH_UNROLL for (int v = 0; v < 4; ++v) top[v] = max(top[v], load(from + v * W));
    T all[Step];
    LH_UNROLL for (int v = 0; v < 4; ++v) store(all + v * W, top[v]);
    for (int x = 0; from + x < end; ++x) all[x] = std::max(all[x], from[x]);
    auto weight = [&](Index key, int lane) {
      const Index j = key - tile.first;
      return j >= 0 && j < tile.n ? tile.scores[j * width + lane] : T{0};
    };
    for (int lane = 0; lane < n; ++lane) {
      most[lane] *= rescale[lane];
      for (Index x = lane; x < Step; x += width) most[lane] = std::max(most[lane], all[x]);
      own[lane] = own[lane] * rescale[lane] + weight(position, lane);
      previous[lane] = previous[lane] * rescale[lane] + weight(position - 1, lane);
    }
  }
  // The keys of another part join; `mine` and `theirs` bring both to a common maximum.
  void merge(const LoneRows& other, const T* mine, const T* theirs, int n) {
    for (int lane = 0; lane < n; ++lane) {
      most[lane] = std::max(most[lane] * mine[lane], other.most[lane] * theirs[lane]);
      own[lane] = own[lane] * mine[lane] + other.own[lane] * theirs[lane];
      previous[lane] = previous[lane] * mine[lane] + other.previous[lane] * theirs[lane];
    }
  }

  // The columns of the rows' heads, when all keys have gone by.
  void write(const Problem& p, const Panel<T>& panel, const RowState<T>& state) const {
    constexpr int W = kLanes<T>;
    for (int at = 0; at < panel.n; at += W) {
      T factor[W];
      const IntVec<T> doubtful = row_factors(p, state, at, factor);
      for (int lane = at; lane < std::min(at + W, panel.n); ++lane) {
        double* sums = p.health + (panel.batch * p.heads + panel.head[lane]) * kHealthSums;
        if (doubtful[lane - at])
          write_exactly(p, panel.batch, panel.head[lane], sums);
        else if (factor[lane - at] != T{0})
          write_patterns(sums, state.sum[lane], own[lane], previous[lane],
                         std::max(most[lane], state.first[lane]), most[lane]);
      }
    }
  }

 private:
  static void write_exactly(const Problem& p, Index batch, Index head, double* sums) {
    double own = 0, previous = 0, first = 0, most = 0;
    const bool counts = exact_weights<T>(p, batch, head, 0, [&](Index key, double weight) {
      if (key == p.offset(batch)) own = weight;
      if (key == p.offset(batch) - 1) previous = weight;
      if (key == 0) first = weight;
      else most = std::max(most, weight);
    });
    if (counts) write_patterns(sums, 1, own, previous, std::max(first, most), most);
  }
};

}  // namespace levelhead::LEVELHEAD_ISA
