// Every operation, once, over the 16-lane vectors of vec.h. Included by one source file a dialect.
// A row's bits depend on that row alone: however many rows a kernel takes at once, each is summed in the same order.
#pragma once
#include <algorithm>
#include <cmath>

#include "engine.h"
#include "vec.h"

namespace HR_ISA {

constexpr int GROUP = 32;
constexpr int Q4_BYTES = 320, Q8_BYTES = 544;
constexpr int KEYS = 32;   // keys an attention tile has, aligned to absolute positions
constexpr int TOGETHER = 4;  // rows a kernel takes at once

static inline void load_or_part(V* v, const float* p, int n) { *v = n >= 16 ? load(p) : load_n(p, n); }
static inline void store_or_part(float* p, V v, int n) {
  if (n >= 16) store(p, v);
  else store_n(p, v, n);
}

// ── integers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

// One group of 32 as integers -127 ... 127 times a scale. `x` may end early: the rest counts as 0.
static inline void quantize_group(const float* x, int n, int8_t* q, float* scale) {
  V a, b = zero();
  load_or_part(&a, x, n);
  if (n > 16) load_or_part(&b, x + 16, n - 16);
  float top = largest(max(abs(a), abs(b)));
  // A NaN or an infinity must not vanish in the rounding: it becomes the scale.
  float bad = sum(fma(a, zero(), mul(b, zero())));
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  I ia = to_int(mul(a, set1(inverse))), ib = to_int(mul(b, set1(inverse)));
  store_bytes(q, ia);
  store_bytes(q + 16, ib);
  float s = top / 127.0f + bad;
  scale[0] = s;
  scale[1] = s * sum(add(to_float(ia), to_float(ib)));
}

static void quantize_row(const float* x, int width, int8_t* q, float* scales, int64_t stride) {
  for (int g = 0; g < stride / GROUP; g++) {
    int left = width - g * GROUP;
    if (left > 0) quantize_group(x + g * GROUP, left, q + g * GROUP, scales + 2 * g);
  }
}

// ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────

// A group of weights as a kernel wants it: 8 vectors, one for each 4 values of K. Opened in registers for a few rows; for
// many, once for all of them into memory that stays in the nearest cache.
struct Nibbles {
  static constexpr int BYTES = Q4_BYTES, SCALES = 256;
  template <int J>
  static inline U get(const uint8_t* w) {
    U u = load_u(w + 64 * (J % 4));
    return J < 4 ? low(u) : high(u);
  }
};
struct Opened {
  static constexpr int BYTES = 512;
  template <int J>
  static inline U get(const uint8_t* w) { return load_u(w + 64 * J); }
};
struct Low {
  static constexpr int BYTES = Q8_BYTES;
  template <int J>
  static inline U get(const uint8_t* w) { return low(load_u(w + 64 * J)); }
};
struct High {
  static constexpr int BYTES = Q8_BYTES;
  template <int J>
  static inline U get(const uint8_t* w) { return high(load_u(w + 64 * J)); }
};

template <class W, int J, int R>
static inline void dot_quad(const uint8_t* w, const int8_t* x, int64_t xs, D* d) {
  U u = W::template get<J>(w);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) d[r] = dot4(d[r], u, four(x + r * xs + 4 * J));
}

// Sums of the products of one group, for R rows.
template <class W, int R>
static inline void dot_group(const uint8_t* w, const int8_t* x, int64_t xs, D* d) {
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) d[r] = d_zero();
  // Quads that share bytes come one after the other.
  dot_quad<W, 0, R>(w, x, xs, d), dot_quad<W, 4, R>(w, x, xs, d);
  dot_quad<W, 1, R>(w, x, xs, d), dot_quad<W, 5, R>(w, x, xs, d);
  dot_quad<W, 2, R>(w, x, xs, d), dot_quad<W, 6, R>(w, x, xs, d);
  dot_quad<W, 3, R>(w, x, xs, d), dot_quad<W, 7, R>(w, x, xs, d);
}

// acc += scale * sum + offset * (sum of the activations), in this order for every kernel.
template <int R>
static inline void scaled(const V* sums, V wd, V wm, const float* s, int64_t ss, V* acc) {
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    acc[r] = fma(sums[r], mul(wd, set1(s[r * ss])), acc[r]);
    acc[r] = fma(wm, set1(s[r * ss + 1]), acc[r]);
  }
}

