// Products on tiles (AMX): 16 rows of activations times 32 values of K of 16 outputs, in bfloat16, summed in float32.
//
// Weights are opened into bfloat16 just before they are multiplied, scale and offset included, so that a tile sums over all of K
// and nothing is done group by group. An output's terms are added in ascending groups whatever rows keep it company, so bits
// depend on the row alone here too. What is rounded: activations to bfloat16, weights to float16 and from there to bfloat16.
#pragma once
#include "products.h"

namespace HR_ISA {

// Tiles: sums of two blocks for the first 16 rows (0, 1) and the second (2, 3), these rows (4, 5), the blocks' weights (6, 7).
#define HR_TILE_LOAD(t, from) asm volatile("tileloadd (%0, %1, 1), %%tmm" #t ::"r"(from), "r"((int64_t)64) : "memory")
#define HR_TILE_STORE(t, to) asm volatile("tilestored %%tmm" #t ", (%0, %1, 1)" ::"r"(to), "r"((int64_t)64) : "memory")
#define HR_TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define HR_TILE_ADD(sums, rows, weights) asm volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sums ::)

// Shapes of the tiles. To set them empties them all.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};
// For the first 16 rows of a product, and the second, or fewer.
static inline void set_tiles(int first_rows, int second_rows) {
  TileShapes shapes;
  for (int t : {0, 1, 4}) shapes.rows[t] = (uint8_t)first_rows;
  for (int t : {2, 3, 5}) shapes.rows[t] = (uint8_t)std::max(1, second_rows);
  for (int t : {6, 7}) shapes.rows[t] = 16;
  for (int t = 0; t < 8; t++) shapes.bytes[t] = 64;
  shapes.set();
}
// While a thread has tiles, the system has more to keep when it puts it aside.
static inline void release_tiles() { asm volatile("tilerelease" ::); }

constexpr int TILE_BYTES = 1024, TILE_FLOATS = 256, PAGE = 4096, APART = 1536;

// ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// float16 as bfloat16 times 2^-112, which leaves the exponent's bits as they are: what float16 has below its normal numbers is 0 to
// the tiles. The product is the bits over 8, rounded; halves go away from 0.
static inline __m512i to_tile(__m512h h) {
  __m512i bits = _mm512_mulhrs_epi16((__m512i)h, _mm512_set1_epi16(1 << 12));
  return _mm512_and_si512(bits, _mm512_set1_epi16((short)0x8fff));
}

// The bits of each 16 from the 4 t-th on, as far as a table needs them. Not with a shift, for which there is one port, and that
// has the multiplications.
template <int T>
static inline __m512i nibbles(__m512i u) {
  constexpr uint64_t at = 4 * T | (uint64_t)(4 * T + 8) << 8;
  constexpr uint64_t control = at | (at + 0x1010) << 16 | (at + 0x2020) << 32 | (at + 0x3030) << 48;
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64((int64_t)control), u);
}

// Of 32 numbers 16 from `first` on, each twice.
static inline __m512h in_pairs(__m512i numbers, int first) {
  alignas(64) static constexpr uint16_t pairs[32] = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                     8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
  const __m512i which = _mm512_add_epi16(_mm512_load_si512(pairs), _mm512_set1_epi16((short)first));
  return (__m512h)_mm512_permutexvar_epi16(which, numbers);
}

