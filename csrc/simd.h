// One vector type and the few functions the kernels need of it. The same source is compiled once
// for each instruction set (CMakeLists.txt); LEVELHEAD_ISA names the namespace of this build.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "problem.h"

#if !defined(LEVELHEAD_ISA)
#define LEVELHEAD_ISA portable
#endif
#if defined(__AVX2__)
#define LEVELHEAD_VECTOR_BYTES 32
#else
#define LEVELHEAD_VECTOR_BYTES 16
#endif
#define LH_INLINE inline __attribute__((always_inline))
#define LH_INLINE_LAMBDA __attribute__((always_inline))
// Before a loop over a few vectors in registers. Left to itself the compiler makes calls of memset
// and memcpy of such loops, and the vectors go through memory.
#define LH_UNROLL _Pragma("GCC unroll 32")

namespace levelhead::LEVELHEAD_ISA {

constexpr int kVectorBytes = LEVELHEAD_VECTOR_BYTES;

// GCC and Clang vector extensions: + - * / and comparisons are elementwise. There is no implicit
// contraction (-ffp-contract=off), so what is fused is written fma().
template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
using Int = std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>;
template <class T>
using IntVec = Vec<Int<T>>;  // also what a comparison of Vec<T> gives: 0 or -1 per lane

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
constexpr T kInf = std::numeric_limits<T>::infinity();

constexpr double kLog2e = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

// Loads and stores go through a vector type that may lie anywhere. A memcpy would say the same, but
// GCC then keeps a second copy of a vector, as integers, and spills both.
template <class T>
struct AnywhereOf {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <class T>
LH_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename AnywhereOf<T>::type*>(p);
}
template <class T>
LH_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename AnywhereOf<T>::type*>(p) = v;
}
// A vector for several uses. GCC would load it again for each of two, to save an instruction.
template <class V>
LH_INLINE V in_register(V v) {
#if defined(__SSE2__)
  asm("" : "+x"(v));
#endif
  return v;
}
template <class T>
LH_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0, not x + 0, so that -0 stays -0
}
// {0, 1, 2, ...}
template <class T>
LH_INLINE Vec<T> iota() {
  Vec<T> v;
  for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}
template <class T>
LH_INLINE Vec<T> select(IntVec<T> mask, Vec<T> yes, Vec<T> no) {
  return mask ? yes : no;
}

template <class T>
LH_INLINE Vec<T> abs(Vec<T> x) {
  return (Vec<T>)((IntVec<T>)x & std::numeric_limits<Int<T>>::max());
}

using VecF = Vec<float>;
using VecD = Vec<double>;

