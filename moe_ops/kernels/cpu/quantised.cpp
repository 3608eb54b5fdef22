// CPU kernels for layers with quantised weights and few rows per expert, where the time is that of reading codes.
//
// Every row of codes is streamed once for up to kMaxTokens tokens of its expert and decoded in registers. Sums are
// float32, and each group's sum is multiplied by its scale once: sum_g scale_g * (sum_d code_d x_d - zero_g sum_d x_d).
// Tokens are laid out first in the order in which codes come (codes.h), and quantised there if the layer says so
// (inputs.h). The whole layer is one parallel region.
//
// Compiled after inputs.h, once for each element type (MOE_ELEMENT) and type of inputs (MOE_INPUTS).

// Shared with Python by position: see kernels/cpu/quantised.py. The scales of one stacked weight [E, rows, columns].
struct Scales {
  const void* scale;
  const uint8_t* zero;
  int64_t group_rows, group_columns;   // that share a scale
  int64_t row_groups, column_groups;   // of one expert
  int32_t kind;                        // 0 float32, 1 bfloat16, 2 float16, 3 e8m0
};

// Sums stay in registers if the loops over them are gone early.
#define MOE_UNROLL _Pragma("GCC unroll 8")

namespace {

constexpr int kLanes = kVectorBytes / 4;

float from_float16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, fields = half & 0x7fffu;
  if (fields >= 0x7c00u) return from_bits(sign | 0x7f800000u | (fields << 13));  // infinity, NaN
  return from_bits(sign | (fields << 13)) * from_bits(0x77800000u);              // 2**112: of the two exponents' biases
}

float from_e8m0(uint8_t code) {
  return from_bits(code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : uint32_t(code) << 23);
}

// The same for many.
inline void from_e8m0(const uint8_t* codes, int64_t n, float* to) {
  int64_t i = 0;
#if defined(MOE_AVX512) || defined(MOE_AVX2)
  const __m256i half = _mm256_set1_epi32(0x00400000);
  for (; i + 8 <= n; i += 8) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(codes + i)));
    const __m256i special = _mm256_or_si256(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()),
                                            _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255)));
    const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(code, 23), _mm256_and_si256(special, half));
    _mm256_storeu_si256((__m256i*)(to + i), bits);
  }
#endif
  for (; i < n; ++i) to[i] = from_e8m0(codes[i]);
}

// Aligned memory that is not initialised.
template <typename T> struct Buffer {
  std::unique_ptr<char[]> memory;
  T* data;
  explicit Buffer(int64_t size) : memory(new char[size * sizeof(T) + 64]) {
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
  }
};

// How the columns of a span divide into steps and groups.
enum Span {
  kSteps,   // several steps of one group
  kGroup,   // one step of one group
  kGroups,  // one step of two or four groups
};

// Which of the scales of a span each lane has.
struct Spread {
  alignas(64) int32_t index[kLanes];
  bool two;
  template <Span span> Floats of(const float* p) const {
    if constexpr (span != kGroups) return Floats{} + *p;
#if defined(MOE_AVX512)
    const __m128 some = two ? _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p)) : _mm_loadu_ps(p);
    return (Floats)_mm512_permutexvar_ps(_mm512_load_si512(index), _mm512_castps128_ps512(some));
#elif defined(MOE_AVX2)
    const __m128 some = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p));  // of two
    return (Floats)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(some), _mm256_load_si256((const __m256i*)index));
#else
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = p[index[i]];
    return v;
#endif
  }
};

// A row of codes with its scales as float32, and the last step of codes if the row ends inside it.
struct Row {
  const uint8_t* codes;
  const float *scale, *zero;
  Buffer<float> scales, zeros;  // where what is stored is not float32, or does not fill the last span
  alignas(64) uint8_t tail[64];
  explicit Row(int64_t groups) : scales(groups), zeros(groups) {}
};

