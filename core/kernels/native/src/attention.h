// Attention over the paged cache, with a running softmax over tiles of keys.
#pragma once
#include "rows.h"

namespace HR_ISA {

constexpr int QUERIES = HR_MAX_QUERIES;  // query rows that a unit takes under the KV heads it takes together
constexpr int KEYS = HR_KEYS;            // keys a tile has, aligned to absolute positions
constexpr int MANY_QUERIES = 8;          // from which on a tile is converted once for all of them

// The keys and values of one KV head over a tile: `columns` of 16 keys, which lie apart.
template <class T>
struct Tile {
  const T *keys[KEYS / 16], *values[KEYS / 16];
  int64_t key_stride;  // from one feature of a key to the next
  int columns, num_keys, hd;
};

// Have on its way what attention reads next, a bit with each feature of the keys and each key of the values, so that memory
// has something to do all the while: it is nowhere the processor would guess.
template <int C>
struct NextKeys {
  const uint16_t* keys[C];
  int64_t key_stride;
  inline void operator()(int feature) const {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) fetch(keys[c] + feature * key_stride);
  }
};
struct NextValues {
  const uint16_t* values;
  int hd;
  inline void operator()(int key) const {
    for (int i = 0; i < hd; i += 32) fetch(values + key * hd + i);
  }
};

// The queries of some rows under one KV head, and what was gathered for them so far.
struct Gathered {
  int n;  // queries
  float *q, *o, *s;     // [n, hd], [n, hd], [n, KEYS]
  float *top, *total;  // [n], [n, 16]: the sum of weights is that of the lanes
};

template <class S, int R, int C>
static inline void scores_of(const Tile<typename S::T>& t, const Tile<uint16_t>* next, int column, const float* q, float* s) {
  V acc[C][R];
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) acc[c][r] = zero();
  const int64_t apart = C > 1 ? t.keys[column + C - 1] - t.keys[column] : 0;
  if (next && column + C <= next->columns) {
    NextKeys<C> each;
    each.key_stride = next->key_stride;
    for (int c = 0; c < C; c++) each.keys[c] = next->keys[column + c];
    dot_float<S, R, C>(t.keys[column], t.key_stride, apart, t.hd, q, t.hd, acc, each);
  } else {
    dot_float<S, R, C>(t.keys[column], t.key_stride, apart, t.hd, q, t.hd, acc, Nothing{});
  }
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) store(s + r * KEYS + 16 * (column + c), acc[c][r]);
}

// 16 C features of R rows, over the keys in ascending order.
template <class S, int R, int C>
static inline void values_of(const Tile<typename S::T>& t, const Tile<uint16_t>* next, int feature, const float* p, float* o) {
  V acc[C][R];
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) acc[c][r] = load(o + r * t.hd + feature + 16 * c);
  for (int column = 0; column < t.columns; column++) {
    const auto* values = t.values[column] + feature;
    const int seen = std::min(16, t.num_keys - 16 * column);
    if (next && column < next->columns) {
      NextValues each{next->values[column], t.hd};
      dot_float<S, R, C>(values, t.hd, 16, seen, p + 16 * column, KEYS, acc, each);
    } else {
      dot_float<S, R, C>(values, t.hd, 16, seen, p + 16 * column, KEYS, acc, Nothing{});
    }
  }
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) store(o + r * t.hd + feature + 16 * c, acc[c][r]);
}

template <class S, int R>
static void scores_of_rows(const Tile<typename S::T>& t, const Tile<uint16_t>* next, Gathered& g, int r) {
  const float* q = g.q + r * t.hd;
  float* s = g.s + r * KEYS;
  int column = 0;
  for (; COLUMNS > 1 && column + COLUMNS <= t.columns; column += COLUMNS) scores_of<S, R, COLUMNS>(t, next, column, q, s);
  for (; column < t.columns; column++) scores_of<S, R, 1>(t, next, column, q, s);
}

template <class S, int R>
static void values_of_rows(const Tile<typename S::T>& t, const Tile<uint16_t>* next, Gathered& g, int r) {
  constexpr int C = 2 * COLUMNS;
  const float* p = g.s + r * KEYS;
  float* o = g.o + r * t.hd;
  int i = 0;
  for (; COLUMNS > 1 && i + 16 * C <= t.hd; i += 16 * C) values_of<S, R, C>(t, i == 0 ? next : nullptr, i, p, o);
  for (; i < t.hd; i += 16) values_of<S, R, 1>(t, i == 0 ? next : nullptr, i, p, o);
}

#define HR_BY_ROWS(call, n)               \
  do {                                    \
    int r = 0;                            \
    for (; r + 4 <= (n); r += 4) call(4); \
    if ((n)-r == 3) { call(3); }          \
    else if ((n)-r == 2) { call(2); }     \
    else if ((n)-r == 1) { call(1); }     \
  } while (0)

