// Transposition of matrices of 16 or 32-bit numbers at the speed of memory: blocks of 8 x 8 in registers.
//
// Blocks below each other fill a whole cache line of the result, which is written past the caches where the
// processor can do that: else each line would be read before it is overwritten, and the lines of a column of
// blocks, often a power of two apart, would drive each other out of the cache.

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 8;
constexpr int64_t kLineBytes = 64;  // of the caches

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MOE_SHUFFLE 1
#endif
#endif

// GCC takes the size of a vector from a template's arguments in a typedef of a struct alone.
template <class Number>
struct Vector;
template <>
struct Vector<uint16_t> {
  typedef uint16_t Row __attribute__((vector_size(16)));
};
template <>
struct Vector<uint32_t> {
  typedef uint32_t Row __attribute__((vector_size(32)));
};

template <class Number>
inline void transpose_block(const Number* from, int64_t stride, typename Vector<Number>::Row (&b)[kBlock]) {
#if defined(MOE_SHUFFLE)
  typename Vector<Number>::Row a[kBlock];
  for (int i = 0; i < 8; ++i) std::memcpy(&a[i], from + i * stride, sizeof a[i]);
  // Exchange the halves off the diagonal of 2 x 2 numbers, of 2 x 2 pairs, of 2 x 2 quadruples.
  for (int i = 0; i < 8; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += (i & 1) ? 3 : 1) {
    a[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    a[i + 2] = __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#else
  for (int r = 0; r < kBlock; ++r)
    for (int c = 0; c < kBlock; ++c) b[c][r] = from[r * stride + c];
#endif
}

#if defined(__AVX__)
inline void store_past_caches(uint16_t* to, Vector<uint16_t>::Row row) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)row);
}
inline void store_past_caches(uint32_t* to, Vector<uint32_t>::Row row) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)row);
}
#else
template <class Number>
inline void store_past_caches(Number* to, typename Vector<Number>::Row row) {
  std::memcpy(to, &row, sizeof row);
}
#endif

// Shared with Python by position: see kernels/cpu/transpose.py. Strides of the first axes, in numbers.
struct Copy {
  const void* from;
  void* to;
  int64_t from_stride, to_stride, rows, columns, bytes;
};

template <class Number>
void transpose(const Copy& p) {
  typedef typename Vector<Number>::Row Row;
  constexpr int64_t kBlocks = kLineBytes / sizeof(Row), kLine = kBlocks * kBlock;
  const Number* from = static_cast<const Number*>(p.from);
  Number* to = static_cast<Number*>(p.to);
  const bool aligned = (reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(p.to_stride * sizeof(Number))) %
                           sizeof(Row) == 0;
  const int64_t whole_rows = p.rows / kBlock * kBlock, whole_columns = p.columns / kBlock * kBlock;
  for (int64_t r0 = 0; r0 < whole_rows; r0 += kLine)
    for (int64_t c = 0; c < whole_columns; c += kBlock) {
      Row blocks[kBlocks][kBlock];
      if (aligned && r0 + kLine <= whole_rows) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < kBlocks; ++i)
          transpose_block(from + (r0 + i * kBlock) * p.from_stride + c, p.from_stride, blocks[i]);
#pragma GCC unroll 8
        for (int64_t j = 0; j < kBlock; ++j)
#pragma GCC unroll 4
          for (int64_t i = 0; i < kBlocks; ++i)
            store_past_caches(to + (c + j) * p.to_stride + r0 + i * kBlock, blocks[i][j]);
      } else {
        for (int64_t r = r0; r < std::min(r0 + kLine, whole_rows); r += kBlock) {
          transpose_block(from + r * p.from_stride + c, p.from_stride, blocks[0]);
          for (int64_t j = 0; j < kBlock; ++j) std::memcpy(to + (c + j) * p.to_stride + r, &blocks[0][j], sizeof(Row));
        }
      }
    }
  for (int64_t c = 0; c < p.columns; ++c)
    for (int64_t r = c < whole_columns ? whole_rows : 0; r < p.rows; ++r)
      to[c * p.to_stride + r] = from[r * p.from_stride + c];
}

}  // namespace

// to[c, r] = from[r, c] for r < rows, c < columns, of each copy in turn: 2 or 4 bytes. No overlap.
extern "C" void moe_transpose(const Copy* copies, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    copies[i].bytes == 2 ? transpose<uint16_t>(copies[i]) : transpose<uint32_t>(copies[i]);
#if defined(__AVX__)
  _mm_sfence();  // before other threads are told
#endif
}
