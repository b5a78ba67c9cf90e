// The gate of SwiGLU: silu(gate) * up.
#include "bfloat16.h"

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 8192

// gate_up: [tokens, 2 * inter], gate first; out: [tokens, inter]. silu(gate) is rounded to
// bfloat16 before the product, as in the torch twin.
void llorch_silu_and_mul(const bf16 *gate_up, bf16 *out, int64_t tokens, int64_t inter,
                         int threads) {
    const __m512 one = _mm512_set1_ps(1.0f), minus_log2e = _mm512_set1_ps(-1.442695041f);
#pragma omp parallel for num_threads(threads) if (tokens * inter > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const bf16 *gates = gate_up + token * 2 * inter, *ups = gates + inter;
        for (int64_t i = 0; i < inter; i += LANES) {
            __mmask16 lanes = first_lanes(inter - i);
            __m512 gate = load_some(gates + i, lanes);
            __m512 power = exp2_lanes(_mm512_mul_ps(gate, minus_log2e));
            __m512 silu = rounded(_mm512_div_ps(gate, _mm512_add_ps(one, power)));
            __m512 product = _mm512_mul_ps(silu, load_some(ups + i, lanes));
            store_some(out + token * inter + i, product, lanes);
        }
    }
}
