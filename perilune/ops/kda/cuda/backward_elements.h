// What the backward kernel does element by element before and after its products: decay factors, operands, L2 norm, gate.
#pragma once
#include "backward_shared.h"

// Log-decays and their factors `up`, and sums of squares. bias: the head's dt_bias.
DEVICE void factors(Shared& m, Own& own, const float* dt_bias, float rate, float lower_bound, float shift, int count) {
    const Place p = here(m);
    const float slope = BOUNDED ? -LOG2E * rate : LOG2E;
    float q_square[2] = {}, k_square[2] = {}, bound[2];  // 0 in rows that hold no token
#pragma unroll
    for (int h = 0; h < 2; h++) bound[h] = p.row + h < count ? (BOUNDED ? lower_bound * LOG2E : -rate) : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 bias = make_float2(0.0f, 0.0f);
        if (HAS_BIAS) bias = *(const float2*)(dt_bias + p.channel(j));
        const float offset[2] = {bias.x * slope, bias.y * slope};
        float decay[2][2], block_decay[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = own_at(p, h, j);
            own.q[h][j] = *(const u32*)(m.q + at);
            own.k[h][j] = *(const u32*)(m.k + at);
            const u32 z = *(const u32*)(m.g + at);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float a = half_of(own.q[h][j], e), b = half_of(own.k[h][j], e);
                q_square[h] = fmaf(a, a, q_square[h]);
                k_square[h] = fmaf(b, b, k_square[h]);
                const float x = fmaf(half_of(z, e), slope, offset[e]);
                if (BOUNDED) {
                    decay[h][e] = bound[h] * reciprocal(1.0f + exp2_fast(x));
                } else {
                    const float d = bound[h] * (fmaxf(x, 0.0f) + log2_fast(1.0f + exp2_fast(-fabsf(x))));
                    decay[h][e] = d < LEAST_LOG2 ? LEAST_LOG2 : d;
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float sum = decay[0][e] + decay[1][e];
            const float first = sum_before(sum, p.lane) + decay[0][e];
            own.up[j][e] = BOUNDED ? exp2_fast(first + shift * (2 * p.r + 1)) : first;
            own.up[j][2 + e] = BOUNDED ? exp2_fast(first + decay[1][e] + shift * (2 * p.r + 2)) : first + decay[1][e];
            block_decay[e] = exp2_fast(sum);
        }
        if (p.r == 7) *(float2*)&m.decay[p.block][p.channel(j)] = make_float2(block_decay[0], block_decay[1]);
    }
    if (L2)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float a = row_sum(q_square[h]), b = row_sum(k_square[h]);
            if (p.c == 0) {
                m.squares[0][p.row + h][p.w] = a;
                m.squares[1][p.row + h][p.w] = b;
            }
        }
}

// Without a bound: the factor from a row to its block's end, whose last row another thread of this warp has.
DEVICE float to_end(const Own& own, int j, int i, int lane) {
    return exp2_fast(shuffle(own.up[j][2 + (i & 1)], 28 | (lane & 3)) - own.up[j][i]);
}

// Norms, and q and k as operands: k / up and k to, and over the raw ones q up and -k up.
DEVICE void operands(Shared& m, const Own& own, float scale, float shift) {
    const Place p = here(m);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float step = exp2_fast(shift * (2 * p.r + 1 + h));
        const float q_rstd = L2 ? rsqrt_fast(total(m.squares[0][p.row + h]) + 1e-6f) : 1.0f;
        const float k_rstd = L2 ? rsqrt_fast(total(m.squares[1][p.row + h]) + 1e-6f) : 1.0f;
        if (p.c == 0 && p.w == 0) {
            m.q_rstd[p.row + h] = q_rstd;
            m.k_rstd[p.row + h] = k_rstd;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 f = *(const float2*)&m.decay[p.block][p.channel(j)];
            const int at = own_at(p, h, j), i = 2 * h;
            const float up[2] = {own.up_at(j, i), own.up_at(j, i + 1)};
            const float unit[2] = {own.k_at(j, i) * k_rstd, own.k_at(j, i + 1) * k_rstd};
            if (BOUNDED) {
                const float near[2] = {unit[0] * reciprocal(up[0]), unit[1] * reciprocal(up[1])};
                *(u32*)(m.near + at) = pack(near[0], near[1]);
                *(u32*)(m.far + at) = pack(near[0] * f.x * step, near[1] * f.y * step);
            } else {
                *(u32*)(m.far + at) = pack(unit[0] * to_end(own, j, i, p.lane), unit[1] * to_end(own, j, i + 1, p.lane));
            }
            *(u32*)(m.k + at) = pack(-unit[0] * up[0], -unit[1] * up[1]);
            const float of_q = scale * q_rstd;
            *(u32*)(m.q + at) = pack(own.q_at(j, i) * of_q * up[0], own.q_at(j, i + 1) * of_q * up[1]);
        }
    }
}

