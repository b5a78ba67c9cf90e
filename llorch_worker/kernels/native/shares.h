// What the threads of a parallel region call: parts of a layer, for one row or for a thread's share. None but
// attend_planned waits for the other threads.
#pragma once

#include "matrix.h"
#include "paged_attention.h"

// Rounds the `share`-th part of activations x[rows][columns] for a quantised matrix.
void KERNEL(round_activations)(
    const Matrix *matrix, const bf16 *x, uint8_t *work, long rows, int share, int shares
);

// The calling thread's part of a product. All threads of a region call it alike.
void KERNEL(multiply_rounded)(
    const Matrix *matrix, uint8_t *work, void *y, long y_stride, int wide, long rows, int threads
);
void KERNEL(multiply_bf16)(
    const Matrix *matrix, const bf16 *x, void *y, long y_stride, int wide, long rows, int threads
);

long KERNEL(quantised_work_bytes)(long rows, long columns, int bits, long group, int threads);

// out = rms_norm(x) * weight; out may be x.
void KERNEL(norm_row)(const bf16 *x, const bf16 *weight, bf16 *out, int64_t hidden, float eps);

// residual += x; out = rms_norm(residual) * weight; out may be x.
void KERNEL(add_norm_row)(const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out, int64_t hidden,
                          float eps);

void KERNEL(silu_row)(const bf16 *gate_up, bf16 *out, int64_t inter);
void KERNEL(gelu_row)(const bf16 *gate_up, bf16 *out, int64_t inter);

// One token of rope_and_write.
void KERNEL(rope_and_write_row)(bf16 *qkv, const float *cos, const float *sin, int64_t slot, void *keys,
                                void *values, float *key_scales, float *value_scales, int form,
                                int64_t heads, int64_t kv_heads, int64_t head_dim);
