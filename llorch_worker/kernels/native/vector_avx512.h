// Sixteen lanes: AVX-512 F, BW, VL and DQ; see vector.h.
#pragma once

#define LANES 16

typedef __m512 floats;
typedef __m512i ints;
typedef __mmask16 mask;

ALWAYS_INLINE mask first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (mask)((1u << count) - 1);
}

// --- Floats. The compiler knows +, -, * and /.

ALWAYS_INLINE floats splat(float value) { return _mm512_set1_ps(value); }
ALWAYS_INLINE floats zeros(void) { return _mm512_setzero_ps(); }
ALWAYS_INLINE floats load(const float *from) { return _mm512_loadu_ps(from); }
ALWAYS_INLINE void store(float *to, floats values) { _mm512_storeu_ps(to, values); }

// The lanes from `count` on are `otherwise`, and no memory is read for them.
ALWAYS_INLINE floats load_some(const float *from, int64_t count, floats otherwise) {
    return _mm512_mask_loadu_ps(otherwise, first_lanes(count), from);
}

ALWAYS_INLINE void store_some(float *to, floats values, int64_t count) {
    _mm512_mask_storeu_ps(to, first_lanes(count), values);
}

// a * b + c and a * b - c, rounded once.
ALWAYS_INLINE floats multiply_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS_INLINE floats multiply_subtract(floats a, floats b, floats c) {
    return _mm512_fmsub_ps(a, b, c);
}

// If one of them is NaN, b.
ALWAYS_INLINE floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }
ALWAYS_INLINE floats magnitude(floats values) { return _mm512_abs_ps(values); }

ALWAYS_INLINE floats nearest(floats values) {
    return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ALWAYS_INLINE floats rounded_down(floats values) {
    return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

// values * 2^powers for whole powers; denormals and infinity as if computed exactly.
ALWAYS_INLINE floats scaled_by_power(floats values, floats powers) {
    return _mm512_scalef_ps(values, powers);
}

ALWAYS_INLINE float sum_of(floats values) { return _mm512_reduce_add_ps(values); }
ALWAYS_INLINE float largest_of(floats values) { return _mm512_reduce_max_ps(values); }

// --- Sets of lanes.

ALWAYS_INLINE mask at_least(floats values, floats bound) {
    return _mm512_cmp_ps_mask(values, bound, _CMP_GE_OQ);
}

ALWAYS_INLINE floats chosen_or(mask chosen, floats values, floats otherwise) {
    return _mm512_mask_mov_ps(otherwise, chosen, values);
}

// Stores the chosen lanes side by side; what lies behind them, up to LANES, may be overwritten.
ALWAYS_INLINE void store_chosen(void *to, mask chosen, floats values) {
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(chosen, values));
}

// --- Integers of 32 bits, and of 16 where the name says so.

ALWAYS_INLINE ints splat_int(int32_t value) { return _mm512_set1_epi32(value); }
ALWAYS_INLINE ints load_ints(const void *from) { return _mm512_loadu_si512(from); }
ALWAYS_INLINE floats as_floats(ints bits) { return _mm512_castsi512_ps(bits); }
ALWAYS_INLINE ints as_ints(floats values) { return _mm512_castps_si512(values); }
ALWAYS_INLINE floats floats_of(ints values) { return _mm512_cvtepi32_ps(values); }
ALWAYS_INLINE ints nearest_ints(floats values) { return _mm512_cvtps_epi32(values); }
ALWAYS_INLINE ints added(ints a, ints b) { return _mm512_add_epi32(a, b); }
ALWAYS_INLINE ints larger_int(ints a, ints b) { return _mm512_max_epi32(a, b); }
ALWAYS_INLINE ints bits_and(ints a, ints b) { return _mm512_and_si512(a, b); }
ALWAYS_INLINE ints bits_or(ints a, ints b) { return _mm512_or_si512(a, b); }
ALWAYS_INLINE ints bits_xor(ints a, ints b) { return _mm512_xor_si512(a, b); }
ALWAYS_INLINE ints shifted_left(ints values, int by) { return _mm512_slli_epi32(values, by); }
ALWAYS_INLINE ints shifted_right(ints values, int by) { return _mm512_srai_epi32(values, by); }
ALWAYS_INLINE ints shifted_right_16(ints values, int by) { return _mm512_srli_epi16(values, by); }
ALWAYS_INLINE int32_t sum_of_ints(ints values) { return _mm512_reduce_add_epi32(values); }
ALWAYS_INLINE int32_t largest_int_of(ints values) { return _mm512_reduce_max_epi32(values); }

// Products of unsigned with signed bytes: four added to each lane, or sums of two in 16 bits.
#ifdef __AVX512VNNI__
ALWAYS_INLINE ints add_byte_products(ints sums, ints codes, ints bytes) {
    return _mm512_dpbusd_epi32(sums, codes, bytes);
}
#endif
ALWAYS_INLINE ints byte_products_16(ints codes, ints bytes) {
    return _mm512_maddubs_epi16(codes, bytes);
}

// Sums of two products of 16 bits.
ALWAYS_INLINE ints products_16(ints a, ints b) { return _mm512_madd_epi16(a, b); }
ALWAYS_INLINE ints added_16(ints a, ints b) { return _mm512_add_epi16(a, b); }

// 4 * LANES bytes, or the first `count`: a multiple of 16.
ALWAYS_INLINE ints load_some_bytes(const void *from, int64_t count) {
    return _mm512_maskz_loadu_epi8(count >= 64 ? ~0ull : (1ull << count) - 1, from);
}

// 2 * LANES bytes, in 16 bits each.
ALWAYS_INLINE ints load_bytes_16(const void *from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
}

// The bytes of the table at indices of 0 to 15.
ALWAYS_INLINE ints bytes_at(const uint8_t table[16], ints indices) {
    const __m128i all = _mm_loadu_si128((const __m128i *)table);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), indices);
}

