// Everything about a chunk that does not need the state, one block of eight warps a chunk and head:
//
//     Qd = q e^G      Kd = k e^G      Kr = k e^(G_last - G)      gamma = e^G_last
//     P  = tril(q k^T with decay)     A = (I + L)^-1 diag(beta),  L = strictly lower beta k k^T with decay
//
// G is the running sum of the chunk's log-decays, to base 2 in here. The same factors as in ops/kda/triton/prepare.py: two
// tiles of 32 rows, inside which rows and columns are shifted by half the bound a step (both factors stay within 2^+-116),
// between which the decay is counted from the border. The shift is rounded to whole bits, a number for each row, so that
// taking it off is exact: the same bfloat16 operands serve both products.
//
// 1. q, k and g are copied to shared memory. Four warps add up the log-decays of their channels, the other four find the
//    norms of q and k.
// 2. A warp has 16 rows and half the channels, a thread 8 neighbouring channels of every 32 in two of the rows: as these lie
//    for loads and stores of 16 bytes, they are the tensor cores' left operand too, if the channels of a product are counted
//    in that order. Left operands take the place of q and k, keys (the right operands) that of the running sums.
// 3. P by four warps, L by the other four; P leaves from registers (keys are counted so that a thread holds 8 neighbours).
// 4. (I + L)^-1: four warps invert a diagonal block of 16 each by substitution in float32 (no series: traps T02), then find
//    16 columns of the inverse each by block substitution, transposed so that a product's result is the next one's left
//    operand. Products in three tf32 parts, as exact as float32.
//
// Loops stay loops where they can: a block runs through its code once, and fetching instructions would take the time.
#include "device.h"

// K: channels, 64 or 128. G_FLOAT: g is float, else bfloat16. BLOCKS: of a multiprocessor.
constexpr int CHUNK = 64, TILE = 32, THREADS = 256, GROUPS = K / 32;
constexpr int SUM_STRIDE = K + 4, L_STRIDE = 80, A_STRIDE = 72;  // elements of a row, against bank conflicts
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
// Shared memory in bytes: what is named on the right takes the place of what is named before it.
constexpr int BETA = 0, NORMS = 256;                // of the rows; 1 / |q|, 1 / |k|
constexpr int ENDS = 768, FACTORS = ENDS + 8 * K;   // a tile's sum, and the other tile's decay
constexpr int SUMS = FACTORS + 8 * K;               // g, running sums, keys; blocks of the inverse and A
constexpr int SUMS_BYTES = larger(4 * CHUNK * SUM_STRIDE, 16384 + 2 * CHUNK * A_STRIDE);
constexpr int ROWS = SUMS + SUMS_BYTES;             // q and k, left operands; L
constexpr int ROW_BYTES = 2 * K, ROWS_OF_K = CHUNK * ROW_BYTES;
constexpr int STAGED = SUMS + 16384;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST_LOG2 = -150.0f;  // 2^-150 is nothing beside any other term
constexpr float LEAST_BETA = 1e-12f;   // a write strength of 0 is computed as this: the gradient divides by it

enum Flags { L2_NORM = 1, GATE = 2, BETA_SIGMOID = 4, BETA_FLOAT = 8 };

// Bits by which row r of a tile is shifted.
DEVICE int shift_of(int r, float shift) { return (int)fmaf(shift, (float)(r + 1), 0.5f); }
DEVICE float power_of_2(int n) { return from_bits((u32)(127 + n) << 23); }

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
DEVICE uint4 times(uint4 v, u32 by) {
    return make_uint4(multiply_pair(v.x, by), multiply_pair(v.y, by), multiply_pair(v.z, by), multiply_pair(v.w, by));
}

// Where 8 channels of a row of q or k lie, by the number of their 16 bytes: odd rows swap halves of 128 bytes.
DEVICE int place(int row, int piece) { return row * ROW_BYTES + (piece ^ row % 2 * 4) * 16; }

