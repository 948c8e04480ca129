// The places of a row's recurrent states, and those that a call reads and writes.
//
// A state is stored as of the beginning of a block of 16 positions, with the update of each later position of the
// block. So positions can be removed by dropping the last updates, as in a KV cache, and nothing at or past a row's
// offset is ever read. Every slot has two places, one for each of two blocks. `held` int32 [N, 2] has the number of
// each place's block, counted from 1; 0: empty. A call that begins in one block and ends in a later one doesn't
// change the place of the first, so the call can be repeated.
#pragma once
#include <cstdint>

// The states of a call (StateArguments in Python).
struct OnwardState {
  void* data;           // [slots, 2, …]; each place is contiguous
  int64_t strides[2];   // strides of slots and places, in elements
  int32_t* held;        // [slots, 2]
  int64_t held_stride;  // between slots
  int64_t slots;
  const int32_t* rows;     // [B]: the slot of each row; null: row b is in slot b
  const int32_t* offsets;  // [B]
};

namespace onward {

constexpr int64_t kStateBlock = 16;

// The places of a row that computes `count` positions from its offset on.
struct Places {
  int64_t slot;
  int from;  // the place to begin with; -1: begins with zeros; -2: the previous state is missing
  int to;    // the place of the last position's block; equals `from` if the block is the same
  int32_t block;  // the last position's block, counted from 1
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

// Updates `held` after a call. The layers share `held`, and each writes the same values.
inline void note_held(const OnwardState& state, int64_t batch, int64_t count) {
  for (int64_t b = 0; b < batch; ++b) {
    const Places places = places_of(state, b, count);
    if (places.from != -2) state.held[places.slot * state.held_stride + places.to] = places.block;
  }
}

}  // namespace onward
