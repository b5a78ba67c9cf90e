// Activations as a quantised product reads them: rounded to int8 with one scale for each row and group, as
// in llama.cpp. Products of bytes are the fastest on these processors, and sums are exact within a group.
#pragma once

#include "scales.h"

// Rounds one group of activations to int8, stored for codes of `bits` (see vector.h); returns its
// scale and the sum of the rounded values. Numbers of at most 2^-100 become 0.
ALWAYS_INLINE float quantise_group(const bf16 *x, uint8_t *codes, int32_t *sum, int bits, int group) {
    floats values[TILE_ROWS * 2 / LANES];
    const int vectors = group / LANES;
    ints top = splat_int(0);
    UNROLL for (int v = 0; v < vectors; v++) {
        values[v] = load_bf16(x + v * LANES);
        // As an integer, a NaN is larger than all numbers, so the scale and every output become NaN
        // too. A maximum of floats would lose it.
        top = larger_int(top, as_ints(magnitude(values[v])));
    }
    const int32_t largest_bits = largest_int_of(top);
    float largest;
    memcpy(&largest, &largest_bits, 4);
    // The quotient of a smaller one could overflow.
    const floats to_codes = splat(largest > 0x1p-100f ? 127.0f / largest : 0.0f);
    ints total = splat_int(0);
    UNROLL for (int v = 0; v < vectors; v++) {
        // A NaN may have become the smallest integer, which would overflow the sum.
        const ints whole = larger_int(nearest_ints(values[v] * to_codes), splat_int(-127));
        store_activations(codes, bits, v, whole);
        total = added(total, whole);
    }
    *sum = sum_of_ints(total);
    return (largest + (largest - largest)) / 127.0f;  // NaN for infinity, which has no code
}

// The sums of a block's groups, rounded to 16 bits with one scale: what the offsets of a type with levels
// are multiplied by. So the small numbers of all groups are multiplied as integers, like codes.
typedef struct {
    float scale;
    uint8_t factors[FACTOR_BYTES * MOST_GROUPS];
} BlockSums;

// Of MOST_GROUPS sums; those beyond the block's groups are 0.
static BlockSums block_sums_of(const float *sums) {
    BlockSums to;
    ints top = splat_int(0);
    UNROLL for (int i = 0; i < MOST_GROUPS; i += LANES) top = larger_magnitude(top, load(sums + i));
    const float largest = largest_magnitude_of(top);
    const floats to_factors = splat(largest > 0 ? LARGEST_FACTOR / largest : 0.0f);
    UNROLL for (int i = 0; i < MOST_GROUPS; i += LANES) {
        store_factors(to.factors, MOST_GROUPS, i, nearest_ints(load(sums + i) * to_factors));
    }
    to.scale = largest / LARGEST_FACTOR;
    return to;
}

// The rows that a pass multiplies at once, together, so that one pointer reaches all of them.
typedef struct {
    const uint8_t *codes;    // [groups][rows][group], each of ACTIVATION_BYTES
    const float *scales;     // [groups][rows]
    const int32_t *zeros;    // [groups][rows], (bias - zero) * (sum of codes): where the products start
    const float *sums;       // [groups][rows], scale * (sum of codes): the factor of an offset
    const BlockSums *block_sums;  // [blocks][rows], instead of sums for types with levels
    long groups;
} Activations;