// Byte `place` of each lane: as a signed number, or unsigned in both its halves.
ALWAYS_INLINE ints signed_bytes(ints bytes, int place) {
    const __m512i lanes = _mm512_set4_epi32(0x0c808080, 0x08808080, 0x04808080, 0x00808080);
    return shifted_right(_mm512_shuffle_epi8(bytes, added(lanes, splat_int(place << 24))), 24);
}

ALWAYS_INLINE ints byte_pairs(ints bytes, int place) {
    const __m512i lanes = _mm512_set4_epi32(0x800c800c, 0x80088008, 0x80048004, 0x80008000);
    return _mm512_shuffle_epi8(bytes, added(lanes, splat_int(place * 0x00010001)));
}

// All bits of each 16 that are equal.
ALWAYS_INLINE ints equal_16(ints a, ints b) {
    return _mm512_movm_epi16(_mm512_cmpeq_epi16_mask(a, b));
}

// Values of -128 to 127, as bytes.
ALWAYS_INLINE void store_bytes(void *to, ints values) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(values));
}

// Values of 16 bits, in the order 0, 2, 1, 3 of each four.
ALWAYS_INLINE void store_crossed_16(void *to, ints values) {
    const __m256i narrow = _mm512_cvtepi32_epi16(values);
    const __m256i crossed = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(narrow, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)to, crossed);
}

// LANES rows of LANES dwords, transposed in registers.
ALWAYS_INLINE void transpose(ints row[LANES]) {
    ints t[LANES];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        row[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        row[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Two vectors of 2 * LANES bfloat16 to pairs (a[i], b[i]), in order.
ALWAYS_INLINE void interleave(ints a, ints b, ints *to) {
    const ints low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                      39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    to[0] = _mm512_permutex2var_epi16(a, low, b);
    to[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
}

// Four vectors of bytes to groups (a[i], b[i], c[i], d[i]), in order.
ALWAYS_INLINE void interleave_bytes(ints a, ints b, ints c, ints d, ints to[4]) {
    // Unpacking works within each quarter, so each gets its own share of all four results.
    const ints shares = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    a = _mm512_permutexvar_epi32(shares, a), b = _mm512_permutexvar_epi32(shares, b);
    c = _mm512_permutexvar_epi32(shares, c), d = _mm512_permutexvar_epi32(shares, d);
    const ints ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
    const ints cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
    to[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
    to[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
    to[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
    to[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

// --- bfloat16 and float16.

typedef __m256i halves; // LANES of 16 bits

ALWAYS_INLINE floats widen(halves narrow) {
    return as_floats(shifted_left(_mm512_cvtepu16_epi32(narrow), 16));
}

// To the nearest, ties to even; NaN stays NaN.
ALWAYS_INLINE halves narrowed(floats wide) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(wide);
#else
    const ints bits = as_ints(wide), upper = _mm512_srli_epi32(bits, 16);
    const ints even = bits_and(upper, splat_int(1));
    const ints up = _mm512_srli_epi32(added(bits, added(even, splat_int(0x7fff))), 16);
    const mask nan = _mm512_cmp_ps_mask(wide, wide, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(up, nan, upper, splat_int(0x40)));
#endif
}

ALWAYS_INLINE floats load_bf16(const bf16 *from) {
    return widen(_mm256_loadu_si256((const __m256i *)from));
}

// The other lanes are 0.
ALWAYS_INLINE floats load_some_bf16(const bf16 *from, int64_t count) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}

ALWAYS_INLINE void store_halves(bf16 *to, halves values) {
    _mm256_storeu_si256((__m256i *)to, values);
}

ALWAYS_INLINE void store_some_bf16(bf16 *to, floats wide, int64_t count) {
    _mm256_mask_storeu_epi16(to, first_lanes(count), narrowed(wide));
}

ALWAYS_INLINE floats load_f16(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

// To the nearest, ties to even.
ALWAYS_INLINE uint16_t f16_of(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// --- Sums in float64.

typedef struct {
    __m512d low, high;
} doubles;

ALWAYS_INLINE doubles no_doubles(void) {
    return (doubles){_mm512_setzero_pd(), _mm512_setzero_pd()};
}

ALWAYS_INLINE doubles add_to_doubles(doubles sums, floats values) {
    const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(values), 1);
    sums.low += _mm512_cvtps_pd(_mm512_castps512_ps256(values));
    sums.high += _mm512_cvtps_pd(_mm256_castpd_ps(upper));
    return sums;
}

ALWAYS_INLINE double sum_of_doubles(doubles sums) {
    return _mm512_reduce_add_pd(sums.low + sums.high);
}
