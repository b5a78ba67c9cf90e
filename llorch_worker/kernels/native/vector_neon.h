// Four lanes: AArch64 NEON with dot products; see vector.h. vector_avx512.h says what each function does.
#pragma once

#define LANES 4

typedef float32x4_t floats;
typedef int32x4_t ints;
typedef uint8_t mask;

ALWAYS_INLINE mask first_lanes(int64_t count) {
    return count >= LANES ? 0xf : count <= 0 ? 0 : (mask)((1u << count) - 1);
}

// The bytes of the first `count` elements of a vector.
ALWAYS_INLINE size_t some_bytes(int64_t count, size_t element) {
    return element * (size_t)(count >= LANES ? LANES : count <= 0 ? 0 : count);
}

// --- Floats.

ALWAYS_INLINE floats splat(float value) { return vdupq_n_f32(value); }
ALWAYS_INLINE floats zeros(void) { return vdupq_n_f32(0.0f); }
ALWAYS_INLINE floats load(const float *from) { return vld1q_f32(from); }
ALWAYS_INLINE void store(float *to, floats values) { vst1q_f32(to, values); }

ALWAYS_INLINE floats load_some(const float *from, int64_t count, floats otherwise) {
    if (count >= LANES) return load(from);
    memcpy(&otherwise, from, some_bytes(count, sizeof *from));
    return otherwise;
}

ALWAYS_INLINE void store_some(float *to, floats values, int64_t count) {
    if (count >= LANES) {
        store(to, values);
    } else {
        memcpy(to, &values, some_bytes(count, sizeof *to));
    }
}

ALWAYS_INLINE floats multiply_add(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
ALWAYS_INLINE floats multiply_subtract(floats a, floats b, floats c) {
    return vfmaq_f32(vnegq_f32(c), a, b);
}

// NEON's own maximum is NaN if one of them is.
ALWAYS_INLINE floats larger(floats a, floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
ALWAYS_INLINE floats magnitude(floats values) { return vabsq_f32(values); }

ALWAYS_INLINE floats nearest(floats values) { return vrndnq_f32(values); }
ALWAYS_INLINE floats rounded_down(floats values) { return vrndmq_f32(values); }

ALWAYS_INLINE floats scaled_by_power(floats values, floats powers) {
    // In two factors, because one would not reach denormals, nor infinity. Only the second rounds.
    powers = vmaxq_f32(splat(-252.0f), vminq_f32(splat(254.0f), powers));
    const int32x4_t whole = vcvtnq_s32_f32(powers), first = whole >> 1, second = whole - first;
    values *= vreinterpretq_f32_s32((first + 127) << 23);
    return values * vreinterpretq_f32_s32((second + 127) << 23);
}

ALWAYS_INLINE float sum_of(floats values) { return vaddvq_f32(values); }
ALWAYS_INLINE float largest_of(floats values) { return vmaxvq_f32(values); }

// --- Sets of lanes.

ALWAYS_INLINE uint32x4_t lane_bits(void) { return (uint32x4_t){1, 2, 4, 8}; }

ALWAYS_INLINE mask at_least(floats values, floats bound) {
    return (mask)vaddvq_u32(vandq_u32(vcgeq_f32(values, bound), lane_bits()));
}

ALWAYS_INLINE floats chosen_or(mask chosen, floats values, floats otherwise) {
    return vbslq_f32(vtstq_u32(vdupq_n_u32(chosen), lane_bits()), values, otherwise);
}

ALWAYS_INLINE void store_chosen(void *to, mask chosen, floats values) {
    int32_t lanes[LANES], *out = to; // as integers, which copy the bits of any float
    vst1q_s32(lanes, vreinterpretq_s32_f32(values));
    for (unsigned left = chosen; left; left &= left - 1) {
        memcpy(out++, &lanes[__builtin_ctz(left)], sizeof *lanes);
    }
}

// --- Integers.

ALWAYS_INLINE ints splat_int(int32_t value) { return vdupq_n_s32(value); }
ALWAYS_INLINE ints load_ints(const void *from) {
    return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)from));
}
ALWAYS_INLINE floats as_floats(ints bits) { return vreinterpretq_f32_s32(bits); }
ALWAYS_INLINE ints as_ints(floats values) { return vreinterpretq_s32_f32(values); }
ALWAYS_INLINE floats floats_of(ints values) { return vcvtq_f32_s32(values); }
ALWAYS_INLINE ints nearest_ints(floats values) { return vcvtnq_s32_f32(values); }
ALWAYS_INLINE ints added(ints a, ints b) { return vaddq_s32(a, b); }
ALWAYS_INLINE ints larger_int(ints a, ints b) { return vmaxq_s32(a, b); }
ALWAYS_INLINE ints bits_and(ints a, ints b) { return a & b; }
ALWAYS_INLINE ints bits_or(ints a, ints b) { return a | b; }
ALWAYS_INLINE ints bits_xor(ints a, ints b) { return a ^ b; }
ALWAYS_INLINE ints shifted_left(ints values, int by) { return values << by; }
ALWAYS_INLINE ints shifted_right(ints values, int by) { return values >> by; }
ALWAYS_INLINE ints shifted_right_16(ints values, int by) {
    return vreinterpretq_s32_u16(vreinterpretq_u16_s32(values) >> by);
}
ALWAYS_INLINE int32_t sum_of_ints(ints values) { return vaddvq_s32(values); }
ALWAYS_INLINE int32_t largest_int_of(ints values) { return vmaxvq_s32(values); }

