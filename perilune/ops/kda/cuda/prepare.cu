// Everything about a chunk that does not need the state, one block of four warps a chunk and head:
//
//     Qd = q e^G      Kd = k e^G      Kr = k e^(G_last - G)      gamma = e^G_last
//     P  = tril(q k^T with decay)     A = (I + L)^-1 diag(beta),  L = strictly lower beta k k^T with decay
//
// G is the running sum of the chunk's log-decays, to base 2 in here. The same factors as in ops/kda/triton/prepare.py: two
// tiles of 32 rows, inside which rows and columns are shifted by half the bound a step (both factors stay within 2^+-116),
// between which the decay is counted from the border. The shift is rounded to whole bits, a number for each row, so that
// taking it off is exact: the same bfloat16 operands serve both products.
//
// 1. Columns. A thread adds up one or two channels of one tile and leaves the running sums in shared memory.
// 2. Rows. A warp has 16 rows, a thread 8 neighbouring channels of every 32 in two of them: as these lie for loads and
//    stores of 16 bytes, they are the tensor cores' left operand too, if the channels of a product are counted in that order.
//    Keys, the right operand, take the place of the running sums that they were made from.
// 3. P and L by tensor cores; P leaves from registers (keys are counted so that a thread holds 8 neighbours).
// 4. (I + L)^-1: each warp inverts a diagonal block of 16 by substitution in float32 (no series: traps T02), then finds 16
//    columns of the inverse by block substitution, transposed so that each product's result is the next one's left operand.
//    Products in three tf32 parts, as exact as float32.
#include "device.h"

// K: channels, 64 or 128. G_FLOAT: g is float, else bfloat16. BLOCKS: of a multiprocessor.
constexpr int CHUNK = 64, TILE = 32, THREADS = 128, GROUPS = K / 32;
constexpr int SUM_STRIDE = K + 4, L_STRIDE = 80;  // floats of a row; free of bank conflicts in steps 2 to 4
constexpr int BETA = 0, SUMS = 256, SQUARE = SUMS + CHUNK * SUM_STRIDE * 4;  // bytes
constexpr int ENDS = SQUARE, ENTERS = ENDS + 8 * K, LEAVES = ENTERS + 8 * K;  // before L is there: a tile's sum, what its
                                                                              // rows have before them and after them
constexpr int A_STRIDE = 72;                                                 // bfloat16 of a row, where the sums were
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST_LOG2 = -150.0f;  // 2^-150 is nothing beside any other term
constexpr float LEAST_BETA = 1e-12f;   // a write strength of 0 is computed as this: the gradient divides by it

enum Flags { L2_NORM = 1, GATE = 2, BETA_SIGMOID = 4, BETA_FLOAT = 8 };

struct Pair { float x, y; };

// Bits by which row r of a tile is shifted.
DEVICE int shift_of(int r, float shift) { return (int)fmaf(shift, (float)(r + 1), 0.5f); }
DEVICE float power_of_2(int n) { return from_bits((u32)(127 + n) << 23); }

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

DEVICE float norm_factor(const uint4 (&row)[GROUPS]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const float x = low_half(word(row[j], p)), y = high_half(word(row[j], p));
            sum = fmaf(x, x, fmaf(y, y, sum));
        }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    return rsqrt_fast(sum + 1e-6f);
}

// One thread's channels of a row of log-decays, or of logits, as they are in memory.
#if G_FLOAT
#if K == 128
typedef float2 Logits;
DEVICE Pair floats(Logits z) { return {z.x, z.y}; }
#else
typedef float Logits;
DEVICE Pair floats(Logits z) { return {z, 0.0f}; }
#endif
#else
#if K == 128
typedef u32 Logits;
DEVICE Pair floats(Logits z) { return {low_half(z), high_half(z)}; }
#else
typedef bf16 Logits;
DEVICE Pair floats(Logits z) { return {to_float(z), 0.0f}; }
#endif
#endif
constexpr int AHEAD = sizeof(Logits) * TILE > 128 ? TILE / 2 : TILE;  // rows that are loaded before they are used

DEVICE void load_gates(Logits (&z)[AHEAD], const u8* g, int token_bytes, int rows) {
#pragma unroll
    for (int r = 0; r < AHEAD; r++) z[r] = r < rows ? load_in_order<Logits>(g + (i64)r * token_bytes) : Logits();
}

