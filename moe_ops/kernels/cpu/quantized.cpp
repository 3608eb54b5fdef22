// CPU kernels for layers with quantised weights.
//
// Of an expert with few rows the time is that of reading codes: every row of codes is streamed once for up to kMaxTokens
// tokens and decoded in registers. Of one with many rows it is that of products: panels.h decodes ahead. Sums are
// float32, and each group's sum is multiplied by its scale once: sum_g scale_g * (sum_d code_d x_d - zero_g sum_d x_d).
// Of an infinite x_d both sums are infinite, and their difference NaN: then each code has its zero point subtracted.
// Tokens are laid out first in the order in which codes come (codes.h), and quantised there if the layer says so
// (inputs.h). The whole layer is one parallel region.
//
// Compiled after panels.h, once for each element type (MOE_ELEMENT) and type of inputs (MOE_INPUTS).

namespace {

// What a product reads of up to kMaxTokens rows.
template <typename X> struct Tile {
  const X* x[kMaxTokens];
  const float* sums[kMaxTokens];
  const float* scales[kMaxTokens];
  int32_t offsets[kMaxTokens];
  bool grouped;   // a scale for each span, not for the whole row
  bool infinite[kMaxTokens];  // a row is, or has a NaN
};

// dots[t] = w . x[t] for one row of a weight and `Tokens` rows of numbers, in integers.
template <int Tokens, typename W>
void block_of_integers(const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  typedef typename W::Math Math;
  constexpr int chains = Tokens <= 2 ? 2 : 1;
  typename Math::Register part[Tokens][chains];
  MOE_UNROLL for (int t = 0; t < Tokens; ++t)
    MOE_UNROLL for (int c = 0; c < chains; ++c) part[t][c] = Math::zero();
  const auto step = [&](const uint8_t* codes, int64_t at, int chain) __attribute__((always_inline)) {
    const typename Math::Register numbers = Math::load(codes);
    MOE_UNROLL for (int t = 0; t < Tokens; ++t) Math::dot(part[t][chain], numbers, tile.x[t] + at * W::kStep);
  };
  const uint8_t* p = row.codes;
  int64_t at = 0;
  for (; at + chains <= w.full_steps; at += chains, p += chains * W::kBytes) {
    MOE_UNROLL for (int c = 0; c < chains; ++c) {
      __builtin_prefetch(p + c * W::kBytes + kPrefetchBytes);
      step(p + c * W::kBytes, at + c, c);
    }
  }
  for (; at < w.full_steps; ++at, p += W::kBytes) step(p, at, 0);
  if (at < w.steps) step(row.tail, at, 0);
  for (int t = 0; t < Tokens; ++t) {
    // Unsigned: sums of raised weights may wrap, and their difference is right all the same.
    uint32_t total = 0;
    for (int c = 0; c < chains; ++c) total += uint32_t(Math::total(part[t][c]));
    dots[t] = float(int32_t(total - uint32_t(tile.offsets[t]))) * finite(row.scale[0]) * tile.scales[t][0];
  }
}

// dots[t] of the sums of lanes.
template <int Tokens, typename W>
void finish(const W& w, const Row& row, const Tile<typename W::X>& tile, bool any_nan, const Floats* total, float* dots) {
  for (int t = 0; t < Tokens; ++t) {
    dots[t] = sum(total[t]) * W::Decode::kFactor;
    // Asked of what became infinite alone: to look at every scale takes 5 % longer.
    if (any_nan || (std::isinf(dots[t]) && w.any_infinite(row))) dots[t] = NAN;
    if constexpr (W::Codes::kQuantized) {
      if (!tile.grouped) dots[t] *= tile.scales[t][0];
    }
  }
}

// dots[t] = w . x[t] for one row of a weight and `Tokens` rows of numbers. `differences`: zero points and minima are
// subtracted from codes, not from sums.
template <Span span, int Tokens, bool differences = false, typename W>
void block(const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  typedef typename W::Math Math;
  constexpr int registers = W::Decode::kRegisters;
  // Independent sums, so that a product need not wait for the one before. So many for any number of tokens, whose sums
  // then do not depend on it.
  constexpr int chains = 2;
  typename W::Decode decode;
  constexpr bool sums_have_zero = W::Element::kZero && !differences;
  Floats total[Tokens] = {}, part[Tokens][chains], zero = {};

  const auto first_group = [&](int64_t s) { return span == kGroups ? s * w.span_groups : s; };
  const auto begin = [&](int64_t s) __attribute__((always_inline)) {
    MOE_UNROLL for (int t = 0; t < Tokens; ++t)
      MOE_UNROLL for (int c = 0; c < chains; ++c) part[t][c] = Floats{};
    if constexpr (differences) zero = w.spread.template of<span>(row.zero + first_group(s));
  };
  const auto step = [&](const uint8_t* codes, int64_t at) __attribute__((always_inline)) {
    typename Math::Register numbers[registers];
    decode(codes, numbers);
    if constexpr (differences) {
      MOE_UNROLL for (int r = 0; r < registers; ++r) numbers[r] = Math::scaled(numbers[r], zero, Floats{} + 1.0f);
    }
    MOE_UNROLL for (int t = 0; t < Tokens; ++t)
      MOE_UNROLL for (int r = 0; r < registers; ++r)
        Math::dot(part[t][r % chains], numbers[r], tile.x[t] + at * W::kStep + r * Math::kWidth);
  };
  const auto end = [&](int64_t s) __attribute__((always_inline)) {
    const int64_t first = first_group(s);
    const Floats scale = w.spread.template of<span>(row.scale + first);
    MOE_UNROLL for (int t = 0; t < Tokens; ++t) {
      MOE_UNROLL for (int c = 1; c < chains; ++c) part[t][0] += part[t][c];
      if constexpr (sums_have_zero) {
        Floats sums;
        std::memcpy(&sums, tile.sums[t] + s * kLanes, kVectorBytes);
        part[t][0] -= w.spread.template of<span>(row.zero + first) * sums;
      }
      if constexpr (W::Codes::kQuantized) {
        if (tile.grouped) part[t][0] *= tile.scales[t][s];
      }
      total[t] += part[t][0] * scale;
    }
  };

  const uint8_t* p = row.codes;
  const int64_t steps = span == kSteps ? w.span_steps : 1;
  int64_t at = 0;
  for (int64_t s = 0; s < w.full_spans; ++s) {
    begin(s);
    for (int64_t i = 0; i < steps; ++i, ++at, p += W::kBytes) {
      __builtin_prefetch(p + kPrefetchBytes);  // on AMD too: rows of gate and up take turns
      step(p, at);
    }
    end(s);
  }
  if (w.full_spans < w.spans) {
    begin(w.full_spans);
    for (; at < w.full_steps; ++at, p += W::kBytes) step(p, at);
    if (at < w.steps) step(row.tail, at);
    end(w.full_spans);
  }
  finish<Tokens>(w, row, tile, decode.any_nan(), total, dots);
}

// The same of a row of blocks.
template <int Tokens, bool differences, typename W>
void row_of_blocks(const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  typedef typename W::Math Math;
  constexpr int registers = W::Decode::kRegisters;
  typename W::Decode decode;
  Floats total[Tokens] = {};
  const uint8_t* codes = row.codes;
  for (int64_t b = 0; b < w.columns / kBlock; ++b, codes += W::Element::kBlockBytes) {
    for (int line = 0; line < W::Element::kBlockBytes; line += 64) __builtin_prefetch(codes + kPrefetchBytes + line);
    const Factors factors = W::Element::factors(codes, row.scale[0]);
    MOE_UNROLL for (int part = 0; part < W::kParts; ++part) {
      typename Math::Register numbers[registers];
      decode(codes, part, numbers);
      const Floats scale = w.scale_of(factors, part);
      if constexpr (differences) {
        const Floats least = w.least_of(factors, part);
        MOE_UNROLL for (int r = 0; r < registers; ++r) numbers[r] = Math::lowered(numbers[r], scale, least);
      }
      MOE_UNROLL for (int t = 0; t < Tokens; ++t) {
        Floats sum = {};
        MOE_UNROLL for (int r = 0; r < registers; ++r)
          Math::dot(sum, numbers[r], tile.x[t] + (b * W::kParts + part) * W::kStep + r * Math::kWidth);
        if constexpr (differences) total[t] += sum;
        else total[t] += sum * scale;
      }
    }
    if constexpr (W::kMinima && !differences) {
      const Floats minima = load_floats(factors.all + 16 - kLanes);
      MOE_UNROLL for (int t = 0; t < Tokens; ++t) total[t] -= minima * load_floats(tile.sums[t] + b * kLanes);
    }
  }
  finish<Tokens>(w, row, tile, false, total, dots);
}

// The same for a number of tokens up to `Most` that is known only now.
template <Span span, int Most = kMaxTokens, typename W>
void block_of(int tokens, const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  if constexpr (Most > 1) {
    if (tokens < Most) return block_of<span, Most - 1>(tokens, w, row, tile, dots);
  }
  if constexpr (W::kIntegers) block_of_integers<Most>(w, row, tile, dots);
  else if constexpr (W::kBlocks) row_of_blocks<Most, false>(w, row, tile, dots);
  else block<span, Most>(w, row, tile, dots);
}

// Again, of rows whose results are no numbers, each code less its zero point.
template <Span span, typename W>
__attribute__((cold, noinline)) void dot_differences(int tokens, const W& w, const Row& row,
                                                     const Tile<typename W::X>& tile, float* dots) {
  for (int t = 0; t < tokens; ++t) {
    const Tile<typename W::X> one = {{tile.x[t]}, {}, {tile.scales[t]}, {}, tile.grouped, {true}};
    if (!tile.infinite[t] || std::isfinite(dots[t])) continue;
    if constexpr (W::kBlocks) row_of_blocks<1, true>(w, row, one, dots + t);
    else block<span, 1, true>(w, row, one, dots + t);
  }
}

template <Span span, typename W>
void dot_spans(int tokens, const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  block_of<span>(tokens, w, row, tile, dots);
  if constexpr (W::kSums) {
    if (std::any_of(tile.infinite, tile.infinite + tokens, [](bool is) { return is; }))
      dot_differences<span>(tokens, w, row, tile, dots);
  }
}

template <typename W>
void dot_row(int tokens, const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  if constexpr (W::kIntegers) return block_of<kSteps>(tokens, w, row, tile, dots);
  if constexpr (W::kBlocks) return dot_spans<kGroups>(tokens, w, row, tile, dots);
  if constexpr (W::kStep > kLeastGroup) {
    if (w.span_groups > 1) return dot_spans<kGroups>(tokens, w, row, tile, dots);
  }
  if (w.span_steps > 1) dot_spans<kSteps>(tokens, w, row, tile, dots);
  else dot_spans<kGroup>(tokens, w, row, tile, dots);
}

// Calls body(r0, tokens, tile) for the rows of an expert, up to kMaxTokens at once; row r reads `source(r)` of `x`.
template <typename W, typename Source, typename Body>
void for_tiles(const Rows& rows, int32_t e, const Arranged<W>& x, const Source& source, const Body& body) {
  Tile<typename W::X> tile;
  tile.grouped = x.groups > 1;
  for (int32_t r0 = rows.begin(e); r0 < rows.ends[e]; r0 += kMaxTokens) {
    const int tokens = std::min<int32_t>(kMaxTokens, rows.ends[e] - r0);
    for (int t = 0; t < tokens; ++t) {
      if constexpr (W::kSums) tile.infinite[t] = x.infinite[source(r0 + t)];
      tile.x[t] = x.row(source(r0 + t));
      tile.sums[t] = x.sums_of(source(r0 + t));
      tile.scales[t] = x.scales_of(source(r0 + t));
      if constexpr (W::kIntegers) tile.offsets[t] = x.offset.data[source(r0 + t)];
    }
    body(r0, tokens, tile);
  }
}

// What a thread multiplies with a weight: a row of codes, or a panel if an expert has rows for one.
template <typename W> struct Worker {
  const W& w;
  Row row;
  Panel<W> panel;
  Worker(const W& w, bool panels) : w(w), row(w.padded_groups()), panel(w, panels) {}
};

// Results of an expert's first product, given products with gate rows and, if gated, with up rows.
template <typename T, typename W, typename V> V activated(const Layer& l, V gate, V up) {
  if constexpr (W::Codes::kQuantized)  // rounded where the definition rounds: other codes are a step away
    return activate(l.activation, round_to<T>(gate), round_to<T>(up));
  return activate(l.activation, gate, up);
}

// Whether an expert has so many rows that its codes are decoded ahead of the products.
template <typename W> bool by_panels(const Layer& l, const Rows& rows, int32_t e) {
  const int32_t least = l.least_panel_rows ? l.least_panel_rows : kLeastPanelTokens;
  return !W::kIntegers && rows.ends[e] - rows.begin(e) >= least;
}

// h[r, i] = act(w13[gate row i] . x + b13, w13[up row i] . x + b13) for rows i of [first, last).
template <typename T, typename W>
void first_product(const Layer& l, Worker<W>& worker, const T* bias, const Arranged<W>& x, const Rows& rows, T* h,
                   int32_t e, int64_t first, int64_t last) {
  const bool routed = x.by_expert(), gated = l.activation.gated, interleaved = l.activation.interleaved;
  const auto gate_row = [&](int64_t i) { return interleaved ? 2 * i : i; };
  const int64_t up_distance = interleaved ? 1 : l.I;
  const T* const b = bias ? bias + e * l.F : nullptr;
  const auto source = [&](int64_t r) { return routed ? r : rows.pair(r) / l.K; };
  if constexpr (!W::kIntegers) {
    if (by_panels<W>(l, rows, e)) {
      first_by_panels(
          l, b, first, last, h, [&](const auto& row_of) { worker.panel.load(e, row_of, worker.row); },
          [&](const auto& body) { worker.panel.multiply(x, rows.begin(e), rows.ends[e], source, body); },
          [&](const Floats& gate, const Floats& up) { return activated<T, W>(l, gate, up); });
      return;
    }
  }
  const W& w = worker.w;
  float gates[kMaxTokens], ups[kMaxTokens] = {};
  for_tiles(rows, e, x, source, [&](int64_t r0, int tokens, const auto& tile) {
    for (int64_t i = first; i < last; ++i) {
      w.load(e, gate_row(i), worker.row);
      dot_row(tokens, w, worker.row, tile, gates);
      if (gated) {
        w.load(e, gate_row(i) + up_distance, worker.row);
        dot_row(tokens, w, worker.row, tile, ups);
      }
      const float gate_bias = b ? to_float(b[gate_row(i)]) : 0.0f;
      const float up_bias = b && gated ? to_float(b[gate_row(i) + up_distance]) : 0.0f;
      for (int t = 0; t < tokens; ++t)
        store(h + (r0 + t) * l.I + i, activated<T, W>(l, gates[t] + gate_bias, ups[t] + up_bias));
    }
  });
}

// y[pair of r, d] = w2[d] . h[r] + b2 for rows d of [first, last).
template <typename T, typename W>
void second_product(const Layer& l, Worker<W>& worker, const T* bias, const Arranged<W>& h, const Rows& rows, T* y,
                    int32_t e, int64_t first, int64_t last) {
  const auto source = [](int64_t r) { return r; };
  const auto put = [&](int64_t r, int64_t d, float dot) {
    store(y + rows.pair(r) * l.D + d, dot + (bias ? to_float(bias[e * l.D + d]) : 0.0f));
  };
  if constexpr (!W::kIntegers) {
    if (by_panels<W>(l, rows, e)) {
      product_by_panels(
          bias ? bias + e * l.D : nullptr, first, last, [&](int64_t r) { return y + rows.pair(r) * l.D; },
          [&](const auto& row_of) { worker.panel.load(e, row_of, worker.row); },
          [&](const auto& body) { worker.panel.multiply(h, rows.begin(e), rows.ends[e], source, body); });
      return;
    }
  }
  float dots[kMaxTokens];
  for_tiles(rows, e, h, source, [&](int64_t r0, int tokens, const auto& tile) {
    for (int64_t d = first; d < last; ++d) {
      worker.w.load(e, d, worker.row);
      dot_row(tokens, worker.w, worker.row, tile, dots);
      for (int t = 0; t < tokens; ++t) put(r0 + t, d, dots[t]);
    }
  });
}

// Lays out rows [0, n), of which row r lies at from(r) and belongs to expert expert(r); inside a parallel region.
template <typename W, typename From, typename Expert>
void arrange_all(Arranged<W>& to, int64_t n, const From& from, const Expert& expert, float* scratch) {
  if (to.needs_largest()) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < n; ++r) to.see(r, from(r));
#pragma omp single
    to.seen(n);
  }
