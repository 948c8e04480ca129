// The work of one thread: consecutive queries of one row of the batch, with all heads of one group, over
// one segment of the keys of their key/value head. The keys are read once for all of them. A unit of a
// single query may have the groups of several consecutive key/value heads. Their parts of a block are
// adjacent in memory, and a processor that prefetches a stream reads about 4 KB past its end, which is a
// quarter of a head's part of a block.
#pragma once
#include "../scratch.h"
#include "softmax.h"
#include "tile.h"

namespace onward::attention {

// How far ahead a stream of keys and values is prefetched.
constexpr int64_t kAheadBytes = 4096;

// Up to this number of tiles of one key/value head read its blocks unpacked. With more tiles, packing a block
// saves more than it costs.
constexpr int64_t kStreamTiles = 6;

// Floats per block of a tile: two for each of up to 16 rows.
constexpr int64_t kRowFloats = 2 * 16;

struct Unit {
  int64_t row, kv_head, heads, first_query, queries;  // heads: key/value heads from kv_head on
};

// T: element type of queries and outputs. S: element type of keys and values.
template <class T, class S>
class Worker {
  using F = typename FormatOf<T, S>::type;

 public:
  // rows, heads: the maximum of a unit. ok() is false if memory cannot be allocated.
  Worker(const Problem& problem, int64_t rows, int64_t heads)
      : p_(problem),
        group_(p_.group()),
        padded_(padded(p_.values)),
        query_words_(ceil_div(p_.keys.dim, F::kFeatures) * 16) {
    // Maximum number of tiles of a streamed unit.
    const int64_t streams = heads > kStreamTiles ? heads : kStreamTiles;
    // Every array begins on a cache line.
    const int64_t sizes[] = {kBlock * query_words_,
                             kBlock / F::kPositions * padded_,
                             streams * kTileRows * kSegment,
                             streams * kTileRows * kSegment,
                             streams * kSegmentBlocks * kRowFloats,
                             rows * query_words_,
                             State::floats(rows, padded_),
                             State::floats(rows, padded_),
                             words_of<Query>(rows),
                             words_of<Tile>(rows),
                             words_of<S>(kBlock * copied(p_.keys)),
                             words_of<S>(kBlock * copied(p_.values)),
                             kScaled<S> ? 2 * kBlock : 0};
    int64_t words = 0;
    for (int64_t size : sizes) words += round_up(size, 16);
    auto* memory =
        static_cast<float*>(scratch(kScratchWorker, words * int64_t(sizeof(float))));
    ok_ = memory != nullptr;
    if (!ok_) return;
    const int64_t* size = sizes;
    const auto next = [&] {
      float* array = memory;
      memory += round_up(*size++, 16);
      return array;
    };
    packed_keys_ = next(), packed_ = next(), scores_ = next(), weights_ = next(), decay_ = next(), panel_ = next();
    segment_ = State::in(next(), rows, padded_), total_ = State::in(next(), rows, padded_);
    queries_ = reinterpret_cast<Query*>(next()), tiles_ = reinterpret_cast<Tile*>(next());
    partial_keys_ = reinterpret_cast<S*>(next()), partial_values_ = reinterpret_cast<S*>(next());
    key_scales_ = next(), value_scales_ = key_scales_ + kBlock;
  }

  bool ok() const { return ok_; }

  // Computes the outputs of the unit's queries.
  void run(const Unit& unit) {
    const Span seen = seen_by(unit);
    int64_t start = seen.first / kSegment * kSegment;
    run_segment(unit, start, total_);
    while ((start += kSegment) < seen.last) {
      run_segment(unit, start, segment_);
      merge(total_, segment_, rows_of(unit));
    }
    finish(unit, total_);
  }

