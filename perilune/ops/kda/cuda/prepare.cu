// Everything about a chunk that does not need the state, one block of eight warps a chunk and head:
//
//     Qd = q e^G      Kd = k e^G      Kr = k e^(G_last - G)      gamma = e^G_last
//     P  = tril(q k^T with decay)     A = (I + L)^-1,  L = strictly lower beta k k^T with decay      beta in float
//
// G is the running sum of the chunk's log-decays, to base 2 in here. The same factors as in ops/kda/triton/prepare.py: two
// tiles of 32 rows, inside which rows and columns are shifted by half the bound a step (both factors stay within 2^+-116),
// between which the decay is counted from the border. The shift is rounded to whole bits, a number for each row, so that
// taking it off is exact: the same bfloat16 operands serve both products.
//
// 1. q, k and g are copied to shared memory. Four warps add up the log-decays of their channels, the other four find the
//    norms of q and k, and of their products those on the diagonal, by tensor cores.
// 2. A warp has 16 rows and half the channels, a thread 8 neighbouring channels of every 32 in two of the rows: as these lie
//    for loads and stores of 16 bytes, they are the tensor cores' left operand too, if the channels of a product are counted
//    in that order. Left operands take the place of q and k, keys (the right operands) that of the running sums.
// 3. P by four warps, L by the other four; P leaves from registers (keys are counted so that a thread holds 8 neighbours), its
//    diagonal as the product of q and k themselves.
// 4. (I + L)^-1: four warps invert a diagonal block of 16 each by substitution in float32 (no series: traps T02), then find
//    16 columns of the inverse each by block substitution, transposed so that a product's result is the next one's left
//    operand. Products in three tf32 parts, as exact as float32.
//
// Loops stay loops where they can: a block runs through its code once, and fetching instructions would take the time.
#include "prepare_inverse.h"
#include "prepare_products.h"
#include "prepare_rows.h"
#if !BOUNDED
#include "prepare_unbounded.h"
#endif

// q, k [tokens, heads / group, K], g [tokens, heads, K], beta [tokens, heads] by strides in elements; a_log [heads] and
// dt_bias [heads, K] float or null; chunks [chunks, 2], first token and tokens. Outputs [chunks, heads, ...]; rows of no
// token are 0, of A those of the unit matrix. Of P and A, which are lower, only blocks of 16 on and below the diagonal are
// written unless WHOLE. FULL: chunk n is tokens 64 n .. 64 n + 63, and `chunks` is not read. shift: half the bound, in bits a step.
KERNEL(THREADS, BLOCKS)
prepare(
    const bf16* q, const bf16* k, const void* g, const void* beta, const float* a_log, const float* dt_bias, const int* chunks,
    bf16* __restrict__ Qd, bf16* __restrict__ Kd, bf16* __restrict__ Kr, bf16* __restrict__ P, bf16* __restrict__ A,
    float* __restrict__ gamma, float* __restrict__ betas, float scale, float lower_bound, float shift, float beta_scale,
    i64 q_head, i64 k_head, i64 g_head, i64 beta_head, int q_token, int k_token, int g_token, int beta_token, int heads,
    int group, int flags) {
    SHARED(memory);
    wait_for_earlier();
    let_next_start();
    float* const beta_of = (float*)(memory + BETA);
    float* const norms = (float*)(memory + NORMS);
    float* const diagonal = (float*)(memory + DIAGONAL);
    int* const shifts = (int*)(memory + SHIFTS);
    float* const units = (float*)(memory + UNITS);
    float* const ends = (float*)(memory + ENDS);
    float* const factors = (float*)(memory + FACTORS);
    float* const sums = (float*)(memory + SUMS);
    float* const square = (float*)(memory + ROWS);

    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31, i = lane >> 2, t = lane & 3;
    // The last chunks first: what the scan reads first is then still in the L2 cache.
    const u32 program = gridDim.x - 1 - blockIdx.x;
    const int chunk = program / (u32)heads, head = program % (u32)heads, shared_head = (u32)head / (u32)group;
    const i64 start = FULL ? (i64)chunk * CHUNK : (i64)chunks[2 * chunk];
    const int count = FULL ? CHUNK : chunks[2 * chunk + 1];

    // Step 1: every warp works on what it has copied itself.
    if (warp < 4) {
        const int tile = warp >> 1, channel = (thread & 63) * CHANNELS;
        const i64 at = (start + TILE * tile) * g_token + head * g_head + (warp & 1) * 32 * CHANNELS;
        u8* const segment = memory + SUMS + TILE * tile * (4 * SUM_STRIDE) + (warp & 1) * SEGMENT;
        const int rows = FULL ? TILE : count - TILE * tile;
        copy_gates(segment, (const u8*)g + at * G_BYTES, g_token * G_BYTES, rows, lane);
        copy_commit();
        if (warp == 0) shifts[lane] = (int)fmaf(shift, (float)(lane + 1), 0.5f);
        const float rate = a_log ? exp2_fast(LOG2E * a_log[head]) : 1.0f;
        const float slope = BOUNDED ? -LOG2E * rate : LOG2E, bound = BOUNDED ? LOG2E * lower_bound : -rate;
        float offset[CHANNELS], sum[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            offset[c] = dt_bias ? slope * dt_bias[head * K + channel + c] : 0.0f;
            sum[c] = 0.0f;
        }
        copy_wait<0>();
        sync_warp();
        add_up(sum, segment, lane, rows, slope, offset, bound, flags & GATE);
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            ends[tile * K + channel + c] = sum[c];
            factors[(1 - tile) * K + channel + c] = exp2_fast(sum[c]);
        }
    } else {
        const int first = 16 * (warp - 4), row = first + i, rows = FULL ? 16 : count - first;
        const i64 token = start + first;
        copy_rows(memory + ROWS + place(first, 0), q + token * q_token + shared_head * q_head, q_token, rows, lane);
        copy_rows(memory + ROWS + ROWS_OF_K + place(first, 0), k + token * k_token + shared_head * k_head, k_token, rows, lane);
        copy_commit();
        if (lane < 16) {
            float b = 0.0f;
            const int r = first + lane;
            if (lane < rows) {
                const i64 at = (start + r) * beta_token + head * beta_head;
                b = flags & BETA_FLOAT ? ((const float*)beta)[at] : to_float(((const bf16*)beta)[at]);
                if (flags & BETA_SIGMOID) b = beta_scale * reciprocal(1.0f + exp2_fast(-LOG2E * b));
                if (fabsf(b) < LEAST_BETA) b = LEAST_BETA;
            }
            beta_of[r] = b;
            betas[(i64)program * CHUNK + r] = b;
        }
        copy_wait<0>();
        sync_warp();
        float of_q[2][4], of_k[2][4];
        products_of(of_q, of_k, memory + ROWS, row, t);
        if (t == i >> 1)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float q_norm = flags & L2_NORM ? rsqrt_fast(on_diagonal(of_q[h], 0, i) + L2_EPS) : 1.0f;
                const float k_norm = flags & L2_NORM ? rsqrt_fast(on_diagonal(of_k[h], 1, i) + L2_EPS) : 1.0f;
                norms[row + 8 * h] = scale * q_norm;
                norms[CHUNK + row + 8 * h] = k_norm;
                diagonal[row + 8 * h] = on_diagonal(of_q[h], 1, i) * (scale * q_norm) * k_norm;
            }