// A stacked weight of one element type. A span is what is summed before scales are multiplied in: a group of columns,
// or a step where that holds several groups.
template <typename E, typename M, typename I> struct Weight {
  typedef E Element;
  typedef M Math;
  typedef I Codes;  // of inputs
  typedef typename M::X X;
  typedef Decoder<E, M> Decode;
  static constexpr int kStep = Decode::kStep, kBytes = kStep * E::kBits / 8, kPerLane = M::kWidth / kLanes;
  static constexpr bool kIntegers = std::is_same_v<M, IntMath>;

  const uint8_t* codes;
  int64_t expert_stride, row_stride, columns;
  Scales scales;
  int64_t steps, full_steps, span_steps, span_groups, spans, full_spans;
  Spread spread;
  bool scales_as_stored;

  Weight(const uint8_t* codes, int64_t expert_stride, int64_t row_stride, int64_t columns, const Scales& scales)
      : codes(codes), expert_stride(expert_stride), row_stride(row_stride), columns(columns), scales(scales) {
    const int64_t group = scales.group_columns;
    const bool whole = group >= columns;
    steps = (columns + kStep - 1) / kStep;
    full_steps = columns / kStep;
    span_steps = whole ? steps : std::max<int64_t>(group / kStep, 1);
    span_groups = whole ? 1 : std::max<int64_t>(kStep / group, 1);
    spans = (steps + span_steps - 1) / span_steps;
    full_spans = full_steps / span_steps;
    spread.two = span_groups == 2;
    for (int i = 0; i < kLanes; ++i)
      spread.index[i] = span_groups == 1 ? 0 : int32_t(Decode::column(i * kPerLane) / group);
    scales_as_stored = scales.kind == 0 && padded_groups() == scales.column_groups;
  }

  // Scales that a row may be asked for: those of a whole last span.
  int64_t padded_groups() const { return spans * span_groups; }

  void load(int64_t e, int64_t f, Row& row) const {
    row.codes = codes + e * expert_stride + f * row_stride;
    if (full_steps < steps) {
      const int64_t rest = (columns - full_steps * kStep) * E::kBits / 8;
      std::memset(row.tail, 0, sizeof row.tail);
      std::memcpy(row.tail, row.codes + full_steps * kBytes, rest);
    }
    const int64_t group_row = scales.group_rows == 1 ? f : scales.row_groups == 1 ? 0 : f / scales.group_rows;
    const int64_t at = (e * scales.row_groups + group_row) * scales.column_groups;
    if (scales_as_stored) row.scale = static_cast<const float*>(scales.scale) + at;
    else load_scales(at, row);
    if constexpr (E::kZero) load_zeros(at, row);
  }

 private:
  void load_scales(int64_t at, Row& row) const {
    const int64_t n = scales.column_groups;
    float* const to = row.scales.data;
    switch (scales.kind) {
      case 0: std::copy_n(static_cast<const float*>(scales.scale) + at, n, to); break;
      case 1: for (int64_t i = 0; i < n; ++i) to[i] = to_float(static_cast<const bf16*>(scales.scale)[at + i]); break;
      case 2:
        for (int64_t i = 0; i < n; ++i) to[i] = from_float16(static_cast<const uint16_t*>(scales.scale)[at + i]);
        break;
      default: from_e8m0(static_cast<const uint8_t*>(scales.scale) + at, n, to);
    }
    for (int64_t i = n; i < padded_groups(); ++i) to[i] = 0.0f;
    row.scale = to;
  }

  void load_zeros(int64_t at, Row& row) const {
    const int64_t n = scales.column_groups;
    float* const to = row.zeros.data;
    for (int64_t i = 0; i < n; ++i) to[i] = float(scales.zero[at + i]);
    for (int64_t i = n; i < padded_groups(); ++i) to[i] = 0.0f;
    row.zero = to;
  }
};

