/* MX block formats: rounding to the grid, encoding to codes and E8M0 scales, decoding.
 *
 * A block is 32 neighbours of a row, of which the last may be cut short (as if padded with zeros). Its scale is a power of
 * two, stored as its exponent plus 127; a block that holds NaN or infinity gets the byte 255 and decodes to NaN. Everything
 * is exact arithmetic on float bits: scaling by powers of two, and one rounding, half to even, by adding and subtracting
 * 1.5 * 2^23 grid steps.
 */
#ifndef T

#include "math.h"

#define BLOCK 32
#define TASK_BLOCKS 128 /* blocks that one task handles: 16 KB of float */
#define NAN_SCALE 255u
#define INFINITE 0x7f800000u

/* An element format: bits of mantissa, exponents of its least and its greatest normal value, its greatest value. */
typedef struct {
    int mantissa, least, most;
    float top;
} Element;

static const Element E2M1 = {1, 0, 2, 6.0f};
static const Element E4M3 = {3, -6, 8, 448.0f};

PL_INLINE float power_of_two(int exponent) { return pl_from_bits((uint32_t)(exponent + 127) << 23); }

PL_INLINE float scale_value(uint32_t byte) { return pl_from_bits(byte ? byte << 23 : 1u << 22); }

/* The scale's byte of a block of absolute values. `carry` is added to the mantissa of the largest one before it is cut off:
 * that is the whole difference between the scale rules. A scale is kept small enough for the top of the grid to be a float. */
PL_INLINE uint32_t block_scale(const float *restrict a, Element e, uint32_t carry) {
    int32_t top = 0;
#pragma omp simd reduction(max : top)
    for (int i = 0; i < BLOCK; i++) {
        int32_t bits = (int32_t)pl_bits(a[i]);
        top = bits > top ? bits : top;
    }
    if ((uint32_t)top >= INFINITE) return NAN_SCALE;
    int byte = (int)(((uint32_t)top + carry) >> 23) - e.most;
    byte = byte < 0 ? 0 : byte;
    return (uint32_t)(byte > 254 - e.most ? 254 - e.most : byte);
}

/* a := the nearest grid values of a / scale, for absolute values. */
PL_INLINE void block_round(float *restrict a, Element e, uint32_t byte) {
    float inverse = power_of_two(127 - (int)byte);
    int32_t least = (int32_t)pl_bits(power_of_two(e.least));
    float steps = 1.5f * power_of_two(23 - e.mantissa);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        float v = a[i] * inverse;
        int32_t binade = (int32_t)(pl_bits(v) & INFINITE);
        binade = binade > least ? binade : least;
        float magic = pl_from_bits((uint32_t)binade) * steps;
        float sum = v + magic;
        float q = sum - magic;
        a[i] = q > e.top ? e.top : q;
    }
}

/* The code, without sign, of a value on the grid. */
PL_INLINE uint32_t grid_code(float q, Element e) {
    uint32_t normal = (pl_bits(q) >> (23 - e.mantissa)) - ((uint32_t)(126 + e.least) << e.mantissa);
    uint32_t below = (uint32_t)(int32_t)(q * power_of_two(e.mantissa - e.least));
    return q < power_of_two(e.least) ? below : normal;
}

/* The value of a code without sign. */
PL_INLINE float grid_value(uint32_t code, Element e) {
    float normal = pl_from_bits((code << (23 - e.mantissa)) + ((uint32_t)(126 + e.least) << 23));
    float below = (float)(int32_t)code * power_of_two(e.least - e.mantissa);
    return code < (1u << e.mantissa) ? below : normal;
}

#define SELF "mx.c"
#include "typed.h"

#else

/* Absolute values of a block, zeros after its n elements. */
PL_INLINE void NAME(block_load)(const T *restrict x, int64_t n, float *restrict a) {
    if (n >= BLOCK) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) a[i] = pl_absf(LOAD(x[i]));
    } else {
        for (int i = 0; i < BLOCK; i++) a[i] = i < n ? pl_absf(LOAD(x[i])) : 0.0f;
    }
}

/* STORE for values whose NaNs have a clear low half, as all here: bf16 needs no test for them. */
PL_INLINE T NAME(quick_store)(float v) {
    if (sizeof(T) == 4) return (T)v;
    return (T)((pl_bits(v) + 0x7fffu + ((pl_bits(v) >> 16) & 1u)) >> 16);
}

PL_INLINE T NAME(signed_as)(float magnitude, T x) {
    return NAME(quick_store)(pl_from_bits(pl_bits(magnitude) | (pl_bits(LOAD(x)) & 0x80000000u)));
}

PL_INLINE void NAME(round_block)(const T *restrict x, T *restrict y, int64_t n, Element e, uint32_t carry) {
    float a[BLOCK];
    NAME(block_load)(x, n, a);
    uint32_t byte = block_scale(a, e, carry);
    if (byte == NAN_SCALE) {
        for (int64_t i = 0; i < n && i < BLOCK; i++) y[i] = STORE(__builtin_nanf(""));
        return;
    }
    block_round(a, e, byte);
    float scale = scale_value(byte);
    if (n >= BLOCK) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) y[i] = NAME(signed_as)(a[i] * scale, x[i]);
    } else {
        for (int i = 0; i < n; i++) y[i] = NAME(signed_as)(a[i] * scale, x[i]);
    }
}

