// A dense mask, boolean or floating, as the tiles of a panel need it.
#pragma once

#include "pack.h"
#include "panel.h"

namespace levelhead::LEVELHEAD_ISA {

// The part of a dense mask that one tile needs, lanes side by side as the scores are.
template <class T>
struct TileMask {
  std::int8_t* visible;  // [key][lane]: -1 or 0
  T* bias;               // [key][lane], in units of ln 2; only with a floating mask
  bool has_bias = false;
};

// A bias at or below this, half of its dtype's lowest number, means "hidden" to the statistics.
inline double hidden_bias(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return std::numeric_limits<double>::lowest() / 2;
    case Dtype::f16: return -65504.0 / 2;
    case Dtype::bf16: return -0x1.fep127 / 2;
    default: return double{std::numeric_limits<float>::lowest()} / 2;
  }
}
// The same in units of ln 2, as T; read_bias() keeps what double holds and float does not on its side.
constexpr float kLowFloat = -2.2e38f, kHiddenFloat = -2.3e38f;  // · log2(e) is finite for both
template <class T>
inline T statistically_hidden(const Problem& p) {
  if (sizeof(T) == 4 && p.mask.dtype == Dtype::f64)
    return static_cast<T>((double{kLowFloat} + double{kHiddenFloat}) / 2 * kLog2e);
  return static_cast<T>(std::max(hidden_bias(p.mask.dtype) * kLog2e,
                                 double{std::numeric_limits<T>::lowest()}));
}

// The mask's 8 x 8 bytes turned over: byte x of columns[y] is -1 where byte y of rows[x] is not 0.
LH_INLINE void transpose_mask(const std::uint64_t (&rows)[8], std::uint64_t (&columns)[8]) {
#if defined(__SSE2__)
  const __m128i zero = _mm_setzero_si128(), ones = _mm_set1_epi8(-1);
  auto is_set = [&](__m128i x) { return _mm_xor_si128(_mm_cmpeq_epi8(x, zero), ones); };
  __m128i r[8], pair[4], quad[4];
  for (int i = 0; i < 8; ++i) r[i] = _mm_cvtsi64_si128(static_cast<long long>(rows[i]));
  for (int i = 0; i < 4; ++i) pair[i] = _mm_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 2; ++i) {
    quad[2 * i] = _mm_unpacklo_epi16(pair[2 * i], pair[2 * i + 1]);
    quad[2 * i + 1] = _mm_unpackhi_epi16(pair[2 * i], pair[2 * i + 1]);
  }
  __m128i* to = reinterpret_cast<__m128i*>(columns);
  for (int i = 0; i < 2; ++i) {
    _mm_storeu_si128(to + 2 * i, is_set(_mm_unpacklo_epi32(quad[i], quad[i + 2])));
    _mm_storeu_si128(to + 2 * i + 1, is_set(_mm_unpackhi_epi32(quad[i], quad[i + 2])));
  }
#else
  for (int y = 0; y < 8; ++y) {
    columns[y] = 0;
    for (int x = 0; x < 8; ++x)
      if (rows[x] >> (8 * y) & 0xff) columns[y] |= std::uint64_t{0xff} << (8 * x);
  }
#endif
}

// visible[key][lane] from the boolean mask, for keys [first, last) of the panel's rows; combined
// with what is there, unless that is to be replaced.
template <bool Replace, class T>
inline void apply_boolean_mask(const Problem& p, const Panel<T>& panel, Index first, Index last,
                               std::int8_t* visible) {
  const Index step = p.mask.column_stride, width = panel.width;
  for (int lane = 0; lane < width; lane += 8) {
    const int lanes = std::min(8, panel.width - lane);
    const std::uint8_t* row[8];
    for (int x = 0; x < lanes; ++x) {  // lanes without a row repeat the last one
      const int source = std::min(lane + x, panel.n - 1);
      row[x] = reinterpret_cast<const std::uint8_t*>(p.mask.matrix(panel.batch, panel.head[source])) +
               panel.query[source] * p.mask.row_stride;
    }
    std::int8_t* to = visible + lane;
    Index j = first;
    if (step == 1 && lanes == 8)
      for (; j + 8 <= last; j += 8) {
        std::uint64_t block[8], columns[8];
        for (int x = 0; x < 8; ++x) std::memcpy(&block[x], row[x] + j, 8);
        transpose_mask(block, columns);
        for (int y = 0; y < 8; ++y, to += width) {
          std::uint64_t see = columns[y], before;
          if constexpr (!Replace) {
            std::memcpy(&before, to, 8);
            see &= before;
          }
          std::memcpy(to, &see, 8);
        }
      }
    for (; j < last; ++j, to += width)
      for (int x = 0; x < lanes; ++x)
        if (row[x][j * step] == 0) to[x] = 0;
        else if (Replace) to[x] = -1;
  }
}

