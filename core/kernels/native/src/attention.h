// Attention over the paged cache, with a running softmax over tiles of keys.
//
// Queries, keys, values and weights are integers of 16 bits, or of 8, with a scale for each row of them: one instruction multiplies
// two pairs, or four, of each lane, twice what it does for floats, or four times, and nothing has to be converted on the way. A sum
// over a tile is exact. (On the processor's tiles: attend_tiles.h.)
#pragma once
#include "softmax.h"

namespace HR_ISA {

constexpr int TOGETHER = 2 * COLUMNS;  // vectors of keys, or of features, that are summed at once

// What 4 bytes hold of a key, a query, a value or a weight, and how they are multiplied.
struct Shorts {
  static constexpr int N = 2;
  // Scores are made of sums of products at once, in floats.
  static inline void put(float* s, I sum, V key_scale, float q_scale) {
    ::HR_ISA::store(s, mul(mul(to_float(sum), key_scale), set1(q_scale)));
  }
  static inline void soften(const Tile& t, int tile, const HrOp& op, Gathered& g) {
    ::HR_ISA::soften<Shorts>(t, tile, op.window, op.f1, g);
  }
  static inline P keys(const char* p) { return load_pairs((const int16_t*)p); }
  static inline P values(const char* p) { return load_pairs((const int16_t*)p); }
  static inline P set(const char* p) { return set_pair((const int16_t*)p); }
  static inline I begin(int32_t) { return i_zero(); }
  static inline I add_keys(I sum, const P& keys, const P& query) { return dot2(sum, keys, query); }
  static inline I add_values(I sum, const P& values, const P& weights) { return dot2(sum, values, weights); }
  // What a query is multiplied with for its integers, and where its sums begin.
  static inline float query(const float* x, int hd, char* to, int32_t* start) {
    *start = 0;
    return shorts_of(x, hd, (int16_t*)to);
  }
  // The scale of weights of which `most` is the largest, and their sum `all`.
  static inline V scale(V most, V all) { return max(mul(most, set1(1.0f / SHORT_WEIGHT)), mul(all, set1(1.0f / SHORT_WEIGHTS))); }
  static inline void store(char* w, int i, I weights) { store_shorts((int16_t*)w + i, weights); }
};

#if !defined(HR_AVX2)
// One factor of a product has no sign: keys get 128 more, and sums begin with as much less.
struct Octets {
  static constexpr int N = 4;
#if defined(HR_AVX512)
  static inline void put(float* s, I sum, V, float) { store_ints(s, sum); }
  static inline void soften(const Tile& t, int tile, const HrOp& op, Gathered& g) {
    soften_bytes(t, nullptr, tile, op.window, op.f1, g);
  }
#else
  static inline void put(float* s, I sum, V key_scale, float q_scale) { Shorts::put(s, sum, key_scale, q_scale); }
  static inline void soften(const Tile& t, int tile, const HrOp& op, Gathered& g) {
    ::HR_ISA::soften<Octets>(t, tile, op.window, op.f1, g);
  }
  // `all` is no number where one of the weights is none.
  static inline V scale(V most, V all) { return fma(all, zero(), mul(most, set1(1.0f / HEAVIEST))); }
  static inline void store(char* w, int i, I weights) { store_weights((uint8_t*)w + i, weights); }
#endif
  static inline U keys(const char* p) { return raised(load_u((const uint8_t*)p)); }
  static inline U values(const char* p) { return load_u((const uint8_t*)p); }
  static inline U set(const char* p) { return set_quad(p); }
  static inline I begin(int32_t start) { return i_set1(start); }
  static inline I add_keys(I sum, const U& keys, const U& query) { return dot4(sum, keys, query); }
  static inline I add_values(I sum, const U& values, const U& weights) { return dot4(sum, weights, values); }
  static inline float query(const float* x, int hd, char* to, int32_t* start) {
    float turned[512];
    spread(x, turned, hd);
    const float scale = bytes_of(turned, hd, (int8_t*)to);
    I all = i_zero();
    for (int i = 0; i < hd / 64 * 64; i += 64) all = dot4(all, raised(zeros()), load_u((const uint8_t*)to + i));
    *start = -(int32_t)sum(to_float(all));
    for (int i = hd / 64 * 64; i < hd; i++) *start -= 128 * ((const int8_t*)to)[i];
    return scale;
  }
#if defined(HR_AVX512) && !defined(HR_TILES)
  // Of four heads: what lanes have in common is found for all of them together. False where one has something that is no finite
  // number.
  static inline bool queries(const float* const* x, int hd, char* to, int32_t* start, float* scales) {
    constexpr int NO_NUMBER = 0x99;
    float turned[4][512];
    __m512 most[4];
    __mmask16 bad = 0;
    for (int r = 0; r < 4; r++) {
      spread(x[r], turned[r], hd);
      most[r] = zero().x;
      for (int i = 0; i < hd; i += 16) {
        const V v = load(turned[r] + i);
        bad |= _mm512_fpclass_ps_mask(v.x, NO_NUMBER);
        most[r] = _mm512_max_ps(most[r], abs(v).x);
      }
    }
    if (bad) return false;
    const Scaled scaled(most);
    __m512i sums[4];
    for (int r = 0; r < 4; r++) {
      sums[r] = _mm512_setzero_si512();
      for (int i = 0; i < hd; i += 16) {
        const I whole = to_int(mul(load(turned[r] + i), scaled.by[r]));
        store_bytes((int8_t*)to + r * hd + i, whole);
        sums[r] = _mm512_add_epi32(sums[r], whole.x);
      }
    }
    _mm_storeu_ps(scales, scaled.scale);
    _mm_storeu_si128((__m128i*)start, _mm_cvtps_epi32(_mm_mul_ps(sums_of(sums), _mm_set1_ps(-128.0f))));
    return true;
  }
#endif
};
#endif

// What is read after a tile is on its way a bit with each pair, where FETCH, so that memory has something to do all the while:
// it is nowhere the processor would guess.
template <class S, int R, int C, bool FETCH>
static inline void scores_of(const Tile& t, const Tile& next, int column, const Gathered& g, int row) {
  I acc[C][R];
  const int hd = t.hd, width = hd * 4 / S::N;
  const char *keys[C], *ahead[C], *q = g.q + row * width;
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) acc[c][r] = S::begin(g.start[row + r]);
    keys[c] = t.keys[column + c];
    if (FETCH) ahead[c] = next.keys[column + c];
  }
  const int64_t stride = t.key_stride;
  int64_t at = 0;
  for (int i = 0; i < width; i += 4, at += stride) {
    decltype(S::keys(q)) k[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      k[c] = S::keys(keys[c] + at);
      if (FETCH) fetch(ahead[c] + at);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const auto by = S::set(q + r * width + i);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[c][r] = S::add_keys(acc[c][r], k[c], by);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) {
    V scale = load(t.key_scales[column + c]);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      S::put(g.s + (row + r) * KEYS + 16 * (column + c), acc[c][r], scale, g.q_scale[row + r]);
  }
}

