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

// The keys that come next are on their way beside the scores, the values beside the softmax, or what is wanted now would wait behind
// them.
static inline void fetch_keys(const Tile* next, int column) {
  if (next && column < next->columns)
    for (int i = 0; i < next->hd / 4; i++) fetch(next->keys[column] + i * next->key_stride);
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

// A processor whose tiles have had nothing to multiply for half a microsecond puts them to sleep, and stands still for a third of one
// meanwhile (as measured; no manual says so). The softmax of many rows takes longer. So tiles get a product now and then, whose
// sums nobody wants.
static inline void keep_awake(int row, int n) {
  if (gathers(n) && row % TILE_ROWS == 0) HR_TILE_VALUE(0, 6, 7);
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
