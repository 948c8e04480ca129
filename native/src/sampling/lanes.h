// Vector operations for sampling: masks as bits, exact sums, Philox for a block of ids. The headers of instruction sets
// define the first three, and PhiloxLanes: the steps of philox_block and the number of counters it computes at once.
//
//   bits(mask16)             one bit per lane
//   complement_24(words)     the upper 24 bits of ~word as floats
//   UnitSums                 exact sums of floats in units of 2^-40
//   philox_block             the 64 words of random bits of 64 consecutive ids, in order
#pragma once
#include <cmath>

#include "philox.h"
#include "simd_math.h"

namespace onward {

// Philox of the quads first … first + 15, at `position`.
template <class L = PhiloxLanes>
inline void philox_block(uint32_t first, uint32_t position, uint64_t seed, uint32_t* words) {
  if constexpr (L::kLanes == 0) {
    for (uint32_t quad = 0; quad < 16; ++quad) philox(first + quad, position, seed, words + 4 * quad);
  } else {
    // Lane 4 g + k computes quad g + k * kLanes / 4, so that transposing groups of four lanes puts the ids
    // in order.
    uint32_t order[L::kLanes];
    for (int lane = 0; lane < L::kLanes; ++lane) {
      order[lane] = uint32_t(lane / 4 + lane % 4 * (L::kLanes / 4));
    }
    for (uint32_t quad = 0; quad < 16; quad += L::kLanes) {
      uint32_t counters[L::kLanes];
      for (int lane = 0; lane < L::kLanes; ++lane) counters[lane] = first + quad + order[lane];
      typename L::Word c[4] = {L::load(counters), L::splat(position), L::splat(0), L::splat(0)};
      uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
      for (int round = 0; round < kPhiloxRounds; ++round) {
        typename L::Word high0, low0, high1, low1;
        L::multiply(c[0], kPhiloxMultipliers[0], high0, low0);
        L::multiply(c[2], kPhiloxMultipliers[1], high1, low1);
        c[0] = L::mix(high1, c[1], key[0]);
        c[2] = L::mix(high0, c[3], key[1]);
        c[1] = low1;
        c[3] = low0;
        key[0] += kPhiloxKeySteps[0];
        key[1] += kPhiloxKeySteps[1];
      }
      L::store_transposed(words + 4 * quad, c);
    }
  }
}

}  // namespace onward
