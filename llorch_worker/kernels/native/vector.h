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

ALWAYS_INLINE floats rounded(floats wide) { return widen(narrowed(wide)); }

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

ALWAYS_INLINE pairs broadcast_pair(const bf16 *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return pairs_of(splat_int(both));
}

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

ALWAYS_INLINE ints add_dots(int bits, ints dots, ints codes, const void *activations, int vector) {
    int32_t four;
    memcpy(&four, (const char *)activations + 4 * vector, sizeof four);
    if (CODE_BIAS(bits)) codes = bits_xor(codes, splat_int((int32_t)0x80808080));
    return add_byte_products(dots, codes, splat_int(four));
}

ALWAYS_INLINE ints all_dots(int bits, ints dots, int32_t start) { return dots; }
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

ALWAYS_INLINE ints add_dots(int bits, ints dots, ints codes, const void *activations, int vector) {
    int32_t first, second;
    const char *at = (const char *)activations + 4 * ACTIVATION_BYTES(bits) * vector;
    memcpy(&first, at, sizeof first);
    if (bits == 4) return added_16(dots, byte_products_16(codes, splat_int(first)));
    memcpy(&second, at + 4, sizeof second);
    const ints even = bits_and(codes, splat_int(0x00ff00ff)), odd = shifted_right_16(codes, 8);
    dots = added(dots, products_16(even, splat_int(first)));
    return added(dots, products_16(odd, splat_int(second)));
}

ALWAYS_INLINE ints all_dots(int bits, ints dots, int32_t start) {
    if (bits != 4) return dots;
    return added(splat_int(start), products_16(dots, splat_int(0x00010001)));
}
#endif