// A group of a block as a tile wants it: 16 rows of K in pairs, 16 outputs in each. Row 2 j + i has values 4 j + i and 4 j + i + 2.
// by: 1 over the block's divisor.
struct OpenQ4 {
  static constexpr int LINES = 5;
  static inline const uint8_t* at(const uint8_t* block, int group) { return block + (int64_t)group * Q4_BYTES; }
  HR_INLINE void open(const uint8_t* block, int group, uint8_t* to, __m512h by) {
    const uint8_t* w = at(block, group);
    alignas(64) static constexpr _Float16 numbers[32] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                                         0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i table = _mm512_load_si512(numbers);
    const __m512i scales = load_u(w + 256);
    const __m512h d = _mm512_mul_ph(in_pairs(scales, 0), by), m = _mm512_mul_ph(in_pairs(scales, 16), by);
    // The table is looked up by the low bits of 16, whatever lies above them.
    auto put = [&](int row, __m512i index) __attribute__((always_inline)) {
      _mm512_store_si512(to + 64 * row, to_tile(_mm512_fmadd_ph((__m512h)_mm512_permutexvar_epi16(index, table), d, m)));
    };
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m512i u = load_u(w + 64 * j);
      put(2 * j, u), put(2 * j + 8, nibbles<1>(u)), put(2 * j + 1, nibbles<2>(u)), put(2 * j + 9, nibbles<3>(u));
    }
  }
};
struct OpenQ8 {
  static constexpr int LINES = 9;
  static inline const uint8_t* at(const uint8_t* block, int group) { return block + q8_at(group); }
  HR_INLINE void open(const uint8_t* block, int group, uint8_t* to, __m512h by) {
    const uint8_t* w = at(block, group);
    const __m512i scales = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(block + q8_scales_at(group))));
    const __m512h d = _mm512_mul_ph(in_pairs(scales, 0), by), middle = _mm512_set1_ph((_Float16)1152);
    const __m512i thousand = _mm512_set1_epi16(0x6400);  // 1024, whose last bits count ones
    auto put = [&](int row, __m512i ones) __attribute__((always_inline)) {
      _mm512_store_si512(to + 64 * row, to_tile(_mm512_mul_ph(_mm512_sub_ph((__m512h)ones, middle), d)));
    };
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      __m512i u = load_u(w + 64 * j);
      put(2 * j, _mm512_ternarylogic_epi32(u, _mm512_set1_epi16(255), thousand, 0xea));
      put(2 * j + 1, _mm512_or_si512(_mm512_srli_epi16(u, 8), thousand));
    }
  }
};

// For each block the power of 2 that its weights are divided by, of which none is over 2 then: they fill the range of float16,
// whatever they were. NaN where one is no number.
static void block_divisors(const HrMatrix& m, float* divisors) {
  const int groups = (m.k + GROUP - 1) / GROUP;
  const bool four_bits = m.storage == HR_Q4;
  if (!four_bits && m.storage != HR_Q8) return;
  for (int block = 0; block < (m.n + 15) / 16; block++) {
    const uint8_t* w = (const uint8_t*)m.data + block * block_bytes(m.storage, groups);
    V most = zero();
    Bad bad;
    for (int g = 0; g < groups; g++) {
      const uint16_t* by = (const uint16_t*)(four_bits ? w + (int64_t)g * Q4_BYTES + 256 : w + q8_scales_at(g));
      V d = load_half(by), m0 = four_bits ? load_half(by + 16) : mul(d, set1(-128.0f));
      V m1 = four_bits ? fma(d, set1(15.0f), m0) : zero();
      most = max(most, max(abs(m0), abs(m1)));
      watch(bad, sub(add(m0, m1), add(m0, m1)));
    }
    int power = 0;
    std::frexp(largest(most), &power);
    divisors[block] = any(bad) ? NAN : std::ldexp(1.0f, std::clamp(power - 1, -15, 14));
  }
}

// ── what becomes of sums ─────────────────────────────────────────────────────────────────────────────────────────────

// Sums of rows [row, row + n) in `blocks` blocks from `block` on, in memory.
struct Sums {
  int block = 0, blocks = 0, row = 0, n = 0;
  const float* at = nullptr;
  // Those of a row in the first block; the second's lie a tile further on, the third's and fourth's 4 and 5.
  inline const float* of(int r) const { return at + r / TILE_ROWS * 2 * TILE_FLOATS + r % TILE_ROWS * 16; }
};

// Groups that tiles take to come into memory; rows whose sums are finished between two passes, for to finish them on the way
// takes more registers than time.
constexpr int WAIT = 2, AT_ONCE = 4;

// Finishes sums a few rows at a time while tiles add up the next: vectors have little to do then, and it takes a tile long to
// come into memory.
struct Finish {
  const Product& p;
  const float* divisors;
  Sums sums, next;  // those under way
  int done = 0, each = 0, wait = 0;
  const bool asks;
  V scales[4] = {};

  Finish(const Product& p, const float* divisors) : p(p), divisors(divisors), asks(asks_for(p, p.end_row - p.first_row)) {}
  static bool asks_for(const Product& p, int rows) { return p.residual.base && rows > TILE_ROWS && rows <= 2 * TILE_ROWS; }

  inline V sum(const float* at, int c) const { return mul(load(at + (c / 2 * 4 + c % 2) * TILE_FLOATS), scales[c]); }

