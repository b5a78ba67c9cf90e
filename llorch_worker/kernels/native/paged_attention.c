// Attention of new tokens to their own sequences; keys and values are read in place from the paged
// cache. Decode and prefill are the same kernel with few or many queries.
//
// The queries of all heads that share a KV head form one matrix, so that one pass over its keys
// serves them all. A tile of TILE_KEYS keys is converted once into pairs or fours (of head
// dimensions, keys side by side), and the values likewise (of keys, dimensions side by side). Each
// group of ROWS query rows then keeps its scores in registers from the products through the online
// softmax (arXiv 2205.14135) in float32.
//
// A token's result does not depend on other tokens, on other sequences or on the number of threads:
// its context is always divided into pieces of SPLIT_KEYS keys, which are combined in order. In
// decode the pieces are separate tasks.
#include "attend_codes.h"
#include "attend_pairs.h"
#include "paged_attention.h"
#include "softmax_rows.h"

#include <stdlib.h>

#define SPLIT_KEYS 256 // a multiple of TILE_KEYS
#define TASKS_PER_THREAD 2

// Some query rows of one sequence against some of its keys, for each KV head. Rows are numbered by
// token, then by the heads of a group.
struct unit {
    int64_t sequence, first_row, rows, first_key, end_key;
    int64_t split, splits;
    int64_t partial; // index of the sequence's first partial result, if it has several splits
};

// A cell is one token's row of one KV head. cells: the numbers of those of the tile's tokens for the
// first head; -1 where no row sees them, and memory may hold anything.
static void locate(const struct problem *p, const int32_t *table, int64_t first_key,
                   struct seen seen, int64_t cells[TILE_KEYS]) {
    int64_t i = 0;
    for (; i < smaller(seen.first, TILE_KEYS); i++) cells[i] = -1;
    int64_t block = (first_key + i) / p->block_size, within = (first_key + i) % p->block_size;
    for (; i < smaller(seen.end, TILE_KEYS); i++) {
        cells[i] = (table[block] * p->block_size + within) * p->kv_heads;
        if (++within == p->block_size) within = 0, block++;
    }
    for (; i < TILE_KEYS; i++) cells[i] = -1;
}

// The first `count` rows of one KV head's tile, none of which is prefetched yet.
static struct prefetch rows_of(const struct problem *p, int64_t head, const int64_t cells[TILE_KEYS],
                               int64_t count) {
    const int64_t cell_bytes = p->head_dim * bytes_of(p->form), first = head * cell_bytes;
    const int has_scales = p->form == KV_INT8;
    return (struct prefetch){
        {{p->keys + first, cell_bytes},
         {p->values + first, cell_bytes},
         {(const uint8_t *)(has_scales ? p->key_scales + head : NULL), sizeof(float)},
         {(const uint8_t *)(has_scales ? p->value_scales + head : NULL), sizeof(float)}},
        .used = has_scales ? 4 : 2,
        .cells = cells,
        .count = count,
    };
}

// The tile of one KV head.
static void pack(const struct problem *p, int64_t head, const int64_t cells[TILE_KEYS],
                 int64_t keys_here, struct tile *tile) {
    const int64_t first = head * p->head_dim * bytes_of(p->form);
    const uint8_t *keys = p->keys + first, *values = p->values + first;
    if (p->form == KV_INT8) {
        pack_codes((const int8_t *)keys, (const int8_t *)values, p->key_scales + head,
                   p->value_scales + head, cells, keys_here, p->head_dim, tile);
    } else {
        pack_pairs(p->form, keys, values, cells, keys_here, p->head_dim, tile);
    }
}

// `count` rows from the row `first` on against a tile.
static void attend_rows(const struct problem *p, int count, const struct queries *queries,
                        int64_t first, const struct tile *tile, const struct seen *seen,
                        struct rows *rows, struct prefetch *next) {
    const int64_t head_dim = p->head_dim;
    const struct progress so_far = {rows->sums + first * head_dim, rows->largest + first,
                                    rows->total + first};
    const bf16 *q = (const bf16 *)queries->numbers + first * head_dim;
#define ATTEND(COUNT)                                                                              \
    case COUNT:                                                                                    \
        if (p->form != KV_INT8)                                                                    \
            attend_pairs(COUNT, q, tile, seen, head_dim, p->scale, p->cap, so_far, next);          \
        else if (are_formed(COUNT, p->cap, seen))                                                  \
            attend_codes(COUNT, 1, queries, first, tile, seen, head_dim, p->cap, so_far, next);    \
        else                                                                                       \
            attend_codes(COUNT, 0, queries, first, tile, seen, head_dim, p->cap, so_far, next);    \
        break;
    switch (count) {
        ATTEND(1)
        ATTEND(2)
        ATTEND(3)
        ATTEND(4)
    }
}

