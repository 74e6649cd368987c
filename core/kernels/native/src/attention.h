// Attention over the paged cache, with a running softmax over tiles of keys.
//
// Queries, keys, values and weights are integers of 16 bits, or of 8, with a scale for each row of them: one instruction multiplies
// two pairs, or four, of each lane, twice what it does for floats, or four times, and nothing has to be converted on the way. A sum
// over a tile is exact. (On the processor's tiles: attend_tiles.h.)
#pragma once
#include "rows.h"

namespace HR_ISA {

constexpr int QUERIES = HR_MAX_QUERIES;  // query rows that a unit takes under the KV heads it takes together
constexpr int KEYS = HR_KEYS;            // keys a tile has, aligned to absolute positions
constexpr float LEAST = -1e38f;          // of scores, so that there is a largest even of none
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float HEAVIEST = 255.0f;       // the largest of a row's weights in a tile, as 8 bits
constexpr int TOGETHER = 2 * COLUMNS;    // vectors of keys, or of features, that are summed at once

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

// What 4 bytes hold of a key, a query, a value or a weight, and how they are multiplied.
struct Shorts {
  static constexpr int N = 2;
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
    for (int i = hd / 64 * 64; i < hd; i++) *start -= 128 * to[i];
    return scale;
  }
  // `all` is no number where one of the weights is none.
  static inline V scale(V most, V all) { return fma(all, zero(), mul(most, set1(1.0f / HEAVIEST))); }
  static inline void store(char* w, int i, I weights) { store_weights((uint8_t*)w + i, weights); }
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
      store(g.s + (row + r) * KEYS + 16 * (column + c), mul(mul(to_float(acc[c][r]), scale), set1(g.q_scale[row + r])));
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
    V by = set1(size > 0 && size < INFINITY ? 1.0f / size : 0.0f);
    for (int c = 0; c < t.columns; c++) S::store(g.w, r * KEYS + 16 * c, to_int(mul(load(g.s + r * KEYS + 16 * c), by)));
  }
}

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
  soften<S>(t, tile, op.window, op.f1, g);
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
  for (int r = 0; r < g.n; r++) {
    int row = run.rows[unit.first + r / heads], column = (kv_head * heads + r % heads) * hd;
    float* o = g.o + r * hd;
    V by = set1(1.0f / sum(load(g.total + 16 * r)));
    for (int i = 0; i < hd; i += 16) store(o + i, mul(load(o + i), by));
    if (op.out.buf >= 0)
      for (int i = 0; i < hd; i += 16) store(output(run, op.out, row) + column + i, load(o + i));
    if (op.qout >= 0) put_row(run.program->ints[op.qout], row, column / GROUP, o, hd);
  }
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
  [[maybe_unused]] const bool bytes = run.program->cache.bits == 8;
  const int width = hd * run.program->cache.bits / 8;
  for (int r = 0; r < all; r++) {
    int head = (first_head + r / n) * heads + r % n % heads;
    const int row = run.rows[unit.first + r % n / heads];
    const float* from = query.data + row * query.stride + op.a.off + head * hd;
    positions[r] = run.step->positions[row];
#if !defined(HR_AVX2)
    q_scale[r] = bytes ? Octets::query(from, hd, q + r * width, start + r) : Shorts::query(from, hd, q + r * width, start + r);
#else
    q_scale[r] = Shorts::query(from, hd, q + r * width, start + r);
#endif
    q_scale[r] *= op.f1 > 0 ? op.f0 : op.f0 * LOG2_E;
    for (int i = 0; i < hd; i += 16) store(o + r * hd + i, zero());
    top[r] = LEAST;
    store(total + 16 * r, zero());
  }
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
