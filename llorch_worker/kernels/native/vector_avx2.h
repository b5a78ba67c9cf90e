// Eight lanes: AVX2, FMA and F16C; see vector.h. vector_avx512.h says what each function does.
#pragma once

#define LANES 8

typedef __m256 floats;
typedef __m256i ints;
typedef uint8_t mask;

ALWAYS_INLINE mask first_lanes(int64_t count) {
    return count >= LANES ? 0xff : count <= 0 ? 0 : (mask)((1u << count) - 1);
}

// A mask as AVX2 takes it: all bits of each chosen lane.
ALWAYS_INLINE __m256i first_lanes_wide(int64_t count) {
    const int32_t end = count >= LANES ? LANES : count <= 0 ? 0 : (int32_t)count;
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(end), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// --- Floats.

ALWAYS_INLINE floats splat(float value) { return _mm256_set1_ps(value); }
ALWAYS_INLINE floats zeros(void) { return _mm256_setzero_ps(); }
ALWAYS_INLINE floats load(const float *from) { return _mm256_loadu_ps(from); }
ALWAYS_INLINE void store(float *to, floats values) { _mm256_storeu_ps(to, values); }

ALWAYS_INLINE floats load_some(const float *from, int64_t count, floats otherwise) {
    const __m256i lanes = first_lanes_wide(count);
    return _mm256_blendv_ps(otherwise, _mm256_maskload_ps(from, lanes), _mm256_castsi256_ps(lanes));
}

ALWAYS_INLINE void store_some(float *to, floats values, int64_t count) {
    _mm256_maskstore_ps(to, first_lanes_wide(count), values);
}

ALWAYS_INLINE floats multiply_add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS_INLINE floats multiply_subtract(floats a, floats b, floats c) {
    return _mm256_fmsub_ps(a, b, c);
}

ALWAYS_INLINE floats larger(floats a, floats b) { return _mm256_max_ps(a, b); }
ALWAYS_INLINE floats magnitude(floats values) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values);
}

ALWAYS_INLINE floats nearest(floats values) {
    return _mm256_round_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ALWAYS_INLINE floats rounded_down(floats values) { return _mm256_floor_ps(values); }

ALWAYS_INLINE floats scaled_by_power(floats values, floats powers) {
    // In two factors, because one would not reach denormals, nor infinity. Only the second rounds.
    powers = _mm256_max_ps(_mm256_set1_ps(-252.0f), _mm256_min_ps(_mm256_set1_ps(254.0f), powers));
    const __m256i whole = _mm256_cvtps_epi32(powers), first = _mm256_srai_epi32(whole, 1);
    const __m256i second = _mm256_sub_epi32(whole, first), bias = _mm256_set1_epi32(127);
    values *= _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
    return values * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23));
}

ALWAYS_INLINE float sum_of(floats values) {
    __m128 four = _mm256_castps256_ps128(values) + _mm256_extractf128_ps(values, 1);
    four += _mm_movehl_ps(four, four);
    return four[0] + four[1];
}

ALWAYS_INLINE float largest_of(floats values) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return four[0] > four[1] ? four[0] : four[1];
}

// --- Sets of lanes.

ALWAYS_INLINE mask at_least(floats values, floats bound) {
    return (mask)_mm256_movemask_ps(_mm256_cmp_ps(values, bound, _CMP_GE_OQ));
}

ALWAYS_INLINE floats chosen_or(mask chosen, floats values, floats otherwise) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i both = _mm256_and_si256(_mm256_set1_epi32(chosen), bits);
    const __m256i lanes = _mm256_cmpeq_epi32(both, bits);
    return _mm256_blendv_ps(otherwise, values, _mm256_castsi256_ps(lanes));
}

ALWAYS_INLINE void store_chosen(void *to, mask chosen, floats values) {
    int32_t lanes[LANES], *out = to; // as integers, which copy the bits of any float
    _mm256_storeu_si256((__m256i *)lanes, _mm256_castps_si256(values));
    for (unsigned left = chosen; left; left &= left - 1) {
        memcpy(out++, &lanes[__builtin_ctz(left)], sizeof *lanes);
    }
}

