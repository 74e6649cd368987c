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

// Floats that a group of integers has with it: its scale, or one for each half; the sum of the integers times their scales; and
// -128 times this.
constexpr int PER_GROUP = 3, PER_FINE_GROUP = 4;
// Numbers of which the largest is smaller count as 0: what makes integers of them, of 16 bits too, would be no float.
constexpr float SMALL = 0x1p-112f;

// Rows that lie together group by group, so that a kernel finds them at fixed places beside one another.
constexpr int TOGETHER_ROWS = 4;
static inline int64_t place_of(const HrInts& ints, int64_t row, int64_t group) {
  return (row / TOGETHER_ROWS * (ints.stride / GROUP) + group) * TOGETHER_ROWS + row % TOGETHER_ROWS;
}

// What makes integers -127 ... 127 of numbers of which `top` is the largest, and the scale of these. A NaN or an infinity must not
// vanish in the rounding: it becomes the scale.
static inline V to_bytes(float top) { return set1(top >= SMALL ? 127.0f / top : 0.0f); }
static inline float scale_of(float top, Bad bad) { return any(bad) ? NAN : top / 127.0f; }

// One group of 32 as integers times a scale.
static inline void quantize_group(V a, V b, int8_t* q, float* scale) {
  const float top = largest(max(abs(a), abs(b)));
  Bad bad;
  watch(bad, sub(a, a));
  watch(bad, sub(b, b));
  const V by = to_bytes(top);
  I ia = to_int(mul(a, by)), ib = to_int(mul(b, by));
  store_bytes(q, ia);
  store_bytes(q + 16, ib);
  float s = scale_of(top, bad);
  float total = s * sum(add(to_float(ia), to_float(ib)));
  scale[0] = s;
  scale[1] = total;
  scale[2] = -128.0f * total;
}

// And as two halves.
static inline void quantize_halves(V a, V b, int8_t* q, float* scale) {
  const V half[2] = {a, b};
  float total = 0.0f;
  for (int i = 0; i < 2; i++) {
    const float top = largest(abs(half[i]));
    Bad bad;
    watch(bad, sub(half[i], half[i]));
    const I whole = to_int(mul(half[i], to_bytes(top)));
    store_bytes(q + 16 * i, whole);
    scale[i] = scale_of(top, bad);
    total += scale[i] * sum(to_float(whole));
  }
  scale[2] = total;
  scale[3] = -128.0f * total;
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
  const int64_t at = place_of(ints, row, group);
  int8_t* q = ints.q + at * GROUP;
  float* scales = ints.scales + at * ints.per_group;
  if (ints.per_group == PER_FINE_GROUP) quantize_halves(a, b, q, scales);
  else quantize_group(a, b, q, scales);
}

#endif

#if defined(HR_AVX512) && !defined(HR_TILES)

// Across the lanes of four vectors: what F makes of the i-th's is in every lane 4 j + i.
template <class F>
static inline __m512 of_each(F f, const __m512* v) {
  const __m512 x = f(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 y = f(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
  __m512 z = f(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  z = f(z, _mm512_shuffle_f32x4(z, z, 0x4e));
  return f(z, _mm512_shuffle_f32x4(z, z, 0xb1));
}

// What four vectors are multiplied with to be integers of which the largest is 127, and the scales of these.
struct Scaled {
  V by[4];
  __m128 scale;
  explicit Scaled(const __m512* sizes) {
    const __m128 top = _mm512_castps512_ps128(of_each([](__m512 x, __m512 y) { return _mm512_max_ps(x, y); }, sizes));
    const __mmask8 some = _mm_cmp_ps_mask(top, _mm_set1_ps(SMALL), _CMP_GE_OQ);
    const __m512 all = _mm512_broadcast_f32x4(_mm_maskz_div_ps(some, _mm_set1_ps(127.0f), top));
    by[0] = {_mm512_permute_ps(all, 0x00)}, by[1] = {_mm512_permute_ps(all, 0x55)};
    by[2] = {_mm512_permute_ps(all, 0xaa)}, by[3] = {_mm512_permute_ps(all, 0xff)};
    scale = _mm_div_ps(top, _mm_set1_ps(127.0f));
  }
};
static inline __m128 sums_of(const __m512i* ints) {
  auto sum = [](__m512 x, __m512 y) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y))); };
  return _mm_cvtepi32_ps(_mm_castps_si128(_mm512_castps512_ps128(of_each(sum, (const __m512*)ints))));
}

