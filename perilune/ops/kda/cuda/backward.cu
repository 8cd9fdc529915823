// The parallel part of KDA's backward pass for the gates that are computed in it: every gradient of a chunk, once the serial part has left
// E = beta dR and dS. The formulas are those of ops/kda/triton/backward.py, the decay factors others:
//
// Within a block of 16 rows, with run = the log-decay from the block's first row on (base 2, this row included) and step =
// half the gate's bound times the row's number in the block, up = 2^(run + step) lies within 2^+-58. Pairs of rows in one
// block take (q up)(k / up) and a factor 2^(step_c - step_r) of dP; a pair of rows in two blocks takes (q up 2^-step_r)
// and k to, to = 2^(run to the block's end) <= 1, and a factor F = 2^(a block's log-decay) for every block between. These
// factors are applied to the sum of products on its way from block to block (Horner), so that no factor leaves 2^+-58
// and gradients of any size from 1e-20 to 1e20 keep their precision. Anchors are rows of the past only. (traps T01)
//
//     d_beta = 1 / beta (sum_v E v + sum k d_query): both by E as it was rounded, so that most of its rounding cancels
//     d_q   = scale up (2^-step (((dO S F_0 + dP_0 k to) F_1 + dP_1 k to) ...) + dP_own k / up)
//     d_query the same of beta dL and -E S;  d_key of a block = 1 / up (2^step F (((U dS F_3 + ...) F_2 + ...)) + own pairs)
//     dG    = q d_q + k (d_query - d_key);  dg = its sum from the chunk's end + sum U dS k + gamma sum S dS
//
// A pair of rows adds p_ij = dP_ij (q_i up_i) (k_j / up_j) to dG of row i and takes it from that of row j. The two must be one
// number, or dg of every earlier row keeps their difference: so the q and k of these terms of dG are the operands as they were
// rounded, on either side, and not q and k themselves. Terms through a state have no other side and are not rounded.
//
// One block of threads goes through chunks and heads with the stride of the grid. Each of its warps owns 16 rows by 32 key
// channels. The next chunk's inputs are under way while this one is computed: dO, E and S from where their products are
// done, the others from where the last product is.
//
// Without a bound on the decay (BOUNDED 0: the softplus gate) the step is 0, so that up <= 1, and pairs inside a block take the steps of
// backward_unbounded.h; k to is then counted up to the block's end instead of divided by up.
//
// Macros: KEY_DIM, VALUE_DIM (64 or 128), BOUNDED, L2 (q and k are normalised), HAS_A, HAS_BIAS, SIGMOID (beta is a logit), WIDE (dq
// and dk are float), BETA_FLOAT (so are beta and its gradient).
#include "backward_elements.h"
#include "backward_products.h"
#if !BOUNDED
#include "backward_unbounded.h"
#endif

