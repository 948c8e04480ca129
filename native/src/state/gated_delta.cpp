// The gated delta rule (Yang et al., arXiv 2412.06464). Each value head has a state S [K, V]. Every token decays it,
// corrects it towards the token's value at the token's key, and reads it with the query:
//
//     S <- e^g S,    d = beta (v - S^T k),    S <- S + k d^T,    o = S^T q
//
// The cache has S at the beginning of a block of 16 positions. Within the block, the result is computed from the
// keys and corrections of its positions i <= j, with G_j = g_0 + ... + g_j:
//
//     d_j = beta_j (v_j - e^{G_j} S^T k_j - sum_{i<j} e^{G_j - G_i} (k_i k_j) d_i)
//     o_j = e^{G_j} S^T q_j + sum_{i<=j} e^{G_j - G_i} (k_i q_j) d_i
//
// So a token reads S once and writes far less than S, positions can be removed, and a prompt multiplies S by many
// keys and queries at once. Blocks begin at multiples of 16, and every sum has a fixed order: the bits don't depend
// on the division of a sequence into calls.
#include "../program.h"
#include "../team.h"
#include "blocks.h"

// The arguments of onward_gated_delta (GatedDeltaArguments in Python).
struct OnwardGatedDelta {
  int64_t batch, queries, key_heads, value_heads, key_dim, value_dim;
  const void* qkv;         // [B, T, queries | keys | values], of dtype; heads side by side
  int64_t qkv_strides[2];  // strides of rows and tokens
  // [B, T, value_heads] of dtype: g = -e^{log_rate} softplus(decay + decay_bias)
  const void* decay;
  int64_t decay_strides[2];
  const void* beta;  // [B, T, value_heads] of dtype: beta is its sigmoid
  int64_t beta_strides[2];
  const float *log_rate, *decay_bias;  // [value_heads]
  void* out;                           // [B, T, value_heads, value_dim], contiguous
  int32_t dtype;
  float eps;  // for the norms of queries and keys
  // Float. A place has, for each value head: S, keys [16, K], corrections [16, V], G [16].
  OnwardState state;
};

namespace onward {
namespace {

// The contents of a place for one head.
struct Head {
  float *state, *keys, *corrections, *decays;
};

// Working memory to compute the tokens of one head.
struct Work {
  float queries[kBlock * kWidest], scaled[kBlock * kWidest];
  float at_keys[kBlock * kWidest], at_queries[kBlock * kWidest];
  float betas[kBlock];
};

template <class T>
struct HeadRun {
  const OnwardGatedDelta& delta;
  int64_t b, h;
  Places places;
  Work& work;

  Head at(int place) const {
    const auto& state = delta.state;
    const int64_t k = delta.key_dim, v = delta.value_dim;
    float* head = static_cast<float*>(state.data) + places.slot * state.strides[0] + place * state.strides[1] +
                  h * (k * v + kBlock * (k + v + 1));
    return {head, head + k * v, head + k * v + kBlock * k, head + k * v + kBlock * (k + v)};
  }
  const T* features(int64_t t) const {
    return static_cast<const T*>(delta.qkv) + b * delta.qkv_strides[0] + t * delta.qkv_strides[1];
  }
  T* out(int64_t t) const {
    return static_cast<T*>(delta.out) + ((b * delta.queries + t) * delta.value_heads + h) * delta.value_dim;
  }

  void run() {
    if (places.from == -2) return unknown();
    const int64_t offset = delta.state.offsets[b], size = delta.key_dim * delta.value_dim;
    Head head = at(places.from < 0 ? places.to : places.from);
    if (places.from < 0) std::memset(head.state, 0, size_t(size) * sizeof(float));
    int64_t t = 0;
    while (t < delta.queries) {
      const int64_t first = (offset + t) % kBlock;
      if (first == 0 && offset + t > 0) {
        const Head to = at(places.to);
        const float* keys[kBlock];
        for (int64_t i = 0; i < kBlock; ++i) keys[i] = head.keys + i * delta.key_dim;
        end_block(head.state, keys, head.corrections, head.decays, to.state, delta.key_dim, delta.value_dim,
                  work.scaled);
        head = to;
      }
      const int64_t left = delta.queries - t, end = first + left < kBlock ? first + left : kBlock;
      prepare(head, t, first, end);
      read(head, first, end);
      for (int64_t j = first; j < end; ++j) take(head, t + j - first, j);
      t += end - first;
    }
  }

  void unknown() const {
    for (int64_t t = 0; t < delta.queries; ++t) store_nan(out(t), delta.value_dim);
  }

