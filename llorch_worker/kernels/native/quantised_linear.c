// Products of bfloat16 activations with quantised weights.
//
//     weight = scale * (code - zero) + offset
//
// with a scale, and in some types an offset, for each output row and each group of G input columns.
// A tile holds 16 output rows. For one group it has G / 4 vectors of 64 bytes: lane r of vector s
// holds row r's columns 4 s .. 4 s + 3, one byte each. With codes of 4 bits, vectors s and s + G / 8
// share 64 bytes, the first in the low halves. scales.h says how scales and offsets are stored.
#include "activations.h"
#include "shares.h"

#include <omp.h>

// The fastest numbers of rows, and of vectors of a tile, to multiply at once. With two vectors, a broadcast of
// activations serves both. Their products fit the registers, but for codes of 8 bits with AVX2 (fewer rows were slower
// all the same). AVX-VNNI has been measured with one vector only.
#if LANES == 16
enum { ROWS_AT_ONCE = 16, VECTORS_AT_ONCE = 1 };
#elif defined(__AVXVNNI__)
enum { ROWS_AT_ONCE = 6, VECTORS_AT_ONCE = 1 };
#elif LANES == 8
enum { ROWS_AT_ONCE = 6, VECTORS_AT_ONCE = 2 };
#else
enum { ROWS_AT_ONCE = 8, VECTORS_AT_ONCE = 1 };
#endif

typedef struct {
    const uint8_t *codes;
    Scales scales;
} Tile;

typedef struct {
    Tile first;
    long outputs, columns;
    int bits, group, zero, levels;
} Weights;

ALWAYS_INLINE long tile_count(const Weights *weights) {
    return (weights->outputs + TILE_ROWS - 1) / TILE_ROWS;
}

ALWAYS_INLINE Tile tile_at(const Weights *weights, long t) {
    const long before = t * TILE_ROWS * weights->columns;
    const Tile first = weights->first;
    return (Tile){
        first.codes + before * weights->bits / 8,
        scales_after(first.scales, weights->levels, before, weights->group),
    };
}

// The outputs of tile t.
ALWAYS_INLINE int lanes_of(const Weights *weights, long t) {
    const long left = weights->outputs - t * TILE_ROWS;
    return left < TILE_ROWS ? (int)left : TILE_ROWS;
}

// Those of the pieces from row m on.
ALWAYS_INLINE Activations activations_from(const Activations *x, long m, const Weights *weights) {
    const long at = m * x->groups, code_bytes = ACTIVATION_BYTES(weights->bits);
    const BlockSums *block_sums = x->block_sums + m * (weights->columns / BLOCK_COLUMNS);
    return (Activations){
        x->codes + at * weights->group * code_bytes,
        x->scales + at, x->zeros + at, x->sums + at, block_sums, x->groups,
    };
}

// Vector `v` of a group's codes, of the lanes from `first` on.
ALWAYS_INLINE ints codes_at(
    const uint8_t *group_codes, int rows, int bits, int vectors, int v, int first
) {
    const int line = bits == 4 ? v % (vectors / 2) : v;
    const uint8_t *at = group_codes + line * CACHE_LINE + 4 * first;
    // Prefetch the next lines in time. With so few rows that a thread waits for memory in any case, this
    // only disturbs the hardware's prefetcher. AVX2 computes too slowly for that.
    const int few_rows = LANES < 16 ? 0 : bits == 4 ? 1 : 4;
    if (rows > few_rows && first == 0 && v == line) __builtin_prefetch(at + (bits == 4 ? 2048 : 4096));
    const ints codes = load_ints(at);
    if (bits == 8) return codes;
    return bits_and(v == line ? codes : shifted_right_16(codes, 4), splat_int(0x0f0f0f0f));
}

// Adds a block's offsets to the sums of `rows` rows.
ALWAYS_INLINE void add_offsets(
    int rows, int levels, const BlockSums *x, const Block *block, floats *sums
) {
    if (!level_offsets(levels)) return;
    UNROLL for (int r = 0; r < rows; r++) {
        code_sums whole = no_code_sums();
        UNROLL for (int i = 0; i < (levels == SIX_BIT_LEVELS ? 8 : MOST_GROUPS); i += 4) {
            const factors by = broadcast_factors(x[r].factors, MOST_GROUPS, i);
            whole = add_code_products(whole, block->offsets[i / 4], by);
        }
        const floats scaled = floats_of(whole_sums(whole, 0)) * block->offset;
        sums[r] = multiply_add(scaled, splat(x[r].scale), sums[r]);
    }
}