// A run of a floating mask. What double holds and float does not stays finite, on the side of
// statistically_hidden() where it was.
template <class T>
inline void read_bias(Dtype dtype, const char* source, Index step, Index n, T* to) {
  if (sizeof(T) == 8 || dtype != Dtype::f64) return read_row(dtype, source, step, n, to);
  const double hidden = hidden_bias(dtype);
  for (Index i = 0; i < n; ++i) {
    double x;
    read_row(dtype, source + i * step * 8, 1, 1, &x);
    if (x > hidden || x == -kInf<double> || x != x)
      to[i] = static_cast<T>(x < kLowFloat && x > hidden ? kLowFloat : x);
    else
      to[i] = static_cast<T>(kHiddenFloat);
  }
}

// bias[key][lane] from a floating mask; a bias of -inf hides its pair as a boolean mask would.
template <class T>
inline void apply_bias(const Problem& p, const Panel<T>& panel, Index first, Index last,
                       std::int8_t* visible, T* bias) {
  constexpr int W = kLanes<T>;
  constexpr Index kRun = 64;
  T run[W * kRun];
  const Index size = static_cast<Index>(size_of(p.mask.dtype)), step = p.mask.column_stride;
  for (int lane = 0; lane < panel.width; lane += W) {
    const int lanes = std::clamp(panel.n - lane, 0, W);
    for (Index j = first; j < last; j += kRun) {
      const Index n = std::min(kRun, last - j);
      for (int x = 0; x < lanes; ++x)
        read_bias(p.mask.dtype,
                  p.mask.matrix(panel.batch, panel.head[lane + x]) +
                      (panel.query[lane + x] * p.mask.row_stride + j * step) * size,
                  step, n, run + x * kRun);
      pack_lanes(RowBlock<T>{run, kRun}, lanes, n, T{1}, bias + (j - first) * panel.width + lane,
                 panel.width, W);
    }
    // The lowest finite bias must stay finite in units of ln 2: a row of nothing else is uniform.
    const Vec<T> lowest = splat(std::numeric_limits<T>::lowest());
    for (Index j = 0; j < last - first; ++j) {
      const Index at = j * panel.width + lane;
      const Vec<T> b = load(bias + at);
      store_mask<T>(visible + at, load_mask<T>(visible + at) & (b != -kInf<T>));
      store(bias + at, max(lowest, b * static_cast<T>(kLog2e)));
    }
  }
}

// Fills `mask` for keys [first, last) and narrows that range to what some row sees. True if a pair
// in what remains is hidden.
template <class T>
inline bool fill_mask(const Problem& p, const Panel<T>& panel, Index& first, Index& last,
                      TileMask<T>& mask) {
  constexpr int W = kLanes<T>;
  const Index from = first;
  mask.has_bias = p.has_bias();
  const bool boolean = p.mask && !mask.has_bias;
  const bool whole = first >= panel.inner_first && last <= panel.inner_last;  // inside the band
  for (Index j = first; j < last && !(boolean && whole); ++j) {
    const IntVec<T> key = splat(static_cast<Int<T>>(j));
    for (int v = 0; v < panel.vectors; ++v)
      store_mask<T>(mask.visible + (j - from) * panel.width + v * W,
                    (key >= load(panel.low + v * W)) & (key < load(panel.high + v * W)));
  }
  if (mask.has_bias)
    apply_bias(p, panel, first, last, mask.visible, mask.bias);
  else if (boolean && whole)
    apply_boolean_mask<true>(p, panel, first, last, mask.visible);
  else if (boolean)
    apply_boolean_mask<false>(p, panel, first, last, mask.visible);

  auto holds = [&](int value, Index j, Index keys) {
    return std::memchr(mask.visible + (j - from) * panel.width, value,
                       static_cast<std::size_t>(keys * panel.width)) != nullptr;
  };
  while (first < last && !holds(-1, first, 1)) ++first;
  while (first < last && !holds(-1, last - 1, 1)) --last;
  const bool hides = holds(0, first, last - first);
  mask.visible += (first - from) * panel.width;
  mask.bias += (first - from) * panel.width;
  return hides;
}

}  // namespace levelhead::LEVELHEAD_ISA
