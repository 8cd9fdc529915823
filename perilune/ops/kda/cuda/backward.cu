// The parallel part of KDA's backward pass for the bounded gate: every gradient of a chunk, once the serial part has left
// E = beta dR and dS. Formulas: ops/kda/triton/backward.py. Bounds of this form:
//
// Within a block of 16 rows, with run = the log-decay from the block's first row on (base 2, this row included) and step =
// half the gate's bound times the row's number in the block, up = 2^(run + step) lies within 2^+-58. Pairs of rows in one
// block take (q up)(k / up) and a factor 2^(step_c - step_r) of dP; a pair of rows in two blocks takes (q up 2^-step_r)
// and k to, to = 2^(run to the block's end) <= 1, and a factor F = 2^(a block's log-decay) for every block between. These
// factors are applied to the sum of products on its way from block to block (Horner), so that no factor leaves 2^+-58
// and gradients of any size from 1e-20 to 1e20 keep their precision. Anchors are rows of the past only. (traps T01)
//
//     d_q   = scale up (2^-step (((dO S F_0 + dP_0 k to) F_1 + dP_1 k to) ...) + dP_own k / up)
//     d_query the same of beta dL and -E S;  d_key of a block = 1 / up (2^step F (((U dS F_3 + ...) F_2 + ...)) + own pairs)
//     dG    = q d_q + k (d_query - d_key);  dg = its sum from the chunk's end + sum U dS k + gamma sum S dS
//
// One block of threads goes through chunks and heads with the stride of the grid. Each of its warps owns 16 rows by 32 key
// channels. The next chunk's inputs are under way while this one is computed: q, k and g from where they have been read
// into registers, dO, E, S and U, dS from where the products are done.
//
// Macros: KEY_DIM, VALUE_DIM (64 or 128), L2 (q and k are normalised), HAS_A, HAS_BIAS, SIGMOID (beta is a logit), WIDE (dq and dk are
// float), BETA_FLOAT (so are beta and its gradient).
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

struct Shared {
    u8 q[ROWS_K], k[ROWS_K], g[ROWS_K];
    u8 d_o[ROWS_V], e[ROWS_V], u[ROWS_V];
    u8 s[STATE], ds[STATE];
    u8 near[ROWS_K];  // k / up, later q up
    u8 far[ROWS_K];   // k to, later -k up
    u8 dp[SQUARE], eu[SQUARE];
    float decay[BLOCKS][K];                // 2^(log-decay of a block of rows)
    float after[BLOCKS][K];                // sums over a block of dG
    float tail[BLOCKS][K];                 // of k times what reaches later chunks
    float bias[BLOCKS][K];                 // of dz
    float through[K];                      // gamma sum_v S dS
    float squares[2][CHUNK][WIDTH];        // |q|^2 and |k|^2 of a warp's channels
    float along[2][CHUNK][WIDTH];          // of q dq and k dk
    float diagonal[CHUNK];                 // of scale dP
    float rate[WARPS];
};

DEVICE float total(const float (&part)[WIDTH]) {
    float sum = part[0];
#pragma unroll
    for (int i = 1; i < WIDTH; i++) sum += part[i];
    return sum;
}

DEVICE void scale_columns(float (&x)[4][4], const float* factor, int w, int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 f = *(const float2*)(factor + 32 * w + 8 * j + 2 * (lane & 3));
        x[j][0] *= f.x;
        x[j][1] *= f.y;
        x[j][2] *= f.x;
        x[j][3] *= f.y;
    }
}

DEVICE void scale_rows(float (&x)[4][4], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[j][i] *= factor[i >> 1];
}

DEVICE void clear(float (&x)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[j][i] = 0.0f;
}

DEVICE float half_of(u32 two, int e) { return e ? high_half(two) : low_half(two); }