// The unit's rows of some KV heads against its keys. queries: [heads][rows][head_dim].
// The inner loop goes over heads, which are adjacent in memory.
static void attend(const struct problem *p, const struct unit *u, int64_t first_head, int64_t heads,
                   const struct queries *queries, struct rows *rows) {
    struct rows later;
    const int one_piece = u->first_key / SPLIT_KEYS == (u->end_key - 1) / SPLIT_KEYS;
    struct rows *const piece = one_piece ? rows : &later;
    const int64_t first_tile = u->first_key - u->first_key % TILE_KEYS;
    const int64_t all_rows = heads * u->rows;
    struct tile tile;
    const int32_t *table = p->tables + u->sequence * p->table_stride;
    const int64_t context = p->context_lengths[u->sequence];
    const int64_t first_position = context - p->query_lengths[u->sequence];
    const int64_t head_dim = p->head_dim;
    if (piece != rows) forget(rows, all_rows, head_dim);
    int64_t here[TILE_KEYS], next[TILE_KEYS];
    struct seen in_next = {u->first_key - first_tile, u->end_key - first_tile};
    locate(p, table, first_tile, in_next, next);
    for (int64_t key = first_tile; key < u->end_key; key += TILE_KEYS) {
        memcpy(here, next, sizeof here);
        in_next = (struct seen){in_next.first - TILE_KEYS, in_next.end - TILE_KEYS};
        locate(p, table, key + TILE_KEYS, in_next, next);
        if (key % SPLIT_KEYS == 0 || key == first_tile) forget(piece, all_rows, head_dim);
        const int64_t keys_here = smaller(u->end_key - key, TILE_KEYS);
        for (int64_t head = 0; head < heads; head++) {
            pack(p, first_head + head, here, keys_here, &tile);
            const int more = head + 1 < heads;
            struct prefetch later_rows =
                more ? rows_of(p, first_head + head + 1, here, keys_here)
                     : rows_of(p, first_head, next, smaller(in_next.end, TILE_KEYS));

            for (int64_t r = 0; r < u->rows; r += ROWS) {
                const int count = (int)smaller(ROWS, u->rows - r);
                struct seen seen[ROWS];
                for (int i = 0; i < count; i++) {
                    int64_t end = first_position + (u->first_row + r + i) / p->group + 1;
                    seen[i].first = end - p->window - key;
                    seen[i].end = smaller(end, u->end_key) - key;
                }
                if (seen[count - 1].end <= 0 || seen[0].first >= keys_here) continue;
                attend_rows(p, count, queries, head * u->rows + r, &tile, seen, piece, &later_rows);
            }
            prefetch_cells(&later_rows, TILE_KEYS);
        }
        const int ends = (key + TILE_KEYS) % SPLIT_KEYS == 0 || key + TILE_KEYS >= u->end_key;
        if (piece == rows || !ends) continue;
        for (int64_t r = 0; r < all_rows; r++)
            join(rows->sums + r * head_dim, rows->largest + r, rows->total + r,
                 piece->sums + r * head_dim, piece->largest[r], piece->total[r], head_dim);
    }
}

static void write_row(const struct problem *p, const struct unit *u, int64_t kv_head, int64_t row,
                      const float *sums, float total) {
    const int64_t token = p->first_rows[u->sequence] + row / p->group;
    const int64_t head = kv_head * p->group + row % p->group;
    bf16 *out = p->out + (token * p->heads + head) * p->head_dim;
    const floats share = splat(1.0f / total);
    for (int64_t i = 0; i < p->head_dim; i += LANES)
        store_halves(out + i, narrowed(load(sums + i) * share));
}

