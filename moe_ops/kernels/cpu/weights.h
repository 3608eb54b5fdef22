// Weights of codes with their scales, and the rows of numbers that they are multiplied with, as products read them.
//
// Compiled after inputs.h, before panels.h.

namespace {

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

// How the columns of a span divide into steps and groups.
enum Span {
  kSteps,   // several steps of one group
  kGroup,   // one step of one group
  kGroups,  // one step of two, four or eight groups
};

// Which of the scales of a span each lane has.
struct Spread {
  alignas(64) int32_t index[kLanes];
  int64_t groups;
  template <Span span> Floats of(const float* p) const {
    if constexpr (span != kGroups) return Floats{} + *p;
#if defined(MOE_AVX512)
    const __m512i at = _mm512_load_si512(index);
    if (groups == 8) return (Floats)_mm512_permutexvar_ps(at, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
    const __m128 some = groups == 2 ? _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p)) : _mm_loadu_ps(p);
    return (Floats)_mm512_permutexvar_ps(at, _mm512_castps128_ps512(some));
#elif defined(MOE_AVX2)
    const __m128 some = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p));  // of two
    return (Floats)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(some), _mm256_load_si256((const __m256i*)index));
#else
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = p[index[i]];
    return v;
#endif
  }
  // The same of what a block says, from `first` on; elsewhere than with AVX-512 a step of a block is one group.
  Floats of(const Factors& factors, int first) const {
#if defined(MOE_AVX512)
    const __m512i at = _mm512_add_epi32(_mm512_load_si512(index), _mm512_set1_epi32(first));
    return (Floats)_mm512_permutexvar_ps(at, _mm512_load_ps(factors.all));
#else
    return Floats{} + factors.all[first];
#endif
  }
};

// What a sum is multiplied by for a scale: an infinite one makes NaN, as infinity times a code of zero does.
inline float finite(float scale) { return std::isfinite(scale) ? scale : NAN; }

// A row of codes with its scales as float32, and the last step of codes if the row ends inside it.
struct Row {
  const uint8_t* codes;
  const float *scale, *zero;    // or minima
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
  static constexpr bool kIntegers = std::is_same_v<M, IntMath>, kBlocks = kInBlocks<E>, kMinima = kHasMinima<E>;
  static constexpr bool kSums = E::kZero || kMinima;  // whether sums of lanes, or of groups, are multiplied, too
  static constexpr int kStep = Decode::kStep, kPerLane = M::kWidth / kLanes;
  static constexpr int kParts = kBlocks ? kBlock / kStep : 1;  // the steps of a block
  static constexpr int kBytes = int(bytes_of<E>(kStep * kParts)) / kParts;  // of a step, on average

  const uint8_t* codes;
  int64_t expert_stride, row_stride, columns;
  Scales scales;
  int64_t steps, full_steps, span_steps, span_groups, spans, full_spans;
  Spread spread;
  bool scales_as_stored;

  Weight(const uint8_t* codes, int64_t expert_stride, int64_t row_stride, int64_t columns, const Scales& scales)
      : codes(codes), expert_stride(expert_stride), row_stride(row_stride), columns(columns), scales(scales) {
    const int64_t group = group_columns();
    const bool whole = group >= columns;
    steps = (columns + kStep - 1) / kStep;
    full_steps = columns / kStep;
    span_steps = whole ? steps : std::max<int64_t>(group / kStep, 1);
    span_groups = whole ? 1 : std::max<int64_t>(kStep / group, 1);
    spans = (steps + span_steps - 1) / span_steps;
    full_spans = full_steps / span_steps;
    spread.groups = span_groups;
    for (int i = 0; i < kLanes; ++i)
      spread.index[i] = span_groups == 1 ? 0 : int32_t(Decode::column(i * kPerLane) / group);
    scales_as_stored = scales.kind == 0 && padded_groups() == scales.column_groups;
  }

  // Columns that share a scale.
  int64_t group_columns() const {
    if constexpr (kBlocks) return E::kGroup;
    else return scales.group_columns;
  }

  // Scales that a row may be asked for: those of a whole last span, or the one above blocks.
  int64_t padded_groups() const { return kBlocks ? scales.column_groups : spans * span_groups; }

  // What the lanes of a step of a block are multiplied by, and have subtracted.
  Floats scale_of(const Factors& factors, int part) const { return spread.of(factors, part * (kStep / E::kGroup)); }
  Floats least_of(const Factors& factors, int part) const {
    return kMinima ? spread.of(factors, kBlock / E::kGroup + part * (kStep / E::kGroup)) : Floats{};
  }

