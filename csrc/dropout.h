// Dropout as a function of (seed, row, key) alone, so that forward, backward, and any number of
// threads agree on what was dropped without storing it. levelhead._reference has the same in NumPy.
#pragma once

#include "mask.h"

namespace levelhead::LEVELHEAD_ISA {

// Two 32-bit keys of one row of weights, `row` = (batch * heads + head) * queries + query.
inline std::uint64_t dropout_row_key(std::uint64_t seed, Index row) {
  std::uint64_t z = seed + static_cast<std::uint64_t>(row + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

inline std::uint32_t dropout_bits(std::uint32_t low, std::uint32_t high, std::uint32_t key) {
  std::uint32_t x = key * 0x9E3779B1u + low;
  x = (x ^ x >> 16) * 0x85EBCA6Bu ^ high;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}

// For keys [first, first + n) of a tile: what each weight is multiplied by, 0 or 1 / (1 - rate).
template <class T>
inline void dropout_factors(const Problem& p, const Panel<T>& panel, Index first, Index n,
                            T* factor) {
  std::uint32_t low[kMaxLanes<T>], high[kMaxLanes<T>];
  for (int lane = 0; lane < panel.width; ++lane) {
    const int source = std::min(lane, panel.n - 1);
    const Index row = (panel.batch * p.heads + panel.head[source]) * p.queries + panel.query[source];
    const std::uint64_t key = dropout_row_key(p.seed, row);
    low[lane] = static_cast<std::uint32_t>(key);
    high[lane] = static_cast<std::uint32_t>(key >> 32);
  }
  const std::uint32_t threshold = static_cast<std::uint32_t>(p.dropout * 0x1p32);
  const T kept = static_cast<T>(1.0 / (1.0 - p.dropout));
  for (Index j = 0; j < n; ++j) {
    const std::uint32_t key = static_cast<std::uint32_t>(first + j);
    for (int lane = 0; lane < panel.width; ++lane)
      factor[j * panel.width + lane] =
          dropout_bits(low[lane], high[lane], key) >= threshold ? kept : T{0};
  }
}

}  // namespace levelhead::LEVELHEAD_ISA
