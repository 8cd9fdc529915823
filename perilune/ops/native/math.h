/* Element-wise functions that a C99 compiler can vectorise: no calls, no branches, no tables.
 *
 * Accuracy against the exact function, relative, over the whole range: exp, sigmoid, tanh, softplus <= 3e-7 (a few units
 * in the last place). NaN in, NaN out; overflow gives inf, underflow gives denormals and then 0, never a trap.
 * Names start with pl_. Include with quotes; the system's <math.h> is a different file.
 */
#ifndef PERILUNE_MATH_H
#define PERILUNE_MATH_H

#include <stdint.h>
#include <string.h>

#define PL_INLINE static inline __attribute__((always_inline))

PL_INLINE uint32_t pl_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

PL_INLINE float pl_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

PL_INLINE float pl_absf(float x) { return pl_from_bits(pl_bits(x) & 0x7fffffffu); }

/* e^x. x = n ln2 + r with |r| <= ln2/2; e^r = 1 + r + r^2 Q(r), Q fitted at Chebyshev nodes (relative error 1e-8 of e^r).
 * 2^n is applied as two factors so that n = 128 and the denormal range need no special case. */
PL_INLINE float pl_expf(float x) {
    x = x > 89.0f ? 89.0f : x; /* a comparison with NaN is false: NaN passes both clamps */
    x = x < -104.0f ? -104.0f : x;
    const float rounding = 12582912.0f; /* 1.5 * 2^23: adding it leaves round(x / ln2) in the low mantissa bits */
    float shifted = x * 1.44269504088896f + rounding;
    uint32_t n = pl_bits(shifted) - pl_bits(rounding);
    float whole = shifted - rounding;
    float r = x - whole * 0.693359375f; /* ln2 in two parts; the first has few bits, so the product is exact */
    r = r - whole * -2.12194440054690581e-4f;
    float q = 1.393364352e-3f;
    q = q * r + 8.363175565e-3f;
    q = q * r + 4.166646498e-2f;
    q = q * r + 1.666657700e-1f;
    q = q * r + 0.5f;
    float y = (r * r) * q + r;
    y = y + 1.0f;
    uint32_t half = (uint32_t)((int32_t)n >> 1);
    return y * pl_from_bits((half + 127u) << 23) * pl_from_bits((n - half + 127u) << 23);
}

/* 1 / (1 + e^-x), relatively accurate in both tails. */
PL_INLINE float pl_sigmoidf(float x) {
    float e = pl_expf(-pl_absf(x));
    float s = 1.0f / (1.0f + e);
    return x < 0.0f ? e * s : s;
}

/* tanh x: an odd polynomial below 0.625, where 1 - e^-2x would cancel, and (1 - t) / (1 + t), t = e^-2|x|, above. */
PL_INLINE float pl_tanhf(float x) {
    float a = pl_absf(x);
    float t = pl_expf(-2.0f * a);
    float far = (1.0f - t) / (1.0f + t);
    far = x < 0.0f ? -far : far;
    float z = x * x;
    float p = 2.295841471e-3f;
    p = p * z - 8.346980719e-3f;
    p = p * z + 2.176996101e-2f;
    p = p * z - 5.395940592e-2f;
    p = p * z + 1.333330428e-1f;
    p = p * z - 3.333333318e-1f;
    float near = x + x * (z * p);
    return a < 0.625f ? near : far;
}

/* log(1 + e) for 0 <= e <= 1: 2 atanh(s), s = e / (2 + e) <= 1/3. */
PL_INLINE float pl_log1p_unit(float e) {
    float s = e / (2.0f + e);
    float z = s * s;
    float p = 1.220504673e-1f;
    p = p * z + 1.069702771e-1f;
    p = p * z + 1.431032357e-1f;
    p = p * z + 1.999934682e-1f;
    p = p * z + 3.333333964e-1f;
    return 2.0f * (s + s * (z * p));
}

/* log(1 + e^x) without overflow; its derivative is the sigmoid. */
PL_INLINE float pl_softplusf(float x) {
    float tail = pl_log1p_unit(pl_expf(-pl_absf(x)));
    return x > 0.0f ? x + tail : (x != x ? x : tail);
}

/* 1 / sqrt(x), correctly rounded root and division: __builtin_sqrtf is one instruction with -fno-math-errno. */
PL_INLINE float pl_rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }

PL_INLINE float pl_from_bf16(uint16_t x) { return pl_from_bits((uint32_t)x << 16); }

/* Round to nearest, ties to even; NaN stays NaN (the bias could otherwise carry it into infinity). */
PL_INLINE uint16_t pl_to_bf16(float x) {
    uint32_t bits = pl_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

#endif
