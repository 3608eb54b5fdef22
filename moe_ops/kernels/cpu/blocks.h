// Elements with more than codes: blocks of 256 codes with scales of their own, which are ggml's Q4_K, Q5_K and Q6_K in
// the order of moe_ops/quant/elements/k_quants.py, and NF4, a table of numbers that bfloat16 does not hold.
//
// A block is two steps with AVX-512, whose lanes have eight adjacent columns each, elsewhere as many as it has groups,
// with the even columns of a group before the odd ones, as codes are two in a byte. Decoders of blocks are given a
// block and which of its steps they decode. Scales and minima are taken out of it in registers (`Factors`), not ahead of
// a row's products: in short rows of codes that took as long as the codes.
//
// Compiled after codes.h, in front of inputs.h.

namespace {

float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

float from_float16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, fields = half & 0x7fffu;
  if (fields >= 0x7c00u) return from_bits(sign | 0x7f800000u | (fields << 13));  // infinity, NaN
  return from_bits(sign | (fields << 13)) * from_bits(0x77800000u);              // 2**112: of the two exponents' biases
}

inline float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
#if defined(MOE_AVX512) || defined(MOE_AVX2)
  return _cvtsh_ss(half);
#else
  return from_float16(half);
#endif
}

struct Normal4 {
  static constexpr int kBits = 4;
  static constexpr bool kZero = false;
  static float value(int code) {
    constexpr float values[] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                                0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    return values[code];
  }
};

constexpr int kBlock = 256;

// What a block says beside codes, times the scale above it: the scales of its groups, of which those of Minima have
// eight, and behind these their minima.
struct Factors {
  alignas(64) float all[16];
};

// The eight scales and the eight minima of a block that begins with d, d_min and 12 bytes of these, as bytes.
#if defined(MOE_AVX512) || defined(MOE_AVX2)
inline __m128i sixes_of(const uint8_t* p) {
  const __m128i words = _mm_loadu_si128((const __m128i*)p);
  const int low = 0x3f3f3f3f, half = 0x0f0f0f0f, above = 0x30303030;
  const __m128i first = _mm_srlv_epi32(_mm_shuffle_epi32(words, 0xed), _mm_set_epi32(4, 0, 0, 0));  // words 1 3 2 3
  const __m128i second = _mm_srli_epi32(_mm_shuffle_epi32(words, 0xa5), 2);                         // words 1 1 2 2
  return _mm_or_si128(_mm_and_si128(first, _mm_set_epi32(half, low, half, low)),
                      _mm_and_si128(second, _mm_set_epi32(above, 0, above, 0)));
}
#else
inline void sixes_of(const uint8_t* p, uint8_t* to) {
  const uint8_t *a = p + 4, *b = p + 8, *c = p + 12;
  for (int i = 0; i < 4; ++i) {
    to[i] = a[i] & 63;
    to[4 + i] = uint8_t((c[i] & 15) | (a[i] >> 6 << 4));
    to[8 + i] = b[i] & 63;
    to[12 + i] = uint8_t((c[i] >> 4) | (b[i] >> 6 << 4));
  }
}
#endif

// Codes from 0 on; of each group a scale, and a minimum that is subtracted.
template <int Bits> struct Minima {
  static constexpr int kBits = Bits, kGroup = 32, kBlockBytes = 16 + kBlock / 8 * Bits;
  static constexpr int kLow = 16, kAbove = kLow + kBlock / 2, kOffset = 0;  // where codes are, and what they begin with
  static constexpr bool kZero = false;
  static float value(int code) { return float(code); }
  static Factors factors(const uint8_t* p, float above) {
    Factors f;
#if defined(MOE_AVX512)
    const __m512i eights = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128 halves = _mm_mul_ps(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)), _mm_set1_ps(above));
    const __m512 both = _mm512_permutexvar_ps(eights, _mm512_castps128_ps512(halves));
    _mm512_store_ps(f.all, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixes_of(p))), both));
#elif defined(MOE_AVX2)
    const __m128i sixes = sixes_of(p);
    const __m256 first = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(sixes));
    const __m256 last = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(sixes, 8)));
    _mm256_store_ps(f.all, _mm256_mul_ps(first, _mm256_set1_ps(half_at(p) * above)));
    _mm256_store_ps(f.all + 8, _mm256_mul_ps(last, _mm256_set1_ps(half_at(p + 2) * above)));
