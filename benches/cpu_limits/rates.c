// How fast a thread multiplies in registers and reads memory, with the kernels' own operations.
//
// Compiled once a variant, like the kernels, whose vector.h it includes (rates.py).
#include "vector.h"

// Enough to hide the latency of a product; AVX2 has 16 registers, and four hold the operands.
enum { SUMS = LANES == 8 ? 12 : 16 };

// Makes the compiler forget what it knows of a register. Otherwise it would compute a product once
// before the loop, or one sum for all.
#ifdef __aarch64__
#define UNKNOWN(vector) __asm__ volatile("" : "+w"(vector))
#else
#define UNKNOWN(vector) __asm__ volatile("" : "+v"(vector))
#endif

// Runs PRODUCT for each of SUMS vectors, `rounds` times. Returns the number of multiply-adds.
#define PRODUCTS(NAME, TYPE, IN_A_LANE, PRODUCT) \
    long KERNEL(NAME)(long rounds) { \
        ints a = splat_int(0x3f803f80), b = a; /* 1 as bfloat16, nearly 1 as float */ \
        TYPE sums[SUMS]; \
        UNKNOWN(a); \
        UNKNOWN(b); \
        UNROLL for (int i = 0; i < SUMS; i++) { \
            sums[i] = (TYPE)splat_int(0); \
            UNKNOWN(sums[i]); \
        } \
        for (long round = 0; round < rounds; round++) { \
            UNROLL for (int i = 0; i < SUMS; i++) { PRODUCT; } \
        } \
        UNROLL for (int i = 0; i < SUMS; i++) UNKNOWN(sums[i]); \
        return rounds * SUMS * LANES * (IN_A_LANE); \
    }

PRODUCTS(float32, floats, 1, sums[i] = multiply_add(as_floats(a), as_floats(b), sums[i]))
PRODUCTS(bf16, floats, 2, sums[i] = add_products(sums[i], pairs_of(a), pairs_of(b)))

// Products of bytes. Without VNNI codes of 8 bits are widened first, and the additions are missing: how many fit in
// between depends on their order.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__aarch64__)
enum { BYTES_IN_A_LANE = 4 };
#define ADD_NIBBLES(sum) sum = add_byte_products(sum, a, b)
#define ADD_BYTES(sum) ADD_NIBBLES(sum)
#else
enum { BYTES_IN_A_LANE = 2 };
#define ADD_NIBBLES(sum) UNKNOWN(a); sum = byte_products_16(a, b); UNKNOWN(sum)
#define ADD_BYTES(sum) UNKNOWN(a); sum = products_16(a, b); UNKNOWN(sum)
#endif
PRODUCTS(nibbles, ints, 4, ADD_NIBBLES(sums[i]))
PRODUCTS(bytes, ints, BYTES_IN_A_LANE, ADD_BYTES(sums[i]))

// The same for weights and activations that have a scale for each GROUP columns. After the products of a group, each
// sum becomes a float, is multiplied by both scales and added to a total.
enum { GROUP = 32, TOTALS = LANES == 8 ? 2 : 4 };
#define SCALED_PRODUCTS(NAME, IN_A_LANE, PRODUCT) \
    long KERNEL(NAME)(long rounds) { \
        ints a = splat_int(0x3f803f80), b = a; \
        ints sums[SUMS]; \
        floats totals[TOTALS]; \
        const long groups = rounds * (IN_A_LANE) / GROUP; \
        UNKNOWN(a); \
        UNKNOWN(b); \
        UNROLL for (int i = 0; i < TOTALS; i++) totals[i] = zeros(); \
        for (long group = 0; group < groups; group++) { \
            UNROLL for (int i = 0; i < SUMS; i++) { \
                sums[i] = a; \
                UNKNOWN(sums[i]); \
            } \
            UNROLL for (int column = 0; column < GROUP; column += IN_A_LANE) { \
                UNROLL for (int i = 0; i < SUMS; i++) { PRODUCT; } \
            } \
            UNROLL for (int i = 0; i < SUMS; i++) { \
                const floats scaled = floats_of(sums[i]) * as_floats(b); \
                totals[i % TOTALS] = multiply_add(scaled, as_floats(a), totals[i % TOTALS]); \
            } \
        } \
        UNROLL for (int i = 0; i < TOTALS; i++) UNKNOWN(totals[i]); \
        return groups * SUMS * LANES * GROUP; \
    }
SCALED_PRODUCTS(scaled_nibbles, 4, ADD_NIBBLES(sums[i]); UNKNOWN(sums[i]))
SCALED_PRODUCTS(scaled_bytes, BYTES_IN_A_LANE, ADD_BYTES(sums[i]); UNKNOWN(sums[i]))

// Reads `bytes` from `from` on, a multiple of 16 vectors, in order. Returns their number. Prefetching and
// several streams at once were slower.
long KERNEL(memory)(const char *from, long bytes) {
    enum { VECTORS = 16, STEP = VECTORS * sizeof(ints) };
    ints all = splat_int(0);
    for (const char *at = from; at < from + bytes; at += STEP) {
        UNROLL for (int i = 0; i < VECTORS; i++) all = bits_or(all, load_ints(at + i * sizeof(ints)));
    }
    UNKNOWN(all);
    return bytes;
}
