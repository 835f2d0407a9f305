// The machine's own limits, measured: what the kernels are held against in benchmarks/.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>

#include "roofline.h"
#include "threads.h"

namespace levelhead::LEVELHEAD_ISA {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void keep(VecF v) {  // what is stored here must have been computed
  volatile float sink = sum<float>(v);
  (void)sink;
}

// The best of several runs of `work` on all threads at once.
template <class F>
double best_time(int threads, F work) {
  double best = 1e30;
  for (int run = 0; run < 12; ++run) {
    const double start = seconds();
    parallel_for(threads, threads, work);
    best = std::min(best, seconds() - start);
  }
  return best;
}

}  // namespace

double fma_peak(int threads) {
  constexpr Index kSteps = 2'000'000;
  constexpr int kChains = 12;  // more than latency x throughput of any FMA unit
  const double time = best_time(threads, [](Index) {
    VecF acc[kChains];
    for (int i = 0; i < kChains; ++i) acc[i] = splat(1.0f + static_cast<float>(i));
    const VecF x = splat(0.999f), y = splat(0.001f);
    for (Index step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) acc[i] = fma(acc[i], x, y);
      asm volatile("");  // a loop with a side effect is not computed in closed form
    }
    for (int i = 1; i < kChains; ++i) acc[0] += acc[i];
    keep(acc[0]);
  });
  return 2.0 * kLanes<float> * kChains * kSteps * threads / time * 1e-9;
}

double read_bandwidth(int threads) {
  constexpr Index kFloats = 64 << 20;  // 256 MB per thread: no cache holds it
  constexpr std::size_t kHuge = 2 << 20;  // huge pages, as NumPy asks for: the limit is the memory's
  const std::size_t bytes = kFloats * sizeof(float) * static_cast<std::size_t>(threads);
  float* data = static_cast<float*>(std::aligned_alloc(kHuge, bytes));
  if (!data) throw std::bad_alloc();
  madvise(data, bytes, MADV_HUGEPAGE);
  parallel_for(threads, threads,
               [&](Index t) { std::fill_n(data + t * kFloats, kFloats, 1.0f); });
  // Blocks of 256 KB from one place, or from four at once, 512 bytes each in turn: whichever the
  // memory likes better.
  constexpr Index kBlock = 64 << 10, kTurn = 128;
  auto time = [&](Index places) {
    return best_time(threads, [&](Index t) {
      VecF acc[8] = {};
      for (const float* at = data + t * kFloats; at < data + (t + 1) * kFloats; at += kBlock)
        for (Index i = 0; i < kBlock / places; i += kTurn)
          for (Index place = 0; place < places; ++place) {
            const float* from = at + place * (kBlock / places) + i;
#pragma GCC unroll 32
            for (int k = 0; k < kTurn / kLanes<float>; ++k)
              acc[k % 8] += load(from + k * kLanes<float>);
          }
      for (int k = 1; k < 8; ++k) acc[0] += acc[k];
      keep(acc[0]);
    });
  };
  const double best = std::min(time(1), time(4));
  std::free(data);
  return static_cast<double>(kFloats) * sizeof(float) * threads / best * 1e-9;
}

}  // namespace levelhead::LEVELHEAD_ISA
