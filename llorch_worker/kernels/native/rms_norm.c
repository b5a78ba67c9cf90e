// Root mean square normalisation, with or without the residual addition before it.
#include "bfloat16.h"

#include <math.h>

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 16384

// Rounds to bfloat16 where the torch twin does.
static void normalise(const bf16 *x, const bf16 *weight, bf16 *out, int64_t hidden, __m512 squares,
                      float eps) {
    float mean = _mm512_reduce_add_ps(squares) / (float)hidden;
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
    for (int64_t i = 0; i < hidden; i += LANES) {
        __mmask16 lanes = first_lanes(hidden - i);
        __m512 normed = rounded(_mm512_mul_ps(load_some(x + i, lanes), scale));
        store_some(out + i, _mm512_mul_ps(normed, load_some(weight + i, lanes)), lanes);
    }
}

// out = rms_norm(x) * weight; x, out: [tokens, hidden], weight: [hidden].
void llorch_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t tokens, int64_t hidden,
                     float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * hidden > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const bf16 *row = x + token * hidden;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < hidden; i += LANES) {
            __m512 wide = load_some(row + i, first_lanes(hidden - i));
            squares = _mm512_fmadd_ps(wide, wide, squares);
        }
        normalise(row, weight, out + token * hidden, hidden, squares, eps);
    }
}

// residual += x; out = rms_norm(residual) * weight.
void llorch_add_rms_norm(const bf16 *x, bf16 *residual, const bf16 *weight, bf16 *out,
                         int64_t tokens, int64_t hidden, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * hidden > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const bf16 *row = x + token * hidden;
        bf16 *sums = residual + token * hidden;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < hidden; i += LANES) {
            __mmask16 lanes = first_lanes(hidden - i);
            __m512 sum = _mm512_add_ps(load_some(row + i, lanes), load_some(sums + i, lanes));
            store_some(sums + i, sum, lanes);
            sum = rounded(sum);
            squares = _mm512_fmadd_ps(sum, sum, squares);
        }
        normalise(sums, weight, out + token * hidden, hidden, squares, eps);
    }
}
