// Products: integers with packed weights of 4 and 8 bits, floats with floats.
#pragma once
#include "integers.h"

namespace HR_ISA {

// Bytes of a group of 4-bit weights, of the bytes of one of 8-bit weights, and of two of these with their scales.
constexpr int Q4_BYTES = 320, Q8_BYTES = 512, Q8_PAIR = 1088;
static inline int64_t block_bytes(int storage, int groups) {
  return storage == HR_Q4 ? (int64_t)groups * Q4_BYTES : (int64_t)(groups + 1) / 2 * Q8_PAIR;
}
// Where a group of 8-bit weights is in its block, and its scales.
static inline int64_t q8_at(int group) { return group / 2 * (int64_t)Q8_PAIR + 64 + group % 2 * Q8_BYTES; }
static inline int64_t q8_scales_at(int group) { return group / 2 * (int64_t)Q8_PAIR + group % 2 * 32; }

// A group of weights as a kernel wants it: 8 vectors, one for each 4 values of K.
struct Nibbles {
  template <int J>
  static inline U get(const uint8_t* w) {
    U u = load_u(w + 64 * (J % 4));
    return J < 4 ? low(u) : high(u);
  }
};
struct Bytes {
  template <int J>
  static inline U get(const uint8_t* w) { return load_u(w + 64 * J); }
};

// w: the group in the first of C blocks, the others ws bytes further on each.
template <class W, int J, int R, int C>
HR_INLINE void dot_quad(const uint8_t* w, int64_t ws, const int8_t* x, D (*d)[R]) {
  U u[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) u[c] = W::template get<J>(w + c * ws);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    B b = four(x + r * GROUP + 4 * J);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) d[c][r] = dot4(d[c][r], u[c], b);
  }
}

// Sums of the products of quads J of one group, for R rows and C blocks.
template <class W, int R, int C, int... J>
HR_INLINE void dot_quads(const uint8_t* w, int64_t ws, const int8_t* x, D (*d)[R]) {
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) d[c][r] = d_zero();
  (dot_quad<W, J, R, C>(w, ws, x, d), ...);
}
// Of the whole group. Quads that share bytes come one after the other.
template <class W, int R, int C>
HR_INLINE void dot_group(const uint8_t* w, int64_t ws, const int8_t* x, D (*d)[R]) {
  dot_quads<W, R, C, 0, 4, 1, 5, 2, 6, 3, 7>(w, ws, x, d);
}
// Of its halves, each times the scale it has. s: the floats with the group's integers.
template <class W, int R, int C>
HR_INLINE void dot_halves(const uint8_t* w, int64_t ws, const int8_t* x, const float* s, V (*sums)[R]) {
  D d[C][R];
  auto add = [&](int half) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const V sum = to_float(d[c][r]), by = set1(s[r * PER_FINE_GROUP + half]);
        sums[c][r] = half ? fma(sum, by, sums[c][r]) : mul(sum, by);
      }
  };
  dot_quads<W, R, C, 0, 1, 2, 3>(w, ws, x, d);
  add(0);
  dot_quads<W, R, C, 4, 5, 6, 7>(w, ws, x, d);
  add(1);
}

// What a group adds, in this order for every kernel. s: the floats with the group's integers. 4-bit weights, d n + m:
template <int R>
HR_INLINE void add_q4(const V* sums, V wd, V wm, const float* s, V* acc) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    acc[r] = fma(sums[r], mul(wd, set1(s[r * PER_GROUP])), acc[r]);
    acc[r] = fma(wm, set1(s[r * PER_GROUP + 1]), acc[r]);
  }
}
// 8-bit weights, d (n - 128):
template <int R>
HR_INLINE void add_q8(const V* sums, V wd, const float* s, V* acc) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r] = fma(fma(sums[r], set1(s[r * PER_GROUP]), set1(s[r * PER_GROUP + 2])), wd, acc[r]);
}

// And where its halves have scales, by which their sums are multiplied already.
template <int R>
HR_INLINE void add_fine_q4(const V* sums, V wd, V wm, const float* s, V* acc) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    acc[r] = fma(sums[r], wd, acc[r]);
    acc[r] = fma(wm, set1(s[r * PER_FINE_GROUP + 2]), acc[r]);
  }
}
template <int R>
HR_INLINE void add_fine_q8(const V* sums, V wd, const float* s, V* acc) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r] = fma(add(sums[r], set1(s[r * PER_FINE_GROUP + 3])), wd, acc[r]);
}

