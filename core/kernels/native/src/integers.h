// What every operation needs: parts of rows, and rows as integers.
// A row's bits depend on that row alone: however many rows a kernel takes at once, each is summed in the same order.
#pragma once
#include <algorithm>
#include <cmath>

#include "engine.h"
#include "vec.h"

namespace HR_ISA {

constexpr int GROUP = 32;

static inline void load_or_part(V* v, const float* p, int n) { *v = n >= 16 ? load(p) : load_n(p, n); }
static inline void store_or_part(float* p, V v, int n) {
  if (n >= 16) store(p, v);
  else store_n(p, v, n);
}

// Floats that a group of integers has with it: its scale, that times the sum of the integers, and -128 times this.
constexpr int PER_GROUP = 3;

static inline float* scales_of(const HrInts& ints, int64_t row) { return ints.scales + row * (ints.stride / GROUP * PER_GROUP); }

// One group of 32 as integers -127 ... 127 times a scale.
static inline void quantize_group(V a, V b, int8_t* q, float* scale) {
  float top = largest(max(abs(a), abs(b)));
  // A NaN or an infinity must not vanish in the rounding: it becomes the scale.
  Bad bad;
  watch(bad, sub(a, a));
  watch(bad, sub(b, b));
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  I ia = to_int(mul(a, set1(inverse))), ib = to_int(mul(b, set1(inverse)));
  store_bytes(q, ia);
  store_bytes(q + 16, ib);
  float s = any(bad) ? NAN : top / 127.0f;
  float total = s * sum(add(to_float(ia), to_float(ib)));
  scale[0] = s;
  scale[1] = total;
  scale[2] = -128.0f * total;
}

#if defined(HR_TILES)

// Rows for tiles: bfloat16, 16 rows together and of these 32 values of K. They are multiplied with 2^80 and weights with 2^-112
// (see `to_tile`), so that no product that counts is too small for a float.
constexpr int TILE_ROWS = 16;
constexpr float TILE_ROW = 0x1p80f, TILE_SUM = 0x1p32f;

static inline uint16_t* tile_row(const HrInts& ints, uint64_t row, uint64_t group) {
  const uint64_t groups = (uint64_t)ints.stride / GROUP;
  return (uint16_t*)ints.q + ((row / TILE_ROWS * groups + group) * TILE_ROWS + row % TILE_ROWS) * GROUP;
}

// A group of a row. Of each four the order is 0, 2, 1, 3, as `open` has it.
static inline void put_group(const HrInts& ints, int64_t row, int64_t group, V a, V b) {
  alignas(64) static constexpr uint16_t order[32] = {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
                                                     16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31};
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh(mul(b, set1(TILE_ROW)).x, mul(a, set1(TILE_ROW)).x);
  _mm512_store_si512(tile_row(ints, row, group), _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

#else

// A group of a row.
static inline void put_group(const HrInts& ints, int64_t row, int64_t group, V a, V b) {
  quantize_group(a, b, ints.q + row * ints.stride + GROUP * group, scales_of(ints, row) + PER_GROUP * group);
}

#endif

// Values of a row from a group on. What a last group has no value for counts as 0.
static inline void put_row(const HrInts& ints, int64_t row, int64_t group, const float* x, int width) {
  int at = 0;
  for (; at + GROUP <= width; at += GROUP, group++) put_group(ints, row, group, load(x + at), load(x + at + 16));
  if (at == width) return;
  V a, b = zero();
  load_or_part(&a, x + at, width - at);
  if (width - at > 16) load_or_part(&b, x + at + 16, width - at - 16);
  put_group(ints, row, group, a, b);
}

}  // namespace HR_ISA
