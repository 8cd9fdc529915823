// The matrix products of the backward kernel; see backward.cu.
#pragma once
#include "backward_elements.h"

// dP and beta dL of rows `q` by rows `k` (blocks of 16, q >= k), with their factors of the shift; on the diagonal also the
// diagonal of dP.
DEVICE void pairs(Shared& m, int q, int k, float shift, float scale) {
    float p[2][4] = {}, e[2][4] = {};
    const int lane = here(m).lane, r = lane >> 2, c = lane & 3;
    const bool own = q == k;
    const int at = left_at<V>(q, 0, lane), right = row_at<V>(16 * k + 2 * (lane & 7) + (lane >> 4), lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < V / 16; n++) {
        u32 a1[4], a2[4], b[4];
        load_matrices(a1, m.d_o + pairs_further(at, n));
        load_matrices(a2, m.e + pairs_further(at, n));
        load_matrices(b, m.u + pairs_further(right, n));
#pragma unroll
        for (int t = 0; t < 2; t++) {
            multiply_add(p[t], a1, b[2 * t], b[2 * t + 1]);
            multiply_add(e[t], a2, b[2 * t], b[2 * t + 1]);
        }
    }
    if (own && c == r >> 1)  // row 2 r + h meets itself in group h, column r
#pragma unroll
        for (int h = 0; h < 2; h++) m.diagonal[16 * q + 2 * r + h] = scale * (r & 1 ? p[h][2 * h + 1] : p[h][2 * h]);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float f[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int below = own ? 2 * r + h - (2 * (2 * c + i) + t) : 2 * r + h + 1;
                f[i] = below > 0 ? exp2_fast(-shift * (float)below) : 0.0f;
            }
            const int at = row_at<CHUNK>(16 * q + 2 * r + h, 2 * k + t) + 4 * c;
            const bool low = f[0] != 0.0f, high = f[1] != 0.0f;  // a select: what the mask hides may be anything
            *(u32*)(m.dp + at) = pack(low ? p[t][2 * h] * f[0] : 0.0f, high ? p[t][2 * h + 1] * f[1] : 0.0f);
            *(u32*)(m.eu + at) = pack(low ? e[t][2 * h] * f[0] : 0.0f, high ? e[t][2 * h + 1] * f[1] : 0.0f);
        }
}

// The part of beta's gradient that needs the values: sum_v E v of each row, by the threads of a row together; and what makes a
// gradient of beta, or of its logit, of beta times beta's. beta and v point at the chunk's first token.
DEVICE void strengths(
    Shared& m, const beta_type* beta, int beta_token, const bf16* v, int v_token, float beta_scale, int count
) {
    constexpr int TOGETHER = THREADS / CHUNK, PIECES = V / 8 / TOGETHER;
    const int thread = m.thread[threadIdx.x], row = thread / TOGETHER, first = thread % TOGETHER;
    float sum = 0.0f;
    if (row < count) {
        const bf16* const own = v + (i64)row * v_token + 8 * first;
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const uint4 a = *(const uint4*)(own + 8 * TOGETHER * n);
            const uint4 b = *(const uint4*)(m.e + row_at<V>(row, first + TOGETHER * n));
            const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(half_of(x[i >> 1], i & 1), half_of(y[i >> 1], i & 1), sum);
        }
    }
#pragma unroll
    for (int mask = 1; mask < TOGETHER; mask *= 2) sum += shuffle_xor(sum, mask);
    if (first || row >= count) return;
    const float x = beta_in(beta[(i64)row * beta_token]);
    const float strength = SIGMOID ? beta_scale * reciprocal(1.0f + exp2_fast(-LOG2E * x)) : x;
    m.written[row] = sum;
    m.strength[row] = SIGMOID ? 1.0f - strength / beta_scale : 1.0f / (fabsf(strength) < LEAST_BETA ? LEAST_BETA : strength);
}

