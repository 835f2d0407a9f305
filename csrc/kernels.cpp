// The table of one instruction set's kernels; compiled once for each, like all that it includes.
#include <cstdlib>

#include "backward.h"
#include "forward.h"
#include "roofline.h"

namespace levelhead::LEVELHEAD_ISA {
namespace {

template <class T>
void run_forward(const Problem& p) {
  if (p.queries <= kDecodeQueries)
    decode<T>(p);
  else
    prefill<T>(p);
  if (p.weights) write_weights<T>(p);
}

void forward(const Problem& p) {
  if (p.batch * p.heads == 0) return;
  if (p.queries == 0) {
    if (p.health)
      for (Index i = 0; i < p.batch * p.heads; ++i) clear_sums(p.health + i * kHealthSums);
    return;
  }
  p.query.dtype == Dtype::f64 ? run_forward<double>(p) : run_forward<float>(p);
}

void backward(const Problem& p) {
  p.query.dtype == Dtype::f64 ? run_backward<double>(p) : run_backward<float>(p);
}

template <class T, class F>
void apply(F f, const T* x, T* y, Index n) {
  for (Index i = 0; i < n; i += kLanes<T>) {
    T lane[kLanes<T>] = {};
    const Index count = std::min<Index>(kLanes<T>, n - i);
    std::copy_n(x + i, count, lane);
    store(lane, f(load(lane)));
    std::copy_n(lane, count, y + i);
  }
}

template <class T>
void exp2_array(const T* x, T* y, Index n) {
  apply([](Vec<T> v) { return exp2<T>(v); }, x, y, n);
}
template <class T>
void log1p_array(const T* x, T* y, Index n) {
  apply([](Vec<T> v) { return log1p<T>(v); }, x, y, n);
}

#define LH_TEXT2(x) #x
#define LH_TEXT(x) LH_TEXT2(x)

}  // namespace

extern const Kernels table;
const Kernels table = {LH_TEXT(LEVELHEAD_ISA), kVectorBytes, forward, backward, fma_peak,
                       read_bandwidth, exp2_array<float>, exp2_array<double>,
                       log1p_array<float>, log1p_array<double>};

}  // namespace levelhead::LEVELHEAD_ISA