  // Two whole blocks, of which most products are made, with nothing looked up for each row.
  void rows_of_two(int end) {
    const int64_t at = sums.block * 16, row = sums.row + done;
    const float *bias = p.m.bias, *more = p.residual.base ? p.residual.base + row * p.residual.stride + at : nullptr;
    float* out = p.out.row((int)row) + at;
    for (; done < end; done++, out += p.out.stride) {
      const float* from = sums.of(done);
      V a = sum(from, 0), b = sum(from, 1);
      if (bias) a = add(a, load(bias + at)), b = add(b, load(bias + at + 16));
      if (more) a = add(a, load(more)), b = add(b, load(more + 16)), more += p.residual.stride;
      store(out, a);
      store(out + 16, b);
    }
  }
  void rows(int end) {
    if (p.m.gated) {
      for (; done < end; done++) {
        const float* from = sums.of(done);
        const V each[4][1] = {{sum(from, 0)}, {sum(from, 1)}, {sum(from, 2)}, {sum(from, 3)}};
        finish_gated<1>(p, sums.block / 4, sums.row + done, each);
      }
    } else if (sums.blocks == 2 && (sums.block + 2) * 16 <= p.m.n && !p.residual.map) {
      rows_of_two(end);
    } else {
      for (; done < end; done++)
        for (int c = 0; c < sums.blocks; c++) finish_row(p, sums.block + c, sums.row + done, sum(sums.of(done), c));
    }
  }
  inline void some() {
    if (--wait < 0 && done < sums.n) rows(std::min(done + each, sums.n));
  }
  // What is added to sums was another thread's, with other columns, in the operation before. So it is on its way while they are
  // added up: with so many rows that they would wait for it, and so few that all of it stays in a near cache until then.
  void ask_for(const Sums& s) const {
    for (int r = s.row; r < s.row + s.n; r++)
      for (int c = 0; c < s.blocks; c++) fetch_near(p.residual.row(r) + (s.block + c) * 16);
  }
  // What is left, and then `following`, of which the sums come in so many calls of `some`.
  void begin(const Sums& following, int calls) {
    rows(sums.n);
    sums = next;
    next = following;
    if (asks && calls) ask_for(next);
    for (int c = 0; c < sums.blocks; c++) scales[c] = set1(divisors[sums.block + c] * TILE_SUM);
    done = 0;
    wait = calls > WAIT ? WAIT : 0;
    each = calls ? (sums.n + calls - wait - 1) / (calls - wait) : 0;
  }
};

// ── sums ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

// C blocks of weights: packed, and where they are opened. A ring of RING groups is enough for weights that one pass needs.
constexpr int RING = 4, OPEN_AHEAD = 2;
template <int C>
struct Opened {
  const uint8_t* packed;
  int64_t packed_stride;  // from block to block
  uint8_t* to;
  int64_t stride;
  int mask;               // of a group, for its place
  __m512h by[C];
  int64_t ahead;          // where weights lie that are wanted next, 0 where none are
  inline uint8_t* at(int c, int group) const { return to + c * stride + (int64_t)(group & mask) * TILE_BYTES; }
};

template <class W, int C>
HR_INLINE void open_group(const Opened<C>& o, int group) {
#pragma GCC unroll 2
  for (int c = 0; c < C; c++) {
    const uint8_t* block = o.packed + c * o.packed_stride;
    if (o.ahead)
#pragma GCC unroll 9
      for (int i = 0; i < W::LINES; i++) fetch_near(W::at(block, group) + o.ahead + 64 * i);
    W::open(block, group, o.at(c, group), o.by[c]);
  }
}

// Sums of 16 rows, or of two times 16 where TWO, in C blocks. x: the rows' tiles, xs: bytes to the second 16. sums: tiles by row,
// then by block. OPEN: the weights are not opened yet. MEANWHILE: the sums before these are finished on the way.
template <class W, int C, bool TWO, bool OPEN, bool MEANWHILE = true>
static void add_groups(const Opened<C>& o, int groups, const uint8_t* x, int64_t xs, float* sums, CacheAhead& cache, Finish& finish) {
  HR_TILE_ZERO(0);
  if (C > 1) HR_TILE_ZERO(1);
  if (TWO) HR_TILE_ZERO(2);
  if (TWO && C > 1) HR_TILE_ZERO(3);
  if (OPEN)
    for (int g = 0; g < std::min(groups, OPEN_AHEAD); g++) open_group<W, C>(o, g);
  for (int g = 0; g < groups; g++) {
    cache();
    if (OPEN && g + OPEN_AHEAD < groups) open_group<W, C>(o, g + OPEN_AHEAD);
    if (MEANWHILE) finish.some();
    HR_TILE_LOAD(4, x + g * TILE_BYTES);
    HR_TILE_LOAD(6, o.at(0, g));
    HR_TILE_ADD(0, 4, 6);
    if (C > 1) HR_TILE_LOAD(7, o.at(1, g));
    if (C > 1) HR_TILE_ADD(1, 4, 7);
    if (TWO) HR_TILE_LOAD(5, x + xs + g * TILE_BYTES);
    if (TWO) HR_TILE_ADD(2, 5, 6);
    if (TWO && C > 1) HR_TILE_ADD(3, 5, 7);
  }
  HR_TILE_STORE(0, sums);
  if (C > 1) HR_TILE_STORE(1, sums + TILE_FLOATS);
  if (TWO) HR_TILE_STORE(2, sums + 2 * TILE_FLOATS);
  if (TWO && C > 1) HR_TILE_STORE(3, sums + 3 * TILE_FLOATS);
}