// dP and beta dL of rows `q` by rows `k` (blocks of 16, q >= k), with their factors of the shift; on the diagonal also the
// diagonal of dP and the gradient of beta.
DEVICE void pairs(
    Shared& m, int q, int k, int lane, float shift, const float (&unstep)[2], float scale, float beta_scale,
    const beta_type* beta, int beta_token, beta_type* dbeta, int dbeta_token, int count
) {
    float p[2][4] = {}, e[2][4] = {};
    const int i = lane & 7, matrix = lane >> 3, r = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < V / 16; n++) {
        u32 a1[4], a2[4], b[4];
        left<V>(a1, m.d_o, q, n, lane);
        left<V>(a2, m.e, q, n, lane);
        load_matrices(b, m.u + row_at<V>(16 * k + 2 * i + (matrix >> 1), 2 * n + (matrix & 1)));
#pragma unroll
        for (int t = 0; t < 2; t++) {
            multiply_add(p[t], a1, b[2 * t], b[2 * t + 1]);
            multiply_add(e[t], a2, b[2 * t], b[2 * t + 1]);
        }
    }
    const bool own = q == k;
    if (own && c == r >> 1) {  // row 2 r + h meets itself in group h, column r
        const bool odd = r & 1;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * q + 2 * r + h;
            m.diagonal[row] = scale * (odd ? p[h][2 * h + 1] : p[h][2 * h]);
            if (row >= count) continue;
            const float x = beta_in(beta[(i64)row * beta_token]), strength = SIGMOID ? beta_scale * reciprocal(1.0f + exp2_fast(-LOG2E * x)) : x;
            const float divisor = fabsf(strength) < LEAST_BETA ? LEAST_BETA : strength;
            const float d = (odd ? e[h][2 * h + 1] : e[h][2 * h]) / divisor;
            dbeta[(i64)row * dbeta_token] = beta_out(SIGMOID ? d * (1.0f - divisor / beta_scale) : d / divisor);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float f[2] = {unstep[h], unstep[h]};
            if (own)
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    const int below = 2 * r + h - (2 * (2 * c + x) + t);
                    f[x] = below > 0 ? exp2_fast(-shift * (float)below) : 0.0f;
                }
            const int at = row_at<CHUNK>(16 * q + 2 * r + h, 2 * k + t) + 4 * c;
            // a select, not a product: what the mask hides may be anything
            const float p0 = f[0] == 0.0f ? 0.0f : p[t][2 * h] * f[0], p1 = f[1] == 0.0f ? 0.0f : p[t][2 * h + 1] * f[1];
            const float e0 = f[0] == 0.0f ? 0.0f : e[t][2 * h] * f[0], e1 = f[1] == 0.0f ? 0.0f : e[t][2 * h + 1] * f[1];
            *(u32*)(m.dp + at) = pack(p0, p1);
            *(u32*)(m.eu + at) = pack(e0, e1);
        }
}