// Rows of numbers in the order in which a weight's codes are decoded, with zeros after the last column; the sums of
// each lane in each span, for elements with zero points; and, of quantised rows, the scales.
template <typename W> struct Arranged {
  typedef typename W::X X;
  typedef typename W::Codes Codes;
  const W& w;
  const Inputs inputs;
  int64_t width, sums, groups;
  Buffer<X> x;
  Buffer<float> sum, scale;
  Buffer<int32_t> offset;
  std::vector<uint32_t> largest;  // of each row, as bits
  uint32_t largest_of_all = 0;
  int columns[W::kStep];

  Arranged(const W& w, const Inputs& inputs, int64_t rows)
      : w(w), inputs(inputs), width(w.steps * W::kStep), sums(W::Element::kZero ? w.spans * kLanes : 0),
        groups(Codes::kQuantised ? (w.columns + inputs.group_columns - 1) / inputs.group_columns : 0), x(rows * width),
        sum(rows * sums), scale(rows * groups), offset(W::kIntegers ? rows : 0),
        largest(needs_largest() ? rows : 0) {
    for (int i = 0; i < W::kStep; ++i) columns[i] = W::Decode::column(i);
  }
  const X* row(int64_t r) const { return x.data + r * width; }
  const float* sums_of(int64_t r) const { return sum.data + r * sums; }
  const float* scales_of(int64_t r) const { return scale.data + r * groups; }

  // Whether a row's scale is that of its expert.
  bool by_expert() const { return Codes::kQuantised && inputs.given_experts > 1; }
  // Whether all rows share a scale that their values make: then `see` comes first, for all of them.
  bool needs_largest() const { return Codes::kQuantised && inputs.one && !inputs.given; }
  template <typename T> void see(int64_t r, const T* from) { largest[r] = largest_bits(from, w.columns); }
  void seen(int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) largest_of_all = std::max(largest_of_all, largest[r]);
  }

  // Row r is one of expert e, which is read where every expert has a scale. `scratch` holds a row.
  template <typename T> void arrange(int64_t r, const T* from, int64_t e, float* scratch) {
    X* const to = x.data + r * width;
    if constexpr (Codes::kQuantised) {
      round_row(r, from, e, scratch);
      place(scratch, to);
    } else {
      place(from, to);
    }
    if constexpr (W::kIntegers) {
      int32_t total = 0;
      for (int64_t i = 0; i < width; ++i) total += to[i];
      offset.data[r] = W::Math::kOffset * total;
    }
    if constexpr (W::Element::kZero) {
      float* lanes = sum.data + r * sums;
      std::fill(lanes, lanes + sums, 0.0f);
      for (int64_t i = 0; i < width; ++i)
        lanes[i / W::kStep / w.span_steps * kLanes + i % W::Math::kWidth / W::kPerLane] += to_float(to[i]);
    }
  }

 private:
  template <typename T> void round_row(int64_t r, const T* from, int64_t e, float* to) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * inputs.group_columns, n = std::min(inputs.group_columns, w.columns - first);
      const float found = inputs.given ? inputs.given[by_expert() ? e : 0]
                          : inputs.one ? scale_of<Codes>(largest_of_all)
                                       : scale_of<Codes>(largest_bits(from + first, n));
      scale.data[r * groups + g] = found;
      round_all<Codes>(from + first, n, found, to + first);
    }
  }

  template <typename T> void place(const T* from, X* to) const {
    const auto copy = [](const T* value, X* place) {
      if constexpr (std::is_same_v<X, T> || W::kIntegers) *place = X(*value);
      else store(place, to_float(*value));
    };
    const int64_t full = w.full_steps * W::kStep;
    for (int64_t first = 0; first < full; first += W::kStep)
      for (int i = 0; i < W::kStep; ++i) copy(from + first + columns[i], to + first + i);
    for (int i = 0; full + i < width; ++i) {
      if (full + columns[i] < w.columns) copy(from + full + columns[i], to + full + i);
      else to[full + i] = X{};
    }
  }
};

// What a product reads of up to kMaxTokens rows.
template <typename X> struct Tile {
  const X* x[kMaxTokens];
  const float* sums[kMaxTokens];
  const float* scales[kMaxTokens];
  int32_t offsets[kMaxTokens];
  bool grouped;  // a scale for each span, not for the whole row
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
    dots[t] = float(int32_t(total - uint32_t(tile.offsets[t]))) * row.scale[0] * tile.scales[t][0];
  }
}

