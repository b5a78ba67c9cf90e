// Products of bfloat16 activations with quantised weights.
//
//     weight = scale * (code - zero) + offset
//
// with a float16 scale, and in some types a float16 offset, for each output row and each group of G
// input columns. A tile holds 16 output rows. For one group it has G / 4 vectors of 64 bytes: lane
// r of vector s holds row r's columns 4 s .. 4 s + 3, one byte each. With codes of 4 bits, vectors
// s and s + G / 8 share 64 bytes, the first in the low halves. Scales, offsets: [tiles][groups][16].
//
// Activations are rounded to int8 with one scale for each row and group, as in llama.cpp: products
// of bytes are the fastest on these processors, and the sums are exact within a group.
#include "tiles.h"

// Rows whose products fit the registers beside a vector of codes and what unpacks it. Of AVX2's 16
// registers, eight rows leave too few where one instruction multiplies four codes.
#ifdef __AVXVNNI__
enum { ROWS_AT_ONCE = 6 };
#else
enum { ROWS_AT_ONCE = LANES == 16 ? 16 : 8 };
#endif

// Rounds one group of activations to int8, stored for codes of `bits` (see vector.h); returns its
// scale and the sum of the rounded values.
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
    const floats to_codes = splat(largest > 0 ? 127.0f / largest : 0.0f);
    ints total = splat_int(0);
    UNROLL for (int v = 0; v < vectors; v++) {
        // A NaN may have become the smallest integer, which would overflow the sum.
        const ints whole = larger_int(nearest_ints(values[v] * to_codes), splat_int(-127));
        store_activations(codes, bits, v, whole);
        total = added(total, whole);
    }
    *sum = sum_of_ints(total);
    return largest / 127.0f;
}

// The rows that a pass multiplies at once, together, so that one pointer reaches all of them.
typedef struct {
    const uint8_t *codes;    // [groups][rows][group], each of ACTIVATION_BYTES
    const float *scales;     // [groups][rows]
    const int32_t *zeros;    // [groups][rows], (bias - zero) * (sum of codes): where the products start
    const float *sums;       // [groups][rows], scale * (sum of codes): the factor of an offset
    long groups;
} Activations;

typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *offsets;
} Tile;

typedef struct {
    Tile first;
    long outputs, columns;
    int bits, group, zero;
} Weights;

ALWAYS_INLINE long tile_count(const Weights *weights) {
    return (weights->outputs + TILE_ROWS - 1) / TILE_ROWS;
}