// gamma sum_v S dS for the warp's 8 channels: every lane takes a value channel in 32, then the lanes' sums meet.
DEVICE void through(Shared& m, int warp, int lane) {
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

KERNEL(4 * K, 1) backward(
    const bf16* q, const bf16* k, const bf16* g, const beta_type* beta, const float* a_log, const float* dt_bias,
    const bf16* d_o, const bf16* U, const bf16* S, const bf16* E, const bf16* dS, const int* chunks,
    qk_out* dq, qk_out* dk, bf16* dz, beta_type* dbeta, float* rate_part, float* bias_part,
    float scale, float lower_bound, float beta_scale,
    int q_token, int q_head, int k_token, int k_head, int g_token, int g_head, int beta_token, int beta_head,
    int do_token, int do_head, int heads, int group, int programs
) {
    SHARED(memory);
    Shared& m = *(Shared*)memory;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, block = warp / WIDTH, w = warp % WIDTH;
    const int r = lane >> 2, c = lane & 3, row = 16 * block + 2 * r;
    const float shift = -0.5f * LOG2E * lower_bound;
    const float step[2] = {exp2_fast(shift * (2 * r + 1)), exp2_fast(shift * (2 * r + 2))};
    const float unstep[2] = {exp2_fast(-shift * (2 * r + 1)), exp2_fast(-shift * (2 * r + 2))};

    const auto ask_rows = [&](int program) {
        if (program < programs) {
            const int head = program % heads, start = chunks[2 * (program / heads)], count = chunks[2 * (program / heads) + 1];
            fetch_rows<K>(m.q, q + (i64)start * q_token + (i64)(head / group) * q_head, q_token, count);
            fetch_rows<K>(m.k, k + (i64)start * k_token + (i64)(head / group) * k_head, k_token, count);
            fetch_rows<K>(m.g, g + (i64)start * g_token + (i64)head * g_head, g_token, count);
        }
        copy_commit();
    };
    const auto ask_first = [&](int program) {
        if (program < programs) {
            const int head = program % heads, start = chunks[2 * (program / heads)], count = chunks[2 * (program / heads) + 1];
            fetch_rows<V>(m.d_o, d_o + (i64)start * do_token + (i64)head * do_head, do_token, count);
            fetch_rows<V>(m.e, E + ((i64)start * heads + head) * V, (i64)heads * V, count);
            fetch_state(m.s, S + (i64)program * (V * K));
        }
        copy_commit();
    };
    const auto ask_second = [&](int program) {
        if (program < programs) {
            fetch_rows<V>(m.u, U + (i64)program * (CHUNK * V), V, CHUNK);
            fetch_state(m.ds, dS + (i64)program * (V * K));
        }
        copy_commit();
    };
    ask_rows(blockIdx.x);
    ask_first(blockIdx.x);
    ask_second(blockIdx.x);

    for (int program = blockIdx.x; program < programs; program += gridDim.x) {
        const int chunk = program / heads, head = program % heads, next = program + gridDim.x;
        const int start = chunks[2 * chunk], count = chunks[2 * chunk + 1];
        const float rate = HAS_A ? exp2_fast(LOG2E * a_log[head]) : 1.0f;
        const i64 out = ((i64)(start + row) * heads + head) * K + 32 * w;  // of this thread's first row, the warp's channels

        // Factors of the decay, sums of squares.
        copy_wait<2>();
        sync_threads();
        u32 qs[2][4], ks[2][4];
        float up[4][4];
        {
            float q_square[2] = {}, k_square[2] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int channel = 32 * w + 8 * j + 2 * c;
                float2 bias = make_float2(0.0f, 0.0f);
                if (HAS_BIAS) bias = *(const float2*)(dt_bias + head * K + channel);
                const float slope = -LOG2E * rate, offset[2] = {bias.x * slope, bias.y * slope};
                float decay[2][2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int at = own_at(block, w, lane, h, j);
                    qs[h][j] = *(const u32*)(m.q + at);
                    ks[h][j] = *(const u32*)(m.k + at);
                    const u32 z = *(const u32*)(m.g + at);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float a = half_of(qs[h][j], e), b = half_of(ks[h][j], e);
                        q_square[h] = fmaf(a, a, q_square[h]);
                        k_square[h] = fmaf(b, b, k_square[h]);
                        decay[h][e] = lower_bound * LOG2E * reciprocal(1.0f + exp2_fast(fmaf(half_of(z, e), slope, offset[e])));
                        if (row + h >= count) decay[h][e] = 0.0f;
                    }
                }
                float block_decay[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float before, all;
                    sums_before(decay[0][e] + decay[1][e], lane, before, all);
                    up[j][e] = exp2_fast(before + decay[0][e] + shift * (2 * r + 1));
                    up[j][2 + e] = exp2_fast(before + decay[0][e] + decay[1][e] + shift * (2 * r + 2));
                    block_decay[e] = exp2_fast(all);
                }
                if (r == 0) *(float2*)&m.decay[block][channel] = make_float2(block_decay[0], block_decay[1]);
            }
            if (L2)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float a = row_sum(q_square[h]), b = row_sum(k_square[h]);
                    if (c == 0) {
                        m.squares[0][row + h][w] = a;
                        m.squares[1][row + h][w] = b;
                    }
                }
        }
        copy_wait<0>();
        sync_threads();
        ask_rows(next);

        // The keys as operands; products that need no factors.
        float q_rstd[2] = {1.0f, 1.0f}, k_rstd[2] = {1.0f, 1.0f};
        if (L2)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                q_rstd[h] = rsqrt_fast(total(m.squares[0][row + h]) + 1e-6f);
                k_rstd[h] = rsqrt_fast(total(m.squares[1][row + h]) + 1e-6f);
            }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 f = *(const float2*)&m.decay[block][32 * w + 8 * j + 2 * c];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = own_at(block, w, lane, h, j);
                const float a = low_half(ks[h][j]) * k_rstd[h] * reciprocal(up[j][2 * h]);
                const float b = high_half(ks[h][j]) * k_rstd[h] * reciprocal(up[j][2 * h + 1]);
                *(u32*)(m.near + at) = pack(a, b);
                *(u32*)(m.far + at) = pack(a * f.x * step[h], b * f.y * step[h]);
            }
        }
#pragma unroll 1
        for (int i = warp; i < BLOCKS * (BLOCKS + 1) / 2; i += WARPS) {
            const int rows = i < 1 ? 0 : i < 3 ? 1 : i < 6 ? 2 : 3;
            pairs(
                m, rows, i - rows * (rows + 1) / 2, lane, shift, unstep, scale, beta_scale,
                beta + (i64)start * beta_token + (i64)head * beta_head, beta_token, dbeta + (i64)start * heads + head, heads, count
            );
        }
        through(m, warp, lane);
        float d_q[4][4], d_k[4][4];
        clear(d_q);
        clear(d_k);
        through_state(d_q, d_k, m.d_o, m.e, m.s, block, w, lane);
        sync_threads();

        // d_q and the part of d_k where k reads, from the earliest block of rows to their own.
        scale_rows(d_q, unstep);
        scale_rows(d_k, unstep);
