// A tile of keys and values of one KV head, and the query rows that attend to it.
#pragma once

#include "vector.h"

#include <float.h>
#include <math.h>

#define TILE_KEYS 64
#define TILE_ROWS 64
#define MAX_HEAD_DIM 256
#define ROWS 4
#define VECTORS (TILE_KEYS / LANES)

// Converted once for all rows. What is in a dword depends on the cache's form: attend_pairs.h,
// attend_codes.h.
struct tile {
    _Alignas(64) ints keys[MAX_HEAD_DIM / 2 * VECTORS];
    _Alignas(64) ints values[TILE_KEYS / 2 * MAX_HEAD_DIM / LANES];
    _Alignas(64) float key_scales[TILE_KEYS], value_scales[TILE_KEYS]; // of int8
};

// Query rows of 16 bits a number, [row][head_dim]: bfloat16, or factors of products with codes.
struct queries {
    _Alignas(64) uint8_t numbers[TILE_ROWS * MAX_HEAD_DIM * 2];
    // Of factors: what one of them is worth in a score, and what their sums of products start at.
    float steps[TILE_ROWS];
    int32_t starts[TILE_ROWS];
};

// The online softmax of some rows so far: unnormalised sums of values, the largest score (as a power
// of two) and the total weight.
struct progress {
    float *sums, *largest, *total;
};

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