// Sums over rows of products of a gradient with its own vector.
DEVICE void put_along(float (&part)[CHUNK][WIDTH], const float (&along)[2], const Place& p) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = row_sum(along[h]);
        if (p.c == 0) part[p.row + h][p.w] = sum;
    }
}

// Through the L2 norm: x is the gradient of a normalised row times 1 / the norm, `raw` the row before.
DEVICE void through_norm(
    float (&x)[4][4], const u32 (&raw)[2][4], const float (&rstd)[CHUNK], const float (&along)[CHUNK][WIDTH], const Place& p
) {
    if (!L2) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = total(along[p.row + h]) * (rstd[p.row + h] * rstd[p.row + h]);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) x[j][2 * h + e] = fmaf(-half_of(raw[h][j], e), sum, x[j][2 * h + e]);
    }
}

// Through the gate. d_G: gradients of cumulative log-decays; becomes those of the logits. after: sums of it over the rows
// of the block after this thread's. dt_bias: the head's.
DEVICE void through_gate(
    Shared& m, float (&d_G)[4][4], float (&after)[4][2], const u32 (&logits)[2][4], const float* dt_bias, float rate,
    float lower_bound, int count, const Place& p
) {
    float d_rate = 0.0f, d_bias[4][2], slope[2];  // 0 in rows that hold no token
#pragma unroll
    for (int h = 0; h < 2; h++) slope[h] = p.row + h < count ? (BOUNDED ? lower_bound * rate : -rate) : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int channel = p.channel(j);
        const float2 state = *(const float2*)&m.through[channel];
        float later[2] = {state.x, state.y}, bias[2] = {};
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const float2 x = *(const float2*)&m.tail[i][channel];
            later[0] += x.x;
            later[1] += x.y;
        }
#pragma unroll 1
        for (int i = BLOCKS - 1; i > p.block; i--) {
            const float2 x = *(const float2*)&m.after[i][channel];
            later[0] += x.x;
            later[1] += x.y;
        }
        if (HAS_BIAS) {
            const float2 x = *(const float2*)(dt_bias + channel);
            bias[0] = x.x;
            bias[1] = x.y;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float c = BOUNDED ? -LOG2E * rate : LOG2E, offset = bias[e] * c;
            float sum = later[e] + after[j][e];
            d_bias[j][e] = 0.0f;
#pragma unroll
            for (int h = 1; h >= 0; h--) {
                const float z = half_of(logits[h][j], e), x = fmaf(z, c, offset);
                sum += d_G[j][2 * h + e];
                float d;
                if (BOUNDED) {
                    const float s = reciprocal(1.0f + exp2_fast(x));
                    d = sum * slope[h] * fmaf(-s, s, s);
                    d_rate = fmaf(d, z, d_rate);
                } else {  // where a step is cut off nothing moves it
                    const float softplus = fmaxf(x, 0.0f) + log2_fast(1.0f + exp2_fast(-fabsf(x)));
                    const float moved = slope[h] * softplus <= LEAST_LOG2 ? 0.0f : sum * slope[h];
                    d = moved * reciprocal(1.0f + exp2_fast(-x));
                    d_rate = fmaf(moved, softplus * (1.0f / LOG2E), d_rate);
                }
                d_G[j][2 * h + e] = d;
                d_bias[j][e] += d;
            }
            if (BOUNDED) d_rate = fmaf(d_bias[j][e], bias[e], d_rate);
        }
    }
    if (HAS_BIAS) {
        const float one = column_sum(d_bias, p.lane);
        m.bias[p.block][column_of(p.w, p.lane)] = one;
    }
    if (HAS_A) {
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) d_rate += shuffle_xor(d_rate, mask);
        if (p.lane == 0) m.rate[p.warp] = d_rate;
    }
}