// The running softmax of one row over the scores of a tile, of which [first, end) are seen: scores become weights, the sum
// and the scale of what was gathered before are kept. False: the row sees nothing of the tile.
static inline bool soften(float* s, int columns, int first, int end, float cap, float* top, float* total, float* again) {
  const bool whole = first <= 0 && end >= 16 * columns;
  V most = set1(-INFINITY), nothing = zero();
  for (int c = 0; c < columns; c++) {
    V v = load(s + 16 * c);
    if (cap > 0) v = mul(tanh(mul(v, set1(1.0f / cap))), set1(cap));
    // A score that is no number must not vanish in a comparison: it goes into the sum.
    nothing = fma(whole ? v : keep(v, first - 16 * c, end - 16 * c, 0.0f), zero(), nothing);
    if (!whole) v = keep(v, first - 16 * c, end - 16 * c, -INFINITY);
    if (cap > 0 || !whole) store(s + 16 * c, v);
    most = max(most, v);
  }
  V sums = add(load(total), nothing);
  float tile_top = largest(most);
  *again = 1.0f;
  if (tile_top == -INFINITY) {
    for (int c = 0; c < columns; c++) store(s + 16 * c, zero());
    store(total, sums);
    return false;
  }
  if (tile_top > *top) {
    float change[16];
    store(change, exp(set1(*top - tile_top)));
    *again = change[0];
    *top = tile_top;
    sums = mul(sums, set1(*again));
  }
  for (int c = 0; c < columns; c++) {
    V v = exp(sub(load(s + 16 * c), set1(*top)));
    store(s + 16 * c, v);
    sums = add(sums, v);
  }
  store(total, sums);
  return true;
}

// What attention reads of one KV head, from some position on.
static inline const uint16_t* keys_at(const HrCache& c, const HrOp& op, const int32_t* table, int position, int kv_head) {
  return c.data + table[position / c.block_size] * c.block_stride + op.layer * c.layer_stride + kv_head * c.head_stride +
         position % c.block_size;
}
static inline const uint16_t* values_at(const HrCache& c, const HrOp& op, const int32_t* table, int position, int kv_head) {
  return c.data + table[position / c.block_size] * c.block_stride + op.layer * c.layer_stride + kv_head * c.head_stride +
         c.value_offset + position % c.block_size * op.inner;
}

// next: what comes after this tile; null where it comes by itself.
template <class S>
static void attend_tile(const Run& run, const HrOp& op, const Unit& unit, int tile, const Tile<typename S::T>& t,
                        const Tile<uint16_t>* next, Gathered& g) {
  const int heads = op.heads / op.kv_heads;
#define HR_SCORES(R) scores_of_rows<S, R>(t, r == 0 ? next : nullptr, g, r)
  HR_BY_ROWS(HR_SCORES, g.n);
#undef HR_SCORES
  bool any = false;
  for (int r = 0; r < g.n; r++) {
    int position = run.step->positions[unit.first + r / heads];
    int first = op.window ? position - op.window + 1 - tile : 0;
    float again;
    if (!soften(g.s + r * KEYS, t.columns, first, std::min(position + 1 - tile, t.num_keys), op.f1, &g.top[r], g.total + 16 * r, &again))
      continue;
    any = true;
    if (again != 1.0f)
      for (int i = 0; i < t.hd; i += 16) store(g.o + r * t.hd + i, mul(load(g.o + r * t.hd + i), set1(again)));
  }
  if (!any) return;
#define HR_VALUES(R) values_of_rows<S, R>(t, r == 0 ? next : nullptr, g, r)
  HR_BY_ROWS(HR_VALUES, g.n);
#undef HR_VALUES
}

static int first_tile(const Run& run, const HrOp& op, const Unit& unit) {
  return op.window ? std::max(0, run.step->positions[unit.first] - op.window + 1) / KEYS * KEYS : 0;
}

static Tile<uint16_t> cached_tile(const Run& run, const HrOp& op, const Unit& unit, int kv_head, int tile, int num_keys) {
  const HrCache& c = run.program->cache;
  const int32_t* table = run.step->tables + run.step->cu_blocks[unit.seq];
  Tile<uint16_t> t{{}, {}, c.block_size, (num_keys + 15) / 16, num_keys, op.inner};
  for (int i = 0; i < t.columns; i++) {
    t.keys[i] = keys_at(c, op, table, tile + 16 * i, kv_head);
    t.values[i] = values_at(c, op, table, tile + 16 * i, kv_head);
  }
  return t;
}

static Tile<uint16_t> opening_tile(const Run& run, const HrOp& op, const Unit& unit, int kv_head) {
  int tile = first_tile(run, op, unit);
  return cached_tile(run, op, unit, kv_head, tile, std::min(KEYS, run.step->positions[unit.end - 1] + 1 - tile));
}

