// The tile registers of AMX: eight, of at most 16 rows of 64 bytes each.
//
// A product multiplies rows of activations (16 bytes to 64) by the packed codes or pairs of 16 outputs: the
// layout of the weights in memory is what a tile register holds.
#pragma once

#include "tiles.h"

enum { AMX_ROWS = 16 };

// What the instruction reads that gives the registers their shapes: 64 bytes.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

// Shapes this thread's registers and clears them: 4 and 5 for activations, `first` and `second` rows of
// `row_bytes`; 6 and 7 for weights of 16 outputs; 0 to 3 for the products 4 x 6, 4 x 7, 5 x 6 and 5 x 7.
ALWAYS_INLINE void shape_tiles(int first, int second, int row_bytes) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int of_second = i == 2 || i == 3 || i == 5;
        shapes.rows[i] = (uint8_t)(i >= 6 ? row_bytes / 4 : of_second ? second : first);
        shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? row_bytes : CACHE_LINE);
    }
    // GCC's _tile_loadconfig does not tell the compiler that it reads all 64 bytes.
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

// Makes what was stored visible to _tile_loadd: GCC does not know that it reads memory.
ALWAYS_INLINE void stored_for_tiles(void) { __asm__ volatile("" : : : "memory"); }