#pragma unroll 1
        for (int i = 0; i < block; i++) {
            u32 a[4];
            scale_columns(d_q, m.decay[i], w, lane);
            left<CHUNK>(a, m.dp, block, i, lane);
            add_products(d_q, a, m.far, i, w, lane);
            scale_columns(d_k, m.decay[i], w, lane);
            left<CHUNK>(a, m.eu, block, i, lane);
            add_products(d_k, a, m.far, i, w, lane);
        }
        {
            u32 a[4];
            left<CHUNK>(a, m.dp, block, block, lane);
            add_products(d_q, a, m.near, block, w, lane);
            left<CHUNK>(a, m.eu, block, block, lane);
            add_products(d_k, a, m.near, block, w, lane);
        }
        float d_G[4][4];
        const float diagonal[2] = {m.diagonal[row], m.diagonal[row + 1]};
        float along[2] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int h = i >> 1;
                const float q_unit = half_of(qs[h][j], i & 1) * q_rstd[h], k_unit = half_of(ks[h][j], i & 1) * k_rstd[h];
                d_q[j][i] *= up[j][i] * scale;
                d_k[j][i] *= -up[j][i];
                d_G[j][i] = fmaf(q_unit, d_q[j][i], k_unit * d_k[j][i]);
                d_q[j][i] = fmaf(diagonal[h], k_unit, d_q[j][i]);
                along[h] = fmaf(d_q[j][i], q_unit, along[h]);
            }
        if (L2)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float a = row_sum(along[h]);
                if (c == 0) m.along[0][row + h][w] = a;
            }
        sync_threads();
        ask_first(next);

        // Queries and keys where they read, as operands; dq is finished.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = L2 ? total(m.along[0][row + h]) * q_rstd[h] : 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = own_at(block, w, lane, h, j);
                const float q0 = low_half(qs[h][j]), q1 = high_half(qs[h][j]);
                const float a = scale * q_rstd[h], b = -k_rstd[h];
                *(u32*)(m.near + at) = pack(q0 * a * up[j][2 * h], q1 * a * up[j][2 * h + 1]);
                *(u32*)(m.far + at) = pack(low_half(ks[h][j]) * b * up[j][2 * h], high_half(ks[h][j]) * b * up[j][2 * h + 1]);
                if (L2) {
                    d_q[j][2 * h] = (d_q[j][2 * h] - q0 * sum) * q_rstd[h];
                    d_q[j][2 * h + 1] = (d_q[j][2 * h + 1] - q1 * sum) * q_rstd[h];
                }
            }
            store_row(dq + out + (i64)h * heads * K, d_q, h, lane, row + h < count);
        }

        // The part of d_k where k writes: for later chunks, then from the last block of rows to their own.
        float d_key[4][4];
        clear(d_key);
        through_state(d_key, m.u, m.ds, block, w, lane);
        {
            float tail[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int channel = 32 * w + 8 * j + 2 * c;
                float2 f = *(const float2*)&m.decay[block][channel];
#pragma unroll 1
                for (int i = block + 1; i < BLOCKS; i++) {
                    const float2 one = *(const float2*)&m.decay[i][channel];
                    f.x *= one.x;
                    f.y *= one.y;
                }
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float a = d_key[j][e] * step[0] * (e ? f.y : f.x) * reciprocal(up[j][e]);
                    const float b = d_key[j][2 + e] * step[1] * (e ? f.y : f.x) * reciprocal(up[j][2 + e]);
                    tail[j][e] = fmaf(half_of(ks[0][j], e) * k_rstd[0], a, half_of(ks[1][j], e) * k_rstd[1] * b);
                }
            }
            m.tail[block][column_of(w, lane)] = column_sum(tail, lane);
        }
        sync_threads();
