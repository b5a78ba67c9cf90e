// Root mean square normalisation, with or without the residual addition before it.
#include "shares.h"

#include <math.h>

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 16384

// Rounds to bfloat16 where the torch twin does.
static void normalise(const bf16 *x, const bf16 *weight, bf16 *out, int64_t hidden, floats squares,
                      float eps) {
    const floats scale = splat(1.0f / sqrtf(sum_of(squares) / (float)hidden + eps));
    for (int64_t i = 0; i < hidden; i += LANES) {
        const floats normed = rounded(load_some_bf16(x + i, hidden - i) * scale);
        store_some_bf16(out + i, normed * load_some_bf16(weight + i, hidden - i), hidden - i);
    }
}

void KERNEL(norm_row)(const bf16 *x, const bf16 *weight, bf16 *out, int64_t hidden, float eps) {
    floats squares = zeros();
    for (int64_t i = 0; i < hidden; i += LANES) {
        const floats wide = load_some_bf16(x + i, hidden - i);
        squares = multiply_add(wide, wide, squares);
    }
    normalise(x, weight, out, hidden, squares, eps);
}

void KERNEL(add_norm_row)(const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out, int64_t hidden,
                          float eps) {
    floats squares = zeros();
    for (int64_t i = 0; i < hidden; i += LANES) {
        const int64_t left = hidden - i;
        floats sum = load_some_bf16(x + i, left) + load_some_bf16(residual + i, left);
        store_some_bf16(residual + i, sum, left);
        sum = rounded(sum);
        squares = multiply_add(sum, sum, squares);
    }
    normalise(residual, weight, out, hidden, squares, eps);
}

// x, out: [tokens, hidden], weight: [hidden].
void KERNEL(rms_norm)(const bf16 *x, const bf16 *weight, bf16 *out, int64_t tokens, int64_t hidden,
                      float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * hidden > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        KERNEL(norm_row)(x + token * hidden, weight, out + token * hidden, hidden, eps);
}

void KERNEL(add_rms_norm)(const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out,
                          int64_t tokens, int64_t hidden, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * hidden > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t at = token * hidden;
        KERNEL(add_norm_row)(x + at, residual + at, weight, out + at, hidden, eps);
    }
}
