// Patterns: what the rows of a sequence have in common, from the weights of some of them. The forward pass
// leaves those weights here as they go by; they are added up when all are there, row by row, so that the bits
// do not depend on who computed them. levelhead/_health/sampling.py says which rows, docs/health.md what for.
#pragma once

#include "forward.h"

namespace levelhead::LEVELHEAD_ISA {

// A float32 score of this size is off by 2^-10 or so, and its weight with it; a mean over rows still may be.
constexpr double kLargestPatternScore = 4096;

inline Index most_sampled_rows(const Problem& p) {
  return std::clamp<Index>(kPatternWeights / std::max<Index>(p.keys, 1), kPatternLeastRows, kPatternRows);
}

// The rows of one sequence: spread evenly over those that may see enough keys, which follow one another.
struct Sample {
  Index first, candidates, rows;

  Sample(const Problem& p, Index batch) {
    // A query at position i sees from max(0, i - left) to min(length, i + right + 1).
    const Index length = p.length(batch), offset = p.offset(batch);
    const bool wide = length >= kPatternKeys && p.left + p.right + 1 >= kPatternKeys;
    first = std::max<Index>(0, kPatternKeys - 1 - p.right - offset);
    const Index last = std::min(p.queries, length + p.left - kPatternKeys - offset + 1);
    candidates = wide ? std::max<Index>(0, last - first) : 0;
    rows = std::min(candidates, most_sampled_rows(p));
  }
  Index row(Index i) const { return first + i * candidates / rows; }
  // How many come before this query.
  Index before(Index query) const {
    const Index some = std::clamp<Index>(query - first, 0, candidates);
    return some == 0 ? 0 : (some * rows + candidates - 1) / candidates;
  }
};

// The sampled rows among the lanes of a panel, in their order, and where what is kept of each goes.
template <class T>
struct SampledLanes {
  struct Row {
    int lane;
    T *weights, *factor, *tops;
  };
  int n = 0;
  Row row[kMaxLanes<T>];
};

// The rows of a panel if each is the only one of its sequence: then a mean over rows is the row's own weight, and
// of all its weights only these are asked for. They are relative to the maximum so far.
template <class T>
struct LoneRows {
  T most[kMaxLanes<T>] = {};  // the largest, key 0 aside
  T own[kMaxLanes<T>] = {}, previous[kMaxLanes<T>] = {};

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
  // The keys of another part join, after both were brought to a common maximum.
  void merge(const LoneRows& other, const T* mine, const T* theirs, int n) {
    for (int lane = 0; lane < n; ++lane) {
      most[lane] = std::max(most[lane] * mine[lane], other.most[lane] * theirs[lane]);
      own[lane] = own[lane] * mine[lane] + other.own[lane] * theirs[lane];
      previous[lane] = previous[lane] * mine[lane] + other.previous[lane] * theirs[lane];
    }
  }
};

// Kept of a row are its weights, with zeros before and after, and a factor that they must be multiplied by: 0 if the
// row is left out. While keys go by, the weights of a block of keys are relative to the maximum that was known
// then, which is kept too: -inf if nobody saw the block. Where a sequence has no more rows than a sample has, all
// are kept: those that may not see enough keys are left out in the end like any that do not. Of lone rows
// nothing is kept.
template <class T>
class Patterns {
 public:
  using Lanes = SampledLanes<T>;

  // Blocks of keys are such that no tile begins or ends within one of another tile.
  Patterns(const Problem& problem, Index keys_per_block)
      : p(problem), block(keys_per_block), keys(padded(p.keys)), blocks((p.keys + block - 1) / block),
        all(p.queries <= most_sampled_rows(p)),
        rows(!p.health || p.keys < kPatternKeys || p.queries == 1 ? 0
             : all                                                ? p.queries
                                                                  : most_sampled_rows(p)) {}

