// CPU kernels of experts in floats: y[r, f] = dot(w[e, f, :], x[r, :]).
//
// Of an expert with few rows the time is that of reading the weights: every weight row is streamed from memory exactly
// once, in order, with a software prefetch, and multiplied with all the tokens of its expert while it is in registers.
// Nothing is copied or laid out anew. Of one with many rows it is that of products, for which float_panels.h transposes
// weights. `moe_experts` runs the whole layer in one parallel region: at one token the Python and ATen calls between the
// stages run slowly, because the weights have evicted their code from the caches.

namespace {

// As many elements as a register has bytes for, and a dot product step into a float32 accumulator.
template <typename T> struct Lane;

template <> struct Lane<float> {
  static constexpr int width = kVectorBytes / 4;
  Floats v;
  Lane() = default;
  explicit Lane(const float* p) { std::memcpy(&v, p, kVectorBytes); }
  static void dot(Floats& acc, const Lane& w, const Lane& x) { acc += w.v * x.v; }
};

#if defined(MOE_BF16)
template <> struct Lane<bf16> {
  static constexpr int width = 32;
  __m512bh v;
  Lane() = default;
  explicit Lane(const bf16* p) : v((__m512bh)_mm512_loadu_si512(p)) {}
  static void dot(Floats& acc, const Lane& w, const Lane& x) {
    acc = (Floats)_mm512_dpbf16_ps((__m512)acc, w.v, x.v);
  }
};
#else
template <> struct Lane<bf16> {
  static constexpr int width = kVectorBytes / 2;
  Floats even, odd;  // a bfloat16 is the upper half of a float32
  Lane() = default;
  explicit Lane(const bf16* p) {
    Words u;
    std::memcpy(&u, p, kVectorBytes);
    even = (Floats)(u << 16);
    odd = (Floats)(u & 0xffff0000u);
  }
  static void dot(Floats& acc, const Lane& w, const Lane& x) {
    acc += w.even * x.even;
    acc += w.odd * x.odd;
  }
};
#endif

// dots[r * kMaxTokens + t] = w[r] . x[t] for `Rows` weight rows, `row_stride` apart, and `Tokens` token rows.
template <typename T, int Tokens, int Rows>
void block(const T* w, int64_t row_stride, const T* const* x, int64_t D, float* dots) {
  constexpr int width = Lane<T>::width;
  Floats acc[Rows][Tokens] = {};
  const bool prefetch = kPrefetch;
  int64_t i = 0;
  for (; i + width <= D; i += width) {
    Lane<T> weights[Rows];
    for (int r = 0; r < Rows; ++r) {
      const T* p = w + r * row_stride + i;
      if (prefetch) __builtin_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes);
      weights[r] = Lane<T>(p);
    }
    for (int t = 0; t < Tokens; ++t) {
      const Lane<T> token(x[t] + i);
      for (int r = 0; r < Rows; ++r) Lane<T>::dot(acc[r][t], weights[r], token);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tokens; ++t) {
      float s = sum(acc[r][t]);
      for (int64_t j = i; j < D; ++j) s += to_float(w[r * row_stride + j]) * to_float(x[t][j]);
      dots[r * kMaxTokens + t] = s;
    }
}

// The same for a number of tokens up to `Most` that is known only now.
template <typename T, int Rows, int Most = kMaxTokens>
void block_of(int tokens, const T* w, int64_t row_stride, const T* const* x, int64_t D, float* dots) {
  if constexpr (Most > 1) {
    if (tokens < Most) return block_of<T, Rows, Most - 1>(tokens, w, row_stride, x, D, dots);
  }
  block<T, Most, Rows>(w, row_stride, x, D, dots);
}

// The stacked weights of all experts. A stride is 1: that of columns, where rows are outputs, or that of rows.
template <typename T> struct Weights {
  const T* data;
  int64_t expert_stride, row_stride, column_stride;
  const T* row(int64_t e, int64_t f) const { return data + e * expert_stride + f * row_stride; }
  bool by_columns() const { return column_stride != 1; }
};

// The products of an expert's rows by panels, as tiles.h wants them: how a panel is loaded and multiplied.
template <typename T, typename Source, typename Body>
void with_panel(const Weights<T>& w, FloatPanel<T>& panel, int32_t e, const Rows& rows, const Source& source,
                const Body& body) {
  const int64_t begin = rows.begin(e), end = rows.ends[e];
  body(
      [&](const auto& row_of) {
        const auto row = [&](int place) {
          const int64_t f = row_of(place);
          return f < 0 ? nullptr : w.row(e, f);
        };
        panel.load(row, end - begin);
      },
      [&](const auto& use) { panel.multiply(begin, end, source, use); });
}

// Whether an expert has so many rows that panels multiply them; `least` as in Layer.
inline bool by_panels(const Rows& rows, int32_t e, int32_t least) {
  return rows.ends[e] - rows.begin(e) >= (least ? least : kLeastPanelRows);
}

// What a thread multiplies such experts with, of weights with so many columns.
template <typename T> FloatPanel<T> panel_for(const Weights<T>& w, int64_t columns, const Rows& rows, int32_t least) {
  bool used = false, laid_out = false;
  for (const int32_t e : rows.active) {
    if (w.by_columns() || !by_panels(rows, e, least)) continue;
    used = true;
    laid_out |= rows.ends[e] - rows.begin(e) > kFewRows;
  }
  return FloatPanel<T>(columns, used, laid_out);
}

// Outputs [first, last) of one expert's product: output f of row r is stored at target(r) + f; source(r) is row r of x.
template <typename T, typename Source, typename Target>
void product(const Weights<T>& w, FloatPanel<T>& panel, const T* bias, int32_t e, int64_t first, int64_t last,
             const Rows& rows, int32_t least, int64_t F, int64_t D, const Source& source, const Target& target) {
  if (w.by_columns()) {
    columns_product(w.row(e, 0), w.column_stride, bias ? bias + e * F : nullptr, e, first, last, rows, D, source,
                    target);
    return;
  }
  if (by_panels(rows, e, least)) {
    const T* const b = bias ? bias + e * F : nullptr;
    with_panel(w, panel, e, rows, source, [&](const auto& load, const auto& multiply) {
      product_by_panels(b, first, last, target, load, multiply);
    });
    return;
  }
  const T* xs[kMaxTokens];
  decltype(target(0)) ys[kMaxTokens];
  float dots[2 * kMaxTokens];
  for (int32_t r0 = rows.begin(e); r0 < rows.ends[e]; r0 += kMaxTokens) {
    const int tokens = std::min<int32_t>(kMaxTokens, rows.ends[e] - r0);
    for (int t = 0; t < tokens; ++t) {
      xs[t] = source(r0 + t);
      ys[t] = target(r0 + t);
    }
    for (int64_t f = first; f < last;) {
      const int step = tokens > 2 && f + 2 <= last ? 2 : 1;  // two weight rows share the loads of the tokens
      if (step == 2) block_of<T, 2>(tokens, w.row(e, f), w.row_stride, xs, D, dots);
      else block_of<T, 1>(tokens, w.row(e, f), w.row_stride, xs, D, dots);
      for (int r = 0; r < step; ++r, ++f) {
        const float b = bias ? to_float(bias[e * F + f]) : 0.0f;
        for (int t = 0; t < tokens; ++t) store(ys[t] + f, dots[r * kMaxTokens + t] + b);
      }
    }
  }
}

// Whether every expert's rows lie behind those of the one before, and within R rows.
bool ends_fit(const int32_t* ends, int64_t E, int64_t R) {
  int32_t last = 0;
  for (int64_t e = 0; e < E; ++e) {
    if (ends[e] < last) return false;
    last = ends[e];
  }
  return last <= R;
}

template <typename T>
void gemm(const Weights<T>& w, const T* bias, const T* x, int64_t x_stride, const int32_t* ends, T* y, int64_t E,
          int64_t F, int64_t D, int threads, int32_t least) {
  const Rows rows(nullptr, ends, E);
#pragma omp parallel num_threads(threads_for(int64_t(rows.active.size()) * F * D, threads))
  {
    FloatPanel<T> panel = panel_for(w, D, rows, least);
    for_chunks(rows, F, [&](int32_t e, int64_t first, int64_t last) {
      product(w, panel, bias, e, first, last, rows, least, F, D, [&](int64_t r) { return x + r * x_stride; },
              [&](int64_t r) { return y + r * F; });
    });
  }
}

// h[r, i] = act(w13[gate row i] . x + b13, w13[up row i] . x + b13) for rows i of [first, last).
template <typename T>
void first_product(const Layer& l, const Weights<T>& w, FloatPanel<T>& panel, const T* bias, const T* x,
                   const Rows& rows, T* h, int32_t e, int64_t first, int64_t last) {
  const Activation& a = l.activation;
  const auto source = [&](int64_t r) { return x + rows.pair(r) / l.K * l.x_stride; };
  if (by_panels(rows, e, l.least_panel_rows)) {
    const T* const b = bias ? bias + e * l.F : nullptr;
    with_panel(w, panel, e, rows, source, [&](const auto& load, const auto& multiply) {
      first_by_panels(l, b, first, last, h, load, multiply,
                      [&](const Floats& gate, const Floats& up) { return activate(a, gate, up); });
    });
    return;
  }
  const int64_t up_distance = a.interleaved ? 1 : l.I;
  const T* xs[kMaxTokens];
  float dots[2 * kMaxTokens];
  for (int32_t r0 = rows.begin(e); r0 < rows.ends[e]; r0 += kMaxTokens) {
    const int tokens = std::min<int32_t>(kMaxTokens, rows.ends[e] - r0);
    for (int t = 0; t < tokens; ++t) xs[t] = source(r0 + t);
    for (int64_t i = first; i < last; ++i) {
      const int64_t gate_row = a.interleaved ? 2 * i : i;
      const T* gate = w.row(e, gate_row);
      if (a.gated) block_of<T, 2>(tokens, gate, up_distance * w.row_stride, xs, l.D, dots);
      else block_of<T, 1>(tokens, gate, w.row_stride, xs, l.D, dots);
      const T* b = bias ? bias + e * l.F + gate_row : nullptr;
      for (int t = 0; t < tokens; ++t) {
        const float g = dots[t] + (b ? to_float(b[0]) : 0.0f);
        const float u = a.gated ? dots[kMaxTokens + t] + (b ? to_float(b[up_distance]) : 0.0f) : 0.0f;
        store(h + (r0 + t) * l.I + i, activate(a, g, u));
      }
    }
  }
}

template <typename T>
void experts(const Layer& l, const T* x, const void* ids, const void* weights, const T* w13, const T* w2,
             const T* b13, const T* b2, T* out) {
  const int64_t R = l.T * l.K;
  const std::unique_ptr<T[]> h_RI(new T[R * l.I]), y_RD(new T[R * l.D]);
  T *const h = h_RI.get(), *const y = y_RD.get();
  std::vector<int32_t> order(R), ends(l.E);
  if (l.ids_are_int64) sort_pairs(static_cast<const int64_t*>(ids), R, l.E, order.data(), ends.data());
  else sort_pairs(static_cast<const int32_t*>(ids), R, l.E, order.data(), ends.data());
  std::vector<char> has_row(R, 0);
  for (int32_t r = 0; r < ends[l.E - 1]; ++r) has_row[order[r]] = 1;

  const Rows rows(order.data(), ends.data(), l.E);
  const Weights<T> first{w13, l.w13_expert_stride, l.w13_row_stride, l.w13_column_stride};
  const Weights<T> second{w2, l.w2_expert_stride, l.w2_row_stride, l.w2_column_stride};
  const std::unique_ptr<float[]> y_RF(first.by_columns() ? new float[R * l.F] : nullptr);
#pragma omp parallel num_threads(threads_for(int64_t(rows.active.size()) * l.F * l.D, l.threads))
  {
    FloatPanel<T> panel13 = panel_for(first, l.D, rows, l.least_panel_rows);
    FloatPanel<T> panel2 = panel_for(second, l.I, rows, l.least_panel_rows);
    if (first.by_columns()) {
      for_chunks(rows, l.F, [&](int32_t e, int64_t begin, int64_t end) {
        product(first, panel13, b13, e, begin, end, rows, l.least_panel_rows, l.F, l.D,
                [&](int64_t r) { return x + rows.pair(r) / l.K * l.x_stride; },
                [&](int64_t r) { return y_RF.get() + r * l.F; });
      });
#pragma omp for schedule(static)
      for (int64_t r = 0; r < ends[l.E - 1]; ++r) activate_row(l.activation, y_RF.get() + r * l.F, l.I, h + r * l.I);
    } else {
      for_chunks(rows, l.I, [&](int32_t e, int64_t begin, int64_t end) {
        first_product(l, first, panel13, b13, x, rows, h, e, begin, end);
      });
    }
    for_chunks(rows, l.D, [&](int32_t e, int64_t begin, int64_t end) {
      product(second, panel2, b2, e, begin, end, rows, l.least_panel_rows, l.D, l.I,
              [&](int64_t r) { return h + r * l.I; }, [&](int64_t r) { return y + rows.pair(r) * l.D; });
    });
#pragma omp for schedule(static)
    for (int64_t t = 0; t < l.T; ++t) combine_token(l, t, y, has_row.data(), weights, out);
  }
}

}  // namespace

#define MOE_KERNELS(name, T)                                                                                \
  extern "C" bool moe_gemm_##name(const T* w, int64_t expert_stride, int64_t row_stride,                     \
                                  int64_t column_stride, const T* bias, const T* x, int64_t x_stride,        \
                                  const int32_t* ends, T* y, int64_t R, int64_t E, int64_t F, int64_t D,     \
                                  int threads, int32_t least_panel_rows) {                                   \
    if (!ends_fit(ends, E, R)) return false;                                                                 \
    const Weights<T> weights{w, expert_stride, row_stride, column_stride};                                   \
    gemm(weights, bias, x, x_stride, ends, y, E, F, D, threads, least_panel_rows);                             \
    return true;                                                                                             \
  }                                                                                                          \
  extern "C" void moe_experts_##name(const Layer* l, const T* x, const void* ids, const void* weights,       \
                                     const T* w13, const T* w2, const T* b13, const T* b2, T* out) {         \
    experts(*l, x, ids, weights, w13, w2, b13, b2, out);                                                     \
  }
MOE_KERNELS(bfloat16, bf16)
MOE_KERNELS(float32, float)