// The same as floats, at `to`: [hd, KEYS] keys, then [KEYS, hd] values.
static Tile<float> converted(const Tile<uint16_t>& t, float* to) {
  float* values = to + KEYS * t.hd;
  Tile<float> out{{}, {}, KEYS, t.columns, t.num_keys, t.hd};
  for (int c = 0; c < t.columns; c++) {
    out.keys[c] = to + 16 * c;
    out.values[c] = values + 16 * c * t.hd;
    for (int i = 0; i < t.hd; i++) store(to + i * KEYS + 16 * c, load_half(t.keys[c] + i * t.key_stride));
    for (int i = 0; i < std::min(16, t.num_keys - 16 * c) * t.hd; i += 16) store(values + 16 * c * t.hd + i, load_half(t.values[c] + i));
  }
  return out;
}

static void finish_queries(const Run& run, const HrOp& op, const Unit& unit, int kv_head, Gathered& g) {
  const int hd = op.inner, heads = op.heads / op.kv_heads;
  for (int r = 0; r < g.n; r++) {
    int row = unit.first + r / heads, column = (kv_head * heads + r % heads) * hd;
    float* o = g.o + r * hd;
    V by = set1(1.0f / sum(load(g.total + 16 * r)));
    for (int i = 0; i < hd; i += 16) store(o + i, mul(load(o + i), by));
    if (op.out.buf >= 0) std::memcpy(output(run, op.out, row) + column, o, (size_t)hd * 4);
    if (op.qout >= 0) {
      const HrInts& out = run.program->ints[op.qout];
      quantize_row(o, hd, out.q + row * out.stride + column, scales_of(out, row) + column / GROUP * PER_GROUP, hd);
    }
  }
}

// Rows [first, end) of a sequence under KV heads [first_head, end_head). Tiles of keys come in ascending order. following: what
// the same thread reads after it.
static void attend_unit(const Run& run, const HrOp& op, const Unit& unit, int first_head, int end_head,
                        const Tile<uint16_t>& following, float* scratch) {
  const HrStep& step = *run.step;
  const int hd = op.inner, heads = op.heads / op.kv_heads, n = (unit.end - unit.first) * heads, all = n * (end_head - first_head);
  float top[QUERIES], total[QUERIES * 16];
  float *q = scratch, *o = q + QUERIES * hd, *s = o + QUERIES * hd, *floats = s + QUERIES * KEYS;
  const HrBuffer& query = run.program->buffers[op.a.buf];
  for (int r = 0; r < all; r++) {
    int head = (first_head + r / n) * heads + r % n % heads;
    const float* from = query.data + (unit.first + r % n / heads) * query.stride + op.a.off + head * hd;
    for (int i = 0; i < hd; i += 16) {
      store(q + r * hd + i, mul(load(from + i), set1(op.f0)));
      store(o + r * hd + i, zero());
    }
    top[r] = -INFINITY;
    store(total + 16 * r, zero());
  }
  const int to = step.positions[unit.end - 1] + 1;
  for (int tile = first_tile(run, op, unit); tile < to; tile += KEYS) {
    for (int h = first_head; h < end_head; h++) {
      int at = (h - first_head) * n;
      Gathered g{n, q + at * hd, o + at * hd, s, top + at, total + 16 * at};
      Tile<uint16_t> t = cached_tile(run, op, unit, h, tile, std::min(KEYS, to - tile)), next{};
      if (h + 1 < end_head) next = cached_tile(run, op, unit, h + 1, tile, t.num_keys);
      else if (tile + KEYS < to) next = cached_tile(run, op, unit, first_head, tile + KEYS, std::min(KEYS, to - tile - KEYS));
      else next = following;
      if (n >= MANY_QUERIES) attend_tile<Floats>(run, op, unit, tile, converted(t, floats), nullptr, g);
      else attend_tile<Half>(run, op, unit, tile, t, &next, g);
    }
  }
  for (int h = first_head; h < end_head; h++) {
    int at = (h - first_head) * n;
    Gathered g{n, q + at * hd, o + at * hd, s, top + at, total + 16 * at};
    finish_queries(run, op, unit, h, g);
  }
}

// An item is a unit under some KV heads. next_item: the one that the same thread is likely to take next, or beyond the last.
static void attend_item(const Run& run, const HrOp& op, int item, int next_item, float* scratch) {
  const int together = run.heads_together, parts = op.kv_heads / together;
  Tile<uint16_t> following{};
  if (next_item < run.num_units * parts)
    following = opening_tile(run, op, run.units[next_item / parts], next_item % parts * together);
  const int head = item % parts * together;
  if (op.gather && !run.units[item / parts].sampled) return;
  attend_unit(run, op, run.units[item / parts], head, head + together, following, scratch);
}

}  // namespace HR_ISA