  // Computes `state` for the segment that begins at `start`.
  void run_segment(const Unit& unit, int64_t start, const State& state) {
    const Span segment = overlap(seen_by(unit), {start, start + kSegment});
    if (unit.queries > 1 && hides_poison(unit, segment)) {
      for (int64_t i = 0; i < unit.queries; ++i) {
        run_segment({unit.row, unit.kv_head, 1, unit.first_query + i, 1}, start,
                    state.from_row(i * group_));
      }
      return;
    }
    clear(state, rows_of(unit));
    lay_out_queries(unit);
    cut_tiles(unit);
    if (tile_count_ <= unit.heads || tile_count_ <= kStreamTiles) return stream_segment(unit, segment, state);
    for (int64_t at = first_block(segment); at < segment.last; at += kBlock) {
      run_block(unit, at, segment, state);
    }
  }

  // The end of run() for segments that have been run separately: `segments` of them, from position 0 on.
  template <class StateOf>
  void merge_and_finish(const Unit& unit, int64_t segments, StateOf&& state_of) {
    const Span seen = seen_by(unit);
    int64_t i = seen.first / kSegment;
    const State total = state_of(i);
    while (++i < segments && i * kSegment < seen.last) merge(total, state_of(i), rows_of(unit));
    finish(unit, total);
  }

 private:
  struct Query {  // of one head: a row of a unit. They are ordered by query, then by head.
    Span span;
    const float* mask;  // at position 0, or null
    float factor;       // of its scores
  };
  // Rows of a unit that are computed together.
  struct Tile {
    int64_t first, rows;
    Span seen;
  };

  static int64_t padded(const Tensor& tensor) { return round_up(tensor.dim, 32); }
  // The stride between copied rows.
  static int64_t copied(const Tensor& tensor) { return round_up(tensor.width, 32); }

  template <class Element>
  static int64_t words_of(int64_t count) {
    return ceil_div(count * int64_t(sizeof(Element)), int64_t(sizeof(float)));
  }

  // The query heads of a unit, and its rows: one per query and query head.
  int64_t heads_of(const Unit& unit) const { return unit.heads * group_; }
  int64_t rows_of(const Unit& unit) const { return unit.queries * heads_of(unit); }

  // From the first to the last position that any query of the unit sees.
  Span seen_by(const Unit& unit) const {
    return {p_.span(unit.row, unit.first_query).first,
            p_.span(unit.row, unit.first_query + unit.queries - 1).last};
  }

  // Whether a value that some query of the unit must not see is infinite or NaN. It would corrupt the sums
  // of that query even with a weight of 0, so the queries are then computed one by one.
  bool hides_poison(const Unit& unit, Span segment) const {
    const Span shared = {p_.span(unit.row, unit.first_query + unit.queries - 1).first,
                         p_.span(unit.row, unit.first_query).last};
    const Span before = overlap(segment, {0, shared.first});
    const Span after = overlap(segment, {shared.last, p_.positions});
    return poisoned(unit, before) || poisoned(unit, after);
  }

  bool poisoned(const Unit& unit, Span range) const {
    f32x16 sum = zero_f32();
    for (int64_t at = range.first; at < range.last; ++at) {
      const S* value = p_.template cached<S>(p_.values, unit.row, unit.kv_head, at);
      if constexpr (kScaled<S>) {
        sum = fma(splat(scale_of(value, p_.values.width)), zero_f32(), sum);
        continue;
      }
      for (int64_t d = 0; d < p_.values.dim; d += 16) {
        sum = fma(load_first(value + d, p_.values.dim - d), zero_f32(), sum);
      }
    }
    return any(is_nan(sum));
  }

  static void clear(const State& state, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) state.max[r] = -kInfinity;
    std::memset(state.sum, 0, size_t(rows) * 16 * sizeof(float));
    std::memset(state.out, 0, size_t(rows * state.dim) * sizeof(float));
  }

  void lay_out_queries(const Unit& unit) {
    for (int64_t r = 0, i = 0; i < unit.queries; ++i) {
      const int64_t query = unit.first_query + i;
      const Span span = p_.span(unit.row, query);
      for (int64_t h = 0; h < heads_of(unit); ++h, ++r) {
        const int64_t head = unit.kv_head * group_ + h;
        const T* q = p_.q.at<T>(unit.row, head, query);
        const float factor = F::store_query(panel_ + r * query_words_, q, p_.q.dim);
        queries_[r] = {span, p_.mask.at(unit.row, head, query), factor};
      }
    }
  }

