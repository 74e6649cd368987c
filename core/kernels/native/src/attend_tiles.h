// A tile of keys for some queries, on the processor's tiles (AMX): 16 queries times 16 keys or features, in bfloat16, as the
// cache has them. What a query gathers depends on that query alone here too: a row of a tile knows nothing of the others.
#pragma once
#include "attention.h"
#include "tiles.h"

namespace HR_ISA {

#define HR_TILE_LOAD_ROWS(t, from, stride) asm volatile("tileloadd (%0, %1, 1), %%tmm" #t ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define HR_TILE_STORE_ROWS(t, to, stride) asm volatile("tilestored %%tmm" #t ", (%0, %1, 1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")

// Shapes for the queries of a unit: 16, or fewer, at a time, and the last ones. Sums (0, 1); queries (2, 3) with 32 features, weights
// (4, 5) of 16 keys; 16 pairs of features of 16 keys (6), 8 pairs of keys of 16 features (7).
static inline void set_attention_tiles(int n) {
  const int last = n % TILE_ROWS;
  TileShapes shapes;
  for (int t : {0, 2, 4}) shapes.rows[t] = (uint8_t)std::min(n, TILE_ROWS);
  for (int t : {1, 3, 5}) shapes.rows[t] = (uint8_t)std::max(1, last);
  for (int t = 0; t < 8; t++) shapes.bytes[t] = t == 4 || t == 5 ? 32 : 64;
  shapes.rows[6] = 16;
  shapes.rows[7] = 8;
  shapes.set();
}

// The keys of a column, as [features / 2, 16, 2] up to a multiple of 32 features: where they are, or with zeros behind them.
static inline const int16_t* whole_keys(const Tile& t, int column, int16_t* copy, int64_t* stride) {
  *stride = t.key_stride;
  if (t.hd % GROUP == 0) return t.keys[column];
  for (int i = 0; i < query_width(t.hd) / 2; i++)
    _mm512_storeu_si512(copy + 32 * i, i < t.hd / 2 ? _mm512_loadu_si512(t.keys[column] + i * t.key_stride) : _mm512_setzero_si512());
  *stride = 32;
  return copy;
}
// The values of a column, as [8, features, 2]: where they are, or without what lies in slots that nobody wrote, for that may be
// anything.
static inline const int16_t* known_values(const Tile& t, int column, int16_t* copy) {
  const int known = t.num_keys - 16 * column;
  if (known >= 16) return t.values[column];
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 2 * t.hd; i += 32) {
      const __mmask32 which = 2 * j + 1 < known ? 0xffffffffu : 2 * j < known ? 0x55555555u : 0u;
      _mm512_storeu_si512(copy + j * 2 * t.hd + i, _mm512_maskz_loadu_epi16(which, t.values[column] + j * 2 * t.hd + i));
    }
  return copy;
}

static inline void fetch_keys(const Tile* next, int column) {
  if (next && column < next->columns)
    for (int i = 0; i < next->hd / 2; i++) fetch(next->keys[column] + i * next->key_stride);
}
// So many pairs of values, of which a column has 8: a few at a time, or what is wanted now would wait behind them.
static inline void fetch_values(const Tile* next, int from, int n) {
  if (!next) return;
  for (int j = from; j < from + n && j / 8 < next->columns; j++)
    for (int i = 0; i < 2 * next->hd; i += 32) fetch(next->values[j / 8] + j % 8 * 2 * next->hd + i);
}

static void scores_of_tile(const Tile& t, const Tile* next, const Gathered& g, int16_t* copy) {
  const int width = query_width(t.hd);
  const uint16_t* q = (const uint16_t*)g.q;
  for (int c = 0; c < t.columns; c++) {
    fetch_keys(next, c);
    int64_t stride;
    const int16_t* keys = whole_keys(t, c, copy, &stride);
    for (int r = 0; r < g.n; r += TILE_ROWS) {
      const bool last = r && g.n - r < TILE_ROWS;
      float* s = g.s + r * KEYS + 16 * c;
      if (last) HR_TILE_ZERO(1);
      else HR_TILE_ZERO(0);
      for (int i = 0; i < width; i += GROUP) {
        HR_TILE_LOAD_ROWS(6, keys + i / 2 * stride, stride * 2);
        if (last) HR_TILE_LOAD_ROWS(3, q + r * width + i, width * 2);
        else HR_TILE_LOAD_ROWS(2, q + r * width + i, width * 2);
        if (last) HR_TILE_ADD(1, 3, 6);
        else HR_TILE_ADD(0, 2, 6);
      }
      if (last) HR_TILE_STORE_ROWS(1, s, KEYS * 4);
      else HR_TILE_STORE_ROWS(0, s, KEYS * 4);
    }
  }
}

