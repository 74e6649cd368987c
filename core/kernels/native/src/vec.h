// Vectors of 16 lanes in three dialects. Kernels are written once, over these.
// V: 16 floats. I: 16 integers. D: 16 running integer sums of products of four. U: 64 unsigned bytes. P: 16 pairs of 16-bit
// integers. Beside them, what the registers allow:
// COLUMNS, blocks of outputs that a product takes at once; CHAINS, sums that keep the multipliers busy; POWERS, vectors of
// which a softmax takes powers at once; WHOLE_BYTES, whether products of all 8 bits of both factors can be summed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// The innermost loops must be one piece: where the compiler leaves part of one as a call, sums go through memory around it.
#if defined(__GNUC__)
#define HR_INLINE static inline __attribute__((always_inline))
#else
#define HR_INLINE static inline
#endif

namespace HR_ISA {

#if defined(HR_AVX512)

struct V { __m512 x; };
struct I { __m512i x; };
using U = __m512i;
static inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, V v) { _mm512_storeu_ps(p, v.x); }
static inline V load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
static inline void store_n(float* p, V v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v.x); }
static inline V set1(float f) { return {_mm512_set1_ps(f)}; }
static inline V add(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
static inline V sub(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
static inline V mul(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
static inline V div(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
static inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
static inline V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
static inline V min(V a, V b) { return {_mm512_min_ps(a.x, b.x)}; }
static inline V abs(V a) { return {_mm512_abs_ps(a.x)}; }
struct Bad { __mmask16 m = 0; };
static inline void watch(Bad& b, V v) { b.m |= _mm512_cmp_ps_mask(v.x, v.x, _CMP_UNORD_Q); }
static inline bool any(Bad b) { return b.m != 0; }
static inline V load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline V load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// Lanes first <= lane < end keep their value, the others become `other`.
static inline V keep(V v, int first, int end, float other) {
  uint32_t m = (end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1) & ~(first <= 0 ? 0u : first >= 16 ? 0xffffu : (1u << first) - 1);
  return {_mm512_mask_blend_ps((__mmask16)m, _mm512_set1_ps(other), v.x)};
}
static inline I to_int(V v) { return {_mm512_cvtps_epi32(v.x)}; }
static inline V to_float(I v) { return {_mm512_cvtepi32_ps(v.x)}; }
static inline V round(V v) { return {_mm512_roundscale_ps(v.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// p times 2 to the power of whole n, 0 where x is not over `least`, NaN where it is none.
static inline V times_power(V p, V n, V x, float least) {
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.x, _mm512_set1_ps(least), _CMP_NLE_UQ), p.x, n.x)};
}
// p times 2 to the power of whole n; both, and the result, are far from the ends of what a float can be.
static inline V times_power(V p, V n) { return {_mm512_scalef_ps(p.x, n.x)}; }
static inline void store_bytes(int8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v.x)); }

static inline U load_u(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline U low(U u) { return _mm512_and_si512(u, _mm512_set1_epi8(15)); }
static inline U high(U u) { return _mm512_and_si512(_mm512_srli_epi16(u, 4), _mm512_set1_epi8(15)); }
struct D { __m512i x; };
static inline D d_zero() { return {_mm512_setzero_si512()}; }
using B = __m512i;
static inline B four(const int8_t* p) { int32_t v; std::memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
static inline __m512i dp(__m512i acc, __m512i u, __m512i s) { return _mm512_dpbusd_epi32(acc, u, s); }
static inline D dot4(D d, U w, B s) { return {dp(d.x, w, s)}; }
static inline V to_float(D d) { return {_mm512_cvtepi32_ps(d.x)}; }
static inline void pin(U& u) { asm volatile("" : "+v"(u)); }
using P = __m512i;
static inline P load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
static inline P set_pair(const int16_t* p) { int32_t v; std::memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
// As assembly, for GCC 12 moves every sum to another register and back around it.
static inline I dot2(I sum, P a, P b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.x) : "v"(a), "v"(b));
  return sum;
}
static inline I i_zero() { return {_mm512_setzero_si512()}; }
static inline I i_set1(int i) { return {_mm512_set1_epi32(i)}; }
static inline U zeros() { return _mm512_setzero_si512(); }
static inline void store_ints(float* p, I v) { _mm512_storeu_si512(p, v.x); }
static inline U set_quad(const char* p) { int32_t v; std::memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
// Signed bytes plus 128, without a sign.
static inline U raised(U u) { return _mm512_xor_si512(u, _mm512_set1_epi8((char)0x80)); }
// Plus four products each: of bytes without a sign, and with one. As assembly, like dot2.
static inline I dot4(I sum, U a, U b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.x) : "v"(a), "v"(b));
  return sum;
}
// Of 0 to 255.
static inline void store_weights(uint8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(v.x)); }
// Lane j at p[4 j].
static inline void store_bytes_apart(int8_t* p, I v) { _mm512_mask_storeu_epi8(p, 0x1111111111111111ull, v.x); }
// Each run of 16 times a Hadamard matrix: pairs, pairs of pairs, and so on, plus and minus one another.
static inline V spread_lanes(V v) {
  // The swapped lanes, plus or minus what was there.
  auto signs = [](uint16_t negative) { return _mm512_mask_blend_ps(negative, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f)); };
  v.x = _mm512_fmadd_ps(v.x, signs(0xaaaa), _mm512_permute_ps(v.x, 0xb1));
  v.x = _mm512_fmadd_ps(v.x, signs(0xcccc), _mm512_permute_ps(v.x, 0x4e));
  v.x = _mm512_fmadd_ps(v.x, signs(0xf0f0), _mm512_shuffle_f32x4(v.x, v.x, 0xb1));
  v.x = _mm512_fmadd_ps(v.x, signs(0xff00), _mm512_shuffle_f32x4(v.x, v.x, 0x4e));
  return v;
}
static inline void store_shorts(int16_t* p, I v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(v.x)); }
// Lane j at p[2 j]; what lies between is not touched. The lanes must fit.
static inline void store_apart(int16_t* p, I v) { _mm512_mask_storeu_epi16(p, 0x55555555u, v.x); }
// 32 registers hold the sums of two blocks of outputs.
constexpr int COLUMNS = 2, CHAINS = 12, POWERS = 4;
constexpr bool WHOLE_BYTES = true;

