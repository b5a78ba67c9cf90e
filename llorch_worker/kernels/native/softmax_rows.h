// The online softmax of query rows: what it keeps of the keys so far, and how pieces of a context join.
#pragma once

#include "attention_tile.h"

// The online softmax of a tile of rows so far: unnormalised sums of values, the largest score (as a
// power of two) and the total weight.
struct rows {
    _Alignas(64) float sums[TILE_ROWS * MAX_HEAD_DIM];
    float largest[TILE_ROWS], total[TILE_ROWS];
};

static void forget(struct rows *rows, int64_t count, int64_t head_dim) {
    memset(rows->sums, 0, count * head_dim * sizeof(float));
    // Not -infinity: the difference to a piece without a visible key would be NaN.
    for (int64_t r = 0; r < count; r++) rows->largest[r] = -FLT_MAX, rows->total[r] = 0.0f;
}

// Adds a row of a piece to the same row of the pieces before it. Not inlined, so that decode and
// prefill round alike.
static __attribute__((noinline)) void join(float *sums, float *largest, float *total,
                                           const float *piece, float piece_largest,
                                           float piece_total, int64_t head_dim) {
    if (piece_total == 0.0f) return; // the row sees none of its keys
    const float highest = fmaxf(*largest, piece_largest);
    const float before = exp2f(*largest - highest), now = exp2f(piece_largest - highest);
    for (int64_t i = 0; i < head_dim; i++) sums[i] = before * sums[i] + now * piece[i];
    *total = before * *total + now * piece_total;
    *largest = highest;
}
