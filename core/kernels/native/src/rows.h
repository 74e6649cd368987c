// Operations on each row by itself, positions, and what goes into the cache.
#pragma once
#include "products.h"

namespace HR_ISA {

static void matrix_row(const HrMatrix& m, int row, float* out) {
  if (m.storage == HR_ROWS) {
    std::memcpy(out, (const float*)m.data + (int64_t)row * m.k, (size_t)m.k * 4);
    return;
  }
  int block = row / 16, o = row % 16, groups = (m.k + GROUP - 1) / GROUP;
  if (m.storage == HR_Q4 || m.storage == HR_Q8) {
    bool four_bits = m.storage == HR_Q4;
    const uint8_t* w = (const uint8_t*)m.data + block * block_bytes(m.storage, groups);
    for (int g = 0; g < groups; g++) {
      const uint8_t* at = w + (four_bits ? (int64_t)g * Q4_BYTES : q8_at(g));
      const uint8_t* by = four_bits ? at + 256 : w + q8_scales_at(g);
      float d[16], low_end[16];
      V wd = load_half((const uint16_t*)by);
      store(d, wd);
      store(low_end, four_bits ? load_half((const uint16_t*)(by + 32)) : mul(wd, set1(-128.0f)));
      for (int k = 0; k < GROUP && g * GROUP + k < m.k; k++) {
        int byte = at[64 * (four_bits ? k % 16 / 4 : k / 4) + 4 * o + k % 4];
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
    put_row(o, row, 0, x, op.width);
  }
}

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

// Integers of 16 bits, of which no sum over a tile may leave 32: the norm of a query and of a key is the largest there is, so
// that their product is bounded by that of the norms. The largest feature of a value has 13 bits, which leaves more to the
// weights, for those are many and small.
constexpr float SHORT_NORM = 32767.0f, SHORT_VALUE = 8191.0f, SHORT_WEIGHT = 32767.0f, SHORT_WEIGHTS = 7 * 32767.0f;

static inline float norm_of(const float* x, int n) {
  V squares = zero();
  for (int i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  return std::sqrt(sum(squares));
}
static inline float largest_of(const float* x, int n) {
  V most = zero();
  Bad bad;
  for (int i = 0; i < n; i += 16) {
    most = max(most, abs(load(x + i)));
    watch(bad, load(x + i));
  }
  return any(bad) ? NAN : largest(most);
}

// What n features are multiplied with to be integers, of which `size` becomes `whole`. Where something is no finite number the
// integers mean nothing, and their scale, size / whole, is none either.
static inline V to_shorts(float size, float whole) { return set1(size > 0 && size < INFINITY ? whole / size : 0.0f); }

static inline float shorts_of(const float* x, int n, int16_t* to) {
  const float size = norm_of(x, n);
  const V by = to_shorts(size, SHORT_NORM);
  for (int i = 0; i < n; i += 16) store_shorts(to + i, to_int(mul(load(x + i), by)));
  return size / SHORT_NORM;
}

// The scales of a block's keys or values, which begin at `at`.
static inline float* scales_at(const HrCache& c, int hd, int16_t* at) { return (float*)(at + (int64_t)c.block_size * hd); }

// A key, and a value, into their slot of a block: `at` is where a head's keys, or values, begin there. The scale is returned.
#if defined(HR_TILES)
static inline float put_key(const HrCache& c, const float* k, int hd, int slot, int16_t* at) {
  uint16_t halves[512];
  for (int i = 0; i < hd; i += 16) _mm256_storeu_si256((__m256i*)(halves + i), (__m256i)_mm512_cvtneps_pbh(load(k + i).x));
  for (int i = 0; i < hd; i += 2) std::memcpy(at + i * c.block_size + 2 * slot, halves + i, 4);
  return 1.0f;
}
static inline float put_value(const float* v, int hd, int slot, int16_t* at) {
  for (int i = 0; i < hd; i += 16)
    _mm512_mask_storeu_epi16(at + slot / 2 * 2 * hd + slot % 2 + 2 * i, 0x55555555u,
                             _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(load(v + i).x)));
  return 1.0f;
}
#else
static inline float put_key(const HrCache& c, const float* k, int hd, int slot, int16_t* at) {
  int16_t shorts[512];
  const float scale = shorts_of(k, hd, shorts);
  for (int i = 0; i < hd; i += 2) std::memcpy(at + i * c.block_size + 2 * slot, shorts + i, 4);
  return scale;
}
static inline float put_value(const float* v, int hd, int slot, int16_t* at) {
  const float size = largest_of(v, hd);
  const V by = to_shorts(size, SHORT_VALUE);
  // The other slot of the pair may be another thread's.
  for (int i = 0; i < hd; i += 16) store_apart(at + slot / 2 * 2 * hd + slot % 2 + 2 * i, to_int(mul(load(v + i), by)));
  return size / SHORT_VALUE;
}
#endif

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
    int16_t* at = c.data + block * c.block_stride + op.layer * c.layer_stride;
    for (int h = 0; h < op.kv_heads; h++, at += c.head_stride) {
      float k[512];
      std::memcpy(k, key.row(row) + h * op.inner, (size_t)op.inner * 4);
      if (op.freq >= 0) turn_head(run.program->turns[op.freq], row, k);
      int16_t* values = at + c.value_offset;
      scales_at(c, op.inner, at)[slot] = put_key(c, k, op.inner, slot, at);
      scales_at(c, op.inner, values)[slot] = put_value(value.row(row) + h * op.inner, op.inner, slot, values);
    }
  }
}

}  // namespace HR_ISA
