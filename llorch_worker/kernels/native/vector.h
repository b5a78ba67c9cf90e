// Shared by all kernels: one register of floats or of 32-bit integers, LANES of each.
//
// The sources are compiled once a variant of the instruction set (variants.py), each time with that
// variant's flags and -DVARIANT=name; KERNEL prefixes the names of exported functions with it. Each
// of vector_avx512.h, vector_avx2.h and vector_neon.h defines the same types and functions. What has
// a `count` takes any number and works on the first `count` lanes.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#define JOINED_(variant, name) llorch_##variant##_##name
#define JOINED(variant, name) JOINED_(variant, name)
#define KERNEL(name) JOINED(VARIANT, name)

typedef uint16_t bf16;

// The same pointer, but the compiler does not know. It would keep what it has loaded on the stack.
ALWAYS_INLINE const void *loaded_again(const void *from) {
    __asm__("" : "+r"(from));
    return from;
}

#if defined(__aarch64__)
#include "vector_neon.h"
#elif defined(__AVX512F__)
#include "vector_avx512.h"
#else
#include "vector_avx2.h"
#endif

// Four bytes, in all lanes.
ALWAYS_INLINE ints splat_at(const void *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return splat_int(four);
}

ALWAYS_INLINE floats rounded(floats wide) { return widen(narrowed(wide)); }

// The largest magnitudes as the bits of floats: NaN is larger than all numbers, so it is not lost.
ALWAYS_INLINE ints larger_magnitude(ints so_far, floats values) {
    return larger_int(so_far, as_ints(magnitude(values)));
}

ALWAYS_INLINE float largest_magnitude_of(ints magnitudes) {
    const int32_t bits = largest_int_of(magnitudes);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    return largest;
}

// 2^x with a relative error below 3e-7; -inf gives 0 and NaN stays NaN.
// 2^x = 2^n 2^r with n = round(x): a Taylor polynomial for 2^r on [-1/2, 1/2].
ALWAYS_INLINE floats exp2_lanes(floats x) {
    // Below this the result is 0, denormals included; -inf - -inf in r would be NaN.
    x = larger(splat(-200.0f), x);
    const floats n = nearest(x), r = x - n;
    floats p = splat(1.540353039e-4f);
    p = multiply_add(p, r, splat(1.333355815e-3f));
    p = multiply_add(p, r, splat(9.618129108e-3f));
    p = multiply_add(p, r, splat(5.550410866e-2f));
    p = multiply_add(p, r, splat(2.402265070e-1f));
    p = multiply_add(p, r, splat(6.931471806e-1f));
    p = multiply_add(p, r, splat(1.0f));
    return scaled_by_power(p, n);
}

// --- Products of pairs of bfloat16: a sum of two products a lane.

#ifdef __AVX512BF16__
typedef __m512bh pairs;

ALWAYS_INLINE pairs pairs_of(ints both) { return (__m512bh)both; }

