#include "describe.h"

#include <algorithm>

namespace levelhead {
namespace {

std::string shape_text(const ArrayView& a) { return levelhead::shape_text(a.shape, a.ndim); }

// (batch..., heads, rows, columns); a matrix is one head, three dimensions are heads without batch.
Tensor as_tensor(const ArrayView& a) {
  Tensor t;
  t.data = a.data;
  t.dtype = a.dtype;
  const int n = a.ndim;
  t.columns = a.shape[n - 1];
  t.column_stride = a.stride[n - 1];
  t.rows = a.shape[n - 2];
  t.row_stride = a.stride[n - 2];
  t.heads = n > 2 ? a.shape[n - 3] : 1;
  t.head_stride = n > 2 ? a.stride[n - 3] : 0;
  t.batch_dims = std::max(0, n - 3);
  for (int d = 0; d < t.batch_dims; ++d) {
    t.batch_shape[d] = a.shape[d];
    t.batch_stride[d] = a.stride[d];
  }
  return t;
}

void check_dtype(const ArrayView& a, const ArrayView& query) {
  if (a.dtype != query.dtype)
    throw WrongType(std::string(a.name) + ": expected dtype " + dtype_text(query.dtype) +
                    " like query's, got " + dtype_text(a.dtype));
}

void check_leading(const ArrayView& a, const ArrayView& query) {
  const int batch = std::max(0, query.ndim - 3);
  if (a.ndim != query.ndim || !std::equal(a.shape, a.shape + batch, query.shape))
    throw WrongValue(std::string(a.name) + ": expected " + std::to_string(query.ndim) +
                     " dimensions" +
                     (batch ? " that begin with " + levelhead::shape_text(query.shape, batch) : "") +
                     " like query's " + shape_text(query) + ", got " + shape_text(a));
}

}  // namespace

std::string shape_text(const Index* shape, int ndim) {
  std::string text = "(";
  for (int d = 0; d < ndim; ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + (ndim == 1 ? ",)" : ")");
}

const char* dtype_text(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return "float32";
    case Dtype::f64: return "float64";
    case Dtype::f16: return "float16";
    case Dtype::bf16: return "bfloat16";
    default: return "bool";
  }
}

std::vector<Index> shape_like(const ArrayView& query, std::initializer_list<Index> tail) {
  std::vector<Index> shape(query.shape, query.shape + std::max(0, query.ndim - 3));
  shape.insert(shape.end(), tail);
  return shape;
}

void describe(Problem& p, const ArrayView& query, const ArrayView& key, const ArrayView& value) {
  for (const ArrayView* a : {&query, &key, &value}) {
    if (a->dtype == Dtype::boolean)
      throw WrongType(std::string(a->name) +
                      ": expected dtype float32, float64, float16 or bfloat16, got bool");
    if (a->ndim < 2)
      throw WrongValue(std::string(a->name) +
                       ": expected at least 2 dimensions (..., heads, length, dim), got shape " +
                       shape_text(*a));
  }
  check_dtype(key, query);
  check_dtype(value, query);
  check_leading(key, query);
  check_leading(value, query);
  p.query = as_tensor(query);
  p.key = as_tensor(key);
  p.value = as_tensor(value);
  p.batch = 1;
  for (int d = 0; d < p.query.batch_dims; ++d) p.batch *= query.shape[d];
  p.heads = p.query.heads;
  p.kv_heads = p.key.heads;
  p.queries = p.query.rows;
  p.keys = p.key.rows;
  p.key_dim = p.query.columns;
  p.value_dim = p.value.columns;
  if (p.key_dim == 0)
    throw WrongValue("query: expected a last dimension of at least 1, got shape " +
                     shape_text(query));
  if (p.key.columns != p.key_dim)
    throw WrongValue("key: expected last dimension " + std::to_string(p.key_dim) +
                     " like query's, got shape " + shape_text(key));
  if (p.value.rows != p.keys || p.value.heads != p.kv_heads)
    throw WrongValue("value: expected " + std::to_string(p.kv_heads) + " heads and " +
                     std::to_string(p.keys) + " rows like key's, got shape " + shape_text(value));
  if (p.kv_heads == 0 ? p.heads != 0 : p.heads % p.kv_heads != 0)
    throw WrongValue("key: expected a number of heads that divides query's " +
                     std::to_string(p.heads) + ", got " + std::to_string(p.kv_heads));
  if (p.keys > 0x7fffffff || p.queries > 0x7fffffff)
    throw WrongValue("query, key: expected fewer than 2**31 rows, got " +
                     std::to_string(std::max(p.queries, p.keys)));
}

void describe_mask(Problem& p, const ArrayView& query, const ArrayView& mask) {
  std::vector<Index> target(query.shape, query.shape + query.ndim);
  target.back() = p.keys;
  const int n = static_cast<int>(target.size());
  ArrayView full = mask;
  full.ndim = n;
  bool fits = mask.ndim <= n;
  for (int d = 0; fits && d < n; ++d) {
    const int from = d - (n - mask.ndim);
    const Index size = from < 0 ? 1 : mask.shape[from];
    fits = size == target[static_cast<std::size_t>(d)] || size == 1;
    full.shape[d] = target[static_cast<std::size_t>(d)];
    full.stride[d] = size == 1 ? 0 : mask.stride[from];
  }
  if (!fits)
    throw WrongValue("mask: expected a shape that broadcasts to " +
                     levelhead::shape_text(target.data(), n) + ", got " + shape_text(mask));
  p.mask = as_tensor(full);
}

void describe_lse(Problem& p, const ArrayView& query, const ArrayView& lse) {
  const Dtype expected = query.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  if (lse.dtype != expected)
    throw WrongType(std::string("lse: expected dtype ") + dtype_text(expected) + ", got " +
                    dtype_text(lse.dtype));
  bool fits = lse.ndim == query.ndim - 1 && std::equal(lse.shape, lse.shape + lse.ndim, query.shape);
  if (!fits)
    throw WrongValue("lse: expected shape " + levelhead::shape_text(query.shape, query.ndim - 1) +
                     ", got " + shape_text(lse));
  Index stride = 1;
  for (int d = lse.ndim - 1; d >= 0; --d) {
    fits = fits && (lse.stride[d] == stride || lse.shape[d] <= 1);
    stride *= lse.shape[d];
  }
  fits = fits && reinterpret_cast<std::uintptr_t>(lse.data) % size_of(lse.dtype) == 0;
  if (!fits && stride > 0)
    throw WrongValue("lse: expected a contiguous array as the forward pass returns it, got strides " +
                     levelhead::shape_text(lse.stride, lse.ndim));
  p.lse = lse.data;
}

Tensor describe_like(const ArrayView& query, const ArrayView& array, Index heads, Index rows,
                     Index columns) {
  check_dtype(array, query);
  std::vector<Index> expected(query.shape, query.shape + query.ndim);
  expected[expected.size() - 1] = columns;
  expected[expected.size() - 2] = rows;
  if (query.ndim > 2) expected[expected.size() - 3] = heads;
  if (array.ndim != query.ndim || !std::equal(expected.begin(), expected.end(), array.shape))
    throw WrongValue(std::string(array.name) + ": expected shape " +
                     levelhead::shape_text(expected.data(), query.ndim) + ", got " +
                     shape_text(array));
  return as_tensor(array);
}

}  // namespace levelhead
