// Root mean square normalisation, with or without the residual addition before it.
#include "vector.h"

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

// out = rms_norm(x) * weight; x, out: [tokens, hidden], weight: [hidden].
void KERNEL(rms_norm)(const bf16 *x, const bf16 *weight, bf16 *out, int64_t tokens, int64_t hidden,
                      float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * hidden > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const bf16 *row = x + token * hidden;
        floats squares = zeros();
        for (int64_t i = 0; i < hidden; i += LANES) {
            const floats wide = load_some_bf16(row + i, hidden - i);
            squares = multiply_add(wide, wide, squares);
        }
        normalise(row, weight, out + token * hidden, hidden, squares, eps);
    }
}

// residual += x; out = rms_norm(residual) * weight.
void KERNEL(add_rms_norm)(const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out,
                          int64_t tokens, int64_t hidden, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * hidden > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const bf16 *row = x + token * hidden;
        bf16 *sums = residual + token * hidden;
        floats squares = zeros();
        for (int64_t i = 0; i < hidden; i += LANES) {
            const int64_t left = hidden - i;
            floats sum = load_some_bf16(row + i, left) + load_some_bf16(sums + i, left);
            store_some_bf16(sums + i, sum, left);
            sum = rounded(sum);
            squares = multiply_add(sum, sum, squares);
        }
        normalise(sums, weight, out + token * hidden, hidden, squares, eps);
    }
}