  // How many numbers the rows of a head take, and write().
  Index head_size() const { return rows ? W + rows * (row_size() + 1 + padded(blocks)) : 0; }
  Index scratch_size() const { return rows ? 2 * keys + padded(p.queries) + W : 0; }

  // The rows of a panel in lanes [from, to), which are one head's; what is kept of it is at `head`.
  void place(Lanes& lanes, const Panel<T>& panel, int from, int to, T* head) const {
    if (rows == 0) return;
    auto add = [&](Index lane, Index i) {
      lanes.row[lanes.n++] = {static_cast<int>(lane), weights_of(head, i), factors_of(head) + i,
                              factors_of(head) + rows + i * padded(blocks)};
    };
    const Index first = panel.query[from];
    if (all) {
      for (int lane = from; lane < to; ++lane) add(lane, first + lane - from);
      return;
    }
    const Sample sample(p, panel.batch);
    for (Index i = sample.before(first); i < sample.rows && sample.row(i) < first + to - from; ++i)
      add(sample.row(i) - first + from, i);
  }
  // Nobody has seen the keys [from, to) yet.
  void start(const Lanes& lanes, Index from, Index to) const {
    for (int i = 0; i < lanes.n && blocks > 1; ++i) {
      T* tops = lanes.row[i].tops;
      std::fill(tops + from / block, tops + (to + block - 1) / block, -kInf<T>);
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
    if (rows > 0) add_up(batch, head, scratch, sums);
  }
  // Those of the heads whose lone rows these are.
  void write(const LoneRows<T>& lone, const Panel<T>& panel, const RowState<T>& state) const {
    for (int at = 0; at < panel.n; at += W) {
      T factor[W];
      const IntVec<T> doubtful = judge(state, at, factor);
      for (int i = 0; i < W && at + i < panel.n; ++i) {
        const int lane = at + i;
        double* sums = p.health + (panel.batch * p.heads + panel.head[lane]) * kHealthSums;
        if (doubtful[i])
          write_exactly(panel.batch, panel.head[lane], sums);
        else if (factor[i] != T{0})
          write(sums, state.sum[lane], lone.own[lane], lone.previous[lane],
                std::max(lone.most[lane], state.first[lane]), lone.most[lane]);
      }
    }
  }

 private:
  static constexpr int W = kLanes<T>;
  static constexpr Index padded(Index n) { return (n + W - 1) / W * W; }

  const Problem& p;
  const Index block, keys, blocks;
  const bool all;
  const Index rows;

  struct Kept {
    Index at;  // which row it is
    const T* weights;
    T factor;
  };

  Index row_size() const { return keys + W; }
  T* weights_of(T* head, Index i) const { return head + W + i * row_size(); }
  T* factors_of(T* head) const { return weights_of(head, rows); }

  // Sums over rows divided by `whole`.
  static void write(double* sums, double whole, double self, double previous, double offset, double key) {
    sums[kPatternSequences] = 1;
    sums[kSelfWeight] = self / whole;
    sums[kPreviousWeight] = previous / whole;
    sums[kOffsetWeight] = offset / whole;
    sums[kSharedKey] = key / whole;
  }

  // Not inlined: the loops around it would get other registers, and be slower.
  __attribute__((noinline)) void keep(const Lanes& lanes, const ScoreTile<T>& tile, Index width,
                                      const T* max) const {
    const Index end = tile.first + tile.n, from = tile.first / block, to = (end + block - 1) / block;
    const Index block_first = from * block, block_end = std::min(to * block, keys);
    for (int i = 0, next; i < lanes.n; i = next) {  // those of one vector
      const int lane = lanes.row[i].lane / W * W;
      for (next = i + 1; next < lanes.n && lanes.row[next].lane < lane + W; ++next) {}
      if (next - i == W)
        unpack<true>(tile, width, lanes, i, next);
      else if (next - i > 1 && lane + W <= width)
        unpack<false>(tile, width, lanes, i, next);
      else
        for (int x = i; x < next; ++x) {
          T* weights = lanes.row[x].weights + tile.first;
          const T* scores = tile.scores + lanes.row[x].lane;
          for (Index j = 0; j < tile.n; ++j) weights[j] = scores[j * width];
        }
    }
    if (blocks == 1 && tile.first == block_first && end == block_end) return;  // as usual in short calls
    for (int i = 0; i < lanes.n; ++i) {
      const auto& row = lanes.row[i];
      if (block_first < tile.first) std::fill(row.weights + block_first, row.weights + tile.first, T{0});
      if (end < block_end) std::fill(row.weights + end, row.weights + block_end, T{0});
      for (Index b = from; b < to; ++b) row.tops[b] = max[row.lane];
    }
  }

  // The sampled lanes [from, to), which are some or all of a vector.
  template <bool All>
  static void unpack(const ScoreTile<T>& tile, Index width, const Lanes& lanes, int from, int to) {
    const T* scores = tile.scores + lanes.row[from].lane / W * W;
    T* row[W] = {};
    for (int i = from; i < to; ++i) row[lanes.row[i].lane % W] = lanes.row[i].weights + tile.first;
    Index j = 0;
    for (; j + W <= tile.n; j += W) {
      Vec<T> part[W];
      LH_UNROLL for (int i = 0; i < W; ++i) part[i] = load(scores + (j + i) * width);
      transpose(part);
      LH_UNROLL for (int i = 0; i < W; ++i)
        if (All || row[i]) store(row[i] + j, part[i]);
    }
    for (; j < tile.n; ++j)
      for (int i = 0; i < W; ++i)
        if (All || row[i]) row[i][j] = scores[j * width + i];
  }

  __attribute__((noinline)) void settle(const Lanes& lanes, const Panel<T>& panel,
                                        const RowState<T>& state) const {
    alignas(64) T factor[kMaxLanes<T>];
    alignas(64) Int<T> doubtful[kMaxLanes<T>];
    for (int at = 0; at < panel.n; at += W) store(doubtful + at, judge(state, at, factor + at));
    for (int i = 0; i < lanes.n; ++i) {
      const auto& row = lanes.row[i];
      store(row.weights + keys, Vec<T>{});
      *row.factor = factor[row.lane];
      if (doubtful[row.lane])
        compute_exactly(panel.batch, panel.head[row.lane], panel.query[row.lane], row);
      else if (blocks > 1 && factor[row.lane] != T{0})
        rescale(row, state.max[row.lane]);
    }
  }

  // All blocks relative to the last maximum.
  void rescale(const typename Lanes::Row& row, T max) const {
    for (Index b = 0; b < blocks; ++b) {
      if (b % W == 0) store(row.tops + b, exp2<T>(load(row.tops + b) - max));
      const T factor = row.tops[b];
      T *from = row.weights + b * block, *to = row.weights + std::min((b + 1) * block, keys);
      if (factor == T{0})
        std::fill(from, to, T{0});
      else if (factor != T{1})
        for (; from < to; from += W) store(from, load(from) * factor);
    }
  }

  // What rows must be multiplied by, 0 for those to leave out; and of which this is to be doubted.
  IntVec<T> judge(const RowState<T>& state, int at, T* factor) const {
    constexpr T limit = sizeof(T) == 4 ? static_cast<T>(kLargestPatternScore * kLog2e) : kInf<T>;
    const IntVec<T> enough = load(state.keys + at) >= static_cast<T>(kPatternKeys);
    const Vec<T> inverse = inverse_sum<T>(load(state.sum + at));
    store(factor, select<T>(enough & state.finite(at), inverse, Vec<T>{}));
    IntVec<T> doubtful = abs<T>(load(state.max + at)) > limit;
    if (p.has_bias()) doubtful |= state.doubtful(at);
    return enough & doubtful;
  }

  void compute_exactly(Index batch, Index head, Index query, const typename Lanes::Row& row) const {
    const ExactRow exact(p, batch, head, query);
    *row.factor = exact.finite;
    if (!exact.finite) return;
    std::fill_n(row.weights, keys, T{0});
    const std::vector<double> weights = exact.weights();
    for (std::size_t i = 0; i < weights.size(); ++i)
      row.weights[exact.pairs[i].key] = static_cast<T>(weights[i]);
  }

  void write_exactly(Index batch, Index head, double* sums) const {
    const ExactRow exact(p, batch, head, 0);
    if (!exact.finite) return;
    const std::vector<double> weights = exact.weights();
    double own = 0, previous = 0, first = 0, most = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Index key = exact.pairs[i].key, behind = p.offset(batch) - key;
      double& largest = key == 0 ? first : most;
      largest = std::max(largest, weights[i]);
      if (behind == 0) own = weights[i];
      if (behind == 1) previous = weights[i];
    }
    write(sums, 1, own, previous, std::max(first, most), most);
  }