// --- Integers.

ALWAYS_INLINE ints splat_int(int32_t value) { return _mm256_set1_epi32(value); }
ALWAYS_INLINE ints load_ints(const void *from) { return _mm256_loadu_si256(from); }
ALWAYS_INLINE floats as_floats(ints bits) { return _mm256_castsi256_ps(bits); }
ALWAYS_INLINE ints as_ints(floats values) { return _mm256_castps_si256(values); }
ALWAYS_INLINE floats floats_of(ints values) { return _mm256_cvtepi32_ps(values); }
ALWAYS_INLINE ints nearest_ints(floats values) { return _mm256_cvtps_epi32(values); }
ALWAYS_INLINE ints added(ints a, ints b) { return _mm256_add_epi32(a, b); }
ALWAYS_INLINE ints larger_int(ints a, ints b) { return _mm256_max_epi32(a, b); }
ALWAYS_INLINE ints bits_and(ints a, ints b) { return _mm256_and_si256(a, b); }
ALWAYS_INLINE ints bits_or(ints a, ints b) { return _mm256_or_si256(a, b); }
ALWAYS_INLINE ints bits_xor(ints a, ints b) { return _mm256_xor_si256(a, b); }
ALWAYS_INLINE ints shifted_left(ints values, int by) { return _mm256_slli_epi32(values, by); }
ALWAYS_INLINE ints shifted_right(ints values, int by) { return _mm256_srai_epi32(values, by); }
ALWAYS_INLINE ints shifted_right_16(ints values, int by) { return _mm256_srli_epi16(values, by); }

ALWAYS_INLINE int32_t sum_of_ints(ints values) {
    __m128i four = _mm256_extracti128_si256(values, 1);
    four = _mm_add_epi32(four, _mm256_castsi256_si128(values));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(four) + _mm_extract_epi32(four, 1);
}

ALWAYS_INLINE int32_t largest_int_of(ints values) {
    __m128i four = _mm256_extracti128_si256(values, 1);
    four = _mm_max_epi32(four, _mm256_castsi256_si128(values));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtsi128_si32(four);
}

#ifdef __AVXVNNI__
ALWAYS_INLINE ints add_byte_products(ints sums, ints codes, ints bytes) {
    return _mm256_dpbusd_avx_epi32(sums, codes, bytes);
}
#endif
ALWAYS_INLINE ints byte_products_16(ints codes, ints bytes) {
    return _mm256_maddubs_epi16(codes, bytes);
}
ALWAYS_INLINE ints products_16(ints a, ints b) { return _mm256_madd_epi16(a, b); }
ALWAYS_INLINE ints added_16(ints a, ints b) { return _mm256_add_epi16(a, b); }

// All of them: a multiple of 4 * LANES is asked for.
ALWAYS_INLINE ints load_some_bytes(const void *from, int64_t count) { return load_ints(from); }

ALWAYS_INLINE ints load_bytes_16(const void *from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
}

ALWAYS_INLINE ints bytes_at(const uint8_t table[16], ints indices) {
    const __m128i all = _mm_loadu_si128((const __m128i *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), indices);
}

ALWAYS_INLINE ints signed_bytes(ints bytes, int place) {
    const ints lanes = _mm256_setr_epi32(0x00808080, 0x04808080, 0x08808080, 0x0c808080,
                                         0x00808080, 0x04808080, 0x08808080, 0x0c808080);
    return shifted_right(_mm256_shuffle_epi8(bytes, added(lanes, splat_int(place << 24))), 24);
}

ALWAYS_INLINE ints byte_pairs(ints bytes, int place) {
    const ints lanes = _mm256_setr_epi32(0x80008000, 0x80048004, 0x80088008, 0x800c800c,
                                         0x80008000, 0x80048004, 0x80088008, 0x800c800c);
    return _mm256_shuffle_epi8(bytes, added(lanes, splat_int(place * 0x00010001)));
}

ALWAYS_INLINE ints equal_16(ints a, ints b) { return _mm256_cmpeq_epi16(a, b); }

