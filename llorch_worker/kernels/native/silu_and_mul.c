// The gate of SwiGLU: silu(gate) * up.
#include "vector.h"

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 8192

// gate_up: [tokens, 2 * inter], gate first; out: [tokens, inter]. silu(gate) is rounded to
// bfloat16 before the product, as in the torch twin.
void KERNEL(silu_and_mul)(const bf16 *gate_up, bf16 *out, int64_t tokens, int64_t inter,
                          int threads) {
    const floats one = splat(1.0f), minus_log2e = splat(-1.442695041f);
#pragma omp parallel for num_threads(threads) if (tokens * inter > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const bf16 *gates = gate_up + token * 2 * inter, *ups = gates + inter;
        for (int64_t i = 0; i < inter; i += LANES) {
            const floats gate = load_some_bf16(gates + i, inter - i);
            const floats silu = rounded(gate / (one + exp2_lanes(gate * minus_log2e)));
            const floats product = silu * load_some_bf16(ups + i, inter - i);
            store_some_bf16(out + token * inter + i, product, inter - i);
        }
    }
}
