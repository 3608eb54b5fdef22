// Codes of quantised weights in registers: what every element type becomes, and in which order.
//
// A step is as many codes as fill whole registers with the fewest instructions. `Decoder<Element, Math>` turns one
// into `kRegisters` registers of numbers, in an order that is the cheapest to make: `column(i)` says which column of
// the step the number at place i is. Tokens are stored in the same order, so products need no shuffles. The places of
// one float32 lane of the sum come from kLeastGroup adjacent columns that begin at a multiple of it: each lane has one
// scale. Codes become exact numbers; a factor that all of them lack is multiplied in at the end (`kFactor`).
//
// Compiled after products.h.

namespace {

constexpr int kLeastGroup = 32;

// Element types: bits, whether there are zero points, and the value of each code.
struct Int8 {
  static constexpr int kBits = 8;
  static constexpr bool kZero = false;
  static float value(int code) { return float(int8_t(code)); }
};
struct Uint8 {
  static constexpr int kBits = 8;
  static constexpr bool kZero = true;
  static float value(int code) { return float(code); }
};
struct Int4 {
  static constexpr int kBits = 4;
  static constexpr bool kZero = false;
  static float value(int code) { return float(code - 8); }
};
struct Uint4 {
  static constexpr int kBits = 4;
  static constexpr bool kZero = true;
  static float value(int code) { return float(code); }
};
struct Float4E2M1 {
  static constexpr int kBits = 4;
  static constexpr bool kZero = false;
  static float value(int code) {
    constexpr float magnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code];
  }
};
struct Float8E4M3 {
  static constexpr int kBits = 8;
  static constexpr bool kZero = false;
  static float value(int code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const float magnitude = (code & 127) == 127 ? NAN
                            : exponent ? std::ldexp(float(8 + mantissa), exponent - 10)
                                       : std::ldexp(float(mantissa), -9);
    return code & 128 ? -magnitude : magnitude;
  }
};

// The values of all codes, and the two bytes of each as a bfloat16, which holds every one of them exactly.
template <typename Element> struct Values {
  static constexpr int kCodes = 1 << Element::kBits;
  alignas(64) float floats[kCodes];
  alignas(64) uint8_t low[kCodes < 64 ? 64 : kCodes], high[kCodes < 64 ? 64 : kCodes];  // four bits: repeated
  alignas(64) uint16_t halves[kCodes < 32 ? 32 : kCodes];
  Values() {
    for (int i = 0; i < kCodes; ++i) floats[i] = Element::value(i);
    for (int i = 0; i < std::max(kCodes, 64); ++i) {
      bf16 half;
      store(&half, floats[i % kCodes]);
      low[i] = uint8_t(half.bits);
      high[i] = uint8_t(half.bits >> 8);
      if (i < std::max(kCodes, 32)) halves[i] = half.bits;
    }
  }
};
template <typename Element> const Values<Element> kValues;

// What decoders to float32 of codes with eight bits share: columns stay in their order.
struct InOrder {
  static constexpr int kStep = kLeastGroup, kRegisters = kStep / FloatMath::kWidth;
  static constexpr float kFactor = 1.0f;
  static int column(int place) { return place; }
  bool any_nan() const { return false; }
};

template <typename Element, typename Math> struct Decoder;

#if !defined(MOE_AVX512) && !defined(MOE_AVX2)

template <typename Element> struct Decoder<Element, FloatMath> : InOrder {
  void operator()(const uint8_t* p, Floats* out) const {
    for (int i = 0; i < kStep; ++i) {
      const int code = Element::kBits == 8 ? p[i] : (p[i / 2] >> (4 * (i % 2))) & 15;
      out[i / FloatMath::kWidth][i % FloatMath::kWidth] = kValues<Element>.floats[code];
    }
  }
};

#elif defined(MOE_AVX2)

template <> struct Decoder<Int8, FloatMath> : InOrder {
  void operator()(const uint8_t* p, Floats* out) const {
    for (int r = 0; r < kRegisters; ++r)
      out[r] = (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * r))));
  }
};

