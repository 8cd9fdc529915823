// Step 4 of prepare.cu: (I + L)^-1 of a unit lower triangle in blocks of 16, by four warps.
#pragma once
#include "prepare_layout.h"
#include "tf32_parts.h"

// A left operand, 16x16, in these two parts.
struct Split {
    u32 high[2][4], low[2][4];
};

// From a product's result x[b][]: rows i, i + 8, columns 4 t + 2 b and the next. The columns of a product's 8 are counted
// as t = 4 t + 2 b, t + 4 = 4 t + 2 b + 1.
DEVICE void split(Split& s, const float (&x)[2][4], u32 mask) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const float in_order[4] = {x[b][0], x[b][2], x[b][1], x[b][3]};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s.high[b][e] = high_part(in_order[e], mask);
            s.low[b][e] = low_part(in_order[e], s.high[b][e]);
        }
    }
}

// d += a M^T for a 16x16 block M in shared memory; `block` is this thread's first element.
DEVICE void times_transposed(float (&d)[2][4], const Split& a, const float* block, u32 mask) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const float4 m = *(const float4*)(block + 2 * b * L_STRIDE);
        const float v[4] = {m.x, m.y, m.z, m.w};
        u32 high[4], low[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            high[e] = high_part(v[e], mask);
            low[e] = low_part(v[e], high[e]);
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
            multiply_add_tf32(d[b], a.high[s], low[2 * s], low[2 * s + 1]);
            multiply_add_tf32(d[b], a.low[s], high[2 * s], high[2 * s + 1]);
            multiply_add_tf32(d[b], a.high[s], high[2 * s], high[2 * s + 1]);
        }
    }
}

// A warp inverts a diagonal block, a lane a column (twice over); the inverse takes the block's place.
DEVICE void invert_block(float* block, int lane) {
    const int column = lane & 15;
    float x[16];
#pragma unroll
    for (int r = 0; r < 16; r++) {
        float even = r == column ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
        for (int c = 0; c < r; c += 4) {
            const float4 v = *(const float4*)(block + r * L_STRIDE + c);
            even = fmaf(-v.x, x[c], even);
            if (c + 1 < r) odd = fmaf(-v.y, x[c + 1], odd);
            if (c + 2 < r) even = fmaf(-v.z, x[c + 2], even);
            if (c + 3 < r) odd = fmaf(-v.w, x[c + 3], odd);
        }
        x[r] = even + odd;
    }
    sync_warp();
    if (lane < 16)
#pragma unroll
        for (int r = 0; r < 16; r++) block[r * L_STRIDE + column] = x[r];
}

// A warp finds columns 16 own .. of the inverse X and stores them in A, once all diagonal blocks are inverted; `whole`: with
// the blocks above them.
// As y = X^T: a block of y holds rows i, i + 8 and columns 4 t + 2 b, + 1 of block r. With the inverted diagonal blocks D,
// X_rc = -D_r sum_n L_rn X_nc over blocks n from c to r - 1; each X_nc goes into all sums at once, which wait for nothing else.
DEVICE void store_columns(u8* memory, bf16* A, int own, int lane, bool whole, u32 mask) {
    const int i = lane >> 2, t = lane & 3;
    const float* const square = (const float*)(memory + ROWS);
    const float* const mine = square + (4 * (i >> 1) + (i & 1)) * L_STRIDE + 4 * t;
    bf16* const staged = (bf16*)(memory + STAGED) + 16 * own;
    const int n = lane & 7, b = lane >> 4, h = lane >> 3 & 1;
    bf16* const stored = staged + (4 * (n >> 1) + 2 * b + (n & 1)) * A_STRIDE + 8 * h;
    float sum[4][2][4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float y[2][4] = {};
        Split a;
        if (r == own) {
            const float* const block = square + 16 * r * (L_STRIDE + 1);
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) y[b][e] = block[(4 * t + 2 * b + e % 2) * L_STRIDE + i + 8 * (e / 2)];
        } else if (r > own) {
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[r][b][e] = -sum[r][b][e];
            split(a, sum[r], mask);
            times_transposed(y, a, mine + 16 * r * (L_STRIDE + 1), mask);
        }
        if (r >= own) {
            split(a, y, mask);
#pragma unroll
            for (int below = r + 1; below < 4; below++) times_transposed(sum[below], a, mine + 16 * below * L_STRIDE + 16 * r, mask);
        }
        u32 m[4];
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) m[2 * b + h] = pack(y[b][2 * h], y[b][2 * h + 1]);
        store_matrices_transposed(m, stored + 16 * r * A_STRIDE);
    }
    sync_warp();
    bf16* const A_out = A + 16 * own + 8 * (lane & 1);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int r = 16 * n + (lane >> 1);
        if (n < own && !whole) continue;
        store_once(A_out + r * CHUNK, *(const uint4*)(staged + r * A_STRIDE + 8 * (lane & 1)));
    }
}
