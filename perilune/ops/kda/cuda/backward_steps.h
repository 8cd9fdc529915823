// The steps of the backward kernel for one chunk and head; backward.cu calls them in turn, with barriers between.
#pragma once
#include "backward_tiles.h"

#if WIDE
typedef float qk_out;
#else
typedef bf16 qk_out;
#endif
#if BETA_FLOAT
typedef float beta_type;
DEVICE float beta_in(float x) { return x; }
DEVICE float beta_out(float x) { return x; }
#else
typedef bf16 beta_type;
DEVICE float beta_in(bf16 x) { return to_float(x); }
DEVICE bf16 beta_out(float x) { return to_bf16(x); }
#endif

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST_BETA = 1e-12f;  // a write strength of 0 is computed as this: the gradient divides by it
constexpr int ROWS_K = CHUNK * K * 2, ROWS_V = CHUNK * V * 2, STATE = V * K * 2, SQUARE = CHUNK * CHUNK * 2;

// A chunk of a head: its number, the head, its first token and how many it has, and the head's e^A_log.
struct Chunk {
    int program, head, start, count;
    float rate;
};

struct Shared {
    u8 q[ROWS_K], k[ROWS_K];  // raw, then q up and -k up
    u8 g[ROWS_K];
    u8 d_o[ROWS_V], e[ROWS_V], u[ROWS_V];
    u8 s[STATE], ds[STATE];
    u8 near[ROWS_K], far[ROWS_K];  // k / up and k to
    u8 dp[SQUARE], eu[SQUARE];
    float decay[BLOCKS][K];                // 2^(log-decay of a block of rows)
    float after[BLOCKS][K];                // sums over a block of dG
    float tail[BLOCKS][K];                 // of k times what reaches later chunks
    float bias[BLOCKS][K];                 // of dz
    float through[K];                      // gamma sum_v S dS
    float squares[2][CHUNK][WIDTH];        // |q|^2 and |k|^2 of a warp's channels
    float along[2][CHUNK][WIDTH];          // of q dq and k dk
    float q_rstd[CHUNK], k_rstd[CHUNK];    // 1 / |q| and 1 / |k|
    float diagonal[CHUNK];                 // of scale dP
    float rate[WARPS];                     // of e^A_log's gradient
    float dt_bias[2][K];                   // of this chunk's head and of the next one's, in turn
    Chunk next;
};

DEVICE float total(const float (&part)[WIDTH]) {
    float sum = part[0];
#pragma unroll
    for (int i = 1; i < WIDTH; i++) sum += part[i];
    return sum;
}

DEVICE void scale_columns(float (&x)[4][4], const float* factor, const Place& p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 f = *(const float2*)(factor + p.channel(j));
#pragma unroll
        for (int i = 0; i < 4; i++) x[j][i] *= i & 1 ? f.y : f.x;
    }
}
DEVICE void scale_columns(float (&x)[4][4], float (&y)[4][4], const float* factor, const Place& p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 f = *(const float2*)(factor + p.channel(j));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[j][i] *= i & 1 ? f.y : f.x;
            y[j][i] *= i & 1 ? f.y : f.x;
        }
    }
}

DEVICE void scale_rows(float (&x)[4][4], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[j][i] *= factor[i >> 1];
}

DEVICE float half_of(u32 two, int e) { return e ? high_half(two) : low_half(two); }

// What a thread keeps of its 2 rows and 8 channels, from the raw inputs to the gradients: q and k before the L2 norm. A
// gradient is multiplied by 1 / the norm at once, so that its product with the raw q or k is that of the normalised ones.
struct Own {
    u32 q[2][4], k[2][4];
    float up[4][4];
    // Forget what was unpacked: the compiler would keep those floats for the next step, in twice the registers.
    __device__ __forceinline__ void stay_packed() {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                q[h][j] = opaque(q[h][j]);
                k[h][j] = opaque(k[h][j]);
            }
    }
    __device__ __forceinline__ float q_at(int j, int i) const { return half_of(q[i >> 1][j], i & 1); }
    __device__ __forceinline__ float k_at(int j, int i) const { return half_of(k[i >> 1][j], i & 1); }
};