// 16 C features of R rows.
template <class S, int R, int C, bool FETCH>
static inline void values_of(const Tile& t, const Tile& next, int feature, const Gathered& g, int row) {
  I acc[C][R];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) acc[c][r] = i_zero();
  const int stride = 4 * t.hd, width = KEYS * 4 / S::N;
  for (int column = 0; column < t.columns; column++) {
    const char *values = t.values[column] + 4 * feature, *w = g.w + row * width + 16 * 4 / S::N * column;
    const char* ahead = FETCH ? next.values[std::min(column, next.columns - 1)] : nullptr;
    const int steps = (std::min(16, t.num_keys - 16 * column) + S::N - 1) / S::N;
    for (int j = 0; j < steps; j++, values += stride, w += 4) {
      if (FETCH)
        for (int i = 0; i < stride; i += 64) fetch(ahead + j * stride + i);
      decltype(S::values(w)) v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) v[c] = S::values(values + 64 * c);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const auto by = S::set(w + r * width);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[c][r] = S::add_values(acc[c][r], v[c], by);
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      float* o = g.o + (row + r) * t.hd + feature + 16 * c;
      store(o, fma(to_float(acc[c][r]), set1(g.w_scale[row + r]), mul(load(o), set1(g.again[row + r]))));
    }
}

template <class S, int R, int C>
static inline void scores_at(const Tile& t, const Tile* next, int column, const Gathered& g, int row) {
  if (next && column + C <= next->columns) scores_of<S, R, C, true>(t, *next, column, g, row);
  else scores_of<S, R, C, false>(t, t, column, g, row);
}

template <class S, int R>
static void scores_of_rows(const Tile& t, const Tile* next, const Gathered& g, int row) {
  int column = 0;
  for (; TOGETHER > 2 && column + TOGETHER <= t.columns; column += TOGETHER) scores_at<S, R, TOGETHER>(t, next, column, g, row);
  for (; COLUMNS > 1 && column + 2 <= t.columns; column += 2) scores_at<S, R, COLUMNS>(t, next, column, g, row);
  for (; column < t.columns; column++) scores_at<S, R, 1>(t, next, column, g, row);
}

template <class S, int R, int C>
static inline void values_at(const Tile& t, const Tile* next, int feature, const Gathered& g, int row) {
  if (next && next->columns && feature == 0) values_of<S, R, C, true>(t, *next, feature, g, row);
  else values_of<S, R, C, false>(t, t, feature, g, row);
}

