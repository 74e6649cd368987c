// A product, however its matrix is stored: which kernel takes it, and what has to be on its way meanwhile.
#pragma once
#include "products.h"
#if defined(HR_TILES)
#include "tiles.h"
#endif

namespace HR_ISA {

// Rows that a pass over a group of weights multiplies, and from how many on it does so with COLUMNS blocks at once; lines of the
// cache that may be asked for with a group even where memory is busy with weights.
#if defined(HR_TILES)
constexpr int ROWS_A_PASS = 2 * TILE_ROWS, SEVERAL_ROWS = 1, FEWEST_LINES = 12;
constexpr OwnRows OWN_ROWS{2 * ROWS_A_PASS, ROWS_A_PASS};
#else
constexpr int ROWS_A_PASS = 4, SEVERAL_ROWS = 4, FEWEST_LINES = 1;
constexpr OwnRows OWN_ROWS{4 * ROWS_A_PASS, ROWS_A_PASS};
#endif

// The part of the cache that items [first, end) of a product fetch. Weights come first: where memory is busy with them, as
// with few rows, it is asked for few lines of the cache with each group, which attention would have to wait for.
static CacheAhead cache_ahead(const Run& run, const HrOp& op, float from, float to, int blocks_here, int rows) {
  CacheAhead ahead;
  const HrMatrix& m = run.program->matrices[op.matrix];
  const Share& share = run.shares[&op - run.program->ops];
  const int64_t passes = std::max(1, rows / ROWS_A_PASS), weights = COLUMNS * (m.storage == HR_Q4 ? 5 : 9);
  if (!run.num_blocks || share.to <= share.from) return ahead;
  const HrCache& c = run.program->cache;
  // Half of the threads begin at the end, with products as with attention: what one fetches from either end, it will read itself.
  // So each half of a product has its part of each half of the blocks.
  auto block_of = [&](float half, float part) {
    part = half + 0.5f * (share.from + (share.to - share.from) * 2.0f * (part - half));
    return run.blocks + std::min((int)(part * (float)run.num_blocks), run.num_blocks);
  };
  const float half = from < 0.5f ? 0.0f : 0.5f;
  ahead.layer = c.data + share.layer * c.layer_stride;
  ahead.block_bytes = c.block_stride;
  ahead.next = block_of(half, from);
  ahead.end = block_of(half, std::min(to, half + 0.5f));
  ahead.then = ahead.last = ahead.end;
  if (from < 0.5f && to > 0.5f) ahead.then = block_of(0.5f, 0.5f), ahead.last = block_of(0.5f, to);
  const int64_t lines = (ahead.end - ahead.next + ahead.last - ahead.then) * ahead.block_bytes / 64;
  const int64_t blocks = blocks_here / (rows < SEVERAL_ROWS ? 1 : COLUMNS);
  const int64_t turns = std::max<int64_t>(1, blocks * passes * ((m.k + GROUP - 1) / GROUP));
  ahead.each = (int)std::min((lines + turns - 1) / turns, std::max<int64_t>(FEWEST_LINES, (LINES * passes - weights) / passes));
  return ahead;
}

static void matmul(const Run& run, const HrOp& op, int first, int end, int next, int rows, float* scratch) {
  const HrMatrix& m = run.program->matrices[op.matrix];
  const HrInts* ints = op.qin >= 0 ? &run.program->ints[op.qin] : nullptr;
  const int blocks = m.gated ? 4 : 1, total = m.gated ? (m.n + 63) / 64 : (m.n + 15) / 16;
  const RowParts parts = OWN_ROWS.parts(rows, run.threads);
  const int part = first / total, all = total * parts.parts;
  CacheAhead cache = cache_ahead(run, op, (float)first / (float)all, (float)end / (float)all, (end - first) * blocks, parts.size);
  first -= part * total, end -= part * total;
  const int first_row = part * parts.size;
  rows = std::min(rows, first_row + parts.size);
  const bool wide = WIDE && m.storage == HR_Q8;
  Product p{run, op, m, ints, operand(run, op, op.a), operand(run, op, op.b), outputs(run, op.out), first_row, first_row,
            end * blocks, next < 0 ? -1 : next % total * blocks, wide ? (int16_t*)scratch : nullptr, &cache,
            (m.k + GROUP - 1) / GROUP, 0};
  if (m.storage == HR_Q4 || m.storage == HR_Q8) p.block_size = block_bytes(m.storage, p.groups);
#if defined(HR_TILES)
  if (m.storage == HR_Q4 || m.storage == HR_Q8) {
    const float* divisors = run.divisors_of[op.matrix];
    p.end_row = rows;
    if (m.storage == HR_Q4) tile_product<OpenQ4>(p, divisors, first * blocks, end * blocks, scratch);
    else tile_product<OpenQ8>(p, divisors, first * blocks, end * blocks, scratch);
    return;
  }
#endif
  const int together = wide ? HR_WIDE_ROWS : rows;
  for (; p.end_row < rows; p.first_row = p.end_row) {
    p.end_row = std::min(rows, p.first_row + together);
    if (wide)
      for (int row = p.first_row; row < p.end_row; row++)
        for (int64_t k = 0; k < ints->stride; k += 16)
          widen(ints->q + place_of(*ints, row, k / GROUP) * GROUP + k % GROUP, p.wide + (row - p.first_row) * ints->stride + k);
    int at = first;
    for (; COLUMNS > 1 && rows - first_row >= 4 && !m.gated && at + COLUMNS <= end; at += COLUMNS) all_rows<COLUMNS>(p, at);
    for (; at < end; at++) all_rows<1>(p, at);
  }
}

// Floats that a product needs of a thread's scratch memory.
static int product_scratch(const HrMatrix& m) {
  if (m.storage != HR_Q4 && m.storage != HR_Q8) return 0;
  const int groups = (m.k + GROUP - 1) / GROUP;
#if defined(HR_TILES)
  return TILE_FLOATS * (16 + (m.gated ? 4 : 2) * std::max(groups, RING)) + (64 + PAGE) / (int)sizeof(float);
#else
  return WIDE && m.storage == HR_Q8 ? groups * GROUP * HR_WIDE_ROWS / 2 : 0;
#endif
}

}  // namespace HR_ISA
