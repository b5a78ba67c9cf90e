// The scales and offsets of quantised tiles, for each group of columns and each of 16 rows.
//
// Without levels they are float16: [tiles][groups][16], or one for each 2^shared groups. K types have two levels. A block of 256 columns
// has a float16 scale and in some types a float16 offset: [tiles][blocks][16]. A small whole number for
// each of its groups multiplies them. These numbers are the file's bytes, four of a row side by side:
// [tiles][blocks][level_bytes / 4][16][4].
#pragma once

#include "tiles.h"

enum { BLOCK_COLUMNS = 256, MOST_GROUPS = BLOCK_COLUMNS / 16 };

enum {
    NO_LEVELS,
    BYTE_LEVELS,     // for each of 16 groups a signed byte for the scale
    NIBBLE_LEVELS,   // for each of 16 groups one for the scale in the low half, one for the offset
    SIX_BIT_LEVELS,  // for each of eight groups 6 bits and 6 bits; unpack_block shows where
};

ALWAYS_INLINE int level_bytes(int levels) { return levels == SIX_BIT_LEVELS ? 12 : 16; }
ALWAYS_INLINE int level_offsets(int levels) { return levels >= NIBBLE_LEVELS; }

typedef struct {
    const uint16_t *scales, *offsets;
    const uint8_t *levels;
    int shared;
} Scales;

// Where those of group g are; there are no levels.
ALWAYS_INLINE long scales_of(Scales scales, long g) { return (g >> scales.shared) * TILE_ROWS; }

// Those of the tile before which there are `before` weights.
ALWAYS_INLINE Scales scales_after(Scales first, int levels, long before, int group) {
    const long blocks = before / BLOCK_COLUMNS;
    const long halves = levels ? blocks : before / group >> first.shared;
    return (Scales){
        first.scales + halves,
        first.offsets ? first.offsets + halves : 0,
        levels ? first.levels + blocks * level_bytes(levels) : 0,
        first.shared,
    };
}

// A block's scales and offsets for LANES rows, each number in a byte: four groups of a row in a lane.
typedef struct {
    floats scale, offset;
    ints scales[MOST_GROUPS / 4], offsets[MOST_GROUPS / 4];
} Block;

ALWAYS_INLINE void unpack_block(int levels, Scales from, long b, int first, Block *block) {
    const ints six = splat_int(0x3f3f3f3f), four = splat_int(0x0f0f0f0f), two = splat_int(0x30303030);
    const uint8_t *at = from.levels + b * level_bytes(levels) * TILE_ROWS + 4 * first;
    block->scale = load_f16(from.scales + b * TILE_ROWS + first);
    if (level_offsets(levels)) block->offset = load_f16(from.offsets + b * TILE_ROWS + first);
    if (levels == SIX_BIT_LEVELS) {
        // Groups 0 to 3: the low 6 bits of the first bytes for scales, of the second ones for offsets.
        // Groups 4 to 7: the 2 bits above, over halves of the third bytes, the low ones for scales.
        const ints scales = load_ints(at), offsets = load_ints(at + CACHE_LINE);
        const ints both = load_ints(at + 2 * CACHE_LINE);
        block->scales[0] = bits_and(scales, six);
        block->offsets[0] = bits_and(offsets, six);
        const ints s = bits_and(shifted_right_16(scales, 2), two);
        const ints o = bits_and(shifted_right_16(offsets, 2), two);
        block->scales[1] = bits_or(bits_and(both, four), s);
        block->offsets[1] = bits_or(bits_and(shifted_right_16(both, 4), four), o);
        return;
    }
    UNROLL for (int i = 0; i < MOST_GROUPS / 4; i++) {
        const ints bytes = load_ints(at + i * CACHE_LINE);
        block->scales[i] = levels == BYTE_LEVELS ? bytes : bits_and(bytes, four);
        if (levels == NIBBLE_LEVELS) block->offsets[i] = bits_and(shifted_right_16(bytes, 4), four);
    }
}

// The scales of group g of its block.
ALWAYS_INLINE floats scale_of_levels(const Block *block, int g) {
    return floats_of(signed_bytes(block->scales[g / 4], g % 4)) * block->scale;
}