#pragma unroll 1
        for (int i = BLOCKS - 1; i > block; i--) {
            u32 a[4];
            scale_columns(d_key, m.decay[i], w, lane);
            left_transposed(a, m.dp, i, block, lane);
            add_products(d_key, a, m.near, i, w, lane);
            left_transposed(a, m.eu, i, block, lane);
            add_products(d_key, a, m.far, i, w, lane);
        }
        scale_rows(d_key, step);
        scale_columns(d_key, m.decay[block], w, lane);
        {
            u32 a[4];
            left_transposed(a, m.dp, block, block, lane);
            add_products(d_key, a, m.near, block, w, lane);
            left_transposed(a, m.eu, block, block, lane);
            add_products(d_key, a, m.far, block, w, lane);
        }
        along[0] = along[1] = 0.0f;
        float after[4][2];  // sums of dG over this thread's rows, then over those after them in the block
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int h = i >> 1;
                const float q_unit = half_of(qs[h][j], i & 1) * q_rstd[h], k_unit = half_of(ks[h][j], i & 1) * k_rstd[h];
                d_key[j][i] *= reciprocal(up[j][i]);
                d_G[j][i] = fmaf(-k_unit, d_key[j][i], d_G[j][i]);
                d_k[j][i] += fmaf(diagonal[h], q_unit, d_key[j][i]);
                along[h] = fmaf(d_k[j][i], k_unit, along[h]);
            }
            float all[2];
#pragma unroll
            for (int e = 0; e < 2; e++) sums_after(d_G[j][e] + d_G[j][2 + e], lane, after[j][e], all[e]);
            if (r == 0) *(float2*)&m.after[block][32 * w + 8 * j + 2 * c] = make_float2(all[0], all[1]);
        }
        if (L2)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float a = row_sum(along[h]);
                if (c == 0) m.along[1][row + h][w] = a;
            }
        u32 zs[2][4];  // the logits once more, most likely from the L2 cache
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                zs[h][j] = row + h < count
                    ? *(const u32*)(g + (i64)(start + row + h) * g_token + (i64)head * g_head + 32 * w + 8 * j + 2 * c) : 0;
        sync_threads();
        ask_second(next);

        // Through the L2 norm and the gate.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (L2) {
                const float sum = total(m.along[1][row + h]) * k_rstd[h];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    d_k[j][2 * h] = (d_k[j][2 * h] - low_half(ks[h][j]) * sum) * k_rstd[h];
                    d_k[j][2 * h + 1] = (d_k[j][2 * h + 1] - high_half(ks[h][j]) * sum) * k_rstd[h];
                }
            }
            store_row(dk + out + (i64)h * heads * K, d_k, h, lane, row + h < count);
        }
        float d_rate = 0.0f, d_bias[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int channel = 32 * w + 8 * j + 2 * c;
            float2 whole = *(const float2*)&m.through[channel], bias = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                const float2 x = *(const float2*)&m.tail[i][channel];
                whole.x += x.x;
                whole.y += x.y;
            }
#pragma unroll 1
            for (int i = block + 1; i < BLOCKS; i++) {
                const float2 x = *(const float2*)&m.after[i][channel];
                after[j][0] += x.x;
                after[j][1] += x.y;
            }
            if (HAS_BIAS) bias = *(const float2*)(dt_bias + head * K + channel);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float later = after[j][e] + d_G[j][2 + e];
                const float sums[2] = {later + d_G[j][e] + (e ? whole.y : whole.x), later + (e ? whole.y : whole.x)};
                d_bias[j][e] = 0.0f;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float x = half_of(zs[h][j], e) + (e ? bias.y : bias.x);
                    const float s = reciprocal(1.0f + exp2_fast(-LOG2E * rate * x));
                    const float d = row + h < count ? sums[h] * (lower_bound * rate) * s * (1.0f - s) : 0.0f;
                    d_G[j][2 * h + e] = d;
                    d_rate = fmaf(d, x, d_rate);
                    d_bias[j][e] += d;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) store_row(dz + out + (i64)h * heads * K, d_G, h, lane, row + h < count);
        if (HAS_A) {
#pragma unroll
            for (int mask = 1; mask < 32; mask *= 2) d_rate += shuffle_xor(d_rate, mask);
            if (lane == 0) m.rate[warp] = d_rate;
        }
        if (HAS_BIAS) m.bias[block][column_of(w, lane)] = column_sum(d_bias, lane);
        if (HAS_A || HAS_BIAS) {
            sync_threads();
            if (HAS_BIAS && thread < K)
                bias_part[(i64)program * K + thread] = m.bias[0][thread] + m.bias[1][thread] + m.bias[2][thread] + m.bias[3][thread];
            if (HAS_A && thread == 0) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; i++) sum += m.rate[i];
                rate_part[program] = sum;
            }
        }
    }
    copy_wait<0>();
}
