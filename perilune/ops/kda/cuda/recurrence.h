// What a decode step and a verify step share: how a block of 8 warps holds a state [V, K], and the arithmetic of a token.
//
// Each warp owns V / 8 rows of S; K / 4 lanes share a row, four numbers each. The 2 M sums of a warp's rows are folded
// over the lanes together: each step halves the numbers that a lane still sums, so 31 exchanges do for 32 sums.
//
// Macros: KEY_DIM, VALUE_DIM (64 or 128), BOUNDED, LONG (64-bit slots).
#pragma once
#include "device.h"

constexpr int K = KEY_DIM, V = VALUE_DIM, THREADS = 256, WARPS = 8;
constexpr int ACROSS = K / 4;               // lanes of a row
constexpr int SIDE = 32 / ACROSS;           // rows that a warp holds side by side
constexpr int M = V / WARPS / SIDE;         // rows of a lane
constexpr int SPREAD = ACROSS / (2 * M);    // lanes that end with one and the same sum
constexpr int CHANNELS = 2 * K + V;         // of a head, behind the convolution
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

#if LONG
typedef i64 slot_type;
#else
typedef int slot_type;
#endif

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }

DEVICE float warp_total(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
    return x;
}

// The log-decay's exponential of one channel.
DEVICE float decay(float z, float rate, float lower_bound) {
    if (BOUNDED) return exp2_fast(LOG2E * lower_bound * sigmoid(rate * z));
    const float softplus = fmaxf(z, 0.0f) + LN2 * log2_fast(1.0f + exp2_fast(-LOG2E * fabsf(z)));
    return z == z ? exp2_fast(-LOG2E * rate * softplus) : z;  // fmaxf drops a NaN
}

// Sums over a row's lanes of COUNT numbers each; the lane's number `lane of the row / SPREAD` comes back in x[0]. A
// recursion, since of a loop the compiler would keep x in memory.
template <int HALF, int MASK, int COUNT> DEVICE void fold(float (&x)[COUNT], int lane) {
    if constexpr (HALF > 0) {
        const bool upper = lane & MASK;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const float keep = upper ? x[i + HALF] : x[i], give = upper ? x[i] : x[i + HALF];
            x[i] = keep + shuffle_xor(give, MASK);
        }
        fold<HALF / 2, MASK / 2>(x, lane);
    } else if constexpr (MASK > 0) {
        x[0] += shuffle_xor(x[0], MASK);
        fold<0, MASK / 2>(x, lane);
    }
}
