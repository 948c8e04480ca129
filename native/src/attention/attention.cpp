// Attention of queries over dense or cached keys: how the work is divided, and the C interface.
#include <atomic>
#include <cstring>

#include "../program.h"
#include "../team.h"
#include "worker.h"

namespace onward::attention {
namespace {

// Rows of a unit: enough that packing a block is cheap compared with using it, and few enough that their
// state stays in the second-level cache.
constexpr int64_t kUnitRows = 256;
constexpr int64_t kUnitQueries = 64;
// The segments of a unit with few rows may be divided between threads. Each has a separate state until the merge.
constexpr int64_t kSpreadRows = 32;
// Maximum number of key/value heads in a unit.
constexpr int64_t kUnitHeads = 8;
// The work of a unit is blocks * (rows + kLoadingRows) * features, where kLoadingRows is the cost of reading
// a block, in rows. A chunk of kWorkPerChunk takes a few microseconds.
constexpr int64_t kLoadingRows = 4;
constexpr int64_t kWorkPerChunk = 4096;
// A larger number is a caller's mistake, and would need a large amount of working memory.
constexpr int64_t kMostFeatures = 1 << 20;

class Plan {
 public:
  explicit Plan(const Problem& p) : p_(p) {
    const int64_t fit = kUnitRows / p.group();
    queries_ = fit < 1 ? 1 : fit < kUnitQueries ? fit : kUnitQueries;
    if (queries_ > p.queries) queries_ = p.queries;
    chunks_ = ceil_div(p.queries, queries_);
    int64_t longest = 0;
    for (int64_t row = 0; row < p.batch; ++row) {
      const int64_t end = p.span(row, p.queries - 1).last;
      if (end > longest) longest = end;
    }
    segments_ = ceil_div(longest, kSegment);
    while (heads_ < kUnitHeads && may_double_heads()) heads_ *= 2;
    const int64_t work = ceil_div(longest, kBlock) * (rows() + kLoadingRows) * (p.keys.dim + p.values.dim) / 2;
    // As many chunks as the work justifies, and the same number for every thread.
    const int64_t parts = ceil_div(units(), ceil_div(kWorkPerChunk, work + 1));
    grain_ = ceil_div(units(), parts > 1 ? round_up(parts, num_threads()) : 1);
  }

  int64_t units() const { return p_.batch * p_.kv_heads / heads_ * chunks_; }
  int64_t heads() const { return heads_; }  // key/value heads of a unit
  int64_t segments() const { return segments_; }
  int64_t grain() const { return grain_; }  // units of a chunk
  int64_t rows() const { return queries_ * heads_ * p_.group(); }

  // Later queries see more keys. They come first, so that the last units to run are short.
  Unit unit(int64_t index) const {
    const int64_t per_row = p_.kv_heads / heads_, per_chunk = p_.batch * per_row;
    const int64_t first = (chunks_ - 1 - index / per_chunk) * queries_;
    const int64_t left = p_.queries - first;
    return {index % per_chunk / per_row, index % per_row * heads_, heads_, first,
            left < queries_ ? left : queries_};
  }

  // Whether to divide segments between threads: there are too few units to keep all threads busy.
  bool spread() const {
    return units() < 4 * num_threads() && segments_ > 1 && queries_ * p_.group() <= kSpreadRows;
  }

 private:
  // For single queries over blocks in which the heads are adjacent, if enough units remain for every thread.
  bool may_double_heads() const {
    return p_.table.blocks != nullptr && p_.queries == 1 && p_.kv_heads % (2 * heads_) == 0 &&
           p_.group() <= kTileRows && p_.keys.head_stride == kBlock * p_.keys.position_stride &&
           units() / 2 * segments_ >= 2 * num_threads();
  }

