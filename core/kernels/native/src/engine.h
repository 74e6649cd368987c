// A step under way, and what each dialect offers.
#pragma once
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
  int32_t num_units;
  const int32_t* rows;     // of the batch, in the order of units
  const int32_t* row_seq;  // the sequence of each row
  int32_t heads_together;  // KV heads that an item of attention takes
  int32_t threads;         // of which each takes about every so many-th item
  const Share* shares;     // of each operation of the program
  const int32_t* blocks;   // that attention will read, in its order, as far as they may be fetched ahead
  int32_t num_blocks;
};

// Items [first, end) of an operation: rows, blocks of outputs, or attention units times KV heads.
using TileFn = void (*)(const Run&, const HrOp&, int first, int end, float* scratch);

struct Dialect {
  const char* name;
  TileFn tile;
  void (*draw)(HrDraw&, int vocab_size);
  double (*read)(const float* p, int64_t n);  // a sum, so that all is read
  int64_t (*multiply)(int64_t rounds);        // integer products in registers alone; how many
};

extern const Dialect hr_portable;
#if defined(__x86_64__)
extern const Dialect hr_avx2, hr_avx512;
#endif

// Rows of queries that attention takes at once, and keys.
constexpr int HR_MAX_QUERIES = 48, HR_KEYS = 64;
// Rows that a product has as 16-bit integers at once, where it needs them so.
constexpr int HR_WIDE_ROWS = 32;