// gamma sum_v S dS for the warp's 8 channels: every lane takes a value channel in 32, then the lanes' sums meet.
DEVICE void through(Shared& m) {
    const int lane = here(m).lane, warp = here(m).warp;
    float x[8] = {};
#pragma unroll
    for (int v = lane; v < V; v += 32) {
        const uint4 a = *(const uint4*)(m.s + state_at(v, warp)), b = *(const uint4*)(m.ds + state_at(v, warp));
        const u32 s[4] = {a.x, a.y, a.z, a.w}, d[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = fmaf(half_of(s[i >> 1], i & 1), half_of(d[i >> 1], i & 1), x[i]);
    }
    float four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = (lane & 16 ? x[4 + i] : x[i]) + shuffle_xor(lane & 16 ? x[i] : x[4 + i], 16);
#pragma unroll
    for (int i = 0; i < 2; i++) two[i] = (lane & 8 ? four[2 + i] : four[i]) + shuffle_xor(lane & 8 ? four[i] : four[2 + i], 8);
    float one = (lane & 4 ? two[1] : two[0]) + shuffle_xor(lane & 4 ? two[0] : two[1], 4);
    one = row_sum(one);
    const int channel = 8 * warp + (lane >> 2);
    if ((lane & 3) == 0)
        m.through[channel] = one * m.decay[0][channel] * m.decay[1][channel] * m.decay[2][channel] * m.decay[3][channel];
}

// Of d_q and of d_k where k reads, which hold what comes through the state: the pairs of rows in this chunk, from the
// earliest block of rows to their own. d_G: what comes through the state, times by how much q up and -k up are more than the
// operands.
DEVICE void reads(
    Shared& m, float (&d_q)[4][4], float (&d_k)[4][4], float (&d_G)[4][4], const Own& own, float scale, float shift
) {
    const Place p = here(m);
    const int at = left_at<CHUNK>(p.block, 0, p.lane), right = right_at(0, p.w, p.lane);
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 f = make_float2(1.0f, 1.0f);
#pragma unroll 1
        for (int i = 0; i < p.block; i++) {
            const float2 one = *(const float2*)&m.decay[i][p.channel(j)];
            f.x *= one.x;
            f.y *= one.y;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 q_up = *(const u32*)(m.q + own_at(p, h, j)), k_up = *(const u32*)(m.k + own_at(p, h, j));
            const float unstep = BOUNDED ? exp2_fast(-shift * (2 * p.r + 1 + h)) : 1.0f;
            const float of_q = scale * m.q_rstd[p.row + h], of_k = -m.k_rstd[p.row + h];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * h + e;
                const float up = own.up_at(j, i), q_more = fmaf(own.q_at(j, i) * of_q, up, -half_of(q_up, e));
                const float k_more = fmaf(own.k_at(j, i) * of_k, up, -half_of(k_up, e));
                d_q[j][i] *= unstep;
                d_k[j][i] *= unstep;
                d_G[j][i] = fmaf(d_q[j][i], q_more, d_k[j][i] * k_more) * (e ? f.y : f.x);
            }
        }
    }
#pragma unroll 1
    for (int i = 0; i < p.block; i++) {
        scale_columns(d_q, d_k, m.decay[i], p);
        load_matrices(a, m.dp + pairs_further(at, i));
        add_products(d_q, a, m.far + i * (32 * K), right);
        load_matrices(a, m.eu + pairs_further(at, i));
        add_products(d_k, a, m.far + i * (32 * K), right);
    }
    if (!BOUNDED) return;
    load_matrices(a, m.dp + pairs_further(at, p.block));
    add_products(d_q, a, m.near + p.block * (32 * K), right);
    load_matrices(a, m.eu + pairs_further(at, p.block));
    add_products(d_k, a, m.near + p.block * (32 * K), right);
}

