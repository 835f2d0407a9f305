// One row's statistics by their definition, in float64, score by score. It is slow, and serves the few rows
// on which the fast way would be wrong: scores whose squares overflow, pairs that a bias hides from the
// statistics only (docs/health.md) and that the softmax of the row still feels, a NaN among those.
#pragma once

#include <vector>

#include "mask.h"

namespace levelhead::LEVELHEAD_ISA {

inline void clear_sums(double* sums) {
  std::fill(sums, sums + kHealthSums, 0.0);
  sums[kScoreMax] = -kInf<double>;
  sums[kScoreMin] = kInf<double>;
}

// A pair that the statistics count: its key, and the bias of a floating mask.
struct CountedPair {
  Index key;
  double bias;
};

inline std::vector<CountedPair> counted_pairs(const Problem& p, Index batch, Index head, Index query) {
  std::vector<CountedPair> pairs;
  const Band band(p, batch);
  const double hidden = hidden_bias(p.mask.dtype);
  const Index size = static_cast<Index>(size_of(p.mask.dtype));
  for (Index j = band.low(query); j < band.high(query); ++j) {
    double bias = 0;
    if (p.mask) {
      const char* at = p.mask.matrix(batch, head) +
                       (query * p.mask.row_stride + j * p.mask.column_stride) * size;
      if (p.mask.dtype == Dtype::boolean) {
        if (!*at) continue;
      } else {
        read_row(p.mask.dtype, at, 1, 1, &bias);
        if (bias <= hidden) continue;
      }
    }
    pairs.push_back({j, bias});
  }
  return pairs;
}

// A row's scores and logits, of the pairs that the statistics count.
struct ExactRow {
  std::vector<CountedPair> pairs;
  std::vector<double> scores, logits;
  double sink, top;  // the largest logit, or the sink
  bool finite;       // all of them are

  ExactRow(const Problem& p, Index batch, Index head, Index query)
      : pairs(counted_pairs(p, batch, head, query)), sink(p.sinks ? p.sinks[head] : -kInf<double>),
        top(sink), finite(sink < kInf<double>) {
    std::vector<double> q(p.key_dim), k(p.key_dim);
    auto read = [&](const Tensor& t, Index h, Index row, std::vector<double>& to) {
      read_row(t.dtype, RowsIn(t, batch, h).row(row), t.column_stride, p.key_dim, to.data());
    };
    read(p.query, head, query, q);
    for (std::size_t i = 0; finite && i < pairs.size(); ++i) {
      read(p.key, head / p.group(), pairs[i].key, k);
      double score = 0;
      for (Index c = 0; c < p.key_dim; ++c) score += q[c] * k[c];
      score *= p.scale_of(head);
      const double capped = p.softcap > 0 ? p.softcap * std::tanh(score / p.softcap) : score;
      scores.push_back(score);
      logits.push_back(capped + pairs[i].bias);
      top = std::max(top, logits.back());
      finite = std::isfinite(score) && std::isfinite(logits.back());
    }
  }

  std::vector<double> weights() const {
    std::vector<double> weights;
    double sum = std::exp(sink - top);
    for (const double logit : logits) sum += weights.emplace_back(std::exp(logit - top));
    for (double& weight : weights) weight /= sum;
    return weights;
  }
};

inline void measure_row(const Problem& p, Index batch, Index head, Index query, double* sums) {
  clear_sums(sums);
  const ExactRow row(p, batch, head, query);
  const auto& [pairs, scores, logits, sink, top, finite] = row;
  const double n = static_cast<double>(pairs.size());
  sums[kRows] = 1;
  sums[kPairs] = sums[kWidestRow] = n;
  if (pairs.empty()) {
    sums[kEmptyRows] = 1;
    return;
  }
  if (!finite) {
    sums[kNonfiniteRows] = 1;
    return;
  }

  double sum = 0;
  for (const double s : scores) {
    sum += s;
    sums[kScoreMax] = std::max(sums[kScoreMax], s);
    sums[kScoreMin] = std::min(sums[kScoreMin], s);
    sums[kLargeScores] += std::abs(s) > kLargeScore;
  }
  sums[kScoreCount] = n;
  sums[kScoreMean] = sum / n;
  for (const double s : scores) sums[kScoreM2] += (s - sums[kScoreMean]) * (s - sums[kScoreMean]);

  // All outcomes but one largest; the sink is one more.
  const auto top_key = static_cast<std::size_t>(
      std::max_element(logits.begin(), logits.end()) - logits.begin());
  const bool sink_leads = sink > logits[top_key];
  double tail = 0, tail_d = 0, tail_2 = 0, tail_3 = 0, distance = 0;
  auto add = [&](double d) {  // d = logit - top
    const double e = std::exp(d);
    tail += e;
    if (e > 0) tail_d += e * d;
    tail_2 += e * e;
    tail_3 += e * e * e;
  };
  const double position = static_cast<double>(p.offset(batch) + query);
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (sink_leads || i != top_key) add(logits[i] - top);
    distance += std::exp(logits[i] - top) * std::abs(position - static_cast<double>(pairs[i].key));
  }
  if (p.sinks && !sink_leads) add(sink - top);

  const double l = 1 + tail, h = 1 / l, r = tail / l, t2 = tail_2 / (l * l), t3 = tail_3 / (l * l * l);
  const double entropy = std::log1p(tail) - tail_d / l;
  const double j2 = h * h * r * r + t2 * (1 + 2 * h * h) + t2 * t2 - 2 * t3;
  sums[kFiniteRows] = 1;
  sums[kEntropy] = entropy;
  sums[kEffectiveKeys] = 1 / (h * h + t2);
  sums[kTopWeight] = h;
  sums[kSignal] = 2 * r - r * r - t2;
  sums[kJacobianNorm] = std::sqrt(std::max(0.0, j2));
  sums[kDistance] = distance * h;
  sums[kNullMass] = p.sinks ? std::exp(sink - top) * h : 0;
  if (pairs.size() == 1) return;
  sums[kChoiceRows] = 1;
  sums[kEntropyRatio] = entropy / std::log(p.sinks ? n + 1 : n);
  sums[kSaturated] = h > kSaturatedWeight;
  sums[kFirstKey] = pairs[0].key == 0 ? std::exp(logits[0] - top) * h : 0;
}

}  // namespace levelhead::LEVELHEAD_ISA
