// The gates of SwiGLU and GeGLU: silu(gate) * up, gelu(gate) * up.
#include "vector.h"

// With fewer elements a second thread does not pay off.
#define PARALLEL_ELEMENTS 8192

// Both gates are gate / (1 + 2^power).
ALWAYS_INLINE floats silu_power(floats gate) { return gate * splat(-1.442695041f); }

// Of GELU in its approximation by tanh: 2 sqrt(2 / pi) log2(e) (gate + 0.044715 gate^3).
ALWAYS_INLINE floats gelu_power(floats gate) {
    // The cube of a larger number is infinite, whose power is not a number; the result is 0 already here.
    const floats x = larger(splat(-100.0f), gate);
    return x * multiply_add(x * x, splat(-0.102943236f), splat(-2.302208198f));
}

// gate_up: [tokens, 2 * inter], gate first; out: [tokens, inter]. The gate is rounded to bfloat16 before
// the product, as in the torch twin.
#define GATE_AND_MUL(NAME, POWER)                                                                  \
    void KERNEL(NAME)(const bf16 *gate_up, bf16 *out, int64_t tokens, int64_t inter,               \
                      int threads) {                                                               \
        const floats one = splat(1.0f);                                                            \
        _Pragma("omp parallel for num_threads(threads) if (tokens * inter > PARALLEL_ELEMENTS)")   \
        for (int64_t token = 0; token < tokens; token++) {                                         \
            const bf16 *gates = gate_up + token * 2 * inter, *ups = gates + inter;                 \
            for (int64_t i = 0; i < inter; i += LANES) {                                           \
                const floats gate = load_some_bf16(gates + i, inter - i);                          \
                const floats gated = rounded(gate / (one + exp2_lanes(POWER(gate))));              \
                const floats product = gated * load_some_bf16(ups + i, inter - i);                 \
                store_some_bf16(out + token * inter + i, product, inter - i);                      \
            }                                                                                      \
        }                                                                                          \
    }

GATE_AND_MUL(silu_and_mul, silu_power)
GATE_AND_MUL(gelu_and_mul, gelu_power)