#elif defined(HR_AVX2)

struct V { __m256 x, y; };
struct I { __m256i x, y; };
struct U { __m256i x, y; };
static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V v) { _mm256_storeu_ps(p, v.x); _mm256_storeu_ps(p + 8, v.y); }
static inline V set1(float f) { __m256 v = _mm256_set1_ps(f); return {v, v}; }
static inline V add(V a, V b) { return {_mm256_add_ps(a.x, b.x), _mm256_add_ps(a.y, b.y)}; }
static inline V sub(V a, V b) { return {_mm256_sub_ps(a.x, b.x), _mm256_sub_ps(a.y, b.y)}; }
static inline V mul(V a, V b) { return {_mm256_mul_ps(a.x, b.x), _mm256_mul_ps(a.y, b.y)}; }
static inline V div(V a, V b) { return {_mm256_div_ps(a.x, b.x), _mm256_div_ps(a.y, b.y)}; }
static inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.x, b.x, c.x), _mm256_fmadd_ps(a.y, b.y, c.y)}; }
static inline V max(V a, V b) { return {_mm256_max_ps(a.x, b.x), _mm256_max_ps(a.y, b.y)}; }
static inline V min(V a, V b) { return {_mm256_min_ps(a.x, b.x), _mm256_min_ps(a.y, b.y)}; }
static inline V abs(V a) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.x, m), _mm256_and_ps(a.y, m)};
}
struct Bad { __m256 m = _mm256_setzero_ps(); };
static inline void watch(Bad& b, V v) {
  b.m = _mm256_or_ps(b.m, _mm256_or_ps(_mm256_cmp_ps(v.x, v.x, _CMP_UNORD_Q), _mm256_cmp_ps(v.y, v.y, _CMP_UNORD_Q)));
}
static inline bool any(Bad b) { return _mm256_movemask_ps(b.m) != 0; }
static inline V load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline V load_bf16(const uint16_t* p) {
  __m256i x = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
  __m256i y = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))), 16);
  return {_mm256_castsi256_ps(x), _mm256_castsi256_ps(y)};
}
static inline V keep(V v, int first, int end, float other) {
  const __m256i lx = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), ly = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i f = _mm256_set1_epi32(first - 1), e = _mm256_set1_epi32(end);
  const __m256 o = _mm256_set1_ps(other);
  __m256i mx = _mm256_and_si256(_mm256_cmpgt_epi32(lx, f), _mm256_cmpgt_epi32(e, lx));
  __m256i my = _mm256_and_si256(_mm256_cmpgt_epi32(ly, f), _mm256_cmpgt_epi32(e, ly));
  return {_mm256_blendv_ps(o, v.x, _mm256_castsi256_ps(mx)), _mm256_blendv_ps(o, v.y, _mm256_castsi256_ps(my))};
}
static inline I to_int(V v) { return {_mm256_cvtps_epi32(v.x), _mm256_cvtps_epi32(v.y)}; }
static inline V to_float(I v) { return {_mm256_cvtepi32_ps(v.x), _mm256_cvtepi32_ps(v.y)}; }
static inline V round(V v) {
  constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.x, how), _mm256_round_ps(v.y, how)};
}
static inline __m256 times_power(__m256 p, __m256 n, __m256 x, float least) {
  __m256i e = _mm256_max_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(-126));
  __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  return _mm256_and_ps(_mm256_mul_ps(p, power), _mm256_cmp_ps(x, _mm256_set1_ps(least), _CMP_NLE_UQ));
}
static inline V times_power(V p, V n, V x, float least) {
  return {times_power(p.x, n.x, x.x, least), times_power(p.y, n.y, x.y, least)};
}
static inline __m256 times_power(__m256 p, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
static inline V times_power(V p, V n) { return {times_power(p.x, n.x), times_power(p.y, n.y)}; }
static inline void store_bytes(int8_t* p, I v) {
  __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.x, v.y), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

static inline U load_u(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static inline U low(U u) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(u.x, m), _mm256_and_si256(u.y, m)};
}
static inline U high(U u) { return low({_mm256_srli_epi16(u.x, 4), _mm256_srli_epi16(u.y, 4)}); }
// Sums of pairs in 16 bits. A group has 8 of them a lane: 8 * 2 * 15 * 127 = 30480 fits.
struct D { __m256i x, y; };
static inline D d_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
using B = __m256i;
static inline B four(const int8_t* p) { int32_t v; std::memcpy(&v, p, 4); return _mm256_set1_epi32(v); }
static inline D dot4(D d, U w, B s) {
  d = {_mm256_add_epi16(d.x, _mm256_maddubs_epi16(w.x, s)), _mm256_add_epi16(d.y, _mm256_maddubs_epi16(w.y, s))};
  // Kept here, or the compiler gathers the additions of a group at its end, and spills what it then has to hold.
  asm volatile("" : "+x"(d.x), "+x"(d.y));
  return d;
}
static inline V to_float(D d) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_cvtepi32_ps(_mm256_madd_epi16(d.x, one)), _mm256_cvtepi32_ps(_mm256_madd_epi16(d.y, one))};
}
static inline void pin(U& u) { asm volatile("" : "+x"(u.x), "+x"(u.y)); }
struct P { __m256i x, y; };
static inline P load_pairs(const int16_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))}; }
static inline P set_pair(const int16_t* p) { int32_t v; std::memcpy(&v, p, 4); __m256i w = _mm256_set1_epi32(v); return {w, w}; }
static inline I dot2(I sum, P a, P b) {
  return {_mm256_add_epi32(sum.x, _mm256_madd_epi16(a.x, b.x)), _mm256_add_epi32(sum.y, _mm256_madd_epi16(a.y, b.y))};
}
static inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline void store_shorts(int16_t* p, I v) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(v.x, v.y), 0xd8));
}
constexpr int COLUMNS = 1, CHAINS = 6, POWERS = 2;
constexpr bool WHOLE_BYTES = false;  // D has 16 bits for two of them.
// Of 8-bit weights not even two products fit into 16 bits: they are multiplied as 16-bit integers, values 0 and 2 of four with
// one instruction, 1 and 3 with another.
#define HR_WIDE
static inline P even(U u) {
  const __m256i m = _mm256_set1_epi16(255);
  return {_mm256_and_si256(u.x, m), _mm256_and_si256(u.y, m)};
}
static inline P odd(U u) { return {_mm256_srli_epi16(u.x, 8), _mm256_srli_epi16(u.y, 8)}; }
static inline void pin(I& i) { asm volatile("" : "+x"(i.x), "+x"(i.y)); }
// 16 integers, those of each four in the order 0, 2, 1, 3.
static inline void widen(const int8_t* p, int16_t* to) {
  __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  _mm256_storeu_si256((__m256i*)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(w, 0xd8), 0xd8));
}

