// Products of bfloat16 activations with bfloat16 weights, on AVX-512 BF16.
//
// A tile holds 16 output rows as [columns / 2][16][2]: a vector is a pair of columns of each row. A
// pair of activations, broadcast, is multiplied by all 16 rows at once; each lane is one output.
#include "tiles.h"

enum { ROWS_AT_ONCE = 8 };  // times two tiles: 16 sums, to hide the latency of a product

// Weights to prefetch during a call: `stride` bytes for each pair of columns, or 0.
typedef struct {
    const char *from;
    long stride;
} Ahead;

ALWAYS_INLINE void multiply_tiles(
    int rows, int tiles, const bf16 *x, long columns, const bf16 *weights, Ahead ahead,
    Output out, long m, long column, int lanes
) {
    const long tile_size = columns * TILE_ROWS;
    __m512 sums[ROWS_AT_ONCE][2];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int t = 0; t < tiles; t++) sums[r][t] = _mm512_setzero_ps();
    }
    for (long pair = 0; pair < columns / 2; pair++) {
        __m512bh pairs[2];
        UNROLL for (int t = 0; t < tiles; t++) {
            const bf16 *at = weights + t * tile_size + pair * 2 * TILE_ROWS;
            pairs[t] = (__m512bh)_mm512_load_si512(at);
            _mm_prefetch((const char *)at + 4096, _MM_HINT_T0);
        }
        if (ahead.stride) _mm_prefetch(ahead.from + pair * ahead.stride, _MM_HINT_T1);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t two;
            memcpy(&two, x + (m + r) * columns + 2 * pair, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
            UNROLL for (int t = 0; t < tiles; t++) {
                sums[r][t] = _mm512_dpbf16_ps(sums[r][t], pairs[t], both);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int t = 0; t < tiles; t++) {
            const int last = t == tiles - 1;
            store_lanes(out, m + r, column + t * TILE_ROWS, sums[r][t], last ? lanes : TILE_ROWS);
        }
    }
}

#define ROWS(N, TILES) \
    case N: multiply_tiles(N, TILES, x, columns, weights, ahead, out, m, column, lanes); break;
#define TILES(NAME, COUNT) \
    static void NAME( \
        int rows, const bf16 *x, long columns, const bf16 *weights, Ahead ahead, \
        Output out, long m, long column, int lanes \
    ) { \
        switch (rows) { \
            ROWS(1, COUNT) ROWS(2, COUNT) ROWS(3, COUNT) ROWS(4, COUNT) \
            ROWS(5, COUNT) ROWS(6, COUNT) ROWS(7, COUNT) ROWS(8, COUNT) \
        } \
    }
TILES(multiply_one_tile, 1)
TILES(multiply_two_tiles, 2)

// y[:, :outputs] = x[rows][columns] times the transpose of weights packed by llorch_pack_bf16.
void llorch_bf16_linear(
    const bf16 *x, const bf16 *weights, void *y, long y_stride, int wide,
    long rows, long outputs, long columns, int threads
) {
    const long tiles = (outputs + TILE_ROWS - 1) / TILE_ROWS, twos = (tiles + 1) / 2;
    const Output out = {y, y_stride, wide};
    const long piece = even_pieces(rows, ROWS_AT_ONCE), share = tiles_at_once(twos, threads);
    const long pieces = (rows + piece - 1) / piece, pairs = columns / 2;
    const long pair_bytes = 2 * 2 * TILE_ROWS * (long)sizeof(bf16);  // of both tiles
#pragma omp parallel for num_threads(threads) schedule(dynamic, share)
    for (long two = 0; two < twos; two++) {
        const long first = 2 * two * TILE_ROWS, left = outputs - first;
        const bf16 *at = weights + first * columns;
        // Only the first piece waits for memory. If there are several, each prefetches a part of
        // the next tiles, unless another thread takes those.
        const int brings = pieces > 1 && (two + 1) % share && two + 1 < twos;
        Ahead ahead = {(const char *)at, 0};
        if (brings) ahead = (Ahead){(const char *)at + pairs * pair_bytes, pair_bytes / pieces};
        for (long m = 0; m < rows; m += piece) {
            const int count = (int)(rows - m < piece ? rows - m : piece);
            if (left > TILE_ROWS) {
                const int lanes = left < 2 * TILE_ROWS ? (int)(left - TILE_ROWS) : TILE_ROWS;
                multiply_two_tiles(count, x, columns, at, ahead, out, m, first, lanes);
            } else {
                multiply_one_tile(count, x, columns, at, ahead, out, m, first, (int)left);
            }
            ahead.from += pairs * ahead.stride;
        }
    }
}

// weights[tiles * 16][columns] to tiles, in place; work has 16 * columns elements per thread.
void llorch_pack_bf16(bf16 *weights, bf16 *work, long tiles, long columns, int threads) {
    const long tile_size = TILE_ROWS * columns;
#pragma omp parallel for num_threads(threads) schedule(static, (tiles + threads - 1) / threads)
    for (long t = 0; t < tiles; t++) {
        // Each thread has one run of tiles, whose number is also that of its part of `work`.
        bf16 *copy = work + t / ((tiles + threads - 1) / threads) * tile_size;
        uint32_t *out = (uint32_t *)(weights + t * tile_size);
        memcpy(copy, out, (size_t)tile_size * sizeof(bf16));
        for (long r = 0; r < TILE_ROWS; r++) {
            for (long pair = 0; pair < columns / 2; pair++) {
                memcpy(out + pair * TILE_ROWS + r, copy + r * columns + 2 * pair, 4);
            }
        }
    }
}
