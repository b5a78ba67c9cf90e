// A tile of keys and values of one KV head, and the query rows that attend to it.
#pragma once

#include "vector.h"

#include <float.h>
#include <math.h>

#define TILE_KEYS 64
#define TILE_ROWS 64
#define MAX_HEAD_DIM 256
#define ROWS 4
#define VECTORS (TILE_KEYS / LANES)

// Converted once for all rows. What is in a dword depends on the cache's form: attend_pairs.h,
// attend_codes.h.
struct tile {
    _Alignas(64) ints keys[MAX_HEAD_DIM / 2 * VECTORS];
    _Alignas(64) ints values[TILE_KEYS / 2 * MAX_HEAD_DIM / LANES];
    _Alignas(64) float key_scales[TILE_KEYS], value_scales[TILE_KEYS]; // of int8
};

// Query rows of 16 bits a number, [row][head_dim]: bfloat16, or factors of products with codes.
struct queries {
    _Alignas(64) uint8_t numbers[TILE_ROWS * MAX_HEAD_DIM * 2];
    // Of factors: what one of them is worth in a score, and what their sums of products start at.
    float steps[TILE_ROWS];
    int32_t starts[TILE_ROWS];
};

// The online softmax of some rows so far: unnormalised sums of values, the largest score (as a power
// of two) and the total weight.
struct progress {
    float *sums, *largest, *total;
};

// The keys of a tile that a row may see, from `first` to before `end`; both may lie outside the tile.
struct seen {
    int64_t first, end;
};

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// Another tile's rows, to be prefetched while this one is computed, a few at a time. All at once would
// take the core's buffers for misses, and the computation would wait for them. Rows of one KV head are
// too far apart for the hardware prefetcher.
struct prefetch {
    struct {
        const uint8_t *first; // of cell 0
        int64_t cell_bytes;
    } arrays[4]; // keys, values, and of int8 their scales
    int used; // how many of these
    const int64_t *cells;
    int64_t count, done; // of the cells
};

#define CELLS_AT_ONCE 4 // beside ROWS rows

// Into the second cache level, because the first is full.
ALWAYS_INLINE void prefetch_cells(struct prefetch *next, int64_t most) {
    for (; most > 0 && next->done < next->count; most--) {
        const int64_t cell = next->cells[next->done++];
        for (int i = 0; i < next->used; i++) {
            const int64_t bytes = next->arrays[i].cell_bytes;
            const uint8_t *from = next->arrays[i].first + cell * bytes;
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
        }
    }
}

// cap * tanh(scores / cap), as 1 - 2 / (e^2x + 1).
ALWAYS_INLINE floats capped(floats scores, float cap) {
    const floats power = exp2_lanes(scores * splat(2.885390082f / cap));
    return splat(cap) - splat(2.0f * cap) / (power + splat(1.0f));
}

// Whether `count` rows of scores are to be formed: there is a cap, or a window hides some of the tile's keys. Most
// tiles need neither.
ALWAYS_INLINE int are_formed(const int count, float cap, const struct seen *seen) {
    return cap != 0.0f || seen[count - 1].first > 0;
}

// Bends `count` rows of scores towards a cap, unless it is 0, and hides the keys before each row's window.
ALWAYS_INLINE void form_scores(const int count, floats scores[ROWS][VECTORS], float cap,
                               const struct seen *seen) {
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) {
            if (v * LANES >= seen[count - 1].end) break;
            if (cap != 0.0f) scores[r][v] = capped(scores[r][v], cap);
            const mask hidden = first_lanes(seen[r].first - v * LANES);
            scores[r][v] = chosen_or(hidden, splat(-INFINITY), scores[r][v]);
        }
}