  __attribute__((noinline)) void add_up(Index batch, T* head, T* scratch, double* sums) const {
    const Sample sample(p, batch);
    Kept row[kPatternRows];
    int n = 0;
    for (Index i = 0; i < (all ? rows : sample.rows); ++i)
      if (const T factor = factors_of(head)[i]; factor != T{0})
        row[n++] = {all ? i : sample.row(i), weights_of(head, i), factor};
    if (n == 0) return;
    store(head, Vec<T>{});
    const Index last = row[n - 1].at, offsets = keys + last - row[0].at;
    T *by_key = scratch, *by_offset = scratch + keys;  // the latter by key - row + last
    std::fill_n(scratch, keys + offsets + W, T{0});
    for (int i = 0; i < n;) {
      T* ahead = by_offset + last - row[i].at;
      if (i + 4 <= n && row[i + 3].at - row[i].at <= W) {  // the zeros around them reach so far
        add<4>(row + i, by_key, ahead);
        i += 4;
      } else {
        add<1>(row + i, by_key, ahead);
        ++i;
      }
    }
    auto behind = [&](Index offset) {
      const Index at = p.offset(batch) - offset + last;
      return at >= 0 && at < offsets ? by_offset[at] : T{0};
    };
    by_key[0] = 0;
    write(sums, n, behind(0), behind(1), largest(by_offset, offsets), largest(by_key, keys));
  }