#else

struct V { float f[16]; };
struct I { int32_t i[16]; };
struct U { uint8_t u[64]; };
#define HR_EACH for (int j = 0; j < 16; j++)
static inline V load(const float* p) { V r; std::memcpy(r.f, p, 64); return r; }
static inline void store(float* p, V v) { std::memcpy(p, v.f, 64); }
static inline V set1(float f) { V r; HR_EACH r.f[j] = f; return r; }
static inline V add(V a, V b) { HR_EACH a.f[j] += b.f[j]; return a; }
static inline V sub(V a, V b) { HR_EACH a.f[j] -= b.f[j]; return a; }
static inline V mul(V a, V b) { HR_EACH a.f[j] *= b.f[j]; return a; }
static inline V div(V a, V b) { HR_EACH a.f[j] /= b.f[j]; return a; }
static inline V fma(V a, V b, V c) { HR_EACH c.f[j] += a.f[j] * b.f[j]; return c; }
static inline V max(V a, V b) { HR_EACH a.f[j] = a.f[j] > b.f[j] ? a.f[j] : b.f[j]; return a; }
static inline V min(V a, V b) { HR_EACH a.f[j] = a.f[j] < b.f[j] ? a.f[j] : b.f[j]; return a; }
static inline V abs(V a) { HR_EACH a.f[j] = std::fabs(a.f[j]); return a; }
struct Bad { bool m = false; };
static inline void watch(Bad& b, V v) { HR_EACH b.m |= std::isnan(v.f[j]); }
static inline bool any(Bad b) { return b.m; }
static inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, bits;
  if (e == 31) bits = sign | 0x7f800000 | (m << 13);
  else if (e) bits = sign | ((e + 112) << 23) | (m << 13);
  else { float f = (float)m * 5.9604644775390625e-8f; std::memcpy(&bits, &f, 4); bits |= sign; }
  float f; std::memcpy(&f, &bits, 4); return f;
}
static inline V load_half(const uint16_t* p) { V r; HR_EACH r.f[j] = half_to_float(p[j]); return r; }
static inline V load_bf16(const uint16_t* p) {
  V r; HR_EACH { uint32_t b = (uint32_t)p[j] << 16; std::memcpy(&r.f[j], &b, 4); } return r;
}
static inline V keep(V v, int first, int end, float other) {
  HR_EACH if (j < first || j >= end) v.f[j] = other;
  return v;
}
static inline I to_int(V v) { I r; HR_EACH r.i[j] = (int32_t)std::nearbyintf(v.f[j]); return r; }
static inline V to_float(I v) { V r; HR_EACH r.f[j] = (float)v.i[j]; return r; }
static inline V round(V v) { HR_EACH v.f[j] = std::nearbyintf(v.f[j]); return v; }
static inline V times_power(V p, V n, V x, float least) {
  HR_EACH p.f[j] = x.f[j] > least ? std::ldexp(p.f[j], (int)n.f[j]) : x.f[j] <= least ? 0.0f : p.f[j];
  return p;
}
static inline V times_power(V p, V n) {
  HR_EACH if (!std::isnan(n.f[j])) p.f[j] = std::ldexp(p.f[j], (int)n.f[j]);
  return p;
}
static inline void store_bytes(int8_t* p, I v) {
  HR_EACH p[j] = (int8_t)(v.i[j] < -128 ? -128 : v.i[j] > 127 ? 127 : v.i[j]);
}
static inline U load_u(const uint8_t* p) { U r; std::memcpy(r.u, p, 64); return r; }
static inline U low(U u) { for (auto& b : u.u) b &= 15; return u; }
static inline U high(U u) { for (auto& b : u.u) b >>= 4; return u; }
struct D { int32_t i[16]; };
static inline D d_zero() { return {}; }
struct B { int8_t s[4]; };
static inline B four(const int8_t* p) { B b; std::memcpy(b.s, p, 4); return b; }
static inline D dot4(D d, const U& w, B s) {
  HR_EACH d.i[j] += w.u[4 * j] * s.s[0] + w.u[4 * j + 1] * s.s[1] + w.u[4 * j + 2] * s.s[2] + w.u[4 * j + 3] * s.s[3];
  return d;
}
static inline V to_float(D d) { V r; HR_EACH r.f[j] = (float)d.i[j]; return r; }
static inline void pin(U& u) { asm volatile("" : "+m"(u)); }
struct P { int16_t s[32]; };
static inline P load_pairs(const int16_t* p) { P r; std::memcpy(r.s, p, 64); return r; }
static inline P set_pair(const int16_t* p) { P r; HR_EACH std::memcpy(r.s + 2 * j, p, 4); return r; }
// Modulo 2^32: what an unused slot holds may be anything.
static inline I dot2(I sum, const P& a, const P& b) {
  HR_EACH sum.i[j] = (int32_t)((uint32_t)sum.i[j] + (uint32_t)(a.s[2 * j] * b.s[2 * j]) + (uint32_t)(a.s[2 * j + 1] * b.s[2 * j + 1]));
  return sum;
}
static inline I i_zero() { return {}; }
static inline I i_set1(int i) { I r; HR_EACH r.i[j] = i; return r; }
static inline U zeros() { return {}; }
static inline U set_quad(const char* p) { U r; HR_EACH std::memcpy(r.u + 4 * j, p, 4); return r; }
static inline U raised(U u) { for (auto& b : u.u) b ^= 0x80; return u; }
static inline I dot4(I sum, const U& a, const U& b) {
  for (int j = 0; j < 64; j++) sum.i[j / 4] += a.u[j] * (int8_t)b.u[j];
  return sum;
}
static inline void store_weights(uint8_t* p, I v) { HR_EACH p[j] = (uint8_t)(v.i[j] < 0 || v.i[j] > 255 ? 255 : v.i[j]); }
static inline void store_bytes_apart(int8_t* p, I v) { HR_EACH p[4 * j] = (int8_t)v.i[j]; }
static inline V spread_lanes(V v) {
  for (int apart = 1; apart < 16; apart *= 2) {
    V next;
    HR_EACH next.f[j] = j & apart ? v.f[j ^ apart] - v.f[j] : v.f[j] + v.f[j ^ apart];
    v = next;
  }
  return v;
}
static inline void store_shorts(int16_t* p, I v) {
  HR_EACH p[j] = (int16_t)(v.i[j] < -32768 ? -32768 : v.i[j] > 32767 ? 32767 : v.i[j]);
}
constexpr int COLUMNS = 1, CHAINS = 1, POWERS = 1;
constexpr bool WHOLE_BYTES = true;

