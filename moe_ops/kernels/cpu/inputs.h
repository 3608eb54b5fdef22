// Inputs that are quantised before their products: their codes and scales, to the bit those of `moe_ops.quantize`.
//
// Codes are made as the numbers that they stand for. Those of float8 are exact in bfloat16, so products are those of
// inputs that are not quantised, with a scale for each row or group. Those of int8 are multiplied as integers with
// weights of int8, and both scales are multiplied in at the end: `IntMath` is how.
//
// Compiled after blocks.h and before weights.h, once for each type of inputs (MOE_INPUTS).

namespace {

struct AsTheyAre {
  static constexpr bool kQuantized = false;
};

struct Int8Codes {
  static constexpr bool kQuantized = true;
  static constexpr float kLargest = 127.0f;
  // The nearest code, halves to the even one: float32 numbers of this size are integers.
  static float round(float v) {
    constexpr float integers = 12582912.0f;  // 1.5 * 2**23
    v = v > kLargest ? kLargest : v;
    v = v < -kLargest ? -kLargest : v;
    v = v == v ? v : 0.0f;
    return (v + integers) - integers;
  }
};

struct Float8Codes {
  static constexpr bool kQuantized = true;
  static constexpr float kLargest = 448.0f;
  static float round(float v) {
    v = v > kLargest ? kLargest : v;
    v = v < -kLargest ? -kLargest : v;  // NaN stays
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    // The power of two below it, of the smallest normal at least; its codes are an eighth of that apart.
    const uint32_t power = std::max(bits & 0x7f800000u, 0x3c800000u);  // 2**-6
    const float steps = from_bits(power) * 1572864.0f;                 // 1.5 * 2**23 of them
    return (v + steps) - steps;
  }
};

// The largest magnitude as bits, which order as magnitudes do: infinity and NaN above all numbers.
template <typename T> uint32_t largest_bits(const T* p, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float v = to_float(p[i]);
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

// The scale of values with this largest magnitude.
template <typename Codes> float scale_of(uint32_t largest) {
  if (largest >= 0x7f800000u) return NAN;
  return std::max(from_bits(largest) / Codes::kLargest, 1e-12f);
}

// to[i] = code of from[i] as a number, given its scale.
template <typename Codes, typename T> void round_all(const T* from, int64_t n, float scale, float* to) {
  if (scale == 0.0f) {
    for (int64_t i = 0; i < n; ++i) to[i] = Codes::round(std::isnan(to_float(from[i])) ? NAN : 0.0f);
    return;
  }
  for (int64_t i = 0; i < n; ++i) to[i] = Codes::round(to_float(from[i]) / scale);
}

// Products of int8 numbers, summed in int32. `kOffset` is what the bytes of weights have been raised by.
#if defined(MOE_VNNI) && defined(MOE_AVX512)
struct IntMath {
  typedef int8_t X;
  typedef __m512i Register;
  static constexpr int kWidth = 64, kOffset = 128;
  static Register load(const uint8_t* p) { return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128)); }
  static Register zero() { return _mm512_setzero_si512(); }
  static void dot(Register& sum, Register w, const int8_t* x) {
    sum = _mm512_dpbusd_epi32(sum, w, _mm512_loadu_si512(x));
  }
  static int32_t total(Register sum) { return _mm512_reduce_add_epi32(sum); }
};
#elif defined(MOE_AVX512)
struct IntMath {
  typedef int16_t X;
  typedef __m512i Register;
  static constexpr int kWidth = 32, kOffset = 0;
  static Register load(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static Register zero() { return _mm512_setzero_si512(); }
  static void dot(Register& sum, Register w, const int16_t* x) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(w, _mm512_loadu_si512(x)));
  }
  static int32_t total(Register sum) { return _mm512_reduce_add_epi32(sum); }
};
#elif defined(MOE_AVX2)
inline int32_t total_of(__m256i sum) {
  __m128i part = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(part, _mm_shuffle_epi32(part, 0xb1)));
}
#if defined(MOE_VNNI)
struct IntMath {
  typedef int8_t X;
  typedef __m256i Register;
  static constexpr int kWidth = 32, kOffset = 128;
  static Register load(const uint8_t* p) {
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi8(-128));
  }
  static Register zero() { return _mm256_setzero_si256(); }
  static void dot(Register& sum, Register w, const int8_t* x) {
    sum = _mm256_dpbusd_avx_epi32(sum, w, _mm256_loadu_si256((const __m256i*)x));
  }
  static int32_t total(Register sum) { return total_of(sum); }
};
#else
struct IntMath {
  typedef int16_t X;
  typedef __m256i Register;
  static constexpr int kWidth = 16, kOffset = 0;
  static Register load(const uint8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  static Register zero() { return _mm256_setzero_si256(); }
  static void dot(Register& sum, Register w, const int16_t* x) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, _mm256_loadu_si256((const __m256i*)x)));
  }
  static int32_t total(Register sum) { return total_of(sum); }
};
#endif
#else
struct IntMath {
  typedef int32_t X;
  typedef Words Register;
  static constexpr int kWidth = kVectorBytes / 4, kOffset = 0;
  static Register load(const uint8_t* p) {
    Register w;
    for (int i = 0; i < kWidth; ++i) w[i] = uint32_t(int32_t(int8_t(p[i])));
    return w;
  }
  static Register zero() { return Register{}; }
  static void dot(Register& sum, Register w, const int32_t* x) {
    Register token;
    std::memcpy(&token, x, kVectorBytes);
    sum += w * token;  // as bits, those of signed products
  }
  static int32_t total(Register sum) {
    uint32_t all = 0;
    for (int i = 0; i < kWidth; ++i) all += sum[i];
    return int32_t(all);
  }
};
#endif

// Weights as they lie.
template <> struct Decoder<Int8, IntMath> {
  static constexpr int kStep = IntMath::kWidth, kRegisters = 1;
  static constexpr float kFactor = 1.0f;
  static int column(int place) { return place; }
};

// How products of numbers of type T with weights of an element type are computed.
template <typename Codes, typename Element, typename T> struct MathFor : MathOf<T> {};
template <typename T> struct MathFor<Int8Codes, Int8, T> { typedef IntMath type; };
template <typename Codes, typename T> struct MathFor<Codes, Normal4, T> { typedef FloatMath type; };

}  // namespace