#pragma omp for schedule(static)
  for (int64_t r = 0; r < n; ++r) to.arrange(r, from(r), expert(r), scratch);
}

template <typename Element, typename Codes, typename T>
void experts(const Layer& l, const T* x, const void* ids, const void* weights, const uint8_t* w13, const uint8_t* w2,
             const Scales& scales13, const Scales& scales2, const Inputs& inputs13, const Inputs& inputs2,
             const T* b13, const T* b2, T* out) {
  typedef Weight<Element, typename MathFor<Codes, Element, T>::type, Codes> W;
  const int64_t R = l.T * l.K;
  const W first(w13, l.w13_expert_stride, l.w13_row_stride, l.D, scales13);
  const W second(w2, l.w2_expert_stride, l.w2_row_stride, l.I, scales2);
  const bool routed = inputs13.given_experts > 1;  // tokens are laid out for each of their experts
  Arranged<W> x_TD(first, inputs13, routed ? R : l.T), h_RI(second, inputs2, R);
  const Buffer<T> h(R * l.I), y(R * l.D);
  std::vector<int32_t> order(R), ends(l.E), owner(R);
  if (l.ids_are_int64) sort_pairs(static_cast<const int64_t*>(ids), R, l.E, order.data(), ends.data());
  else sort_pairs(static_cast<const int32_t*>(ids), R, l.E, order.data(), ends.data());
  std::vector<char> has_row(R, 0);
  const int32_t used = ends[l.E - 1];
  for (int32_t r = 0; r < used; ++r) has_row[order[r]] = 1;
  const Rows rows(order.data(), ends.data(), l.E);
  for (const int32_t e : rows.active) std::fill(owner.begin() + rows.begin(e), owner.begin() + ends[e], e);
  const auto expert = [&](int64_t r) { return owner[r]; };
  bool panels = false;
  for (const int32_t e : rows.active) panels |= by_panels<W>(l, rows, e);
#pragma omp parallel num_threads(threads_for(int64_t(rows.active.size()) * l.F * l.D, l.threads))
  {
    Worker<W> worker13(first, panels), worker2(second, panels);
    const Buffer<float> numbers(Codes::kQuantized ? std::max(l.D, l.I) : 0);
    if (routed)
      arrange_all(x_TD, used, [&](int64_t r) { return x + order[r] / l.K * l.x_stride; }, expert, numbers.data);
    else
      arrange_all(x_TD, l.T, [&](int64_t t) { return x + t * l.x_stride; }, [](int64_t) { return 0; }, numbers.data);
    for_chunks(rows, l.I, [&](int32_t e, int64_t begin, int64_t end) {
      first_product(l, worker13, b13, x_TD, rows, h.data, e, begin, end);
    });
    arrange_all(h_RI, used, [&](int64_t r) { return h.data + r * l.I; }, expert, numbers.data);
    for_chunks(rows, l.D, [&](int32_t e, int64_t begin, int64_t end) {
      second_product(l, worker2, b2, h_RI, rows, y.data, e, begin, end);
    });
#pragma omp for schedule(static)
    for (int64_t t = 0; t < l.T; ++t) combine_token(l, t, y.data, has_row.data(), weights, out);
  }
}