  // Adds N rows, the first of which has its offsets at `ahead`.
  template <int N>
  LH_INLINE void add(const Kept* row, T* by_key, T* ahead) const {
    Vec<T> factor[N];
    const T *same_key[N], *same_offset[N];
    LH_UNROLL for (int r = 0; r < N; ++r) {
      factor[r] = splat(row[r].factor);
      same_key[r] = row[r].weights;
      same_offset[r] = row[r].weights + (row[r].at - row[0].at);
    }
    auto sum = [&](const T* const* from, Index j) LH_INLINE_LAMBDA {
      Vec<T> sum = load(from[0] + j) * factor[0];
      LH_UNROLL for (int r = 1; r < N; ++r) sum = fma(load(from[r] + j), factor[r], sum);
      return sum;
    };
    for (Index j = 0; j < keys; j += W) store(by_key + j, load(by_key + j) + sum(same_key, j));
    for (Index j = row[0].at - row[N - 1].at; j < keys; j += W)
      store(ahead + j, load(ahead + j) + sum(same_offset, j));
  }

  static T largest(const T* x, Index n) {
    Vec<T> most = {};
    Index i = 0;
    for (; i + W <= n; i += W) most = max(most, load(x + i));
    T rest = fold<T>(most, [](T a, T b) { return std::max(a, b); });
    for (; i < n; ++i) rest = std::max(rest, x[i]);
    return rest;
  }
};

}  // namespace levelhead::LEVELHEAD_ISA
