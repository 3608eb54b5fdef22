// Products of many rows of an expert: codes become numbers in the cache once, for all of its rows.
//
// A panel is kPanelRows rows of a weight as the numbers that products take, transposed: the numbers of all its rows in
// one place lie side by side, those that a lane of a sum adds up together (one, or a pair of bfloat16). A place of a
// token, repeated in all lanes, is then multiplied with two registers of the panel, and a lane is the sum of a row.
//
// Numbers are exact where scales are those of 128 columns or more, and each section of columns is multiplied by its
// scales. Smaller groups have their scale multiplied into the numbers, which rounds them: of bfloat16, to 8 bits.
//
// Compiled after weights.h, before quantized.cpp.

namespace {

constexpr int kPanelRows = 2 * kLanes;
// So that the sums stay in registers, two for each token: there are 32 with AVX-512, otherwise 16.
constexpr int kPanelTokens = kVectorBytes == 64 ? 12 : 6;
// Rows of an expert from which on decoding ahead of the products pays: measured with the shapes of Qwen3-30B-A3B.
constexpr int kLeastPanelTokens = 16;

// to[column][row] of kLanes x kLanes words, whose rows are `stride` apart; columns of `to` are kPanelRows apart.
inline void transpose_words(const uint32_t* from, int64_t stride, uint32_t* to) {
#if defined(MOE_AVX512)
  __m512i a[16], b[16];
  MOE_UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * stride);
  MOE_UNROLL for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  MOE_UNROLL for (int i = 0; i < 16; i += 4) {
    MOE_UNROLL for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  MOE_UNROLL for (int c = 0; c < 4; ++c) {
    __m512i even[2], odd[2];
    MOE_UNROLL for (int i = 0; i < 2; ++i) {
      even[i] = _mm512_shuffle_i32x4(a[c + 8 * i], a[c + 8 * i + 4], 0x88);
      odd[i] = _mm512_shuffle_i32x4(a[c + 8 * i], a[c + 8 * i + 4], 0xdd);
    }
    _mm512_storeu_si512(to + c * kPanelRows, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
    _mm512_storeu_si512(to + (c + 4) * kPanelRows, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
    _mm512_storeu_si512(to + (c + 8) * kPanelRows, _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
    _mm512_storeu_si512(to + (c + 12) * kPanelRows, _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
  }
#elif defined(MOE_AVX2)
  __m256i a[8], b[8];
  MOE_UNROLL for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256((const __m256i*)(from + i * stride));
  MOE_UNROLL for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  MOE_UNROLL for (int i = 0; i < 8; i += 4) {
    MOE_UNROLL for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  MOE_UNROLL for (int c = 0; c < 4; ++c) {
    _mm256_storeu_si256((__m256i*)(to + c * kPanelRows), _mm256_permute2x128_si256(a[c], a[c + 4], 0x20));
    _mm256_storeu_si256((__m256i*)(to + (c + 4) * kPanelRows), _mm256_permute2x128_si256(a[c], a[c + 4], 0x31));
  }
#else
  for (int c = 0; c < kLanes; ++c)
    for (int r = 0; r < kLanes; ++r) to[c * kPanelRows + r] = from[r * stride + c];
#endif
}

// The numbers of a row of codes in the order of places, with or without their scales in them. Whether one is NaN that
// no number stands for.
template <Span span, bool scaled, typename W> bool decode_row(const W& w, const Row& row, typename W::X* to) {
  typedef typename W::Math Math;
  typename W::Decode decode;
  const int64_t steps = span == kSteps ? w.span_steps : 1;
  int64_t at = 0;
  for (int64_t s = 0; s < w.spans; ++s) {
    const int64_t first = span == kGroups ? s * w.span_groups : s;
    const Floats one = Floats{} + 1.0f, scale = scaled ? w.spread.template of<span>(row.scale + first) : one;
    Floats zero = {};
    if constexpr (W::Element::kZero) zero = w.spread.template of<span>(row.zero + first);
    for (const int64_t end = std::min(at + steps, w.steps); at < end; ++at) {
      typename Math::Register numbers[W::Decode::kRegisters];
      __builtin_prefetch(row.codes + at * W::kBytes + kPrefetchBytes);
      decode(at < w.full_steps ? row.codes + at * W::kBytes : row.tail, numbers);
      MOE_UNROLL for (int r = 0; r < W::Decode::kRegisters; ++r) {
        if constexpr (scaled || W::Element::kZero) numbers[r] = Math::scaled(numbers[r], zero, scale);
        std::memcpy(to + at * W::kStep + r * Math::kWidth, &numbers[r], sizeof numbers[r]);
      }
    }
  }
  return decode.any_nan();
}

// The numbers of a row of blocks, with their scales and minima in them.
template <typename W> void decode_blocks(const W& w, const Row& row, typename W::X* to) {
  typedef typename W::Math Math;
  typename W::Decode decode;
  const uint8_t* block = row.codes;
  for (int64_t b = 0; b < w.columns / kBlock; ++b, block += W::Element::kBlockBytes) {
    for (int line = 0; line < W::Element::kBlockBytes; line += 64) __builtin_prefetch(block + kPrefetchBytes + line);
    const Factors factors = W::Element::factors(block, row.scale[0]);
    MOE_UNROLL for (int part = 0; part < W::kParts; ++part, to += W::kStep) {
      typename Math::Register numbers[W::Decode::kRegisters];
      decode(block, part, numbers);
      const Floats scale = w.scale_of(factors, part), least = w.least_of(factors, part);
      MOE_UNROLL for (int r = 0; r < W::Decode::kRegisters; ++r) {
        numbers[r] = Math::lowered(numbers[r], scale, least);
        std::memcpy(to + r * Math::kWidth, &numbers[r], sizeof numbers[r]);
      }
    }
  }
}

// The panel that a thread multiplies with, of one weight at a time.
template <typename W> class Panel {
  typedef typename W::X X;
  typedef typename W::Math Math;

 public:
  // `used`: whether any expert has so many rows.
  Panel(const W& w, bool used)
      : w_(w), by_sections_(w.span_groups == 1 && (w.spans == 1 || w.group_columns() >= kLeastSection)),
        sections_(by_sections_ ? w.spans : 1), width_(w.steps * W::kStep), rows_(used * kLanes * width_),
        numbers_(used * kPanelRows * width_), scales_(used * kPanelRows * sections_) {}

  // Decodes row `row_of(r)` of expert e for each r < kPanelRows; -1 is no row.
  template <typename RowOf> void load(int64_t e, const RowOf& row_of, Row& scratch) {
    for (int first = 0; first < kPanelRows; first += kLanes) {
      for (int r = 0; r < kLanes; ++r) load_row(e, row_of(first + r), first + r, scratch);
      const auto words = reinterpret_cast<const uint32_t*>(rows_.data);
      const int64_t stride = width_ / W::kPerLane;
      for (int64_t i = 0; i < stride; i += kLanes)
        transpose_words(words + i, stride, reinterpret_cast<uint32_t*>(numbers_.data) + i * kPanelRows + first);
    }
  }

  // Calls body(r, dots) for rows r of [begin, end), with the products of all rows of the panel; r reads row
  // `source(r)` of `x`.
  template <typename Source, typename Body>
  void multiply(const Arranged<W>& x, int64_t begin, int64_t end, const Source& source, const Body& body) const {
    for (int64_t r = begin; r < end;) {
      const int64_t rest = end - r;
      constexpr int third = kPanelTokens / 3;
      if (rest > 2 * third) r += tile<kPanelTokens>(x, r, end, source, body);
      else if (rest > third) r += tile<2 * third>(x, r, end, source, body);
      else r += tile<third>(x, r, end, source, body);
    }
  }

 private:
  static constexpr int kLeastSection = 128;

  void load_row(int64_t e, int64_t f, int place, Row& scratch) {
    X* const to = rows_.data + place % kLanes * width_;
    if (f < 0) {
      std::fill(to, to + width_, X{});
      for (int64_t s = 0; s < sections_; ++s) scales_.data[s * kPanelRows + place] = 0.0f;
      return;
    }
    w_.load(e, f, scratch);
    const bool nan = decode(scratch, to);
    for (int64_t s = 0; s < sections_; ++s) {
      const float scale = by_sections_ ? scratch.scale[s] : 1.0f;
      scales_.data[s * kPanelRows + place] = nan ? NAN : finite(scale) * W::Decode::kFactor;
    }
  }

  bool decode(const Row& row, X* to) const {
    if constexpr (W::kBlocks) {
      decode_blocks(w_, row, to);
      return false;
    } else {
      if (by_sections_) return decode_row<kSteps, false>(w_, row, to);
      if constexpr (W::kStep > kLeastGroup) {
        if (w_.span_groups > 1) return decode_row<kGroups, true>(w_, row, to);
      }
      return decode_row<kSteps, true>(w_, row, to);
    }
  }

  template <int Tokens, typename Source, typename Body>
  int64_t tile(const Arranged<W>& x, int64_t r0, int64_t end, const Source& source, const Body& body) const {
    const X* tokens[Tokens];
    const float* scales[Tokens];
    for (int t = 0; t < Tokens; ++t) {  // what is past the last row is computed, and left
      const int64_t row = source(std::min<int64_t>(r0 + t, end - 1));
      tokens[t] = x.row(row);
      scales[t] = x.scales_of(row);
    }
    const int64_t steps = width_ / W::kPerLane, each = by_sections_ ? w_.span_steps * (W::kStep / W::kPerLane) : steps;
    alignas(64) Floats dots[Tokens][2] = {};
    for (int64_t s = 0; s < sections_; ++s) {
      Floats part[Tokens][2];
      sum_section<Tokens>(tokens, s * each, std::min(steps, (s + 1) * each), part);
      const Floats* const scale = reinterpret_cast<const Floats*>(scales_.data + s * kPanelRows);
      for (int t = 0; t < Tokens; ++t)
        for (int i = 0; i < 2; ++i) {
          if constexpr (W::Codes::kQuantized) {
            if (x.groups > 1) part[t][i] *= scales[t][s];
          }
          dots[t][i] += part[t][i] * scale[i];
        }
    }
    const int64_t n = std::min<int64_t>(Tokens, end - r0);
    for (int t = 0; t < n; ++t) {
      if constexpr (W::Codes::kQuantized) {
        if (x.groups == 1)
          for (int i = 0; i < 2; ++i) dots[t][i] *= scales[t][0];
      }
      body(r0 + t, dots[t]);
    }
    return n;
  }

  // part[t] = the products of the panel's rows and token t, summed over the words [begin, end) of rows.
  template <int Tokens>
  void sum_section(const X* const* tokens, int64_t begin, int64_t end, Floats (*part)[2]) const {
    constexpr int one = kLanes * W::kPerLane;
    Floats sums[Tokens][2] = {};
    const X* p = numbers_.data + begin * 2 * one;
    for (int64_t i = begin; i < end; ++i, p += 2 * one) {
      const typename Math::Register w[2] = {Math::load(p), Math::load(p + one)};
      MOE_UNROLL for (int t = 0; t < Tokens; ++t) {
        const typename Math::Register token = Math::repeat(tokens[t] + i * W::kPerLane);
        Math::dot(sums[t][0], w[0], token);
        Math::dot(sums[t][1], w[1], token);
      }
    }
    MOE_UNROLL for (int t = 0; t < Tokens; ++t) part[t][0] = sums[t][0], part[t][1] = sums[t][1];
  }

  const W& w_;
  const bool by_sections_;
  const int64_t sections_, width_;
  Buffer<X> rows_;       // kLanes of them, decoded
  Buffer<X> numbers_;    // [words of a row][kPanelRows][kPerLane]
  Buffer<float> scales_;  // [section][kPanelRows]
};

}  // namespace
