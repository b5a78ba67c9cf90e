// Shared by the linear kernels: tiles of 16 output rows, and how results are stored.
#pragma once

#include <string.h>

#include "bfloat16.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { TILE_ROWS = 16, CACHE_LINE = 64 };

// The output of one call: y[m * stride + column], bf16 or float32.
typedef struct {
    void *y;
    long stride;
    int wide;
} Output;

ALWAYS_INLINE void store_lanes(Output out, long m, long column, __m512 values, int lanes) {
    const __mmask16 mask = first_lanes(lanes);
    long at = m * out.stride + column;
    if (out.wide) {
        _mm512_mask_storeu_ps((float *)out.y + at, mask, values);
    } else {
        _mm256_mask_storeu_epi16((bf16 *)out.y + at, mask, narrowed(values));
    }
}

// Rows of activations per pass: even pieces of at most `most`, at least 1.
static inline long even_pieces(long rows, long most) {
    if (rows == 0) return 1;
    long pieces = (rows + most - 1) / most;
    return (rows + pieces - 1) / pieces;
}

// Tiles that a thread takes at once; few, so that a delayed thread does not hold up the others.
static inline long tiles_at_once(long tiles, int threads) {
    long share = tiles / (8 * threads);
    return share > 1 ? share : 1;
}
