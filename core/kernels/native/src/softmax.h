// The running softmax of attention over tiles of keys, and what it works on.
#pragma once
#include "rows.h"

namespace HR_ISA {

constexpr int QUERIES = HR_MAX_QUERIES;  // query rows that a unit takes under the KV heads it takes together
constexpr int KEYS = HR_KEYS;            // keys a tile has, aligned to absolute positions
constexpr float LEAST = -1e38f;          // of scores, so that there is a largest even of none
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float HEAVIEST = 255.0f;       // the largest of a row's weights in a tile, as 8 bits

// The keys and values of one KV head over a tile: `columns` of 16 keys, which lie apart.
struct Tile {
  const char *keys[KEYS / 16], *values[KEYS / 16];
  const float *key_scales[KEYS / 16], *value_scales[KEYS / 16];
  int64_t key_stride;  // from one 4 bytes of a key's features to the next
  int columns, num_keys, hd;
};

// The queries of some rows under one KV head, and what was gathered for them so far.
struct Gathered {
  int n;                             // queries
  const int* positions;              // [n]
  const int32_t* start;              // [n]: what a sum of products of keys begins with
  char *q, *w;                       // [n, hd]; [n, KEYS], the weights of a tile's values
  float *o, *s;                      // [n, hd]; [n, KEYS]
  float *q_scale, *w_scale, *again;  // [n]; again: what is left of `o` when a tile is added
  float *top, *total;                // [n], [n, 16]: the sum of weights is that of the lanes
};

// Which keys of a tile a row sees.
struct Seen {
  int first, end;
  bool whole;
};
static inline Seen seen_by(const Tile& t, int tile, int window, int position) {
  const int first = window ? position - window + 1 - tile : 0, end = std::min(position + 1 - tile, t.num_keys);
  return {first, end, first <= 0 && end >= 16 * t.columns};
}

// The weights of columns [c, c + N) of a row's tile: their sum, that of the weights times their values' scales, and the largest of
// these.
struct Weighed {
  V all, scaled, heaviest;
};
template <int N>
HR_INLINE void weigh(const Tile& t, const Seen& seen, int c, float* s, V top, Weighed& w) {
  V v[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) v[i] = sub(load(s + 16 * (c + i)), top);
  powers_of_2<N>(v);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    // A score that is no number makes the sum none.
    w.all = add(w.all, v[i]);
    v[i] = mul(v[i], load(t.value_scales[c + i]));
    if (!seen.whole) v[i] = keep(v[i], seen.first - 16 * (c + i), seen.end - 16 * (c + i), 0.0f);
    store(s + 16 * (c + i), v[i]);
    w.scaled = add(w.scaled, v[i]);
    w.heaviest = max(w.heaviest, v[i]);
  }
}

// The largest scores so far, with those of a tile, and how much is left of what was gathered under smaller ones. `tops` has room
// for 16 rows more.
static inline void raise_tops(Gathered& g, float* tops) {
  store(tops + g.n, set1(LEAST));
  for (int r = 0; r < g.n; r += 16) {
    V before = load(g.top + r), now = max(before, load(tops + r)), again = sub(before, now);
    powers_of_2<1>(&again);
    store(g.top + r, now);
    store(g.again + r, again);
  }
}

// The running softmax over the scores of a tile, which are logarithms to base 2: they become weights, of which the sums are
// kept, and the scale of what was gathered before. In passes over the rows, for what one needs of the other takes long to
// come. What is gathered has room for 16 rows more, so that no pass has to count: LEAST and 0 leave a row as it was.
template <class S>
static inline void soften(const Tile& t, int tile, int window, float cap, Gathered& g) {
  float tops[QUERIES + 16], sums[QUERIES + 16], most[QUERIES + 16];
  for (int r = 0; r < g.n; r++) {
    float* s = g.s + r * KEYS;
    const Seen seen = seen_by(t, tile, window, g.positions[r]);
    V top = set1(LEAST);
    for (int c = 0; c < t.columns; c++) {
      V v = load(s + 16 * c);
      if (cap > 0) v = mul(tanh(mul(v, set1(1.0f / cap))), set1(cap * LOG2_E));
      if (!seen.whole) v = keep(v, seen.first - 16 * c, seen.end - 16 * c, -INFINITY);
      if (cap > 0 || !seen.whole) store(s + 16 * c, v);
      top = max(top, v);
    }
    tops[r] = largest(top);
  }
  raise_tops(g, tops);
  for (int r = 0; r < g.n; r++) {
    float *s = g.s + r * KEYS, *total = g.total + 16 * r;
    const Seen seen = seen_by(t, tile, window, g.positions[r]);
    const V top = set1(g.top[r]);
    Weighed w{mul(load(total), set1(g.again[r])), zero(), zero()};
    int c = 0;
    for (; c + POWERS <= t.columns; c += POWERS) weigh<POWERS>(t, seen, c, s, top, w);
    for (; POWERS > 1 && c < t.columns; c++) weigh<1>(t, seen, c, s, top, w);
    store(total, w.all);
    sums[r] = sum(w.scaled);
    most[r] = largest(w.heaviest);
  }
  store(sums + g.n, zero());
  store(most + g.n, zero());
  for (int r = 0; r < g.n; r += 16) store(g.w_scale + r, S::scale(load(most + r), load(sums + r)));
  for (int r = 0; r < g.n; r++) {
    const float size = g.w_scale[r];
    V by = set1(size >= 0x1p-126f && size < INFINITY ? 1.0f / size : 0.0f);
    for (int c = 0; c < t.columns; c++) S::store(g.w, r * KEYS + 16 * c, to_int(mul(load(g.s + r * KEYS + 16 * c), by)));
  }
}

#if defined(HR_AVX512)

// The values that come next, beside the softmax.
static inline void fetch_values(const Tile* next, int column) {
  if (next && column < next->columns)
    for (int i = 0; i < next->hd * 16; i += 64) fetch(next->values[column] + i);
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

#if defined(HR_TILES)
static inline void keep_awake(int row, int n);
#else
static inline void keep_awake(int, int) {}
#endif

// `soften` of scores that are sums of products still, with weights of 8 bits.
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
      store_weights(w + 16 * c, to_int(mul(load(s + 16 * c), by)));
  }
}

#endif

}  // namespace HR_ISA
