// The one micro-kernel. Every matrix product of attention, forward and backward, is
//
//     C[r][lanes] = sum over t of A_r[t] * B[t][lanes]
//
// with scalars of A broadcast and rows of B loaded as vectors. Lanes are queries where it can be
// (scores, weights·V, and their gradients), so that softmax and statistics need no horizontal
// step and neither K nor V has to be transposed.
//
// Long sums go by blocks: each product starts at 0, and what it adds to is loaded when it is done. The
// error of n terms then grows with the length of a block plus their number, not with n.
#pragma once

#include "simd.h"

namespace levelhead::LEVELHEAD_ISA {

// A block of rows with unit column stride.
template <class T>
struct RowBlock {
  const T* data;
  Index stride;
  const T* row(Index i) const { return data + i * stride; }
};

// 4 x 3 vectors: 12 accumulators, 3 vectors of B and 1 broadcast fill the 16 registers; 7 loads
// feed 12 multiply-adds. (6 x 2 needs 8 loads and leaves tails: 6 does not divide 64 or 128.)
constexpr int kTileRows = 4;
constexpr int kMaxVectors = 3;

// `step` is the distance between A_r[t] and A_r[t + 1]; Unit says that it is 1.
// `finish(r, v, sum)` takes each result.
template <int Rows, int Vectors, bool Unit, class T, class Finish>
LH_INLINE void multiply(Index n, const T* const (&a)[Rows], Index step, const T* b, Index b_stride,
                        Finish finish) {
  constexpr int W = kLanes<T>;
  Vec<T> acc[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) acc[r][v] = Vec<T>{};
  const T* p[Rows];
  for (int r = 0; r < Rows; ++r) p[r] = a[r];
#pragma GCC unroll 4
  for (Index t = 0; t < n; ++t) {
    Vec<T> row[Vectors];
    for (int v = 0; v < Vectors; ++v) row[v] = load(b + v * W);
    for (int r = 0; r < Rows; ++r) {
      const Vec<T> x = splat(Unit ? p[r][t] : *p[r]);
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(x, row[v], acc[r][v]);
    }
    b += b_stride;
    if (!Unit)
      for (int r = 0; r < Rows; ++r) p[r] += step;
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) finish(r, v, acc[r][v]);
}

// output[c][lanes] = output[c][lanes]·rescale[lanes] + sum over n keys of rows[key][c] *
// weights[key][lanes], for each column c. `output` has room for a multiple of kTileRows columns; what is
// past `columns` is not to be read.
template <int Vectors, class T>
inline void accumulate_lanes(RowBlock<T> rows, Index n, Index columns, const T* weights,
                             Index weights_stride, const T* rescale, T* output) {
  constexpr int W = kLanes<T>;
  constexpr Index width = Vectors * W;
  for (Index c = 0; c < columns; c += kTileRows) {
    const T* a[kTileRows];
    for (int r = 0; r < kTileRows; ++r) a[r] = rows.data + (c + r < columns ? c + r : columns - 1);
    T* to = output + c * width;
    multiply<kTileRows, Vectors, false>(
        n, a, rows.stride, weights, weights_stride, [&](int r, int v, Vec<T> x) LH_INLINE_LAMBDA {
          T* at = to + r * width + v * W;
          store(at, fma(load(at), load(rescale + v * W), x));
        });
  }
}

// output[key][columns] += sum over n lanes of weights[key][lane] * rows[lane][columns], for m keys.
// The rows' columns are whole vectors.
template <class T>
inline void accumulate_keys(const T* weights, Index weights_stride, Index m, RowBlock<T> rows,
                            Index n, Index columns, T* output, Index stride) {
  constexpr int W = kLanes<T>;
  auto step = [&](auto row_count, auto vector_count, Index j, Index c) LH_INLINE_LAMBDA {
    constexpr int Rows = decltype(row_count)::value, Vectors = decltype(vector_count)::value;
    const T* a[Rows];
    for (int r = 0; r < Rows; ++r) a[r] = weights + (j + r) * weights_stride;
    T* to = output + j * stride + c;
    multiply<Rows, Vectors, true>(
        n, a, 1, rows.data + c, rows.stride, [&](int r, int v, Vec<T> x) LH_INLINE_LAMBDA {
          T* at = to + r * stride + v * W;
          store(at, load(at) + x);
        });
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Three = std::integral_constant<int, 3>;
  using Four = std::integral_constant<int, 4>;
  Index c = 0;
  auto panel = [&](auto vector_count) {
    Index j = 0;
    for (; j + 4 <= m; j += 4) step(Four{}, vector_count, j, c);
    for (; j < m; ++j) step(One{}, vector_count, j, c);
    c += W * decltype(vector_count)::value;
  };
  while (c < columns) {  // 8 vectors are 3 + 3 + 2, 4 are 2 + 2
    const Index left = (columns - c) / W;
    if (left == 1) panel(One{});
    else if (left == 2 || left == 4) panel(Two{});
    else panel(Three{});
  }
}

}  // namespace levelhead::LEVELHEAD_ISA