// Multiplies vector `v` of the activations of `rows` rows with the codes of VECTORS_AT_ONCE vectors, and
// adds the products to dots[rows][VECTORS_AT_ONCE].
ALWAYS_INLINE void multiply_codes(
    int rows, int bits, const ints *codes, const uint8_t *x_codes, int row_bytes, int v, ints *dots
) {
    const int count = rows * VECTORS_AT_ONCE;
    // Unpack all parts first, so that a single row, which waits for memory, asks for the next codes earlier.
    ints parts[2][VECTORS_AT_ONCE];
    UNROLL for (int part = 0; part < ACTIVATION_BYTES(bits); part++) {
        UNROLL for (int u = 0; u < VECTORS_AT_ONCE; u++) {
            parts[part][u] = part_of_codes(bits, codes[u], part);
        }
    }
    UNROLL for (int part = 0; part < ACTIVATION_BYTES(bits); part++) {
        const uint8_t *at = x_codes + 4 * (ACTIVATION_BYTES(bits) * v + part);
        UNROLL for (int i = 0; i < count; i += 2) {
            const int j = i + 1;
            const ints with_i = parts[part][i % VECTORS_AT_ONCE];
            const uint8_t *row_i = at + i / VECTORS_AT_ONCE * row_bytes;
            if (j == count) {
                add_dots(bits, &dots[i], with_i, row_i);
            } else {
                const ints with_j = parts[part][j % VECTORS_AT_ONCE];
                const uint8_t *row_j = at + j / VECTORS_AT_ONCE * row_bytes;
                add_two_dots(bits, &dots[i], with_i, row_i, &dots[j], with_j, row_j);
            }
        }
    }
}

// `rows` activations from row m on times one tile; rows, bits, group and levels are constants.
ALWAYS_INLINE void multiply_tile(
    int rows, int bits, int group, int levels,
    const Activations *x, long m, Tile tile, Output out, long column, int lanes
) {
    floats sums[TILE_VECTORS][ROWS_AT_ONCE];
    const int vectors = group / 4, row_bytes = group * ACTIVATION_BYTES(bits);
    UNROLL for (int t = 0; t < TILE_VECTORS; t++) {
        UNROLL for (int r = 0; r < rows; r++) sums[t][r] = zeros();
    }
    Block blocks[TILE_VECTORS];
    const int block_groups = BLOCK_COLUMNS / group;
    for (long g = 0; g < x->groups; g++) {
        const uint8_t *group_codes = tile.codes + g * group * TILE_ROWS * bits / 8;
        const int within = (int)((unsigned long)g % block_groups);
        if (levels && within == 0) {
            const long b = (unsigned long)g / block_groups;
            UNROLL for (int t = 0; t < TILE_VECTORS; t++) {
                unpack_block(levels, tile.scales, b, t * LANES, &blocks[t]);
                add_offsets(rows, levels, x->block_sums + b * rows, &blocks[t], sums[t]);
            }
        }
        const long at = g * rows;
        UNROLL for (int first = 0; first < TILE_VECTORS; first += VECTORS_AT_ONCE) {
            const uint8_t *x_codes = loaded_again(x->codes + g * rows * row_bytes);
            ints dots[ROWS_AT_ONCE * VECTORS_AT_ONCE];
            UNROLL for (int i = 0; i < rows * VECTORS_AT_ONCE; i++) {
                dots[i] = dots_from(bits, x->zeros[at + i / VECTORS_AT_ONCE]);
            }
            UNROLL for (int v = 0; v < vectors; v++) {
                ints codes[VECTORS_AT_ONCE];
                UNROLL for (int u = 0; u < VECTORS_AT_ONCE; u++) {
                    codes[u] = codes_at(group_codes, rows, bits, vectors, v, (first + u) * LANES);
                }
                multiply_codes(rows, bits, codes, x_codes, row_bytes, v, dots);
            }
            UNROLL for (int u = 0; u < VECTORS_AT_ONCE; u++) {
                const int t = first + u;
                const Block *block = &blocks[t];
                const floats scale = levels ? scale_of_levels(block, within)
                                            : load_f16(tile.scales.scales + scales_of(tile.scales, g) + t * LANES);
                // The sums follow in a loop of their own: GCC then keeps fewer vectors on the stack.
                floats scaled[ROWS_AT_ONCE];
                UNROLL for (int r = 0; r < rows; r++) {
                    const ints products = dots[r * VECTORS_AT_ONCE + u];
                    if (level_offsets(levels)) {  // whose zero is 0
                        const ints scale_levels = block->scales[within / 4];
                        scaled[r] = scaled_dots(bits, products, scale_levels, within % 4, block->scale);
                    } else {
                        scaled[r] = floats_of(all_dots(bits, products, x->zeros[at + r])) * scale;
                    }
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    sums[t][r] = multiply_add(scaled[r], splat(x->scales[at + r]), sums[t][r]);
                }
                if (levels || tile.scales.offsets == 0) continue;
                const floats offset = load_f16(tile.scales.offsets + scales_of(tile.scales, g) + t * LANES);
                UNROLL for (int r = 0; r < rows; r++) {
                    sums[t][r] = multiply_add(offset, splat(x->sums[at + r]), sums[t][r]);
                }
            }
        }
    }
    UNROLL for (int t = 0; t < TILE_VECTORS; t++) {
        UNROLL for (int r = 0; r < rows; r++) {
            store_output(out, m + r, column + t * LANES, sums[t][r], lanes - t * LANES);
        }
    }
}

