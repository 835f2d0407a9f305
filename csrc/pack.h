// Between rows in memory and lanes: queries go in transposed, outputs come back.
#pragma once

#include "convert.h"
#include "gemm.h"

namespace levelhead::LEVELHEAD_ISA {

#if defined(__AVX2__)
LH_INLINE void transpose(VecF (&r)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}
LH_INLINE void transpose(VecD (&r)[4]) {
  const __m256d a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
  const __m256d c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
  r[0] = _mm256_permute2f128_pd(a, c, 0x20);
  r[1] = _mm256_permute2f128_pd(b, d, 0x20);
  r[2] = _mm256_permute2f128_pd(a, c, 0x31);
  r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
#else
template <class V, std::size_t N>
LH_INLINE void transpose(V (&r)[N]) {
  for (std::size_t i = 0; i < N; ++i)
    for (std::size_t j = i + 1; j < N; ++j) {
      const auto x = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = x;
    }
}
#endif

// Rows of one dtype in memory.
struct RowsIn {
  const char* data;
  Dtype dtype;
  Index row_stride, column_stride;

  RowsIn(const Tensor& t, Index batch, Index head)
      : data(t.matrix(batch, head)), dtype(t.dtype), row_stride(t.row_stride),
        column_stride(t.column_stride) {}
  const char* row(Index i) const {
    return data + i * row_stride * static_cast<Index>(size_of(dtype));
  }
  // Are these rows of S, each a multiple of `pad` long without gaps?
  template <class S>
  bool are(Index columns, Index pad) const {
    return dtype == kDtype<S> && (column_stride == 1 || columns <= 1) && columns % pad == 0 &&
           reinterpret_cast<std::uintptr_t>(data) % alignof(S) == 0;
  }
  template <class S>
  RowBlock<S> from(Index first) const {
    return {reinterpret_cast<const S*>(row(first)), row_stride};
  }
};

// Rows that are a multiple of 512 bytes apart share a few sets of the L1 cache, and push each other out
// when they are read column by column. So they get a cache line of distance more.
template <class T>
constexpr Index spread(Index stride) {
  constexpr Index line = 64 / static_cast<Index>(sizeof(T));
  return stride % (8 * line) == 0 ? stride + line : stride;
}

// Rows [first, last) as T, numbered from 0: a view where memory already is that, else a
// copy. `scratch` has room for all of them with a stride of `columns` rounded up to `pad`, which is
// spread() if that is asked for; a copy fills the padding with zeros. A view is taken only if the
// stride is as it would be in the copy, or any if `any_stride`: rows far apart collide in the caches
// too when they are read more than once.
template <class T>
inline RowBlock<T> stage(const RowsIn& rows, Index first, Index last, Index columns, Index pad,
                         bool any_stride, T* scratch, bool spread_out = false) {
  Index stride = (columns + pad - 1) / pad * pad;
  if (spread_out) stride = spread<T>(stride);
  if (rows.are<T>(columns, pad) && (any_stride || rows.row_stride == stride))
    return rows.from<T>(first);
  for (Index i = first; i < last; ++i) {
    T* to = scratch + (i - first) * stride;
    read_row(rows.dtype, rows.row(i), rows.column_stride, columns, to);
    for (Index c = columns; c < stride; ++c) to[c] = 0;
  }
  return {scratch, stride};
}

// to[c * stride + lane] = rows[lane][c] * factor for n <= width lanes; the other lanes become 0.
template <class T>
inline void pack_lanes(RowBlock<T> rows, Index n, Index columns, T factor, T* to, Index stride,
                       Index width) {
  constexpr int W = kLanes<T>;
  for (Index lane = 0; lane < width; lane += W) {
    Index c = 0;
    if (lane + W <= n) {
      for (; c + W <= columns; c += W) {
        Vec<T> block[W];
        for (int i = 0; i < W; ++i) block[i] = load(rows.row(lane + i) + c) * factor;
        transpose(block);
        for (int i = 0; i < W; ++i) store(to + (c + i) * stride + lane, block[i]);
      }
    }
    for (; c < columns; ++c)
      for (int i = 0; i < W; ++i)
        to[c * stride + lane + i] = lane + i < n ? rows.row(lane + i)[c] * factor : T{0};
  }
}

// The way back: rows[lane][c] = from[c][lane] * factor[lane], for n lanes. `scratch` has room for
// one row of each lane of a vector.
template <class T>
inline void unpack_lanes(const T* from, Index width, const T* factor, Index n, Index columns,
                         const RowsIn& rows, T* scratch) {
  constexpr int W = kLanes<T>;
  const bool direct = rows.dtype == kDtype<T> && rows.column_stride == 1;
  for (Index lane = 0; lane < n; lane += W) {
    const int valid = n - lane < W ? static_cast<int>(n - lane) : W;
    T* target[W];
    for (int i = 0; i < W; ++i)
      target[i] = direct && i < valid
                      ? reinterpret_cast<T*>(const_cast<char*>(rows.row(lane + i)))
                      : scratch + i * columns;
    const Vec<T> f = load(factor + lane);
    Index c = 0;
    for (; c + W <= columns; c += W) {
      Vec<T> block[W];
      for (int i = 0; i < W; ++i) block[i] = load(from + (c + i) * width + lane) * f;
      transpose(block);
      for (int i = 0; i < W; ++i) store(target[i] + c, block[i]);
    }
    for (; c < columns; ++c) {
      T column[W];
      store(column, load(from + c * width + lane) * f);
      for (int i = 0; i < W; ++i) target[i][c] = column[i];
    }
    if (!direct)
      for (int i = 0; i < valid; ++i)
        write_row(rows.dtype, const_cast<char*>(rows.row(lane + i)), columns, target[i]);
  }
}

}  // namespace levelhead::LEVELHEAD_ISA
