// The recurrence of Mamba2 (Dao & Gu, arXiv 2405.21060). Each head has a state S [N, P], which every token decays,
// updates, and reads. The heads of a group share b and c:
//
//     S <- e^g S + b (dt x)^T,    y = S^T c + D x,    dt = softplus(step + step_bias) within limits, g = -e^{log_rate} dt
//
// The cache has S at the beginning of a block of 16 positions and, for each position of the block, b, dt x and the sum
// G_j = g_0 + ... + g_j, so that
//
//     y_j = e^{G_j} S^T c_j + sum_{i<=j} e^{G_j - G_i} (b_i c_j) dt_i x_i + D x_j
//
// So a token reads S once and writes far less than S, positions can be removed, and a prompt multiplies S by many c at
// once. Blocks begin at multiples of 16, and every sum has a fixed order: the bits don't depend on the division of a
// sequence into calls.
#include "../program.h"
#include "../team.h"
#include "blocks.h"

// The arguments of onward_ssd (SsdArguments in Python).
struct OnwardSsd {
  int64_t batch, queries, groups, heads, state_dim, head_dim;
  const void* mixed;         // [B, T, x of all heads | b of all groups | c of all groups], of dtype
  int64_t mixed_strides[2];  // strides of rows and tokens
  const void* step;          // [B, T, heads] of dtype
  int64_t step_strides[2];
  const float *log_rate, *step_bias, *skip;  // [heads]; skip is D
  void* out;                                 // [B, T, heads, head_dim], contiguous
  int32_t dtype;
  float least, most;  // limits of dt
  // Float. A place has, for each group: b [16, N], and for each of its heads S, dt x [16, P], G [16].
  OnwardState state;
};

namespace onward {
namespace {

// The contents of a place for one head.
struct Head {
  float *keys, *state, *added, *decays;
};

// Working memory to compute the tokens of one head. keys, queries: b and c of the positions of this call.
struct Work {
  float keys[kBlock * kWidest], queries[kBlock * kWidest];
  float at_queries[kBlock * kWidest], scaled[kBlock * kWidest];
};

template <class T>
void widen(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 16) store_first(to + i, load_first(from + i, count - i), count - i);
}

template <class T>
struct HeadRun {
  const OnwardSsd& ssd;
  int64_t b, h;
  Places places;
  Work& work;
  int64_t of_group = ssd.heads / ssd.groups, group = h / of_group;
  const float* keys[kBlock] = {};  // b of each position of the block

  Head at(int place) const {
    const auto& state = ssd.state;
    const int64_t n = ssd.state_dim, p = ssd.head_dim, of_head = n * p + kBlock * (p + 1);
    float* all = static_cast<float*>(state.data) + places.slot * state.strides[0] + place * state.strides[1] +
                 group * (kBlock * n + of_group * of_head);
    float* head = all + kBlock * n + h % of_group * of_head;
    return {all, head, head + n * p, head + n * p + kBlock * p};
  }
  const T* token(int64_t t) const {
    return static_cast<const T*>(ssd.mixed) + b * ssd.mixed_strides[0] + t * ssd.mixed_strides[1];
  }
  const T* x(int64_t t) const { return token(t) + h * ssd.head_dim; }
  T* out(int64_t t) const {
    return static_cast<T*>(ssd.out) + ((b * ssd.queries + t) * ssd.heads + h) * ssd.head_dim;
  }

  void run() {
    if (places.from == -2) return unknown();
    const int64_t offset = ssd.state.offsets[b], size = ssd.state_dim * ssd.head_dim;
    Head head = at(places.from < 0 ? places.to : places.from);
    if (places.from < 0) std::memset(head.state, 0, size_t(size) * sizeof(float));
    for (int64_t i = 0; i < kBlock; ++i) keys[i] = head.keys + i * ssd.state_dim;
    int64_t t = 0;
    while (t < ssd.queries) {
      const int64_t first = (offset + t) % kBlock;
      if (first == 0 && offset + t > 0) {
        const Head to = at(places.to);
        end_block(head.state, keys, head.added, head.decays, to.state, ssd.state_dim, ssd.head_dim, work.scaled);
        head = to;
      }
      const int64_t left = ssd.queries - t, end = first + left < kBlock ? first + left : kBlock;
      prepare(head, t, first, end);
      read(head, first, end);
      for (int64_t j = first; j < end; ++j) take(head, t + j - first, j);
      t += end - first;
    }
  }

