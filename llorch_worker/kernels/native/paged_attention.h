// What attention of a step computes, and how its work is divided.
#pragma once

#include "kv_form.h"
#include "vector.h"

struct problem {
    const bf16 *qkv;
    const uint8_t *keys, *values;
    const float *key_scales, *value_scales; // of KV_INT8
    enum kv_form form;
    bf16 *out;
    const int64_t *first_rows, *query_lengths, *context_lengths;
    const int32_t *tables;
    int64_t table_stride, block_size, heads, kv_heads, head_dim, group;
    float scale;     // of scores, as powers of two
    float cap;       // of the scores that attend_pairs.h or attend_codes.h computes; 0 is none
    int64_t window;  // a query sees so many keys, itself included
    float *partials; // [partial, kv_head, row of the group, head_dim + 2]: sums, maximum, total
};

// Sets what the layers of a model differ in; see AttentionForm. A window or a cap of 0 is none.
static inline void set_form(struct problem *p, float scale, int64_t window, float cap) {
    const float log2e = 1.442695041f;
    p->scale = scale * log2e;
    // Codes are scaled before the cap, pairs after it.
    p->cap = p->form == KV_INT8 ? cap * log2e : cap / scale;
    p->window = window ? window : INT64_MAX / 2;
}

// The tasks of the sequences of a problem. They depend on the lengths and on the window only.
struct plan {
    struct unit *units; // to be freed
    int64_t total, heads, splits; // units, KV heads of a task, units that are joined with others
};

// Returns -1 if there is no memory for the plan.
int KERNEL(plan_attention)(const struct problem *p, int64_t count, int threads, struct plan *plan);

// All threads of a region call it; returns when all are done.
void KERNEL(attend_planned)(const struct problem *p, const struct plan *plan);

int64_t KERNEL(paged_attention_partials)(const int64_t *sequences, int64_t count);
