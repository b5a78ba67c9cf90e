// Rotates new queries and keys, and writes new keys and values to the paged cache.
#include "bfloat16.h"

#include <string.h>

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 16384

// Half-split layout: pairs (i, i + half) rotate by the token's i-th angle.
static inline void rotate(bf16 *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        __m512 first = load(head + i), second = load(head + half + i);
        store(head + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
        store(head + half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
    }
}

// qkv: [tokens, heads + 2 * kv_heads, head_dim], Q and K rotated in place; cos, sin: [tokens,
// head_dim / 2]; slots: [tokens]; keys, values: [slots, kv_heads, head_dim]. head_dim is a multiple
// of 32.
void llorch_rope_and_write(bf16 *qkv, const float *cos, const float *sin, const int64_t *slots,
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
