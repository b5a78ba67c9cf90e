// Rotates new queries and keys, and writes new keys and values to the paged cache.
#include "shares.h"

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 16384

// As in layer_kv.py.
#define LARGEST_CODE 127.0f
#define SMALLEST_AMPLITUDE 1e-20f

// Half-split layout: pairs (i, i + half) rotate by the token's i-th angle.
static inline void rotate(bf16 *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const floats c = load(cos + i), s = load(sin + i);
        const floats first = load_bf16(head + i), second = load_bf16(head + half + i);
        store_halves(head + i, narrowed(multiply_subtract(first, c, second * s)));
        store_halves(head + half + i, narrowed(multiply_add(second, c, first * s)));
    }
}

// The same steps as the torch twin's, with a division, so that the codes are the same.
static void write_int8(int8_t *to, float *scale, const bf16 *from, int64_t head_dim) {
    ints magnitudes = splat_int(0);
    for (int64_t i = 0; i < head_dim; i += LANES)
        magnitudes = larger_magnitude(magnitudes, load_bf16(from + i));
    const float largest = largest_magnitude_of(magnitudes);
    *scale = (largest < SMALLEST_AMPLITUDE ? SMALLEST_AMPLITUDE : largest) / LARGEST_CODE;
    for (int64_t i = 0; i < head_dim; i += LANES) {
        const floats steps = load_bf16(from + i) / splat(*scale) + splat(0.5f);
        store_bytes(to + i, nearest_ints(rounded_down(steps)));
    }
}

// cells: the layer's keys or values; row: [kv_heads, head_dim].
static void write(enum kv_form form, uint8_t *cells, float *scales, int64_t slot, const bf16 *row,
                  int64_t kv_heads, int64_t head_dim) {
    const int64_t count = kv_heads * head_dim;
    uint8_t *to = cells + slot * count * bytes_of(form);
    if (form == KV_BF16) {
        memcpy(to, row, count * sizeof(bf16));
    } else if (form == KV_FP8) {
        for (int64_t i = 0; i < count; i += LANES) store_bytes(to + i, fp8_of(load_bf16(row + i)));
    } else {
        for (int64_t head = 0; head < kv_heads; head++)
            write_int8((int8_t *)to + head * head_dim, scales + slot * kv_heads + head,
                       row + head * head_dim, head_dim);
    }
}

void KERNEL(rope_and_write_row)(bf16 *qkv, const float *cos, const float *sin, int64_t slot, void *keys,
                                void *values, float *key_scales, float *value_scales, int form,
                                int64_t heads, int64_t kv_heads, int64_t head_dim) {
    for (int64_t head = 0; head < heads + kv_heads; head++)
        rotate(qkv + head * head_dim, cos, sin, head_dim / 2);
    const bf16 *k = qkv + heads * head_dim, *v = k + kv_heads * head_dim;
    write((enum kv_form)form, keys, key_scales, slot, k, kv_heads, head_dim);
    write((enum kv_form)form, values, value_scales, slot, v, kv_heads, head_dim);
}

// qkv: [tokens, heads + 2 * kv_heads, head_dim], Q and K rotated in place; cos, sin: [tokens,
// head_dim / 2]; slots: [tokens]; keys, values: [slots, kv_heads, head_dim] in the form `form`;
// key_scales, value_scales: [slots, kv_heads], only for KV_INT8. head_dim is a multiple of 32.
void KERNEL(rope_and_write)(bf16 *qkv, const float *cos, const float *sin, const int64_t *slots,
                            void *keys, void *values, float *key_scales, float *value_scales,
                            int form, int64_t tokens, int64_t heads, int64_t kv_heads,
                            int64_t head_dim, int threads) {
    const int64_t row = (heads + 2 * kv_heads) * head_dim, half = head_dim / 2;
#pragma omp parallel for num_threads(threads) if (tokens * row > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        KERNEL(rope_and_write_row)(qkv + token * row, cos + token * half, sin + token * half,
                                   slots[token], keys, values, key_scales, value_scales, form, heads,
                                   kv_heads, head_dim);
}
