// Many rows times quantised weights with AMX; part of quantised_linear.c.
//
// The codes of a few tiles are unpacked to signed bytes, minus their zero, once for all rows. One product of
// tile registers gives the exact sums of a group for 16 outputs and a piece of rows. What follows is done in
// the order of multiply_tile, so the results have the same bits.
#pragma once

#include "amx.h"

// Fewer rows take longer with AMX, because codes are unpacked first. So do groups of 16.
enum { FEWEST_AMX_ROWS = 128, AMX_GROUP = 32, UNPACKED_TILES = 4 };

static void unpack_codes(const uint8_t *codes, int bits, long groups, int zero, int8_t *to) {
    const long lines = AMX_GROUP * bits / 32;  // of a group
    const ints zero_bytes = _mm512_set1_epi8((char)zero), low = splat_int(0x0f0f0f0f);
    for (long i = 0; i < groups * lines; i++, codes += CACHE_LINE, to += CACHE_LINE) {
        const ints line = load_ints(codes);
        __builtin_prefetch(codes + 4096);
        if (bits == 8) {
            _mm512_store_si512(to, _mm512_sub_epi8(line, zero_bytes));
            continue;
        }
        const ints high = bits_and(shifted_right_16(line, 4), low);
        _mm512_store_si512(to, _mm512_sub_epi8(bits_and(line, low), zero_bytes));
        _mm512_store_si512(to + CACHE_LINE * lines, _mm512_sub_epi8(high, zero_bytes));
        if (i % lines == lines - 1) to += CACHE_LINE * lines;
    }
}

// Products of groups that are on their way at once, and their results in memory.
enum { IN_FLIGHT = 4 };

ALWAYS_INLINE void add_scaled(
    int rows, int levels, const Activations *x, Tile tile, long g, const int32_t *dots, Block *block,
    floats sums[AMX_ROWS]
) {
    const int within = g % (BLOCK_COLUMNS / AMX_GROUP);
    if (levels && within == 0) {
        const long b = g / (BLOCK_COLUMNS / AMX_GROUP);
        unpack_block(levels, tile.scales, b, 0, block);
        add_offsets(rows, levels, x->block_sums + b * rows, block, sums);
    }
    const floats scale = levels ? scale_of_levels(block, within)
                                : load_f16(tile.scales.scales + scales_of(tile.scales, g));
    const float *x_scales = x->scales + g * rows;
    UNROLL for (int r = 0; r < rows; r++) {
        const floats scaled = floats_of(load_ints(dots + r * TILE_ROWS)) * scale;
        sums[r] = multiply_add(scaled, splat(x_scales[r]), sums[r]);
    }
    if (levels || tile.scales.offsets == 0) return;
    const floats offset = load_f16(tile.scales.offsets + scales_of(tile.scales, g));
    const float *x_sums = x->sums + g * rows;
    UNROLL for (int r = 0; r < rows; r++) {
        sums[r] = multiply_add(offset, splat(x_sums[r]), sums[r]);
    }
}

// Like multiply_tile, with unpacked codes. Beside the product of group g, that of g - 2 is stored and that of g - 4
// is scaled. A product that is stored at once holds up the next one.
ALWAYS_INLINE void multiply_unpacked(
    int rows, const Activations *x, long m, const int8_t *codes, Tile tile,
    Output out, long column, int lanes
) {
    floats sums[AMX_ROWS];
    int32_t dots[IN_FLIGHT][AMX_ROWS][TILE_ROWS] __attribute__((aligned(CACHE_LINE)));
    UNROLL for (int r = 0; r < rows; r++) sums[r] = zeros();
    const long groups = x->groups;
    const int levels = tile.scales.levels ? SIX_BIT_LEVELS : NO_LEVELS;  // those of groups of 32
    Block block;
// The numbers of tile registers must be literals: of this product, the stored one, activations and weights.
#define STEP(NOW, BEFORE, X, W) { \
        const long g = from + NOW; \
        if (g < groups) { \
            _tile_zero(NOW); \
            _tile_loadd(X, x->codes + g * rows * AMX_GROUP, AMX_GROUP); \
            _tile_loadd(W, codes + g * TILE_ROWS * AMX_GROUP, CACHE_LINE); \
            _tile_dpbssd(NOW, X, W); \
        } \
        if (g >= 2 && g < groups + 2) _tile_stored(BEFORE, dots[BEFORE], CACHE_LINE); \
        if (g >= IN_FLIGHT && g < groups + IN_FLIGHT) { \
            add_scaled(rows, levels, x, tile, g - IN_FLIGHT, dots[NOW][0], &block, sums); \
        } \
    }
    for (long from = 0; from < groups + IN_FLIGHT; from += IN_FLIGHT) {
        STEP(0, 2, 4, 6) STEP(1, 3, 5, 7) STEP(2, 0, 4, 6) STEP(3, 1, 5, 7)
    }
#undef STEP
    UNROLL for (int r = 0; r < rows; r++) store_output(out, m + r, column, sums[r], lanes);
}

static void multiply_piece(
    int rows, const Activations *x, long m, const int8_t *codes, Tile tile,
    Output out, long column, int lanes
) {
#define PIECE(N) case N: multiply_unpacked(N, x, m, codes, tile, out, column, lanes); break;
    switch (rows) {
        PIECE(1) PIECE(2) PIECE(3) PIECE(4) PIECE(5) PIECE(6) PIECE(7) PIECE(8)
        PIECE(9) PIECE(10) PIECE(11) PIECE(12) PIECE(13) PIECE(14) PIECE(15) PIECE(16)
    }
#undef PIECE
}

// The share of one thread in a product, called by all; `unpacked` is its own.
static void multiply_many_rows(
    const Activations *x, const Weights *weights, Output out, long rows, long piece, int8_t *unpacked
) {
    const long tile_bytes = TILE_ROWS * weights->columns, tiles = tile_count(weights);
    int shaped = 0;
#pragma omp for schedule(dynamic) nowait
    for (long first = 0; first < tiles; first += UNPACKED_TILES) {
        const long end = first + UNPACKED_TILES < tiles ? first + UNPACKED_TILES : tiles;
        for (long t = first; t < end; t++) {
            const uint8_t *codes = tile_at(weights, t).codes;
            unpack_codes(codes, weights->bits, x->groups, weights->zero, unpacked + (t - first) * tile_bytes);
        }
        stored_for_tiles();
        for (long m = 0; m < rows; m += piece) {
            const int count = (int)(rows - m < piece ? rows - m : piece);
            const Activations some = activations_from(x, m, weights);
            if (count != shaped) shape_tiles(count, count, AMX_GROUP);
            shaped = count;
            for (long t = first; t < end; t++) {
                const int8_t *codes = unpacked + (t - first) * tile_bytes;
                const int lanes = lanes_of(weights, t);
                multiply_piece(count, &some, m, codes, tile_at(weights, t), out, t * TILE_ROWS, lanes);
            }
        }
    }
    _tile_release();
}