// `quantize_group`, or `quantize_halves`, of four groups, whose steps wait for one another: all take each together.
template <bool FINE>
static inline void quantize_four(const V* a, const V* b, int8_t* const* q, float* const* scales) {
  constexpr int NO_NUMBER = 0x99;  // NaN or infinite
  __m512 first[4], second[4];
  __mmask16 bad = 0;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    bad |= _mm512_fpclass_ps_mask(a[i].x, NO_NUMBER) | _mm512_fpclass_ps_mask(b[i].x, NO_NUMBER);
    first[i] = abs(a[i]).x, second[i] = abs(b[i]).x;
    if (!FINE) first[i] = _mm512_max_ps(first[i], second[i]);
  }
  if (bad) {
    for (int i = 0; i < 4; i++) {
      if (FINE) quantize_halves(a[i], b[i], q[i], scales[i]);
      else quantize_group(a[i], b[i], q[i], scales[i]);
    }
    return;
  }
  const Scaled x(first), y(FINE ? second : first);
  __m512i sums[4], more[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const I ia = to_int(mul(a[i], x.by[i])), ib = to_int(mul(b[i], FINE ? y.by[i] : x.by[i]));
    store_bytes(q[i], ia);
    store_bytes(q[i] + 16, ib);
    sums[i] = FINE ? ia.x : _mm512_add_epi32(ia.x, ib.x), more[i] = ib.x;
  }
  __m128 total = _mm_mul_ps(x.scale, sums_of(sums));
  if (FINE) total = _mm_add_ps(total, _mm_mul_ps(y.scale, sums_of(more)));
  __m128 less = _mm_mul_ps(total, _mm_set1_ps(-128.0f)), found[4] = {x.scale, total, less, less};
  if (FINE) found[1] = y.scale, found[2] = total;
  _MM_TRANSPOSE4_PS(found[0], found[1], found[2], found[3]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) _mm_mask_storeu_ps(scales[i], FINE ? 15 : 7, found[i]);
}

// Four groups that lie `apart` from one another.
static inline void put_four(const HrInts& ints, int64_t row, int64_t group, const V* a, const V* b, int64_t apart) {
  const int64_t at = place_of(ints, row, group), q_step = apart * GROUP, s_step = apart * ints.per_group;
  int8_t* q = ints.q + at * GROUP;
  float* s = ints.scales + at * ints.per_group;
  int8_t* const qs[4] = {q, q + q_step, q + 2 * q_step, q + 3 * q_step};
  float* const ss[4] = {s, s + s_step, s + 2 * s_step, s + 3 * s_step};
  if (ints.per_group == PER_FINE_GROUP) quantize_four<true>(a, b, qs, ss);
  else quantize_four<false>(a, b, qs, ss);
}

// A group of each of R rows, the first of which is the first of some that lie together.
template <int R>
HR_INLINE void put_rows(const HrInts& ints, int64_t row, int64_t group, const V* a, const V* b) {
  if (R == TOGETHER_ROWS) return put_four(ints, row, group, a, b, 1);
  for (int r = 0; r < R; r++) put_group(ints, row + r, group, a[r], b[r]);
}

#else

template <int R>
HR_INLINE void put_rows(const HrInts& ints, int64_t row, int64_t group, const V* a, const V* b) {
  for (int r = 0; r < R; r++) put_group(ints, row + r, group, a[r], b[r]);
}

#endif

// Values of a row from a group on. What a last group has no value for counts as 0.
static inline void put_row(const HrInts& ints, int64_t row, int64_t group, const float* x, int width) {
  int at = 0;
#if defined(HR_AVX512) && !defined(HR_TILES)
  for (; at + 4 * GROUP <= width; at += 4 * GROUP, group += 4) {
    V a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = load(x + at + GROUP * i), b[i] = load(x + at + GROUP * i + 16);
    put_four(ints, row, group, a, b, TOGETHER_ROWS);
  }
#endif
  for (; at + GROUP <= width; at += GROUP, group++) put_group(ints, row, group, load(x + at), load(x + at + 16));
  if (at == width) return;
  V a, b = zero();
  load_or_part(&a, x + at, width - at);
  if (width - at > 16) load_or_part(&b, x + at + 16, width - at - 16);
  put_group(ints, row, group, a, b);
}

}  // namespace HR_ISA