template <> struct Decoder<Uint8, FloatMath> : InOrder {
  void operator()(const uint8_t* p, Floats* out) const {
    for (int r = 0; r < kRegisters; ++r)
      out[r] = (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * r))));
  }
};

// The fields of a float8 are those of a float16 whose exponent is 8 too low, subnormals too; NaN alone is not.
template <> struct Decoder<Float8E4M3, FloatMath> : InOrder {
  static constexpr float kFactor = 256.0f;
  __m256i largest = _mm256_setzero_si256();
  void operator()(const uint8_t* p, Floats* out) {
    const __m256i codes = _mm256_loadu_si256((const __m256i*)p);
    largest = _mm256_max_epu8(largest, _mm256_or_si256(codes, _mm256_set1_epi8(-128)));
    for (int r = 0; r < kRegisters; r += 2) {
      const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 8 * r))), 7);
      const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(int16_t(0xbfff)));
      out[r] = (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      out[r + 1] = (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
  }
  bool any_nan() const { return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1))) != 0; }
};

// Four bits: the two bytes of a bfloat16 by table, side by side, then each half of the words as a float32.
template <typename Element> struct Decoder<Element, FloatMath> {
  static constexpr int kStep = 64, kRegisters = 8;
  static constexpr float kFactor = 1.0f;
  __m256i low = _mm256_load_si256((const __m256i*)kValues<Element>.low);
  __m256i high = _mm256_load_si256((const __m256i*)kValues<Element>.high);
  static int column(int place) {
    const int pair = place / 16, odd = place / 8 % 2, word = 2 * (place % 8) + odd;
    return 2 * (16 * (word / 8) + 8 * (pair % 2) + word % 8) + pair / 2;
  }
  void operator()(const uint8_t* p, Floats* out) const {
    const __m256i codes = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8(15);
    const __m256i parts[2] = {_mm256_and_si256(codes, mask), _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask)};
    for (int i = 0; i < 2; ++i) {
      const __m256i lows = _mm256_shuffle_epi8(low, parts[i]), highs = _mm256_shuffle_epi8(high, parts[i]);
      spread(_mm256_unpacklo_epi8(lows, highs), out + 4 * i);
      spread(_mm256_unpackhi_epi8(lows, highs), out + 4 * i + 2);
    }
  }
  static void spread(__m256i halves, Floats* out) {
    out[0] = (Floats)_mm256_slli_epi32(halves, 16);
    out[1] = (Floats)_mm256_and_si256(halves, _mm256_set1_epi32(int32_t(0xffff0000)));
  }
  bool any_nan() const { return false; }
};

#else

template <> struct Decoder<Int8, FloatMath> : InOrder {
  void operator()(const uint8_t* p, Floats* out) const {
    for (int r = 0; r < kRegisters; ++r)
      out[r] = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16 * r))));
  }
};

template <> struct Decoder<Uint8, FloatMath> : InOrder {
  void operator()(const uint8_t* p, Floats* out) const {
    for (int r = 0; r < kRegisters; ++r)
      out[r] = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p + 16 * r))));
  }
};

// The fields of a float8 are those of a float16 whose exponent is 8 too low, subnormals too; NaN alone is not.
template <> struct Decoder<Float8E4M3, FloatMath> : InOrder {
  static constexpr float kFactor = 256.0f;
  __mmask32 nan = 0;
  void operator()(const uint8_t* p, Floats* out) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512i magnitude = _mm512_set1_epi16(127);
    nan |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, magnitude), magnitude);
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(words, 7), _mm512_set1_epi16(int16_t(0xbfff)));
    out[0] = (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    out[1] = (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
  bool any_nan() const { return nan != 0; }
};

// Four bits: a table of 16 floats, by the lowest bits of each word of eight codes.
template <typename Element> struct Decoder<Element, FloatMath> {
  static constexpr int kStep = 128, kRegisters = 8;
  static constexpr float kFactor = 1.0f;
  __m512 table = _mm512_load_ps(kValues<Element>.floats);
  static int column(int place) { return 8 * (place % 16) + place / 16; }
  void operator()(const uint8_t* p, Floats* out) const {
    const __m512i codes = _mm512_loadu_si512(p);
    for (int r = 0; r < kRegisters; ++r)
      out[r] = (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * r), table);
  }
  bool any_nan() const { return false; }
};