// dP and beta dL of rows `q` by rows `k` (blocks of 16, q >= k), with their factors of the shift; on the diagonal also the
// diagonal of dP and the gradient of beta.
DEVICE void pairs(
    Shared& m, int q, int k, float shift, float scale, float beta_scale, const beta_type* beta, int beta_token,
    beta_type* dbeta, int dbeta_token, int count
) {
    float p[2][4] = {}, e[2][4] = {};
    const int lane = here().lane, r = lane >> 2, c = lane & 3;
    const bool own = q == k, meets = own && c == r >> 1;  // row 2 r + h meets itself in group h, column r
    float x[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (meets && 16 * q + 2 * r + h < count) x[h] = beta_in(beta[(i64)(16 * q + 2 * r + h) * beta_token]);
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
    if (meets) {
        const bool odd = r & 1;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * q + 2 * r + h;
            m.diagonal[row] = scale * (odd ? p[h][2 * h + 1] : p[h][2 * h]);
            if (row >= count) continue;
            const float strength = SIGMOID ? beta_scale * reciprocal(1.0f + exp2_fast(-LOG2E * x[h])) : x[h];
            const float divisor = fabsf(strength) < LEAST_BETA ? LEAST_BETA : strength;
            const float d = (odd ? e[h][2 * h + 1] : e[h][2 * h]) / divisor;
            dbeta[(i64)row * dbeta_token] = beta_out(SIGMOID ? d * (1.0f - divisor / beta_scale) : d / divisor);
        }
    }
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

// gamma sum_v S dS for the warp's 8 channels: every lane takes a value channel in 32, then the lanes' sums meet.
DEVICE void through(Shared& m) {
    const int lane = here().lane, warp = here().warp;
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

// Log-decays and their factors `up`, and sums of squares. bias: the head's dt_bias.
DEVICE void factors(Shared& m, Own& own, const float* dt_bias, float rate, float lower_bound, float shift, int count) {
    const Place p = here();
    const float slope = -LOG2E * rate;
    float q_square[2] = {}, k_square[2] = {}, bound[2];  // 0 in rows that hold no token
#pragma unroll
    for (int h = 0; h < 2; h++) bound[h] = p.row + h < count ? lower_bound * LOG2E : 0.0f;
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
                decay[h][e] = bound[h] * reciprocal(1.0f + exp2_fast(fmaf(half_of(z, e), slope, offset[e])));
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float sum = decay[0][e] + decay[1][e];
            const float first = sum_before(sum, p.lane) + decay[0][e];
            own.up[j][e] = exp2_fast(first + shift * (2 * p.r + 1));
            own.up[j][2 + e] = exp2_fast(first + decay[1][e] + shift * (2 * p.r + 2));
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

// Norms, and q and k as operands: k / up and k to, and over the raw ones q up and -k up.
DEVICE void operands(Shared& m, const Own& own, float scale, float shift) {
    const Place p = here();
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
            const float up[2] = {own.up[j][i], own.up[j][i + 1]};
            const float unit[2] = {own.k_at(j, i) * k_rstd, own.k_at(j, i + 1) * k_rstd};
            const float near[2] = {unit[0] * reciprocal(up[0]), unit[1] * reciprocal(up[1])};
            *(u32*)(m.near + at) = pack(near[0], near[1]);
            *(u32*)(m.far + at) = pack(near[0] * f.x * step, near[1] * f.y * step);
            *(u32*)(m.k + at) = pack(-unit[0] * up[0], -unit[1] * up[1]);
            const float of_q = scale * q_rstd;
            *(u32*)(m.q + at) = pack(own.q_at(j, i) * of_q * up[0], own.q_at(j, i + 1) * of_q * up[1]);
        }
    }
}

// Of d_q and of d_k where k reads, which hold what comes through the state: the pairs of rows in this chunk, from the
// earliest block of rows to their own.
DEVICE void reads(Shared& m, float (&d_q)[4][4], float (&d_k)[4][4], float shift) {
    const Place p = here();
    const float unstep[2] = {exp2_fast(-shift * (2 * p.r + 1)), exp2_fast(-shift * (2 * p.r + 2))};
    const int at = left_at<CHUNK>(p.block, 0, p.lane), right = right_at(0, p.w, p.lane);
    u32 a[4];
    scale_rows(d_q, unstep);
    scale_rows(d_k, unstep);
#pragma unroll 1
    for (int i = 0; i < p.block; i++) {
        scale_columns(d_q, d_k, m.decay[i], p);
        load_matrices(a, m.dp + pairs_further(at, i));
        add_products(d_q, a, m.far + i * (32 * K), right);
        load_matrices(a, m.eu + pairs_further(at, i));
        add_products(d_k, a, m.far + i * (32 * K), right);
    }
    load_matrices(a, m.dp + pairs_further(at, p.block));
    add_products(d_q, a, m.near + p.block * (32 * K), right);
    load_matrices(a, m.eu + pairs_further(at, p.block));
    add_products(d_k, a, m.near + p.block * (32 * K), right);
}

// Of d_k where k writes, which holds what later chunks read of it: the sum of its products with k over the block's rows.
DEVICE void tail(Shared& m, const float (&d_key)[4][4], const Own& own, const float (&down)[4][4], float shift) {
    const Place p = here();
    float rows[2];
#pragma unroll
    for (int h = 0; h < 2; h++) rows[h] = m.k_rstd[p.row + h] * exp2_fast(shift * (2 * p.r + 1 + h));
    float sum[4][2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 f = make_float2(1.0f, 1.0f);
#pragma unroll 1
        for (int i = BLOCKS - 1; i >= p.block; i--) {
            const float2 one = *(const float2*)&m.decay[i][p.channel(j)];
            f.x *= one.x;
            f.y *= one.y;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float factor = e ? f.y : f.x;  // before 1 / up: the product of the other two may pass the range
            const float a = d_key[j][e] * rows[0] * factor * down[j][e];
            const float b = d_key[j][2 + e] * rows[1] * factor * down[j][2 + e];
            sum[j][e] = fmaf(a, own.k_at(j, e), b * own.k_at(j, 2 + e));
        }
    }
    const float one = column_sum(sum, p.lane);
    m.tail[p.block][column_of(p.w, p.lane)] = one;
}

// The pairs of rows in this chunk, from the last block of rows to their own.
DEVICE void writes(Shared& m, float (&d_key)[4][4], float shift) {
    const Place p = here();
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
    const float step[2] = {exp2_fast(shift * (2 * p.r + 1)), exp2_fast(shift * (2 * p.r + 2))};
    scale_rows(d_key, step);
    scale_columns(d_key, m.decay[p.block], p);
    load_matrices_transposed(a, m.dp + at + p.block * (32 * CHUNK));
    add_products(d_key, a, m.q + p.block * (32 * K), right);
    load_matrices_transposed(a, m.eu + at + p.block * (32 * CHUNK));
    add_products(d_key, a, m.k + p.block * (32 * K), right);
}

// Sums over rows of products of a gradient with its own vector, for the L2 norm.
DEVICE void put_along(float (&part)[CHUNK][WIDTH], const float (&along)[2], const Place& p) {
    if (!L2) return;
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
    for (int h = 0; h < 2; h++) slope[h] = p.row + h < count ? lower_bound * rate : 0.0f;
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
            const float c = -LOG2E * rate, offset = bias[e] * c;
            float sum = later[e] + after[j][e];
            d_bias[j][e] = 0.0f;
#pragma unroll
            for (int h = 1; h >= 0; h--) {
                const float x = half_of(logits[h][j], e), s = reciprocal(1.0f + exp2_fast(fmaf(x, c, offset)));
                sum += d_G[j][2 * h + e];
                const float d = sum * slope[h] * fmaf(-s, s, s);
                d_G[j][2 * h + e] = d;
                d_rate = fmaf(d, x, d_rate);
                d_bias[j][e] += d;
            }
            d_rate = fmaf(d_bias[j][e], bias[e], d_rate);
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