#endif

#if !defined(HR_AVX512)
static inline void store_apart(int16_t* p, I v) {
  int16_t t[16];
  store_shorts(t, v);
  for (int j = 0; j < 16; j++) p[2 * j] = t[j];
}
static inline V load_n(const float* p, int n) {
  float t[16] = {};
  std::memcpy(t, p, (size_t)n * 4);
  return load(t);
}
static inline void store_n(float* p, V v, int n) {
  float t[16];
  store(t, v);
  std::memcpy(p, t, (size_t)n * 4);
}
#endif

// A line of memory on its way, to be read or written. As assembly, for GCC takes a function that only prefetches for one
// that does nothing, and calls it never.
#if defined(__x86_64__)
static inline void fetch(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*(const char*)p)); }
static inline void fetch_near(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*(const char*)p)); }
static inline void fetch_to_write(void* p) { asm volatile("prefetchw %0" : : "m"(*(char*)p)); }
#else
static inline void fetch(const void* p) { __builtin_prefetch(p); }
static inline void fetch_to_write(void* p) { __builtin_prefetch(p, 1); }
#endif

static inline V zero() { return set1(0.0f); }
static inline V neg(V a) { return sub(zero(), a); }

// Across lanes, always in the same order: halves, quarters, pairs.
#if defined(HR_AVX2)
static inline float sum(V v) {
  __m256 a = _mm256_add_ps(v.x, v.y);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float largest(V v) {
  __m256 a = _mm256_max_ps(v.x, v.y);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#elif defined(HR_AVX512)
static inline __m256 upper_half(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }
static inline float sum(V v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v.x), upper_half(v.x));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float largest(V v) {
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v.x), upper_half(v.x));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#else
static inline float sum(V v) {
  float t[16];
  store(t, v);
  for (int n = 8; n; n >>= 1)
    for (int j = 0; j < n; j++) t[j] += t[j + n];
  return t[0];
}
static inline float largest(V v) {
  float t[16];
  store(t, v);
  for (int n = 8; n; n >>= 1)
    for (int j = 0; j < n; j++) t[j] = t[j] > t[j + n] ? t[j] : t[j + n];
  return t[0];
}
#endif