// fma(): one rounding where the instruction set has it, two where it has not.
// max(a, b) and min(a, b) give b when either is NaN, as the x86 instructions do.
#if defined(__AVX2__) && defined(__FMA__)
LH_INLINE VecF fma(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
LH_INLINE VecD fma(VecD a, VecD b, VecD c) { return _mm256_fmadd_pd(a, b, c); }
LH_INLINE VecF max(VecF a, VecF b) { return _mm256_max_ps(a, b); }
LH_INLINE VecD max(VecD a, VecD b) { return _mm256_max_pd(a, b); }
LH_INLINE VecF min(VecF a, VecF b) { return _mm256_min_ps(a, b); }
LH_INLINE VecD min(VecD a, VecD b) { return _mm256_min_pd(a, b); }
LH_INLINE VecF sqrt(VecF a) { return _mm256_sqrt_ps(a); }
LH_INLINE VecD sqrt(VecD a) { return _mm256_sqrt_pd(a); }
template <class V>
LH_INLINE bool any(V mask) { return !_mm256_testz_si256((__m256i)mask, (__m256i)mask); }
#else
template <class V>
LH_INLINE V fma(V a, V b, V c) { return a * b + c; }
#if defined(__SSE2__)
LH_INLINE VecF max(VecF a, VecF b) { return _mm_max_ps(a, b); }
LH_INLINE VecD max(VecD a, VecD b) { return _mm_max_pd(a, b); }
LH_INLINE VecF min(VecF a, VecF b) { return _mm_min_ps(a, b); }
LH_INLINE VecD min(VecD a, VecD b) { return _mm_min_pd(a, b); }
LH_INLINE VecF sqrt(VecF a) { return _mm_sqrt_ps(a); }
LH_INLINE VecD sqrt(VecD a) { return _mm_sqrt_pd(a); }
#else
template <class V>
LH_INLINE V max(V a, V b) { return a > b ? a : b; }
template <class V>
LH_INLINE V min(V a, V b) { return a < b ? a : b; }
template <class V>
LH_INLINE V sqrt(V a) {
  for (std::size_t i = 0; i < sizeof(V) / sizeof(a[0]); ++i) a[i] = std::sqrt(a[i]);
  return a;
}
#endif
template <class V>
LH_INLINE bool any(V mask) {
  Vec<std::int64_t> m;
  std::memcpy(&m, &mask, sizeof m);
  return (m[0] | m[1]) != 0;
}
#endif

// What a comparison gives, kept in one byte per lane: -1 or 0.
template <class T>
LH_INLINE IntVec<T> load_mask(const std::int8_t* p) {
#if defined(__AVX2__)
  std::int64_t bytes = 0;
  std::memcpy(&bytes, p, kLanes<T>);
  const __m128i narrow = _mm_cvtsi64_si128(bytes);
  return (IntVec<T>)(sizeof(T) == 8 ? _mm256_cvtepi8_epi64(narrow) : _mm256_cvtepi8_epi32(narrow));
#else
  IntVec<T> mask;
  for (int i = 0; i < kLanes<T>; ++i) mask[i] = p[i];
  return mask;
#endif
}
template <class T>
LH_INLINE void store_mask(std::int8_t* p, IntVec<T> mask) {
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const __m256i wide = (__m256i)mask;
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide),
                                         _mm256_extracti128_si256(wide, 1));
    return _mm_storeu_si64(p, _mm_packs_epi16(half, half));
  }
#endif
  for (int i = 0; i < kLanes<T>; ++i) p[i] = static_cast<std::int8_t>(mask[i]);
}

// What all lanes give together, by a fixed tree: halves, quarters, ...
template <class T, class Join>
LH_INLINE T fold(Vec<T> v, Join join) {
  T lane[kLanes<T>];
  store(lane, v);
  for (int n = kLanes<T> / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] = join(lane[i], lane[i + n]);
  return lane[0];
}
template <class T>
LH_INLINE T sum(Vec<T> v) {
  return fold<T>(v, [](T x, T y) { return x + y; });
}
// a's lanes, but b's where the lane has bit N.
#if defined(__AVX2__)
template <int N>
LH_INLINE VecF blend(VecF a, VecF b) {
  return _mm256_blend_ps(a, b, N == 4 ? 0xf0 : N == 2 ? 0xcc : 0xaa);
}
template <int N>
LH_INLINE VecD blend(VecD a, VecD b) {
  return _mm256_blend_pd(a, b, N == 2 ? 0xc : 0xa);
}
#else
template <int N, class V>
LH_INLINE V blend(V a, V b) {
  for (std::size_t i = 0; i < sizeof(V) / sizeof(a[0]); ++i) a[i] = i & N ? b[i] : a[i];
  return a;
}
#endif
template <int N, class V, std::size_t... Lane>
LH_INLINE V swap_halves(V v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(v, v, (Lane ^ N)...);
}
// The sums of v[0], v[1], ... by that tree, one per lane: each step adds halves of two vectors at once.
template <class V, std::size_t W, int N = W / 2>
LH_INLINE V sum_each(V (&v)[W]) {
  LH_UNROLL for (int i = 0; i < N; ++i)
    v[i] = blend<N>(v[i], v[i + N]) +
           swap_halves<N>(blend<N>(v[i + N], v[i]), std::make_index_sequence<W>());
  if constexpr (N > 1) return sum_each<V, W, N / 2>(v);
  return v[0];
}
// How many lanes a comparison holds for.
template <class T>
LH_INLINE int number_of(IntVec<T> mask) {
  int n = 0;
  for (int i = 0; i < kLanes<T>; ++i) n -= static_cast<int>(mask[i]);
  return n;
}