// A warp's 32 lanes add up CHANNELS channels each. Their bytes of a row of sums hold its g before: float in place, bfloat16
// in the upper half.
constexpr int CHANNELS = K / 64, SEGMENT = 128 * CHANNELS, G_BYTES = G_FLOAT ? 4 : 2, G_LOW = G_FLOAT ? 0 : SEGMENT / 2;

DEVICE void copy_gates(u8* sums, const u8* g, int token_bytes, int rows, int thread) {
    constexpr int PIECES = K * G_BYTES / 16, OF_SEGMENT = 32 * CHANNELS * G_BYTES / 16;
#pragma unroll
    for (int n = 0; n < CHUNK * PIECES / THREADS; n++) {
        const int r = (thread + n * THREADS) / PIECES, piece = thread % PIECES;
        u8* const to = sums + r * (4 * SUM_STRIDE) + piece / OF_SEGMENT * SEGMENT + G_LOW + piece % OF_SEGMENT * 16;
        copy_async(to, g + (i64)r * token_bytes + 16 * piece, r < rows);
    }
}

DEVICE void copy_rows(u8* to, const bf16* from, i64 token, int rows, int thread) {
    constexpr int PIECES = K / 8;
#pragma unroll
    for (int n = 0; n < CHUNK * PIECES / THREADS; n++) {
        const int r = (thread + n * THREADS) / PIECES, piece = thread % PIECES;
        copy_async(to + place(r, piece), from + r * token + 8 * piece, r < rows);
    }
}

// `sum` after one more row.
DEVICE float add_decay(float sum, float z, float slope, float offset, float bound, bool logits) {
    if (logits) return fmaf(bound, reciprocal(1.0f + exp2_fast(fmaf(z, slope, offset))), sum);
    const float d = z * LOG2E;
    return sum + (d < LEAST_LOG2 ? LEAST_LOG2 : d);  // a NaN stays
}

// Step 1: from g to running sums for a warp's channels of one tile, in place. `own` is this lane's part of the first row.
DEVICE void add_up(float (&sum)[CHANNELS], u8* own, int lane, int rows, float slope, const float (&offset)[CHANNELS], float bound, bool logits) {
    const u8* const raw = own - lane * 4 * CHANNELS + G_LOW + lane * G_BYTES * CHANNELS;
#pragma unroll 1
    for (int first = 0; first < TILE; first += 8) {
        float z[8][CHANNELS];
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const u8* const p = raw + (first + r) * (4 * SUM_STRIDE);
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) z[r][c] = G_FLOAT ? ((const float*)p)[c] : to_float(((const bf16*)p)[c]);
        }
        sync_warp();  // everybody has read what is overwritten now
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float row_bound = first + r < rows ? bound : 0.0f;  // rows of no token are copied as 0: no decay
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                sum[c] = add_decay(sum[c], z[r][c], slope, offset[c], row_bound, logits);
                ((float*)(own + (first + r) * (4 * SUM_STRIDE)))[c] = sum[c];
            }
        }
    }
}

// Step 1: 1 / norm of rows i and i + 8 of 16; `row` is the first of them.
DEVICE void norms_of(float (&norm)[2], const u8* rows, int row, int t) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            const uint4 v = *(const uint4*)(rows + place(row + 8 * h, 4 * j + t));
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const float x = low_half(word(v, p)), y = high_half(word(v, p));
                sum = fmaf(x, x, fmaf(y, y, sum));
            }
        }
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        norm[h] = rsqrt_fast(sum + 1e-6f);
    }
}