  // Divides the rows of a unit into tiles. The positions of a tile's queries are in one block, so that no
  // query visits a block after its position. With several key/value heads, each head is a tile.
  void cut_tiles(const Unit& unit) {
    if (unit.heads > 1) {
      for (tile_count_ = 0; tile_count_ < unit.heads; ++tile_count_) {
        tiles_[tile_count_] = {tile_count_ * group_, group_, queries_[0].span};
      }
      return;
    }
    const auto block_of = [&](int64_t r) { return (queries_[r].span.last - 1) / kBlock; };
    tile_count_ = 0;
    for (int64_t first = 0; first < rows_of(unit);) {
      int64_t end = first + group_;
      while (end < rows_of(unit) && block_of(end) == block_of(first)) end += group_;
      while (first < end) {
        const int64_t left = end - first, rows = ceil_div(left, ceil_div(left, kTileRows));
        tiles_[tile_count_++] = {
            first, rows, {queries_[first].span.first, queries_[first + rows - 1].span.last}};
        first += rows;
      }
    }
  }

  static int64_t first_block(Span segment) { return segment.first / kBlock * kBlock; }

  // Processes the block of keys that begins at `start`. The unit sees those in `seen`.
  void run_block(const Unit& unit, int64_t start, Span seen, const State& state) {
    const Place place{unit.row, unit.kv_head, start};
    const Rows<S> keys = rows_at(place, p_.keys, seen, partial_keys_);
    const ValueRows<F, S> values{rows_at(place, p_.values, seen, partial_values_), p_.values.dim};
    read_scales(keys, p_.keys, positions_in(start, seen), key_scales_);
    read_scales(values.rows, p_.values, positions_in(start, seen), value_scales_);
    const auto packed = pack_values(values, positions_in(start, seen), padded_, packed_);
    const auto packed_keys = pack_keys<F>(keys, positions_in(start, seen), p_.keys.dim, packed_keys_);
    for (int64_t i = 0; i < tile_count_; ++i) {
      const Tile& tile = tiles_[i];
      if (overlap(tile.seen, {start, start + kBlock}).empty()) continue;
      const State part = state.from_row(tile.first);
      const Buffers buffers = buffers_of(0);
      score_keys<F>(scoring(tile, start, {}, buffers), packed_keys);
      scale_scores(tile, start, buffers);
      weigh(tile, start, part, buffers);
      blend(tile, start, part, packed, buffers);
      fetch_share(unit, start + kBlock, i);
    }
  }

  // Prefetches one of tile_count_ shares of the block at `start`. Without this, a unit of few queries spends a fifth of
  // its time waiting for memory.
  void fetch_share(const Unit& unit, int64_t start, int64_t share) const {
    if (start >= seen_by(unit).last) return;
    const Place place{unit.row, unit.kv_head, start};
    const int64_t first = kBlock * share / tile_count_, end = kBlock * (share + 1) / tile_count_;
    for (const Tensor* tensor : {&p_.keys, &p_.values}) {
      const Rows<S> rows = rows_at(place, *tensor);
      const int64_t bytes = tensor->width * int64_t(sizeof(S));
      for (int64_t j = first; j < end; ++j) {
        const char* row = reinterpret_cast<const char*>(rows[j]);
        for (int64_t at = 0; at < bytes; at += 64) fetch_here(row + at);
      }
    }
  }

