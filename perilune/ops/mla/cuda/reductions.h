// Least and largest numbers, and sums and maxima over the lanes that hold a row: the four of a product's result, or a whole warp.
#pragma once
#include "device.h"

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }

DEVICE float quad_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}
DEVICE float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
    return x;
}
