// Numbers in registers and their products, for this machine or, so that tests reach everything, for less:
// MOE_AT_MOST_PLAIN takes no instructions of x86, MOE_AT_MOST_AVX2, MOE_AT_MOST_AVX_VNNI and MOE_AT_MOST_AVX512 none
// that came after.
//
// Compiled after layer.h.

#if defined(MOE_AT_MOST_PLAIN)
#elif defined(__AVX512F__) && defined(__AVX512BW__) && !defined(MOE_AT_MOST_AVX2)
#define MOE_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__) && (!defined(__AVX512F__) || defined(MOE_AT_MOST_AVX2))
#define MOE_AVX2 1
#endif
// Products of bfloat16 read subnormal numbers as zero, so float8 needs a table of bytes (VBMI) to become normal.
#if defined(MOE_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VBMI__) && !defined(MOE_AT_MOST_AVX512)
#define MOE_BF16 1
#endif
// Sums of products of unsigned and signed bytes.
#if defined(MOE_AVX512) && defined(__AVX512VNNI__) && !defined(MOE_AT_MOST_AVX512)
#define MOE_VNNI 1
#elif defined(MOE_AVX2) && defined(__AVXVNNI__) && (!defined(MOE_AT_MOST_AVX2) || defined(MOE_AT_MOST_AVX_VNNI))
#define MOE_VNNI 1
#endif

// Sums stay in registers if the loops over them are gone early.
#define MOE_UNROLL _Pragma("GCC unroll 16")

namespace {

// Products of float32 numbers: what all machines have.
struct FloatMath {
  typedef float X;
  typedef Floats Register;
  static constexpr int kWidth = kVectorBytes / 4;
  static void dot(Floats& acc, const Floats& w, const float* x) {
    dot(acc, w, load(x));
  }
  static void dot(Floats& acc, const Floats& w, const Floats& x) { acc += w * x; }
  static Floats load(const float* p) {
    Floats numbers;
    std::memcpy(&numbers, p, kVectorBytes);
    return numbers;
  }
  static Floats repeat(const float* p) { return Floats{} + *p; }
  static Floats scaled(const Floats& w, const Floats& zero, const Floats& scale) { return (w - zero) * scale; }
  static Floats lowered(const Floats& w, const Floats& scale, const Floats& least) { return w * scale - least; }
};

#if defined(MOE_BF16)
// Products of pairs of bfloat16 numbers, exact before they are added.
struct Bf16Math {
  typedef bf16 X;
  typedef __m512bh Register;
  static constexpr int kWidth = 32;
  static void dot(Floats& acc, const __m512bh& w, const bf16* x) {
    dot(acc, w, load(x));
  }
  static void dot(Floats& acc, const __m512bh& w, const __m512bh& x) {
    acc = (Floats)_mm512_dpbf16_ps((__m512)acc, w, x);
  }
  static __m512bh load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  // A pair.
  static __m512bh repeat(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  // (w - zero) * scale, rounded; both numbers of a lane have its zero point and scale.
  static __m512bh scaled(const __m512bh& w, const Floats& zero, const Floats& scale) {
    const Words pairs = (Words)w;
    return rounded(((Floats)(pairs << 16) - zero) * scale, ((Floats)(pairs & 0xffff0000u) - zero) * scale);
  }
  // w * scale - least, likewise.
  static __m512bh lowered(const __m512bh& w, const Floats& scale, const Floats& least) {
    const Words pairs = (Words)w;
    return rounded((Floats)(pairs << 16) * scale - least, (Floats)(pairs & 0xffff0000u) * scale - least);
  }
  static __m512bh rounded(const Floats& even, const Floats& odd) {
    alignas(64) static constexpr uint16_t kTurns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_load_si512(kTurns), halves);
  }
};
template <typename T> struct MathOf { typedef FloatMath type; };
template <> struct MathOf<bf16> { typedef Bf16Math type; };
#else
template <typename T> struct MathOf { typedef FloatMath type; };
#endif

}  // namespace