static float *partial(const struct problem *p, const struct unit *u, int64_t split, int64_t kv_head,
                      int64_t row) {
    int64_t index = ((u->partial + split) * p->kv_heads + kv_head) * p->group + row;
    return p->partials + index * (p->head_dim + 2);
}

static void run_unit(const struct problem *p, const struct unit *u, int64_t first_head,
                     int64_t heads) {
    struct queries queries;
    struct rows rows;
    const int64_t head_dim = p->head_dim, token_stride = (p->heads + 2 * p->kv_heads) * head_dim;
    int64_t copied = 0;
    for (int64_t kv_head = first_head; kv_head < first_head + heads; kv_head++)
        for (int64_t r = u->first_row; r < u->first_row + u->rows; r++, copied++) {
            int64_t token = p->first_rows[u->sequence] + r / p->group;
            int64_t head = kv_head * p->group + r % p->group;
            const bf16 *query = p->qkv + token * token_stride + head * head_dim;
            if (p->form == KV_INT8) {
                round_query(query, head_dim, p->scale, &queries, copied);
            } else {
                memcpy((bf16 *)queries.numbers + copied * head_dim, query, head_dim * sizeof(bf16));
            }
        }
    attend(p, u, first_head, heads, &queries, &rows);
    int64_t row = 0;
    for (int64_t kv_head = first_head; kv_head < first_head + heads; kv_head++)
        for (int64_t r = u->first_row; r < u->first_row + u->rows; r++, row++) {
            const float *sums = rows.sums + row * head_dim;
            if (u->splits == 1) {
                write_row(p, u, kv_head, r, sums, rows.total[row]);
                continue;
            }
            float *to = partial(p, u, u->split, kv_head, r);
            memcpy(to, sums, head_dim * sizeof(float));
            to[head_dim] = rows.largest[row];
            to[head_dim + 1] = rows.total[row];
        }
}

// Combines the pieces of a decoding sequence in the order of its context.
static void combine(const struct problem *p, const struct unit *u, int64_t kv_head) {
    for (int64_t row = u->first_row; row < u->first_row + u->rows; row++) {
        float sums[MAX_HEAD_DIM] = {0}, largest = -FLT_MAX, total = 0.0f;
        for (int64_t split = 0; split < u->splits; split++) {
            const float *piece = partial(p, u, split, kv_head, row);
            const float *after = piece + p->head_dim;
            join(sums, &largest, &total, piece, after[0], after[1], p->head_dim);
        }
        write_row(p, u, kv_head, row, sums, total);
    }
}

static int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t splits_of(int64_t query_length, int64_t first_key, int64_t context_length) {
    return query_length == 1 ? divided_up(context_length, SPLIT_KEYS) - first_key / SPLIT_KEYS : 1;
}

// Fills `units` (unless NULL) and returns their number. Later queries see more keys; they go first,
// so that the last tasks are short.
static int64_t plan(const struct problem *p, int64_t count, struct unit *units) {
    int64_t made = 0, partials = 0;
    for (int64_t s = 0; s < count; s++) {
        const int64_t rows = p->query_lengths[s] * p->group, context = p->context_lengths[s];
        const int64_t visible = context - p->query_lengths[s] + 1; // to the first new token
        const int64_t splits = splits_of(p->query_lengths[s], greater(0, visible - p->window), context);
        for (int64_t tile = divided_up(rows, TILE_ROWS) - 1; tile >= 0; tile--)
            for (int64_t split = 0; split < splits; split++, made++) {
                if (units == NULL) continue;
                int64_t end_row = smaller((tile + 1) * TILE_ROWS, rows);
                int64_t first_key = greater(0, visible + tile * TILE_ROWS / p->group - p->window);
                int64_t end_key = visible + (end_row - 1) / p->group;
                if (splits > 1) {
                    int64_t piece = first_key / SPLIT_KEYS + split;
                    first_key = greater(first_key, piece * SPLIT_KEYS);
                    end_key = smaller(end_key, (piece + 1) * SPLIT_KEYS);
                }
                units[made] = (struct unit){
                    .sequence = s,
                    .first_row = tile * TILE_ROWS,
                    .rows = end_row - tile * TILE_ROWS,
                    .first_key = first_key,
                    .end_key = end_key,
                    .split = split,
                    .splits = splits,
                    .partial = partials,
                };
            }
        if (splits > 1) partials += splits;
    }
    return made;
}