// Lines that memory can bring while a processor multiplies one group of COLUMNS blocks by 4 rows.
constexpr int LINES = 6;

// Has the cache that the next attention reads on its way, `each` lines with every group: while many rows are multiplied,
// memory would have little to do, and then too much.
struct CacheAhead {
  const char* layer = nullptr;
  int64_t block_bytes = 0;                       // of that layer
  const int32_t *next = nullptr, *end = nullptr;  // blocks to come
  const int32_t *then = nullptr, *last = nullptr;  // and after them
  const char *at = nullptr, *to = nullptr;        // in the present one
  int each = 0;
  inline void operator()() {
    for (int i = 0; i < each; i++, at += 64) {
      if (at == to) {
        if (next == end) next = then, end = then = last;
        if (next == end) {
          each = 0;
          return;
        }
        at = layer + *next++ * block_bytes;
        to = at + block_bytes;
      }
      fetch(at);
    }
  }
};

// The rows of a product's integers, which lie together. `ahead`: how much further on weights lie that are wanted next, 0 where none
// are. Of these a pass over the rows asks for one group in `passes`, beginning with the `pass`-th, so that memory has something to
// do all the while.
struct Integers {
  const int8_t* x;
  const float* s;
  int64_t ahead;
  int pass, passes;
  CacheAhead* cache;
  const int16_t* wide;  // the same rows as `widen` makes them, one after the other, or null
  int64_t wide_stride;
};

template <int N, int C>
HR_INLINE void fetch_group(const uint8_t* w, int64_t ws, int64_t ahead) {
  if (!ahead) return;
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) fetch(w + c * ws + ahead + 64 * i);
}

// 16 outputs of R rows, in C blocks. w: packed groups. FINE: whether halves of a group have scales. AHEAD: whether anything is to be
// asked for meanwhile; of many passes over the rows few have to, and the others need not look.
template <int R, int C, bool FINE, bool AHEAD>
HR_INLINE void dot_q4(const uint8_t* w, int groups, const Integers in, V (*out)[R]) {
  const int64_t ws = (int64_t)groups * Q4_BYTES;
  V acc[C][R];  // Not in `out`, where each group would have to store them.
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[c][r] = zero();
  int turn = in.pass;
  for (int g = 0; g < groups; g++, w += Q4_BYTES) {
    D d[C][R];
    V sums[C][R];
    if (AHEAD) {
      if (--turn < 0) fetch_group<5, C>(w, ws, in.ahead), turn = in.passes - 1;
      (*in.cache)();
    }
    const float* s = in.s + TOGETHER_ROWS * (FINE ? PER_FINE_GROUP : PER_GROUP) * g;
    const int8_t* x = in.x + TOGETHER_ROWS * GROUP * g;
    if (FINE) dot_halves<Nibbles, R, C>(w, ws, x, s, sums);
    else dot_group<Nibbles, R, C>(w, ws, x, d);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const uint16_t* by = (const uint16_t*)(w + c * ws + 256);
      if (!FINE)
        for (int r = 0; r < R; r++) sums[c][r] = to_float(d[c][r]);
      const V wd = load_half(by), wm = load_half(by + 16);
      if (FINE) add_fine_q4<R>(sums[c], wd, wm, s, acc[c]);
      else add_q4<R>(sums[c], wd, wm, s, acc[c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) out[c][r] = acc[c][r];
}

#if defined(HR_WIDE)
constexpr bool WIDE = true;
template <int J, int R, int C>
HR_INLINE void wide_quad(const uint8_t* w, int64_t ws, const int16_t* x, int64_t xs, I (*sums)[R]) {
  auto add_pairs = [&](auto half, const int16_t* pairs) __attribute__((always_inline)) {
    P u[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) u[c] = half(load_u(w + c * ws + 64 * J));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      P b = set_pair(pairs + r * xs);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        sums[c][r] = dot2(sums[c][r], u[c], b);
        pin(sums[c][r]);
      }
    }
  };
  add_pairs([](U u) { return even(u); }, x + 4 * J);
  add_pairs([](U u) { return odd(u); }, x + 4 * J + 2);
}
template <int R, int C>
HR_INLINE void sums_q8(const uint8_t* w, int64_t ws, const Integers& in, int g, V (*sums)[R]) {
  I all[C][R];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) all[c][r] = i_zero();
  const int16_t* x = in.wide + g * GROUP;
  wide_quad<0, R, C>(w, ws, x, in.wide_stride, all), wide_quad<1, R, C>(w, ws, x, in.wide_stride, all);
  wide_quad<2, R, C>(w, ws, x, in.wide_stride, all), wide_quad<3, R, C>(w, ws, x, in.wide_stride, all);
  wide_quad<4, R, C>(w, ws, x, in.wide_stride, all), wide_quad<5, R, C>(w, ws, x, in.wide_stride, all);
  wide_quad<6, R, C>(w, ws, x, in.wide_stride, all), wide_quad<7, R, C>(w, ws, x, in.wide_stride, all);
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[c][r] = to_float(all[c][r]);
}
#else
constexpr bool WIDE = false;
static inline void widen(const int8_t*, int16_t*) {}
template <int R, int C>
HR_INLINE void sums_q8(const uint8_t* w, int64_t ws, const Integers& in, int g, V (*sums)[R]) {
  D d[C][R];
  dot_group<Bytes, R, C>(w, ws, in.x + TOGETHER_ROWS * GROUP * g, d);
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[c][r] = to_float(d[c][r]);
}
#endif