// ── a product ────────────────────────────────────────────────────────────────────────────────────────────────────────

template <class W, int C>
static void sum_blocks(const Product& p, const float* divisors, int block, int row, int n, uint8_t* opened, float* sums, Finish& finish) {
  const HrMatrix& m = p.m;
  const int groups = (m.k + GROUP - 1) / GROUP;
  const bool once = p.end_row - p.first_row <= 2 * TILE_ROWS, open = row == p.first_row;
  const int64_t size = block_bytes(m.storage, groups), xs = (int64_t)groups * TILE_BYTES;
  Opened<C> o{(const uint8_t*)m.data + block * size, size, opened, (once ? RING : groups) * (int64_t)TILE_BYTES, once ? RING - 1 : -1, {}, 0};
  for (int c = 0; c < C; c++) o.by[c] = _mm512_set1_ph((_Float16)(1.0f / divisors[block + c]));
  if (open) o.ahead = (p.after<C>(block) - block) * size;
  const uint8_t* x = (const uint8_t*)tile_row(*p.ints, row, 0);
  const bool two = n > TILE_ROWS;
  if (open && two) add_groups<W, C, true, true>(o, groups, x, xs, sums, *p.cache, finish);
  else if (open && n <= AT_ONCE) add_groups<W, C, false, true, false>(o, groups, x, xs, sums, *p.cache, finish);
  else if (open) add_groups<W, C, false, true>(o, groups, x, xs, sums, *p.cache, finish);
  else if (two) add_groups<W, C, true, false>(o, groups, x, xs, sums, *p.cache, finish);
  else add_groups<W, C, false, false>(o, groups, x, xs, sums, *p.cache, finish);
}

// Items [first, end) of blocks, for all rows.
template <class W>
static void tile_product(const Product& p, const float* divisors, int first, int end, float* scratch) {
  const int step = p.m.gated ? 4 : 2, rows = p.end_row - p.first_row, groups = (p.m.k + GROUP - 1) / GROUP;
  uint8_t* aligned = (uint8_t*)(((uintptr_t)scratch + 63) / 64 * 64);
  float* room[2] = {(float*)aligned, (float*)aligned + 8 * TILE_FLOATS};
  uint8_t* opened = aligned + 16 * TILE_FLOATS * sizeof(float);
  // A load looks like an earlier store of the same place in another page, and waits for it. So weights are written away from where
  // rows are read.
  opened += ((uintptr_t)tile_row(*p.ints, p.first_row, 0) + APART - (uintptr_t)opened) % PAGE;
  Finish finish(p, divisors);
  int turn = 0;
  // The last rows may need another shape, which clears the tiles; so it is given once for all rows that have it.
  const int whole = rows / (2 * TILE_ROWS) * 2 * TILE_ROWS, rest = rows - whole;
  for (int block = first; block < end; block += step) {
    const int blocks = std::min(step, end - block);
    for (int done = 0; done < rows; done += 2 * TILE_ROWS, turn ^= 1) {
      const int n = std::min(2 * TILE_ROWS, rows - done), row = p.first_row + done;
      if ((block == first && done == 0) || (rest && whole && (done == 0 || done == whole)))
        set_tiles(std::min(n, TILE_ROWS), n - TILE_ROWS);
      finish.begin({block, blocks, row, n, room[turn]}, (blocks + 1) / 2 * groups);
      for (int c = 0; c < blocks; c += 2) {
        uint8_t* to = opened + (int64_t)c * groups * TILE_BYTES;
        float* sums = room[turn] + c / 2 * 4 * TILE_FLOATS;
        if (blocks - c > 1) sum_blocks<W, 2>(p, divisors, block + c, row, n, to, sums, finish);
        else sum_blocks<W, 1>(p, divisors, block + c, row, n, to, sums, finish);
      }
    }
  }
  release_tiles();
  finish.begin({}, 0);
  finish.begin({}, 0);
}

}  // namespace HR_ISA
