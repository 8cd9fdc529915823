// Pairs of rows in one block of 16 where the decay has no bound: by halves of 8, 4, 2 and 1 rows, as in prepare_unbounded.h. In
// each of these four steps a row either reads or is read, and its factor, counted from or up to the last row before the
// second half, is at most 1 and the same for q and k. Operands go through the warp's own part of `near`.
//
// By 16 of the warp's 32 channels at a time, `side` 0 and 1: factors and products of all would not stay in registers.
#pragma once
#include "backward_products.h"

// Factors of the step with halves of 2^level rows, of channels 8 (2 side + j) + 2 c + e.
DEVICE void half_factors(float (&f)[2][4], const Own& own, int level, int side, const Place& p) {
    const int size = 1 << level, from = 4 * ((p.r & ~(size - 1)) + size / 2 - 1) + p.c;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float (&up)[4] = own.up[2 * side + j];
            const float other = shuffle(up[2 + e], level ? from : p.lane), anchor = level ? other : up[e];
            f[j][e] = exp2_fast(-fabsf(up[e] - anchor));
            f[j][2 + e] = exp2_fast(-fabsf(up[2 + e] - anchor));
        }
}

// q or k times these factors as an operand, in words as `own_at` has them.
DEVICE void put_operand(Shared& m, const u32 (&raw)[2][4], const float (&f)[2][4], const float (&norm)[2], int side, const Place& p) {
    sync_warp();
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 two = raw[h][2 * side + j];
            *(u32*)(m.near + own_at(p, h, 2 * side + j)) =
                pack(low_half(two) * (norm[h] * f[j][2 * h]), high_half(two) * (norm[h] * f[j][2 * h + 1]));
        }
    sync_warp();
}
DEVICE float rounded(const u32 (&raw)[2][4], const float (&f)[2][4], const float (&norm)[2], int side, int j, int i) {
    return to_float(to_bf16(half_of(raw[i >> 1][2 * side + j], i & 1) * (norm[i >> 1] * f[j][i])));
}

// value += a 16x16 operand times the warp's operand in `near`; `right` as from `right_at`.
DEVICE void add_side(float (&value)[2][4], const u32 (&a)[4], const Shared& m, int right, int side, const Place& p) {
    u32 b[4];
    load_matrices_transposed(b, m.near + p.block * (32 * K) + pairs_further(right, side));
    multiply_add(value[0], a, b[0], b[1]);
    multiply_add(value[1], a, b[2], b[3]);
}

// Of a left operand of pairs in a block those whose rows first differ in bit `level`.
DEVICE void only_level(u32 (&a)[4], int level, const Place& p) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int mine = 2 * p.r + (n & 1);
        u32 mask = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if ((mine ^ (2 * (2 * p.c + i) + (n >> 1))) >> level == 1) mask |= i ? 0xffff0000u : 0x0000ffffu;
        a[n] &= mask;
    }
}

// d_q and d_k where rows read: gradients that have their factors already.
DEVICE void reads_inside(
    Shared& m, float (&d_q)[4][4], float (&d_k)[4][4], float (&d_G)[4][4], float (&corrected)[2], const Own& own, float scale
) {
    const Place p = here(m);
    const int at = pairs_further(left_at<CHUNK>(p.block, 0, p.lane), p.block), right = right_at(0, p.w, p.lane);
    const float q_norm[2] = {scale * m.q_rstd[p.row], scale * m.q_rstd[p.row + 1]}, k_norm[2] = {m.k_rstd[p.row], m.k_rstd[p.row + 1]};
#pragma unroll 1
    for (int level = 3; level >= 0; level--) {
        u32 of_q[4], of_k[4];
        load_matrices(of_q, m.dp + at);
        only_level(of_q, level, p);
        load_matrices(of_k, m.eu + at);
        only_level(of_k, level, p);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            float f[2][4], read[2][4] = {};
            half_factors(f, own, level, side, p);
            put_operand(m, own.k, f, k_norm, side, p);
            add_side(read, of_q, m, right, side, p);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int n = 2 * side + j;
                    d_q[n][i] = fmaf(read[j][i], f[j][i], d_q[n][i]);
                    d_G[n][i] = fmaf(read[j][i], rounded(own.q, f, q_norm, side, j, i), d_G[n][i]);
                    read[j][i] = 0.0f;
                }
            add_side(read, of_k, m, right, side, p);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int n = 2 * side + j;
                    const float of_query = -read[j][i] * rounded(own.k, f, k_norm, side, j, i);
                    d_k[n][i] = fmaf(read[j][i], f[j][i], d_k[n][i]);
                    d_G[n][i] += of_query;
                    corrected[i >> 1] += of_query;
                }
        }
    }
}

// d_key where rows are read, likewise.
DEVICE void writes_inside(Shared& m, float (&d_key)[4][4], float (&d_G)[4][4], const Own& own, float scale) {
    const Place p = here(m);
    const int at = transposed_at(0, p.block, p.lane) + p.block * (32 * CHUNK), right = right_at(0, p.w, p.lane);
    const float q_norm[2] = {scale * m.q_rstd[p.row], scale * m.q_rstd[p.row + 1]}, k_norm[2] = {m.k_rstd[p.row], m.k_rstd[p.row + 1]};
#pragma unroll 1
    for (int level = 3; level >= 0; level--) {
        u32 of_q[4], of_k[4];
        load_matrices_transposed(of_q, m.dp + at);
        only_level(of_q, level, p);
        load_matrices_transposed(of_k, m.eu + at);
        only_level(of_k, level, p);
#pragma unroll
        for (int n = 0; n < 4; n++) of_k[n] ^= 0x80008000u;
#pragma unroll
        for (int side = 0; side < 2; side++) {
            float f[2][4], written[2][4] = {};
            half_factors(f, own, level, side, p);
            put_operand(m, own.q, f, q_norm, side, p);
            add_side(written, of_q, m, right, side, p);
            put_operand(m, own.k, f, k_norm, side, p);
            add_side(written, of_k, m, right, side, p);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int n = 2 * side + j;
                    d_key[n][i] = fmaf(written[j][i], f[j][i], d_key[n][i]);
                    d_G[n][i] = fmaf(-written[j][i], rounded(own.k, f, k_norm, side, j, i), d_G[n][i]);
                }
        }
    }
}
