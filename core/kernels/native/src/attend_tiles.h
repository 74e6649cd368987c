// A tile of keys for some queries, on the processor's tiles (AMX): 16 queries times 16 keys or features, in integers of 8 bits, as the
// cache has them. What a query gathers depends on that query alone here too: a row of a tile knows nothing of the others, and a
// sum over a tile of keys is exact.
#pragma once
#include "attention.h"
#include "tiles.h"

namespace HR_ISA {

#define HR_TILE_LOAD_ROWS(t, from, stride) asm volatile("tileloadd (%0, %1, 1), %%tmm" #t ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define HR_TILE_STORE_ROWS(t, to, stride) asm volatile("tilestored %%tmm" #t ", (%0, %1, 1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define HR_TILE_SCORE(sums, queries, keys) asm volatile("tdpbssd %%tmm" #keys ", %%tmm" #queries ", %%tmm" #sums ::)
#define HR_TILE_VALUE(sums, weights, values) asm volatile("tdpbusd %%tmm" #values ", %%tmm" #weights ", %%tmm" #sums ::)

// Features that a tile of queries and one of keys have: a head in as few equal parts as fit.
static inline int features_of(int hd) {
  int parts = (hd + 63) / 64;
  while (hd % (4 * parts)) parts++;
  return hd / parts;
}

// Whether values are gathered first, so that a product sums over all keys of a tile: it takes as long for 16 as for 64 of them. For
// few queries that is not worth it. A sum of integers is the same either way.
static inline bool gathers(int n) { return n > TILE_ROWS; }

// Shapes for the queries of a unit: 16, or fewer, at a time; of more, the last 16 may have rows that nobody wants. Sums (0 to 3) of
// 16 keys, or of 16 features; queries (4) and 16 keys (5) of as many features; weights (6) and values (7) of 16 keys, or of 64.
static void set_attention_tiles(int hd, int n) {
  const int features = features_of(hd), rows = std::min(n, TILE_ROWS);
  TileShapes shapes;
  for (int t = 0; t < 8; t++) shapes.rows[t] = (uint8_t)rows, shapes.bytes[t] = 64;
  shapes.bytes[4] = (uint16_t)features;
  shapes.rows[5] = (uint8_t)(features / 4);
  shapes.bytes[6] = gathers(n) ? KEYS : 16;
  shapes.rows[7] = gathers(n) ? KEYS / 4 : 4;
  shapes.set();
}

// What comes next is on its way in parts, the keys beside the scores and the values beside the softmax, or what is wanted now would
// wait behind it.
static inline void fetch_keys(const Tile* next, int column) {
  if (next && column < next->columns)
    for (int i = 0; i < next->hd / 4; i++) fetch(next->keys[column] + i * next->key_stride);
}
static inline void fetch_values(const Tile* next, int column) {
  if (next && column < next->columns)
    for (int i = 0; i < next->hd * 16; i += 64) fetch(next->values[column] + i);
}

// Sums of products of queries and keys, as integers where scores will be.
static void scores_of_bytes(const Tile& t, const Tile* next, const Gathered& g) {
  const int features = features_of(t.hd);
  const int8_t* q = (const int8_t*)g.q;
  const int64_t stride = t.key_stride, part = features / 4 * stride;
  for (int r = 0; r < g.n; r += TILE_ROWS) {
    float* s = g.s + r * KEYS;
    auto at = [&](int c, int i) { return t.keys[c] + i / features * part; };
    HR_TILE_ZERO(0);
    HR_TILE_ZERO(1);
    HR_TILE_ZERO(2);
    HR_TILE_ZERO(3);
    for (int i = 0; i < t.hd; i += features) {
      HR_TILE_LOAD_ROWS(4, q + r * t.hd + i, t.hd);
      HR_TILE_LOAD_ROWS(5, at(0, i), stride);
      HR_TILE_SCORE(0, 4, 5);
      if (t.columns > 1) {
        HR_TILE_LOAD_ROWS(5, at(1, i), stride);
        HR_TILE_SCORE(1, 4, 5);
      }
      if (t.columns > 2) {
        HR_TILE_LOAD_ROWS(5, at(2, i), stride);
        HR_TILE_SCORE(2, 4, 5);
      }
      if (t.columns > 3) {
        HR_TILE_LOAD_ROWS(5, at(3, i), stride);
        HR_TILE_SCORE(3, 4, 5);
      }
    }
    if (r == 0)
      for (int c = 0; next && c < next->columns; c++) fetch_keys(next, c);
    HR_TILE_STORE_ROWS(0, s, KEYS * 4);
    HR_TILE_STORE_ROWS(1, s + 16, KEYS * 4);
    HR_TILE_STORE_ROWS(2, s + 32, KEYS * 4);
    HR_TILE_STORE_ROWS(3, s + 48, KEYS * 4);
  }
}

// The largest lanes of 16 vectors: lane i is that of the i-th.
static inline V largest_of_each(const V* rows) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_max_ps(_mm512_unpacklo_ps(rows[i].x, rows[i + 8].x), _mm512_unpackhi_ps(rows[i].x, rows[i + 8].x));
  for (int i = 0; i < 4; i++) b[i] = _mm512_max_ps(_mm512_unpacklo_ps(a[i], a[i + 4]), _mm512_unpackhi_ps(a[i], a[i + 4]));
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_max_ps(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x44), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xee));
  const __m512 all = _mm512_max_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
  return {_mm512_permutexvar_ps(order, all)};
}
// Of n rows, in passes of 16; what `rows` and `largest` have behind them is written too.
static inline void largest_of_rows(V* rows, int n, V none, float* most) {
  if (n <= 4) {
    for (int r = 0; r < n; r++) most[r] = largest(rows[r]);
    return;
  }
  for (int r = n; r % 16; r++) rows[r] = none;
  for (int r = 0; r < n; r += 16) store(most + r, largest_of_each(rows + r));
}