// A function for each form, with all loops over rows and vectors unrolled.
#define ROWS(N, ...) \
    case N: \
        if (N <= ROWS_AT_ONCE) multiply_tile(N, __VA_ARGS__, x, m, tile, out, column, lanes); \
        break;
#define FORM(NAME, ...) \
    static void NAME( \
        int rows, const Activations *x, long m, Tile tile, Output out, long column, int lanes \
    ) { \
        switch (rows) { \
            ROWS(1, __VA_ARGS__) ROWS(2, __VA_ARGS__) ROWS(3, __VA_ARGS__) ROWS(4, __VA_ARGS__) \
            ROWS(5, __VA_ARGS__) ROWS(6, __VA_ARGS__) ROWS(7, __VA_ARGS__) ROWS(8, __VA_ARGS__) \
            ROWS(9, __VA_ARGS__) ROWS(10, __VA_ARGS__) ROWS(11, __VA_ARGS__) ROWS(12, __VA_ARGS__) \
            ROWS(13, __VA_ARGS__) ROWS(14, __VA_ARGS__) ROWS(15, __VA_ARGS__) ROWS(16, __VA_ARGS__) \
        } \
    }
FORM(nibbles, 4, 32, NO_LEVELS)
FORM(bytes, 8, 32, NO_LEVELS)
FORM(q2_k, 4, 16, NIBBLE_LEVELS)
FORM(q3_k, 4, 16, BYTE_LEVELS)
FORM(q4_k, 4, 32, SIX_BIT_LEVELS)
FORM(q5_k, 8, 32, SIX_BIT_LEVELS)
FORM(q6_k, 8, 16, BYTE_LEVELS)

typedef void (*Form)(int, const Activations *, long, Tile, Output, long, int);

static Form form_of(int bits, int levels) {
    switch (levels) {
        case NIBBLE_LEVELS: return q2_k;
        case BYTE_LEVELS: return bits == 4 ? q3_k : q6_k;
        case SIX_BIT_LEVELS: return bits == 4 ? q4_k : q5_k;
        default: return bits == 4 ? nibbles : bytes;
    }
}

#ifdef __AMX_INT8__
#include "amx_quantised.h"
#else
enum { UNPACKED_TILES = 0, FEWEST_AMX_ROWS = 0 };
#endif