  void load(int64_t e, int64_t f, Row& row) const {
    row.codes = codes + e * expert_stride + f * row_stride;
    if (full_steps < steps) {
      const int64_t rest = bytes_of<E>(columns - full_steps * kStep);
      std::memset(row.tail, 0, sizeof row.tail);
      std::memcpy(row.tail, row.codes + full_steps * kBytes, rest);
    }
    const int64_t group_row = scales.group_rows == 1 ? f : scales.row_groups == 1 ? 0 : f / scales.group_rows;
    const int64_t at = (e * scales.row_groups + group_row) * scales.column_groups;
    if (scales_as_stored) row.scale = static_cast<const float*>(scales.scale) + at;
    else load_scales(at, row);
    if constexpr (E::kZero) load_zeros(at, row);
  }

  // Whether a scale of a row is, of which `finite` makes NaN.
  __attribute__((cold, noinline)) bool any_infinite(const Row& row) const {
    const auto infinite = [](float scale) { return std::isinf(scale); };
    if constexpr (kBlocks) {
      for (int64_t b = 0; b < columns / kBlock; ++b) {
        const Factors factors = E::factors(row.codes + b * E::kBlockBytes, row.scale[0]);
        if (std::any_of(factors.all, factors.all + kBlock / E::kGroup, infinite)) return true;
      }
      return false;
    }
    return std::any_of(row.scale, row.scale + scales.column_groups, infinite);
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

// Rows of numbers in the order in which a weight's codes are decoded, with zeros after the last column. For elements
// with zero points, the sums of each lane in each span, with minima those of each group, and whether all are numbers;
// of quantised rows, the scales.
template <typename W> struct Arranged {
  typedef typename W::X X;
  typedef typename W::Codes Codes;
  const W& w;
  const Inputs inputs;
  int64_t width, stride, sums, groups;  // a cache line more than the width: rows a page apart would share its ways
  Buffer<X> x;
  Buffer<float> sum, scale;
  Buffer<int32_t> offset;
  std::vector<uint32_t> largest;  // of each row, as bits
  std::vector<char> infinite;     // for each row, whether an infinite number or a NaN is in its sums
  uint32_t largest_of_all = 0;
  int columns[W::kStep];

  Arranged(const W& w, const Inputs& inputs, int64_t rows)
      : w(w), inputs(inputs), width(w.steps * W::kStep), stride(width + 64 / int64_t(sizeof(X))),
        sums(W::kMinima ? w.columns / kBlock * kLanes : W::kSums ? w.spans * kLanes : 0),
        groups(Codes::kQuantized ? (w.columns + inputs.group_columns - 1) / inputs.group_columns : 0), x(rows * stride),
        sum(rows * sums), scale(rows * groups), offset(W::kIntegers ? rows : 0),
        largest(needs_largest() ? rows : 0), infinite(W::kSums ? rows : 0) {
    for (int i = 0; i < W::kStep; ++i) columns[i] = W::Decode::column(i);
  }
  const X* row(int64_t r) const { return x.data + r * stride; }
  const float* sums_of(int64_t r) const { return sum.data + r * sums; }
  const float* scales_of(int64_t r) const { return scale.data + r * groups; }

  // Whether a row's scale is that of its expert.
  bool by_expert() const { return Codes::kQuantized && inputs.given_experts > 1; }
  // Whether all rows share a scale that their values make: then `see` comes first, for all of them.
  bool needs_largest() const { return Codes::kQuantized && inputs.one && !inputs.given; }
  template <typename T> void see(int64_t r, const T* from) { largest[r] = largest_bits(from, w.columns); }
  void seen(int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) largest_of_all = std::max(largest_of_all, largest[r]);
  }

  // Row r is one of expert e, which is read where every expert has a scale. `scratch` holds a row.
  template <typename T> void arrange(int64_t r, const T* from, int64_t e, float* scratch) {
    X* const to = x.data + r * stride;
    if constexpr (Codes::kQuantized) {
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
    if constexpr (W::kSums) {
      float* lanes = sum.data + r * sums;
      std::fill(lanes, lanes + sums, 0.0f);
      if constexpr (W::kMinima) {
        float* const last = lanes + kLanes - kBlock / kLeastGroup;  // of a block's lanes, beside its minima
        for (int64_t i = 0; i < width; ++i) {
          const int64_t group = (i / W::kStep * W::kStep + columns[i % W::kStep]) / kLeastGroup;
          last[group / 8 * kLanes + group % 8] += to_float(to[i]);
        }
      } else {
        for (int64_t i = 0; i < width; ++i)
          lanes[i / W::kStep / w.span_steps * kLanes + i % W::Math::kWidth / W::kPerLane] += to_float(to[i]);
      }
      infinite[r] = !std::all_of(lanes, lanes + sums, [](float sum) { return std::isfinite(sum); });
    }
  }

 private:
  template <typename T> void round_row(int64_t r, const T* from, int64_t e, float* to) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * inputs.group_columns, n = std::min(inputs.group_columns, w.columns - first);
      if (inputs.of_rows) {
        scale.data[r * groups + g] = inputs.of_rows[r * groups + g];
        for (int64_t i = first; i < first + n; ++i) to[i] = to_float(from[i]);
        continue;
      }
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

}  // namespace
