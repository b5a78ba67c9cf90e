// The gates of SwiGLU and GeGLU: silu(gate) * up, gelu(gate) * up.
#include "shares.h"

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
#define GATE_AND_MUL(NAME, ROW, POWER)                                                             \
    void KERNEL(ROW)(const bf16 *gate_up, bf16 *out, int64_t inter) {                              \
        const floats one = splat(1.0f);                                                            \
        for (int64_t i = 0; i < inter; i += LANES) {                                               \
            const floats gate = load_some_bf16(gate_up + i, inter - i);                            \
            const floats gated = rounded(gate / (one + exp2_lanes(POWER(gate))));                  \
            const floats product = gated * load_some_bf16(gate_up + inter + i, inter - i);         \
            store_some_bf16(out + i, product, inter - i);                                          \
        }                                                                                          \
    }                                                                                              \
    void KERNEL(NAME)(const bf16 *gate_up, bf16 *out, int64_t tokens, int64_t inter,               \
                      int threads) {                                                               \
        _Pragma("omp parallel for num_threads(threads) if (tokens * inter > PARALLEL_ELEMENTS)")   \
        for (int64_t token = 0; token < tokens; token++)                                           \
            KERNEL(ROW)(gate_up + token * 2 * inter, out + token * inter, inter);                  \
    }

GATE_AND_MUL(silu_and_mul, silu_row, silu_power)
GATE_AND_MUL(gelu_and_mul, gelu_row, gelu_power)
