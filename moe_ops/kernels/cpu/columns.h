// Products with weights whose outputs lie side by side, [E, D, F]: each of its D rows is streamed once for up to
// kColumnTokens tokens, and a lane is the sum of one output.
//
// Compiled after layer.h, before experts.cpp.

namespace {

// Sums stay in registers, two for each token.
constexpr int kColumns = 2 * kLanes, kColumnTokens = 4;

// sums[t * kColumns + j] = sum_d w[d * stride + j] * x[t][d] for j < n, which is kColumns at most.
template <typename T, int Tokens>
void columns_block(const T* w, int64_t stride, const T* const* x, int64_t D, int64_t n, float* sums) {
  Floats acc[Tokens][2] = {};
  T last[kColumns] = {};
  for (int64_t d = 0; d < D; ++d) {
    const T* p = w + d * stride;
    if (n < kColumns) {  // nothing is read past the weight
      std::memcpy(last, p, n * sizeof(T));
      p = last;
    }
    const Floats one = load_as_floats(p), two = load_as_floats(p + kLanes);
    for (int t = 0; t < Tokens; ++t) {
      const float v = to_float(x[t][d]);
      acc[t][0] += one * v;
      acc[t][1] += two * v;
    }
  }
  std::memcpy(sums, acc, sizeof acc);
}

// The same for a number of tokens up to `Most` that is known only now.
template <typename T, int Most = kColumnTokens>
void columns_of(int tokens, const T* w, int64_t stride, const T* const* x, int64_t D, int64_t n, float* sums) {
  if constexpr (Most > 1) {
    if (tokens < Most) return columns_of<T, Most - 1>(tokens, w, stride, x, D, n, sums);
  }
  columns_block<T, Most>(w, stride, x, D, n, sums);
}

// Outputs [first, last) of one expert, whose weight is `w` with `stride` from row to row, for its rows: y[f] of row r
// goes to target(r) + f; source(r) is row r of x; `bias` is the expert's, or null.
template <typename T, typename Source, typename Target>
void columns_product(const T* w, int64_t stride, const T* bias, int32_t e, int64_t first, int64_t last,
                     const Rows& rows, int64_t D, const Source& source, const Target& target) {
  const T* xs[kColumnTokens];
  float sums[kColumnTokens * kColumns];
  for (int32_t r0 = rows.begin(e); r0 < rows.ends[e]; r0 += kColumnTokens) {
    const int tokens = std::min<int32_t>(kColumnTokens, rows.ends[e] - r0);
    for (int t = 0; t < tokens; ++t) xs[t] = source(r0 + t);
    for (int64_t f = first; f < last; f += kColumns) {
      const int64_t n = std::min<int64_t>(kColumns, last - f);
      columns_of<T>(tokens, w + f, stride, xs, D, n, sums);
      for (int t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < n; ++j)
          store(target(r0 + t) + f + j, sums[t * kColumns + j] + (bias ? to_float(bias[f + j]) : 0.0f));
    }
  }
}

}  // namespace
