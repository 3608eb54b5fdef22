// What panels of weights share. A panel is kPanelRows rows of a weight as the numbers that products take, transposed: the
// numbers of all its rows in one place lie side by side, those that a lane of a sum adds up together (one, or a pair of
// bfloat16). A place of a token, repeated in all lanes, is then multiplied with two registers of the panel, and a lane is
// the sum of a row, in the order of its columns.
//
// Compiled after products.h, before panels.h or float_panels.h.

namespace {

constexpr int kPanelRows = 2 * kLanes;
// So that the sums stay in registers, two for each token: there are 32 with AVX-512, otherwise 16.
constexpr int kPanelTokens = kVectorBytes == 64 ? 12 : 6;

// columns[c][r] of kLanes x kLanes words, of which row r is `at` bytes behind rows[r].
__attribute__((always_inline)) inline void transpose(const char* const* rows, int64_t at, Words (&columns)[kLanes]) {
#if defined(MOE_AVX512)
  __m512i a[16], b[16];
  MOE_UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + at);
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
    columns[c] = (Words)_mm512_shuffle_i32x4(even[0], even[1], 0x88);
    columns[c + 4] = (Words)_mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
    columns[c + 8] = (Words)_mm512_shuffle_i32x4(even[0], even[1], 0xdd);
    columns[c + 12] = (Words)_mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
  }
#elif defined(MOE_AVX2)
  __m256i a[8], b[8];
  MOE_UNROLL for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256((const __m256i*)(rows[i] + at));
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
    columns[c] = (Words)_mm256_permute2x128_si256(a[c], a[c + 4], 0x20);
    columns[c + 4] = (Words)_mm256_permute2x128_si256(a[c], a[c + 4], 0x31);
  }
#else
  for (int r = 0; r < kLanes; ++r) {
    uint32_t row[kLanes];
    std::memcpy(row, rows[r] + at, kVectorBytes);
    for (int c = 0; c < kLanes; ++c) columns[c][r] = row[c];
  }
#endif
}

// The same in memory: columns of `to` are kPanelRows words apart.
inline void transpose_words(const char* const* rows, int64_t at, uint32_t* to) {
  Words columns[kLanes];
  transpose(rows, at, columns);
  MOE_UNROLL for (int c = 0; c < kLanes; ++c) std::memcpy(to + c * kPanelRows, &columns[c], kVectorBytes);
}

// Calls body(number) with how many tokens to multiply at once where so many are left, as a constant.
template <typename Body> int64_t with_tokens(int64_t rest, const Body& body) {
  constexpr int third = kPanelTokens / 3;
  if (rest > 2 * third) return body(std::integral_constant<int, kPanelTokens>());
  if (rest > third) return body(std::integral_constant<int, 2 * third>());
  return body(std::integral_constant<int, third>());
}

// sums[t] = the products of a panel's rows and token t, summed over so many places from `first` on, which p is at.
template <typename Math, int Tokens>
__attribute__((noinline)) void sum_words(const typename Math::X* p, const typename Math::X* const* tokens,
                                         int64_t first, int64_t places, Floats (*sums)[2]) {
  constexpr int per_lane = Math::kWidth / kLanes;
  Floats part[Tokens][2] = {};
  for (int64_t i = first; i < first + places; ++i, p += 2 * Math::kWidth) {
    const typename Math::Register w[2] = {Math::load(p), Math::load(p + Math::kWidth)};
    MOE_UNROLL for (int t = 0; t < Tokens; ++t) {
      const typename Math::Register token = Math::repeat(tokens[t] + i * per_lane);
      Math::dot(part[t][0], w[0], token);
      Math::dot(part[t][1], w[1], token);
    }
  }
  MOE_UNROLL for (int t = 0; t < Tokens; ++t) sums[t][0] = part[t][0], sums[t][1] = part[t][1];
}

// h[r, i] = act(gate row i . x + b, up row i . x + b) for i of [first, last): of a gated layer a panel has gate rows in
// its first register and their up rows in the other. `load(row_of)` makes a panel of rows row_of(place), -1 for none;
// `multiply(body)` calls body(r, dots) for the rows r of an expert, whose biases b are, or null.
template <typename T, typename Load, typename Multiply, typename Act>
void first_by_panels(const Layer& l, const T* b, int64_t first, int64_t last, T* h, const Load& load,
                     const Multiply& multiply, const Act& act) {
  const bool gated = l.activation.gated, interleaved = l.activation.interleaved;
  const auto gate_row = [&](int64_t i) { return interleaved ? 2 * i : i; };
  const int64_t up_distance = interleaved ? 1 : l.I, each = gated ? kLanes : kPanelRows;
  const auto gate_bias = [&](int64_t i0) {
    return bias_of(b, last - i0, [&](int64_t i) { return gate_row(i0 + i); });
  };
  const auto up_bias = [&](int64_t i0) {
    return bias_of(b, last - i0, [&](int64_t i) { return gate_row(i0 + i) + up_distance; });
  };
  const auto put = [&](int64_t r, int64_t i0, const Floats& gate, const Floats& up) {
    store(h + r * l.I + i0, act(gate, up), last - i0);
  };
  for (int64_t i0 = first; i0 < last; i0 += each) {
    load([&](int place) {
      const int64_t i = i0 + (gated ? place % kLanes : place);
      return i >= last ? -1 : gate_row(i) + (gated && place >= kLanes ? up_distance : 0);
    });
    const Floats biases[2] = {gate_bias(i0), gated ? up_bias(i0) : gate_bias(i0 + kLanes)};
    multiply([&](int64_t r, const Floats* dots) {
      const Floats one = dots[0] + biases[0], two = dots[1] + biases[1];
      put(r, i0, one, two);
      if (!gated && i0 + kLanes < last) put(r, i0 + kLanes, two, two);
    });
  }
}

// Outputs [first, last) of a product with an expert, likewise: output f of row r is stored at target(r) + f.
template <typename T, typename Target, typename Load, typename Multiply>
void product_by_panels(const T* b, int64_t first, int64_t last, const Target& target, const Load& load,
                       const Multiply& multiply) {
  for (int64_t f0 = first; f0 < last; f0 += kPanelRows) {
    load([&](int place) { return f0 + place < last ? f0 + place : -1; });
    const auto bias = [&](int64_t f) { return bias_of(b, last - f, [&](int64_t i) { return f + i; }); };
    const Floats biases[2] = {bias(f0), bias(f0 + kLanes)};
    multiply([&](int64_t r, const Floats* dots) {
      for (int i = 0; i < 2; ++i)
        if (const int64_t f = f0 + i * kLanes; f < last) store(target(r) + f, dots[i] + biases[i], last - f);
    });
  }
}

}  // namespace