KERNEL(THREADS, 1) backward(
    const bf16* q, const bf16* k, const bf16* v, const bf16* g, const beta_type* beta, const float* a_log, const float* dt_bias,
    const bf16* d_o, const bf16* U, const bf16* S, const bf16* E, const bf16* dS, const int* chunks,
    qk_out* dq, qk_out* dk, bf16* dz, beta_type* dbeta, float* rate_part, float* bias_part,
    float scale, float lower_bound, float beta_scale,
    int q_token, int q_head, int k_token, int k_head, int v_token, int v_head, int g_token, int g_head, int beta_token, int beta_head,
    int do_token, int do_head, int heads, int group, int programs
) {
    SHARED(memory);
    Shared& m = *(Shared*)memory;
    const float shift = BOUNDED ? -0.5f * LOG2E * lower_bound : 0.0f;
    m.thread[threadIdx.x] = threadIdx.x;
    wait_for_earlier();
    let_next_start();

    const auto chunk_of = [&](int program) {
        if (program >= programs) return Chunk{program, 0, 0, 0, 0.0f};
        const int chunk = program / heads, head = program % heads;
        const float rate = HAS_A ? exp2_fast(LOG2E * a_log[head]) : 1.0f;
        return Chunk{program, head, chunks[2 * chunk], chunks[2 * chunk + 1], rate};
    };
    const auto ask_first = [&](const Chunk& x) {
        if (x.program < programs) {
            fetch_rows<V>(m.d_o, d_o + (i64)x.start * do_token + (i64)x.head * do_head, do_token, x.count);
            fetch_rows<V>(m.e, E + ((i64)x.start * heads + x.head) * V, (i64)heads * V, x.count);
            fetch_state(m.s, S + (i64)x.program * (V * K));
            if (threadIdx.x < CHUNK && threadIdx.x < x.count) {  // for `strengths`, which has no room to keep them
                const bf16* const values = v + (i64)(x.start + threadIdx.x) * v_token + (i64)x.head * v_head;
                prefetch(values);
                if (V == 128) prefetch(values + V / 2);
            }
        }
        copy_commit();
    };
    const auto ask_second = [&](const Chunk& x, float* bias) {
        if (x.program < programs) {
            if (HAS_BIAS && threadIdx.x < K / 4) copy_async(bias + 4 * threadIdx.x, dt_bias + x.head * K + 4 * threadIdx.x);
            fetch_rows<K>(m.q, q + (i64)x.start * q_token + (i64)(x.head / group) * q_head, q_token, x.count);
            fetch_rows<K>(m.k, k + (i64)x.start * k_token + (i64)(x.head / group) * k_head, k_token, x.count);
            fetch_rows<K>(m.g, g + (i64)x.start * g_token + (i64)x.head * g_head, g_token, x.count);
        }
        copy_commit();
        if (x.program < programs) {
            fetch_rows<V>(m.u, U + (i64)x.program * (CHUNK * V), V, CHUNK);
            fetch_state(m.ds, dS + (i64)x.program * (V * K));
        }
        copy_commit();
    };
    // What the last step left of A_log's and dt_bias's gradients.
    const auto put_sums = [&](int program) {
        const int thread = threadIdx.x;
        if (HAS_BIAS && thread < K)
            bias_part[(i64)program * K + thread] = m.bias[0][thread] + m.bias[1][thread] + m.bias[2][thread] + m.bias[3][thread];
        if (HAS_A && thread == 0) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += m.rate[i];
            rate_part[program] = sum;
        }
    };
    Chunk chunk = chunk_of(blockIdx.x);
    ask_first(chunk);
    ask_second(chunk, m.dt_bias[0]);

    for (int program = blockIdx.x, turn = 0; program < programs; program += gridDim.x, turn ^= 1) {
        const int head = chunk.head, start = chunk.start, count = chunk.count;
        const auto out = [&](const Place& p, int h) { return ((i64)(start + p.row + h) * heads + head) * K + 32 * p.w; };
        Own own;

        // Factors, and q and k as operands.
        copy_wait<1>();
        sync_threads();
        if (program != blockIdx.x) put_sums(program - gridDim.x);
        factors(m, own, m.dt_bias[turn], chunk.rate, lower_bound, shift, count);
        sync_rows(here(m));
        operands(m, own, scale, shift);
        copy_wait<0>();
        sync_threads();

        // Products that need no factors. The last warp has the fewest: it finds the next chunk.
        if (threadIdx.x == THREADS - 32) m.next = chunk_of(program + gridDim.x);
#pragma unroll 1
        for (int i = here(m).warp; i < BLOCKS * (BLOCKS + 1) / 2; i += WARPS) {
            const int rows = i < 1 ? 0 : i < 3 ? 1 : i < 6 ? 2 : 3;
            pairs(m, rows, i - rows * (rows + 1) / 2, shift, scale);
        }
        strengths(
            m, beta + (i64)start * beta_token + (i64)head * beta_head, beta_token, v + (i64)start * v_token + (i64)head * v_head,
            v_token, beta_scale, count
        );
        through(m);
        float d_q[4][4] = {}, d_k[4][4] = {}, d_G[4][4];
        through_state(d_q, d_k, m.d_o, m.e, m.s, here(m));
        sync_threads();
        ask_first(m.next);

        // Where q and k read.
        reads(m, d_q, d_k, d_G, own, scale, shift);
        {
            const Place p = here(m);
            float along[2] = {}, corrected[2] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float of_q = scale * m.q_rstd[p.row + h], of_k = -m.k_rstd[p.row + h];
                const float diagonal = m.diagonal[p.row + h] * m.q_rstd[p.row + h] * m.k_rstd[p.row + h];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 q_up = *(const u32*)(m.q + own_at(p, h, j)), k_up = *(const u32*)(m.k + own_at(p, h, j));
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; i++) {
                        const float q_raw = own.q_at(j, i), k_raw = own.k_at(j, i);
                        const float of_query = half_of(k_up, i & 1) * d_k[j][i];
                        corrected[h] += of_query;
                        d_G[j][i] += fmaf(half_of(q_up, i & 1), d_q[j][i], of_query);
                        if (BOUNDED) {
                            d_q[j][i] = fmaf(diagonal, k_raw, d_q[j][i] * (own.up[j][i] * of_q));
                            d_k[j][i] = fmaf(diagonal, q_raw, d_k[j][i] * (own.up[j][i] * of_k));
                            along[h] = fmaf(d_q[j][i], q_raw, along[h]);
                        } else {
                            d_q[j][i] *= own.up_at(j, i);
                            d_k[j][i] *= own.up_at(j, i);
                        }
                    }
                }
            }
