// Products of many rows of an expert: codes become numbers in the cache once, for all of its rows.
//
// Numbers are exact where scales are those of 128 columns or more, and each section of columns is multiplied by its
// scales. Smaller groups have their scale multiplied into the numbers, which rounds them: of bfloat16, to 8 bits.
//
// Compiled after weights.h and tiles.h, before quantized.cpp.

namespace {

// Rows of an expert from which on decoding ahead of the products pays: measured with the shapes of Qwen3-30B-A3B.
constexpr int kLeastPanelTokens = 16;

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
    const char* rows[kLanes];
    for (int r = 0; r < kLanes; ++r) rows[r] = reinterpret_cast<const char*>(rows_.data + r * width_);
    for (int first = 0; first < kPanelRows; first += kLanes) {
      for (int r = 0; r < kLanes; ++r) load_row(e, row_of(first + r), first + r, scratch);
      for (int64_t i = 0; i < width_ / W::kPerLane; i += kLanes)
        transpose_words(rows, i * 4, reinterpret_cast<uint32_t*>(numbers_.data) + i * kPanelRows + first);
    }
  }

  // Calls body(r, dots) for rows r of [begin, end), with the products of all rows of the panel; r reads row
  // `source(r)` of `x`.
  template <typename Source, typename Body>
  void multiply(const Arranged<W>& x, int64_t begin, int64_t end, const Source& source, const Body& body) const {
    for (int64_t r = begin; r < end;)
      r += with_tokens(end - r, [&](auto tokens) { return tile<tokens.value>(x, r, end, source, body); });
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
      const int64_t first = s * each;
      sum_words<Math, Tokens>(numbers_.data + first * 2 * Math::kWidth, tokens, first,
                              std::min(steps, first + each) - first, part);
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

  const W& w_;
  const bool by_sections_;
  const int64_t sections_, width_;
  Buffer<X> rows_;       // kLanes of them, decoded
  Buffer<X> numbers_;    // [words of a row][kPanelRows][kPerLane]
  Buffer<float> scales_;  // [section][kPanelRows]
};

}  // namespace
