// Shared by all kernels: sixteen floats at a time, to and from bfloat16, and their exponential.
#pragma once

#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

#define LANES 16

// The first `count` lanes; at most all.
static inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

static inline __m512 widen(__m256i narrow) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

static inline __m256i narrowed(__m512 wide) { return (__m256i)_mm512_cvtneps_pbh(wide); }

static inline __m512 rounded(__m512 wide) { return widen(narrowed(wide)); }

static inline __m512 load(const bf16 *from) {
    return widen(_mm256_loadu_si256((const __m256i *)from));
}

static inline __m512 load_some(const bf16 *from, __mmask16 lanes) {
    return widen(_mm256_maskz_loadu_epi16(lanes, from));
}

static inline void store(bf16 *to, __m512 wide) {
    _mm256_storeu_si256((__m256i *)to, narrowed(wide));
}

static inline void store_some(bf16 *to, __m512 wide, __mmask16 lanes) {
    _mm256_mask_storeu_epi16(to, lanes, narrowed(wide));
}

// 2^x with a relative error below 3e-7; -inf gives 0 and NaN stays NaN.
// 2^x = 2^n 2^r with n = round(x): a Taylor polynomial for 2^r on [-1/2, 1/2].
static inline __m512 exp2_lanes(__m512 x) {
    // Below this the result is 0, denormals included; -inf - -inf in r would be NaN.
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.540353039e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.333355815e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618129108e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550410866e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402265070e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931471806e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}