// Of d_k where k writes, which holds what later chunks read of it: the sum of its products with k over the block's rows.
// d_G: gets these products less those with the operand for later blocks.
//
// No decay comes after the last row, of which dS has the whole product: in a gate that is nearly closed it would be added and taken
// away again where all other terms are lost in its rounding. Without a bound it is left out of both (`last`, here and in `writes`).
DEVICE void tail(Shared& m, const float (&d_key)[4][4], float (&d_G)[4][4], const Own& own, float shift, int last) {
    const Place p = here(m);
    float sum[4][2] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 f = make_float2(1.0f, 1.0f);
#pragma unroll 1
        for (int i = BLOCKS - 1; i > p.block; i--) {
            const float2 one = *(const float2*)&m.decay[i][p.channel(j)];
            f.x *= one.x;
            f.y *= one.y;
        }
        const float2 whole = *(const float2*)&m.decay[p.block][p.channel(j)];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float step = exp2_fast(shift * (2 * p.r + 1 + h)), of_k = m.k_rstd[p.row + h];
            const u32 far = *(const u32*)(m.far + own_at(p, h, j));
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * h + e;
                const float later = !BOUNDED && p.row + h == last ? 0.0f : d_key[j][i] * (e ? f.y : f.x);
                const float to = BOUNDED ? own.k_at(j, i) * of_k * reciprocal(own.up[j][i]) * (step * (e ? whole.y : whole.x))
                                         : own.k_at(j, i) * of_k * to_end(own, j, i, p.lane);
                sum[j][e] = fmaf(later, to, sum[j][e]);
                d_G[j][i] = fmaf(later, half_of(far, e) - to, d_G[j][i]);
            }
        }
    }
    const float one = column_sum(sum, p.lane);
    m.tail[p.block][column_of(p.w, p.lane)] = one;
}

// The pairs of rows in this chunk, from the last block of rows to their own. d_G: gets by how much k as an operand of later
// blocks, times what they read of it, is more than k as an operand of its own block times the same.
DEVICE void writes(Shared& m, float (&d_key)[4][4], float (&d_G)[4][4], const Own& own, float shift, int last) {
    const Place p = here(m);
    const int at = transposed_at(0, p.block, p.lane), right = right_at(0, p.w, p.lane);
    u32 a[4];
#pragma unroll 1
    for (int i = BLOCKS - 1; i > p.block; i--) {
        scale_columns(d_key, m.decay[i], p);
        load_matrices_transposed(a, m.dp + at + i * (32 * CHUNK));
        add_products(d_key, a, m.q + i * (32 * K), right);
        load_matrices_transposed(a, m.eu + at + i * (32 * CHUNK));
        add_products(d_key, a, m.k + i * (32 * K), right);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float step = exp2_fast(shift * (2 * p.r + 1 + h));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 f = *(const float2*)&m.decay[p.block][p.channel(j)];
            const u32 far = *(const u32*)(m.far + own_at(p, h, j)), near = BOUNDED ? *(const u32*)(m.near + own_at(p, h, j)) : 0u;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = 2 * h + e;
                if (!BOUNDED) {
                    if (p.row + h != last) d_G[j][i] = fmaf(-d_key[j][i], half_of(far, e), d_G[j][i]);
                    d_key[j][i] *= to_end(own, j, i, p.lane);
                    continue;
                }
                const float later = d_key[j][i], factor = step * (e ? f.y : f.x);
                d_G[j][i] = fmaf(-later, fmaf(-half_of(near, e), factor, half_of(far, e)), d_G[j][i]);
                d_key[j][i] = later * factor;
            }
        }
    }
    if (!BOUNDED) return;
    load_matrices_transposed(a, m.dp + at + p.block * (32 * CHUNK));
    add_products(d_key, a, m.q + p.block * (32 * K), right);
    load_matrices_transposed(a, m.eu + at + p.block * (32 * CHUNK));
    add_products(d_key, a, m.k + p.block * (32 * K), right);
}
