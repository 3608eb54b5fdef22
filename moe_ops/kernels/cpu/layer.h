// What the kernels of layers share: numbers, registers, the routing of pairs, activations and their combination.
//
// It is compiled after records.h, in front of experts.cpp or quantized.cpp.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// AVX2 with products of bytes beside it.
#if defined(MOE_AT_MOST_AVX_VNNI)
#define MOE_AT_MOST_AVX2 1
#endif

namespace {

// One register. Compilers keep vectors of more than a register in memory, not in two of them.
#if defined(__AVX512F__) && !defined(MOE_AT_MOST_AVX2)
constexpr int kVectorBytes = 64;
#else
constexpr int kVectorBytes = 32;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
constexpr int kLanes = kVectorBytes / 4;

struct bf16 { uint16_t bits; };

inline float to_float(float v) { return v; }
inline float to_float(bf16 v) {
  uint32_t u = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline void store(float* p, float v) { *p = v; }
inline void store(bf16* p, float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  p->bits = nan ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);  // half to even
}
template <typename T> inline float round_to(float v) {
  T t;
  store(&t, v);
  return to_float(t);
}

inline Floats load_floats(const float* p) {
  Floats v;
  std::memcpy(&v, p, kVectorBytes);
  return v;
}

inline Floats load_as_floats(const float* p) { return load_floats(p); }
inline Floats load_as_floats(const bf16* p) {
  Halves bits;
  std::memcpy(&bits, p, kVectorBytes / 2);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
// The first n lanes, and zeros.
template <typename T> inline Floats load_as_floats(const T* p, int64_t n) {
  if (n >= kLanes) return load_as_floats(p);
  T some[kLanes] = {};
  std::memcpy(some, p, n * sizeof(T));
  return load_as_floats(some);
}

// Lane by lane, where a comparison was true or not.
inline Floats choose(const Integers& where, const Floats& yes, const Floats& no) {
  return (Floats)(((Words)where & (Words)yes) | (~(Words)where & (Words)no));
}

// The bits of bfloat16, as `store` of one number rounds.
inline Words bf16_bits(const Floats& v) {
  const Words u = (Words)v, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (Words)choose((Integers)((u & 0x7fffffffu) > 0x7f800000u), (Floats)(Words{} + 0x7fc0u), (Floats)rounded);
}
// The first n lanes.
inline void store(float* p, const Floats& v, int64_t n) {
  if (n >= kLanes) std::memcpy(p, &v, kVectorBytes);
  else std::memcpy(p, &v, n * 4);
}
inline void store(bf16* p, const Floats& v, int64_t n) {
  const Halves bits = __builtin_convertvector(bf16_bits(v), Halves);
  if (n >= kLanes) std::memcpy(p, &bits, kVectorBytes / 2);
  else std::memcpy(p, &bits, n * 2);
}
template <typename T> inline Floats round_to(const Floats& v) {
  if constexpr (std::is_same_v<T, float>) return v;
  else return (Floats)(bf16_bits(v) << 16);
}

// e to the power of each lane, within 2 units of the last place.
inline Floats exp(Floats x) {
  x = choose(x > 89.0f, Floats{} + 89.0f, x);  // infinity
  x = choose(x < -104.0f, Floats{} - 104.0f, x);  // zero
  const Floats power = x * 1.44269504f;
  const Integers n = __builtin_convertvector(power + choose(power < 0.0f, Floats{} - 0.5f, Floats{} + 0.5f), Integers);
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // In two factors, so that results below the least normal number, and infinity, come out.
  const Integers half = n >> 1;
  return p * (Floats)((Words)(half + 127) << 23) * (Floats)((Words)(n - half + 127) << 23);
}

// Inlined, as a call takes its argument through memory.
__attribute__((always_inline)) inline float sum(const Floats& v) {
  typedef float F32x4 __attribute__((vector_size(16)));
  constexpr int parts = kVectorBytes / 16;
  F32x4 part[parts];
#if defined(__AVX512F__) && !defined(MOE_AT_MOST_AVX2)
  // Compilers would take them through memory.
  part[0] = (F32x4)_mm512_castps512_ps128((__m512)v);
  part[1] = (F32x4)_mm512_extractf32x4_ps((__m512)v, 1);
  part[2] = (F32x4)_mm512_extractf32x4_ps((__m512)v, 2);
  part[3] = (F32x4)_mm512_extractf32x4_ps((__m512)v, 3);
#else
  std::memcpy(part, &v, kVectorBytes);
#endif
  for (int n = parts / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) part[i] += part[i + n];
  return (part[0][0] + part[0][1]) + (part[0][2] + part[0][3]);
}

// Half a page ahead of the load hides the latency of memory for a single stream where the hardware's own prefetch
// stops at the end of a page; on AMD's it takes 5 % instead.
constexpr int kPrefetchBytes = 2048;
#if defined(__x86_64__)
const bool kPrefetch = __builtin_cpu_is("intel");
#else
const bool kPrefetch = true;
#endif
// So that the sums of two weight rows stay in registers: there are 32 with AVX-512, otherwise 16.
constexpr int kMaxTokens = kVectorBytes == 64 ? 8 : 4;
constexpr int kRowsPerTask = 32;
// Waking the other threads costs microseconds: products smaller than this stay on one.
constexpr int64_t kParallelElements = 1 << 16;

// Aligned memory that is not initialised.
template <typename T> struct Buffer {
  std::unique_ptr<char[]> memory;
  T* data;
  explicit Buffer(int64_t size) : memory(new char[size * sizeof(T) + 64]) {
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
  }
};

// Rows sorted by expert: expert e has rows [ends[e - 1], ends[e]), row r stands for pair order[r].
struct Rows {
  const int32_t* order;
  const int32_t* ends;
  std::vector<int32_t> active;  // experts with rows

  Rows(const int32_t* order, const int32_t* ends, int64_t E) : order(order), ends(ends) {
    for (int32_t e = 0; e < E; ++e)
      if (ends[e] > begin(e)) active.push_back(e);
  }
  int32_t begin(int32_t e) const { return e ? ends[e - 1] : 0; }
  int64_t pair(int64_t r) const { return order ? order[r] : r; }
};

// Calls body(e, first, last) for chunks [first, last) of [0, F) of every active expert; inside a parallel region.
template <typename Body>
void for_chunks(const Rows& rows, int64_t F, const Body& body) {
  const int64_t chunks = (F + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t tasks = int64_t(rows.active.size()) * chunks;
#pragma omp for schedule(dynamic, 4)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t first = (task % chunks) * kRowsPerTask;
    body(rows.active[task / chunks], first, std::min<int64_t>(first + kRowsPerTask, F));
  }
}

int threads_for(int64_t elements, int threads) { return elements < kParallelElements ? 1 : threads; }

// Stable counting sort of the pairs by expert; pairs of no expert come last.
template <typename Id>
void sort_pairs(const Id* ids, int64_t R, int64_t E, int32_t* order, int32_t* ends) {
  std::vector<int32_t> next(E + 1, 0);
  const auto expert = [&](int64_t r) { return ids[r] >= 0 && ids[r] < E ? int64_t(ids[r]) : E; };
  for (int64_t r = 0; r < R; ++r) ++next[expert(r)];
  int32_t at = 0;
  for (int64_t e = 0; e <= E; ++e) {
    const int32_t count = next[e];
    next[e] = at;
    at += count;
    if (e < E) ends[e] = at;
  }
  for (int64_t r = 0; r < R; ++r) order[next[expert(r)]++] = int32_t(r);
}

inline float choose(bool where, float yes, float no) { return where ? yes : no; }
inline float exp_of(float v) { return std::exp(v); }
inline Floats exp_of(const Floats& v) { return exp(v); }
inline float erf_of(float v) { return std::erf(v); }
inline Floats erf_of(Floats v) {
  for (int i = 0; i < kLanes; ++i) v[i] = std::erf(v[i]);
  return v;
}

// What lies between the two products: of one row, or, as Floats, of kLanes rows at once.
template <typename V> inline V activate(const Activation& a, V gate, V up) {
  const V none = {};
  if (a.clamped) {
    gate = choose(gate > a.limit, none + a.limit, gate);
    up = choose(up > a.limit, none + a.limit, choose(up < -a.limit, none - a.limit, up));
  }
  V act;
  switch (a.kind) {
    case 0: act = gate / (1.0f + exp_of(-a.alpha * gate)); break;
    case 1: act = 0.5f * gate * (1.0f + erf_of(gate * 0.70710678f)); break;
    // 0.5 * (1 + tanh(v)) = 1 / (1 + exp(-2 v))
    case 2: act = gate / (1.0f + exp_of(-1.59576912f * (gate + 0.044715f * gate * gate * gate))); break;
    default: act = choose(gate <= 0.0f, none, gate * gate);  // NaN stays NaN
  }
  return a.gated ? act * (up + a.up_shift) : act;
}

// h = what lies between the two products of a row y of I numbers, or, gated, of 2 * I.
template <typename Y, typename T> void activate_row(const Activation& a, const Y* y, int64_t I, T* h) {
  const int64_t step = a.interleaved ? 2 : 1, up_distance = a.interleaved ? 1 : I;
  for (int64_t i0 = 0; i0 < I; i0 += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, I - i0);
    Floats gate = {}, up = {};
    for (int64_t i = 0; i < n; ++i) {
      const Y* const p = y + (i0 + i) * step;
      gate[i] = to_float(p[0]);
      if (a.gated) up[i] = to_float(p[up_distance]);
    }
    store(h + i0, activate(a, gate, up), n);
  }
}

// Of an expert's biases those of rows row(0), row(1), ..., n at most; 0 without biases.
template <typename T, typename RowOf> Floats bias_of(const T* bias, int64_t n, const RowOf& row) {
  Floats v = {};
  for (int64_t i = 0; bias && i < std::min<int64_t>(n, kLanes); ++i) v[i] = to_float(bias[row(i)]);
  return v;
}

// out[d] = sum_k weights[first + k] * row(k)[d] over those of a token's K pairs whose row is not null; weights are
// float32 or of type T.
template <typename T, typename RowOf>
void combine_rows(int64_t K, int64_t D, const RowOf& row, const void* weights, int64_t first, bool weights_are_float32,
                  T* out) {
  for (int64_t d = 0; d < D; d += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, D - d);
    Floats total = {};
    for (int64_t k = 0; k < K; ++k) {
      const T* const y = row(k);
      if (!y) continue;
      const Floats v = load_as_floats(y + d, n);
      if (weights_are_float32) total += v * static_cast<const float*>(weights)[first + k];
      else total += round_to<T>(v * to_float(static_cast<const T*>(weights)[first + k]));  // as dtypes promote
    }
    store(out + d, total, n);
  }
}

// out[t] = sum_k weights[t, k] * y[t * K + k] over the pairs that have a row.
template <typename T>
void combine_token(const Layer& l, int64_t t, const T* y, const char* has_row, const void* weights, T* out) {
  const int64_t first = t * l.K;
  const auto row = [&](int64_t k) { return has_row[first + k] ? y + (first + k) * l.D : nullptr; };
  combine_rows(l.K, l.D, row, weights, first, l.weights_are_float32, out + t * l.D);
}

}  // namespace
