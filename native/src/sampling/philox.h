// Philox4x32-10 (Salmon et al., SC 2011), as src/onward/sampling/noise.py uses it.
#pragma once
#include <cstdint>

namespace onward {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultipliers[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxKeySteps[2] = {0x9E3779B9, 0xBB67AE85};

// The four words of the counter (quad, position, 0, 0) under the key `seed`.
inline void philox(uint32_t quad, uint32_t position, uint64_t seed, uint32_t* words) {
  uint32_t c[4] = {quad, position, 0, 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t left = uint64_t(c[0]) * kPhiloxMultipliers[0];
    const uint64_t right = uint64_t(c[2]) * kPhiloxMultipliers[1];
    c[0] = uint32_t(right >> 32) ^ c[1] ^ key[0];
    c[2] = uint32_t(left >> 32) ^ c[3] ^ key[1];
    c[1] = uint32_t(right);
    c[3] = uint32_t(left);
    key[0] += kPhiloxKeySteps[0];
    key[1] += kPhiloxKeySteps[1];
  }
  for (int i = 0; i < 4; ++i) words[i] = c[i];
}

}  // namespace onward