  void unknown() const {
    for (int64_t t = 0; t < ssd.queries; ++t) store_nan(out(t), ssd.head_dim);
  }

  // Computes b, c, dt x and G of the block's positions first … end - 1, from token t on.
  void prepare(const Head& head, int64_t t, int64_t first, int64_t end) {
    const int64_t n = ssd.state_dim, p = ssd.head_dim;
    const float rate = first_lane(exp(splat(ssd.log_rate[h])));
    for (int64_t j = first; j < end; ++j, ++t) {
      const T* of_groups = token(t) + ssd.heads * p;
      widen(of_groups + group * n, n, work.keys + j * n);
      widen(of_groups + (ssd.groups + group) * n, n, work.queries + j * n);
      keys[j] = work.keys + j * n;
      // The heads of a group share the stored b. One of them writes it, and all read only the b of earlier calls.
      if (h % of_group == 0) std::memcpy(head.keys + j * n, keys[j], size_t(n) * sizeof(float));
      float dt = softplus(scalar_at<T>(ssd.step, ssd.step_strides, b, t, h) + ssd.step_bias[h]);
      dt = dt < ssd.least ? ssd.least : dt > ssd.most ? ssd.most : dt;
      head.decays[j] = (j == 0 ? 0.0f : head.decays[j - 1]) - rate * dt;
      for (int64_t c = 0; c < p; c += 16) {
        store_first(head.added + j * p + c, mul(splat(dt), load_first(x(t) + c, p - c)), p - c);
      }
    }
  }

  // Computes S^T c for the block's positions first … end - 1.
  void read(const Head& head, int64_t first, int64_t end) const {
    const float* vectors[kBlock];
    float* to[kBlock];
    for (int64_t j = first; j < end; ++j) {
      vectors[j - first] = work.queries + j * ssd.state_dim;
      to[j - first] = work.at_queries + j * ssd.head_dim;
    }
    read_state(head.state, ssd.state_dim, ssd.head_dim, vectors, end - first, to);
  }

  // Computes the output of the block's position j, which is token t.
  void take(const Head& head, int64_t t, int64_t j) const {
    const int64_t n = ssd.state_dim, p = ssd.head_dim;
    const f32x16 whole = exp(splat(head.decays[j])), skip = splat(ssd.skip[h]);
    float of_query[16];
    store(of_query, exp(sub(splat(head.decays[j]), load(head.decays))));
    for (int64_t i = 0; i <= j; ++i) of_query[i] *= dot(keys[i], work.queries + j * n, n);
    for (int64_t c = 0; c < p; c += 16) {
      f32x16 sum = mul(whole, load_first(work.at_queries + j * p + c, p - c));
      for (int64_t i = 0; i <= j; ++i) sum = fma(splat(of_query[i]), load_first(head.added + i * p + c, p - c), sum);
      store_first(out(t) + c, fma(skip, load_first(x(t) + c, p - c), sum), p - c);
    }
  }
};

bool valid(const OnwardSsd& s) {
  return s.batch >= 0 && s.queries >= 1 && s.groups >= 1 && s.heads >= 1 && s.heads % s.groups == 0 &&
         s.state_dim >= 1 && s.state_dim <= kWidest && s.head_dim >= 1 && s.head_dim <= kWidest &&
         valid_state(s.state, s.batch);
}

}  // namespace
}  // namespace onward

ONWARD_API int32_t onward_ssd(const OnwardSsd* arguments) {
  using namespace onward;
  const auto& s = *arguments;
  if (!valid(s)) return kBadArgument;
  // A token costs about 3 passes over a cached state.
  const int64_t grain = ceil_div(1 << 15, s.state_dim * s.head_dim * s.queries);
  const bool known = with_dtype(s.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(s.batch * s.heads, grain, [&](int64_t begin, int64_t end) {
      Work work;
      for (int64_t at = begin; at < end; ++at) {
        const int64_t b = at / s.heads;
        HeadRun<T>{s, b, at % s.heads, places_of(s.state, b, s.queries), work}.run();
      }
    });
  });
  if (known) note_held(s.state, s.batch, s.queries);
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_ssd);