// 16 outputs of R rows. w: packed groups; opened: the same as bytes, or null. x: the first row's integers, each row further
// on by xs bytes, its scales by ss floats.
template <int R>
static inline void dot_q4(const uint8_t* w, const uint8_t* opened, int groups, const int8_t* x, int64_t xs, const float* s,
                          int64_t ss, V* acc) {
  for (int r = 0; r < R; r++) acc[r] = zero();
  for (int g = 0; g < groups; g++, w += Q4_BYTES) {
    D d[R];
    if (opened) dot_group<Opened, R>(opened + g * 512, x + g * GROUP, xs, d);
    else dot_group<Nibbles, R>(w, x + g * GROUP, xs, d);
    V sums[R];
    for (int r = 0; r < R; r++) sums[r] = to_float(d[r]);
    scaled<R>(sums, load_half((const uint16_t*)(w + 256)), load_half((const uint16_t*)(w + 288)), s + 2 * g, ss, acc);
  }
}

#if defined(HR_PLANES)
constexpr int PLANES = 2;
constexpr bool hr_planes = true;
template <int R>
static inline void sums_q8(const uint8_t* w, const uint8_t* opened, const int8_t* x, int64_t xs, V* sums) {
  D d[R];
  I lows[R];
  if (opened) dot_group<Opened, R>(opened, x, xs, d);
  else dot_group<Low, R>(w, x, xs, d);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) lows[r] = to_int(d[r], 1);
  if (opened) dot_group<Opened, R>(opened + 512, x, xs, d);
  else dot_group<High, R>(w, x, xs, d);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) sums[r] = to_float(lows[r], d[r]);
}
#else
constexpr int PLANES = 1;
constexpr bool hr_planes = false;
template <int R>
static inline void sums_q8(const uint8_t* w, const uint8_t*, const int8_t* x, int64_t xs, V* sums) {
  D d[R];
  dot_group<Opened, R>(w, x, xs, d);
  for (int r = 0; r < R; r++) sums[r] = to_float(d[r]);
}
#endif

template <int R>
static inline void dot_q8(const uint8_t* w, const uint8_t* opened, int groups, const int8_t* x, int64_t xs, const float* s,
                          int64_t ss, V* acc) {
  for (int r = 0; r < R; r++) acc[r] = zero();
  for (int g = 0; g < groups; g++, w += Q8_BYTES) {
    V sums[R];
    sums_q8<R>(w, opened ? opened + g * 512 * PLANES : nullptr, x + g * GROUP, xs, sums);
    V wd = load_half((const uint16_t*)(w + 512));
    scaled<R>(sums, wd, mul(wd, set1(-128.0f)), s + 2 * g, ss, acc);
  }
}

// A block of 16 outputs, opened into `out`: the values of each quad as bytes, of 8-bit weights a plane after the other.
static void open_block(const uint8_t* w, int storage, int groups, uint8_t* out) {
  for (int g = 0; g < groups; g++) {
    if (storage == HR_Q4) {
      for (int j = 0; j < 4; j++) {
        U u = load_u(w + 64 * j);
        store_u(out + 64 * j, low(u));
        store_u(out + 256 + 64 * j, high(u));
      }
      w += Q4_BYTES;
      out += 512;
    } else {
      for (int j = 0; j < 8; j++) {
        U u = load_u(w + 64 * j);
        store_u(out + 64 * j, low(u));
        store_u(out + 512 + 64 * j, high(u));
      }
      w += Q8_BYTES;
      out += 1024;
    }
  }
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

// acc[r] += sum over k of x[r][k] * w[k], w's rows being ws numbers apart.
template <int R, class S>
static inline void dot_float(const typename S::T* w, int64_t ws, int k, const float* x, int64_t xs, V* acc) {
  V a[R];
  for (int r = 0; r < R; r++) a[r] = acc[r];
  for (int i = 0; i < k; i++, w += ws) {
    V v = S::get(w);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) a[r] = fma(v, set1(x[r * xs + i]), a[r]);
  }
  for (int r = 0; r < R; r++) acc[r] = a[r];
}