#else
    uint8_t bytes[16];
    sixes_of(p, bytes);
    const float d[2] = {half_at(p) * above, half_at(p + 2) * above};
    for (int i = 0; i < 16; ++i) f.all[i] = d[i / 8] * float(bytes[i]);
#endif
    return f;
  }
};
typedef Minima<4> Q4K;
typedef Minima<5> Q5K;

// Codes with an offset of 32, of each group a scale.
struct Q6K {
  static constexpr int kBits = 6, kGroup = 16, kBlockBytes = 210;
  static constexpr int kLow = 0, kAbove = kBlock / 2, kOffset = 32, kScales = kAbove + kBlock / 4;
  static constexpr bool kZero = false;
  static float value(int code) { return float(code - 32); }
  static Factors factors(const uint8_t* p, float above) {
    const float d = half_at(p + kScales + 16) * above;
    Factors f;
#if defined(MOE_AVX512)
    const __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + kScales)));
    _mm512_store_ps(f.all, _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(d)));
#else
    for (int i = 0; i < 16; ++i) f.all[i] = d * float(int8_t(p[kScales + i]));
#endif
    return f;
  }
};

template <typename Element> constexpr bool kInBlocks = false;
template <int Bits> constexpr bool kInBlocks<Minima<Bits>> = true;
template <> constexpr bool kInBlocks<Q6K> = true;
// Whether groups have minima.
template <typename Element> constexpr bool kHasMinima = false;
template <int Bits> constexpr bool kHasMinima<Minima<Bits>> = true;

// The bytes of so many columns; of blocks, of whole ones.
template <typename Element> constexpr int64_t bytes_of(int64_t columns) {
  if constexpr (kInBlocks<Element>) return columns / kBlock * Element::kBlockBytes;
  else return columns * Element::kBits / 8;
}

template <typename Element, typename Math> struct BlockDecoder;

#if defined(MOE_AVX512)

// The registers of a step as numbers of 32 bits: in the lowest bits of each the code of a column, with anything above.
template <typename Element, typename Body> inline void codes_of(const uint8_t* block, int part, const Body& body) {
  constexpr int bits = Element::kBits - 4;
  const __m512i low = _mm512_loadu_si512(block + Element::kLow + 64 * part);
  const uint8_t* const p = block + Element::kAbove + 16 * bits * part;
  __m512i above = {};
  if constexpr (bits == 1) above = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  else if constexpr (bits == 2) above = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  MOE_UNROLL for (int r = 0; r < 8; ++r) {
    const int left = 4 - bits * r;
    const __m512i moved = left > 0 ? _mm512_slli_epi32(above, left) : _mm512_srli_epi32(above, -left);
    const __m512i code = _mm512_srli_epi32(low, 4 * r);
    body(r, bits ? _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), code, moved, 0xca) : code);  // 15 ? code : moved
  }
}

template <typename Element> struct BlockDecoder<Element, FloatMath> {
  static constexpr int kStep = kBlock / 2, kRegisters = 8;
  static constexpr float kFactor = 1.0f;
  static int column(int place) { return 8 * (place % 16) + place / 16; }
  void operator()(const uint8_t* block, int part, Floats* out) const {
    codes_of<Element>(block, part, [&](int r, __m512i code) __attribute__((always_inline)) {
      const __m512i whole = _mm512_and_si512(code, _mm512_set1_epi32((1 << Element::kBits) - 1));
      out[r] = (Floats)_mm512_cvtepi32_ps(whole);
      if constexpr (Element::kOffset != 0) out[r] -= float(Element::kOffset);
    });
  }
  bool any_nan() const { return false; }
};

#else

template <typename Element> struct BlockDecoder<Element, FloatMath> {
  static constexpr int kStep = Element::kGroup, kRegisters = kStep / FloatMath::kWidth, kHalf = kStep / 2;
  static constexpr float kFactor = 1.0f;
  static int column(int place) { return 2 * (place % kHalf) + place / kHalf; }
  void operator()(const uint8_t* block, int part, Floats* out) const {
    constexpr int bits = Element::kBits - 4;
    const uint8_t* const low = block + Element::kLow + kHalf * part;
    uint32_t above = 0;  // 16 columns of two bits, or 32 of one
    if constexpr (bits > 0) std::memcpy(&above, block + Element::kAbove + 4 * part, 4);
    float values[kStep];
    for (int i = 0; i < kHalf; ++i) {
      uint32_t even = low[i] & 15u, odd = low[i] >> 4;
      if constexpr (bits > 0) {
        even |= ((above >> (2 * bits * i)) & ((1u << bits) - 1)) << 4;
        odd |= ((above >> (2 * bits * i + bits)) & ((1u << bits) - 1)) << 4;
      }
      values[i] = float(int32_t(even) - Element::kOffset);
      values[kHalf + i] = float(int32_t(odd) - Element::kOffset);
    }
    std::memcpy(out, values, sizeof values);
  }
  bool any_nan() const { return false; }
};

