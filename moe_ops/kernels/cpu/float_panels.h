// Panels of weights that are no codes, for more rows of an expert than streams are best for: with many rows a weight is
// laid out in the cache once for all of them, with few it is transposed in registers, and its numbers multiplied there.
// Sums are the same, to the bit, whatever the number of rows and whichever rows these are.
//
// Compiled after tiles.h, before experts.cpp.

namespace {

// Rows of an expert from which on this is faster than streams: measured with weights of 1024 x 256 in no cache.
constexpr int kLeastPanelRows = 4;
// Rows of an expert up to which nothing is laid out. Their sums, two each, stay in registers beside a block.
constexpr int kFewRows = kVectorBytes == 64 ? 6 : 4;

// The panel that a thread multiplies with, of weights with so many columns.
template <typename T> class FloatPanel {
  typedef typename MathOf<T>::type Math;
  typedef typename Math::X X;
  typedef typename Math::Register Register;
  // Of a weight's words of 32 bits, kLanes from each row are a block. A place is what a lane adds up at once; a word of
  // bfloat16 is one, or two where products are those of float32.
  static constexpr int kPerWord = 4 / sizeof(T), kPerLane = Math::kWidth / kLanes, kParts = kPerWord / kPerLane;
  static constexpr int kBlockColumns = kLanes * kPerWord, kBlockPlaces = kLanes * kParts;

 public:
  // `used`: whether there is an expert to multiply so; `laid_out`: whether one of these has more than kFewRows.
  FloatPanel(int64_t columns, bool used, bool laid_out)
      : columns_(columns), places_((columns + kPerLane - 1) / kPerLane),
        blocks_((columns + kBlockColumns - 1) / kBlockColumns), whole_(columns / kBlockColumns),
        numbers_(laid_out * blocks_ * kBlockPlaces * kPerLane * kPanelRows), none_(used * columns),
        tokens_(used && !as_they_lie() ? kPanelTokens * places_ * kPerLane : 0) {
    std::fill_n(none_.data, used * columns, T{});
  }

  // Takes rows row(place) for each place < kPanelRows, null for none, to be multiplied with so many of the expert.
  template <typename RowOf> void load(const RowOf& row, int64_t expert_rows) {
    for (int place = 0; place < kPanelRows; ++place) {
      rows_[place] = row(place);
      if (!rows_[place]) rows_[place] = none_.data;
    }
    few_ = expert_rows <= kFewRows;
    if (!few_) lay_out();
  }

  // Calls body(r, dots) for rows r of [begin, end), with the products of all rows of the panel; `source(r)` is row r.
  template <typename Source, typename Body>
  void multiply(int64_t begin, int64_t end, const Source& source, const Body& body) {
    const X* tokens[kPanelTokens];
    Floats dots[kPanelTokens][2];
    for (int64_t r = begin; r < end;) {
      const int64_t most = few_ ? kFewRows : kPanelTokens, n = std::min(most, end - r);
      for (int64_t t = 0; t < most; ++t)  // what is past the last row may be computed, and is left
        tokens[t] = t < n ? as_numbers(source(r + t), t) : tokens[n - 1];
      if (few_) sum_few<kFewRows>(n, tokens, dots);
      else sum_many(n, tokens, dots);
      for (int64_t t = 0; t < n; ++t) body(r + t, dots[t]);
      r += n;
    }
  }

 private:
  // Whether rows of tokens are read where they are: they have the numbers of products, and no part of a lane.
  bool as_they_lie() const { return std::is_same_v<X, T> && columns_ % kPerLane == 0; }

  // block[place][row] of kLanes rows, zero after the last column.
  __attribute__((always_inline)) void transposed(const T* const* rows, int64_t b,
                                                 Register (&block)[kBlockPlaces]) const {
    const auto bytes = reinterpret_cast<const char* const*>(rows);
    Words words[kLanes];
    if (b < whole_) {
      // The same columns of the rows of the next panel, which hardware does not see coming.
      const auto address = [&](int r) { return reinterpret_cast<uintptr_t>(bytes[r]) + b * kVectorBytes; };
      const uintptr_t next = kLanes * (address(1) - address(0));
      MOE_UNROLL for (int r = 0; r < kLanes; ++r)
        __builtin_prefetch(reinterpret_cast<const char*>(address(r) + next), 0, 2);
      transpose(bytes, b * kVectorBytes, words);
    } else {
      transpose_last(rows, words);
    }
    MOE_UNROLL for (int i = 0; i < kLanes; ++i) {
      if constexpr (kParts == 1) {
        block[i] = (Register)words[i];
      } else {
        block[2 * i] = (Register)(words[i] << 16);
        block[2 * i + 1] = (Register)(words[i] & 0xffff0000u);
      }
    }
  }

  __attribute__((noinline)) void transpose_last(const T* const* rows, Words (&words)[kLanes]) const {
    alignas(64) T copies[kLanes][kBlockColumns] = {};
    const char* bytes[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      std::copy_n(rows[r] + whole_ * kBlockColumns, columns_ - whole_ * kBlockColumns, copies[r]);
      bytes[r] = reinterpret_cast<const char*>(copies[r]);
    }
    transpose(bytes, 0, words);
  }

  __attribute__((noinline)) void lay_out() {
    for (int first = 0; first < kPanelRows; first += kLanes)
      for (int64_t b = 0; b < blocks_; ++b) {
        Register block[kBlockPlaces];
        transposed(rows_ + first, b, block);
        X* const to = numbers_.data + (b * kBlockPlaces * kPanelRows + first) * kPerLane;
        MOE_UNROLL for (int i = 0; i < kBlockPlaces; ++i)
          std::memcpy(to + i * kPanelRows * kPerLane, &block[i], kVectorBytes);
      }
  }

  // dots[t] = the products of the panel and token t, for n of them.
  void sum_many(int64_t n, const X* const* tokens, Floats (*dots)[2]) const {
    with_tokens(n, [&](auto most) {
      sum_words<Math, most.value>(numbers_.data, tokens, 0, places_, dots);
      return most.value;
    });
  }

  template <int Most> void sum_few(int64_t n, const X* const* tokens, Floats (*dots)[2]) const {
    if constexpr (Most > 1) {
      if (n < Most) return sum_few<Most - 1>(n, tokens, dots);
    }
    for (int half = 0; half < 2; ++half) sum_rows<Most>(rows_ + half * kLanes, tokens, half, dots);
  }

  // dots[t][half] = the products of kLanes rows and token t, summed in the order of `sum_words`.
  template <int Tokens>
  __attribute__((noinline)) void sum_rows(const T* const* rows, const X* const* tokens, int half, Floats (*dots)[2]) const {
    Floats part[Tokens] = {};
    Register block[kBlockPlaces];
    for (int64_t b = 0; b < whole_; ++b) {
      transposed(rows, b, block);
      MOE_UNROLL for (int i = 0; i < kBlockPlaces; ++i)
        MOE_UNROLL for (int t = 0; t < Tokens; ++t)
          Math::dot(part[t], block[i], Math::repeat(tokens[t] + (b * kBlockPlaces + i) * kPerLane));
    }
    if (whole_ < blocks_) {
      transposed(rows, whole_, block);
      for (int64_t i = whole_ * kBlockPlaces; i < places_; ++i)
        for (int t = 0; t < Tokens; ++t)
          Math::dot(part[t], block[i - whole_ * kBlockPlaces], Math::repeat(tokens[t] + i * kPerLane));
    }
    MOE_UNROLL for (int t = 0; t < Tokens; ++t) dots[t][half] = part[t];
  }

  const X* as_numbers(const T* row, int64_t t) {
    X* const to = tokens_.data + t * places_ * kPerLane;
    if constexpr (std::is_same_v<X, T>) {
      if (as_they_lie()) return row;
      std::copy_n(row, columns_, to);
    } else {
      for (int64_t i = 0; i < columns_; ++i) to[i] = to_float(row[i]);
    }
    std::fill(to + columns_, to + places_ * kPerLane, X{});
    return to;
  }

  const int64_t columns_, places_, blocks_, whole_;  // blocks, and those without zeros
  const T* rows_[kPanelRows];
  bool few_ = false;
  Buffer<X> numbers_;  // [places][kPanelRows][kPerLane]
  Buffer<T> none_;     // a row of zeros
  Buffer<X> tokens_;   // rows that are not read where they are
};

}  // namespace