// Step 3: 16 rows against 32 keys. Column n of block b is key 8 (n / 2) + 2 b + n % 2, so that a thread holds, of rows i and
// i + 8, keys 8 t .. 8 t + 7 in the order [b][e]. `rows` holds this thread's 8 channels of row i, `keys` of its first key.
// `scaled`: rows times powers of 2, given as pairs.
DEVICE void against_keys(float (&d)[4][4], const u8* rows, int row, int t, const float* keys, bool scaled, const u32 (&by)[2]) {
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) d[b][e] = 0.0f;
#pragma unroll 2
    for (int j = 0; j < GROUPS; j++) {
        uint4 x = *(const uint4*)(rows + place(row, 4 * j + t)), y = *(const uint4*)(rows + place(row + 8, 4 * j + t));
        if (scaled) x = times(x, by[0]), y = times(y, by[1]);
        const u32 first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint4 key = *(const uint4*)(keys + 2 * b * SUM_STRIDE + 32 * j);
            multiply_add(d[b], first, key.x, key.y);
            multiply_add(d[b], second, key.z, key.w);
        }
    }
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
        float small[2][4] = {};
#pragma unroll
        for (int s = 0; s < 2; s++) {
            multiply_add_tf32(small[0], a.high[s], low[2 * s], low[2 * s + 1]);
            multiply_add_tf32(small[1], a.low[s], high[2 * s], high[2 * s + 1]);
            multiply_add_tf32(d[b], a.high[s], high[2 * s], high[2 * s + 1]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) d[b][e] += small[0][e] + small[1][e];
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
    float* const norms = (float*)(memory + NORMS);
    float* const ends = (float*)(memory + ENDS);
    float* const factors = (float*)(memory + FACTORS);
    float* const sums = (float*)(memory + SUMS);
    float* const square = (float*)(memory + ROWS);

    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32, i = lane / 4, t = lane % 4;
    const i64 program = blockIdx.x;
    const int chunk = blockIdx.x / heads, head = blockIdx.x % heads;
    const i64 start = chunks[2 * chunk];
    const int count = chunks[2 * chunk + 1];
    copy_gates(memory + SUMS, (const u8*)g + (start * g_token + head * g_head) * G_BYTES, (int)g_token * G_BYTES, count, thread);
    copy_rows(memory + ROWS, q + start * q_token + head / group * q_head, q_token, count, thread);
    copy_rows(memory + ROWS + ROWS_OF_K, k + start * k_token + head / group * k_head, k_token, count, thread);
    copy_commit();
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
    copy_wait<0>();
    sync_threads();

    // Step 1.
    if (warp < 4) {
        const int tile = warp / 2, channel = thread % 64 * CHANNELS;
        const float rate = a_log ? exp2_fast(LOG2E * a_log[head]) : 1.0f, slope = -LOG2E * rate, bound = LOG2E * lower_bound;
        float offset[CHANNELS], sum[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            offset[c] = dt_bias ? slope * dt_bias[head * K + channel + c] : 0.0f;
            sum[c] = 0.0f;
        }
        u8* const own = memory + SUMS + TILE * tile * (4 * SUM_STRIDE) + 4 * channel;
        if (flags & GATE) add_up(sum, own, lane, count - TILE * tile, slope, offset, bound, true);
        else add_up(sum, own, lane, count - TILE * tile, slope, offset, bound, false);
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            ends[tile * K + channel + c] = sum[c];
            factors[(1 - tile) * K + channel + c] = exp2_fast(sum[c]);
        }
    } else {
#pragma unroll 1
        for (int x = 0; x < 2; x++) {
            float norm[2] = {1.0f, 1.0f};
            const int row = 16 * (warp - 4) + i;
            if (flags & L2_NORM) norms_of(norm, memory + ROWS + x * ROWS_OF_K, row, t);
            if (t == 0) {
                norms[x * CHUNK + row] = x ? norm[0] : scale * norm[0];
                norms[x * CHUNK + row + 8] = x ? norm[1] : scale * norm[1];
            }
        }
    }
    sync_threads();
    if (thread < K) gamma[program * K + thread] = exp2_fast(ends[thread] + ends[K + thread]);

    // Steps 2 and 3: 16 rows, of which this thread has `row` and row + 8.
    const int tile = warp / 4, row = 16 * (warp / 2) + i;
