// Attention to a tile of codes of 8 bits with scales: caches in int8.
//
// The codes are multiplied as they are: queries and weights become whole numbers of 16 bits, with a
// step of their own for each row, which is finer than bfloat16's. So both products are exact
// integers, a code is never widened, and a dword has four of them.
#pragma once

#include "attention_tile.h"

// Vectors of sums for each row: with ROWS, as many as fit the registers.
enum { CODE_VECTORS = LANES == 8 && sizeof(code_sums) > sizeof(ints) ? 1 : 2 };

// A step is not 0, so that a row of zeros is divided by it.
#define SMALLEST_SIZE 1e-30f

// What one factor stands for, if the largest number has this magnitude. NaN stays NaN.
ALWAYS_INLINE float step_of(ints magnitudes) {
    const float largest = largest_magnitude_of(magnitudes);
    return (largest < SMALLEST_SIZE ? SMALLEST_SIZE : largest) / LARGEST_FACTOR;
}

// A query row [head_dim] as factors.
static void round_query(const bf16 *query, int64_t head_dim, float scale, struct queries *queries,
                        int64_t row) {
    uint8_t *to = queries->numbers + row * head_dim * FACTOR_BYTES;
    ints magnitudes = splat_int(0), total = splat_int(0);
    for (int64_t dim = 0; dim < head_dim; dim += LANES)
        magnitudes = larger_magnitude(magnitudes, load_bf16(query + dim));
    const float step = step_of(magnitudes);
    for (int64_t dim = 0; dim < head_dim; dim += LANES) {
        const ints values = nearest_ints(load_bf16(query + dim) * splat(1.0f / step));
        store_factors(to, head_dim, dim, values);
        total = added(total, values);
    }
    queries->steps[row] = step * scale;
    queries->starts[row] = -CODE_OFFSET * sum_of_ints(total);
}

// 4 * LANES codes of a row; zeros beyond the end.
ALWAYS_INLINE ints load_codes(const int8_t *heads, int64_t cell, int64_t head_dim, int64_t dim) {
    if (cell < 0) return splat_int(0);
    return load_some_bytes(heads + cell * head_dim + dim, head_dim - dim);
}

// Writes only the vectors in which one of the first `keys_here` keys lies.
// packed: [head_dim / 4][TILE_KEYS] dwords, each four adjacent dimensions of one key.
static void pack_key_codes(const int8_t *keys, const int64_t cells[TILE_KEYS], int64_t keys_here,
                           int64_t head_dim, ints *packed) {
    for (int64_t dim = 0; dim < head_dim; dim += 4 * LANES)
        for (int vector = 0; vector * LANES < keys_here; vector++) {
            ints row[LANES];
            for (int i = 0; i < LANES; i++)
                row[i] = load_codes(keys, cells[vector * LANES + i], head_dim, dim);
            transpose(row);
            for (int i = 0; i < LANES; i++)
                if (4 * i < head_dim - dim)
                    packed[(dim / 4 + i) * VECTORS + vector] = coded(row[i]);
        }
}

// packed: [TILE_KEYS / 4][head_dim] dwords, each one dimension of four adjacent values.
static void pack_value_codes(const int8_t *values, const int64_t cells[TILE_KEYS], int64_t keys_here,
                             int64_t head_dim, ints *packed) {
    for (int64_t four = 0; 4 * four < keys_here; four++)
        for (int64_t dim = 0; dim < head_dim; dim += 4 * LANES) {
            ints row[4], mixed[4];
            for (int i = 0; i < 4; i++)
                row[i] = coded(load_codes(values, cells[4 * four + i], head_dim, dim));
            interleave_bytes(row[0], row[1], row[2], row[3], mixed);
            for (int i = 0; i < 4; i++)
                if (i * LANES < head_dim - dim)
                    packed[(four * head_dim + dim) / LANES + i] = mixed[i];
        }
}

static void pack_codes(const int8_t *keys, const int8_t *values, const float *key_scales,
                       const float *value_scales, const int64_t cells[TILE_KEYS], int64_t keys_here,
                       int64_t head_dim, struct tile *tile) {
    pack_key_codes(keys, cells, keys_here, head_dim, tile->keys);
    pack_value_codes(values, cells, keys_here, head_dim, tile->values);
    for (int i = 0; i < TILE_KEYS; i++) {
        tile->key_scales[i] = cells[i] < 0 ? 0.0f : key_scales[cells[i]];
        tile->value_scales[i] = cells[i] < 0 ? 0.0f : value_scales[cells[i]];
    }
}