ALWAYS_INLINE floats add_products(floats sum, pairs a, pairs b) {
    return _mm512_dpbf16_ps(sum, a, b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
typedef bfloat16x8_t pairs;

ALWAYS_INLINE pairs pairs_of(ints both) { return vreinterpretq_bf16_s32(both); }

ALWAYS_INLINE floats add_products(floats sum, pairs a, pairs b) { return vbfdotq_f32(sum, a, b); }
#else
typedef struct {
    floats even, odd;
} pairs;

ALWAYS_INLINE pairs pairs_of(ints both) {
    const ints odd = bits_and(both, splat_int((int32_t)0xffff0000));
    return (pairs){as_floats(shifted_left(both, 16)), as_floats(odd)};
}

ALWAYS_INLINE floats add_products(floats sum, pairs a, pairs b) {
    return multiply_add(a.odd, b.odd, multiply_add(a.even, b.even, sum));
}
#endif

ALWAYS_INLINE pairs broadcast_pair(const bf16 *pair) { return pairs_of(splat_at(pair)); }

// --- Products of unsigned codes of 4 or 8 bits with rounded activations: four products a lane.
//
// All variants give the same integers, if the start of each sum makes up for what a variant takes
// from each code (CODE_BIAS). AVX without VNNI has sums of two products of bytes in 16 bits: enough
// for a group's codes of 4 bits, at most 8 * 2 * 15 * 127. Codes of 8 bits are widened first, and so
// are their activations: two bytes each, in the order 0, 2, 1, 3 of each four.

#ifndef CODE_BIAS
#define CODE_BIAS(bits) 0
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__aarch64__)
#define ACTIVATION_BYTES(bits) 1

ALWAYS_INLINE void store_activations(uint8_t *to, int bits, int vector, ints values) {
    store_bytes(to + vector * LANES, values);
}

ALWAYS_INLINE ints dots_from(int bits, int32_t start) { return splat_int(start); }

// What a vector of activations multiplies. Where activations have two bytes, part 0 holds the first and third of each
// four codes, and part 1 the others.
ALWAYS_INLINE ints part_of_codes(int bits, ints codes, int part) {
    return CODE_BIAS(bits) ? bits_xor(codes, splat_int((int32_t)0x80808080)) : codes;
}

// Adds the products of four activations.
ALWAYS_INLINE void add_dots(int bits, ints *dots, ints codes, const void *activations) {
    *dots = add_byte_products(*dots, codes, splat_at(activations));
}

ALWAYS_INLINE void add_two_dots(
    int bits, ints *first, ints first_codes, const void *first_activations,
    ints *second, ints second_codes, const void *second_activations
) {
    add_dots(bits, first, first_codes, first_activations);
    add_dots(bits, second, second_codes, second_activations);
}

ALWAYS_INLINE ints all_dots(int bits, ints dots, int32_t start) { return dots; }

// For a zero of 0: the products times a small number, byte `place` of each lane of `levels`, and times
// `scale`. All variants give the same floats, because only the last product is rounded.
ALWAYS_INLINE floats scaled_dots(int bits, ints dots, ints levels, int place, floats scale) {
    return floats_of(dots) * (floats_of(signed_bytes(levels, place)) * scale);
}
#else
#define ACTIVATION_BYTES(bits) ((bits) == 4 ? 1 : 2)

ALWAYS_INLINE void store_activations(uint8_t *to, int bits, int vector, ints values) {
    if (bits == 4) {
        store_bytes(to + vector * LANES, values);
    } else {
        store_crossed_16(to + 2 * vector * LANES, values);
    }
}

ALWAYS_INLINE ints dots_from(int bits, int32_t start) { return splat_int(bits == 4 ? 0 : start); }

ALWAYS_INLINE ints part_of_codes(int bits, ints codes, int part) {
    if (bits == 4) return codes;
    return part == 0 ? bits_and(codes, splat_int(0x00ff00ff)) : shifted_right_16(codes, 8);
}

ALWAYS_INLINE ints products_of(int bits, ints codes, const void *activations) {
    const ints by = splat_at(activations);
    return bits == 4 ? byte_products_16(codes, by) : products_16(codes, by);
}

ALWAYS_INLINE ints added_products(int bits, ints dots, ints products) {
    return bits == 4 ? added_16(dots, products) : added(dots, products);
}

ALWAYS_INLINE void add_dots(int bits, ints *dots, ints codes, const void *activations) {
    *dots = added_products(bits, *dots, products_of(bits, codes, activations));
}

// The compiler computes both before anything that needs one of them.
ALWAYS_INLINE void both_now(ints *a, ints *b) { __asm__("" : "+v"(*a), "+v"(*b)); }

// Zen 4 runs 512-bit products and additions faster when two products come before their additions. With AVX2 the order
// makes no difference.
ALWAYS_INLINE void add_two_dots(
    int bits, ints *first, ints first_codes, const void *first_activations,
    ints *second, ints second_codes, const void *second_activations
) {
    ints a = products_of(bits, first_codes, first_activations);
    ints b = products_of(bits, second_codes, second_activations);
    both_now(&a, &b);
    *first = added_products(bits, *first, a);
    *second = added_products(bits, *second, b);
}

ALWAYS_INLINE ints all_dots(int bits, ints dots, int32_t start) {
    if (bits != 4) return dots;
    return added(splat_int(start), products_16(dots, splat_int(0x00010001)));
}

// To multiply sums of 16 bits takes no longer than to add them up.
ALWAYS_INLINE floats scaled_dots(int bits, ints dots, ints levels, int place, floats scale) {
    if (bits == 4) return floats_of(products_16(dots, byte_pairs(levels, place))) * scale;
    return floats_of(dots) * (floats_of(signed_bytes(levels, place)) * scale);
}
#endif

// --- Products of signed codes of 8 bits with whole numbers of 16 bits: four products a lane.
//
// All variants give the same integers. A factor is at most LARGEST_FACTOR, so that with
// dot products of bytes it is two signed bytes. `coded` is what the products take: where one operand
// has to be unsigned, each code plus CODE_OFFSET; the sum then starts at -CODE_OFFSET times the sum
// of the factors.

#define LARGEST_FACTOR 32512 // 127 * 256
#define FACTOR_BYTES 2
#define CODE_OFFSET (128 - CODE_BIAS(8))

ALWAYS_INLINE ints coded(ints codes) {
    return CODE_OFFSET ? bits_xor(codes, splat_int((int32_t)0x80808080)) : codes;
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__aarch64__)
typedef struct {
    ints upper, lower; // of each factor's two bytes
} code_sums, factors;

// Stores a vector of `width` factors: all upper bytes, then all lower ones.
ALWAYS_INLINE void store_factors(uint8_t *to, int64_t width, int64_t first, ints values) {
    store_bytes(to + first, shifted_right(added(values, splat_int(128)), 8));
    store_bytes(to + width + first, shifted_right(shifted_left(values, 24), 24));
}

// Four of `width` factors, in all lanes.
ALWAYS_INLINE factors broadcast_factors(const uint8_t *from, int64_t width, int64_t first) {
    return (factors){splat_at(from + first), splat_at(from + width + first)};
}

ALWAYS_INLINE code_sums no_code_sums(void) { return (code_sums){splat_int(0), splat_int(0)}; }

ALWAYS_INLINE code_sums add_code_products(code_sums sums, ints codes, factors by) {
    sums.upper = add_byte_products(sums.upper, codes, by.upper);
    sums.lower = add_byte_products(sums.lower, codes, by.lower);
    return sums;
}

ALWAYS_INLINE ints whole_sums(code_sums sums, int32_t start) {
    return added(added(shifted_left(sums.upper, 8), sums.lower), splat_int(start));
}
#else
typedef ints code_sums;

typedef struct {
    ints even, odd; // pairs in 16 bits: of the first and third, of the second and fourth factor
} factors;

ALWAYS_INLINE void store_factors(uint8_t *to, int64_t width, int64_t first, ints values) {
    store_crossed_16(to + FACTOR_BYTES * first, values);
}

ALWAYS_INLINE factors broadcast_factors(const uint8_t *from, int64_t width, int64_t first) {
    from += FACTOR_BYTES * first;
    return (factors){splat_at(from), splat_at(from + 4)};
}

ALWAYS_INLINE code_sums no_code_sums(void) { return splat_int(0); }

ALWAYS_INLINE code_sums add_code_products(code_sums sums, ints codes, factors by) {
    sums = added(sums, products_16(bits_and(codes, splat_int(0x00ff00ff)), by.even));
    return added(sums, products_16(shifted_right_16(codes, 8), by.odd));
}

ALWAYS_INLINE ints whole_sums(code_sums sums, int32_t start) {
    return added(sums, splat_int(start));
}
#endif

// --- float8 e4m3, without infinities.

#define LARGEST_FP8 448.0f

// Two bytes of each lane's upper and lower 16 bits to the bfloat16 of the same value.
ALWAYS_INLINE ints bf16_of_fp8(ints bytes) {
    // The exponent's and fraction's bits are at the top of bfloat16's; only the bias differs.
    const ints sign = shifted_left(bits_and(bytes, splat_int(0x00800080)), 8);
    const ints rest = bits_and(bytes, splat_int(0x007f007f));
    const ints normal = added(shifted_left(rest, 4), splat_int(0x3c003c00));
    // Eighths of 2^-6. The table has the lower bytes of their bfloat16, then the upper ones.
    const ints fraction = bits_and(bytes, splat_int(0x00070007));
    const ints both = bits_or(fraction, shifted_left(fraction, 8));
    const uint8_t table[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60,
                               0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};
    const ints small = bytes_at(table, bits_or(both, splat_int(0x08000800)));
    const ints is_small = equal_16(bits_and(bytes, splat_int(0x00780078)), splat_int(0));
    const ints is_nan = equal_16(rest, splat_int(0x007f007f));
    const ints value = bits_xor(normal, bits_and(bits_xor(normal, small), is_small));
    return bits_or(bits_or(value, sign), bits_and(is_nan, splat_int(0x7fc07fc0)));
}

// As signed bytes. To the nearest, ties to even; what is too large becomes LARGEST_FP8, and NaN stays
// NaN.
ALWAYS_INLINE ints fp8_of(floats values) {
    const floats size = magnitude(values);
    const mask is_number = at_least(size, zeros());
    const floats in_range = chosen_or(at_least(size, splat(LARGEST_FP8)), splat(LARGEST_FP8), size);
    const ints bits = as_ints(in_range);
    const ints even = bits_and(shifted_right(bits, 20), splat_int(1));
    const ints up = shifted_right(added(bits, added(even, splat_int(0x7ffff))), 20);
    const ints normal = added(up, splat_int(-(120 << 3)));
    // Below 2^-6 steps are of 2^-9, as those of floats from 2^14 on.
    const ints steps = added(as_ints(in_range + splat(0x1p14f)), splat_int(-((127 + 14) << 23)));
    const mask is_normal = at_least(in_range, splat(0x1p-6f));
    const floats found = chosen_or(is_normal, as_floats(normal), as_floats(steps));
    const ints code = as_ints(chosen_or(is_number, found, as_floats(splat_int(0x7f))));
    return bits_or(code, shifted_left(shifted_right(as_ints(values), 31), 7));
}
