// Products of bfloat16 activations with bfloat16 weights.
//
// A tile holds 16 output rows as [columns / 2][16][2]: a vector is a pair of columns of each row. A
// pair of activations, broadcast, is multiplied by all 16 rows at once; each lane is one output.
#include "shares.h"
#include "tiles.h"

// As many sums as hide the latency of a product and fit the registers of most variants.
enum { ROWS_AT_ONCE = LANES == 16 ? 8 : 4, TILES_AT_ONCE = LANES == 16 ? 2 : 1 };

// With few rows a thread waits for memory. Then more tiles at once are faster, each a stream for the
// hardware's prefetcher, and the software's would only disturb it.
enum { FEW_ROWS = LANES == 16 ? 4 : 1, TILES_OF_FEW_ROWS = 2 * TILES_AT_ONCE };

// Weights to prefetch during a call: `stride` bytes for each pair of columns, or 0.
typedef struct {
    const char *from;
    long stride;
} Ahead;

ALWAYS_INLINE void multiply_tiles(
    int rows, int tiles, const bf16 *x, long columns, const bf16 *weights, Ahead ahead,
    Output out, long m, long column, int lanes
) {
    const int vectors = tiles * TILE_VECTORS;
    floats sums[ROWS_AT_ONCE * TILES_AT_ONCE * TILE_VECTORS];  // [rows][vectors]
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < vectors; v++) sums[r * vectors + v] = zeros();
    }
    for (long pair = 0; pair < columns / 2; pair++) {
        pairs rows_of[TILES_OF_FEW_ROWS * TILE_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) {
            const long tile = v / TILE_VECTORS, first = v % TILE_VECTORS * LANES;
            const bf16 *at = weights + (tile * columns + 2 * pair) * TILE_ROWS + 2 * first;
            rows_of[v] = pairs_of(load_ints(at));
            if (rows > FEW_ROWS && first == 0) __builtin_prefetch((const char *)at + 4096);
        }
        if (ahead.stride) {
            const char *at = ahead.from + pair * ahead.stride;
            __builtin_prefetch(at, 0, 2);
            if (ahead.stride > CACHE_LINE) __builtin_prefetch(at + CACHE_LINE, 0, 2);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const pairs both = broadcast_pair(x + (m + r) * columns + 2 * pair);
            UNROLL for (int v = 0; v < vectors; v++) {
                sums[r * vectors + v] = add_products(sums[r * vectors + v], rows_of[v], both);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            store_output(out, m + r, column + v * LANES, sums[r * vectors + v], lanes - v * LANES);
        }
    }
}

#define ROWS(N, TILES) \
    case N: \
        if (N * TILES <= ROWS_AT_ONCE * TILES_AT_ONCE) { \
            multiply_tiles(N, TILES, x, columns, weights, ahead, out, m, column, lanes); \
        } \
        break;
#define MULTIPLY(NAME, TILES) \
    static void NAME( \
        int rows, const bf16 *x, long columns, const bf16 *weights, Ahead ahead, \
        Output out, long m, long column, int lanes \
    ) { \
        switch (rows) { \
            ROWS(1, TILES) ROWS(2, TILES) ROWS(3, TILES) ROWS(4, TILES) \
            ROWS(5, TILES) ROWS(6, TILES) ROWS(7, TILES) ROWS(8, TILES) \
        } \
    }
MULTIPLY(multiply_one_tile, 1)
MULTIPLY(multiply_few_rows, TILES_OF_FEW_ROWS)
MULTIPLY(multiply_more_rows, TILES_AT_ONCE)

#ifdef __AMX_BF16__
#include "amx_bf16.h"
#endif

void KERNEL(multiply_bf16)(
    const Matrix *matrix, const bf16 *x, void *y, long y_stride, int wide, long rows, int threads
) {
    const bf16 *weights = matrix->codes;
    const long outputs = matrix->outputs, columns = matrix->columns;
    const Output out = {y, y_stride, wide};
#ifdef __AMX_BF16__
    if (columns % AMX_COLUMNS == 0) {
        multiply_with_amx(x, weights, out, rows, outputs, columns);
        return;
    }
#endif
    // Many threads share the tiles more evenly if each takes fewer at once.
    const long most_threads = outputs / (2 * TILES_OF_FEW_ROWS * TILE_ROWS);
    const int has_few_rows = rows <= FEW_ROWS && threads <= most_threads;
    const long step = (has_few_rows ? TILES_OF_FEW_ROWS : TILES_AT_ONCE) * TILE_ROWS;
    const long steps = (outputs + step - 1) / step;
    const long piece = even_pieces(rows, ROWS_AT_ONCE);
    const long pieces = (rows + piece - 1) / piece, pairs_a_row = columns / 2;
    const long pair_bytes = 2 * step * (long)sizeof(bf16);  // of all tiles of a step
    // With a guided schedule all threads end together, and seldom move to a place whose weights were not prefetched.
#pragma omp for schedule(guided) nowait
    for (long s = 0; s < steps; s++) {
        const long first = s * step, left = outputs - first;
        const bf16 *at = weights + first * columns;
        // With enough rows to hide it, all pieces together prefetch the next tiles.
        const int brings = rows > FEW_ROWS && s + 1 < steps;
        Ahead ahead = {(const char *)(at + step * columns), 0};
        if (brings) ahead.stride = pair_bytes / pieces;
        for (long m = 0; m < rows; m += piece) {
            const int count = (int)(rows - m < piece ? rows - m : piece);
            if (left < step) {
                for (long done = 0; done < left; done += TILE_ROWS) {
                    const int lanes = (int)(left - done < TILE_ROWS ? left - done : TILE_ROWS);
                    const bf16 *tile = at + done * columns;
                    multiply_one_tile(count, x, columns, tile, ahead, out, m, first + done, lanes);
                }
            } else if (has_few_rows) {
                multiply_few_rows(count, x, columns, at, ahead, out, m, first, (int)step);
            } else {
                multiply_more_rows(count, x, columns, at, ahead, out, m, first, (int)step);
            }
            ahead.from += pairs_a_row * ahead.stride;
        }
    }
}

// y[:, :outputs] = x[rows][columns] times the transpose of weights packed by pack_bf16.
void KERNEL(bf16_linear)(
    const Matrix *matrix, const bf16 *x, void *y, long y_stride, int wide, long rows, int threads
) {
#pragma omp parallel num_threads(threads)
    KERNEL(multiply_bf16)(matrix, x, y, y_stride, wide, rows, threads);
}

// weights[tiles * 16][columns] to tiles, in place; work has 16 * columns elements per thread.
void KERNEL(pack_bf16)(bf16 *weights, bf16 *work, long tiles, long columns, int threads) {
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
