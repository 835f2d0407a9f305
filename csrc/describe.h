// From arrays as callers have them to a Problem: every check of shape and dtype is here, before any
// work. Messages name the argument, what was expected and what came.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "problem.h"

namespace levelhead {

struct WrongType : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct WrongValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An array of any rank; strides in elements.
struct ArrayView {
  static constexpr int kMaxDims = Tensor::kMaxBatchDims + 3;

  const char* name = "";
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  int ndim = 0;
  Index shape[kMaxDims] = {}, stride[kMaxDims] = {};
};

// "(2, 8, 128, 64)"
std::string shape_text(const Index* shape, int ndim);
const char* dtype_text(Dtype dtype);

// Query, key and value: fills the sizes and the three tensors.
void describe(Problem& p, const ArrayView& query, const ArrayView& key, const ArrayView& value);

// A mask that must broadcast to (..., heads, queries, keys).
void describe_mask(Problem& p, const ArrayView& query, const ArrayView& mask);

// An array that must be (..., heads, rows, columns) with query's leading dimensions and dtype.
Tensor describe_like(const ArrayView& query, const ArrayView& array, Index heads, Index rows,
                     Index columns);

// lse as the forward pass gave it: (..., heads, queries), contiguous.
void describe_lse(Problem& p, const ArrayView& query, const ArrayView& lse);

// The shape that goes with query: its leading dimensions, then `tail`.
std::vector<Index> shape_like(const ArrayView& query, std::initializer_list<Index> tail);

}  // namespace levelhead