// e to the power of x within 2 units in the last place; 0 from -87.3 down, NaN of NaN. After Cody and Waite's reduction, a polynomial of
// degree 6 with the Taylor coefficients: |r| <= ln(2)/2, where its error is 1.1e-7 of the value.
static inline V exp(V x) {
  V t = max(set1(-104.0f), min(set1(88.0f), x));  // In this order, for NaN is to stay: of two the second is taken then.
  V n = round(mul(t, set1(1.44269504088896341f)));
  V r = fma(n, set1(-0.693359375f), t);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return times_power(p, n, x, -87.3f);
}
// 2 to the power of each of N vectors that are not above 0, within 5e-7 of it; no less than 2^-100, and NaN of NaN. All take
// each step together, for a processor that waits for one has room for few others. The polynomial is 1 at 0 and has the least
// relative error over half a step to both sides, 1e-7.
template <int N>
HR_INLINE void powers_of_2(V* x) {
  V n[N], p[N];
#define HR_ALL _Pragma("GCC unroll 8") for (int i = 0; i < N; i++)
  HR_ALL x[i] = max(set1(-100.0f), x[i]);
  HR_ALL n[i] = round(x[i]);
  HR_ALL x[i] = sub(x[i], n[i]);
  HR_ALL p[i] = fma(set1(1.326472731307149e-3f), x[i], set1(9.671512991189957e-3f));
  HR_ALL p[i] = fma(p[i], x[i], set1(5.550733581185341e-2f));
  HR_ALL p[i] = fma(p[i], x[i], set1(0.24022242426872253f));
  HR_ALL p[i] = fma(p[i], x[i], set1(0.6931470036506653f));
  HR_ALL p[i] = fma(p[i], x[i], set1(1.0f));
  HR_ALL x[i] = times_power(p[i], n[i]);
#undef HR_ALL
}
// Each of N vectors times the logistic function of as many others, all steps together; within 2e-6 of it where that is over 1e-8.
template <int N>
HR_INLINE void times_sigmoid(V* x, const V* y) {
  V p[N];
#define HR_ALL _Pragma("GCC unroll 8") for (int i = 0; i < N; i++)
  HR_ALL p[i] = min(set1(100.0f), mul(y[i], set1(-1.44269504088896341f)));  // In this order, for NaN is to stay.
  powers_of_2<N>(p);
  HR_ALL x[i] = div(x[i], add(set1(1.0f), p[i]));
#undef HR_ALL
}
static inline V tanh(V x) { return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f)))); }

}  // namespace HR_ISA