// The scales of a tile's keys and values, 0 where it has none, and whether any of the values' is no finite number.
struct Scales {
  V key[KEYS / 16], value[KEYS / 16];
  bool odd;
  explicit Scales(const Tile& t) {
    Bad bad;
    for (int c = 0; c < KEYS / 16; c++) {
      key[c] = c < t.columns ? load(t.key_scales[c]) : zero();
      value[c] = c < t.columns ? load(t.value_scales[c]) : zero();
      watch(bad, sub(value[c], value[c]));
    }
    odd = any(bad);
  }
};

// The scores of a row's products, and the largest in each lane. WHOLE: of a row that sees all of a whole tile.
template <bool WHOLE>
HR_INLINE V scores_of_row(float* s, const Scales& scales, float q_scale, float cap, const Seen& seen, int columns) {
  V top = set1(LEAST);
  const V by = set1(q_scale);
#pragma GCC unroll 4
  for (int c = 0; c < KEYS / 16; c++) {
    if (!WHOLE && c >= columns) break;
    V v = mul(mul(to_float(I{_mm512_loadu_si512(s + 16 * c)}), scales.key[c]), by);
    if (cap > 0) v = mul(tanh(mul(v, set1(1.0f / cap))), set1(cap * LOG2_E));
    if (!WHOLE) v = keep(v, seen.first - 16 * c, seen.end - 16 * c, -INFINITY);
    store(s + 16 * c, v);
    top = max(top, v);
  }
  return top;
}

// And its weights, times their values' scales: the largest in each lane. total: of the weights so far.
template <bool WHOLE>
HR_INLINE V weights_of_row(float* s, const Scales& scales, V top, V* total, const Seen& seen, int columns) {
  V v[KEYS / 16], all = *total, heaviest = zero();
#pragma GCC unroll 4
  for (int c = 0; c < KEYS / 16; c++) v[c] = WHOLE || c < columns ? sub(load(s + 16 * c), top) : set1(LEAST);
  powers_of_2<KEYS / 16>(v);
#pragma GCC unroll 4
  for (int c = 0; c < KEYS / 16; c++) {
    // A score that is no number makes the sum none.
    if (WHOLE || c < columns) all = add(all, v[c]);
    v[c] = mul(v[c], scales.value[c]);
    if (!WHOLE) {
      v[c] = keep(v[c], seen.first - 16 * c, seen.end - 16 * c, 0.0f);
      // And so does the scale of a value.
      if (scales.odd) all = fma(v[c], zero(), all);
    }
    store(s + 16 * c, v[c]);
    heaviest = max(heaviest, v[c]);
  }
  *total = all;
  return heaviest;
}

// A processor whose tiles have had nothing to multiply for half a microsecond puts them to sleep, and stands still for a third of one
// meanwhile (as measured; no manual says so). The softmax of many rows takes longer. So tiles get a product now and then, whose
// sums nobody wants.
static inline void keep_awake(int row, int n) {
  if (gathers(n) && row % TILE_ROWS == 0) HR_TILE_VALUE(0, 6, 7);
}

