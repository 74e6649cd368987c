// An item of an operation, of whatever kind, and what the machine can do. Included by one source file a dialect.
#pragma once
#include "attention.h"
#include "matmul.h"
#if defined(HR_TILES)
#include "attend_tiles.h"
#endif

namespace HR_ISA {

static void tile(const Run& run, const HrOp& op, int first, int end, int next, float* scratch) {
  switch (op.kind) {
    case HR_MATMUL:
      return matmul(run, op, first, end, next, op.domain == HR_SAMPLES ? run.step->num_samples : run.step->num_tokens, scratch);
    case HR_TURNS: return turns(run, first, end);
    case HR_ROTATE: return rotate(run, op, first, end);
    case HR_STORE: return store_kv(run, op, first, end);
    case HR_ATTEND:
      for (int i = first; i < end; i++) attend_item(run, op, i, i + 1 < end ? i + 1 : next, scratch);
      return;
    default: return rows(run, op, first, end, scratch);
  }
}

// ── the machine's limits ─────────────────────────────────────────────────────────────────────────────────────────────

static double read_all(const float* p, int64_t n) {
  V a = zero(), b = zero(), c = zero(), d = zero();
  // As products do: a processor does not guess all that its memory can give.
  constexpr int64_t AHEAD = 1 << 12;
  for (int64_t i = 0; i + 64 <= n; i += 64) {
    for (int64_t j = 0; j < 64; j += 16) fetch(p + i + AHEAD + j);
    a = add(a, load(p + i));
    b = add(b, load(p + i + 16));
    c = add(c, load(p + i + 32));
    d = add(d, load(p + i + 48));
  }
  return sum(add(add(a, b), add(c, d)));
}

#if defined(HR_TILES)
static int64_t multiply(int64_t rounds) {
  uint16_t ones[TILE_FLOATS * 2];
  for (auto& one : ones) one = 0x3f80;
  set_tiles(TILE_ROWS, TILE_ROWS);
  HR_TILE_LOAD(4, ones);
  HR_TILE_LOAD(6, ones);
  for (int64_t i = 0; i < rounds; i++) {
    HR_TILE_ADD(0, 4, 6);
    HR_TILE_ADD(1, 4, 6);
    HR_TILE_ADD(2, 4, 6);
    HR_TILE_ADD(3, 4, 6);
  }
  release_tiles();
  return rounds * 4 * TILE_ROWS * 16 * GROUP;
}
#else
static int64_t multiply(int64_t rounds) {
  const int8_t one[4] = {1, 1, 1, 1};
  uint8_t bytes[64] = {};
  U w = load_u(bytes);
  B s = four(one);
  D d[CHAINS];
  for (auto& each : d) each = d_zero();
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < CHAINS; j++) {
      pin(w);  // Else the product is made once, and only added.
      d[j] = dot4(d[j], w, s);
    }
  }
  V all = zero();
  for (auto& each : d) all = add(all, to_float(each));
  // Zeros were multiplied: the sum is there to be needed.
  return sum(all) == 0 ? rounds * CHAINS * 64 : 0;
}
// Only tiles need to know what their weights are divided by.
static void block_divisors(const HrMatrix&, float*) {}
#endif

}  // namespace HR_ISA