// dots[t] = w . x[t] for one row of a weight and `Tokens` rows of numbers.
template <Span span, int Tokens, typename W>
void block(const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  typedef typename W::Math Math;
  constexpr int registers = W::Decode::kRegisters;
  // Independent sums, so that a product need not wait for the one before; those of other spans are independent.
  constexpr int chains = span == kSteps || Tokens <= 2 ? 2 : 1;
  typename W::Decode decode;
  Floats total[Tokens] = {}, part[Tokens][chains];

  const auto begin = [&]() __attribute__((always_inline)) {
    MOE_UNROLL for (int t = 0; t < Tokens; ++t)
      MOE_UNROLL for (int c = 0; c < chains; ++c) part[t][c] = Floats{};
  };
  const auto step = [&](const uint8_t* codes, int64_t at) __attribute__((always_inline)) {
    typename Math::Register numbers[registers];
    decode(codes, numbers);
    MOE_UNROLL for (int t = 0; t < Tokens; ++t)
      MOE_UNROLL for (int r = 0; r < registers; ++r)
        Math::dot(part[t][r % chains], numbers[r], tile.x[t] + at * W::kStep + r * Math::kWidth);
  };
  const auto end = [&](int64_t s) __attribute__((always_inline)) {
    const int64_t first = span == kGroups ? s * w.span_groups : s;
    const Floats scale = w.spread.template of<span>(row.scale + first);
    MOE_UNROLL for (int t = 0; t < Tokens; ++t) {
      MOE_UNROLL for (int c = 1; c < chains; ++c) part[t][0] += part[t][c];
      if constexpr (W::Element::kZero) {
        Floats sums;
        std::memcpy(&sums, tile.sums[t] + s * kLanes, kVectorBytes);
        part[t][0] -= w.spread.template of<span>(row.zero + first) * sums;
      }
      if constexpr (W::Codes::kQuantised) {
        if (tile.grouped) part[t][0] *= tile.scales[t][s];
      }
      total[t] += part[t][0] * scale;
    }
  };

  const uint8_t* p = row.codes;
  const int64_t steps = span == kSteps ? w.span_steps : 1;
  int64_t at = 0;
  for (int64_t s = 0; s < w.full_spans; ++s) {
    begin();
    for (int64_t i = 0; i < steps; ++i, ++at, p += W::kBytes) {
      __builtin_prefetch(p + kPrefetchBytes);  // on AMD too: rows of gate and up take turns
      step(p, at);
    }
    end(s);
  }
  if (w.full_spans < w.spans) {
    begin();
    for (; at < w.full_steps; ++at, p += W::kBytes) step(p, at);
    if (at < w.steps) step(row.tail, at);
    end(w.full_spans);
  }
  for (int t = 0; t < Tokens; ++t) {
    dots[t] = decode.any_nan() ? NAN : sum(total[t]) * W::Decode::kFactor;
    if constexpr (W::Codes::kQuantised) {
      if (!tile.grouped) dots[t] *= tile.scales[t][0];
    }
  }
}

// The same for a number of tokens up to `Most` that is known only now.
template <Span span, int Most = kMaxTokens, typename W>
void block_of(int tokens, const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  if constexpr (Most > 1) {
    if (tokens < Most) return block_of<span, Most - 1>(tokens, w, row, tile, dots);
  }
  if constexpr (W::kIntegers) block_of_integers<Most>(w, row, tile, dots);
  else block<span, Most>(w, row, tile, dots);
}

template <typename W>
void dot_row(int tokens, const W& w, const Row& row, const Tile<typename W::X>& tile, float* dots) {
  if constexpr (W::kIntegers) return block_of<kSteps>(tokens, w, row, tile, dots);
  if constexpr (W::kStep > kLeastGroup) {
    if (w.span_groups > 1) return block_of<kGroups>(tokens, w, row, tile, dots);
  }
  if (w.span_steps > 1) block_of<kSteps>(tokens, w, row, tile, dots);
  else block_of<kGroup>(tokens, w, row, tile, dots);
}

// Calls body(r0, tokens, tile) for the rows of an expert, up to kMaxTokens at once; row r reads `source(r)` of `x`.
template <typename W, typename Source, typename Body>
void for_tiles(const Rows& rows, int32_t e, const Arranged<W>& x, const Source& source, const Body& body) {
  Tile<typename W::X> tile;
  tile.grouped = x.groups > 1;
  for (int32_t r0 = rows.begin(e); r0 < rows.ends[e]; r0 += kMaxTokens) {
    const int tokens = std::min<int32_t>(kMaxTokens, rows.ends[e] - r0);
    for (int t = 0; t < tokens; ++t) {
      tile.x[t] = x.row(source(r0 + t));
      tile.sums[t] = x.sums_of(source(r0 + t));
      tile.scales[t] = x.scales_of(source(r0 + t));
      if constexpr (W::kIntegers) tile.offsets[t] = x.offset.data[source(r0 + t)];
    }
    body(r0, tokens, tile);
  }
}