template <class S, int R>
static void values_of_rows(const Tile& t, const Tile* next, const Gathered& g, int row) {
  int i = 0;
  for (; COLUMNS > 1 && i + 16 * TOGETHER <= t.hd; i += 16 * TOGETHER) values_at<S, R, TOGETHER>(t, next, i, g, row);
  for (; i < t.hd; i += 16) values_at<S, R, 1>(t, next, i, g, row);
}

#define HR_BY_ROWS(call, n)               \
  do {                                    \
    int r = 0;                            \
    for (; r + 4 <= (n); r += 4) call(4); \
    if ((n)-r == 3) { call(3); }          \
    else if ((n)-r == 2) { call(2); }     \
    else if ((n)-r == 1) { call(1); }     \
  } while (0)

// What attention reads of one KV head, from some position on, which is a multiple of 16.
static Tile cached_tile(const Run& run, const HrOp& op, int seq, int kv_head, int tile, int num_keys) {
  const HrCache& c = run.program->cache;
  const int32_t* table = run.step->tables + run.step->cu_blocks[seq];
  Tile t{{}, {}, {}, {}, 4 * c.block_size, (num_keys + 15) / 16, num_keys, op.inner};
  for (int i = 0; i < t.columns; i++) {
    int position = tile + 16 * i, slot = position % c.block_size;
    char* keys = c.data + table[position / c.block_size] * c.block_stride + op.layer * c.layer_stride + kv_head * c.head_stride;
    char* values = keys + c.value_offset;
    t.keys[i] = keys + 4 * slot;
    t.values[i] = values + slot * op.inner * c.bits / 8;
    t.key_scales[i] = scales_at(c, op.inner, keys) + slot;
    t.value_scales[i] = scales_at(c, op.inner, values) + slot;
  }
  return t;
}

// next: what comes after this tile; null where nothing does.
template <class S>
static void attend_tile(const HrOp& op, int tile, const Tile& t, const Tile* next, Gathered& g) {
  for (int c = 0; next && c < next->columns; c++) fetch(next->key_scales[c]), fetch(next->value_scales[c]);
#define HR_SCORES(R) scores_of_rows<S, R>(t, r == 0 ? next : nullptr, g, r)
  HR_BY_ROWS(HR_SCORES, g.n);
#undef HR_SCORES
  S::soften(t, tile, op, g);
#define HR_VALUES(R) values_of_rows<S, R>(t, r == 0 ? next : nullptr, g, r)
  HR_BY_ROWS(HR_VALUES, g.n);
#undef HR_VALUES
}

#if defined(HR_TILES)
static void set_attention_tiles(int hd, int n);
static inline void release_tiles();
static void attend_bytes(const HrOp& op, int tile, const Tile& t, const Tile* next, Gathered& g);
#endif

// Tiles that some rows of a unit look at together: its i-th of n rows, at keys [from, to) of that row's sequence.
struct Span {
  int i, n, seq, from, to;
};
static int num_spans(const Unit& unit) { return unit.shared == Unit::ALL ? 1 : 1 + unit.end - unit.first; }
// First what all share, then what each has for itself.
static Span span_of(const Run& run, const HrOp& op, const Unit& unit, int which) {
  const int n = unit.end - unit.first, i = std::max(0, which - 1);
  const int row = run.rows[unit.first + i], last = run.step->positions[run.rows[which ? unit.first + i : unit.end - 1]] + 1;
  if (which) return {i, 1, run.row_seq[row], unit.shared, last};
  const int from = op.window ? std::max(0, run.step->positions[row] - op.window + 1) / KEYS * KEYS : 0;
  return {0, n, run.row_seq[row], from, std::min(unit.shared, last)};
}

static Tile tile_of(const Run& run, const HrOp& op, const Span& span, int kv_head, int tile) {
  return cached_tile(run, op, span.seq, kv_head, tile, std::min(KEYS, span.to - tile));
}

static void finish_queries(const Run& run, const HrOp& op, const Unit& unit, int kv_head, Gathered& g) {
  const int hd = op.inner, heads = op.heads / op.kv_heads;
  const int width = heads * hd, column = kv_head * width;
  for (int r = 0; r < g.n; r++) {
    float* o = g.o + r * hd;
    V by = set1(1.0f / sum(load(g.total + 16 * r)));
    for (int i = 0; i < hd; i += 16) store(o + i, mul(load(o + i), by));
  }
  // The heads of a row lie together.
  for (int r = 0; r < g.n; r += heads) {
    const int row = run.rows[unit.first + r / heads];
    const float* o = g.o + r * hd;
    if (op.out.buf >= 0)
      for (int i = 0; i < width; i += 16) store(output(run, op.out, row) + column + i, load(o + i));
    if (op.qout >= 0) put_row(run.program->ints[op.qout], row, column / GROUP, o, width);
  }
}