// Products of `count` rows of `width` factors with CODE_VECTORS vectors of codes, `stride` vectors
// from one four to the next.
ALWAYS_INLINE void multiply_codes(const int count, const uint8_t *rows, int64_t width,
                                  const ints *codes, int64_t stride, int64_t fours,
                                  code_sums sums[ROWS][CODE_VECTORS]) {
    for (int r = 0; r < count; r++)
        for (int v = 0; v < CODE_VECTORS; v++) sums[r][v] = no_code_sums();
    for (int64_t four = 0; four < fours; four++) {
        ints some[CODE_VECTORS];
        for (int v = 0; v < CODE_VECTORS; v++) some[v] = codes[four * stride + v];
        for (int r = 0; r < count; r++) {
            const factors by =
                broadcast_factors(rows + r * width * FACTOR_BYTES, width, 4 * four);
            for (int v = 0; v < CODE_VECTORS; v++)
                sums[r][v] = add_code_products(sums[r][v], some[v], by);
        }
    }
}

// `count` rows against a tile: scores, softmax so far, weighted values.
// first: the number of the first row among `queries`; seen: the keys that each row may see.
// formed: whether there is a cap or a window. A constant: tested at run time it costs 3% of a prefill.
ALWAYS_INLINE void attend_codes(const int count, const int formed, const struct queries *queries,
                                int64_t first, const struct tile *tile, const struct seen *seen,
                                int64_t head_dim, float cap, struct progress so_far,
                                struct prefetch *next) {
    // Later rows see as far as earlier ones or further.
    const int64_t seen_keys = smaller(seen[count - 1].end, TILE_KEYS);
    floats scores[ROWS][VECTORS];
    const uint8_t *rows = queries->numbers + first * head_dim * FACTOR_BYTES;
    for (int some = 0; some < VECTORS; some += CODE_VECTORS) {
        // The last vectors may hold no key: their scores are never read.
        if (some * LANES >= seen_keys) break;
        prefetch_cells(next, CELLS_AT_ONCE * ROWS / count);
        code_sums sums[ROWS][CODE_VECTORS];
        multiply_codes(count, rows, head_dim, tile->keys + some, VECTORS, head_dim / 4, sums);
        for (int r = 0; r < count; r++)
            for (int v = 0; v < CODE_VECTORS; v++) {
                const ints whole = whole_sums(sums[r][v], queries->starts[first + r]);
                const floats scale = load(tile->key_scales + (some + v) * LANES);
                scores[r][some + v] = floats_of(whole) * splat(queries->steps[first + r]) * scale;
            }
    }
    if (formed) form_scores(count, scores, cap, seen);

    _Alignas(64) uint8_t weights[ROWS][TILE_KEYS * FACTOR_BYTES];
    const floats nothing = splat(-INFINITY);
    float correction[ROWS], steps[ROWS];
    int32_t starts[ROWS];
    for (int r = 0; r < count; r++) {
        prefetch_cells(next, CELLS_AT_ONCE * ROWS / count);
        floats top = nothing;
        for (int v = 0; v < VECTORS; v++) {
            if (v * LANES >= seen_keys) break;
            const mask visible = first_lanes(seen[r].end - v * LANES);
            scores[r][v] = chosen_or(visible, scores[r][v], nothing);
            top = larger(top, scores[r][v]);
        }
        const float highest = fmaxf(so_far.largest[r], largest_of(top));
        floats sum = zeros();
        ints magnitudes = splat_int(0), whole_sum = splat_int(0);
        for (int v = 0; v < VECTORS; v++) {
            if (v * LANES >= seen_keys) break;
            const floats weight = exp2_lanes(scores[r][v] - splat(highest));
            sum += weight;
            scores[r][v] = weight * load(tile->value_scales + v * LANES);
            magnitudes = larger_magnitude(magnitudes, scores[r][v]);
        }
        steps[r] = step_of(magnitudes);
        for (int v = 0; v < VECTORS; v++) {
            if (v * LANES >= seen_keys) break;
            const ints whole = nearest_ints(scores[r][v] * splat(1.0f / steps[r]));
            store_factors(weights[r], TILE_KEYS, v * LANES, whole);
            whole_sum = added(whole_sum, whole);
        }
        starts[r] = -CODE_OFFSET * sum_of_ints(whole_sum);
        correction[r] = exp2f(so_far.largest[r] - highest);
        so_far.total[r] = so_far.total[r] * correction[r] + sum_of(sum);
        so_far.largest[r] = highest;
    }

    const int64_t seen_fours = (seen_keys + 3) / 4;
    for (int64_t dim = 0; dim < head_dim; dim += CODE_VECTORS * LANES) {
        prefetch_cells(next, CELLS_AT_ONCE * ROWS / count);
        code_sums sums[ROWS][CODE_VECTORS];
        multiply_codes(count, weights[0], TILE_KEYS, tile->values + dim / LANES, head_dim / LANES,
                       seen_fours, sums);
        for (int r = 0; r < count; r++)
            for (int v = 0; v < CODE_VECTORS; v++) {
                float *at = so_far.sums + r * head_dim + dim + v * LANES;
                const floats here = floats_of(whole_sums(sums[r][v], starts[r])) * splat(steps[r]);
                store(at, multiply_add(load(at), splat(correction[r]), here));
            }
    }
}