// `soften` of attention.h, with weights of 8 bits.
static void soften_bytes(const Tile& t, const Tile* next, int tile, int window, float cap, Gathered& g) {
  V rows[QUERIES + 16];
  float most[QUERIES + 16];
  const Scales scales(t);
  const int columns = t.columns, n = g.n;
  const bool whole = columns == KEYS / 16 && !scales.odd;
  for (int r = 0; r < n; r++) {
    keep_awake(r, n);
    float* s = g.s + r * KEYS;
    const Seen seen = seen_by(t, tile, window, g.positions[r]);
    rows[r] = whole && seen.whole ? scores_of_row<true>(s, scales, g.q_scale[r], cap, seen, columns)
                                  : scores_of_row<false>(s, scales, g.q_scale[r], cap, seen, columns);
  }
  largest_of_rows(rows, n, set1(LEAST), most);
  raise_tops(g, most);
  for (int r = 0; r < n; r++) {
    keep_awake(r, n);
    float* s = g.s + r * KEYS;
    const Seen seen = seen_by(t, tile, window, g.positions[r]);
    const V top = set1(g.top[r]);
    V total = mul(load(g.total + 16 * r), set1(g.again[r]));
    rows[r] = whole && seen.whole ? weights_of_row<true>(s, scales, top, &total, seen, columns)
                                  : weights_of_row<false>(s, scales, top, &total, seen, columns);
    store(g.total + 16 * r, total);
    if (r < KEYS / 16) fetch_values(next, r);
  }
  largest_of_rows(rows, n, zero(), most);
  for (int r = 0; r < n; r += 16) {
    const V heaviest = max(load(most + r), set1(1e-30f));
    store(g.w_scale + r, mul(heaviest, set1(1.0f / HEAVIEST)));
    store(most + r, div(set1(HEAVIEST), heaviest));
  }
  uint8_t* w = (uint8_t*)g.w;
  const float* s = g.s;
  for (int r = 0; r < n; r++, w += KEYS, s += KEYS) {
    const V by = set1(most[r]);
#pragma GCC unroll 4
    for (int c = 0; c < KEYS / 16; c++)
      _mm_storeu_si128((__m128i*)(w + 16 * c), _mm512_cvtusepi32_epi8(to_int(mul(load(s + 16 * c), by)).x));
  }
}

// Adds 16 n features from `feature` on of the rows' values, weighed, to what was gathered. values: of `columns` times 16 keys.
template <int N>
static void add_values(const Tile& t, const char* const* values, int columns, const Gathered& g, int row, int feature) {
  alignas(64) int32_t sums[N][TILE_FLOATS];
  const uint8_t* w = (const uint8_t*)g.w + row * KEYS;
  HR_TILE_ZERO(0);
  if (N > 1) HR_TILE_ZERO(1);
  if (N > 2) HR_TILE_ZERO(2);
  if (N > 3) HR_TILE_ZERO(3);
  for (int c = 0; c < columns; c++) {
    const char* from = values[c] + 4 * feature;
    HR_TILE_LOAD_ROWS(6, w + 16 * c, KEYS);
    HR_TILE_LOAD_ROWS(7, from, t.hd * 4);
    HR_TILE_VALUE(0, 6, 7);
    if (N > 1) {
      HR_TILE_LOAD_ROWS(7, from + 64, t.hd * 4);
      HR_TILE_VALUE(1, 6, 7);
    }
    if (N > 2) {
      HR_TILE_LOAD_ROWS(7, from + 128, t.hd * 4);
      HR_TILE_VALUE(2, 6, 7);
    }
    if (N > 3) {
      HR_TILE_LOAD_ROWS(7, from + 192, t.hd * 4);
      HR_TILE_VALUE(3, 6, 7);
    }
  }
  HR_TILE_STORE(0, sums[0]);
  if (N > 1) HR_TILE_STORE(1, sums[1]);
  if (N > 2) HR_TILE_STORE(2, sums[2]);
  if (N > 3) HR_TILE_STORE(3, sums[3]);
  for (int r = row; r < std::min(g.n, row + TILE_ROWS); r++) {
    float* o = g.o + (int64_t)r * t.hd + feature;
    const V scale = set1(g.w_scale[r]), again = set1(g.again[r]);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const I sum{_mm512_load_si512(sums[i] + 16 * (r - row))};
      store(o + 16 * i, fma(to_float(sum), scale, mul(load(o + 16 * i), again)));
    }
  }
}

static void values_of_bytes(const Tile& t, const Gathered& g) {
  alignas(64) char gathered[KEYS * 512];
  const char* values[KEYS / 16] = {gathered};
  int columns = 1;
  if (gathers(g.n)) {
    for (int c = 0; c < t.columns; c++)
      for (int i = 0; i < t.hd * 16; i += 64)
        store((float*)(gathered + c * t.hd * 16 + i), load((const float*)(t.values[c] + i)));
  } else {
    for (columns = 0; columns < t.columns; columns++) values[columns] = t.values[columns];
  }
  for (int r = 0; r < g.n; r += TILE_ROWS) {
    int i = 0;
    for (; i + 64 <= t.hd; i += 64) add_values<4>(t, values, columns, g, r, i);
    if (t.hd - i == 48) add_values<3>(t, values, columns, g, r, i);
    else if (t.hd - i == 32) add_values<2>(t, values, columns, g, r, i);
    else if (t.hd - i == 16) add_values<1>(t, values, columns, g, r, i);
  }
}

static void attend_bytes(const HrOp& op, int tile, const Tile& t, const Tile* next, Gathered& g) {
  for (int c = 0; next && c < next->columns; c++) fetch(next->key_scales[c]), fetch(next->value_scales[c]);
  scores_of_bytes(t, next, g);
  soften_bytes(t, next, tile, op.window, op.f1, g);
  values_of_bytes(t, g);
}

}  // namespace HR_ISA