// Step 1 for one channel: `sum` after one more row.
template <bool LOGITS> DEVICE float add_decay(float sum, float z, float slope, float offset, float bound) {
    if (LOGITS) return fmaf(bound, reciprocal(1.0f + exp2_fast(fmaf(z, slope, offset))), sum);
    const float d = z * LOG2E;
    return sum + (d < LEAST_LOG2 ? LEAST_LOG2 : d);  // a NaN stays
}

template <bool LOGITS>
DEVICE void running_sums(Pair& sum, const Logits (&z)[AHEAD], int rows, float* sums, float slope, Pair offset, float bound) {
#pragma unroll
    for (int r = 0; r < AHEAD; r++) {
        const Pair x = floats(z[r]);
        const float row_bound = r < rows ? bound : 0.0f;  // logits of rows that hold no token are 0, their decay is none
        sum.x = add_decay<LOGITS>(sum.x, x.x, slope, offset.x, row_bound);
        if (K == 128) sum.y = add_decay<LOGITS>(sum.y, x.y, slope, offset.y, row_bound);
        if (K == 128) *(float2*)(sums + r * SUM_STRIDE) = make_float2(sum.x, sum.y);
        else sums[r * SUM_STRIDE] = sum.x;
    }
}

// The left operand of 16 channels: registers of rows i and i + 8, groups of 32 channels, pairs of channels.
DEVICE void left(u32 (&a)[4], const uint4 (&x)[2][GROUPS], int j, int half) {
    a[0] = word(x[0][j], 2 * half);
    a[1] = word(x[1][j], 2 * half);
    a[2] = word(x[0][j], 2 * half + 1);
    a[3] = word(x[1][j], 2 * half + 1);
}

// p = q keys^T and l = k keys^T for 16 rows and 32 keys. Column n of block b is key 8 (n / 2) + 2 b + n % 2, so that a thread
// holds, of rows i and i + 8, keys 8 t .. 8 t + 7 in the order [b][e]. `keys` is this thread's first one.
DEVICE void against_keys(
    float (&p)[4][4], float (&l)[4][4], const uint4 (&q)[2][GROUPS], const uint4 (&k)[2][GROUPS], const float* keys) {
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) p[b][e] = l[b][e] = 0.0f;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        u32 q0[4], q1[4], k0[4], k1[4];
        left(q0, q, j, 0);
        left(q1, q, j, 1);
        left(k0, k, j, 0);
        left(k1, k, j, 1);
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint4 key = *(const uint4*)(keys + 2 * b * SUM_STRIDE + 32 * j);
            multiply_add(p[b], q0, key.x, key.y);
            multiply_add(l[b], k0, key.x, key.y);
            multiply_add(p[b], q1, key.z, key.w);
            multiply_add(l[b], k1, key.z, key.w);
        }
    }
}

DEVICE uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// Step 4's left operand, 16x16 in two parts: high carries 11 bits, low the next 11.
struct Split {
    u32 high[2][4], low[2][4];
};

// From a product's result x[b][]: rows i, i + 8, columns 4 t + 2 b and the next. The columns of a product's 8 are counted
// as t = 4 t + 2 b, t + 4 = 4 t + 2 b + 1.
DEVICE void split(Split& s, const float (&x)[2][4]) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const float in_order[4] = {x[b][0], x[b][2], x[b][1], x[b][3]};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s.high[b][e] = to_tf32(in_order[e]);
            s.low[b][e] = bits(in_order[e] - from_bits(s.high[b][e]));
        }
    }
}

// d += a M^T for a 16x16 block M in shared memory; `block` is this thread's first element.
DEVICE void times_transposed(float (&d)[2][4], const Split& a, const float* block) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const float4 m = *(const float4*)(block + 2 * b * L_STRIDE);
        const float v[4] = {m.x, m.y, m.z, m.w};
        u32 high[4], low[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            high[e] = to_tf32(v[e]);
            low[e] = bits(v[e] - from_bits(high[e]));
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
            multiply_add_tf32(d[b], a.high[s], low[2 * s], low[2 * s + 1]);
            multiply_add_tf32(d[b], a.low[s], high[2 * s], high[2 * s + 1]);
            multiply_add_tf32(d[b], a.high[s], high[2 * s], high[2 * s + 1]);
        }
    }
}