// The low 16 bits of each lane, which hold all of its value.
ALWAYS_INLINE __m128i narrowed_ints(ints values) {
    return _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
}

ALWAYS_INLINE void store_bytes(void *to, ints values) {
    const __m128i narrow = narrowed_ints(values);
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(narrow, narrow));
}

ALWAYS_INLINE void store_crossed_16(void *to, ints values) {
    const __m128i narrow = narrowed_ints(values);
    const __m128i crossed = _mm_shufflehi_epi16(_mm_shufflelo_epi16(narrow, 0xd8), 0xd8);
    _mm_storeu_si128((__m128i *)to, crossed);
}

ALWAYS_INLINE void transpose(ints row[LANES]) {
    ints t[LANES];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        row[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        row[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        row[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        row[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(row[i], row[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(row[i], row[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) row[i] = t[i];
}

ALWAYS_INLINE void interleave(ints a, ints b, ints *to) {
    const ints low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    to[0] = _mm256_permute2x128_si256(low, high, 0x20);
    to[1] = _mm256_permute2x128_si256(low, high, 0x31);
}

ALWAYS_INLINE void interleave_bytes(ints a, ints b, ints c, ints d, ints to[4]) {
    const ints shares = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    a = _mm256_permutevar8x32_epi32(a, shares), b = _mm256_permutevar8x32_epi32(b, shares);
    c = _mm256_permutevar8x32_epi32(c, shares), d = _mm256_permutevar8x32_epi32(d, shares);
    const ints ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
    const ints cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
    to[0] = _mm256_unpacklo_epi16(ab_low, cd_low);
    to[1] = _mm256_unpackhi_epi16(ab_low, cd_low);
    to[2] = _mm256_unpacklo_epi16(ab_high, cd_high);
    to[3] = _mm256_unpackhi_epi16(ab_high, cd_high);
}

// --- bfloat16 and float16.

typedef __m128i halves;

ALWAYS_INLINE floats widen(halves narrow) {
    return as_floats(shifted_left(_mm256_cvtepu16_epi32(narrow), 16));
}

ALWAYS_INLINE halves narrowed(floats wide) {
    const ints bits = as_ints(wide), upper = _mm256_srli_epi32(bits, 16);
    const ints even = bits_and(upper, splat_int(1));
    const ints up = _mm256_srli_epi32(added(bits, added(even, splat_int(0x7fff))), 16);
    const ints nan = as_ints(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    const ints all = _mm256_blendv_epi8(up, bits_or(upper, splat_int(0x40)), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

ALWAYS_INLINE floats load_bf16(const bf16 *from) {
    return widen(_mm_loadu_si128((const __m128i *)from));
}

ALWAYS_INLINE floats load_some_bf16(const bf16 *from, int64_t count) {
    if (count >= LANES) return load_bf16(from);
    bf16 some[LANES] = {0};
    if (count > 0) memcpy(some, from, (size_t)count * sizeof(bf16));
    return load_bf16(some);
}

ALWAYS_INLINE void store_halves(bf16 *to, halves values) {
    _mm_storeu_si128((__m128i *)to, values);
}

ALWAYS_INLINE void store_some_bf16(bf16 *to, floats wide, int64_t count) {
    const halves values = narrowed(wide);
    if (count >= LANES) {
        store_halves(to, values);
    } else if (count > 0) {
        memcpy(to, &values, (size_t)count * sizeof(bf16));
    }
}

ALWAYS_INLINE floats load_f16(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

ALWAYS_INLINE uint16_t f16_of(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// --- Sums in float64.

typedef struct {
    __m256d low, high;
} doubles;

ALWAYS_INLINE doubles no_doubles(void) {
    return (doubles){_mm256_setzero_pd(), _mm256_setzero_pd()};
}

ALWAYS_INLINE doubles add_to_doubles(doubles sums, floats values) {
    sums.low += _mm256_cvtps_pd(_mm256_castps256_ps128(values));
    sums.high += _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
    return sums;
}

ALWAYS_INLINE double sum_of_doubles(doubles sums) {
    const __m256d four = sums.low + sums.high;
    return four[0] + four[2] + (four[1] + four[3]);
}