ALWAYS_INLINE long whole_lines(long bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

// Bytes for each group of activations beside its codes: a scale, a zero, and its sum or share of block_sums.
enum { WORK_NUMBERS = 4 + 4 + 8 };

// Of a thread's codes that AMX multiplies.
ALWAYS_INLINE long unpacked_bytes(long rows, long columns) {
    return rows < FEWEST_AMX_ROWS ? 0 : UNPACKED_TILES * TILE_ROWS * columns;
}

// The size of `work` for one call.
long KERNEL(quantised_work_bytes)(long rows, long columns, int bits, long group, int threads) {
    const long codes = rows * columns * ACTIVATION_BYTES(bits);
    const long numbers = WORK_NUMBERS * rows * (columns / group);
    return whole_lines(codes) + whole_lines(numbers) + threads * unpacked_bytes(rows, columns);
}

static Weights weights_of(const Matrix *matrix) {
    const Scales scales = {matrix->scales, matrix->offsets, matrix->scale_levels, (int)matrix->shared};
    const Tile first = {matrix->codes, scales};
    const int bits = (int)matrix->bits, group = (int)matrix->group;
    return (Weights){
        first, matrix->outputs, matrix->columns, bits, group, (int)matrix->zero, (int)matrix->levels,
    };
}

// The places of a product's activations in `work`.
static Activations activations_in(const uint8_t *work, long rows, const Weights *weights) {
    const long groups = weights->columns / weights->group;
    const long bytes = whole_lines(rows * weights->columns * ACTIVATION_BYTES(weights->bits));
    const float *scales = (const float *)(work + bytes);
    const int32_t *zeros = (const int32_t *)(scales + rows * groups);
    const float *sums = (const float *)(zeros + rows * groups);
    // Types with levels have these instead of sums.
    return (Activations){work, scales, zeros, sums, (const BlockSums *)sums, groups};
}

// All rows of a span lie side by side. One thread writes them, so that no cache line moves between cores.
void KERNEL(round_activations)(
    const Matrix *matrix, const bf16 *x, uint8_t *work, long rows, int share, int shares
) {
    const Weights weights = weights_of(matrix);
    const Activations all = activations_in(work, rows, &weights);
    float *x_scales = (float *)all.scales, *x_sums = (float *)all.sums;
    int32_t *x_zeros = (int32_t *)all.zeros;
    BlockSums *block_sums = (BlockSums *)all.block_sums;
    const int bits = weights.bits, group = weights.group, levels = weights.levels;
    const int span_groups = levels ? BLOCK_COLUMNS / group : 1;
    const long groups = all.groups, spans = groups / span_groups;
    const long piece = even_pieces(rows, ROWS_AT_ONCE), pieces = (rows + piece - 1) / piece;
    for (long i = pieces * spans * share / shares; i < pieces * spans * (share + 1) / shares; i++) {
        const long m = i / spans * piece, span = i % spans, count = rows - m < piece ? rows - m : piece;
        for (long r = 0; r < count; r++) {
            float sums[MOST_GROUPS] = {0};
            for (int j = 0; j < span_groups; j++) {
                const long g = span * span_groups + j, at = m * groups + g * count + r;
                const bf16 *from = x + (m + r) * weights.columns + g * group;
                uint8_t *to = work + at * group * ACTIVATION_BYTES(bits);
                int32_t sum;
                const float scale = group == 32 ? quantise_group(from, to, &sum, bits, 32)
                                                : quantise_group(from, to, &sum, bits, 16);
                x_scales[at] = scale;
                x_zeros[at] = (CODE_BIAS(bits) - weights.zero) * sum;
                sums[j] = scale * (float)sum;
                if (!levels) x_sums[at] = sums[j];
            }
            if (levels) block_sums[m * spans + span * count + r] = block_sums_of(sums);
        }
    }
}

void KERNEL(multiply_rounded)(
    const Matrix *matrix, uint8_t *work, void *y, long y_stride, int wide, long rows, int threads
) {
    const Weights weights = weights_of(matrix);
    const Activations all = activations_in(work, rows, &weights);
    const Output out = {y, y_stride, wide};
    const Form form = form_of(weights.bits, weights.levels);
    const long piece = even_pieces(rows, ROWS_AT_ONCE);
    const long tiles = tile_count(&weights), share = tiles_at_once(tiles, threads);
#ifdef __AMX_INT8__
    if (rows >= FEWEST_AMX_ROWS && weights.group == AMX_GROUP) {
        uint8_t *unpacked = (uint8_t *)all.scales + whole_lines(WORK_NUMBERS * rows * all.groups);
        unpacked += omp_get_thread_num() * unpacked_bytes(rows, weights.columns);
        multiply_many_rows(&all, &weights, out, rows, piece, (int8_t *)unpacked);
        return;
    }
#endif
#pragma omp for schedule(dynamic, share) nowait
    for (long t = 0; t < tiles; t++) {
        const Tile tile = tile_at(&weights, t);
        const int lanes = lanes_of(&weights, t);
        for (long m = 0; m < rows; m += piece) {
            const int count = (int)(rows - m < piece ? rows - m : piece);
            const Activations some = activations_from(&all, m, &weights);
            form(count, &some, m, tile, out, t * TILE_ROWS, lanes);
        }
    }
}

// y[:, :outputs] = x[rows][columns] times the transpose of the weights; work has
// quantised_work_bytes bytes.
void KERNEL(quantised_linear)(
    const Matrix *matrix, const bf16 *x, void *y, long y_stride, int wide, uint8_t *work, long rows,
    int threads
) {
#pragma omp parallel num_threads(threads)
    {
        const int share = omp_get_thread_num(), shares = omp_get_num_threads();
        KERNEL(round_activations)(matrix, x, work, rows, share, shares);
#pragma omp barrier
        KERNEL(multiply_rounded)(matrix, work, y, y_stride, wide, rows, threads);
    }
}
