// Prints a hash of what every operation of an instruction set's header gives for the same inputs: headers that agree on
// all lines have the same bits. Compiled for each set with -DONWARD_ISA_HEADER='"isa/NAME.h"'.
#include <cstdio>
#include <cstring>

#include "sampling/lanes.h"
#include "simd.h"
#include "simd_math.h"

using namespace onward;

namespace {

constexpr int kRounds = 4000;
uint64_t hash_;

void add_bytes(const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
}
// All NaN count as one: their signs and payloads differ between processors.
void add_float(float value) {
  uint32_t bits = 0x7fc00000;
  if (value == value) std::memcpy(&bits, &value, sizeof bits);
  add_bytes(&bits, sizeof bits);
}
void put(float value) { add_float(value); }
void put(int32_t value) { add_bytes(&value, sizeof value); }
void put(int64_t value) { add_bytes(&value, sizeof value); }
void put(uint32_t value) { add_bytes(&value, sizeof value); }
void put(bool value) { put(int32_t(value)); }
void put(f32x16 v) {
  float lanes[16];
  store(lanes, v);
  for (const float lane : lanes) add_float(lane);
}
void put(i32x16 v) {
  int32_t lanes[16];
  std::memcpy(lanes, &v, sizeof lanes);
  add_bytes(lanes, sizeof lanes);
}

uint32_t state_ = 1;
uint32_t random_word() {
  state_ ^= state_ << 13;
  state_ ^= state_ >> 17;
  return state_ ^= state_ << 5;
}

struct Inputs {
  alignas(64) uint32_t words[64];
  alignas(64) float near[64], special[64];  // within ±8; any bits
  alignas(64) uint8_t nibbles[64];

  Inputs() {
    for (int i = 0; i < 64; ++i) {
      words[i] = random_word();
      near[i] = float(int32_t(random_word())) * 0x1p-28f;
      const uint32_t bits = random_word();
      std::memcpy(&special[i], &bits, sizeof bits);
      if (i % 8 == 1) special[i] = 0.0f / float(i % 2 - 1);  // NaN
      if (i % 8 == 2) special[i] = i % 3 ? -0.0f : 1.0f / float(i % 2);
      nibbles[i] = uint8_t(random_word() & 15);
    }
  }
};

template <class Body>
void line(const char* name, Body&& body) {
  hash_ = 0xcbf29ce484222325;
  state_ = 0x9e3779b9;
  for (int round = 0; round < kRounds; ++round) body(Inputs());
  std::printf("%-20s %016llx\n", name, static_cast<unsigned long long>(hash_));
}

template <class Op>
void binary(const char* name, Op op) {
  line(name, [&](const Inputs& in) {
    put(op(load(in.near), load(in.near + 16)));
    put(op(load(in.special), load(in.special + 16)));
    put(op(load(in.special + 32), load(in.near + 32)));
  });
}
template <class Op>
void unary(const char* name, Op op) {
  line(name, [&](const Inputs& in) {
    put(op(load(in.near)));
    put(op(load(in.special)));
  });
}
template <class T>
void conversions(const char* name) {
  line(name, [&](const Inputs& in) {
    T rounded[32];
    store(rounded, load(in.near));
    store(rounded + 16, load(in.special));
    put(load(rounded));
    put(load(rounded + 16));
    put(load(reinterpret_cast<const T*>(in.words)));
    put(load_first(reinterpret_cast<const T*>(in.words), in.nibbles[0]));
  });
}

}  // namespace

