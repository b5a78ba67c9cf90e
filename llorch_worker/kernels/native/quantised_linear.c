// Products of bfloat16 activations with quantised weights, on AVX-512 VNNI.
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

// Rounds one group of activations to int8; returns its scale and the sum of the rounded values.
ALWAYS_INLINE float quantise_group(const bf16 *x, int8_t *codes, int32_t *sum, int group) {
    __m512 values[2];
    const int halves = group / 16;
    __m512i top = _mm512_setzero_si512();
    for (int h = 0; h < halves; h++) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + 16 * h)));
        values[h] = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
        // As an integer, a NaN is larger than all numbers, so the scale and every output become NaN
        // too. A maximum of floats would lose it.
        top = _mm512_max_epi32(top, _mm512_castps_si512(_mm512_abs_ps(values[h])));
    }
    const int32_t bits = _mm512_reduce_max_epi32(top);
    float largest;
    memcpy(&largest, &bits, 4);
    __m512 to_codes = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    __m512i total = _mm512_setzero_si512();
    for (int h = 0; h < halves; h++) {
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values[h], to_codes));
        // A NaN became the smallest integer, which would overflow the sum.
        rounded = _mm512_max_epi32(rounded, _mm512_set1_epi32(-127));
        _mm_storeu_si128((__m128i *)(codes + 16 * h), _mm512_cvtsepi32_epi8(rounded));
        total = _mm512_add_epi32(total, rounded);
    }
    *sum = _mm512_reduce_add_epi32(total);
    return largest / 127.0f;
}

typedef struct {
    const int8_t *codes;     // [rows][columns]
    const float *scales;     // [rows][groups]
    const int32_t *zeros;    // [rows][groups], -zero * (sum of codes): the start of the dot product
    const float *sums;       // [rows][groups], scale * (sum of codes): the factor of an offset
    long columns, groups;
} Activations;

typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *offsets;
} Tile;