// q, k [tokens, heads / group, K], g [tokens, heads, K], beta [tokens, heads] by strides in elements; a_log [heads] and
// dt_bias [heads, K] float or null; chunks [chunks, 2], first token and tokens. Outputs [chunks, heads, ...]; rows of no
// token are 0. shift: half the bound, in bits a step.
KERNEL(THREADS, BLOCKS)
prepare(
    const bf16* __restrict__ q, const bf16* __restrict__ k, const void* __restrict__ g, const void* __restrict__ beta,
    const float* __restrict__ a_log, const float* __restrict__ dt_bias, const int* __restrict__ chunks,
    bf16* __restrict__ Qd, bf16* __restrict__ Kd, bf16* __restrict__ Kr, bf16* __restrict__ P, bf16* __restrict__ A,
    float* __restrict__ gamma, float scale, float lower_bound, float shift, float beta_scale,
    i64 q_token, i64 q_head, i64 k_token, i64 k_head, i64 g_token, i64 g_head, i64 beta_token, i64 beta_head,
    int heads, int group, int flags) {
    SHARED(memory);
    float* const beta_of = (float*)(memory + BETA);
    float* const sums = (float*)(memory + SUMS);
    float* const square = (float*)(memory + SQUARE);
    float* const ends = (float*)(memory + ENDS);
    float* const enters = (float*)(memory + ENTERS);
    float* const leaves = (float*)(memory + LEAVES);

    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32, i = lane / 4, t = lane % 4;
    const i64 program = blockIdx.x;
    const int chunk = blockIdx.x / heads, head = blockIdx.x % heads;
    const i64 start = chunks[2 * chunk];
    const int count = chunks[2 * chunk + 1];
    const int tile = warp / 2;             // of this thread, in steps 1 to 3
    const int row = 16 * warp + i;         // the first of its rows; the other is row + 8

    const int channel = thread % 64 * (K / 64);
    const u8* const gates = (const u8*)g + ((start + TILE * tile) * g_token + head * g_head + channel) * (i64)(G_FLOAT ? 4 : 2);
    const int gate_bytes = (int)g_token * (G_FLOAT ? 4 : 2), gate_rows = count - TILE * tile;
    Logits z[AHEAD];
    load_gates(z, gates, gate_bytes, gate_rows);

    uint4 q_rows[2][GROUPS], k_rows[2][GROUPS];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const i64 token = start + row + 8 * h;
        const bf16* from_k = k + token * k_token + head / group * k_head + 8 * t;
        const bf16* from_q = q + token * q_token + head / group * q_head + 8 * t;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            k_rows[h][j] = q_rows[h][j] = make_uint4(0, 0, 0, 0);
            if (row + 8 * h < count) {
                k_rows[h][j] = load_once(from_k + 32 * j);
                q_rows[h][j] = load_once(from_q + 32 * j);
            }
        }
    }

    {
        const float rate = a_log ? exp2_fast(LOG2E * a_log[head]) : 1.0f;
        const float slope = -LOG2E * rate, bound = LOG2E * lower_bound;
        float* const own = sums + TILE * tile * SUM_STRIDE + channel;
        Pair offset = {0.0f, 0.0f}, end = {0.0f, 0.0f};
        if (dt_bias) {
            offset.x = slope * dt_bias[head * K + channel];
            if (K == 128) offset.y = slope * dt_bias[head * K + channel + 1];
        }
#pragma unroll
        for (int r = 0; r < TILE; r += AHEAD) {
            if (r) load_gates(z, gates + (i64)r * gate_bytes, gate_bytes, gate_rows - r);
            if (flags & GATE) running_sums<true>(end, z, gate_rows - r, own + r * SUM_STRIDE, slope, offset, bound);
            else running_sums<false>(end, z, gate_rows - r, own + r * SUM_STRIDE, slope, offset, bound);
        }
        ends[tile * K + channel] = end.x;
        (tile ? leaves : enters + K)[channel] = exp2_fast(end.x);
        (tile ? leaves + K : enters)[channel] = 1.0f;
        if (K == 128) {
            ends[tile * K + channel + 1] = end.y;
            (tile ? leaves : enters + K)[channel + 1] = exp2_fast(end.y);
            (tile ? leaves + K : enters)[channel + 1] = 1.0f;
        }
    }
    if (thread < CHUNK) {
        float b = 0.0f;
        if (thread < count) {
            const i64 at = (start + thread) * beta_token + head * beta_head;
            b = flags & BETA_FLOAT ? ((const float*)beta)[at] : to_float(((const bf16*)beta)[at]);
            if (flags & BETA_SIGMOID) b = beta_scale * reciprocal(1.0f + exp2_fast(-LOG2E * b));
            if (fabsf(b) < LEAST_BETA) b = LEAST_BETA;
        }
        beta_of[thread] = b;
    }
    sync_threads();
    if (thread < K) gamma[program * K + thread] = exp2_fast(ends[thread] + ends[K + thread]);

    // Step 2.
    float q_norm[2], k_norm[2], step[2], unstep[2];
    u32 unstep_pair[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int bits_off = shift_of(row % TILE + 8 * h, shift);
        step[h] = (float)bits_off;
        unstep[h] = power_of_2(-bits_off);
        unstep_pair[h] = (bits(unstep[h]) >> 16) * 0x10001u;
        q_norm[h] = scale * (flags & L2_NORM ? norm_factor(q_rows[h]) : 1.0f);
        k_norm[h] = flags & L2_NORM ? norm_factor(k_rows[h]) : 1.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            forget(q_rows[h][j]);
            forget(k_rows[h][j]);
        }
    const i64 rows_out = program * (CHUNK * K) + row * K + 8 * t;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        float end[8], enter[8], leave[8];
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
            *(float4*)(end + c) = *(const float4*)(ends + tile * K + 32 * j + 8 * t + c);
            *(float4*)(enter + c) = *(const float4*)(enters + tile * K + 32 * j + 8 * t + c);
            *(float4*)(leave + c) = *(const float4*)(leaves + tile * K + 32 * j + 8 * t + c);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float* const own = sums + (row + 8 * h) * SUM_STRIDE + 32 * j + 8 * t;
            float sum[8];
            *(float4*)sum = *(const float4*)own;
            *(float4*)(sum + 4) = *(const float4*)(own + 4);
            u32 q_up[4], k_up[4], near[4], far[4], q_out[4], k_out[4], r_out[4];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const u32 q_two = word(q_rows[h][j], p), k_two = word(k_rows[h][j], p);
                float qs[2] = {low_half(q_two) * q_norm[h], high_half(q_two) * q_norm[h]};
                float ks[2] = {low_half(k_two) * k_norm[h], high_half(k_two) * k_norm[h]};
                float down[2], to[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float x = sum[2 * p + e], s = x + step[h];
                    const float up = exp2_fast(s);
                    down[e] = ks[e] * exp2_fast(-s);
                    to[e] = ks[e] * exp2_fast(end[2 * p + e] - x);
                    qs[e] *= up;
                    ks[e] *= up;
                }
                q_up[p] = pack(qs[0], qs[1]);
                k_up[p] = pack(ks[0], ks[1]);
                near[p] = pack(down[0], down[1]);
                far[p] = pack(to[0], to[1]);
                q_out[p] = pack(qs[0] * unstep[h] * enter[2 * p], qs[1] * unstep[h] * enter[2 * p + 1]);
                k_out[p] = pack(ks[0] * unstep[h] * enter[2 * p], ks[1] * unstep[h] * enter[2 * p + 1]);
                r_out[p] = pack(to[0] * leave[2 * p], to[1] * leave[2 * p + 1]);
            }
            *(uint4*)own = make_uint4(near[0], near[1], near[2], near[3]);
            *(uint4*)(own + 4) = make_uint4(far[0], far[1], far[2], far[3]);
            q_rows[h][j] = make_uint4(q_up[0], q_up[1], q_up[2], q_up[3]);
            k_rows[h][j] = make_uint4(k_up[0], k_up[1], k_up[2], k_up[3]);
            const i64 to_row = rows_out + 8 * h * K + 32 * j;
            store_once(Qd + to_row, make_uint4(q_out[0], q_out[1], q_out[2], q_out[3]));
            store_once(Kd + to_row, make_uint4(k_out[0], k_out[1], k_out[2], k_out[3]));
            store_once(Kr + to_row, make_uint4(r_out[0], r_out[1], r_out[2], r_out[3]));
        }
    }
    sync_threads();

    // Step 3.
    const float* const first_key = sums + (8 * (i / 2) + i % 2) * SUM_STRIDE + 8 * t;
    bf16* const P_out = P + program * (CHUNK * CHUNK) + row * CHUNK + 8 * t;
    float* const L_own = square + row * L_STRIDE + 8 * t;
    float p[4][4], l[4][4];
    against_keys(p, l, q_rows, k_rows, first_key + TILE * tile * SUM_STRIDE);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row % TILE + 8 * h;
        const float row_beta = beta_of[row + 8 * h];
        const int row_shift = shift_of(r, shift);
        float p_row[8], l_row[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float unshift = power_of_2(shift_of(8 * t + c, shift) - row_shift);
            p_row[c] = 8 * t + c <= r ? p[c / 2][2 * h + c % 2] * unshift : 0.0f;
            l_row[c] = 8 * t + c < r ? l[c / 2][2 * h + c % 2] * unshift * row_beta : 0.0f;
        }
        store_once(P_out + 8 * h * CHUNK + TILE * tile, pack8(p_row));
        if (!tile) store_once(P_out + 8 * h * CHUNK + TILE, make_uint4(0, 0, 0, 0));
        *(float4*)(L_own + 8 * h * L_STRIDE + TILE * tile) = make_float4(l_row[0], l_row[1], l_row[2], l_row[3]);
        *(float4*)(L_own + 8 * h * L_STRIDE + TILE * tile + 4) = make_float4(l_row[4], l_row[5], l_row[6], l_row[7]);
    }
    if (tile) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < GROUPS; j++) {
                uint4 &x = q_rows[h][j], &y = k_rows[h][j];
                const u32 by = unstep_pair[h];
                x = make_uint4(multiply_pair(x.x, by), multiply_pair(x.y, by), multiply_pair(x.z, by), multiply_pair(x.w, by));
                y = make_uint4(multiply_pair(y.x, by), multiply_pair(y.y, by), multiply_pair(y.z, by), multiply_pair(y.w, by));
            }
        against_keys(p, l, q_rows, k_rows, first_key + 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float row_beta = beta_of[row + 8 * h];
            float p_row[8], l_row[8];
#pragma unroll
            for (int c = 0; c < 8; c++) {
                p_row[c] = p[c / 2][2 * h + c % 2];
                l_row[c] = l[c / 2][2 * h + c % 2] * row_beta;
            }
            store_once(P_out + 8 * h * CHUNK, pack8(p_row));
            *(float4*)(L_own + 8 * h * L_STRIDE) = make_float4(l_row[0], l_row[1], l_row[2], l_row[3]);
            *(float4*)(L_own + 8 * h * L_STRIDE + 4) = make_float4(l_row[4], l_row[5], l_row[6], l_row[7]);
        }
    }
    sync_warp();

    // Step 4: the diagonal block, a lane a column (twice over); the inverse takes the block's place.
    {
        float* const block = square + 16 * warp * (L_STRIDE + 1);
        const int column = lane % 16;
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
    sync_threads();

    // Columns 16 warp .. of the inverse X, as y = X^T: y[r] holds rows i, i + 8 and columns 4 t + 2 b, + 1 of block r.
    // X_rw = -D_r sum_c L_rc X_cw for blocks r below w, where D_r is the inverted diagonal block.
    float y[4][2][4];
    const float* const own_block = square + (4 * (i / 2) + i % 2) * L_STRIDE + 4 * t;
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int e = 0; e < 4; e++) y[r][b][e] = 0.0f;
        if (r == warp) {
            const float* const block = square + 16 * r * (L_STRIDE + 1);
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) y[r][b][e] = block[(4 * t + 2 * b + e % 2) * L_STRIDE + i + 8 * (e / 2)];
        }
        if (r > warp) {
            float sum[2][4] = {};
            Split a;
#pragma unroll
            for (int c = 0; c < r; c++)
                if (c >= warp) {
                    split(a, y[c]);
                    times_transposed(sum, a, own_block + 16 * r * L_STRIDE + 16 * c);
                }
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[b][e] = -sum[b][e];
            split(a, sum);
            times_transposed(y[r], a, own_block + 16 * r * (L_STRIDE + 1));
        }
    }
    bf16* const staged = (bf16*)sums + 16 * warp;
    const float column_beta[2] = {beta_of[16 * warp + i], beta_of[16 * warp + i + 8]};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        u32 m[4];
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                m[2 * b + h] = pack(y[r][b][2 * h] * column_beta[h], y[r][b][2 * h + 1] * column_beta[h]);
        const int n = lane % 8, b = lane / 16, h = lane / 8 % 2;
        store_matrices_transposed(m, staged + (16 * r + 4 * (n / 2) + 2 * b + n % 2) * A_STRIDE + 8 * h);
    }
    sync_warp();
    bf16* const A_out = A + program * (CHUNK * CHUNK) + 16 * warp + 8 * (lane % 2);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int r = 16 * n + lane / 2;
        store_once(A_out + r * CHUNK, *(const uint4*)(staged + r * A_STRIDE + 8 * (lane % 2)));
    }
}