  // x / |x| * scale.
  void normed(const T* x, float scale, float* to) const {
    const int64_t count = delta.key_dim;
    f32x16 sum = zero_f32();
    for (int64_t i = 0; i < count; i += 16) {
      const f32x16 v = load_first(x + i, count - i);
      sum = fma(v, v, sum);
    }
    const f32x16 factor = splat(1.0f / std::sqrt(sum_lanes(sum) + delta.eps));
    for (int64_t i = 0; i < count; i += 16) {
      store_first(to + i, mul(mul(load_first(x + i, count - i), factor), splat(scale)), count - i);
    }
  }

  // Computes the keys, queries, decays and betas of the block's positions first … end - 1, from token t on.
  void prepare(const Head& head, int64_t t, int64_t first, int64_t end) const {
    const int64_t k = delta.key_dim, group = h / (delta.value_heads / delta.key_heads);
    const float rate = first_lane(exp(splat(delta.log_rate[h])));
    for (int64_t j = first; j < end; ++j, ++t) {
      const T* token = features(t);
      normed(token + group * k, 1.0f / std::sqrt(float(k)), work.queries + j * k);
      normed(token + (delta.key_heads + group) * k, 1.0f, head.keys + j * k);
      const float step = softplus(scalar_at<T>(delta.decay, delta.decay_strides, b, t, h) + delta.decay_bias[h]);
      head.decays[j] = (j == 0 ? 0.0f : head.decays[j - 1]) - rate * step;
      const float beta = scalar_at<T>(delta.beta, delta.beta_strides, b, t, h);
      work.betas[j] = first_lane(times_sigmoid(splat(1.0f), splat(beta)));
    }
  }

  // Computes S^T k and S^T q for the block's positions first … end - 1.
  void read(const Head& head, int64_t first, int64_t end) const {
    const float* x[2 * kBlock];
    float* to[2 * kBlock];
    int64_t count = 0;
    for (int64_t j = first; j < end; ++j, count += 2) {
      x[count] = head.keys + j * delta.key_dim, to[count] = work.at_keys + j * delta.value_dim;
      x[count + 1] = work.queries + j * delta.key_dim, to[count + 1] = work.at_queries + j * delta.value_dim;
    }
    read_state(head.state, delta.key_dim, delta.value_dim, x, count, to);
  }

  // Computes the correction and the output of the block's position j, which is token t.
  void take(const Head& head, int64_t t, int64_t j) const {
    const int64_t k = delta.key_dim, v = delta.value_dim;
    const f32x16 since = exp(sub(splat(head.decays[j]), load(head.decays)));
    const f32x16 whole = exp(splat(head.decays[j])), beta = splat(work.betas[j]);
    float fading[16], of_key[16], of_query[16];
    store(fading, since);
    for (int64_t i = 0; i <= j; ++i) {
      of_key[i] = fading[i] * dot(head.keys + i * k, head.keys + j * k, k);
      of_query[i] = fading[i] * dot(head.keys + i * k, work.queries + j * k, k);
    }
    const T* value = features(t) + 2 * delta.key_heads * k + h * v;
    for (int64_t c = 0; c < v; c += 16) {
      const int64_t n = v - c;
      f32x16 known = mul(whole, load_first(work.at_keys + j * v + c, n));
      f32x16 sum = mul(whole, load_first(work.at_queries + j * v + c, n));
      for (int64_t i = 0; i < j; ++i) {
        const f32x16 d = load_first(head.corrections + i * v + c, n);
        known = fma(splat(of_key[i]), d, known);
        sum = fma(splat(of_query[i]), d, sum);
      }
      const f32x16 d = mul(beta, sub(load_first(value + c, n), known));
      store_first(head.corrections + j * v + c, d, n);
      store_first(out(t) + c, fma(splat(of_query[j]), d, sum), n);
    }
  }
};

bool valid(const OnwardGatedDelta& d) {
  return d.batch >= 0 && d.queries >= 1 && d.key_heads >= 1 && d.value_heads % d.key_heads == 0 && d.key_dim >= 1 &&
         d.key_dim <= kWidest && d.value_dim >= 1 && d.value_dim <= kWidest && valid_state(d.state, d.batch);
}

}  // namespace
}  // namespace onward

ONWARD_API int32_t onward_gated_delta(const OnwardGatedDelta* arguments) {
  using namespace onward;
  const auto& d = *arguments;
  if (!valid(d)) return kBadArgument;
  // A token costs about 6 passes over a cached state.
  const int64_t grain = ceil_div(1 << 15, d.key_dim * d.value_dim * d.queries);
  const bool known = with_dtype(d.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(d.batch * d.value_heads, grain, [&](int64_t begin, int64_t end) {
      Work work;
      for (int64_t at = begin; at < end; ++at) {
        const int64_t b = at / d.value_heads;
        HeadRun<T>{d, b, at % d.value_heads, places_of(d.state, b, d.queries), work}.run();
      }
    });
  });
  if (known) note_held(d.state, d.batch, d.queries);
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_gated_delta);
