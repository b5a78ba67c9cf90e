// Attention to a tile of pairs of bfloat16: caches in bfloat16, and in fp8, which is converted.
#pragma once

#include "attention_tile.h"
#include "kv_form.h"

// Vectors of scores or sums for each row: with ROWS, enough to hide the latency of a product; with one
// row more would gain nothing.
#define SCORE_VECTORS 2
#define SUM_VECTORS 2

// 2 * LANES numbers of a row as bfloat16; zeros beyond the end.
ALWAYS_INLINE ints load_pairs(enum kv_form form, const uint8_t *heads, int64_t cell,
                              int64_t head_dim, int64_t dim) {
    if (cell < 0) return splat_int(0);
    const uint8_t *from = heads + (cell * head_dim + dim) * bytes_of(form);
    return form == KV_FP8 ? bf16_of_fp8(load_bytes_16(from)) : load_ints(from);
}

// Writes only the vectors in which one of the first `keys_here` keys lies.
// packed: [head_dim / 2][TILE_KEYS] dwords, each two adjacent dimensions of one key.
ALWAYS_INLINE void pack_key_pairs(enum kv_form form, const uint8_t *keys,
                                  const int64_t cells[TILE_KEYS], int64_t keys_here, int64_t head_dim,
                                  ints *packed) {
    for (int64_t dim = 0; dim < head_dim; dim += 2 * LANES)
        for (int vector = 0; vector * LANES < keys_here; vector++) {
            ints row[LANES];
            for (int i = 0; i < LANES; i++)
                row[i] = load_pairs(form, keys, cells[vector * LANES + i], head_dim, dim);
            transpose(row);
            for (int i = 0; i < LANES; i++) packed[(dim / 2 + i) * VECTORS + vector] = row[i];
        }
}

// packed: [TILE_KEYS / 2][head_dim] dwords, each one dimension of two adjacent values.
ALWAYS_INLINE void pack_value_pairs(enum kv_form form, const uint8_t *values,
                                    const int64_t cells[TILE_KEYS], int64_t keys_here,
                                    int64_t head_dim, ints *packed) {
    for (int64_t pair = 0; 2 * pair < keys_here; pair++)
        for (int64_t dim = 0; dim < head_dim; dim += 2 * LANES) {
            const ints even = load_pairs(form, values, cells[2 * pair], head_dim, dim);
            const ints odd = load_pairs(form, values, cells[2 * pair + 1], head_dim, dim);
            interleave(even, odd, packed + (pair * head_dim + dim) / LANES);
        }
}

static void pack_pairs(enum kv_form form, const uint8_t *keys, const uint8_t *values,
                       const int64_t cells[TILE_KEYS], int64_t keys_here, int64_t head_dim,
                       struct tile *tile) {
    if (form == KV_FP8) {
        pack_key_pairs(KV_FP8, keys, cells, keys_here, head_dim, tile->keys);
        pack_value_pairs(KV_FP8, values, cells, keys_here, head_dim, tile->values);
    } else {
        pack_key_pairs(KV_BF16, keys, cells, keys_here, head_dim, tile->keys);
        pack_value_pairs(KV_BF16, values, cells, keys_here, head_dim, tile->values);
    }
}

// `count` rows against a tile: scores, softmax so far, weighted values.
// queries: [count][head_dim]; seen: the keys that each row may see.
ALWAYS_INLINE void attend_pairs(const int count, const bf16 *queries, const struct tile *tile,
                                const struct seen *seen, int64_t head_dim, float scale, float cap,
                                struct progress so_far, struct prefetch *next) {
    // Later rows see as far as earlier ones or further.
    const int64_t seen_keys = smaller(seen[count - 1].end, TILE_KEYS);
    floats scores[ROWS][VECTORS];
    for (int first = 0; first < VECTORS; first += SCORE_VECTORS) {
        // The last vectors may hold no key: their scores are never read.
        if (first * LANES >= seen_keys) break;
        prefetch_cells(next, CELLS_AT_ONCE * ROWS / count);
        floats some[ROWS][SCORE_VECTORS];
        for (int r = 0; r < count; r++)
            for (int v = 0; v < SCORE_VECTORS; v++) some[r][v] = zeros();
        for (int64_t pair = 0; pair < head_dim / 2; pair++) {
            const ints *k = tile->keys + pair * VECTORS + first;
            pairs some_keys[SCORE_VECTORS];
            for (int v = 0; v < SCORE_VECTORS; v++) some_keys[v] = pairs_of(k[v]);
            for (int r = 0; r < count; r++) {
                const pairs q = broadcast_pair(queries + r * head_dim + 2 * pair);
                for (int v = 0; v < SCORE_VECTORS; v++)
                    some[r][v] = add_products(some[r][v], q, some_keys[v]);
            }
        }
        for (int r = 0; r < count; r++)
            for (int v = 0; v < SCORE_VECTORS; v++) scores[r][first + v] = some[r][v];
    }
    if (__builtin_expect(are_formed(count, cap, seen), 0)) form_scores(count, scores, cap, seen);

    _Alignas(64) bf16 weights[ROWS][TILE_KEYS];
    const floats nothing = splat(-INFINITY);
    float correction[ROWS];
    float *const largest = so_far.largest, *const total = so_far.total, *const sums = so_far.sums;
    for (int r = 0; r < count; r++) {
        prefetch_cells(next, CELLS_AT_ONCE * ROWS / count);
        floats top = nothing;
        for (int v = 0; v < VECTORS; v++) {
            if (v * LANES >= seen_keys) break;
            const mask visible = first_lanes(seen[r].end - v * LANES);
            scores[r][v] = chosen_or(visible, scores[r][v] * splat(scale), nothing);
            top = larger(top, scores[r][v]);
        }
        const float highest = fmaxf(largest[r], largest_of(top));
        floats sum = zeros();
        for (int v = 0; v < VECTORS; v++) {
            if (v * LANES >= seen_keys) break;
            const halves narrow = narrowed(exp2_lanes(scores[r][v] - splat(highest)));
            store_halves(weights[r] + v * LANES, narrow);
            sum += widen(narrow);
        }
        correction[r] = exp2f(largest[r] - highest);
        total[r] = total[r] * correction[r] + sum_of(sum);
        largest[r] = highest;
    }

    const int64_t seen_pairs = (seen_keys + 1) / 2;
    for (int64_t dim = 0; dim < head_dim; dim += SUM_VECTORS * LANES) {
        prefetch_cells(next, CELLS_AT_ONCE * ROWS / count);
        floats sum[ROWS][SUM_VECTORS];
        for (int r = 0; r < count; r++)
            for (int v = 0; v < SUM_VECTORS; v++)
                sum[r][v] = load(sums + r * head_dim + dim + v * LANES) * splat(correction[r]);
        for (int64_t pair = 0; pair < seen_pairs; pair++) {
            const ints *at = tile->values + (pair * head_dim + dim) / LANES;
            pairs some_values[SUM_VECTORS];
            for (int v = 0; v < SUM_VECTORS; v++) some_values[v] = pairs_of(at[v]);
            for (int r = 0; r < count; r++) {
                const pairs weight = broadcast_pair(weights[r] + 2 * pair);
                for (int v = 0; v < SUM_VECTORS; v++)
                    sum[r][v] = add_products(sum[r][v], weight, some_values[v]);
            }
        }
        for (int r = 0; r < count; r++)
            for (int v = 0; v < SUM_VECTORS; v++)
                store(sums + r * head_dim + dim + v * LANES, sum[r][v]);
    }
}