  // Processes all blocks of a segment for a unit of few tiles, which is limited by memory bandwidth: first all
  // keys, then all values, so that each is one long stream to prefetch. Every block of a head goes through the
  // steps of run_block in the same order.
  void stream_segment(const Unit& unit, Span segment, const State& state) {
    const int64_t begin = first_block(segment);
    const Place first{unit.row, unit.kv_head, begin};
    walk(unit, segment, [&](const Place& place, int64_t tile, const Buffers& buffers) {
      const Rows<S> keys = rows_at(place, p_.keys, segment, partial_keys_);
      Ahead<S> ahead = ahead_of(unit, place, p_.keys, segment.last, rows_at(first, p_.values));
      const int64_t pairs = ceil_div(tiles_[tile].rows, 2);
      ahead.turn = reader(unit, tile) * pairs;
      ahead.turns = readers(unit) * pairs;
      const Scoring<S> task = scoring(tiles_[tile], place.start, ahead, buffers);
      if (ahead.dense(p_.keys.width)) {
        score_keys<F, Fetch::kLines>(task, keys);
      } else {
        score_keys<F, Fetch::kRows>(task, keys);
      }
      read_scales(keys, p_.keys, task.positions, key_scales_);
      scale_scores(tiles_[tile], place.start, buffers);
    });
    // Scales are read together with the values, so that both are one stream.
    if constexpr (!kScaled<S>) {
      walk(unit, segment, [&](const Place& place, int64_t tile, const Buffers& buffers) {
        weigh(tiles_[tile], place.start, state.from_row(tiles_[tile].first), buffers);
      });
    }
    const Rows<S> next_keys = keys_after(unit, segment);
    uint64_t asks = 0;  // of the first reader
    for (int64_t i = 0; i < kBlock; i += readers(unit)) asks |= uint64_t(1) << i;
    walk(unit, segment, [&](const Place& place, int64_t tile, const Buffers& buffers) {
      const ValueRows<F, S> rows{rows_at(place, p_.values, segment, partial_values_), p_.values.dim};
      const State part = state.from_row(tiles_[tile].first);
      if constexpr (kScaled<S>) {
        read_scales(rows.rows, p_.values, positions_in(place.start, tiles_[tile].seen), value_scales_);
        weigh(tiles_[tile], place.start, part, buffers);
      }
      const Ahead<S> ahead = ahead_of(unit, place, p_.values, segment.last, next_keys);
      const StreamedValues<F, S> values{rows, ahead, ahead.dense(p_.values.width), asks << reader(unit, tile)};
      blend(tiles_[tile], place.start, part, values, buffers);
    });
  }

  // The number of tiles that read the same block, and the index of a tile among them. They take turns in
  // prefetching: when only the first tile prefetched, memory was idle most of the time.
  int64_t readers(const Unit& unit) const { return unit.heads > 1 ? 1 : tile_count_; }
  static int64_t reader(const Unit& unit, int64_t tile) { return unit.heads > 1 ? 0 : tile; }

  // The beginning of a block of a key/value head.
  struct Place {
    int64_t row, kv_head, start;
  };

  // Visits every block of the segment, and for each block the tiles that see part of it; the tiles of several
  // heads are in memory order.
  template <class Visit>
  void walk(const Unit& unit, Span segment, Visit&& visit) {
    for (int64_t at = first_block(segment), i = 0; at < segment.last; at += kBlock) {
      for (int64_t tile = 0; tile < tile_count_; ++tile, ++i) {
        if (overlap(tiles_[tile].seen, {at, at + kBlock}).empty()) continue;
        visit(Place{unit.row, unit.kv_head + (unit.heads > 1 ? tile : 0), at}, tile, buffers_of(i));
      }
    }
  }

  // The rows to prefetch while a block is read; the positions of the segment end at `end`, and `next` follows. The
  // distance is kAheadBytes. It is a block if several tiles read the block, because the first tile reaches a row
  // before the others have prefetched it, and if rows have scales, which are read before the rest of a block.
  // With a block table, rows are contiguous up to the end of the block. After them come the rows of the unit's
  // next head or of the following block, or, if that block has few positions, the rows of `next`.
  Ahead<S> ahead_of(const Unit& unit, const Place& place, const Tensor& tensor, int64_t end,
                    const Rows<S>& next) const {
    const int64_t far = ceil_div(kAheadBytes, tensor.width * int64_t(sizeof(S)));
    const int64_t distance = far < kBlock && readers(unit) == 1 && !kScaled<S> ? far : kBlock;
    const Rows<S> rows = rows_at(place, tensor), ahead{rows[distance], rows.stride};
    const int64_t left = end - place.start, here = left < kBlock ? left : kBlock;
    if (place.kv_head + 1 < unit.kv_head + unit.heads) {
      return {ahead, here - distance, rows_at({place.row, place.kv_head + 1, place.start}, tensor)};
    }
    if (p_.table.blocks == nullptr || left <= kBlock) return {ahead, left - distance, next};
    const Rows<S> following = left - kBlock >= distance / 2
                                  ? rows_at({place.row, unit.kv_head, place.start + kBlock}, tensor)
                                  : Rows<S>{next[kBlock - left], next.stride};
    return {ahead, here - distance, following};
  }