  const Problem& p_;
  int64_t heads_ = 1, queries_, chunks_, segments_, grain_;
};

template <class T, class S>
Status run_units(const Problem& p, const Plan& plan) {
  std::atomic<bool> ok{true};
  parallel_for(plan.units(), plan.grain(), [&](int64_t begin, int64_t end) {
    Worker<T, S> worker(p, plan.rows(), plan.heads());
    if (!worker.ok()) ok = false;
    for (int64_t i = begin; i < end && worker.ok(); ++i) worker.run(plan.unit(i));
  });
  return ok ? kOk : kOutOfMemory;
}

// Runs the segments of every unit as separate work items, then merges them in order: the same steps as in
// Worker::run.
template <class T, class S>
Status run_segments(const Problem& p, const Plan& plan) {
  const int64_t segments = plan.segments(), padded = round_up(p.values.dim, 32);
  const int64_t floats = round_up(State::floats(plan.rows(), padded), 16);
  auto* memory = static_cast<float*>(scratch(
      kScratchActivations, plan.units() * segments * floats * int64_t(sizeof(float))));
  if (memory == nullptr) return kOutOfMemory;
  const auto state = [&](int64_t unit, int64_t segment) {
    return State::in(memory + (unit * segments + segment) * floats, plan.rows(), padded);
  };
  std::atomic<bool> ok{true};
  parallel_for(plan.units() * segments, 1, [&](int64_t begin, int64_t end) {
    Worker<T, S> worker(p, plan.rows(), plan.heads());
    if (!worker.ok()) ok = false;
    for (int64_t i = begin; i < end && worker.ok(); ++i) {
      worker.run_segment(plan.unit(i / segments), i % segments * kSegment,
                         state(i / segments, i % segments));
    }
  });
  parallel_for(ok ? plan.units() : 0, 4, [&](int64_t begin, int64_t end) {
    Worker<T, S> worker(p, plan.rows(), plan.heads());
    if (!worker.ok()) ok = false;
    for (int64_t i = begin; i < end && worker.ok(); ++i) {
      worker.merge_and_finish(plan.unit(i), segments, [&](int64_t s) { return state(i, s); });
    }
  });
  return ok ? kOk : kOutOfMemory;
}

// Whether the table has a block for every position that a query of the row sees.
bool has_blocks(const Problem& p, int64_t row) {
  const Span seen{p.span(row, 0).first, p.span(row, p.queries - 1).last};
  for (int64_t at = seen.first / kBlock * kBlock; at < seen.last; at += kBlock) {
    if (p.table.at(row, at) < 0) return false;
  }
  return true;
}

bool valid(const Problem& p) {
  if (p.batch < 0 || p.queries < 0 || p.positions < 0 || p.window < 0 || !(p.softcap >= 0)) return false;
  if (p.keys.dim <= 0 || p.keys.dim > kMostFeatures) return false;
  if (p.values.dim <= 0 || p.values.dim > kMostFeatures) return false;
  if (p.kv_heads <= 0 || p.heads <= 0 || p.heads % p.kv_heads != 0) return false;
  for (int64_t row = 0; p.offsets != nullptr && row < p.batch; ++row) {
    if (p.offsets[row] < 0 || p.offsets[row] + p.queries > p.positions) return false;
  }
  for (int64_t row = 0; p.table.blocks != nullptr && row < p.batch; ++row) {
    if (!has_blocks(p, row)) return false;
  }
  return true;
}

// The rows first, …, first + count - 1 of the batch.
Problem part(const Problem& p, int64_t first, int64_t count) {
  const auto from = [&](Tensor tensor) {
    tensor.data = static_cast<const char*>(tensor.data) + first * tensor.batch_stride * element_size(p.dtype);
    return tensor;
  };
  Problem rows = p;
  rows.batch = count;
  rows.q = from(p.q), rows.out = from(p.out);
  rows.offsets += first;
  rows.table.blocks += first * p.table.row_stride;
  return rows;
}

// Single queries of one sequence at consecutive positions arrive as rows with the same blocks. Makes rows
// first, …, first + count - 1 into one row of `count` queries, so that their keys and values are read once.
Problem joined(const Problem& p, int64_t first, int64_t count) {
  Problem row = part(p, first, 1);
  row.queries = count;
  row.q.position_stride = row.q.batch_stride;
  row.out.position_stride = row.out.batch_stride;
  return row;
}

// Whether the row is the next position of the previous row's sequence.
bool continues(const Problem& p, int64_t row) {
  if (row == 0 || p.offsets[row] != p.offsets[row - 1] + 1) return false;
  const int32_t* blocks = p.table.blocks + row * p.table.row_stride;
  return std::memcmp(blocks, blocks - p.table.row_stride,
                     size_t(p.offsets[row] / kBlock + 1) * sizeof(int32_t)) == 0;
}

template <class T, class S>
Status attend_as(const Problem& p) {
  const Plan plan(p);
  return plan.spread() ? run_segments<T, S>(p, plan) : run_units<T, S>(p, plan);
}

template <class T, class S>
Status attend_joining(const Problem& p) {
  int64_t singles = 0;  // rows singles, …, row - 1 are collected and run together
  for (int64_t row = 0, count; row < p.batch; row += count) {
    for (count = 1; row + count < p.batch && continues(p, row + count);) ++count;
    const bool last = row + count == p.batch;
    if (count == 1 && !last) continue;
    const int64_t waiting = row - singles + (count == 1);
    Status status = waiting > 0 ? attend_as<T, S>(part(p, singles, waiting)) : kOk;
    if (status == kOk && count > 1) status = attend_as<T, S>(joined(p, row, count));
    if (status != kOk) return status;
    singles = row + count;
  }
  return kOk;
}

}  // namespace

Status attend(const Problem& p) {
  if (!valid(p)) return kBadArgument;
  if (p.batch == 0 || p.queries == 0) return kOk;
  const bool joins = p.queries == 1 && p.table.blocks != nullptr && p.offsets != nullptr && p.mask.data == nullptr;
  Status status = kOk;
  const bool known = with_dtype(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto attend_rows = [&](auto* row) {
      using S = std::remove_pointer_t<decltype(row)>;
      return joins ? attend_joining<T, S>(p) : attend_as<T, S>(p);
    };
    status = p.rows == kInt8Rows ? attend_rows(static_cast<I8*>(nullptr)) : attend_rows(tag);
  });
  return known ? status : kBadArgument;
}

}  // namespace onward::attention

