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
  // Four sums, for one would wait for itself.
  V squares[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; j++) {
      const V v = load(x + i + 16 * j);
      squares[j] = fma(v, v, squares[j]);
    }
  for (; i < n; i += 16) {
    V v;
    load_or_part(&v, x + i, n - i);
    squares[0] = fma(v, v, squares[0]);
  }
  const V all = add(add(squares[0], squares[1]), add(squares[2], squares[3]));
  const V by = set1(1.0f / std::sqrt(sum(all) / (float)n + eps));
  for (i = 0; i + 16 <= n; i += 16) store(y + i, mul(mul(load(x + i), by), load(w + i)));
  for (; i < n; i += 16) {
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
static inline V to_shorts(float size, float whole) { return set1(size >= SMALL && size < INFINITY ? whole / size : 0.0f); }

static inline float shorts_of(const float* x, int n, int16_t* to) {
  const float size = norm_of(x, n);
  const V by = to_shorts(size, SHORT_NORM);
  for (int i = 0; i < n; i += 16) store_shorts(to + i, to_int(mul(load(x + i), by)));
  return size / SHORT_NORM;
}

// A head's keys, or values, of a block begin at `at`: where their scales are.
static inline float* scales_at(const HrCache& c, int hd, char* at) { return (float*)(at + (int64_t)c.block_size * hd * c.bits / 8); }

// A key, and a value, into their slot of a block: `at` is where a head's keys, or values, begin there. The scale is returned.
static inline float put_key(const HrCache& c, const float* k, int hd, int slot, char* at) {
  int16_t shorts[512];
  const float scale = shorts_of(k, hd, shorts);
  for (int i = 0; i < hd; i += 2) std::memcpy(at + (i / 2 * c.block_size + slot) * 4, shorts + i, 4);
  return scale;
}
static inline float put_value(const float* v, int hd, int slot, char* at) {
  const float size = largest_of(v, hd);
  const V by = to_shorts(size, SHORT_VALUE);
  int16_t* to = (int16_t*)at + slot / 2 * 2 * hd + slot % 2;
  // The other slot of the pair may be another thread's.
  for (int i = 0; i < hd; i += 16) store_apart(to + 2 * i, to_int(mul(load(v + i), by)));
  return size / SHORT_VALUE;
}

// Integers of 8 bits, of which the largest of a row is 127.
constexpr float BYTE = 127.0f;

#if !defined(HR_AVX2)

// Turns n features, in runs as long as n has factors of 2, by a Hadamard matrix: what one of them had in a row spreads over
// all of its run, and products of two rows that were both turned stay what they were. A few features of a key are often many times
// as large as the others, which would leave these few of 8 bits.
static inline void spread(const float* from, float* to, int n) {
  const int run = n & -n;
  const V by = set1(1.0f / std::sqrt((float)run));
  int apart = 16;
  if (run >= 64) {
    for (int i = 0; i < n; i += 64) {
      V v[4];
      for (int j = 0; j < 4; j++) v[j] = spread_lanes(mul(load(from + i + 16 * j), by));
      const V a = add(v[0], v[1]), b = sub(v[0], v[1]), c = add(v[2], v[3]), d = sub(v[2], v[3]);
      store(to + i, add(a, c)), store(to + i + 16, add(b, d)), store(to + i + 32, sub(a, c)), store(to + i + 48, sub(b, d));
    }
    apart = 64;
  } else {
    for (int i = 0; i < n; i += 16) store(to + i, spread_lanes(mul(load(from + i), by)));
  }
  for (; apart < run; apart *= 2)
    for (int i = 0; i < n; i += 16) {
      if (i & apart) continue;
      const V a = load(to + i), b = load(to + i + apart);
      store(to + i, add(a, b));
      store(to + i + apart, sub(a, b));
    }
}

static inline float bytes_of(const float* x, int n, int8_t* to) {
  const float size = largest_of(x, n);
  const V by = to_shorts(size, BYTE);
  for (int i = 0; i < n; i += 16) store_bytes(to + i, to_int(mul(load(x + i), by)));
  return size / BYTE;
}
// `k` is turned in place.
static inline float put_key_bytes(const HrCache& c, float* k, int hd, int slot, char* at) {
  int8_t bytes[512];
  spread(k, k, hd);
  const float scale = bytes_of(k, hd, bytes);
  for (int i = 0; i < hd; i += 4) std::memcpy(at + (i / 4 * c.block_size + slot) * 4, bytes + i, 4);
  return scale;
}
static inline float put_value_bytes(const float* v, int hd, int slot, char* at) {
  const float size = largest_of(v, hd);
  const V by = to_shorts(size, BYTE);
  int8_t* to = (int8_t*)at + slot / 4 * 4 * hd + slot % 4;
  // Of four slots the others may be another thread's.
  for (int i = 0; i < hd; i += 16) store_bytes_apart(to + 4 * i, to_int(mul(load(v + i), by)));
  return size / BYTE;
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
    char* at = c.data + block * c.block_stride + op.layer * c.layer_stride;
    for (int h = 0; h < op.kv_heads; h++, at += c.head_stride) {
      float k[512];
      std::memcpy(k, key.row(row) + h * op.inner, (size_t)op.inner * 4);
      if (op.freq >= 0) turn_head(run.program->turns[op.freq], row, k);
      char* values = at + c.value_offset;
      const float* v = value.row(row) + h * op.inner;
      float &key_scale = scales_at(c, op.inner, at)[slot], &value_scale = scales_at(c, op.inner, values)[slot];
#if !defined(HR_AVX2)
      if (c.bits == 8) {
        key_scale = put_key_bytes(c, k, op.inner, slot, at);
        value_scale = put_value_bytes(v, op.inner, slot, values);
        continue;
      }
#endif
      key_scale = put_key(c, k, op.inner, slot, at);
      value_scale = put_value(v, op.inner, slot, values);
    }
  }
}

}  // namespace HR_ISA