  // The keys that this thread will probably score next: of the following segment, or of the next heads.
  Rows<S> keys_after(const Unit& unit, Span segment) const {
    if (segment.last < seen_by(unit).last) {
      return rows_at({unit.row, unit.kv_head, segment.last}, p_.keys);
    }
    return rows_at({unit.row, unit.kv_head + unit.heads, first_block(seen_by(unit))}, p_.keys);
  }

  // The number of positions of the block at `start` to process.
  static int64_t positions_in(int64_t start, Span seen) {
    return seen.last - start < kBlock ? round_up(seen.last - start, 16) : kBlock;
  }

  Rows<S> rows_at(const Place& place, const Tensor& tensor) const {
    return {p_.template cached<S>(tensor, place.row, place.kv_head, place.start), tensor.position_stride};
  }

  // The same, but a copy unless all rows are seen: rows that are not seen may not be read, and are zeros in the
  // copy.
  Rows<S> rows_at(const Place& place, const Tensor& tensor, Span seen, S* copy) const {
    const Rows<S> rows = rows_at(place, tensor);
    const int64_t start = place.start;
    const int64_t positions = positions_in(start, seen);
    if (seen.first <= start && seen.last >= start + positions) return rows;
    for (int64_t j = 0; j < positions; ++j) {
      const bool real = start + j >= seen.first && start + j < seen.last;
      void* to = copy + j * copied(tensor);
      const size_t bytes = size_t(tensor.width) * sizeof(S);
      if (real) {
        std::memcpy(to, rows[j], bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
    return {copy, copied(tensor)};
  }

  void read_scales(const Rows<S>& rows, const Tensor& tensor, int64_t positions, float* scales) const {
    if constexpr (kScaled<S>) {
      for (int64_t j = 0; j < positions; ++j) scales[j] = scale_of(rows[j], tensor.width);
    }
  }

  // Intermediate results of one block and tile. number: in the order of `walk`.
  struct Buffers {
    float *scores, *weights;  // [rows, 64], [rows, 64 / kPositions] words
    float *decay, *factors;   // [16]
  };
  Buffers buffers_of(int64_t number) {
    return {scores_ + number * kTileRows * kBlock, weights_ + number * kTileRows * kBlock,
            decay_ + number * kRowFloats, decay_ + number * kRowFloats + 16};
  }

  void scale_scores(const Tile& tile, int64_t start, const Buffers& b) const {
    if constexpr (kScaled<S>) {
      const int64_t positions = positions_in(start, tile.seen);
      for (int64_t i = 0; i < tile.rows; ++i) {
        float* scores = b.scores + i * kBlock;
        for (int64_t j = 0; j < positions; j += 16) {
          store(scores + j, mul(load(scores + j), load(key_scales_ + j)));
        }
      }
    }
  }

  Scoring<S> scoring(const Tile& tile, int64_t start, const Ahead<S>& ahead,
                     const Buffers& to) const {
    return {panel_ + tile.first * query_words_, tile.rows, query_words_,
            positions_in(start, tile.seen), p_.keys.dim, ahead, to.scores};
  }

  void weigh(const Tile& tile, int64_t start, const State& state, const Buffers& b) {
    const int64_t positions = positions_in(start, tile.seen);
    float largest[16];
    store(largest, splat(-kInfinity));
    for (int64_t i = 0; i < tile.rows; ++i) {
      largest[i] = final_scores(queries_[tile.first + i], start, positions, b.scores + i * kBlock);
    }
    // Lanes past the tile's rows are those of later rows and stay unchanged. A NaN in `largest` is ignored.
    const f32x16 before = load(state.max), after = max(load(largest), before);
    store(state.max, after);
    const mask16 higher = less(before, after);
    f32x16 decay = splat(1.0f);
    if (any(higher)) decay = select(higher, decay_of(before, after), decay);
    store(b.decay, decay);
    for (int64_t i = 0; i < tile.rows; ++i) {
      b.factors[i] = make_weights<F>(b.scores + i * kBlock, positions, state.max[i], b.decay[i],
                                     b.weights + i * (kBlock / F::kPositions), state.sum + i * 16, value_scales_);
    }
  }

  // Scales, caps and masks the scores of a query for a block; returns the largest.
  float final_scores(const Query& query, int64_t start, int64_t positions, float* scores) const {
    float scale = p_.scale * query.factor;
    if (p_.softcap > 0) {
      cap_scores(scores, positions, scale, p_.softcap);
      scale = 1.0f;
    }
    const bool whole = query.span.first <= start && query.span.last >= start + kBlock;
    if (whole && query.mask == nullptr) return finish_whole_scores(scores, scale);
    return finish_scores(scores, positions, scale, view(query, start));
  }

  template <class Values>
  void blend(const Tile& tile, int64_t start, const State& state, const Values& values,
             const Buffers& b) {
    const int64_t positions = positions_in(start, tile.seen);
    const Blend blend{b.weights, b.decay, b.factors, positions, state.out, p_.values.dim, padded_};
    blend_values<F>(tile.rows, blend, values);
  }

  View view(const Query& query, int64_t start) const {
    const Span seen = overlap({query.span.first - start, query.span.last - start}, {0, kBlock});
    const int64_t stride = p_.mask.position_stride;
    return {seen.empty() ? Span{0, 0} : seen,
            query.mask == nullptr ? nullptr : query.mask + start * stride, stride,
            p_.positions - start};
  }

  // Divides by the sum of weights and writes the outputs.
  void finish(const Unit& unit, const State& state) const {
    for (int64_t r = 0, i = 0; i < unit.queries; ++i) {
      for (int64_t h = 0; h < heads_of(unit); ++h, ++r) {
        const int64_t head = unit.kv_head * group_ + h;
        float sum = sum_lanes(load(state.sum + r * 16)), decay = 1.0f;
        if (p_.sinks != nullptr) {
          const float sink = p_.sinks[head], max = state.max[r] < sink ? sink : state.max[r];
          decay = scalar(decay_of(splat(state.max[r]), splat(max)));
          sum = sum * decay + scalar(decay_of(splat(sink), splat(max)));
        }
        // A query that sees nothing has no weights: its output is 0.
        const f32x16 divisor = splat(sum == 0.0f ? 1.0f : sum), factor = splat(decay);
        T* out = const_cast<T*>(p_.out.at<T>(unit.row, head, unit.first_query + i));
        for (int64_t d = 0; d < p_.out.dim; d += 16) {
          // + 0: a term of weight 0 may have flipped the sign of a zero.
          const f32x16 value = div(mul(load(state.out + r * padded_ + d), factor), divisor);
          store_first(out + d, add(value, zero_f32()), p_.out.dim - d);
        }
      }
    }
  }

  static float scalar(f32x16 v) {
    float lanes[16];
    store(lanes, v);
    return lanes[0];
  }

  const Problem& p_;
  const int64_t group_, padded_, query_words_;
  bool ok_;
  float *packed_keys_, *packed_, *scores_, *weights_, *decay_, *panel_;
  State segment_, total_;
  Query* queries_;
  Tile* tiles_;
  int64_t tile_count_ = 0;
  S *partial_keys_, *partial_values_;
  float *key_scales_, *value_scales_;  // of a block, if rows have scales
};

}  // namespace onward::attention