// y[t, n] = w[n] . x[t] + b: the second product of a layer of one expert, whose D is the rows of the weight and whose I
// its columns. Inputs are not quantised.
template <typename Element, typename Codes, typename T>
void linear(const Layer& l, const T* x, const uint8_t* w, const Scales& scales, const T* bias, T* out) {
  if constexpr (!Codes::kQuantized) {
    typedef Weight<Element, typename MathFor<Codes, Element, T>::type, Codes> W;
    const W weight(w, l.w2_expert_stride, l.w2_row_stride, l.I, scales);
    Arranged<W> x_TI(weight, Inputs{}, l.T);
    const int32_t ends[1] = {int32_t(l.T)};
    const Rows rows(nullptr, ends, 1);
    const bool panels = by_panels<W>(l, rows, 0);
#pragma omp parallel num_threads(threads_for(l.D * l.I, l.threads))
    {
      Worker<W> worker(weight, panels);
      arrange_all(x_TI, l.T, [&](int64_t t) { return x + t * l.x_stride; }, [](int64_t) { return 0; }, nullptr);
      for_chunks(rows, l.D, [&](int32_t e, int64_t first, int64_t last) {
        second_product(l, worker, bias, x_TI, rows, out, e, first, last);
      });
    }
  }
}

}  // namespace

// What functions are called by the dtype of their tokens; libmoe_ops, which holds those of all codes, has other names.
#if !defined(MOE_NAME)
#define MOE_NAME(dtype) moe_experts_##dtype
#endif

#define MOE_KERNELS(name, T)                                                                                       \
  extern "C" void MOE_NAME(name)(const Layer* l, const T* x, const void* ids, const void* weights,             \
                                     const uint8_t* w13, const uint8_t* w2, const Scales* scales13,                \
                                     const Scales* scales2, const Inputs* inputs13, const Inputs* inputs2,         \
                                     const T* b13, const T* b2, T* out) {                                          \
    experts<MOE_ELEMENT, MOE_INPUTS>(*l, x, ids, weights, w13, w2, *scales13, *scales2, *inputs13, *inputs2, b13,  \
                                     b2, out);                                                                     \
  }                                                                                                                \
  extern "C" void MOE_NAME(linear_##name)(const Layer* l, const T* x, const uint8_t* w, const Scales* scales,      \
                                          const T* bias, T* out) {                                                 \
    linear<MOE_ELEMENT, MOE_INPUTS>(*l, x, w, *scales, bias, out);                                                 \
  }
MOE_KERNELS(bfloat16, bf16)
MOE_KERNELS(float32, float)
