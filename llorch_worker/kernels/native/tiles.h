// Shared by the linear kernels: tiles of 16 output rows, and how results are stored.
#pragma once

#include "vector.h"

enum { TILE_ROWS = 16, TILE_VECTORS = TILE_ROWS / LANES, CACHE_LINE = 64 };

// The output of one call: y[m * stride + column], bf16 or float32.
typedef struct {
    void *y;
    long stride;
    int wide;
} Output;

ALWAYS_INLINE void store_output(Output out, long m, long column, floats values, int count) {
    const long at = m * out.stride + column;
    if (out.wide) {
        store_some((float *)out.y + at, values, count);
    } else {
        store_some_bf16((bf16 *)out.y + at, values, count);
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