#if !BOUNDED
        sync_warp();
        if (flags & L2_NORM) lengths(units, memory + ROWS, norms, first, i, t);
        else if (lane < 16) units[first + lane] = 1.0f;  // keys as they are were bfloat16 before
#endif
    }
    sync_threads();
    if (thread < K) gamma[(i64)program * K + thread] = exp2_fast(ends[thread] + ends[K + thread]);

#if BOUNDED
    // Steps 2 and 3: 16 rows, of which this thread has `row` and row + 8.
    const int tile = warp >> 2, row = 16 * (warp >> 1) + i;
    const Rows own = {memory, row, (warp & 1) * (GROUPS / 2), t};
    const i64 first = (i64)program * (CHUNK * K) + row * K + 32 * own.group + 8 * t;
    if (tile) own.times_factors<true>(Qd, Kd, Kr, first);
    else own.times_factors<false>(Qd, Kd, Kr, first);
    sync_threads();

    const bool of_keys = (warp ^ warp >> 2) & 1;  // the inverse, a quarter of all instructions, on every scheduler of warps alike
    const u8* const rows = memory + ROWS + (of_keys ? ROWS_OF_K : 0);
    const float* const first_key = sums + (8 * (i >> 1) + (i & 1)) * SUM_STRIDE + 8 * t;
    float near[4][4], far[4][4] = {};
    const int shifted[2] = {shifts[row & 31], shifts[(row & 31) + 8]};
    const u32 unstep[2] = {pair_of(power_of_2(-shifted[0])), pair_of(power_of_2(-shifted[1]))};
    const u32 ones[2] = {ONES, ONES};
    against_keys(near, rows, row, t, first_key + TILE * tile * SUM_STRIDE, ones);
    if (tile) against_keys(far, rows, row, t, first_key + 4, unstep);
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
            before[c] = far[c / 2][2 * h + c % 2];
        }
        if (!of_keys) {
            const float exact = diagonal[row + 8 * h];
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (8 * t + c == r) inside[c] = exact;
            bf16* const out = P + (i64)program * (CHUNK * CHUNK) + (row + 8 * h) * CHUNK + 8 * t;
            if (t / 2 <= (warp >> 1 & 1) || flags & WHOLE) store_once(out + TILE * tile, pack8(inside));
            if (tile || flags & WHOLE) store_once(out + TILE * (1 - tile), pack8(before));
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
#else
    // Steps 2 and 3 without a bound: see prepare_unbounded.h.
    const bool of_keys = (warp ^ warp >> 2) & 1;
    const int block = warp >> 1, row = 16 * block + i, half = (warp & 1) * (GROUPS / 2);
    float* const parts = (float*)(memory + PARTS) + lane;
    float mine[PARTS_OF_WARP];
    {
        Inside inside;
        float theirs[PARTS_OF_WARP];
        inside_blocks(inside, memory, block, half, i, t);
        of_kind(mine, inside, of_keys, i, t);
        of_kind(theirs, inside, !of_keys, i, t);
#pragma unroll
        for (int n = 0; n < PARTS_OF_WARP; n++) parts[32 * ((warp ^ 1) * PARTS_OF_WARP + n)] = theirs[n];
    }
    leave_factors(memory, block, half, i, t, Qd, Kd, Kr, (i64)program * (CHUNK * K) + row * K + 32 * half + 8 * t);
    sync_threads();

    float before[3][2][4] = {};
    against_blocks(before, memory, memory + ROWS + (of_keys ? ROWS_OF_K : 0), block, i, t);
#pragma unroll
    for (int n = 0; n < PARTS_OF_WARP; n++) mine[n] += parts[32 * (warp * PARTS_OF_WARP + n)];
    // L takes the place of rows that other warps still read.
    if (of_keys) barrier_sync(1, THREADS);
    else barrier_arrive(1, THREADS);
    if (!of_keys) {
        bf16* const staged = (bf16*)(memory + SUMS) + row * A_STRIDE;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bf16* const to = staged + 8 * h * A_STRIDE;
            const float exact = diagonal[row + 8 * h];
            float own[2];
#pragma unroll
            for (int e = 0; e < 2; e++) own[e] = 2 * t + e < i ? mine[4 * h + e] : 2 * t + e == i ? exact : 0.0f;
            const u32 diagonal_pair = pack(own[0], own[1]);
            *(u32*)(to + 16 * block + 2 * t) = h ? pack(mine[2], mine[3]) : diagonal_pair;
            *(u32*)(to + 16 * block + 8 + 2 * t) = h ? diagonal_pair : 0u;
#pragma unroll
            for (int other = 0; other < 4; other++)
                if (other < block)
                    *(uint2*)(to + 16 * other + 4 * t) = make_uint2(
                        pack(before[other % 3][0][2 * h], before[other % 3][0][2 * h + 1]), pack(before[other % 3][1][2 * h], before[other % 3][1][2 * h + 1])
                    );
                else if (other > block)
                    *(uint2*)(to + 16 * other + 4 * t) = make_uint2(0u, 0u);
        }
        sync_warp();
        const int piece = lane & 7;
        if (piece / 2 <= block || flags & WHOLE)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int r = 16 * block + 4 * n + (lane >> 3);
                store_once(P + (i64)program * (CHUNK * CHUNK) + r * CHUNK + 8 * piece, *(const uint4*)((const bf16*)(memory + SUMS) + r * A_STRIDE + 8 * piece));
            }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float strength = beta_of[row + 8 * h] * units[row + 8 * h];
            float* const out = square + (row + 8 * h) * L_STRIDE;
            const auto put = [&](int column, float first, float second) {
                const float2 unit = *(const float2*)(units + column);
                *(float2*)(out + column) = make_float2(strength * unit.x * first, strength * unit.y * second);
            };
            const int n = h ? 2 : 0;
            put(16 * block + 2 * t, mine[n], mine[n + 1]);
            if (h) put(16 * block + 8 + 2 * t, mine[4], mine[5]);
#pragma unroll
            for (int other = 0; other < 3; other++)
                if (other < block)
#pragma unroll
                    for (int b = 0; b < 2; b++) put(16 * other + 4 * t + 2 * b, before[other][b][2 * h], before[other][b][2 * h + 1]);
        }
    }
#endif
    if (!of_keys) return;
    sync_warp();

    // Step 4, four warps.
    invert_block(square + 16 * (warp >> 1) * (L_STRIDE + 1), lane);
    barrier_sync(2, THREADS / 2);
    store_columns(memory, A + (i64)program * (CHUNK * CHUNK), warp >> 1, lane, flags & WHOLE, TF32_BITS + ((u32)flags >> 30));
}