template <int R>
static inline void dot_block(const HrMatrix& m, int block, const uint8_t* opened, const float* x, int64_t xs,
                             const HrInts* ints, int row, V* acc) {
  int groups = (m.k + GROUP - 1) / GROUP;
  if (m.storage == HR_Q4)
    dot_q4<R>((const uint8_t*)m.data + (int64_t)block * groups * Q4_BYTES, opened, groups, ints->q + row * ints->stride,
              ints->stride, ints->scales + row * (ints->stride / 16), ints->stride / 16, acc);
  else if (m.storage == HR_Q8)
    dot_q8<R>((const uint8_t*)m.data + (int64_t)block * groups * Q8_BYTES, opened, groups, ints->q + row * ints->stride,
              ints->stride, ints->scales + row * (ints->stride / 16), ints->stride / 16, acc);
  else {
    for (int r = 0; r < R; r++) acc[r] = zero();
    int64_t at = (int64_t)block * m.k * 16;
    if (m.storage == HR_F32) dot_float<R, Floats>((const float*)m.data + at, 16, m.k, x, xs, acc);
    else if (m.storage == HR_BF16) dot_float<R, Bf16>((const uint16_t*)m.data + at, 16, m.k, x, xs, acc);
    else dot_float<R, Half>((const uint16_t*)m.data + at, 16, m.k, x, xs, acc);
  }
}

