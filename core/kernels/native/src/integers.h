// What every operation needs: parts of rows, and rows as integers.
// A row's bits depend on that row alone: however many rows a kernel takes at once, each is summed in the same order.
#pragma once
#include <algorithm>
#include <cmath>

#include "engine.h"
#include "vec.h"

namespace HR_ISA {

constexpr int GROUP = 32;

static inline void load_or_part(V* v, const float* p, int n) { *v = n >= 16 ? load(p) : load_n(p, n); }
static inline void store_or_part(float* p, V v, int n) {
  if (n >= 16) store(p, v);
  else store_n(p, v, n);
}

// Floats that a group of integers has with it: its scale, that times the sum of the integers, and -128 times this.
constexpr int PER_GROUP = 3;

static inline float* scales_of(const HrInts& ints, int64_t row) { return ints.scales + row * (ints.stride / GROUP * PER_GROUP); }

// One group of 32 as integers -127 ... 127 times a scale. `x` may end early: the rest counts as 0.
static inline void quantize_group(const float* x, int n, int8_t* q, float* scale) {
  V a, b = zero();
  load_or_part(&a, x, n);
  if (n > 16) load_or_part(&b, x + 16, n - 16);
  float top = largest(max(abs(a), abs(b)));
  // A NaN or an infinity must not vanish in the rounding: it becomes the scale.
  Bad bad;
  watch(bad, sub(a, a));
  watch(bad, sub(b, b));
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  I ia = to_int(mul(a, set1(inverse))), ib = to_int(mul(b, set1(inverse)));
  store_bytes(q, ia);
  store_bytes(q + 16, ib);
  float s = any(bad) ? NAN : top / 127.0f;
  float total = s * sum(add(to_float(ia), to_float(ib)));
  scale[0] = s;
  scale[1] = total;
  scale[2] = -128.0f * total;
}

static void quantize_row(const float* x, int width, int8_t* q, float* scales, int64_t stride) {
  for (int g = 0; g < stride / GROUP; g++) {
    int left = width - g * GROUP;
    if (left > 0) quantize_group(x + g * GROUP, left, q + g * GROUP, scales + PER_GROUP * g);
  }
}

}  // namespace HR_ISA
