// Elements that bfloat16 does not hold: blocks of 256 codes with scales of their own, which are ggml's Q4_K, Q5_K and
// Q6_K in the order of moe_ops/quant/elements/k_quants.py, and NF4, a table. All become float32 numbers, whatever the
// dtype of tokens; those of blocks are the values themselves, to the bit those of the definition.
//
// A block is a step. Of 128 columns with AVX-512 a lane has eight that are adjacent, and so has one scale; elsewhere
// the even columns of a group come before the odd ones, as codes are two in a byte.
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
  return from_float16(half);
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

// The eight scales and the eight minima of the 12 bytes of a block, as bytes.
inline void sixes_of(const uint8_t* p, uint32_t* to) {
  uint32_t a, b, c;
  std::memcpy(&a, p, 4);
  std::memcpy(&b, p + 4, 4);
  std::memcpy(&c, p + 8, 4);
  to[0] = a & 0x3f3f3f3fu;
  to[1] = (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u);
  to[2] = b & 0x3f3f3f3fu;
  to[3] = ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u);
}

// Codes from 0 on, a scale and a minimum for 32 of them.
template <int Bits> struct Minima {
  static constexpr int kBlockBytes = 16 + kBlock / 8 * Bits, kGroup = 32, kLow = 16, kAbove = 16 + kBlock / 2;
  static constexpr int kAboveBits = Bits - 4;
  static constexpr bool kZero = false;
  // What a code is multiplied by, and what is subtracted.
  static void factors(const uint8_t* p, float* scale, float* less) {
    const float d = half_at(p), d_min = half_at(p + 2);
    uint32_t words[4];
    sixes_of(p + 4, words);
    uint8_t bytes[16];
    std::memcpy(bytes, words, 16);
    for (int i = 0; i < 8; ++i) scale[i] = d * float(bytes[i]), less[i] = d_min * float(bytes[8 + i]);
  }
};
typedef Minima<4> Q4K;
typedef Minima<5> Q5K;

// Codes with an offset of 32, a scale for 16 of them.
struct Q6K {
  static constexpr int kBlockBytes = 210, kGroup = 16, kLow = 0, kAbove = kBlock / 2, kAboveBits = 2;
  static constexpr int kScales = kBlock / 8 * 6;
  static constexpr bool kZero = false;
  static void factors(const uint8_t* p, float* scale, float* less) {
    const float d = half_at(p + kScales + 16);
    for (int i = 0; i < 16; ++i) scale[i] = d * float(int8_t(p[kScales + i])), less[i] = 32.0f * scale[i];
  }
};

template <typename Element> constexpr bool kInBlocks = false;
template <int Bits> constexpr bool kInBlocks<Minima<Bits>> = true;
template <> constexpr bool kInBlocks<Q6K> = true;

// The bytes of so many columns, which are whole ones.
template <typename Element> constexpr int64_t bytes_of(int64_t columns) {
  if constexpr (kInBlocks<Element>) return columns / kBlock * Element::kBlockBytes;
  else return columns * Element::kBits / 8;
}

#if defined(MOE_AVX512)

// Which of the scales of a half of a block each lane has.
template <int Group> struct Lanes {
  alignas(64) int32_t index[16];
  Lanes() {
    for (int i = 0; i < 16; ++i) index[i] = 8 * i / Group;
  }
};
template <int Group> const Lanes<Group> kLanesOf;

// The factors of the lanes of each half of a block.
template <int Bits> void lane_factors(Minima<Bits>, const uint8_t* p, __m512* scale, __m512* less) {
  int32_t both;
  std::memcpy(&both, p, 4);
  uint32_t words[4];
  sixes_of(p + 4, words);
  const __m512 halves = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(both)));
  const __m512i eights = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512 sixes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)words)));
  const __m512 all = _mm512_mul_ps(sixes, _mm512_permutexvar_ps(eights, halves));
  const __m512i index = _mm512_load_si512(kLanesOf<32>.index);
  for (int half = 0; half < 2; ++half) {
    const __m512i at = _mm512_add_epi32(index, _mm512_set1_epi32(4 * half));
    scale[half] = _mm512_permutexvar_ps(at, all);
    less[half] = _mm512_permutexvar_ps(_mm512_add_epi32(at, _mm512_set1_epi32(8)), all);
  }
}