static inline V activated(int act, V x) {
  switch (act) {
    case HR_SILU: return mul(x, sigmoid(x));
    case HR_GELU_TANH: {
      V u = mul(x, set1(0.7978845608028654f));
      u = mul(u, fma(mul(x, x), set1(0.044715f), set1(1.0f)));
      return mul(x, sigmoid(add(u, u)));
    }
    default: {
      float t[16];
      store(t, x);
      for (int j = 0; j < 16; j++) t[j] = 0.5f * t[j] * (1.0f + std::erf(t[j] * 0.70710678118654752f));
      return load(t);
    }
  }
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

// A product under way: where its rows come from and what one thread has opened.
struct Product {
  const Run& run;
  const HrOp& op;
  const HrMatrix& m;
  const HrInts* ints;
  Operand a, residual;
  uint8_t* opened;        // 4 blocks, or null
  int64_t opened_stride;  // bytes of one
};

template <int R>
static inline void dot_rows(const Product& p, int block, int which, int row, V* acc) {
  const uint8_t* opened = p.opened ? p.opened + which * p.opened_stride : nullptr;
  dot_block<R>(p.m, block, opened, p.a.base ? p.a.row(row) : nullptr, p.a.stride, p.ints, row, acc);
}

template <int R>
static inline void matmul_rows(const Product& p, int block, int row) {
  V acc[R];
  dot_rows<R>(p, block, 0, row, acc);
  int n = std::min(16, p.m.n - block * 16);
  V bias = zero();
  if (p.m.bias) load_or_part(&bias, p.m.bias + block * 16, n);
  for (int r = 0; r < R; r++) {
    V y = p.m.bias ? add(acc[r], bias) : acc[r];
    if (p.residual.base) {
      V x;
      load_or_part(&x, p.residual.row(row + r) + block * 16, n);
      y = add(y, x);
    }
    store_or_part(output(p.run, p.op.out, row + r) + block * 16, y, n);
  }
}

// A unit is 4 blocks: 32 gates and their 32 ups, which make one group of integers, or 32 floats.
template <int R>
static inline void gated_rows(const Product& p, int unit, int row) {
  V acc[4][R];
  for (int i = 0; i < 4; i++) dot_rows<R>(p, 4 * unit + i, i, row, acc[i]);
  for (int r = 0; r < R; r++) {
    float t[32];
    for (int i = 0; i < 2; i++) store(t + 16 * i, mul(activated(p.op.act, acc[i][r]), acc[i + 2][r]));
    if (p.op.qout >= 0) {
      const HrInts& o = p.run.program->ints[p.op.qout];
      int64_t at = (int64_t)(row + r);
      quantize_group(t, 32, o.q + at * o.stride + 32 * unit, o.scales + at * (o.stride / 16) + 2 * unit);
    }
    if (p.op.out.buf >= 0) std::memcpy(output(p.run, p.op.out, row + r) + 32 * unit, t, sizeof t);
  }
}

template <int R>
static inline void product_rows(const Product& p, int at, int row) {
  if (p.m.gated) gated_rows<R>(p, at, row);
  else matmul_rows<R>(p, at, row);
}

constexpr int MANY = 8;  // rows from which on opening a block pays

static void matmul(const Run& run, const HrOp& op, int first, int end, int rows, float* scratch) {
  const HrMatrix& m = run.program->matrices[op.matrix];
  const HrInts* ints = op.qin >= 0 ? &run.program->ints[op.qin] : nullptr;
  const int groups = (m.k + GROUP - 1) / GROUP, blocks = m.gated ? 4 : 1;
  const bool opens = rows >= MANY && (m.storage == HR_Q4 || (m.storage == HR_Q8 && hr_planes));
  Product p{run, op, m, ints, operand(run, op, op.a), operand(run, op, op.b), opens ? (uint8_t*)scratch : nullptr,
            (int64_t)groups * 512 * (m.storage == HR_Q8 ? 2 : 1)};
  // Rows that a gather scatters are not a stride apart.
  const bool one_by_one = op.gather && !ints;
  for (int at = first; at < end; at++) {
    for (int i = 0; opens && i < blocks; i++) {
      int64_t bytes = (int64_t)groups * (m.storage == HR_Q4 ? Q4_BYTES : Q8_BYTES);
      open_block((const uint8_t*)m.data + (at * blocks + i) * bytes, m.storage, groups, p.opened + i * p.opened_stride);
    }
    int row = 0;
    if (!one_by_one) {
      for (; row + 4 <= rows; row += 4) product_rows<4>(p, at, row);
      if (rows - row == 3) product_rows<3>(p, at, row), row += 3;
      if (rows - row == 2) product_rows<2>(p, at, row), row += 2;
    }
    for (; row < rows; row++) product_rows<1>(p, at, row);
  }
}

// ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

static void matrix_row(const HrMatrix& m, int row, float* out) {
  if (m.storage == HR_ROWS) {
    std::memcpy(out, (const float*)m.data + (int64_t)row * m.k, (size_t)m.k * 4);
    return;
  }
  int block = row / 16, o = row % 16, groups = (m.k + GROUP - 1) / GROUP;
  if (m.storage == HR_Q4 || m.storage == HR_Q8) {
    bool four_bits = m.storage == HR_Q4;
    int bytes = four_bits ? Q4_BYTES : Q8_BYTES;
    const uint8_t* w = (const uint8_t*)m.data + (int64_t)block * groups * bytes;
    for (int g = 0; g < groups; g++, w += bytes) {
      float d[16], low_end[16];
      V wd = load_half((const uint16_t*)(w + (four_bits ? 256 : 512)));
      store(d, wd);
      store(low_end, four_bits ? load_half((const uint16_t*)(w + 288)) : mul(wd, set1(-128.0f)));
      for (int k = 0; k < GROUP && g * GROUP + k < m.k; k++) {
        int byte = four_bits ? w[64 * (k % 16 / 4) + 4 * o + k % 4] : w[64 * (k / 4) + 4 * o + k % 4];
        int value = !four_bits ? byte : k < 16 ? byte & 15 : byte >> 4;
        out[g * GROUP + k] = d[o] * (float)value + low_end[o];
      }
    }
    return;
  }
  int64_t at = (int64_t)block * m.k * 16 + o;
  for (int k = 0; k < m.k; k++) {
    if (m.storage == HR_F32) out[k] = ((const float*)m.data)[at + 16 * k];
    else {
      uint16_t t[16] = {((const uint16_t*)m.data)[at + 16 * k]};
      float f[16];
      store(f, m.storage == HR_BF16 ? load_bf16(t) : load_half(t));
      out[k] = f[0];
    }
  }
}

static void norm_run(const float* x, const float* w, int n, float eps, float* y) {
  V squares = zero();
  for (int i = 0; i < n; i += 16) {
    V v;
    load_or_part(&v, x + i, n - i);
    squares = fma(v, v, squares);
  }
  V by = set1(1.0f / std::sqrt(sum(squares) / (float)n + eps));
  for (int i = 0; i < n; i += 16) {
    V v, g;
    load_or_part(&v, x + i, n - i);
    load_or_part(&g, w + i, n - i);
    store_or_part(y + i, mul(mul(v, by), g), n - i);
  }
}

static void layer_norm(const float* x, const float* w, const float* bias, int n, float eps, float* y) {
  V all = zero(), squares = zero();
  for (int i = 0; i < n; i += 16) {
    V v;
    load_or_part(&v, x + i, n - i);
    all = add(all, v);
  }
  V mean = set1(sum(all) / (float)n);
  for (int i = 0; i < n; i += 16) {
    V v;
    load_or_part(&v, x + i, n - i);
    v = keep(sub(v, mean), 0, n - i, 0.0f);
    squares = fma(v, v, squares);
  }
  V by = set1(1.0f / std::sqrt(sum(squares) / (float)n + eps));
  for (int i = 0; i < n; i += 16) {
    V v, g, b;
    load_or_part(&v, x + i, n - i);
    load_or_part(&g, w + i, n - i);
    load_or_part(&b, bias + i, n - i);
    store_or_part(y + i, fma(mul(sub(v, mean), by), g, b), n - i);
  }
}

static V elementwise(const HrOp& op, V a, V b) {
  switch (op.kind) {
    case HR_GATED: return mul(activated(op.act, a), b);
    case HR_ACTIVATE: return activated(op.act, a);
    case HR_ADD: return add(a, b);
    case HR_SCALE: return mul(a, set1(op.f0));
    case HR_SOFTCAP: return mul(tanh(mul(a, set1(1.0f / op.f0))), set1(op.f0));
    default: return a;
  }
}

static void row_of(const Run& run, const HrOp& op, int row, float* y) {
  const HrProgram& p = *run.program;
  switch (op.kind) {
    case HR_EMBED: return matrix_row(p.matrices[op.matrix], run.step->tokens[row], y);
    case HR_POSITION: return matrix_row(p.matrices[op.matrix], run.step->positions[row], y);
    case HR_QUANT: return;
    case HR_NORM: {
      const float* x = operand(run, op, op.a).row(row);
      for (int i = 0; i < op.width; i += op.inner) norm_run(x + i, op.w0, op.inner, op.f0, y + i);
      return;
    }
    case HR_LAYERNORM: return layer_norm(operand(run, op, op.a).row(row), op.w0, op.w1, op.width, op.f0, y);
    default: {
      const float* x = operand(run, op, op.a).row(row);
      const float* z = op.b.buf >= 0 ? operand(run, op, op.b).row(row) : x;
      for (int i = 0; i < op.width; i += 16) {
        V a, b;
        load_or_part(&a, x + i, op.width - i);
        load_or_part(&b, z + i, op.width - i);
        store_or_part(y + i, elementwise(op, a, b), op.width - i);
      }
    }
  }
}

static void rows(const Run& run, const HrOp& op, int first, int end, float* scratch) {
  for (int row = first; row < end; row++) {
    float* y = op.out.buf >= 0 ? output(run, op.out, row) : scratch;
    row_of(run, op, row, y);
    if (op.qout < 0) continue;
    const HrInts& o = run.program->ints[op.qout];
    const float* x = op.kind == HR_QUANT ? operand(run, op, op.a).row(row) : y;
    quantize_row(x, op.width, o.q + row * o.stride, o.scales + row * (o.stride / 16), o.stride);
  }
}

// ── positions and cache ──────────────────────────────────────────────────────────────────────────────────────────────

static void turns(const Run& run, int first, int end) {
  for (int t = 0; t < run.program->num_turns; t++) {
    const HrTurn& turn = run.program->turns[t];
    for (int row = first; row < end; row++)
      for (int j = 0; j < turn.pairs; j++) {
        float angle = (float)run.step->positions[row] * turn.frequencies[j];
        turn.cos[row * (int64_t)turn.pairs + j] = std::cos(angle) * turn.magnitude;
        turn.sin[row * (int64_t)turn.pairs + j] = std::sin(angle) * turn.magnitude;
      }
  }
}

// Features j and j + pairs of a head by the angle of the row's position, in place.
static void turn_head(const HrTurn& turn, int row, float* x) {
  const float *c = turn.cos + row * (int64_t)turn.pairs, *s = turn.sin + row * (int64_t)turn.pairs;
  int n = turn.pairs;
  for (int j = 0; j < n; j += 16) {
    V a, b, cs, sn;
    load_or_part(&a, x + j, n - j);
    load_or_part(&b, x + n + j, n - j);
    load_or_part(&cs, c + j, n - j);
    load_or_part(&sn, s + j, n - j);
    store_or_part(x + j, fma(neg(b), sn, mul(a, cs)), n - j);
    store_or_part(x + n + j, fma(a, sn, mul(b, cs)), n - j);
  }
}

static void rotate(const Run& run, const HrOp& op, int first, int end) {
  const HrTurn& turn = run.program->turns[op.freq];
  for (int row = first; row < end; row++) {
    float* x = output(run, op.out, row);
    for (int h = 0; h < op.heads; h++) turn_head(turn, row, x + h * op.inner);
  }
}

static inline V in_half_range(V v) { return max(min(v, set1(65504.0f)), set1(-65504.0f)); }

static void store_kv(const Run& run, const HrOp& op, int first, int end) {
  const HrCache& c = run.program->cache;
  const HrStep& step = *run.step;
  Operand key = operand(run, op, op.a), value = operand(run, op, op.b);
  for (int row = first; row < end; row++) {
    int seq = run.row_seq[row], position = step.positions[row];
    int64_t block = step.tables[step.cu_blocks[seq] + position / c.block_size];
    int slot = position % c.block_size;
    if (op.matrix >= 0) {
      float* query = output(run, op.out, row);
      for (int h = 0; h < op.heads; h++) turn_head(run.program->turns[op.matrix], row, query + h * op.inner);
    }
    uint16_t* at = c.data + block * c.block_stride + op.layer * c.layer_stride;
    for (int h = 0; h < op.kv_heads; h++, at += c.head_stride) {
      float k[512];
      std::memcpy(k, key.row(row) + h * op.inner, (size_t)op.inner * 4);
      if (op.freq >= 0) turn_head(run.program->turns[op.freq], row, k);
      for (int i = 0; i < op.inner; i += 16) {
        uint16_t half[16];
        store_half(half, in_half_range(load(k + i)));
        for (int j = 0; j < 16; j++) at[(i + j) * c.block_size + slot] = half[j];
        store_half(at + c.value_offset + slot * op.inner + i, in_half_range(load(value.row(row) + h * op.inner + i)));
      }
    }
  }
}

// ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────

constexpr int QUERIES = 48;  // query rows of one KV head that a tile takes, at most

template <int R>
static inline void scores_of(const uint16_t* keys, int block_size, const float* q, int hd, float* s) {
  V acc[R];
  for (int r = 0; r < R; r++) acc[r] = zero();
  dot_float<R, Half>(keys, block_size, hd, q, hd, acc);
  for (int r = 0; r < R; r++) store(s + r * KEYS, acc[r]);
}

template <int R>
static inline void values_of(const uint16_t* values, int hd, int num_keys, const float* p, float* o) {
  V acc[R];
  for (int r = 0; r < R; r++) acc[r] = load(o + r * hd);
  dot_float<R, Half>(values, hd, num_keys, p, KEYS, acc);
  for (int r = 0; r < R; r++) store(o + r * hd, acc[r]);
}

#define HR_BY_ROWS(call, n)               \
  do {                                    \
    int r = 0;                            \
    for (; r + 4 <= (n); r += 4) call(4); \
    if ((n)-r == 3) { call(3); }          \
    else if ((n)-r == 2) { call(2); }     \
    else if ((n)-r == 1) { call(1); }     \
  } while (0)

// The running softmax of one row over a tile of 32 scores: scores become weights, the sum and the scale of what was
// gathered before are kept. False: the row sees nothing of the tile.
static inline bool soften(float* s, int first, int end, float cap, float* top, float* total, float* again) {
  V a = load(s), b = load(s + 16);
  if (cap > 0) {
    a = mul(tanh(mul(a, set1(1.0f / cap))), set1(cap));
    b = mul(tanh(mul(b, set1(1.0f / cap))), set1(cap));
  }
  // A score that is no number must not vanish in a comparison.
  *total += sum(mul(add(keep(a, first, end, 0.0f), keep(b, first - 16, end - 16, 0.0f)), zero()));
  a = keep(a, first, end, -INFINITY);
  b = keep(b, first - 16, end - 16, -INFINITY);
  float tile_top = largest(max(a, b));
  if (tile_top == -INFINITY) {
    store(s, zero());
    store(s + 16, zero());
    *again = 1.0f;
    return false;
  }
  float new_top = std::max(*top, tile_top);  // Finite: what is no number was told in the total.
  float change[16];
  store(change, exp(set1(*top - new_top)));
  a = exp(sub(a, set1(new_top)));
  b = exp(sub(b, set1(new_top)));
  store(s, a);
  store(s + 16, b);
  *total = *total * change[0] + sum(add(a, b));
  *top = new_top;
  *again = change[0];
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

// The queries of some rows under one KV head, and what was gathered for them so far.
struct Gathered {
  int n;  // queries
  float *q, *o, *s;
  float *top, *total;
};

static void attend_tile(const Run& run, const HrOp& op, const Unit& unit, int kv_head, int tile, int num_keys, Gathered& g) {
  const HrCache& c = run.program->cache;
  const HrStep& step = *run.step;
  const int hd = op.inner, heads = op.heads / op.kv_heads, n = g.n;
  const int32_t* table = step.tables + step.cu_blocks[unit.seq];
  for (int half = 0; 16 * half < num_keys; half++) {
    const uint16_t* keys = keys_at(c, op, table, tile + 16 * half, kv_head);
#define HR_SCORES(R) scores_of<R>(keys, c.block_size, g.q + r * hd, hd, g.s + r * KEYS + 16 * half)
    HR_BY_ROWS(HR_SCORES, n);
#undef HR_SCORES
  }
  bool any = false;
  for (int r = 0; r < n; r++) {
    int position = step.positions[unit.first + r / heads];
    int first = op.window ? position - op.window + 1 - tile : 0;
    float again;
    if (!soften(g.s + r * KEYS, first, std::min(position + 1 - tile, num_keys), op.f1, &g.top[r], &g.total[r], &again)) continue;
    any = true;
    if (again != 1.0f)
      for (int i = 0; i < hd; i += 16) store(g.o + r * hd + i, mul(load(g.o + r * hd + i), set1(again)));
  }
  for (int half = 0; any && 16 * half < num_keys; half++) {
    const uint16_t* values = values_at(c, op, table, tile + 16 * half, kv_head);
    int seen = std::min(16, num_keys - 16 * half);
    for (int i = 0; i < hd; i += 16) {
#define HR_VALUES(R) values_of<R>(values + i, hd, seen, g.s + r * KEYS + 16 * half, g.o + r * hd + i)
      HR_BY_ROWS(HR_VALUES, n);
#undef HR_VALUES
    }
  }
}

// What the next tile reads is not where the processor would guess it.
static void fetch_tile(const Run& run, const HrOp& op, const Unit& unit, int first_head, int end_head, int tile, int to) {
  const HrCache& c = run.program->cache;
  const int32_t* table = run.step->tables + run.step->cu_blocks[unit.seq];
  for (int position = tile; position < std::min(tile + KEYS, to); position += 16)
    for (int h = first_head; h < end_head; h++) {
      const char *keys = (const char*)keys_at(c, op, table, position, h), *values = (const char*)values_at(c, op, table, position, h);
      for (int i = 0; i < op.inner; i += 2) __builtin_prefetch(keys + (int64_t)i * c.block_size * 2, 0, 2);
      for (int i = 0; i < 32 * op.inner; i += 64) __builtin_prefetch(values + i, 0, 2);
    }
}

static void finish_queries(const Run& run, const HrOp& op, const Unit& unit, int kv_head, Gathered& g) {
  const int hd = op.inner, heads = op.heads / op.kv_heads;
  for (int r = 0; r < g.n; r++) {
    int row = unit.first + r / heads, column = (kv_head * heads + r % heads) * hd;
    float* o = g.o + r * hd;
    V by = set1(1.0f / g.total[r]);
    for (int i = 0; i < hd; i += 16) store(o + i, mul(load(o + i), by));
    if (op.out.buf >= 0) std::memcpy(output(run, op.out, row) + column, o, (size_t)hd * 4);
    if (op.qout >= 0) {
      const HrInts& out = run.program->ints[op.qout];
      quantize_row(o, hd, out.q + row * out.stride + column, out.scales + row * (out.stride / 16) + column / 16, hd);
    }
  }
}

// Rows [first, end) of a sequence under KV heads [first_head, end_head). Tiles of keys come in ascending order.
static void attend_unit(const Run& run, const HrOp& op, const Unit& unit, int first_head, int end_head, float* scratch) {
  const HrStep& step = *run.step;
  const int hd = op.inner, heads = op.heads / op.kv_heads, n = (unit.end - unit.first) * heads, all = n * (end_head - first_head);
  float top[QUERIES], total[QUERIES];
  float *q = scratch, *o = q + QUERIES * hd, *s = o + QUERIES * hd;
  Operand query = operand(run, op, op.a);
  for (int r = 0; r < all; r++) {
    int head = (first_head + r / n) * heads + r % n % heads;
    const float* from = query.row(unit.first + r % n / heads) + head * hd;
    for (int i = 0; i < hd; i += 16) {
      store(q + r * hd + i, mul(load(from + i), set1(op.f0)));
      store(o + r * hd + i, zero());
    }
    top[r] = -INFINITY;
    total[r] = 0;
  }
  int from = step.positions[unit.first], to = step.positions[unit.end - 1] + 1;
  int start = op.window ? std::max(0, from - op.window + 1) / KEYS * KEYS : 0;
  for (int tile = start; tile < to; tile += KEYS) {
    fetch_tile(run, op, unit, first_head, end_head, tile + KEYS, to);
    for (int h = first_head; h < end_head; h++) {
      int at = (h - first_head) * n;
      Gathered g{n, q + at * hd, o + at * hd, s, top + at, total + at};
      attend_tile(run, op, unit, h, tile, std::min(KEYS, to - tile), g);
    }
  }
  for (int h = first_head; h < end_head; h++) {
    int at = (h - first_head) * n;
    Gathered g{n, q + at * hd, o + at * hd, s, top + at, total + at};
    finish_queries(run, op, unit, h, g);
  }
}

static void tile(const Run& run, const HrOp& op, int first, int end, float* scratch) {
  switch (op.kind) {
    case HR_MATMUL:
      return matmul(run, op, first, end, op.domain == HR_SAMPLES ? run.step->num_samples : run.step->num_tokens, scratch);
    case HR_TURNS: return turns(run, first, end);
    case HR_ROTATE: return rotate(run, op, first, end);
    case HR_STORE: return store_kv(run, op, first, end);
    case HR_ATTEND:
      for (int i = first; i < end; i++) {
        int parts = op.kv_heads / run.heads_together, h = i % parts * run.heads_together;
        attend_unit(run, op, run.units[i / parts], h, h + run.heads_together, scratch);
      }
      return;
    default: return rows(run, op, first, end, scratch);
  }
}

// ── the machine's limits ─────────────────────────────────────────────────────────────────────────────────────────────

static double read_all(const float* p, int64_t n) {
  V a = zero(), b = zero(), c = zero(), d = zero();
  for (int64_t i = 0; i + 64 <= n; i += 64) {
    a = add(a, load(p + i));
    b = add(b, load(p + i + 16));
    c = add(c, load(p + i + 32));
    d = add(d, load(p + i + 48));
  }
  return sum(add(add(a, b), add(c, d)));
}

static int64_t multiply(int64_t rounds) {
  constexpr int CHAINS = 6;
  const int8_t one[4] = {1, 1, 1, 1};
  uint8_t bytes[64] = {};
  U w = load_u(bytes);
  B s = four(one);
  D d[CHAINS];
  for (auto& each : d) each = d_zero();
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 6
    for (int j = 0; j < CHAINS; j++) {
      asm volatile("" : "+m"(w));  // Else the product is made once, and only added.
      d[j] = dot4(d[j], w, s);
    }
  }
  V all = zero();
  for (auto& each : d) all = add(all, to_float(each));
  // Zeros were multiplied: the sum is there to be needed.
  return sum(all) == 0 ? rounds * CHAINS * 64 : 0;
}

}  // namespace HR_ISA
