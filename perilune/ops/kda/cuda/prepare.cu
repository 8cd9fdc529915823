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
constexpr int BETA = 0, NORMS = 256, SHIFTS = 768;  // of the rows; 1 / |q|, 1 / |k|; bits that a tile's rows are shifted
constexpr int ENDS = 896, FACTORS = ENDS + 8 * K;   // a tile's sum, and the other tile's decay
constexpr int SUMS = FACTORS + 8 * K;               // g, running sums, keys; blocks of the inverse and A
constexpr int SUMS_BYTES = larger(4 * CHUNK * SUM_STRIDE, 16384 + 2 * CHUNK * A_STRIDE);
constexpr int ROWS = SUMS + SUMS_BYTES;             // q and k, left operands; L
constexpr int ROW_BYTES = 2 * K, ROWS_OF_K = CHUNK * ROW_BYTES;
constexpr int STAGED = SUMS + 16384;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST_LOG2 = -150.0f;  // 2^-150 is nothing beside any other term
constexpr float LEAST_BETA = 1e-12f;   // a write strength of 0 is computed as this: the gradient divides by it

enum Flags { L2_NORM = 1, GATE = 2, BETA_SIGMOID = 4, BETA_FLOAT = 8 };

DEVICE float power_of_2(int n) { return from_bits((u32)(127 + n) << 23); }

DEVICE u32 pair_of(float x) { return (bits(x) >> 16) * 0x10001u; }  // twice the same bfloat16

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
DEVICE uint4 times(uint4 v, u32 by) {
    return make_uint4(multiply_pair(v.x, by), multiply_pair(v.y, by), multiply_pair(v.z, by), multiply_pair(v.w, by));
}

// Where 8 channels of a row of q or k lie, by the number of their 16 bytes: odd rows swap halves of 128 bytes.
DEVICE int place(int row, int piece) { return row * ROW_BYTES + (piece ^ (row & 1) << 2) * 16; }

// A warp's 32 lanes add up CHANNELS channels each. Their bytes of a row of sums hold its g before: float in place, bfloat16
// in the upper half.
constexpr int CHANNELS = K / 64, SEGMENT = 128 * CHANNELS, G_BYTES = G_FLOAT ? 4 : 2, G_LOW = G_FLOAT ? 0 : SEGMENT / 2;

// A warp copies its channels of 32 rows of g.
DEVICE void copy_gates(u8* segment, const u8* g, int token_bytes, int rows, int lane) {
    constexpr int PIECES = 32 * CHANNELS * G_BYTES / 16, AT_ONCE = 32 / PIECES;
    const int first = (u32)lane / PIECES, piece = (u32)lane % PIECES * 16;
    u8* to = segment + first * (4 * SUM_STRIDE) + G_LOW + piece;
    const u8* from = g + (i64)first * token_bytes + piece;
#pragma unroll
    for (int r = 0; r < TILE; r += AT_ONCE) {
        copy_async(to + r * (4 * SUM_STRIDE), from, first + r < rows);
        from += AT_ONCE * token_bytes;
    }
}

// A warp copies 16 rows of q or k, the first of an even number.
DEVICE void copy_rows(u8* to, const bf16* x, int token, int rows, int lane) {
    constexpr int PIECES = K / 8, AT_ONCE = 32 / PIECES;
    const int first = (u32)lane / PIECES, piece = (u32)lane % PIECES;
    const bf16* from = x + (i64)first * token + 8 * piece;
#pragma unroll
    for (int r = 0; r < 16; r += AT_ONCE) {
        copy_async(to + place(first + r, piece), from, first + r < rows);
        from += AT_ONCE * token;
    }
}

// `sum` after one more row.
DEVICE float add_decay(float sum, float z, float slope, float offset, float bound, bool logits) {
    if (logits) return fmaf(bound, reciprocal(1.0f + exp2_fast(fmaf(z, slope, offset))), sum);
    const float d = z * LOG2E;
    return sum + (d < LEAST_LOG2 ? LEAST_LOG2 : d);  // a NaN stays
}