int main() {
  binary("add", [](auto a, auto b) { return add(a, b); });
  binary("sub", [](auto a, auto b) { return sub(a, b); });
  binary("mul", [](auto a, auto b) { return mul(a, b); });
  binary("div", [](auto a, auto b) { return div(a, b); });
  binary("min", [](auto a, auto b) { return min(a, b); });
  binary("max", [](auto a, auto b) { return max(a, b); });
  binary("fma", [](auto a, auto b) { return fma(a, b, add(a, b)); });
  binary("select less", [](auto a, auto b) { return select(either(less(a, b), is_nan(b)), a, b); });
  unary("abs", [](auto a) { return abs(a); });
  unary("sqrt", [](auto a) { return sqrt(a); });
  unary("sum_lanes", [](auto a) { return sum_lanes(a); });
  unary("max_lanes", [](auto a) { return max_lanes(a); });
  unary("highest", [](auto a) { return highest(a); });
  unary("any less", [](auto a) { return any(less(a, splat(-7.9f))); });
  unary("bits", [](auto a) { return bits(less(a, splat(0.5f))); });
  unary("exp", [](auto a) { return exp(a); });
  unary("tanh", [](auto a) { return tanh(a); });
  unary("times_sigmoid", [](auto a) { return times_sigmoid(a, a); });
  unary("gelu_tanh", [](auto a) { return gelu_tanh(a); });
  unary("normal_cdf", [](auto a) { return normal_cdf(a); });
  conversions<float>("float");
  conversions<Bf16>("bf16");
  conversions<F16>("f16");
  line("round", [](const Inputs& in) { put(round(load(in.near))); });
  line("to_i32", [](const Inputs& in) { put(to_i32(mul(load(in.near), splat(0.5f)))); });
  line("to_f32", [](const Inputs& in) { put(to_f32(load_i32(in.words))); });
  line("times_power_of_two", [](const Inputs& in) {
    put(times_power_of_two(load(in.special), round(mul(load(in.near), splat(20.0f)))));
  });
  line("dot_bf16", [](const Inputs& in) {
    put(dot_bf16(load(in.near), load_i32(in.words), load_i32(in.words + 16)));
    put(dot_bf16(zero_f32(), load_i32(in.near), load_i32(in.near + 16)));
  });
  line("dot_i8", [](const Inputs& in) {
    put(dot_i8(load_i32(in.words), load_i32(in.words + 16), load_i32(in.words + 32)));
    put(dot_i8(load_i32(in.words), load_i32(in.nibbles), reinterpret_cast<const int32_t*>(in.words)));
  });
  line("dot_i16", [](const Inputs& in) {
    put(dot_i16(load_i32(in.words), load_i32(in.words + 16), load_i32(in.words + 32)));
  });
  line("integers", [](const Inputs& in) {
    const i32x16 a = load_i32(in.words), b = load_i32(in.words + 16);
    put(add(a, b));
    put(sum_lanes(a));
    put(shift_left<0>(a));
    put(shift_left<5>(a));
    put(shift_right<0>(a));
    put(shift_right<7>(a));
    put(bit_and(a, 0x0ff0f00f));
    put(bit_or(a, b));
    put(as_f32(a));
    put(low_nibbles(a));
    put(high_nibbles(a));
  });
  line("nibbles", [](const Inputs& in) {  // what matters is the sum
    const i32x16 x = load_i32(in.words + 16), upper = dot_i8(zero_i32(), high_nibbles_16(load_i32(in.words)), x);
    put(sixteenth(upper));
  });
  line("bytes", [](const Inputs& in) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(in.words);
    const auto* signed_bytes = reinterpret_cast<const int8_t*>(in.words);
    put(load_bytes(bytes));
    put(load_bytes(signed_bytes));
    put(look_up(load_i32(in.nibbles), bytes));
    put(look_up(load_i32(in.words), in.special));
    put(e4m3_256th(bytes));
    put(widen_i8(signed_bytes));
    put(widen_first_i8(signed_bytes, in.nibbles[0] + in.nibbles[1]));
    put(load_first_words(bytes, 2 * in.nibbles[0]));
    i32x16 pairs[2];
    pair_words(load_i32(in.words), load_i32(in.words + 16), pairs);
    put(pairs[0]);
    put(pairs[1]);
    alignas(64) int16_t narrow[32] = {};
    store_low_words(narrow, load_bytes(signed_bytes));
    store_low_bytes(reinterpret_cast<int8_t*>(narrow + 16), load_i32(in.words));
    add_bytes(narrow, sizeof narrow);
  });
  line("lanes_of", [](const Inputs& in) {
    put(select(lanes_of(in.words[0] & 0xffff), load(in.near), load(in.near + 16)));
  });
  line("sum_lanes_of", [](const Inputs& in) {
    float sums[4];
    const f32x16 floats[4] = {load(in.near), load(in.near + 16), load(in.near + 32), load(in.near + 48)};
    sum_lanes_of(floats, sums);
    for (const float sum : sums) put(sum);
    const i32x16 integers[4] = {load_i32(in.words), load_i32(in.words + 16), load_i32(in.words + 32),
                                load_i32(in.words + 48)};
    sum_lanes_of(integers, sums);
    for (const float sum : sums) put(sum);
  });
  line("transpose", [](const Inputs& in) {
    f32x16 square[16];
    for (int i = 0; i < 16; ++i) square[i] = load(in.near + i * 3);
    transpose(square);
    for (const f32x16& row : square) put(row);
  });
  line("complement_24", [](const Inputs& in) { put(complement_24(in.words)); });
  line("UnitSums", [](const Inputs& in) {
    UnitSums sums;
    for (int i = 0; i < 4; ++i) sums.add(mul(complement_24(in.words + 16 * i), splat(0x1p-24f)));
    put(sums.total());
  });
  line("philox_block", [](const Inputs& in) {
    uint32_t words[64];
    philox_block(in.words[0], in.words[1], in.words[2], words);
    add_bytes(words, sizeof words);
  });
}
