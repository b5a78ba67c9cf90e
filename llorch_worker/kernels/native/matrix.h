// A piece of a matrix in tiles, as quantised_linear.c and bf16_linear.c describe them; tiles.py has the same
// fields.
#pragma once

#include <stdint.h>

enum { BF16_BITS = 16 };

typedef struct {
    const void *codes;  // or weights in bfloat16, which have nothing else but `outputs` and `columns`
    const uint16_t *scales, *offsets;
    const uint8_t *scale_levels;
    int64_t outputs, columns, bits, group, zero, levels, shared;
} Matrix;
