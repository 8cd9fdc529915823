// MXFP4 weights as `pack` lays them out, and their products with one row, by warps: codes become bfloat16 in registers.
//
// A step is 128 columns: 32 words of 16 bits a row, each with a code of each of four groups of 32 columns, and four scales.
// A warp multiplies 16 rows: lane (i, t) = (lane / 4, lane % 4) loads words 8 t .. 8 t + 7 of rows i and i + 8, 16 bytes each.
// These are left operands of tensor-core products of depth 16, two for each group, if the columns of a product are counted in
// that order. Of the eight columns on the right, 2 g holds the row's numbers of group g; so the lane with t = g ends with the
// sums of group g, and scales two numbers in float instead of all weights.
//
// A code's sign, exponent and mantissa bit are put into the sign, the last two exponent bits and the first mantissa bit of a
// bfloat16: its value times 2^-126. The row is multiplied by 2^64, so that no sum of products is subnormal; its numbers have to
// be below 2^63. Both sides of a matrix are multiples of 32, the blocks of the format.
#pragma once
#include "device.h"

constexpr int GROUP = 32, ROWS = 16, GROUPS = 4, STEP = 128;
constexpr u32 UP = 0x5F805F80u;     // 2^64, twice, for the row
constexpr int SCALE_SHIFT = 64;     // of a packed scale, s + 126 for 2^(s - 127): 2^(packed - SCALE_SHIFT - 127) undoes both factors
constexpr u32 NAN_SCALE = 255;

// What a lane loads of a step: its words and scales of two rows.
struct Words {
    uint4 words[2];
    u32 scales[2];
};

// Words of step `step` of an expert's matrix, codes [steps, rows, 32] and scales [steps, rows]; zeros if it is not `there`.
DEVICE Words load(const void* codes, const void* scales, int step, int rows, int first, bool there, int lane) {
    const int at = step * rows + first + (lane >> 2);
    Words w;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        w.words[h] = there ? load_once((const uint4*)codes + 4 * (i64)at + (lane & 3) + 32 * h) : make_uint4(0, 0, 0, 0);
        w.scales[h] = there ? ((const u32*)scales)[at + 8 * h] : 0;
    }
    return w;
}

// This lane's right operands of a step, 8 numbers of its group of a row of bfloat16; zeros beyond the row and in odd columns.
DEVICE uint4 load_columns(const bf16* row, int step, int columns, int lane) {
    const int at = STEP * step + GROUP * (lane >> 3) + 8 * (lane & 3);
    if ((lane & 4) || at >= columns) return make_uint4(0, 0, 0, 0);
    const uint4 x = *(const uint4*)(row + at);
    return make_uint4(multiply_pair(x.x, UP), multiply_pair(x.y, UP), multiply_pair(x.z, UP), multiply_pair(x.w, UP));
}

// Two words of a row: two codes of each group.
DEVICE void decode(u32 (&weights)[GROUPS], u32 words) {
    weights[0] = words & 0x81C081C0u;
    weights[1] = words << 3 & 0x81C081C0u;
    weights[2] = words << 6 & 0x81C081C0u;
    weights[3] = (words << 1 & 0x80008000u) | (words >> 5 & 0x01000100u) | (words >> 4 & 0x00C000C0u);
}
DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Rows i and i + 8 of a step's product, added to `totals`: in each lane the columns of group t.
DEVICE void multiply(float (&totals)[2], const Words& w, const uint4& x, int lane) {
    float d[GROUPS][4];
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int e = 0; e < 4; e++) d[g][e] = 0.0f;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        u32 a[4][GROUPS];  // rows i, i + 8 of the first eight columns of a product, then of the others
#pragma unroll
        for (int e = 0; e < 4; e++) decode(a[e], word(w.words[e & 1], 2 * m + (e >> 1)));
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const u32 left[4] = {a[0][g], a[1][g], a[2][g], a[3][g]};
            multiply_add(d[g], left, word(x, 2 * m), word(x, 2 * m + 1));
        }
    }
    const int t = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 scale = w.scales[h] >> 8 * t & 255;
        const float factor = from_bits(scale == NAN_SCALE ? 0x7FC00000u : (scale - SCALE_SHIFT) << 23);
        const float own = t == 0 ? d[0][2 * h] : t == 1 ? d[1][2 * h] : t == 2 ? d[2][2 * h] : d[3][2 * h];
        totals[h] = fmaf(factor, own, totals[h]);
    }
}

// The sum over the lanes of a row.
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}