#ifdef __ARM_FEATURE_MATMUL_INT8
#define CODE_BIAS(bits) 0
ALWAYS_INLINE ints add_byte_products(ints sums, ints codes, ints bytes) {
    return vusdotq_s32(sums, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(bytes));
}
#else
// Without i8mm both bytes are signed, so 128 is taken from codes of 8 bits.
#define CODE_BIAS(bits) ((bits) == 4 ? 0 : 128)
ALWAYS_INLINE ints add_byte_products(ints sums, ints codes, ints bytes) {
    return vdotq_s32(sums, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(bytes));
}
#endif

ALWAYS_INLINE ints load_some_bytes(const void *from, int64_t count) { return load_ints(from); }

ALWAYS_INLINE ints load_bytes_16(const void *from) {
    return vreinterpretq_s32_u16(vmovl_u8(vld1_u8(from)));
}

ALWAYS_INLINE ints bytes_at(const uint8_t table[16], ints indices) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s32(indices)));
}

ALWAYS_INLINE ints signed_bytes(ints bytes, int place) {
    return vshlq_s32(bytes, splat_int(24 - 8 * place)) >> 24;
}

ALWAYS_INLINE ints equal_16(ints a, ints b) {
    return vreinterpretq_s32_u16(vceqq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}

ALWAYS_INLINE void store_bytes(void *to, ints values) {
    const int16x4_t narrow = vmovn_s32(values);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
    memcpy(to, &bytes, LANES);
}

ALWAYS_INLINE void transpose(ints row[LANES]) {
    const int32x4x2_t upper = vtrnq_s32(row[0], row[1]), lower = vtrnq_s32(row[2], row[3]);
    for (int i = 0; i < 2; i++) {
        row[i] = vcombine_s32(vget_low_s32(upper.val[i]), vget_low_s32(lower.val[i]));
        row[i + 2] = vcombine_s32(vget_high_s32(upper.val[i]), vget_high_s32(lower.val[i]));
    }
}

ALWAYS_INLINE void interleave(ints a, ints b, ints *to) {
    const uint16x8_t even = vreinterpretq_u16_s32(a), odd = vreinterpretq_u16_s32(b);
    to[0] = vreinterpretq_s32_u16(vzip1q_u16(even, odd));
    to[1] = vreinterpretq_s32_u16(vzip2q_u16(even, odd));
}

ALWAYS_INLINE void interleave_bytes(ints a, ints b, ints c, ints d, ints to[4]) {
    const uint8x16x2_t ab = vzipq_u8(vreinterpretq_u8_s32(a), vreinterpretq_u8_s32(b));
    const uint8x16x2_t cd = vzipq_u8(vreinterpretq_u8_s32(c), vreinterpretq_u8_s32(d));
    for (int i = 0; i < 2; i++) {
        const uint16x8_t first = vreinterpretq_u16_u8(ab.val[i]);
        const uint16x8_t second = vreinterpretq_u16_u8(cd.val[i]);
        to[2 * i] = vreinterpretq_s32_u16(vzip1q_u16(first, second));
        to[2 * i + 1] = vreinterpretq_s32_u16(vzip2q_u16(first, second));
    }
}

// --- bfloat16 and float16.

typedef uint16x4_t halves;

ALWAYS_INLINE floats widen(halves narrow) {
    return vreinterpretq_f32_u32(vshll_n_u16(narrow, 16));
}

ALWAYS_INLINE halves narrowed(floats wide) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return vreinterpret_u16_bf16(vcvt_bf16_f32(wide));
#else
    const uint32x4_t bits = vreinterpretq_u32_f32(wide), upper = bits >> 16;
    const uint32x4_t up = (bits + (upper & 1) + 0x7fff) >> 16;
    return vmovn_u32(vbslq_u32(vceqq_f32(wide, wide), up, upper | 0x40));
#endif
}

ALWAYS_INLINE floats load_bf16(const bf16 *from) { return widen(vld1_u16(from)); }

ALWAYS_INLINE floats load_some_bf16(const bf16 *from, int64_t count) {
    if (count >= LANES) return load_bf16(from);
    bf16 some[LANES] = {0};
    memcpy(some, from, some_bytes(count, sizeof *from));
    return load_bf16(some);
}

ALWAYS_INLINE void store_halves(bf16 *to, halves values) { vst1_u16(to, values); }

ALWAYS_INLINE void store_some_bf16(bf16 *to, floats wide, int64_t count) {
    const halves values = narrowed(wide);
    if (count >= LANES) {
        store_halves(to, values);
    } else {
        memcpy(to, &values, some_bytes(count, sizeof *to));
    }
}

ALWAYS_INLINE floats load_f16(const uint16_t *from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

ALWAYS_INLINE uint16_t f16_of(float value) {
    const __fp16 half = value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

// --- Sums in float64.

typedef struct {
    float64x2_t low, high;
} doubles;

ALWAYS_INLINE doubles no_doubles(void) { return (doubles){vdupq_n_f64(0.0), vdupq_n_f64(0.0)}; }

ALWAYS_INLINE doubles add_to_doubles(doubles sums, floats values) {
    sums.low += vcvt_f64_f32(vget_low_f32(values));
    sums.high += vcvt_high_f64_f32(values);
    return sums;
}

ALWAYS_INLINE double sum_of_doubles(doubles sums) { return vaddvq_f64(sums.low + sums.high); }
