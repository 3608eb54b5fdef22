// Transposition of 32-bit words at the speed of memory: blocks of 8 x 8 in registers.
//
// Panels are so narrow that a cache line is read whole, and so high that several are written whole in a row.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kTile = 8;
constexpr int64_t kPanelRows = 128, kPanelColumns = 16;  // 16 words are a cache line

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MOE_SHUFFLE 1
#endif
#endif

inline void tile(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
#if defined(MOE_SHUFFLE)
  typedef uint32_t V __attribute__((vector_size(32)));
  V a[8], b[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&a[i], from + i * from_stride, 32);
  // Exchange the halves off the diagonal of 2 x 2 words, of 2 x 2 pairs, of 2 x 2 quadruples.
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
  for (int i = 0; i < 8; ++i) std::memcpy(to + i * to_stride, &b[i], 32);
#else
  for (int64_t r = 0; r < kTile; ++r)
    for (int64_t c = 0; c < kTile; ++c) to[c * to_stride + r] = from[r * from_stride + c];
#endif
}

// Shared with Python by position: see kernels/cpu/transpose.py. Strides of the first axes, in words.
struct Copy {
  const uint32_t* from;
  uint32_t* to;
  int64_t from_stride, to_stride, rows, columns;
};

void transpose(const Copy& p) {
  const int64_t whole_rows = p.rows / kTile * kTile, whole_columns = p.columns / kTile * kTile;
  for (int64_t r0 = 0; r0 < whole_rows; r0 += kPanelRows)
    for (int64_t c0 = 0; c0 < whole_columns; c0 += kPanelColumns)
      for (int64_t c = c0; c < std::min(c0 + kPanelColumns, whole_columns); c += kTile)
        for (int64_t r = r0; r < std::min(r0 + kPanelRows, whole_rows); r += kTile)
          tile(p.from + r * p.from_stride + c, p.from_stride, p.to + c * p.to_stride + r, p.to_stride);
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < p.columns; ++c)
      p.to[c * p.to_stride + r] = p.from[r * p.from_stride + c];
}

}  // namespace

// to[c, r] = from[r, c] for r < rows, c < columns, of each copy in turn. No overlap.
extern "C" void moe_transpose_words(const Copy* copies, int64_t count) {
  for (int64_t i = 0; i < count; ++i) transpose(copies[i]);
}