// n heads of queries as integers, with where sums of products with them begin, and their scales.
static void put_queries(bool bytes, const float* const* from, int n, int hd, char* q, int32_t* start, float* scales) {
#if !defined(HR_AVX2)
  for (int r = 0; bytes && r < n; r++) {
#if defined(HR_AVX512) && !defined(HR_TILES)
    if (r + 4 <= n && Octets::queries(from + r, hd, q + r * hd, start + r, scales + r)) {
      r += 3;
      continue;
    }
#endif
    scales[r] = Octets::query(from[r], hd, q + r * hd, start + r);
  }
#endif
  for (int r = 0; !bytes && r < n; r++) scales[r] = Shorts::query(from[r], hd, q + r * hd * 2, start + r);
}

// A unit under KV heads [first_head, end_head). Tiles of keys come in ascending order. following: what the same thread reads after
// it.
static void attend_unit(const Run& run, const HrOp& op, const Unit& unit, int first_head, int end_head, const Tile& following,
                        float* scratch) {
  const int hd = op.inner, heads = op.heads / op.kv_heads, n = (unit.end - unit.first) * heads, all = n * (end_head - first_head);
  float top[QUERIES + 16], total[QUERIES * 16], q_scale[QUERIES], w_scale[QUERIES + 16], again[QUERIES + 16];
  int positions[QUERIES];
  int32_t start[QUERIES];
  float *o = (float*)(((uintptr_t)scratch + 63) / 64 * 64), *s = o + QUERIES * hd;
  char *q = (char*)(s + QUERIES * KEYS), *w = q + QUERIES * hd * 2;
  const HrBuffer& query = run.program->buffers[op.a.buf];
  const bool bytes = run.program->cache.bits == 8;
  const int width = hd * run.program->cache.bits / 8;
  const float* from[QUERIES];
  for (int r = 0; r < all; r++) {
    const int head = (first_head + r / n) * heads + r % n % heads, row = run.rows[unit.first + r % n / heads];
    from[r] = query.data + row * query.stride + op.a.off + head * hd;
    positions[r] = run.step->positions[row];
    for (int i = 0; i < hd; i += 16) store(o + r * hd + i, zero());
    top[r] = LEAST;
    store(total + 16 * r, zero());
  }
  put_queries(bytes, from, all, hd, q, start, q_scale);
  for (int r = 0; r < all; r++) q_scale[r] *= op.f1 > 0 ? op.f0 : op.f0 * LOG2_E;
  auto gathered = [&](int h, const Span& span) {
    const int at = (h - first_head) * n + span.i * heads;
    return Gathered{span.n * heads, positions + at, start + at, q + at * width, w,        o + at * hd,
                    s,              q_scale + at,   w_scale,    again,          top + at, total + 16 * at};
  };
  const int spans = num_spans(unit);
  for (int which = 0; which < spans; which++) {
    const Span span = span_of(run, op, unit, which);
#if defined(HR_TILES)
    if (bytes) set_attention_tiles(hd, span.n * heads);
#endif
    for (int tile = span.from; tile < span.to; tile += KEYS) {
      for (int h = first_head; h < end_head; h++) {
        Gathered g = gathered(h, span);
        Tile t = tile_of(run, op, span, h, tile), next{};
        if (h + 1 < end_head) next = tile_of(run, op, span, h + 1, tile);
        else if (tile + KEYS < span.to) next = tile_of(run, op, span, first_head, tile + KEYS);
        else if (which + 1 < spans) next = tile_of(run, op, span_of(run, op, unit, which + 1), first_head, unit.shared);
        else next = following;
#if defined(HR_TILES)
        if (bytes) {
          attend_bytes(op, tile, t, &next, g);
          continue;
        }
#elif !defined(HR_AVX2)
        if (bytes) {
          attend_tile<Octets>(op, tile, t, &next, g);
          continue;
        }
#endif
        attend_tile<Shorts>(op, tile, t, &next, g);
      }
    }
  }
#if defined(HR_TILES)
  if (bytes) release_tiles();
#endif
  for (int h = first_head; h < end_head; h++) {
    Gathered g = gathered(h, {0, n / heads, 0, 0, 0});
    finish_queries(run, op, unit, h, g);
  }
}

// An item is a unit under some KV heads. next_item: the one that the same thread is likely to take next, or -1.
static void attend_item(const Run& run, const HrOp& op, int item, int next_item, float* scratch) {
  const int together = run.heads_together, parts = op.kv_heads / together;
  Tile following{};
  if (next_item >= 0) {
    const Span span = span_of(run, op, run.units[next_item / parts], 0);
    following = tile_of(run, op, span, next_item % parts * together, span.from);
  }
  const int head = item % parts * together;
  if (op.gather && !run.units[item / parts].sampled) return;
  attend_unit(run, op, run.units[item / parts], head, head + together, following, scratch);
}

}  // namespace HR_ISA
