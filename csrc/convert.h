// Rows of any dtype in and out: 16-bit floats are widened to float on the way in and rounded to
// nearest even on the way out.
#pragma once

#include "simd.h"

namespace levelhead::LEVELHEAD_ISA {

struct Half { std::uint16_t bits; };
struct BFloat { std::uint16_t bits; };

inline float bits_to_float(std::uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline std::uint32_t float_to_bits(float f) { std::uint32_t u; std::memcpy(&u, &f, 4); return u; }

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat x) { return bits_to_float(std::uint32_t{x.bits} << 16); }
inline float widen(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const std::uint32_t sign = std::uint32_t{x.bits} >> 15 << 31, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | rest << 13);  // inf, NaN
  // Shifted into place, the exponent is short by 127 - 15; multiplying also makes subnormals right.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
#endif
}

// A vector of 16-bit floats, widened.
template <class S>
LH_INLINE VecF load_wide(const S* p) {
  S narrow[kLanes<float>];
  std::memcpy(narrow, p, sizeof narrow);
  VecF wide;
  for (int i = 0; i < kLanes<float>; ++i) wide[i] = widen(narrow[i]);
  return wide;
}
LH_INLINE VecF load(const Half* p) {
#if defined(__AVX2__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return load_wide(p);
#endif
}
LH_INLINE VecF load(const BFloat* p) {
#if defined(__AVX2__)
  return (VecF)(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
  return load_wide(p);
#endif
}

template <class D, class T>
inline D narrow(T x) { return static_cast<D>(x); }
template <>
inline BFloat narrow<BFloat>(float x) {
  const std::uint32_t u = float_to_bits(x);
  if (x != x) return {static_cast<std::uint16_t>(u >> 16 | 0x40)};
  return {static_cast<std::uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
template <>
inline Half narrow<Half>(float x) {
#if defined(__F16C__)
  return {static_cast<std::uint16_t>(_cvtss_sh(x, 0))};
#else
  const std::uint32_t u = float_to_bits(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds to multiples of 2^-24
    const float rounded = bits_to_float(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (float_to_bits(rounded) - 0x3f000000u))};
  }
  const std::uint32_t rebased = magnitude - 0x38000000u;
  return {static_cast<std::uint16_t>(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13)};
#endif
}

// Calls f with a null pointer of the C++ type that stores `dtype`.
template <class F>
LH_INLINE void with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f32: return f(static_cast<float*>(nullptr));
    case Dtype::f64: return f(static_cast<double*>(nullptr));
    case Dtype::f16: return f(static_cast<Half*>(nullptr));
    case Dtype::bf16: return f(static_cast<BFloat*>(nullptr));
    case Dtype::boolean: return;
  }
}

template <class S>
constexpr Dtype kDtype = std::is_same_v<S, float>    ? Dtype::f32
                         : std::is_same_v<S, double> ? Dtype::f64
                         : std::is_same_v<S, Half>   ? Dtype::f16
                                                     : Dtype::bf16;

// n elements at `source`, `stride` apart, as T. The source need not be aligned.
template <class T>
inline void read_row(Dtype dtype, const char* source, Index stride, Index n, T* to) {
  with_type(dtype, [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    auto element = [&](Index i) {
      S x;
      std::memcpy(&x, source + i * static_cast<Index>(sizeof(S)), sizeof x);
      return static_cast<T>(widen(x));
    };
    Index i = 0;
    if constexpr (sizeof(S) == 2 && std::is_same_v<T, float>)
      for (; stride == 1 && i + kLanes<T> <= n; i += kLanes<T>)
        store(to + i, load(reinterpret_cast<const S*>(source) + i));
    for (; i < n; ++i) to[i] = element(i * stride);
  });
}

template <class T>
inline void write_row(Dtype dtype, void* target, Index n, const T* from) {
  with_type(dtype, [&](auto* type) {
    using D = std::remove_pointer_t<decltype(type)>;
    D* to = static_cast<D*>(target);
    Index i = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<D, Half> && std::is_same_v<T, float>)
      for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(load(from + i), 0));
#endif
    for (; i < n; ++i) {
      if constexpr (sizeof(D) == 2)
        to[i] = narrow<D>(static_cast<float>(from[i]));
      else
        to[i] = narrow<D>(from[i]);
    }
  });
}

}  // namespace levelhead::LEVELHEAD_ISA
