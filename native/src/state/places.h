// Where the recurrent states of a row lie, and which of them a call begins with and ends in.
//
// A state is kept as it was at the beginning of a block of 16 positions, with what each later position of the
// block adds to it. So taking positions back is forgetting the last of these, as in a cache of keys and values, and
// whatever lies at or past a row's offset is never read. Every slot has two places, one for each of two blocks:
// `held` int32 [N, 2] says which, by the number of its block counted from 1; 0: none. A call that begins within one
// block and ends in a later one leaves the first as it was, so it may be repeated.
#pragma once
#include <cstdint>

// The states of a call (StateArguments in Python).
struct OnwardState {
  void* data;           // [slots, 2, …], what lies at a place being contiguous
  int64_t strides[2];   // of slots, of places; in elements
  int32_t* held;        // [slots, 2]
  int64_t held_stride;  // of slots
  int64_t slots;
  const int32_t* rows;     // [B]: the slot of each row; null: row b is in slot b
  const int32_t* offsets;  // [B]
};

namespace onward {

constexpr int64_t kStateBlock = 16;

// The places of a row that goes from `offset` over `count` positions.
struct Places {
  int64_t slot;
  int from;  // the place that it begins with; -1: it begins with zeros; -2: what lay before is not there
  int to;    // the place of the last position's block; `from` where that is the same block
  int32_t block;  // that block, counted from 1
};

inline int64_t block_after(int64_t positions) { return (positions + kStateBlock - 1) / kStateBlock; }

inline Places places_of(const OnwardState& state, int64_t b, int64_t count) {
  const int64_t slot = state.rows == nullptr ? b : state.rows[b], offset = state.offsets[b];
  const int32_t* held = state.held + slot * state.held_stride;
  const int32_t before = int32_t(block_after(offset)), last = int32_t(block_after(offset + count));
  if (offset == 0) return {slot, -1, 0, last};
  const int from = held[0] == before ? 0 : held[1] == before ? 1 : -2;
  return {slot, from, last == before ? from : 1 - from, last};
}

inline bool valid_state(const OnwardState& state, int64_t batch) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t slot = state.rows == nullptr ? b : state.rows[b];
    if (slot < 0 || slot >= state.slots || state.offsets[b] < 0) return false;
  }
  return true;
}

// After a call: says what the places hold now. Several layers share `held`; each finds or leaves the same.
inline void note_held(const OnwardState& state, int64_t batch, int64_t count) {
  for (int64_t b = 0; b < batch; ++b) {
    const Places places = places_of(state, b, count);
    if (places.from != -2) state.held[places.slot * state.held_stride + places.to] = places.block;
  }
}

}  // namespace onward