#endif

#if defined(MOE_BF16)

// Numbers of 16 bits by a table of the values of all codes, of which six bits have two registers.
template <typename Element> struct BlockDecoder<Element, Bf16Math> {
  static constexpr int kStep = kBlock / 2, kRegisters = 4, kAboveBits = Element::kBits - 4;
  static constexpr float kFactor = 1.0f;
  __m512i table[2] = {_mm512_load_si512(kValues<Element>.halves),
                      _mm512_load_si512(kValues<Element>.halves + (kAboveBits == 2 ? 32 : 0))};
  static int column(int place) { return 4 * (place % 32) + place / 32; }
  void operator()(const uint8_t* block, int part, __m512bh* out) const {
    __m512i low = _mm512_loadu_si512(block + Element::kLow + 64 * part);
    const __m512i above = above_of(block, part);
    MOE_UNROLL for (int r = 0; r < kRegisters; ++r) {
      __m512i code = low;
      low = _mm512_srli_epi16(low, 4);  // by one step: compilers read memory again for each of several
      if constexpr (kAboveBits > 0) {
        const int left = 4 - kAboveBits * r;
        const __m512i moved = left > 0 ? _mm512_slli_epi16(above, left) : _mm512_srli_epi16(above, -left);
        code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), code, moved, 0xca);  // 15 ? code : moved
      }
      if constexpr (kAboveBits == 2) out[r] = (__m512bh)_mm512_permutex2var_epi16(table[0], code, table[1]);
      else out[r] = (__m512bh)_mm512_permutexvar_epi16(code, table[0]);
    }
  }
  // What the four columns of 16 bits have above their lowest four bits.
  static __m512i above_of(const uint8_t* block, int part) {
    const uint8_t* const p = block + Element::kAbove + 16 * kAboveBits * part;
    if constexpr (kAboveBits == 1) {
      const __m512i eights = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
      return _mm512_or_si512(eights, _mm512_slli_epi32(eights, 12));
    }
    if constexpr (kAboveBits == 2) return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_setzero_si512();
  }
  bool any_nan() const { return false; }
};

#endif

template <int Bits> struct Decoder<Minima<Bits>, FloatMath> : BlockDecoder<Minima<Bits>, FloatMath> {};
template <> struct Decoder<Q6K, FloatMath> : BlockDecoder<Q6K, FloatMath> {};
#if defined(MOE_BF16)
template <int Bits> struct Decoder<Minima<Bits>, Bf16Math> : BlockDecoder<Minima<Bits>, Bf16Math> {};
template <> struct Decoder<Q6K, Bf16Math> : BlockDecoder<Q6K, Bf16Math> {};
#endif

#if defined(MOE_AVX2)

// Four bits by a table of float32 numbers: both halves of it, and one of the two by the last bit.
template <> struct Decoder<Normal4, FloatMath> {
  static constexpr int kStep = 64, kRegisters = 8;
  static constexpr float kFactor = 1.0f;
  __m256 first = _mm256_load_ps(kValues<Normal4>.floats), second = _mm256_load_ps(kValues<Normal4>.floats + 8);
  static int column(int place) { return 8 * (place % 8) + place / 8; }
  void operator()(const uint8_t* p, Floats* out) const {
    const __m256i codes = _mm256_loadu_si256((const __m256i*)p);
    for (int r = 0; r < kRegisters; ++r) {
      const __m256i index = _mm256_srli_epi32(codes, 4 * r);
      const __m256 low = _mm256_permutevar8x32_ps(first, index), high = _mm256_permutevar8x32_ps(second, index);
      out[r] = (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    }
  }
  bool any_nan() const { return false; }
};

#endif

}  // namespace