// The arguments of onward_attention (AttentionArguments in Python).
struct OnwardAttention {
  int64_t batch, heads, kv_heads, queries, positions;
  int64_t dim, value_dim;         // D, E
  const void *q, *keys, *values;  // [B, H, T, D], [B, G, S, D], [B, G, S, E]
  void* out;                      // [B, H, T, E]
  // Strides of rows, heads and positions, in elements. Features are contiguous.
  int64_t q_strides[3], keys_strides[3], values_strides[3], out_strides[3];
  const int32_t* offsets;   // [B], or null: every query sees every key
  int64_t window;           // 0: no window
  const float* mask;        // [B, H, T, S], added to the scores, or null
  int64_t mask_strides[4];  // 0 broadcasts
  const float* sinks;       // [H], or null
  float scale;
  float softcap;            // scores become softcap tanh(score / softcap) before the mask; 0: no softcap
  int32_t dtype;
  int32_t cache_format;     // of keys and values: kFloatRows or kInt8Rows
  // int32 [B, positions / 64], or null: keys are [N, G, 64, D], values [N, G, 64, E], and entry m of a row is the block
  // of its positions 64 m, …, 64 m + 63.
  const int32_t* table;
  int64_t table_stride;  // between rows
};

// softmax(q k^T * scale + mask) v. See problem.h for the definition.
ONWARD_API int32_t onward_attention(const OnwardAttention* arguments) {
  using namespace onward::attention;
  const auto& a = *arguments;
  if (a.cache_format != kFloatRows && a.cache_format != kInt8Rows) return onward::kBadArgument;
  const auto tensor = [](const void* data, const int64_t* strides, int64_t dim, int64_t width) {
    return Tensor{data, strides[0], strides[1], strides[2], dim, width};
  };
  const int64_t scale = a.cache_format == kInt8Rows ? kScaleBytes : 0;
  Problem p;
  p.dtype = a.dtype, p.rows = a.cache_format;
  p.batch = a.batch, p.heads = a.heads, p.kv_heads = a.kv_heads;
  p.queries = a.queries, p.positions = a.positions;
  p.q = tensor(a.q, a.q_strides, a.dim, a.dim), p.keys = tensor(a.keys, a.keys_strides, a.dim, a.dim + scale);
  // If the values are the first features of the keys, they share the keys' scales.
  const int64_t stored = scale > 0 && a.values == a.keys ? a.dim : a.value_dim;
  p.values = tensor(a.values, a.values_strides, a.value_dim, stored + scale);
  p.out = tensor(a.out, a.out_strides, a.value_dim, a.value_dim);
  p.offsets = a.offsets, p.window = a.window, p.scale = a.scale, p.softcap = a.softcap;
  p.mask = {a.mask, a.mask_strides[0], a.mask_strides[1], a.mask_strides[2], a.mask_strides[3]};
  p.sinks = a.sinks;
  p.table = {a.table, a.table_stride};
  return attend(p);
}

// The keys and values of the first row of the batch up to its last query, head by head: all of them, or with
// a block table as many blocks as Reads has room for.
static onward::Reads reads_of_attention(const OnwardAttention* a) {
  using namespace onward;
  using attention::kBlock;
  const bool ragged = a->offsets != nullptr && a->batch > 0;
  const int64_t end = ragged ? a->offsets[0] + a->queries : a->positions;
  if (end > a->positions || end <= 0) return {};
  const int64_t first = a->window > 0 && end > a->window ? end - a->window : 0;
  const int64_t size = a->cache_format == attention::kInt8Rows ? 1 : element_size(a->dtype);
  const auto run = [&](const void* data, const int64_t* strides, int64_t skipped, int64_t rows) {
    const int64_t start = int64_t(reinterpret_cast<intptr_t>(data)) + skipped * strides[2] * size;
    return Reads::Run{start, strides[1] * size, rows * strides[2] * size, a->kv_heads};
  };
  Reads reads;
  reads.abreast = 1;
  if (a->table == nullptr) {
    reads.runs[0] = run(a->keys, a->keys_strides, first, end - first);
    reads.runs[1] = run(a->values, a->values_strides, first, end - first);
    return reads;
  }
  const int64_t begin = first / kBlock, blocks = ceil_div(end, kBlock) - begin;
  const int64_t named = blocks < Reads::kBlocks ? blocks : Reads::kBlocks;
  const int64_t rows = named < blocks ? named * kBlock : end - begin * kBlock;
  for (int64_t i = 0; i < named; ++i) {
    reads.blocks[i] = a->table[begin + i] * a->keys_strides[0] * size;
  }
  reads.block_bytes = kBlock * a->keys_strides[2] * size;
  reads.runs[0] = run(a->keys, a->keys_strides, 0, rows);
  // Reads cannot describe values whose rows are not as wide as those of the keys.
  if (a->values_strides[0] == a->keys_strides[0] && a->values_strides[2] == a->keys_strides[2]) {
    reads.runs[1] = run(a->values, a->values_strides, 0, rows);
  }
  return reads;
}
ONWARD_INSTRUCTION_READS(onward_attention, reads_of_attention);