template <int R, int C, bool FINE, bool AHEAD>
HR_INLINE void dot_q8(const uint8_t* w, int groups, const Integers in, V (*out)[R]) {
  const int64_t ws = block_bytes(HR_Q8, groups);
  V acc[C][R];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[c][r] = zero();
  int turn = in.pass;
  for (int g = 0; g < groups; g++) {
    V sums[C][R];
    if (AHEAD) {
      if (--turn < 0) fetch_group<9, C>(w + q8_at(g), ws, in.ahead), turn = in.passes - 1;
      (*in.cache)();
    }
    const float* s = in.s + TOGETHER_ROWS * (FINE ? PER_FINE_GROUP : PER_GROUP) * g;
    if (FINE) dot_halves<Bytes, R, C>(w + q8_at(g), ws, in.x + TOGETHER_ROWS * GROUP * g, s, sums);
    else sums_q8<R, C>(w + q8_at(g), ws, in, g, sums);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      V wd = load_half((const uint16_t*)(w + q8_scales_at(g) + c * ws));
      if (FINE) add_fine_q8<R>(sums[c], wd, s, acc[c]);
      else add_q8<R>(sums[c], wd, s, acc[c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) out[c][r] = acc[c][r];
}

struct Floats {
  using T = float;
  static inline V get(const T* p) { return load(p); }
};
struct Bf16 {
  using T = uint16_t;
  static inline V get(const T* p) { return load_bf16(p); }
};
struct Half {
  using T = uint16_t;
  static inline V get(const T* p) { return load_half(p); }
};

// acc[c][r] = sum over k of x[r][k] * w[k]: the blocks of w are cs numbers apart.
template <class S, int R, int C>
static inline void dot_float(const typename S::T* w, int64_t cs, int k, const float* x, int64_t xs, V (*acc)[R]) {
  V a[C][R];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) a[c][r] = zero();
  for (int i = 0; i < k; i++, w += 16) {
    V v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) v[c] = S::get(w + c * cs);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      V by = set1(x[r * xs + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) a[c][r] = fma(v[c], by, a[c][r]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) acc[c][r] = a[c][r];
}

// Apart, so that loops that could need it keep what they do need in registers.
#if defined(__GNUC__)
__attribute__((noinline))
#endif
static V gelu(V x) {
  float t[16];
  store(t, x);
  for (int j = 0; j < 16; j++) t[j] = 0.5f * t[j] * (1.0f + std::erf(t[j] * 0.70710678118654752f));
  return load(t);
}

// N vectors, in place.
template <int N>
HR_INLINE void activate(int act, V* x) {
  V u[N];
  switch (act) {
    case HR_SILU:
      for (int i = 0; i < N; i++) u[i] = x[i];
      return times_sigmoid<N>(x, u);
    case HR_GELU_TANH:
      for (int i = 0; i < N; i++) {
        u[i] = mul(x[i], set1(0.7978845608028654f));
        u[i] = mul(u[i], fma(mul(x[i], x[i]), set1(0.044715f), set1(1.0f)));
        u[i] = add(u[i], u[i]);
      }
      return times_sigmoid<N>(x, u);
    default:
      for (int i = 0; i < N; i++) x[i] = gelu(x[i]);
  }
}
static inline V activated(int act, V x) {
  activate<1>(act, &x);
  return x;
}

// Where rows of a float operand are, and which of them a domain's row i is.
struct Operand {
  const float* base;
  int64_t stride;
  const int32_t* map;
  inline const float* row(int i) const { return base + (int64_t)(map ? map[i] : i) * stride; }
};
static inline Operand operand(const Run& run, const HrOp& op, HrRef ref) {
  if (ref.buf < 0) return {nullptr, 0, nullptr};
  const HrBuffer& b = run.program->buffers[ref.buf];
  return {b.data + ref.off, b.stride, op.gather ? run.step->sample_rows : nullptr};
}
static inline float* output(const Run& run, HrRef ref, int row) {
  const HrBuffer& b = run.program->buffers[ref.buf];
  return b.data + (int64_t)row * b.stride + ref.off;
}

// Where rows of an operation's output go; no data where nobody wants floats.
struct Output {
  float* data;
  int64_t stride;
  inline float* row(int i) const { return data + i * stride; }
};
static inline Output outputs(const Run& run, HrRef ref) {
  if (ref.buf < 0) return {nullptr, 0};
  return {output(run, ref, 0), run.program->buffers[ref.buf].stride};
}

// A product under way: where its rows come from, and which of them are multiplied now.
struct Product {
  const Run& run;
  const HrOp& op;
  const HrMatrix& m;
  const HrInts* ints;
  Operand a, residual;
  Output out;
  int first_row, end_row;
  int end, follows;  // of the blocks of this item, and where the thread's next item may begin; below 0: nowhere
  int16_t* wide;     // these rows' integers, or null
  CacheAhead* cache;
  int groups;          // of K
  int64_t block_size;  // bytes
  // Where the next unit, or C blocks, will be wanted from.
  template <int C>
  inline int after(int block) const {
    int step = m.gated ? 4 : C, next = block + step;
    if (next >= end && follows < 0) return block;
    if (next >= end) next = follows + (m.gated ? block % 4 : 0);
    return next + C <= (m.n + 15) / 16 ? next : block;
  }
};

template <int R, int C, bool AHEAD>
HR_INLINE void dot_ints(int storage, bool fine, const uint8_t* w, int groups, const Integers& in, V (*acc)[R]) {
  if (fine) {
    if constexpr (WHOLE_BYTES) {
      if (storage == HR_Q4) dot_q4<R, C, true, AHEAD>(w, groups, in, acc);
      else dot_q8<R, C, true, AHEAD>(w, groups, in, acc);
    }
  } else if (storage == HR_Q4) {
    dot_q4<R, C, false, AHEAD>(w, groups, in, acc);
  } else {
    dot_q8<R, C, false, AHEAD>(w, groups, in, acc);
  }
}

template <int R, int C>
static inline void dot_rows(const Product& p, int block, int row, V (*acc)[R]) {
  const HrMatrix& m = p.m;
#if !defined(HR_TILES)
  if (m.storage == HR_Q4 || m.storage == HR_Q8) {
    const HrInts& ints = *p.ints;
    const int groups = p.groups, before = row - p.first_row, all = p.end_row - p.first_row;
    const int64_t size = p.block_size;
    const int next = p.after<C>(block);
    const int64_t place = place_of(ints, row, 0);
    const Integers in{ints.q + place * GROUP,
                      ints.scales + place * ints.per_group,
                      (next - block) * size,
                      before / 4,
                      (all + 3) / 4,
                      p.cache,
                      p.wide ? p.wide + before * ints.stride : nullptr,
                      ints.stride};
    const uint8_t* w = (const uint8_t*)m.data + block * size;
    const bool fine = ints.per_group == PER_FINE_GROUP, ahead = (in.ahead && in.pass < groups) || p.cache->each;
    if constexpr (R == TOGETHER_ROWS)
      if (!ahead) return dot_ints<R, C, false>(m.storage, fine, w, groups, in, acc);
    return dot_ints<R, C, true>(m.storage, fine, w, groups, in, acc);
  }
#endif
  const int64_t cs = (int64_t)m.k * 16, at = block * cs, xs = p.a.stride;
  const float* x = p.a.row(row);
  if (m.storage == HR_F32) dot_float<Floats, R, C>((const float*)m.data + at, cs, m.k, x, xs, acc);
  else if (m.storage == HR_BF16) dot_float<Bf16, R, C>((const uint16_t*)m.data + at, cs, m.k, x, xs, acc);
  else dot_float<Half, R, C>((const uint16_t*)m.data + at, cs, m.k, x, xs, acc);
}

// What becomes of the 16 sums of a block and a row.
static inline void finish_row(const Product& p, int block, int row, V y) {
  const int at = block * 16, n = std::min(16, p.m.n - at);
  V x;
  if (p.m.bias) load_or_part(&x, p.m.bias + at, n), y = add(y, x);
  if (p.residual.base) load_or_part(&x, p.residual.row(row) + at, n), y = add(y, x);
  store_or_part(p.out.row(row) + at, y, n);
}
// And of a unit, 4 blocks, of R rows: 32 gates and their 32 ups, which make one group of integers, or 32 floats.
template <int R>
static inline void finish_gated(const Product& p, int unit, int row, const V (*sums)[R]) {
  // As many at once as registers allow, for each step waits for the one before.
  constexpr int N = R < POWERS ? 1 : POWERS;
  V a[R], b[R];
  for (int r = 0; r < R; r++) a[r] = sums[0][r], b[r] = sums[1][r];
  for (int r = 0; r + N <= R; r += N) activate<N>(p.op.act, a + r), activate<N>(p.op.act, b + r);
  for (int r = R / N * N; r < R; r++) activate<1>(p.op.act, a + r), activate<1>(p.op.act, b + r);
  for (int r = 0; r < R; r++) a[r] = mul(a[r], sums[2][r]), b[r] = mul(b[r], sums[3][r]);
  if (p.op.qout >= 0) put_rows<R>(p.run.program->ints[p.op.qout], row, unit, a, b);
  if (!p.out.data) return;
  for (int r = 0; r < R; r++) store(p.out.row(row + r) + 32 * unit, a[r]), store(p.out.row(row + r) + 32 * unit + 16, b[r]);
}

template <int R, int C>
static inline void matmul_rows(const Product& p, int first_block, int row) {
  V acc[C][R];
  dot_rows<R, C>(p, first_block, row, acc);
  const int at = first_block * 16;
  if (at + 16 * C > p.m.n || p.residual.map) {
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) finish_row(p, first_block + c, row + r, acc[c][r]);
    return;
  }
  // Whole blocks of rows a stride apart: nothing is looked up for each.
  float* out = p.out.row(row) + at;
  const float *more = p.residual.base ? p.residual.row(row) + at : nullptr, *bias = p.m.bias ? p.m.bias + at : nullptr;
  for (int r = 0; r < R; r++, out += p.out.stride) {
    for (int c = 0; c < C; c++) {
      V y = acc[c][r];
      if (bias) y = add(y, load(bias + 16 * c));
      if (more) y = add(y, load(more + 16 * c));
      store(out + 16 * c, y);
    }
    if (more) more += p.residual.stride;
  }
}

template <int R>
static inline void gated_rows(const Product& p, int unit, int row) {
  V acc[4][R];
  constexpr int C = R < 4 ? 1 : COLUMNS;
  for (int i = 0; i < 4; i += C) dot_rows<R, C>(p, 4 * unit + i, row, acc + i);
  finish_gated<R>(p, unit, row, acc);
}

// C blocks from `at` on, or the unit `at`.
template <int R, int C>
static inline void product_rows(const Product& p, int at, int row) {
  if (p.m.gated) gated_rows<R>(p, at, row);
  else matmul_rows<R, C>(p, at, row);
}

// Has the lines of the next 4 rows' outputs on their way before they are written: those of a large vocabulary lie far apart,
// and writes that miss wait for one another.
template <int C>
static inline void claim_outputs(const Product& p, int at, int row) {
  if (row >= p.end_row) row = p.first_row, at += C;
  for (int r = row; r < std::min(row + 4, p.end_row); r++)
    for (int c = 0; c < C && at + c < p.end; c++) fetch_to_write(p.out.row(r) + (at + c) * 16);
}

template <int C>
static void all_rows(const Product& p, int at) {
  int row = p.first_row;
  const int end = p.end_row;
  // Rows that a gather scatters are not a stride apart.
  if (!p.op.gather || p.ints) {
    for (; row + 4 <= end; row += 4) {
      if (!p.m.gated) claim_outputs<C>(p, at, row + 4);
      product_rows<4, C>(p, at, row);
    }
    if (end - row == 3) product_rows<3, C>(p, at, row), row += 3;
    if (end - row == 2) product_rows<2, C>(p, at, row), row += 2;
  }
  for (; row < end; row++) product_rows<1, C>(p, at, row);
}

}  // namespace HR_ISA
