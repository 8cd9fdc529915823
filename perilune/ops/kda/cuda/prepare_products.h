// Step 3 of prepare.cu: products of rows and keys.
#pragma once
#include "prepare_layout.h"

// 16 rows against 32 keys. Column n of block b is key 8 (n / 2) + 2 b + n % 2, so that a thread holds, of rows i and
// i + 8, keys 8 t .. 8 t + 7 in the order [b][e]. `rows` is q or k, `row` this thread's first row, `keys` its first key.
// Rows are multiplied by powers of 2, given as pairs. By 1 too: a left operand is four registers that follow each other, in
// another order than the loads leave them, and the compiler would move them there anew for every product that reads it.
DEVICE void against_keys(float (&d)[4][4], const u8* rows, int row, int t, const float* keys, const u32 (&by)[2]) {
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) d[b][e] = 0.0f;
#pragma unroll 2
    for (int j = 0; j < GROUPS; j++) {
        const uint4 x = times(*(const uint4*)(rows + place(row, 4 * j + t)), by[0]);
        const uint4 y = times(*(const uint4*)(rows + place(row + 8, 4 * j + t)), by[1]);
        const u32 first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint4 key = *(const uint4*)(keys + 2 * b * SUM_STRIDE + 32 * j);
            multiply_add(d[b], first, key.x, key.y);
            multiply_add(d[b], second, key.z, key.w);
        }
    }
}
