// Packs rows of quantised matrices into tiles; quantised_linear.c describes the layout.
//
// Each function fills whole tiles from `count` rows; lanes beyond the last row get a scale of 0. It
// runs on one thread: the file's reader has several, which call with different rows.
#include "tiles.h"

static inline long tiles_of(long count) { return (count + TILE_ROWS - 1) / TILE_ROWS; }

// codes[count][columns], one byte each.
void KERNEL(pack_codes)(
    const uint8_t *codes, uint8_t *tiles, long count, long columns, int bits, int group
) {
    const long half = group / 8;  // vectors of a group of 4-bit codes
    for (long t = 0; t < tiles_of(count); t++) {
        uint32_t *out = (uint32_t *)(tiles + t * TILE_ROWS * columns * bits / 8);
        for (long r = 0; r < TILE_ROWS; r++) {
            const long row = t * TILE_ROWS + r;
            for (long v = 0; v < columns / 4; v++) {
                uint32_t four = 0;
                if (row < count) memcpy(&four, codes + row * columns + 4 * v, 4);
                if (bits == 8) {
                    out[v * TILE_ROWS + r] = four;
                    continue;
                }
                const long within = v % (2 * half);
                uint32_t *at = out + (v / (2 * half) * half + within % half) * TILE_ROWS + r;
                *at = within < half ? four : *at | four << 4;
            }
        }
    }
}

// values[count][width] as float16.
void KERNEL(pack_scales)(const float *values, uint16_t *tiles, long count, long width) {
    for (long t = 0; t < tiles_of(count); t++) {
        for (long i = 0; i < width; i++) {
            for (long r = 0; r < TILE_ROWS; r++) {
                const long row = t * TILE_ROWS + r;
                const float value = row < count ? values[row * width + i] : 0.0f;
                tiles[(t * width + i) * TILE_ROWS + r] = f16_of(value);
            }
        }
    }
}

// bytes[count][width], four side by side.
void KERNEL(pack_levels)(const uint8_t *bytes, uint8_t *tiles, long count, long width) {
    uint32_t *out = (uint32_t *)tiles;
    for (long row = 0; row < tiles_of(count) * TILE_ROWS; row++) {
        for (long i = 0; i < width / 4; i++) {
            uint32_t four = 0;
            if (row < count) memcpy(&four, bytes + row * width + 4 * i, 4);
            out[(row / TILE_ROWS * (width / 4) + i) * TILE_ROWS + row % TILE_ROWS] = four;
        }
    }
}

// Raw rows of blocks that consist of a float16 scale and codes in the order of tiles: Q4_0 (16
// bytes, columns 0 to 15 in the low halves) and Q8_0 (32 signed bytes; `flip` 0x80 makes them
// unsigned). Row r comes from rows[order[r]], or from rows[r] without an order. Of each 2^shared blocks,
// which have one scale, the last one's is kept. Returns 0 if a scale is infinite or NaN.
int KERNEL(pack_blocks)(
    const uint8_t *rows, const int64_t *order, uint8_t *tiles, uint16_t *scales,
    long count, long blocks, long code_bytes, int flip, int shared
) {
    const long block_bytes = 2 + code_bytes, vectors = code_bytes / 4;
    const uint32_t flips = 0x01010101u * (uint32_t)flip;
    int finite = 1;
    for (long t = 0; t < tiles_of(count); t++) {
        uint32_t *out = (uint32_t *)(tiles + t * TILE_ROWS * blocks * code_bytes);
        uint16_t *scale = scales + t * TILE_ROWS * (blocks >> shared);
        const uint8_t *from[TILE_ROWS];
        for (long r = 0; r < TILE_ROWS; r++) {
            const long row = t * TILE_ROWS + r;
            from[r] = row >= count ? 0 : rows + (order ? order[row] : row) * blocks * block_bytes;
        }
        for (long b = 0; b < blocks; b++) {
            for (long r = 0; r < TILE_ROWS; r++) {
                if (from[r] == 0) {
                    scale[(b >> shared) * TILE_ROWS + r] = 0;
                    for (long v = 0; v < vectors; v++) out[(b * vectors + v) * TILE_ROWS + r] = 0;
                    continue;
                }
                const uint8_t *block = from[r] + b * block_bytes;
                uint16_t half;
                memcpy(&half, block, 2);
                finite &= (half & 0x7c00) != 0x7c00;
                scale[(b >> shared) * TILE_ROWS + r] = half;
                for (long v = 0; v < vectors; v++) {
                    uint32_t four;
                    memcpy(&four, block + 2 + 4 * v, 4);
                    out[(b * vectors + v) * TILE_ROWS + r] = four ^ flips;
                }
            }
        }
    }
    return finite;
}