static void values_of_tile(const Tile& t, const Tile* next, const Gathered& g, int16_t* copy) {
  const uint16_t* w = (const uint16_t*)g.w;
  const int16_t* values[KEYS / 16];
  for (int c = 0; c < t.columns; c++) {
    values[c] = known_values(t, c, copy);
  }
  for (int r = 0; r < g.n; r += TILE_ROWS) {
    const bool last = r && g.n - r < TILE_ROWS;
    for (int i = 0; i < t.hd; i += 16) {
      float* o = g.o + (int64_t)r * t.hd + i;
      if (r == 0) fetch_values(next, i / 16 * 4, 4);
      if (last) HR_TILE_LOAD_ROWS(1, o, t.hd * 4);
      else HR_TILE_LOAD_ROWS(0, o, t.hd * 4);
      for (int c = 0; c < t.columns; c++) {
        HR_TILE_LOAD_ROWS(7, values[c] + 2 * i, t.hd * 4);
        if (last) HR_TILE_LOAD_ROWS(5, w + r * KEYS + 16 * c, KEYS * 2);
        else HR_TILE_LOAD_ROWS(4, w + r * KEYS + 16 * c, KEYS * 2);
        if (last) HR_TILE_ADD(1, 5, 7);
        else HR_TILE_ADD(0, 4, 7);
      }
      if (last) HR_TILE_STORE_ROWS(1, o, t.hd * 4);
      else HR_TILE_STORE_ROWS(0, o, t.hd * 4);
    }
  }
}

// `soften` of attention.h, with the weights as bfloat16 and without a scale of their own; what was gathered is made ready for more.
static void soften_tile(const Tile& t, const Tile* next, int tile, int window, float cap, Gathered& g) {
  float tops[QUERIES + 16];
  V scale[KEYS / 16], weight[KEYS / 16];
  for (int c = 0; c < t.columns; c++) {
    scale[c] = load(t.key_scales[c]);
    weight[c] = load(t.value_scales[c]);
  }
  for (int r = 0; r < g.n; r++) {
    float* s = g.s + r * KEYS;
    const Seen seen = seen_by(t, tile, window, g.positions[r]);
    V top = set1(LEAST);
    for (int c = 0; c < t.columns; c++) {
      V v = mul(mul(load(s + 16 * c), scale[c]), set1(g.q_scale[r]));
      if (cap > 0) v = mul(tanh(mul(v, set1(1.0f / cap))), set1(cap * LOG2_E));
      if (!seen.whole) v = keep(v, seen.first - 16 * c, seen.end - 16 * c, -INFINITY);
      store(s + 16 * c, v);
      top = max(top, v);
    }
    tops[r] = largest(top);
  }
  raise_tops(g, tops);
  for (int r = 0; r < g.n; r++) {
    float *s = g.s + r * KEYS, *total = g.total + 16 * r, *o = g.o + (int64_t)r * t.hd;
    const Seen seen = seen_by(t, tile, window, g.positions[r]);
    const V top = set1(g.top[r]), again = set1(g.again[r]);
    V v[KEYS / 16];
    for (int c = 0; c < KEYS / 16; c++) v[c] = c < t.columns ? sub(load(s + 16 * c), top) : set1(LEAST);
    powers_of_2<KEYS / 16>(v);
    V all = mul(load(total), again);
    for (int c = 0; c < t.columns; c++) {
      // A score that is no number makes the sum none.
      all = add(all, v[c]);
      v[c] = mul(v[c], weight[c]);
      if (!seen.whole) v[c] = keep(v[c], seen.first - 16 * c, seen.end - 16 * c, 0.0f);
    }
    store(total, all);
    if (r < 4) fetch_values(next, 16 + 4 * r, 4);
    for (int c = 0; c < t.columns; c++) _mm256_storeu_si256((__m256i*)(g.w + r * KEYS + 16 * c), (__m256i)_mm512_cvtneps_pbh(v[c].x));
    for (int i = 0; i < t.hd; i += 16) store(o + i, mul(load(o + i), again));
  }
}

static void attend_tile(const HrOp& op, int tile, const Tile& t, const Tile* next, Gathered& g) {
  for (int c = 0; next && c < next->columns; c++) fetch(next->key_scales[c]), fetch(next->value_scales[c]);
  int16_t copy[16 * 512];
  scores_of_tile(t, next, g, copy);
  soften_tile(t, next, tile, op.window, op.f1, g);
  values_of_tile(t, next, g, copy);
}

}  // namespace HR_ISA