// Step 1: from g to running sums for a warp's channels of one tile, in place.
DEVICE void add_up(
    float (&sum)[CHANNELS], u8* segment, int lane, int rows, float slope, const float (&offset)[CHANNELS], float bound,
    bool logits) {
    u8* const own = segment + 4 * CHANNELS * lane;
    const u8* const raw = segment + G_LOW + G_BYTES * CHANNELS * lane;
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

// Step 2: q and k times their factors. `row` and row + 8 are this thread's rows, `group` its first 32 channels, 8 t .. 8 t + 7
// its channels of them.
struct Rows {
    u8* memory;
    int row, group, t;

    // To memory, to shared memory as keys and as left operands. LOWER: rows of the second tile. `first`: this thread's
    // first element of Qd, Kd and Kr.
    template <bool LOWER> __device__ __forceinline__ void times_factors(bf16* Qd, bf16* Kd, bf16* Kr, i64 first) const {
        const float* const norms = (const float*)(memory + NORMS);
        const float* const ends = (const float*)(memory + ENDS) + LOWER * K + 32 * group + 8 * t;
        const float* const factors = (const float*)(memory + FACTORS) + LOWER * K + 32 * group + 8 * t;
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            const int r = row + 8 * h, shifted = ((const int*)(memory + SHIFTS))[r & 31];
            const float q_norm = norms[r], k_norm = norms[CHUNK + r], step = (float)shifted, unstep = power_of_2(-shifted);
            const u32 unstep_pair = pair_of(unstep);
            float* const sums = (float*)(memory + SUMS) + r * SUM_STRIDE + 32 * group + 8 * t;
#pragma unroll 1
            for (int j = 0; j < GROUPS / 2; j++) {
                float* const own = sums + 32 * j;
                uint4* const own_q = (uint4*)(memory + ROWS + place(r, 4 * (group + j) + t));
                uint4* const own_k = (uint4*)((u8*)own_q + ROWS_OF_K);
                const uint4 q_raw = *own_q, k_raw = *own_k;
                float sum[8], end[8], factor[8];
#pragma unroll
                for (int c = 0; c < 8; c += 4) {
                    *(float4*)(sum + c) = *(const float4*)(own + c);
                    *(float4*)(end + c) = *(const float4*)(ends + 32 * j + c);
                    *(float4*)(factor + c) = *(const float4*)(factors + 32 * j + c);
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
                    if (LOWER) {
                        q_out[p] = pack(qs[0] * unstep * factor[2 * p], qs[1] * unstep * factor[2 * p + 1]);
                        k_out[p] = pack(ks[0] * unstep * factor[2 * p], ks[1] * unstep * factor[2 * p + 1]);
                        r_out[p] = far[p];
                    } else {  // a power of 2: nothing is rounded twice
                        q_out[p] = multiply_pair(q_up[p], unstep_pair);
                        k_out[p] = multiply_pair(k_up[p], unstep_pair);
                        r_out[p] = pack(to[0] * factor[2 * p], to[1] * factor[2 * p + 1]);
                    }
                }
                *(uint4*)own = make_uint4(near[0], near[1], near[2], near[3]);
                if (!LOWER) *(uint4*)(own + 4) = make_uint4(far[0], far[1], far[2], far[3]);
                *own_q = make_uint4(q_up[0], q_up[1], q_up[2], q_up[3]);
                *own_k = make_uint4(k_up[0], k_up[1], k_up[2], k_up[3]);
                const i64 at = first + 8 * h * K + 32 * j;
                store_once(Qd + at, make_uint4(q_out[0], q_out[1], q_out[2], q_out[3]));
                store_once(Kd + at, make_uint4(k_out[0], k_out[1], k_out[2], k_out[3]));
                store_once(Kr + at, make_uint4(r_out[0], r_out[1], r_out[2], r_out[3]));
            }
        }
    }
};

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
    i64 q_head, i64 k_head, i64 g_head, i64 beta_head, int q_token, int k_token, int g_token, int beta_token, int heads,
    int group, int flags) {
    SHARED(memory);
    float* const beta_of = (float*)(memory + BETA);
    float* const norms = (float*)(memory + NORMS);
    int* const shifts = (int*)(memory + SHIFTS);
    float* const ends = (float*)(memory + ENDS);
    float* const factors = (float*)(memory + FACTORS);
    float* const sums = (float*)(memory + SUMS);
    float* const square = (float*)(memory + ROWS);

    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31, i = lane >> 2, t = lane & 3;
    const i64 program = blockIdx.x;
    const int chunk = blockIdx.x / (u32)heads, head = blockIdx.x % (u32)heads, shared_head = (u32)head / (u32)group;
    const i64 start = chunks[2 * chunk];
    const int count = chunks[2 * chunk + 1];

    // Step 1: every warp works on what it has copied itself.
    if (warp < 4) {
        const int tile = warp >> 1, channel = (thread & 63) * CHANNELS;
        const i64 at = (start + TILE * tile) * g_token + head * g_head + (warp & 1) * 32 * CHANNELS;
        u8* const segment = memory + SUMS + TILE * tile * (4 * SUM_STRIDE) + (warp & 1) * SEGMENT;
        copy_gates(segment, (const u8*)g + at * G_BYTES, g_token * G_BYTES, count - TILE * tile, lane);
        copy_commit();
        if (warp == 0) shifts[lane] = (int)fmaf(shift, (float)(lane + 1), 0.5f);
        const float rate = a_log ? exp2_fast(LOG2E * a_log[head]) : 1.0f, slope = -LOG2E * rate, bound = LOG2E * lower_bound;
        float offset[CHANNELS], sum[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            offset[c] = dt_bias ? slope * dt_bias[head * K + channel + c] : 0.0f;
            sum[c] = 0.0f;
        }
        copy_wait<0>();
        sync_warp();
        add_up(sum, segment, lane, count - TILE * tile, slope, offset, bound, flags & GATE);
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            ends[tile * K + channel + c] = sum[c];
            factors[(1 - tile) * K + channel + c] = exp2_fast(sum[c]);
        }
    } else {
        const int first = 16 * (warp - 4), row = first + i;
        const i64 token = start + first;
        copy_rows(memory + ROWS + place(first, 0), q + token * q_token + shared_head * q_head, q_token, count - first, lane);
        copy_rows(memory + ROWS + ROWS_OF_K + place(first, 0), k + token * k_token + shared_head * k_head, k_token, count - first, lane);
        copy_commit();
        if (lane < 16) {
            float b = 0.0f;
            const int r = first + lane;
            if (r < count) {
                const i64 at = (start + r) * beta_token + head * beta_head;
                b = flags & BETA_FLOAT ? ((const float*)beta)[at] : to_float(((const bf16*)beta)[at]);
                if (flags & BETA_SIGMOID) b = beta_scale * reciprocal(1.0f + exp2_fast(-LOG2E * b));
                if (fabsf(b) < LEAST_BETA) b = LEAST_BETA;
            }
            beta_of[r] = b;
        }
        copy_wait<0>();
        sync_warp();
#pragma unroll 1
        for (int x = 0; x < 2; x++) {
            float norm[2] = {1.0f, 1.0f};
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
    const int tile = warp >> 2, row = 16 * (warp >> 1) + i;
    {
        Rows x;
        x.memory = memory;
        x.row = row;
        x.group = (warp & 1) * (GROUPS / 2);
        x.t = t;
        const i64 at = program * (CHUNK * K) + row * K + 32 * x.group + 8 * t;
        if (tile) x.times_factors<true>(Qd, Kd, Kr, at);
        else x.times_factors<false>(Qd, Kd, Kr, at);
    }
    sync_threads();

    const bool of_keys = warp & 1;
    const u8* const rows = memory + ROWS + (of_keys ? ROWS_OF_K : 0);
    const float* const first_key = sums + (8 * (i >> 1) + (i & 1)) * SUM_STRIDE + 8 * t;
    float near[4][4], far[4][4];
    const int shifted[2] = {shifts[row & 31], shifts[(row & 31) + 8]};
    const u32 unstep[2] = {pair_of(power_of_2(-shifted[0])), pair_of(power_of_2(-shifted[1]))};
    against_keys(near, rows, row, t, first_key + TILE * tile * SUM_STRIDE, false, unstep);
    if (tile) against_keys(far, rows, row, t, first_key + 4, true, unstep);
    // L takes the place of rows that other warps still read.
    if (of_keys) barrier_sync(1, THREADS);
    else barrier_arrive(1, THREADS);
    int columns_shifted[8];
#pragma unroll
    for (int c = 0; c < 8; c++) columns_shifted[c] = shifts[8 * t + c];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = (row & 31) + 8 * h;
        float inside[8], before[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float unshift = power_of_2(columns_shifted[c] - shifted[h]);
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
    const int own_block = warp >> 1;
    {
        float* const block = square + 16 * own_block * (L_STRIDE + 1);
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
    barrier_sync(2, THREADS / 2);

    // Columns 16 w .. of the inverse X, as y = X^T: a block of y holds rows i, i + 8 and columns 4 t + 2 b, + 1 of block r.
    // X_rw = -D_r sum_c L_rc X_cw for blocks r below w, where D_r is the inverted diagonal block.
    float* const found = sums + 1024 * own_block + 4 * lane;  // this thread's part of the blocks of y found so far
    const float* const mine = square + (4 * (i >> 1) + (i & 1)) * L_STRIDE + 4 * t;
    bf16* const staged = (bf16*)(memory + STAGED) + 16 * own_block;
    const float column_beta[2] = {beta_of[16 * own_block + i], beta_of[16 * own_block + i + 8]};
    const int n = lane & 7, b = lane >> 4, h = lane >> 3 & 1;
    bf16* const stored = staged + (4 * (n >> 1) + 2 * b + (n & 1)) * A_STRIDE + 8 * h;
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
    bf16* const A_out = A + program * (CHUNK * CHUNK) + 16 * own_block + 8 * (lane & 1);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int r = 16 * n + (lane >> 1);
        store_once(A_out + r * CHUNK, *(const uint4*)(staged + r * A_STRIDE + 8 * (lane & 1)));
    }
}