ALWAYS_INLINE Tile tile_at(const Weights *weights, long t) {
    const long codes = t * TILE_ROWS * weights->columns, scales = codes / weights->group;
    const Tile first = weights->first;
    return (Tile){
        first.codes + codes * weights->bits / 8,
        first.scales + scales,
        first.offsets ? first.offsets + scales : 0,
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
    return (Activations){
        x->codes + at * weights->group * code_bytes, x->scales + at, x->zeros + at, x->sums + at, x->groups,
    };
}

// Vector `v` of a group's codes, of the lanes from `first` on.
ALWAYS_INLINE ints codes_at(const uint8_t *group_codes, int bits, int vectors, int v, int first) {
    const int line = bits == 4 ? v % (vectors / 2) : v;
    const uint8_t *at = group_codes + line * CACHE_LINE + 4 * first;
    // Unpacking is faster than memory: prefetch the next lines in time.
    if (first == 0 && v == line) __builtin_prefetch(at + (bits == 4 ? 2048 : 4096));
    const ints codes = load_ints(at);
    if (bits == 8) return codes;
    return bits_and(v == line ? codes : shifted_right_16(codes, 4), splat_int(0x0f0f0f0f));
}

// `rows` activations from row m on times one tile; rows, bits and group are constants.
ALWAYS_INLINE void multiply_tile(
    int rows, int bits, int group,
    const Activations *x, long m, Tile tile, Output out, long column, int lanes
) {
    floats sums[TILE_VECTORS][ROWS_AT_ONCE];
    const int vectors = group / 4, row_bytes = group * ACTIVATION_BYTES(bits);
    UNROLL for (int t = 0; t < TILE_VECTORS; t++) {
        UNROLL for (int r = 0; r < rows; r++) sums[t][r] = zeros();
    }
    for (long g = 0; g < x->groups; g++) {
        const uint8_t *group_codes = tile.codes + g * group * TILE_ROWS * bits / 8;
        UNROLL for (int t = 0; t < TILE_VECTORS; t++) {
            const int first = t * LANES;
            const floats scale = load_f16(tile.scales + g * TILE_ROWS + first);
            const uint8_t *x_codes = loaded_again(x->codes + g * rows * row_bytes);
            const long at = g * rows;
            ints dots[ROWS_AT_ONCE];
            UNROLL for (int r = 0; r < rows; r++) {
                dots[r] = dots_from(bits, x->zeros[at + r]);
            }
            UNROLL for (int v = 0; v < vectors; v++) {
                const ints codes = codes_at(group_codes, bits, vectors, v, first);
                UNROLL for (int r = 0; r < rows; r++) {
                    dots[r] = add_dots(bits, dots[r], codes, x_codes + r * row_bytes, v);
                }
            }
            UNROLL for (int r = 0; r < rows; r++) {
                const floats scaled = floats_of(all_dots(bits, dots[r], x->zeros[at + r])) * scale;
                sums[t][r] = multiply_add(scaled, splat(x->scales[at + r]), sums[t][r]);
            }
            if (tile.offsets == 0) continue;
            const floats offset = load_f16(tile.offsets + g * TILE_ROWS + first);
            UNROLL for (int r = 0; r < rows; r++) {
                sums[t][r] = multiply_add(offset, splat(x->sums[at + r]), sums[t][r]);
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
#define ROWS(N, BITS, GROUP) \
    case N: multiply_tile(N, BITS, GROUP, x, m, tile, out, column, lanes); break;
#if LANES == 16
#define MORE_ROWS(BITS, GROUP) \
    ROWS(9, BITS, GROUP) ROWS(10, BITS, GROUP) ROWS(11, BITS, GROUP) ROWS(12, BITS, GROUP) \
    ROWS(13, BITS, GROUP) ROWS(14, BITS, GROUP) ROWS(15, BITS, GROUP) ROWS(16, BITS, GROUP)
#else
#define MORE_ROWS(BITS, GROUP)
#endif
#define FORM(NAME, BITS, GROUP) \
    static void NAME( \
        int rows, const Activations *x, long m, Tile tile, Output out, long column, int lanes \
    ) { \
        switch (rows) { \
            ROWS(1, BITS, GROUP) ROWS(2, BITS, GROUP) ROWS(3, BITS, GROUP) ROWS(4, BITS, GROUP) \
            ROWS(5, BITS, GROUP) ROWS(6, BITS, GROUP) ROWS(7, BITS, GROUP) ROWS(8, BITS, GROUP) \
            MORE_ROWS(BITS, GROUP) \
        } \
    }
FORM(nibbles_16, 4, 16)
FORM(nibbles_32, 4, 32)
FORM(bytes_16, 8, 16)
FORM(bytes_32, 8, 32)

typedef void (*Form)(int, const Activations *, long, Tile, Output, long, int);

static Form form_of(int bits, int group) {
    if (bits == 4) return group == 32 ? nibbles_32 : nibbles_16;
    return group == 32 ? bytes_32 : bytes_16;
}

#ifdef __AMX_INT8__
#include <omp.h>
#include "amx_quantised.h"
#else
enum { UNPACKED_TILES = 0 };
#endif

ALWAYS_INLINE long whole_lines(long bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

// The size of `work` for one call.
long KERNEL(quantised_work_bytes)(long rows, long columns, int bits, long group, int threads) {
    const long codes = rows * columns * ACTIVATION_BYTES(bits), numbers = 3 * 4 * rows * (columns / group);
    return whole_lines(codes) + whole_lines(numbers) + threads * UNPACKED_TILES * TILE_ROWS * columns;
}

// y[:, :outputs] = x[rows][columns] times the transpose of the weights. Scales and offsets are
// stored divided by `factor`; work has quantised_work_bytes bytes.
void KERNEL(quantised_linear)(
    const bf16 *x, const uint8_t *codes, const uint16_t *scales, const uint16_t *offsets,
    void *y, long y_stride, int wide, uint8_t *work,
    long rows, long outputs, long columns, int bits, int group, int zero, float factor, int threads
) {
    const Weights weights = {{codes, scales, offsets}, outputs, columns, bits, group, zero};
    const long groups = columns / group, tiles = tile_count(&weights);
    const long code_bytes = ACTIVATION_BYTES(bits);
    float *x_scales = (float *)(work + whole_lines(rows * columns * code_bytes));
    int32_t *x_zeros = (int32_t *)(x_scales + rows * groups);
    float *x_sums = (float *)(x_zeros + rows * groups);
    const Activations all = {work, x_scales, x_zeros, x_sums, groups};
    const Output out = {y, y_stride, wide};
    const Form form = form_of(bits, group);
    const long piece = even_pieces(rows, ROWS_AT_ONCE), share = tiles_at_once(tiles, threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (long row = 0; row < rows; row++) {
            for (long g = 0; g < groups; g++) {
                const long m = row - (uint32_t)row % (uint32_t)piece;  // a 64-bit division is slower
                const long count = rows - m < piece ? rows - m : piece;
                const long at = m * groups + g * count + row - m;
                const bf16 *from = x + row * columns + g * group;
                uint8_t *to = work + at * group * code_bytes;
                int32_t sum;
                const float scale = group == 32 ? quantise_group(from, to, &sum, bits, 32)
                                                : quantise_group(from, to, &sum, bits, 16);
                x_scales[at] = scale * factor;
                x_zeros[at] = (CODE_BIAS(bits) - zero) * sum;
                x_sums[at] = x_scales[at] * (float)sum;
            }
        }
#ifdef __AMX_INT8__
        if (rows >= FEWEST_AMX_ROWS && group == AMX_GROUP) {
            const long number = omp_get_thread_num() * UNPACKED_TILES * TILE_ROWS;
            int8_t *unpacked = (int8_t *)x_scales + whole_lines(3 * 4 * rows * groups) + number * columns;
            multiply_many_rows(&all, &weights, out, rows, piece, unpacked);
        } else
#endif
#pragma omp for schedule(dynamic, share)
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
}