inline void lane_factors(Q6K, const uint8_t* p, __m512* scale, __m512* less) {
  const __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + Q6K::kScales)));
  const __m512 all = _mm512_mul_ps(_mm512_cvtepi32_ps(bytes), _mm512_set1_ps(half_at(p + Q6K::kScales + 16)));
  for (int half = 0; half < 2; ++half) {
    const __m512i at = _mm512_add_epi32(_mm512_load_si512(kLanesOf<16>.index), _mm512_set1_epi32(8 * half));
    scale[half] = _mm512_permutexvar_ps(at, all);
    less[half] = _mm512_mul_ps(scale[half], _mm512_set1_ps(32.0f));
  }
}

// What eight columns a lane have above their lowest four bits.
template <int Bits> __m512i above_of(const uint8_t* p) {
  if constexpr (Bits == 0) return _mm512_setzero_si512();
  else if constexpr (Bits == 1) return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  else return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}

template <typename Element> struct BlockDecoder {
  static constexpr int kStep = kBlock, kRegisters = kStep / FloatMath::kWidth;
  static constexpr float kFactor = 1.0f;
  static int column(int place) { return place / 128 * 128 + 8 * (place % 16) + place / 16 % 8; }
  void operator()(const uint8_t* p, Floats* out) const {
    constexpr int bits = Element::kAboveBits;
    __m512 scale[2], less[2];
    lane_factors(Element(), p, scale, less);
    MOE_UNROLL for (int half = 0; half < 2; ++half) {
      const __m512i low = _mm512_loadu_si512(p + Element::kLow + 64 * half);
      const __m512i above = above_of<bits>(p + Element::kAbove + 16 * bits * half);
      MOE_UNROLL for (int r = 0; r < 8; ++r) {
        // Below the fourth bit what is low, and above it what is not.
        const int left = 4 - bits * r;
        const __m512i moved = left > 0 ? _mm512_slli_epi32(above, left) : _mm512_srli_epi32(above, -left);
        const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), _mm512_srli_epi32(low, 4 * r), moved, 0xca);
        const __m512i whole = _mm512_and_si512(code, _mm512_set1_epi32((16 << bits) - 1));
        out[8 * half + r] = (Floats)_mm512_fmsub_ps(_mm512_cvtepi32_ps(whole), scale[half], less[half]);
      }
    }
  }
  bool any_nan() const { return false; }  // a NaN of a scale is one of the values
};

#else

template <typename Element> struct BlockDecoder {
  static constexpr int kStep = kBlock, kRegisters = kStep / FloatMath::kWidth, kHalf = Element::kGroup / 2;
  static constexpr float kFactor = 1.0f;
  static int column(int place) {
    return place / Element::kGroup * Element::kGroup + 2 * (place % kHalf) + place / kHalf % 2;
  }
  void operator()(const uint8_t* p, Floats* out) const {
    constexpr int groups = kBlock / Element::kGroup, bits = Element::kAboveBits;
    float scale[groups], less[groups], values[kBlock];
    Element::factors(p, scale, less);
    for (int g = 0; g < groups; ++g) {
      const uint8_t* const low = p + Element::kLow + kHalf * g;
      uint32_t above = 0;  // 16 columns of two bits, or 32 of one
      if constexpr (bits > 0) std::memcpy(&above, p + Element::kAbove + 4 * g, 4);
      float* const to = values + Element::kGroup * g;
      for (int i = 0; i < kHalf; ++i) {
        uint32_t even = low[i] & 15u, odd = low[i] >> 4;
        if constexpr (bits > 0) {
          even |= ((above >> (2 * bits * i)) & ((1u << bits) - 1)) << 4;
          odd |= ((above >> (2 * bits * i + bits)) & ((1u << bits) - 1)) << 4;
        }
        to[i] = float(int32_t(even)) * scale[g] - less[g];
        to[kHalf + i] = float(int32_t(odd)) * scale[g] - less[g];
      }
    }
    std::memcpy(out, values, sizeof values);
  }
  bool any_nan() const { return false; }
};

#endif

template <int Bits> struct Decoder<Minima<Bits>, FloatMath> : BlockDecoder<Minima<Bits>> {};
template <> struct Decoder<Q6K, FloatMath> : BlockDecoder<Q6K> {};

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
