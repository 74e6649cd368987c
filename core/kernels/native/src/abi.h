// What Python and C++ say to each other: plain structs over a plain C ABI. core/kernels/native/abi.py mirrors each field.
#pragma once
#include <cstdint>

#define HR_ABI 8

enum HrKind : int32_t {
  HR_EMBED,     // out = row tokens[t] of matrix
  HR_POSITION,  // out = row positions[t] of matrix
  HR_NORM,      // RMS norm over runs of `inner` features, weight w0
  HR_LAYERNORM, // norm around the mean, weight w0, bias w1
  HR_QUANT,     // a as integers
  HR_MATMUL,    // out = qin or a, times matrix, plus bias, plus b where b.buf >= 0
  HR_GATED,     // out = act(a) * b
  HR_ACTIVATE,  // out = act(a)
  HR_ADD,       // out = a + b
  HR_SCALE,     // out = a * f0
  HR_SOFTCAP,   // out = f0 * tanh(a / f0)
  HR_TURNS,     // cosines and sines of all turns, for the step
  HR_ROTATE,    // out turned in place
  HR_STORE,     // key a turned (where freq >= 0) and value b, into the cache; query out turned in place (where matrix >= 0)
  HR_ATTEND,    // out = attention of query a over the cache
};

enum HrDomain : int32_t { HR_TOKENS, HR_SAMPLES };
enum HrActivation : int32_t { HR_SILU, HR_GELU, HR_GELU_TANH };

// How a matrix lies in memory: always blocks of 16 outputs, each holding all of K, so that 16 outputs are the lanes of a
// vector and no sum ever crosses lanes. Groups are 32 values of K.
//   HR_Q4: a group is 256 bytes of nibbles, 16 scales d and 16 offsets m in fp16; value = d * nibble + m. Byte 64 j + 4 o + i
//          has value 4 j + i of output o in its low half, value 16 + 4 j + i in its high half (j < 4, i < 4).
//   HR_Q8: a group is 512 bytes, value + 128 of output o at 64 j + 4 o + i (j < 8). Two groups lie together, behind the 16
//          scales of each in fp16, so that all is read in order and no vector crosses a line. An odd last group has zeros
//          beside it.
//   HR_F32, HR_BF16, HR_F16: value k of output o at 16 k + o.
//   HR_ROWS: float32 rows one after the other; to be looked up, not multiplied.
enum HrStorage : int32_t { HR_F32, HR_BF16, HR_F16, HR_Q8, HR_Q4, HR_ROWS };

struct HrRef {
  int32_t buf, off;  // buffer (-1: none) and first column
};

struct HrOp {
  int32_t kind, domain;
  int32_t gather;  // inputs are read at sample_rows, the output counts samples. ATTEND: only sampled rows are wanted
  int32_t act;
  HrRef a, b, out;
  int32_t qin, qout;  // integer buffers, -1: none
  int32_t width;      // features of the output
  int32_t inner;      // NORM: features of a run; ROTATE, STORE, ATTEND: features of a head
  int32_t matrix, freq, layer, window;  // window 0: all
  int32_t heads, kv_heads;
  float f0, f1;  // NORM: eps; SCALE, SOFTCAP: factor, cap; ATTEND: scale, cap (0: none)
  const float *w0, *w1;
};

struct HrMatrix {
  int32_t storage, n, k;
  int32_t gated;  // 0, or 1: blocks lie gate gate up up, and MATMUL writes act(gate) * up
  const void* data;
  const float* bias;  // as many as n, or null; not with gated
};

struct HrBuffer {
  float* data;
  int64_t stride;  // floats a row
};

// What products of 4- and 8-bit weights multiply: four rows together, and of these a group of 32 values of K after the other. `amx` has
// bfloat16 there, in the order of its tiles (see put_group), of twice the bytes, and no scales; rows are whole tiles of 16.
struct HrInts {
  int8_t* q;          // [rows / 4, stride / 32, 4, 32]
  float* scales;      // [rows / 4, stride / 32, 4, per_group]
  int64_t stride;     // bytes a row, a multiple of 32
  int64_t per_group;  // floats that a group has with it: PER_GROUP, or PER_FINE_GROUP
};

struct HrTurn {
  const float* frequencies;
  int32_t pairs;
  float magnitude;
  float* cos;  // [rows, pairs]
  float* sin;
};

// Keys and values as integers of 16 bits or, except with `avx2`, 8, each token's with a scale of its own. What a head has of a block:
// block_size * head_dim integers, then block_size scales in float32. Of n integers in 4 bytes, keys: number i % n of the (i / n)-th
// 4 bytes of slot s at (i / n * block_size + s) * n + i % n, so that 16 slots are lanes. Values: feature i of slot s at
// (s / n * head_dim + i) * n + s % n, so that 16 features are. Keys of 8 bits are turned first: see spread().
struct HrCache {
  char* data;
  int64_t block_stride, layer_stride, value_offset, head_stride;  // in bytes
  int32_t block_size, bits;
};

struct HrProgram {
  const HrOp* ops;
  const HrMatrix* matrices;
  HrBuffer* buffers;
  HrInts* ints;
  HrTurn* turns;
  HrCache cache;
  int32_t num_ops, num_matrices, num_buffers, num_ints, num_turns;
  int32_t scratch_floats;  // of each thread: the widest row
};

struct HrStep {
  const int32_t *tokens, *positions;  // [num_tokens]
  const int32_t *cu_tokens;           // [num_seqs + 1]
  const int32_t *seq_lens;            // [num_seqs]
  const int32_t *cu_blocks, *tables;  // [num_seqs + 1], [cu_blocks[num_seqs]]
  const int32_t *sample_rows;         // [num_samples]
  int32_t num_tokens, num_seqs, num_samples, pad;
};

// One row's draw: penalties for tokens that were there before, temperature, then top-k, top-p and min-p, then one token by
// `uniform`. Ties go to the smaller id.
struct HrDraw {
  float temperature;  // 0: the likeliest; below: none, only `top` is wanted
  float top_p;        // 1: off
  float min_p;        // 0: off
  int32_t top_k;      // 0: off
  double uniform;     // in [0, 1); below 0: made of the next three, as core/uniform.py says
  uint64_t seed, position;
  float* logits;  // written to and put back
  int32_t token;  // out; -1 where nothing can be drawn
  float top;      // out: the largest logit that could be drawn; NaN where any is
  uint32_t choice;
  int32_t num_prompt;     // of `tokens`; all further ones were drawn
  const int32_t* tokens;  // [num_tokens], where there are penalties
  int32_t num_tokens;
  float repetition;           // divides positive and multiplies negative logits of tokens; 1: off
  float presence, frequency;  // subtracted from those that were drawn, once and for each time; 0: off
};
