// One struct describes a call; everything else takes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace levelhead {

using Index = std::int64_t;

enum class Dtype : std::uint8_t { f32, f64, f16, bf16, boolean };

constexpr std::size_t size_of(Dtype t) {
  return t == Dtype::f64 ? 8 : t == Dtype::f32 ? 4 : t == Dtype::boolean ? 1 : 2;
}

// An array of shape (batch..., heads, rows, columns). Strides are in elements and may be zero
// (broadcast) or negative; the leading batch dimensions need not be collapsible.
struct Tensor {
  static constexpr int kMaxBatchDims = 12;

  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  int batch_dims = 0;
  Index batch_shape[kMaxBatchDims] = {};
  Index batch_stride[kMaxBatchDims] = {};
  Index heads = 0, rows = 0, columns = 0;
  Index head_stride = 0, row_stride = 0, column_stride = 0;

  explicit operator bool() const { return data != nullptr; }

  // The first element of matrix (batch, head); `batch` counts the batch entries in C order.
  char* matrix(Index batch, Index head) const {
    Index offset = head * head_stride;
    for (int d = batch_dims - 1; d >= 0; --d) {
      offset += batch % batch_shape[d] * batch_stride[d];
      batch /= batch_shape[d];
    }
    return static_cast<char*>(data) + offset * static_cast<Index>(size_of(dtype));
  }
};

constexpr Index kOpen = std::numeric_limits<Index>::max() / 4;  // a window side without a limit

// Columns of one head's health sums, and the names by which Python knows them: the table of
// statistics (levelhead/_health/statistics.py) has them in the same order (tests/test_tables.py).
#define LEVELHEAD_HEALTH_SUMS(X)                                                                  \
  X(kRows, "rows") X(kPairs, "pairs") X(kEmptyRows, "empty_rows")                                 \
  X(kNonfiniteRows, "nonfinite_rows") X(kFiniteRows, "finite_rows") X(kChoiceRows, "choice_rows") \
  X(kWidestRow, "widest_row") X(kScoreCount, "score_count") X(kScoreMax, "score_max")             \
  X(kScoreMin, "score_min") X(kScoreMean, "score_mean") X(kScoreM2, "score_m2")                   \
  X(kLargeScores, "large_scores") X(kEntropy, "entropy") X(kEntropyRatio, "entropy_ratio")        \
  X(kEffectiveKeys, "effective_keys") X(kTopWeight, "top_weight") X(kSaturated, "saturated")      \
  X(kSignal, "signal") X(kJacobianNorm, "jacobian_norm") X(kFirstKey, "first_key")                \
  X(kDistance, "distance") X(kNullMass, "null_mass")                                              \
  X(kPatternSequences, "pattern_sequences") X(kSelfWeight, "self_weight")                         \
  X(kPreviousWeight, "previous_weight") X(kOffsetWeight, "offset_weight")                         \
  X(kSharedKey, "shared_key")
#define LEVELHEAD_GRAD_SUMS(X) \
  X(kWeightGradSq, "weight_grad_sq") X(kScoreGradSq, "score_grad_sq")
#define LEVELHEAD_COLUMN(column, name) column,
#define LEVELHEAD_COLUMN_NAME(column, name) name,
enum HealthSum : int { LEVELHEAD_HEALTH_SUMS(LEVELHEAD_COLUMN) kHealthSums };
enum GradSum : int { LEVELHEAD_GRAD_SUMS(LEVELHEAD_COLUMN) kGradSums };

constexpr double kLargeScore = 100.0;      // |score| beyond this counts as large
constexpr double kSaturatedWeight = 0.99;  // a row whose largest weight passes this is saturated

// Patterns are taken from so many rows of a sequence, each of which sees so many keys: all of them, or a
// sample (levelhead/_health/sampling.py). Long rows are fewer, so that their weights find room.
constexpr Index kPatternRows = 64, kPatternKeys = 8, kPatternLeastRows = 8;
constexpr Index kPatternWeights = 262144;

struct Problem {
  Index batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, key_dim = 0, value_dim = 0;
  Tensor query, key, value;
  Tensor mask;  // boolean or floating; broadcast dimensions have stride 0

  // A query at position p sees the keys p - left ... p + right. Causal is right = 0.
  Index left = kOpen, right = kOpen;
  Index query_offset = 0;
  const Index* query_offsets = nullptr;  // one per batch entry; overrides query_offset
  const Index* key_lengths = nullptr;    // one per batch entry

  double scale = 1.0;
  const double* scales = nullptr;  // one per head; overrides scale
  double softcap = 0.0;            // 0: none
  const double* sinks = nullptr;   // one per head
  double dropout = 0.0;
  std::uint64_t seed = 0;
  int threads = 1;

  Tensor output;           // (batch..., heads, queries, value_dim)
  void* lse = nullptr;     // (batch, heads, queries) contiguous, float (double for f64)
  Tensor weights;          // (batch..., heads, queries, keys), or empty
  double* health = nullptr;  // (batch, heads, kHealthSums), or null

  // Backward only.
  Tensor grad_output, grad_query, grad_key, grad_value;
  // Of the scores as they enter the softmax: (batch, heads, queries, keys) contiguous, zeroed,
  // float (double for f64); or null.
  void* grad_scores = nullptr;
  double* grad_health = nullptr;  // (batch, heads, kGradSums), or null

  bool has_bias() const { return mask && mask.dtype != Dtype::boolean; }
  Index group() const { return heads / kv_heads; }
  double scale_of(Index head) const { return scales ? scales[head] : scale; }
  Index length(Index b) const { return key_lengths ? key_lengths[b] : keys; }
  Index offset(Index b) const { return query_offsets ? query_offsets[b] : query_offset; }
};

// What one instruction set's build of the kernels offers.
struct Kernels {
  const char* isa;
  int vector_bytes;
  void (*forward)(const Problem&);
  void (*backward)(const Problem&);
  double (*fma_peak)(int threads);        // GFLOP/s, float32
  double (*read_bandwidth)(int threads);  // GB/s
  void (*exp2_f32)(const float* x, float* y, Index n);  // exposed for the ulp tests
  void (*exp2_f64)(const double* x, double* y, Index n);
  void (*log1p_f32)(const float* x, float* y, Index n);
  void (*log1p_f64)(const double* x, double* y, Index n);
};

const Kernels& kernels();  // the best this CPU runs, or the one LEVELHEAD_ISA names

}  // namespace levelhead
