// Products of bfloat16 with AMX; part of bf16_linear.c.
//
// A tile register holds 32 columns of 16 rows or of 16 outputs. For each output the instruction sums products
// of even and of odd columns, adds both sums and then adds them to the output. That is another order than
// multiply_tiles', so a matrix is multiplied in one of the two ways for every number of rows.
#pragma once

#include "amx.h"

enum { AMX_COLUMNS = 32, STEP_OUTPUTS = 2 * TILE_ROWS, STEPS_AT_ONCE = 4 };

ALWAYS_INLINE void store_sums(
    const float sums[AMX_ROWS][TILE_ROWS], int rows, Output out, long m, long column, long lanes
) {
    for (int r = 0; r < rows; r++) store_output(out, m + r, column, load(sums[r]), (int)lanes);
}

// first + second rows of x from row m on, times the outputs of one or two tiles.
static void multiply_step(
    int first, int second, const bf16 *x, long columns, const bf16 *weights,
    Output out, long m, long column, long lanes
) {
    const int both = lanes > TILE_ROWS;
    const bf16 *others = both ? weights + columns * TILE_ROWS : weights;
    const bf16 *upper = x + m * columns, *lower = upper + first * columns;
    const long x_stride = columns * (long)sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long c = 0; c < columns; c += AMX_COLUMNS) {
        _tile_loadd(4, upper + c, x_stride);
        _tile_loadd(6, weights + c * TILE_ROWS, CACHE_LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, others + c * TILE_ROWS, CACHE_LINE);
        _tile_dpbf16ps(1, 4, 7);
        if (second == 0) continue;
        _tile_loadd(5, lower + c, x_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[4][AMX_ROWS][TILE_ROWS] __attribute__((aligned(CACHE_LINE)));
    _tile_stored(0, sums[0], CACHE_LINE);
    _tile_stored(1, sums[1], CACHE_LINE);
    _tile_stored(2, sums[2], CACHE_LINE);
    _tile_stored(3, sums[3], CACHE_LINE);
    for (int i = 0; i < (both ? 2 : 1); i++) {
        const long from = column + i * TILE_ROWS, left = lanes - i * TILE_ROWS;
        store_sums(sums[i], first, out, m, from, left);
        store_sums(sums[2 + i], second, out, m + first, from, left);
    }
}

// See multiply_bf16; columns are a multiple of AMX_COLUMNS.
static void multiply_with_amx(
    const bf16 *x, const bf16 *weights, Output out, long rows, long outputs, long columns
) {
    const long piece = even_pieces(rows, 2 * AMX_ROWS), block = STEPS_AT_ONCE * STEP_OUTPUTS;
    int shaped = 0;
#pragma omp for schedule(dynamic) nowait
    for (long from = 0; from < outputs; from += block) {
        const long end = from + block < outputs ? from + block : outputs;
        // A piece of rows stays in the cache for all steps.
        for (long m = 0; m < rows; m += piece) {
            const int count = (int)(rows - m < piece ? rows - m : piece);
            const int first = count > AMX_ROWS ? (count + 1) / 2 : count, second = count - first;
            if (count != shaped) shape_tiles(first, second ? second : 1, CACHE_LINE);
            shaped = count;
            for (long column = from; column < end; column += STEP_OUTPUTS) {
                const bf16 *at = weights + column * columns;
                multiply_step(first, second, x, columns, at, out, m, column, outputs - column);
            }
        }
    }
    _tile_release();
}
