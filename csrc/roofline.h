#pragma once

#include <cstdlib>
#include <new>

#include "simd.h"

namespace levelhead::LEVELHEAD_ISA {

double fma_peak(int threads);        // GFLOP/s, float32
double read_bandwidth(int threads);  // GB/s

}  // namespace levelhead::LEVELHEAD_ISA