// KV heads per task: as many as fit beside its rows, but few enough to keep all threads busy. Does
// not change results, because heads are independent.
static int64_t heads_at_once(const struct problem *p, const struct unit *units, int64_t total,
                             int threads) {
    int64_t most_rows = 1;
    for (int64_t i = 0; i < total; i++)
        if (units[i].rows > most_rows) most_rows = units[i].rows;
    int64_t heads = smaller(TILE_ROWS / most_rows, p->kv_heads);
    while (heads > 1 && total * divided_up(p->kv_heads, heads) < TASKS_PER_THREAD * threads)
        heads = (heads + 1) / 2;
    return heads;
}

// The number of partial results that `paged_attention` stores at most: without a window.
int64_t KERNEL(paged_attention_partials)(const int64_t *sequences, int64_t count) {
    int64_t partials = 0;
    for (int64_t s = 0; s < count; s++) {
        int64_t splits = splits_of(sequences[count + s], 0, sequences[2 * count + s]);
        if (splits > 1) partials += splits;
    }
    return partials;
}

int KERNEL(plan_attention)(const struct problem *p, int64_t count, int threads, struct plan *made) {
    made->total = plan(p, count, NULL);
    made->units = malloc(made->total * sizeof(struct unit));
    if (made->units == NULL) return -1;
    plan(p, count, made->units);
    made->heads = heads_at_once(p, made->units, made->total, threads);
    made->splits = 0;
    for (int64_t i = 0; i < made->total; i++) made->splits += made->units[i].splits > 1;
    return 0;
}

void KERNEL(attend_planned)(const struct problem *p, const struct plan *plan) {
    const int64_t tasks = divided_up(p->kv_heads, plan->heads);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < plan->total * tasks; task++) {
        const int64_t first = task % tasks * plan->heads;
        run_unit(p, &plan->units[task / tasks], first, smaller(plan->heads, p->kv_heads - first));
    }
    if (plan->splits == 0) return;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < plan->total * p->kv_heads; task++) {
        const struct unit *u = &plan->units[task / p->kv_heads];
        if (u->splits > 1 && u->split == 0) combine(p, u, task % p->kv_heads);
    }
}

// qkv: [tokens, heads + 2 * kv_heads, head_dim], contiguous and rotated; keys, values: [blocks,
// block_size, kv_heads, head_dim] in the form `form`, including the new tokens; key_scales,
// value_scales: [blocks, block_size, kv_heads], only for KV_INT8; out: [tokens, heads * head_dim].
// sequences: [3, count]: first rows, query lengths, context lengths; tables: [count, table_stride].
// partials: room for paged_attention_partials(..) * heads * (head_dim + 2) floats.
// head_dim is a multiple of 32, at most 256. scale, window, cap: see AttentionForm; a window or a cap of
// 0 is none. Returns -1 if there is no memory for the plan.
int KERNEL(paged_attention)(const bf16 *qkv, const void *keys, const void *values,
                           const float *key_scales, const float *value_scales, int form, bf16 *out,
                           const int64_t *sequences, const int32_t *tables, float *partials,
                           int64_t count, int64_t table_stride, int64_t block_size, int64_t heads,
                           int64_t kv_heads, int64_t head_dim, float scale, int64_t window,
                           float cap, int threads) {
    struct problem p = {
        .qkv = qkv,
        .keys = keys,
        .values = values,
        .key_scales = key_scales,
        .value_scales = value_scales,
        .form = (enum kv_form)form,
        .out = out,
        .first_rows = sequences,
        .query_lengths = sequences + count,
        .context_lengths = sequences + 2 * count,
        .tables = tables,
        .table_stride = table_stride,
        .block_size = block_size,
        .heads = heads,
        .kv_heads = kv_heads,
        .head_dim = head_dim,
        .group = heads / kv_heads,
        .partials = partials,
    };
    set_form(&p, scale, window, cap);
    struct plan planned;
    if (KERNEL(plan_attention)(&p, count, threads, &planned)) return -1;
#pragma omp parallel num_threads(threads)
    KERNEL(attend_planned)(&p, &planned);
    free(planned.units);
    return 0;
}