#endif

#if defined(MOE_BF16)

// The same with 16-bit values: the table holds them twice, as five bits index it.
template <typename Element> struct Decoder<Element, Bf16Math> {
  static constexpr int kStep = 128, kRegisters = 4;
  static constexpr float kFactor = 1.0f;
  __m512i table = _mm512_load_si512(kValues<Element>.halves);
  static int column(int place) { return 4 * (place % 32) + place / 32; }
  void operator()(const uint8_t* p, __m512bh* out) const {
    const __m512i codes = _mm512_loadu_si512(p);
    for (int r = 0; r < kRegisters; ++r)
      out[r] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * r), table);
  }
  bool any_nan() const { return false; }
};

// Eight bits: both bytes of the 128 values of positive codes by table. What is left differs from type to type.
template <typename Element> struct ByTable {
  static constexpr int kStep = 64, kRegisters = 2;
  static constexpr float kFactor = 1.0f;
  __m512i low[2] = {_mm512_load_si512(kValues<Element>.low), _mm512_load_si512(kValues<Element>.low + 64)};
  __m512i high[2] = {_mm512_load_si512(kValues<Element>.high), _mm512_load_si512(kValues<Element>.high + 64)};
  static int column(int place) { return 16 * (place / 8 % 4) + 8 * (place / 32) + place % 8; }
  __m512i lows(__m512i index) const { return _mm512_permutex2var_epi8(low[0], index, low[1]); }
  __m512i highs(__m512i index) const { return _mm512_permutex2var_epi8(high[0], index, high[1]); }
  static __m512i with_sign(__m512i highs, __m512i codes) {
    return _mm512_ternarylogic_epi32(highs, codes, _mm512_set1_epi8(-128), 0xf8);  // highs | (codes & 128)
  }
  static void interleave(__m512i lows, __m512i highs, __m512bh* out) {
    out[0] = (__m512bh)_mm512_unpacklo_epi8(lows, highs);
    out[1] = (__m512bh)_mm512_unpackhi_epi8(lows, highs);
  }
  bool any_nan() const { return false; }  // a NaN of the table is one
};
constexpr char kHighOf128 = 0x43;  // the upper byte of 128 to 255 as bfloat16, whose lower one is the rest above 128

template <> struct Decoder<Int8, Bf16Math> : ByTable<Int8> {
  void operator()(const uint8_t* p, __m512bh* out) const {
    const __m512i codes = _mm512_loadu_si512(p), magnitudes = _mm512_abs_epi8(codes);
    const __mmask64 lowest = _mm512_movepi8_mask(magnitudes);  // -128, whose magnitude is no int8
    const __m512i raised = _mm512_mask_mov_epi8(highs(magnitudes), lowest, _mm512_set1_epi8(kHighOf128));
    interleave(lows(magnitudes), with_sign(raised, codes), out);
  }
};

template <> struct Decoder<Uint8, Bf16Math> : ByTable<Uint8> {
  void operator()(const uint8_t* p, __m512bh* out) const {
    const __m512i codes = _mm512_loadu_si512(p);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i rest = _mm512_and_si512(codes, _mm512_set1_epi8(127));
    interleave(_mm512_mask_mov_epi8(lows(codes), upper, rest),
               _mm512_mask_mov_epi8(highs(codes), upper, _mm512_set1_epi8(kHighOf128)), out);
  }
};

template <> struct Decoder<Float8E4M3, Bf16Math> : ByTable<Float8E4M3> {
  void operator()(const uint8_t* p, __m512bh* out) const {
    const __m512i codes = _mm512_loadu_si512(p);
    interleave(lows(codes), with_sign(highs(codes), codes), out);
  }
};

#endif

}  // namespace