#if !BOUNDED
            reads_inside(m, d_q, d_k, d_G, corrected, own, scale);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float of_q = scale * m.q_rstd[p.row + h], of_k = -m.k_rstd[p.row + h];
                const float diagonal = m.diagonal[p.row + h] * m.q_rstd[p.row + h] * m.k_rstd[p.row + h];
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; i++) {
                        d_q[j][i] = fmaf(diagonal, own.k_at(j, i), d_q[j][i] * of_q);
                        d_k[j][i] = fmaf(diagonal, own.q_at(j, i), d_k[j][i] * of_k);
                        along[h] = fmaf(d_q[j][i], own.q_at(j, i), along[h]);
                    }
            }
#endif
            if (L2) put_along(m.along[0], along, p);
            put_along(m.corrected, corrected, p);
            sync_rows(p);
            if (p.w == 0 && p.c == 0)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (p.row + h < count)
                        dbeta[(i64)(start + p.row + h) * heads + head] =
                            beta_out((m.written[p.row + h] + total(m.corrected[p.row + h])) * m.strength[p.row + h]);
            through_norm(d_q, own.q, m.q_rstd, m.along[0], p);
#pragma unroll
            for (int h = 0; h < 2; h++) store_row(dq + out(p, h), d_q, h, p.lane, p.row + h < count);
        }

        // Where k writes.
        float d_key[4][4] = {};
        through_state(d_key, m.u, m.ds, here(m));
        tail(m, d_key, d_G, own, shift, count - 1);
        writes(m, d_key, d_G, own, shift, count - 1);
#if !BOUNDED
        writes_inside(m, d_key, d_G, own, scale);
#endif
        float after[4][2];  // sums of dG over the rows of the block after this thread's
        u32 logits[2][4];
        {
            const Place p = here(m);
            float along[2] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float k_rstd = m.k_rstd[p.row + h];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    logits[h][j] = *(const u32*)(m.g + own_at(p, h, j));
                    const u32 near = BOUNDED ? *(const u32*)(m.near + own_at(p, h, j)) : 0u;
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; i++) {
                        const float k_raw = own.k_at(j, i);
                        if (BOUNDED) d_G[j][i] = fmaf(-half_of(near, i & 1), d_key[j][i], d_G[j][i]);
                        d_k[j][i] = fmaf(d_key[j][i] * k_rstd, BOUNDED ? reciprocal(own.up[j][i]) : 1.0f, d_k[j][i]);
                        along[h] = fmaf(d_k[j][i], k_raw, along[h]);
                    }
                }
            }
            if (L2) put_along(m.along[1], along, p);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float sum[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    sum[e] = d_G[j][e] + d_G[j][2 + e];
                    after[j][e] = sum_after(sum[e], p.lane);
                }
                if (p.r == 0) *(float2*)&m.after[p.block][p.channel(j)] = make_float2(sum[0], sum[1]);
            }
        }
        sync_threads();
        ask_second(m.next, m.dt_bias[turn ^ 1]);

        // Through the L2 norm and the gate.
        const Place p = here(m);
        through_norm(d_k, own.k, m.k_rstd, m.along[1], p);
#pragma unroll
        for (int h = 0; h < 2; h++) store_row(dk + out(p, h), d_k, h, p.lane, p.row + h < count);
        through_gate(m, d_G, after, logits, m.dt_bias[turn], chunk.rate, lower_bound, count, p);
#pragma unroll
        for (int h = 0; h < 2; h++) store_row(dz + out(p, h), d_G, h, p.lane, p.row + h < count);
        chunk = m.next;
    }
    copy_wait<0>();
    sync_threads();
    if (blockIdx.x < programs) put_sums(chunk.program - gridDim.x);
}