// 2^x for x <= 0 (and NaN). n = round(x), f = x - n in [-1/2, 1/2], 2^f = 1 + q by a minimax
// polynomial, 2^x = 2^n + q·2^n. Three properties that the rest relies on:
// - 2^0 = 1 exactly: a row that sees one key returns its value unchanged;
// - below the smallest normal number, and for -inf, the result is exactly 0: n = -bias makes the
//   factor 2^n come out as +0;
// - NaN stays NaN: max() gives its second operand.
// tests/test_numerics.py holds the error over the whole range under 1.5 ulp in f32 (degree 6; 1.2
// measured) and 1.2 ulp in f64 (degree 11).
template <class T>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float floor = -127.0f, magic = 0x1.8p23f + 127.0f;
  static constexpr int mantissa = 23;
  static constexpr float terms[] = {1.5351847904455124e-4f, 1.3398866072408897e-3f,
                                    9.618444332402977e-3f,  5.5503325504669236e-2f,
                                    2.4022647834658223e-1f, 6.931472027204373e-1f};
};
template <>
struct Exp2<double> {
  static constexpr double floor = -1023.0, magic = 0x1.8p52 + 1023.0;
  static constexpr int mantissa = 52;
  static constexpr double terms[] = {
      4.4549605981865186e-10, 7.072585949269223e-09,  1.0178062445845774e-07,
      1.321544258792169e-06,  1.525273382983612e-05,  1.540353044173605e-04,
      1.3333558146416936e-03, 9.618129107606888e-03,  5.55041086648216e-02,
      2.4022650695910097e-01, 6.931471805599453e-01};
};

// The nearest integer, for |x| far below 2^mantissa.
#if defined(__AVX2__)
LH_INLINE VecF nearest(VecF x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT); }
LH_INLINE VecD nearest(VecD x) { return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT); }
#else
LH_INLINE VecF nearest(VecF x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
LH_INLINE VecD nearest(VecD x) { return (x + 0x1.8p52) - 0x1.8p52; }
#endif

// x[i] in [floor, 0] becomes q, and scale[i] becomes 2^n, so that 2^x = q·scale + scale. N chains
// side by side, step by step: one after the other they would fill the CPU's scheduler with waiting
// instructions.
template <int N, class T>
LH_INLINE void exp2_parts(Vec<T> (&x)[N], Vec<T> (&scale)[N]) {
  Vec<T> p[N];
  for (int i = 0; i < N; ++i) p[i] = nearest(x[i]);
  for (int i = 0; i < N; ++i) scale[i] = p[i] + Exp2<T>::magic;  // leaves n + bias below
  for (int i = 0; i < N; ++i) x[i] -= p[i];
  for (int i = 0; i < N; ++i) p[i] = splat(Exp2<T>::terms[0]);
#pragma GCC unroll 16
  for (std::size_t k = 1; k < sizeof Exp2<T>::terms / sizeof(T); ++k)
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], splat(Exp2<T>::terms[k]));
  for (int i = 0; i < N; ++i) x[i] *= p[i];
  for (int i = 0; i < N; ++i) scale[i] = (Vec<T>)((IntVec<T>)scale[i] << Exp2<T>::mantissa);
}

