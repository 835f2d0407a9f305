// Statistics of raw scores, lane by lane.
#pragma once

#include "simd.h"

namespace levelhead::LEVELHEAD_ISA {

// Number, mean, Σ(s - mean)² and extremes of some scores, and how many of them are large.
template <class T>
struct Scores {
  Vec<T> count, mean, m2, least, most, large;

  static LH_INLINE Scores none() {
    const Vec<T> zero = {};
    return {zero, zero, zero, splat(kInf<T>), splat(-kInf<T>), zero};
  }
  LH_INLINE Scores only(IntVec<T> lanes) const {
    const Scores none = Scores::none();
    return {select<T>(lanes, count, none.count), select<T>(lanes, mean, none.mean),
            select<T>(lanes, m2, none.m2),       select<T>(lanes, least, none.least),
            select<T>(lanes, most, none.most),   select<T>(lanes, large, none.large)};
  }
  LH_INLINE void join(const Scores& other) {  // Chan's formula
    const Vec<T> total = count + other.count, weight = other.count / max(total, splat(T{1}));
    const Vec<T> delta = other.mean - mean;
    m2 = m2 + other.m2 + delta * delta * count * weight;
    mean = fma(delta, weight, mean);
    count = total;
    least = min(least, other.least);
    most = max(most, other.most);
    large += other.large;
  }
};

template <class T>
LH_INLINE Vec<T> middle(Vec<T> a, Vec<T> b, Vec<T> c) {
  return max(min(a, b), min(max(a, b), c));
}

}  // namespace levelhead::LEVELHEAD_ISA
