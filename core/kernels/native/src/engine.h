// A step under way, and what each dialect offers.
#pragma once
#include <algorithm>

#include "abi.h"

// Rows that attention takes together: several of one sequence, or the last rows of several sequences that begin alike.
struct Unit {
  int32_t first, end;  // of Run::rows
  int32_t shared;      // keys that all of them read from the same blocks, in whole tiles; ALL of one sequence
  int32_t sampled;     // whether any of them is
  static constexpr int32_t ALL = INT32_MAX;
};

// What a product has fetched for the attention that follows it: a part, of 0 to 1, of the blocks that one will read.
struct Share {
  int32_t layer;
  float from, to;
};

struct Run {
  const HrProgram* program;
  const HrStep* step;
  const Unit* units;
  const int32_t* rows;     // of the batch, in the order of units
  const int32_t* row_seq;  // the sequence of each row
  int32_t heads_together;  // KV heads that an item of attention takes
  const Share* shares;     // of each operation of the program
  const int32_t* blocks;   // that attention will read, in its order, as far as they may be fetched ahead
  int32_t num_blocks;
  int32_t threads;
  const float* const* divisors_of;  // of each matrix, what its blocks' weights are divided by, where the dialect divides them
};

// Rows of a product: with many, each thread has rows of its own rather than outputs, and what it computes stays in its caches.
struct RowParts {
  int parts, size;
};
// From how many on a thread has rows of its own, and a multiple of what. Each thread reads all weights then: the more there are, the more
// rows must be worth it.
struct OwnRows {
  int least, step;
  inline RowParts parts(int rows, int threads) const {
    if (rows < std::max(least, std::min(8 * threads, 64)) * threads) return {1, rows};
    const int size = ((rows + threads - 1) / threads + step - 1) / step * step;
    return {(rows + size - 1) / size, size};
  }
};

// Items [first, end) of an operation: rows, blocks of outputs (of a part of the rows, then of the next), or attention units times
// KV heads. next: where the items begin that the same thread is likely to take then, -1 where there are none.
using TileFn = void (*)(const Run&, const HrOp&, int first, int end, int next, float* scratch);

struct Dialect {
  const char* name;
  TileFn tile;
  void (*draw)(HrDraw&, int vocab_size);
  double (*read)(const float* p, int64_t n);  // a sum, so that all is read
  int64_t (*multiply)(int64_t rounds);        // products in registers alone; how many
  void (*divisors)(const HrMatrix&, float*);  // see Run::divisors_of; one for each block
  int (*scratch)(const HrMatrix&);            // floats that a thread needs beside its rows
  OwnRows own_rows;                           // of products
  int few_items, many_items;                  // of a thread, of a product of few rows, and of 16 or more
};

extern const Dialect hr_portable;
#if defined(__x86_64__)
extern const Dialect hr_avx2, hr_avx512;
#if defined(__linux__)
#define HR_HAS_AMX
// Null where the compiler did not know it.
extern const Dialect hr_amx __attribute__((weak));
#endif
#endif

// Rows of queries that attention takes at once, and keys.
constexpr int HR_MAX_QUERIES = 48, HR_KEYS = 64;
// Rows that a product has as 16-bit integers at once, where it needs them so.
constexpr int HR_WIDE_ROWS = 32;