template <class T>
LH_INLINE Vec<T> clamp_exp2(Vec<T> x) {
  return max(splat(Exp2<T>::floor), x);
}
// e[i] = 2^x[i] for clamped x.
template <int N, class T>
LH_INLINE void exp2_clamped(const Vec<T> (&x)[N], Vec<T> (&e)[N]) {
  Vec<T> scale[N];
  for (int i = 0; i < N; ++i) e[i] = x[i];
  exp2_parts<N, T>(e, scale);
  for (int i = 0; i < N; ++i) e[i] = fma(e[i], scale[i], scale[i]);
}
template <class T>
LH_INLINE Vec<T> exp2(Vec<T> x) {
  const Vec<T> clamped[1] = {clamp_exp2<T>(x)};
  Vec<T> e[1];
  exp2_clamped<1, T>(clamped, e);
  return e[0];
}

// tanh by expm1(-2|x|) = 2^t - 1 = (2^n - 1) + q·2^n, which does not cancel for small |x|.
template <class T>
LH_INLINE Vec<T> tanh(Vec<T> x) {
  const IntVec<T> negative = x < T{0};
  const Vec<T> magnitude = select<T>(negative, -x, x);
  Vec<T> q[1] = {clamp_exp2<T>(magnitude * static_cast<T>(-2 * kLog2e))}, scale[1];
  exp2_parts<1, T>(q, scale);
  const Vec<T> em1 = fma(q[0], scale[0], scale[0] - T{1});
  const Vec<T> t = -em1 / (em1 + T{2});
  return select<T>(negative, -t, t);
}

// x = 2^n m for normal x > 0, with m in [sqrt(1/2), sqrt(2)).
template <class T>
LH_INLINE void split_exponent(Vec<T> x, IntVec<T>& n, Vec<T>& m) {
  constexpr int kMantissa = std::numeric_limits<T>::digits - 1;
  // Offsetting by the bits of sqrt(1/2) makes the exponent field switch there instead of at 1.
  const T root_half = static_cast<T>(0.70710678118654752);
  Int<T> root_bits;
  std::memcpy(&root_bits, &root_half, sizeof root_bits);
  const IntVec<T> bits = (IntVec<T>)x - root_bits;
  n = bits >> kMantissa;
  m = (Vec<T>)((bits & ((Int<T>{1} << kMantissa) - 1)) + root_bits);
}
// n·ln 2 + ln(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)]: ln(1 + f) = 2 atanh(z), z = f/(f + 2), by its
// Taylor series (z^2 < 0.0295). Relatively accurate for small f too.
template <class T>
LH_INLINE Vec<T> log_of_parts(IntVec<T> n, Vec<T> f) {
  constexpr int kTerms = sizeof(T) == 8 ? 12 : 5;
  const Vec<T> z = f / (f + T{2}), z2 = z * z;
  Vec<T> p = splat(T{1} / T(2 * kTerms + 1));
  for (int k = kTerms - 1; k > 0; --k) p = fma(p, z2, splat(T{1} / T(2 * k + 1)));
  const Vec<T> two_z = z + z;
  return fma(__builtin_convertvector(n, Vec<T>), splat(static_cast<T>(kLn2)),
             fma(two_z * z2, p, two_z));
}
// ln(x) for normal x > 0.
template <class T>
LH_INLINE Vec<T> log(Vec<T> x) {
  IntVec<T> n;
  Vec<T> m;
  split_exponent<T>(x, n, m);
  return log_of_parts<T>(n, m - T{1});
}
// ln(1 + x) for x >= 0 without cancellation: while 1 + x is below sqrt(2), its rounding does not come
// in. tests/test_numerics.py holds the error under 3 ulp in both precisions (2.5 and 2.8 measured).
template <class T>
LH_INLINE Vec<T> log1p(Vec<T> x) {
  IntVec<T> n;
  Vec<T> m;
  split_exponent<T>(x + T{1}, n, m);
  return log_of_parts<T>(n, select<T>(n == 0, x, m - T{1}));
}

}  // namespace levelhead::LEVELHEAD_ISA