#pragma unroll 1
    for (int n = 0; n < GROUPS; n++) {
        const int r = row + n % 2 * 8, group_of_32 = warp % 2 * (GROUPS / 2) + n / 2, channel = 32 * group_of_32 + 8 * t;
        const float q_norm = norms[r], k_norm = norms[CHUNK + r];
        const int bits_off = shift_of(r % TILE, shift);
        const float step = (float)bits_off, unstep = power_of_2(-bits_off);
        float* const own = sums + r * SUM_STRIDE + channel;
        uint4* const own_q = (uint4*)(memory + ROWS + place(r, 4 * group_of_32 + t));
        uint4* const own_k = (uint4*)((u8*)own_q + ROWS_OF_K);
        const uint4 q_raw = *own_q, k_raw = *own_k;
        float sum[8], end[8], factor[8];
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
            *(float4*)(sum + c) = *(const float4*)(own + c);
            *(float4*)(end + c) = *(const float4*)(ends + tile * K + channel + c);
            *(float4*)(factor + c) = *(const float4*)(factors + tile * K + channel + c);
        }
        u32 q_up[4], k_up[4], near[4], far[4], q_out[4], k_out[4], r_out[4];
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const u32 q_two = word(q_raw, p), k_two = word(k_raw, p);
            float qs[2] = {low_half(q_two) * q_norm, high_half(q_two) * q_norm};
            float ks[2] = {low_half(k_two) * k_norm, high_half(k_two) * k_norm};
            float down[2], to[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float x = sum[2 * p + e], s = x + step;
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
            const float enter[2] = {tile ? factor[2 * p] : 1.0f, tile ? factor[2 * p + 1] : 1.0f};
            const float leave[2] = {tile ? 1.0f : factor[2 * p], tile ? 1.0f : factor[2 * p + 1]};
            q_out[p] = pack(qs[0] * unstep * enter[0], qs[1] * unstep * enter[1]);
            k_out[p] = pack(ks[0] * unstep * enter[0], ks[1] * unstep * enter[1]);
            r_out[p] = pack(to[0] * leave[0], to[1] * leave[1]);
        }
        *(uint4*)own = make_uint4(near[0], near[1], near[2], near[3]);
        *(uint4*)(own + 4) = make_uint4(far[0], far[1], far[2], far[3]);
        *own_q = make_uint4(q_up[0], q_up[1], q_up[2], q_up[3]);
        *own_k = make_uint4(k_up[0], k_up[1], k_up[2], k_up[3]);
        const i64 at = program * (CHUNK * K) + r * K + channel;
        store_once(Qd + at, make_uint4(q_out[0], q_out[1], q_out[2], q_out[3]));
        store_once(Kd + at, make_uint4(k_out[0], k_out[1], k_out[2], k_out[3]));
        store_once(Kr + at, make_uint4(r_out[0], r_out[1], r_out[2], r_out[3]));
    }
    sync_threads();

    const bool of_keys = warp % 2;
    const u8* const rows = memory + ROWS + (of_keys ? ROWS_OF_K : 0);
    const float* const first_key = sums + (8 * (i / 2) + i % 2) * SUM_STRIDE + 8 * t;
    float near[4][4], far[4][4];
    const int shifts[2] = {shift_of(row % TILE, shift), shift_of(row % TILE + 8, shift)};
    const u32 unstep[2] = {(bits(power_of_2(-shifts[0])) >> 16) * 0x10001u, (bits(power_of_2(-shifts[1])) >> 16) * 0x10001u};
    against_keys(near, rows, row, t, first_key + TILE * tile * SUM_STRIDE, false, unstep);
    if (tile) against_keys(far, rows, row, t, first_key + 4, true, unstep);
    // L takes the place of rows that other warps still read.
    if (of_keys) barrier_sync(1, THREADS);
    else barrier_arrive(1, THREADS);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row % TILE + 8 * h;
        float inside[8], before[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float unshift = power_of_2(shift_of(8 * t + c, shift) - shifts[h]);
            inside[c] = 8 * t + c + of_keys <= r ? near[c / 2][2 * h + c % 2] * unshift : 0.0f;
            before[c] = tile ? far[c / 2][2 * h + c % 2] : 0.0f;
        }
        if (!of_keys) {
            bf16* const out = P + program * (CHUNK * CHUNK) + (row + 8 * h) * CHUNK + 8 * t;
            store_once(out + TILE * tile, pack8(inside));
            store_once(out + TILE * (1 - tile), pack8(before));
        } else {
            const float row_beta = beta_of[row + 8 * h];
            float* const out = square + (row + 8 * h) * L_STRIDE + 8 * t;
#pragma unroll
            for (int c = 0; c < 8; c++) inside[c] *= row_beta, before[c] *= row_beta;
#pragma unroll
            for (int c = 0; c < 8; c += 4) {
                *(float4*)(out + TILE * tile + c) = make_float4(inside[c], inside[c + 1], inside[c + 2], inside[c + 3]);
                if (tile) *(float4*)(out + c) = make_float4(before[c], before[c + 1], before[c + 2], before[c + 3]);
            }
        }
    }
    if (!of_keys) return;
    sync_warp();

    // Step 4, four warps: the diagonal block, a lane a column (twice over); the inverse takes the block's place.
    const int own_block = warp / 2;
    {
        float* const block = square + 16 * own_block * (L_STRIDE + 1);
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
    barrier_sync(2, THREADS / 2);

    // Columns 16 w .. of the inverse X, as y = X^T: a block of y holds rows i, i + 8 and columns 4 t + 2 b, + 1 of block r.
    // X_rw = -D_r sum_c L_rc X_cw for blocks r below w, where D_r is the inverted diagonal block.
    float* const found = sums + 1024 * own_block + 4 * lane;  // this thread's part of the blocks of y found so far
    const float* const mine = square + (4 * (i / 2) + i % 2) * L_STRIDE + 4 * t;
    bf16* const staged = (bf16*)(memory + STAGED) + 16 * own_block;
    const float column_beta[2] = {beta_of[16 * own_block + i], beta_of[16 * own_block + i + 8]};
    const int n = lane % 8, b = lane / 16, h = lane / 8 % 2;
    bf16* const stored = staged + (4 * (n / 2) + 2 * b + n % 2) * A_STRIDE + 8 * h;
#pragma unroll 1
    for (int r = 0; r < 4; r++) {
        float y[2][4] = {};
        if (r == own_block) {
            const float* const block = square + 16 * r * (L_STRIDE + 1);
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) y[b][e] = block[(4 * t + 2 * b + e % 2) * L_STRIDE + i + 8 * (e / 2)];
        }
        if (r > own_block) {
            float sum[2][4] = {};
            Split a;
#pragma unroll 1
            for (int c = own_block; c < r; c++) {
                float x[2][4];
                *(float4*)x[0] = *(const float4*)(found + 256 * c);
                *(float4*)x[1] = *(const float4*)(found + 256 * c + 128);
                split(a, x);
                times_transposed(sum, a, mine + 16 * r * L_STRIDE + 16 * c);
            }
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[b][e] = -sum[b][e];
            split(a, sum);
            times_transposed(y, a, mine + 16 * r * (L_STRIDE + 1));
        }
        *(float4*)(found + 256 * r) = make_float4(y[0][0], y[0][1], y[0][2], y[0][3]);
        *(float4*)(found + 256 * r + 128) = make_float4(y[1][0], y[1][1], y[1][2], y[1][3]);
        u32 m[4];
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) m[2 * b + h] = pack(y[b][2 * h] * column_beta[h], y[b][2 * h + 1] * column_beta[h]);
        store_matrices_transposed(m, stored + 16 * r * A_STRIDE);
    }
    sync_warp();
    bf16* const A_out = A + program * (CHUNK * CHUNK) + 16 * own_block + 8 * (lane % 2);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int r = 16 * n + lane / 2;
        store_once(A_out + r * CHUNK, *(const uint4*)(staged + r * A_STRIDE + 8 * (lane % 2)));
    }
}