PL_INLINE void NAME(encode_block)(const T *restrict x, uint8_t *restrict codes, uint8_t *restrict scale, Element e,
                                  uint32_t carry) {
    float a[BLOCK];
    uint32_t code[BLOCK];
    NAME(block_load)(x, BLOCK, a);
    uint32_t byte = block_scale(a, e, carry);
    *scale = (uint8_t)byte;
    if (byte == NAN_SCALE) {
        memset(codes, 0, e.mantissa == 1 ? BLOCK / 2 : BLOCK);
        return;
    }
    block_round(a, e, byte);
    int sign = e.mantissa == 1 ? 3 : 7;
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) code[i] = grid_code(a[i], e) | (pl_bits(LOAD(x[i])) >> 31) << sign;
    if (e.mantissa == 1) {
        uint64_t pair[BLOCK / 2]; /* even column in the low half: little-endian, like every CPU that torch runs on */
        uint32_t byte_of[BLOCK / 2];
        memcpy(pair, code, sizeof pair);
#pragma omp simd
        for (int i = 0; i < BLOCK / 2; i++) byte_of[i] = (uint32_t)(pair[i] | pair[i] >> 28);
#pragma omp simd
        for (int i = 0; i < BLOCK / 2; i++) codes[i] = (uint8_t)byte_of[i];
    } else {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) codes[i] = (uint8_t)code[i];
    }
}

/* pairs: the two values of each byte. */
PL_INLINE void NAME(decode_nibbles)(const uint8_t *restrict codes, uint32_t byte, T *restrict y, float pairs[256][2]) {
    float v[BLOCK], scale = byte == NAN_SCALE ? __builtin_nanf("") : scale_value(byte);
    for (int i = 0; i < BLOCK / 2; i++) memcpy(v + 2 * i, pairs[codes[i]], sizeof *pairs);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) y[i] = NAME(quick_store)(v[i] * scale);
}

PL_INLINE void NAME(decode_bytes)(const uint8_t *restrict codes, uint32_t byte, T *restrict y) {
    float scale = byte == NAN_SCALE ? __builtin_nanf("") : scale_value(byte);
    uint32_t code[BLOCK];
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) code[i] = codes[i];
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        uint32_t magnitude = code[i] & 127u;
        float v = magnitude == 127u ? __builtin_nanf("") : grid_value(magnitude, E4M3);
        y[i] = NAME(quick_store)(pl_from_bits(pl_bits(v * scale) | (code[i] & 128u) << 24));
    }
}

#define EACH_BLOCK(call)                                                                                          \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1) schedule(static)") for (int64_t task = 0;       \
                                                                                            task < rows * tasks;   \
                                                                                            task++) {              \
        int64_t row = task / tasks, first = task % tasks * TASK_BLOCKS;                                            \
        int64_t last = first + TASK_BLOCKS < blocks ? first + TASK_BLOCKS : blocks;                                \
        for (int64_t b = first; b < last; b++) call;                                                               \
    }

/* y = x rounded to the format of `bits` (4: E2M1, 8: E4M3) and its scales. */
EXPORT void NAME(mx_round)(const T *x, int64_t stride, T *y, int64_t rows, int64_t D, int bits, int carry, int threads) {
    int64_t blocks = (D + BLOCK - 1) / BLOCK, tasks = (blocks + TASK_BLOCKS - 1) / TASK_BLOCKS;
    if (bits == 4) {
        EACH_BLOCK(NAME(round_block)(x + row * stride + b * BLOCK, y + row * D + b * BLOCK, D - b * BLOCK, E2M1, carry))
    } else {
        EACH_BLOCK(NAME(round_block)(x + row * stride + b * BLOCK, y + row * D + b * BLOCK, D - b * BLOCK, E4M3, carry))
    }
}

/* codes [rows, D * bits / 8], low nibble first; scale [rows, D / 32]. D is a multiple of 32. */
EXPORT void NAME(mx_encode)(const T *x, int64_t stride, uint8_t *codes, uint8_t *scale, int64_t rows, int64_t D, int bits,
                            int carry, int threads) {
    int64_t blocks = D / BLOCK, tasks = (blocks + TASK_BLOCKS - 1) / TASK_BLOCKS;
    if (bits == 4) {
        EACH_BLOCK(NAME(encode_block)(x + row * stride + b * BLOCK, codes + (row * D + b * BLOCK) / 2,
                                      scale + row * blocks + b, E2M1, carry))
    } else {
        EACH_BLOCK(NAME(encode_block)(x + row * stride + b * BLOCK, codes + row * D + b * BLOCK,
                                      scale + row * blocks + b, E4M3, carry))
    }
}

EXPORT void NAME(mx_decode)(const uint8_t *codes, int64_t code_stride, const uint8_t *scale, int64_t scale_stride, T *y,
                            int64_t rows, int64_t D, int bits, int threads) {
    int64_t blocks = D / BLOCK, tasks = (blocks + TASK_BLOCKS - 1) / TASK_BLOCKS;
    if (bits == 4) {
        float pairs[256][2];
        for (uint32_t i = 0; i < 512; i++) {
            uint32_t code = i % 2 ? i / 2 >> 4 : i / 2 & 15u;
            pairs[i / 2][i % 2] = pl_from_bits(pl_bits(grid_value(code & 7u, E2M1)) | (code & 8u) << 28);
        }
        EACH_BLOCK(NAME(decode_nibbles)(codes + row * code_stride + b * BLOCK / 2, scale[row * scale_stride + b],
                                        y + row * D + b * BLOCK, pairs))
    } else {
        EACH_BLOCK(NAME(decode_bytes)(codes + row * code_stride + b * BLOCK, scale[row * scale_stride + b],
                                      y + row * D + b * BLOCK))
    }
}
#undef EACH_BLOCK

#endif
