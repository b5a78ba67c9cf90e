// Rotates new queries and keys, and writes new keys and values to the paged cache.
#include "vector.h"

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 16384

// Half-split layout: pairs (i, i + half) rotate by the token's i-th angle.
static inline void rotate(bf16 *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const floats c = load(cos + i), s = load(sin + i);
        const floats first = load_bf16(head + i), second = load_bf16(head + half + i);
        store_halves(head + i, narrowed(multiply_subtract(first, c, second * s)));
        store_halves(head + half + i, narrowed(multiply_add(second, c, first * s)));
    }
}

// qkv: [tokens, heads + 2 * kv_heads, head_dim], Q and K rotated in place; cos, sin: [tokens,
// head_dim / 2]; slots: [tokens]; keys, values: [slots, kv_heads, head_dim]. head_dim is a multiple
// of 32.
void KERNEL(rope_and_write)(bf16 *qkv, const float *cos, const float *sin, const int64_t *slots,
                            bf16 *keys, bf16 *values, int64_t tokens, int64_t heads,
                            int64_t kv_heads, int64_t head_dim, int threads) {
    const int64_t row = (heads + 2 * kv_heads) * head_dim, half = head_dim / 2;
    const int64_t kv_row = kv_heads * head_dim;
#pragma omp parallel for num_threads(threads) if (tokens * row > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        bf16 *here = qkv + token * row;
        for (int64_t head = 0; head < heads + kv_heads; head++)
            rotate(here + head * head_dim, cos + token * half, sin + token * half, half);
        const bf16 *k = here + heads * head_dim, *v = k + kv_row;
        memcpy(keys + slots[token] * kv_row, k, kv_row * sizeof(bf16));
        memcpy(values + slots[token] * kv_row, v, kv_row * sizeof(bf16));
    }
}