// h[r, i] = act(w13[gate row i] . x + b13, w13[up row i] . x + b13) for rows i of [first, last).
template <typename T, typename W>
void first_product(const Layer& l, const W& w, const T* bias, const Arranged<W>& x, const Rows& rows, T* h,
                   int32_t e, int64_t first, int64_t last, Row& scratch) {
  const bool routed = x.by_expert();
  const Activation& a = l.activation;
  const int64_t up_distance = a.interleaved ? 1 : l.I;
  float gates[kMaxTokens], ups[kMaxTokens] = {};
  const auto source = [&](int64_t r) { return routed ? r : rows.pair(r) / l.K; };
  for_tiles(rows, e, x, source, [&](int64_t r0, int tokens, const auto& tile) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t gate_row = a.interleaved ? 2 * i : i;
      w.load(e, gate_row, scratch);
      dot_row(tokens, w, scratch, tile, gates);
      if (a.gated) {
        w.load(e, gate_row + up_distance, scratch);
        dot_row(tokens, w, scratch, tile, ups);
      }
      const T* b = bias ? bias + e * l.F + gate_row : nullptr;
      for (int t = 0; t < tokens; ++t) {
        float g = gates[t] + (b ? to_float(b[0]) : 0.0f);
        float u = a.gated ? ups[t] + (b ? to_float(b[up_distance]) : 0.0f) : 0.0f;
        if constexpr (W::Codes::kQuantised) {  // rounded where the definition rounds: other codes are a step away
          g = round_to<T>(g);
          u = round_to<T>(u);
        }
        store(h + (r0 + t) * l.I + i, activate(a, g, u));
      }
    }
  });
}

// y[pair of r, d] = w2[d] . h[r] + b2 for rows d of [first, last).
template <typename T, typename W>
void second_product(const Layer& l, const W& w, const T* bias, const Arranged<W>& h, const Rows& rows, T* y, int32_t e,
                    int64_t first, int64_t last, Row& scratch) {
  float dots[kMaxTokens];
  for_tiles(rows, e, h, [](int64_t r) { return r; }, [&](int64_t r0, int tokens, const auto& tile) {
    for (int64_t d = first; d < last; ++d) {
      w.load(e, d, scratch);
      dot_row(tokens, w, scratch, tile, dots);
      const float b = bias ? to_float(bias[e * l.D + d]) : 0.0f;
      for (int t = 0; t < tokens; ++t) store(y + rows.pair(r0 + t) * l.D + d, dots[t] + b);
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
#pragma omp parallel num_threads(threads_for(int64_t(rows.active.size()) * l.F * l.D, l.threads))
  {
    Row scratch(std::max(first.padded_groups(), second.padded_groups()));
    const Buffer<float> numbers(Codes::kQuantised ? std::max(l.D, l.I) : 0);
    if (routed)
      arrange_all(x_TD, used, [&](int64_t r) { return x + order[r] / l.K * l.x_stride; }, expert, numbers.data);
    else
      arrange_all(x_TD, l.T, [&](int64_t t) { return x + t * l.x_stride; }, [](int64_t) { return 0; }, numbers.data);
    for_chunks(rows, l.I, [&](int32_t e, int64_t begin, int64_t end) {
      first_product(l, first, b13, x_TD, rows, h.data, e, begin, end, scratch);
    });
    arrange_all(h_RI, used, [&](int64_t r) { return h.data + r * l.I; }, expert, numbers.data);
    for_chunks(rows, l.D, [&](int32_t e, int64_t begin, int64_t end) {
      second_product(l, second, b2, h_RI, rows, y.data, e, begin, end, scratch);
    });
#pragma omp for schedule(static)
    for (int64_t t = 0; t < l.T; ++t) combine_token(l, t, y.data, has_row.data(), weights, out);
  }
}

}  // namespace

#define MOE_KERNELS(name, T)                                                                                       \
  extern "C" void moe_experts_##name(const Layer* l, const T* x, const void* ids, const void* weights,             \
                                     const uint8_t* w13, const uint8_t* w2, const Scales* scales13,                \
                                     const Scales* scales2, const Inputs* inputs13, const Inputs* inputs2,         \
                                     const T* b13, const T* b2, T* out) {                                          \
    experts<MOE_ELEMENT, MOE_INPUTS>(*l, x, ids, weights, w13, w2, *scales13, *scales2, *inputs13, *inputs2, b13,  \
                                     b2, out);                                                                     \
  }
MOE_KERNELS(bfloat16, bf16)
MOE_KERNELS(float32, float)
