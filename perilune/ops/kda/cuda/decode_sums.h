// Sums over the lanes of a warp.
#pragma once
#include "device.h"

DEVICE float warp_total(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
    return x;
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
