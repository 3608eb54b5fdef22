// CPU kernels for few rows per expert, where the time is that of reading the weights once.
//
// Every weight row is streamed from memory exactly once, in order, with a software prefetch, and multiplied
// with all the tokens of its expert while it is in registers: y[r, f] = dot(w[e, f, :], x[r, :]). Nothing is
// copied or laid out anew.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));

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
  if ((u & 0x7fffffffu) > 0x7f800000u) {  // NaN stays NaN
    p->bits = 0x7fc0;
    return;
  }
  p->bits = uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);  // round half to even
}

// One register of elements, and a dot product step into a float32 accumulator.
template <typename T> struct Lane;

template <> struct Lane<float> {
  static constexpr int width = 16;
  F32x16 v;
  explicit Lane(const float* p) { std::memcpy(&v, p, 64); }
  static void dot(F32x16& acc, const Lane& w, const Lane& x) { acc += w.v * x.v; }
};

#if defined(__AVX512BF16__)
template <> struct Lane<bf16> {
  static constexpr int width = 32;
  __m512bh v;
  explicit Lane(const bf16* p) : v((__m512bh)_mm512_loadu_si512(p)) {}
  static void dot(F32x16& acc, const Lane& w, const Lane& x) {
    acc = (F32x16)_mm512_dpbf16_ps((__m512)acc, w.v, x.v);
  }
};
#else
template <> struct Lane<bf16> {
  static constexpr int width = 32;
  F32x16 even, odd;  // a bfloat16 is the upper half of a float32
  explicit Lane(const bf16* p) {
    U32x16 u;
    std::memcpy(&u, p, 64);
    even = (F32x16)(u << 16);
    odd = (F32x16)(u & 0xffff0000u);
  }
  static void dot(F32x16& acc, const Lane& w, const Lane& x) {
    acc += w.even * x.even;
    acc += w.odd * x.odd;
  }
};
#endif

inline float sum(const F32x16& v) {
  float s[16];
  std::memcpy(s, &v, 64);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) s[i] += s[i + half];
  return s[0];
}

// About half a page ahead of the load hides DRAM latency for a single stream; measured, see docs/PERFORMANCE.md.
constexpr int kPrefetchBytes = 2048;
constexpr int kMaxTokens = 8;
constexpr int kRowsPerTask = 32;
constexpr int64_t kParallelElements = 1 << 16;

// `Rows` weight rows times `Tokens` token rows.
template <typename T, int Tokens, int Rows>
void block(const T* w, int64_t row_stride, const T* const* x, T* const* y, int64_t f, int64_t D) {
  constexpr int width = Lane<T>::width;
  F32x16 acc[Rows][Tokens] = {};
  int64_t i = 0;
  for (; i + width <= D; i += width) {
    for (int r = 0; r < Rows; ++r) {
      const T* p = w + r * row_stride + i;
      __builtin_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes);
      Lane<T> weight(p);
      for (int t = 0; t < Tokens; ++t) Lane<T>::dot(acc[r][t], weight, Lane<T>(x[t] + i));
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tokens; ++t) {
      float s = sum(acc[r][t]);
      for (int64_t j = i; j < D; ++j) s += to_float(w[r * row_stride + j]) * to_float(x[t][j]);
      store(y[t] + f + r, s);
    }
}

template <typename T, int Rows>
void block(int tokens, const T* w, int64_t row_stride, const T* const* x, T* const* y, int64_t f, int64_t D) {
  switch (tokens) {
    case 1: return block<T, 1, Rows>(w, row_stride, x, y, f, D);
    case 2: return block<T, 2, Rows>(w, row_stride, x, y, f, D);
    case 3: return block<T, 3, Rows>(w, row_stride, x, y, f, D);
    case 4: return block<T, 4, Rows>(w, row_stride, x, y, f, D);
    case 5: return block<T, 5, Rows>(w, row_stride, x, y, f, D);
    case 6: return block<T, 6, Rows>(w, row_stride, x, y, f, D);
    case 7: return block<T, 7, Rows>(w, row_stride, x, y, f, D);
    default: return block<T, kMaxTokens, Rows>(w, row_stride, x, y, f, D);
  }
}

// Sorted row r reads x[source[r] / source_div] and writes y[target[r]]; a null index means r itself.
template <typename T>
void gemm(const T* w, int64_t expert_stride, int64_t row_stride, const T* x, int64_t x_stride,
          const int32_t* source, int64_t source_div, const int32_t* ends, T* y, const int32_t* target,
          int64_t E, int64_t F, int64_t D, int threads) {
  std::vector<int32_t> active;
  for (int32_t e = 0; e < E; ++e)
    if (ends[e] > (e ? ends[e - 1] : 0)) active.push_back(e);
  const int64_t chunks = (F + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t tasks = int64_t(active.size()) * chunks;
  // Waking the other threads costs microseconds: leave small products to one.
  if (int64_t(active.size()) * F * D < kParallelElements) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (int64_t task = 0; task < tasks; ++task) {
    const int32_t e = active[task / chunks];
    const int64_t first = (task % chunks) * kRowsPerTask;
    const int64_t last = std::min<int64_t>(first + kRowsPerTask, F);
    const T* we = w + e * expert_stride;
    const int32_t end = ends[e];
    const T* xs[kMaxTokens];
    T* ys[kMaxTokens];
    for (int32_t r0 = e ? ends[e - 1] : 0; r0 < end; r0 += kMaxTokens) {
      const int tokens = std::min<int32_t>(kMaxTokens, end - r0);
      for (int t = 0; t < tokens; ++t) {
        const int64_t r = r0 + t;
        xs[t] = x + (source ? source[r] / source_div : r) * x_stride;
        ys[t] = y + (target ? target[r] : r) * F;
      }
      int64_t f = first;
      if (tokens > 2)  // two weight rows share the loads of the tokens
        for (; f + 2 <= last; f += 2) block<T, 2>(tokens, we + f * row_stride, row_stride, xs, ys, f, D);
      for (; f < last; ++f) block<T, 1>(tokens, we + f * row_stride, row_stride, xs, ys, f, D);
    }
  }
}

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

}  // namespace

#define MOE_GEMM(name, T)                                                                                    \
  extern "C" void name(const void* w, int64_t expert_stride, int64_t row_stride, const void* x,              \
                       int64_t x_stride, const int32_t* source, int64_t source_div, const int32_t* ends,     \
                       void* y, const int32_t* target, int64_t E, int64_t F, int64_t D, int threads) {       \
    gemm(static_cast<const T*>(w), expert_stride, row_stride, static_cast<const T*>(x), x_stride, source,    \
         source_div, ends, static_cast<T*>(y), target, E, F, D, threads);                                    \
  }
MOE_GEMM(moe_gemm_bfloat16, bf16)
MOE_GEMM(moe_gemm_float32, float)

// Stable counting sort of the pairs by expert; pairs of no expert come last.
extern "C" void moe_sort_int32(const int32_t* ids, int64_t R, int64_t E, int32_t* order, int32_t* ends) {
  sort_pairs(ids, R, E, order, ends);
}
extern "C" void moe_sort_int64(const int64_t* ids, int64_t R, int64_t E, int32_t* order, int32_t* ends) {
  sort_pairs(ids, R, E, order, ends);
}