// `rows` activations from row m on times one tile; rows, bits, group and has_offsets are constants.
ALWAYS_INLINE void multiply_tile(
    int rows, int bits, int group, int has_offsets,
    const Activations *x, long m, Tile tile, Output out, long column, int lanes
) {
    __m512 sums[16];
    __m512i weights[8];
    const int vectors = group / 4;
    const __m512i low_half = _mm512_set1_epi8(15);
    UNROLL for (int r = 0; r < rows; r++) sums[r] = _mm512_setzero_ps();
    for (long g = 0; g < x->groups; g++) {
        if (bits == 4) {
            const uint8_t *packed = tile.codes + g * group * (TILE_ROWS / 2);
            UNROLL for (int p = 0; p < vectors / 2; p++) {
                __m512i both = _mm512_load_si512(packed + p * CACHE_LINE);
                // Unpacking is faster than memory: prefetch the next lines in time.
                _mm_prefetch((const char *)packed + p * CACHE_LINE + 2048, _MM_HINT_T0);
                weights[p] = _mm512_and_si512(both, low_half);
                weights[p + vectors / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
            }
        } else {
            const uint8_t *bytes = tile.codes + g * group * TILE_ROWS;
            UNROLL for (int v = 0; v < vectors; v++) {
                weights[v] = _mm512_load_si512(bytes + v * CACHE_LINE);
                _mm_prefetch((const char *)bytes + v * CACHE_LINE + 4096, _MM_HINT_T0);
            }
        }
        const __m256i *scale_row = (const __m256i *)(tile.scales + g * TILE_ROWS);
        __m512 scale = _mm512_cvtph_ps(_mm256_load_si256(scale_row));
        __m512 offset = _mm512_setzero_ps();
        if (has_offsets) {
            const __m256i *offset_row = (const __m256i *)(tile.offsets + g * TILE_ROWS);
            offset = _mm512_cvtph_ps(_mm256_load_si256(offset_row));
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const int8_t *codes = x->codes + (m + r) * x->columns + g * group;
            long at = (m + r) * x->groups + g;
            __m512i dot = _mm512_set1_epi32(x->zeros[at]);
            UNROLL for (int v = 0; v < vectors; v++) {
                int32_t four;
                memcpy(&four, codes + 4 * v, 4);
                dot = _mm512_dpbusd_epi32(dot, weights[v], _mm512_set1_epi32(four));
            }
            __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
            sums[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(x->scales[at]), sums[r]);
            if (has_offsets) {
                sums[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x->sums[at]), sums[r]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) store_lanes(out, m + r, column, sums[r], lanes);
}

// A function for each form, with all loops over rows and vectors unrolled.
#define ROWS(N, BITS, GROUP, OFFSETS) \
    case N: multiply_tile(N, BITS, GROUP, OFFSETS, x, m, tile, out, column, lanes); break;
#define FORM(NAME, BITS, GROUP, OFFSETS) \
    static void NAME( \
        int rows, const Activations *x, long m, Tile tile, Output out, long column, int lanes \
    ) { \
        switch (rows) { \
            ROWS(1, BITS, GROUP, OFFSETS) ROWS(2, BITS, GROUP, OFFSETS) \
            ROWS(3, BITS, GROUP, OFFSETS) ROWS(4, BITS, GROUP, OFFSETS) \
            ROWS(5, BITS, GROUP, OFFSETS) ROWS(6, BITS, GROUP, OFFSETS) \
            ROWS(7, BITS, GROUP, OFFSETS) ROWS(8, BITS, GROUP, OFFSETS) \
            ROWS(9, BITS, GROUP, OFFSETS) ROWS(10, BITS, GROUP, OFFSETS) \
            ROWS(11, BITS, GROUP, OFFSETS) ROWS(12, BITS, GROUP, OFFSETS) \
            ROWS(13, BITS, GROUP, OFFSETS) ROWS(14, BITS, GROUP, OFFSETS) \
            ROWS(15, BITS, GROUP, OFFSETS) ROWS(16, BITS, GROUP, OFFSETS) \
        } \
    }
FORM(nibbles_32, 4, 32, 0)
FORM(nibbles_32_offset, 4, 32, 1)
FORM(nibbles_16, 4, 16, 0)
FORM(nibbles_16_offset, 4, 16, 1)
FORM(bytes_32, 8, 32, 0)
FORM(bytes_32_offset, 8, 32, 1)
FORM(bytes_16, 8, 16, 0)
FORM(bytes_16_offset, 8, 16, 1)

enum { ROWS_AT_ONCE = 16 };

typedef void (*Form)(int, const Activations *, long, Tile, Output, long, int);

static Form form_of(int bits, int group, int has_offsets) {
    static const Form forms[2][2][2] = {
        {{nibbles_16, nibbles_16_offset}, {nibbles_32, nibbles_32_offset}},
        {{bytes_16, bytes_16_offset}, {bytes_32, bytes_32_offset}},
    };
    return forms[bits == 8][group == 32][has_offsets];
}

// The size of `work` for one call.
long llorch_quantised_work_bytes(long rows, long columns, long group) {
    return rows * columns + CACHE_LINE + 3 * 4 * rows * (columns / group);
}

// y[:, :outputs] = x[rows][columns] times the transpose of the weights. Scales and offsets are
// stored divided by `factor`; work has llorch_quantised_work_bytes bytes.
void llorch_quantised_linear(
    const bf16 *x, const uint8_t *codes, const uint16_t *scales, const uint16_t *offsets,
    void *y, long y_stride, int wide, uint8_t *work,
    long rows, long outputs, long columns, int bits, int group, int zero, float factor, int threads
) {
    const long groups = columns / group, tiles = (outputs + TILE_ROWS - 1) / TILE_ROWS;
    int8_t *x_codes = (int8_t *)work;
    float *x_scales = (float *)(work + (rows * columns + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    int32_t *x_zeros = (int32_t *)(x_scales + rows * groups);
    float *x_sums = (float *)(x_zeros + rows * groups);
    const Activations activations = {x_codes, x_scales, x_zeros, x_sums, columns, groups};
    const Output out = {y, y_stride, wide};
    const Form form = form_of(bits, group, offsets != 0);
    const long piece = even_pieces(rows, ROWS_AT_ONCE), share = tiles_at_once(tiles, threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long i = 0; i < rows * groups; i++) {
            int32_t sum;
            float scale = group == 32
                ? quantise_group(x + i * 32, x_codes + i * 32, &sum, 32)
                : quantise_group(x + i * 16, x_codes + i * 16, &sum, 16);
            x_scales[i] = scale * factor;
            x_zeros[i] = -zero * sum;
            x_sums[i] = x_scales[i] * (float)sum;
        }
#pragma omp for schedule(dynamic, share)
        for (long t = 0; t < tiles; t++) {
            const long first = t * TILE_ROWS;
            const int lanes = outputs - first < TILE_ROWS ? (int)(outputs - first) : TILE_ROWS;
            const Tile tile = {
                codes + t * TILE_ROWS * columns * bits / 8,
                scales + t * groups * TILE_ROWS,
                offsets ? offsets + t * groups * TILE_ROWS : 0,
            };
            for (long m = 0; m < rows; m += piece) {
                const int count = (int)(rows - m < piece ? rows - m : piece);
                form(count, &activations, m, tile, out, first, lanes);
            }
        }
    }
}
