// The gradients of a read over depth.
//
// With g_i = <dmix, v_i>, f_i = p_i (g_i - sum_j p_j g_j) r_i:
//     dv_i = p_i dmix + f_i c - f_i s_i r_i v_i / D,   dc = sum over tokens and i of f_i v_i
//
// All rows of a token stay in shared memory from the products g_i to the gradients dv_i; each place is given to a row of the
// next token as soon as its gradient is written. With an output norm the mix is summed again from these rows. Gradients
// of the two weights are summed in registers, one row a block. See ring.h.
//
// Macros beside ring.h's: SOURCES (M, at most 16), HAS_TOTAL (a gradient of the running sum arrives, too), GIVEN (the
// first source's score was given: it gets a gradient, and no other comes from it), HAS_NORM, BLOCKS.
#include "device.h"
#include "ring.h"

constexpr int M = SOURCES;
// Whether a thread keeps its part of both weights. With a norm that spills a few registers; of many sources, loading the
// weights again for each token takes less time than that.
constexpr bool KEEP = !HAS_NORM || M <= 4 || VECTORS == 1;
constexpr float LOG2E = 1.4426950408889634f;


KERNEL(THREADS, BLOCKS) backward(
    Sources<M> sources, Gradients<M> gradients, const bf16* dout, i64 dout_stride, const bf16* dtotal, i64 dtotal_stride,
    const float* statistics, const float* score_weight, const float* norm_weight, float* dgiven, float* dscore, float* dnorm,
    i64 rows, float norm_eps) {
    SHARED(memory);
    const int thread = threadIdx.x, lane = thread % 32, mine = folded<M>(lane);
    Ring ring = {(uint4*)memory, 0};
    float* const scratch = (float*)(memory + RING * VECTORS * THREADS * 16);  // [2][WARPS][M], then [2][WARPS][2]
    float* const norm_scratch = scratch + 2 * WARPS * M;
    const i64 step = gridDim.x;
    float c[NUMBERS], w[NUMBERS], dc[NUMBERS], dw[NUMBERS];
    if (KEEP) load_floats(c, score_weight);
    if (KEEP && HAS_NORM) load_floats(w, norm_weight);
#pragma unroll
    for (int e = 0; e < NUMBERS; e++) dc[e] = dw[e] = 0.0f;

    auto row_of = [&](int item, i64 row) -> const bf16* {
        if (row >= rows) return nullptr;
        if (item == 0) return dout + row * dout_stride;
        if (item > M) return dtotal + row * dtotal_stride;
        return sources.rows[item - 1] + row * sources.stride[item - 1];
    };
    auto refill = [&](int item, i64 row) { ring.fill(item, row_of((item + RING) % ITEMS, row + (item + RING) / ITEMS * step)); };
    struct Kept { float score, rstd, log; };
    auto kept_of = [&](i64 row) -> Kept {
        if (row >= rows || lane >= M) return {from_bits(0xff800000u), 0.0f, 0.0f};
        const float* at = statistics + row * (2 * M + 1);
        return {at[lane], at[M + lane], at[2 * M]};
    };

    i64 row = blockIdx.x;
    Kept next = kept_of(row);
    #pragma unroll
    for (int n = 0; n < RING; n++) ring.fill(n, row_of(n % ITEMS, row + n / ITEMS * step));
    for (int parity = 0; row < rows; row += step, parity ^= 1) {
        const float score = next.score, rstd = next.rstd, weight = exp2_fast(LOG2E * (next.score - next.log));
        next = kept_of(row + step);
        float dmix[NUMBERS], v[NUMBERS], pull[M];
        copy_wait<RING - 1>();
        ring.read(dmix, 0);
        refill(0, row);
        if (HAS_NORM) {
            if (!KEEP) load_floats(w, norm_weight);
            float mix[NUMBERS], sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < M; j++) {
                wait_for_all_but(RING - 1 - j);
                ring.read(v, j + 1);
                const float p = shuffle(weight, j);
#pragma unroll
                for (int e = 0; e < NUMBERS; e++) mix[e] = j == 0 ? p * v[e] : fmaf(p, v[e], mix[e]);
            }
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) {
                sums[0] = fmaf(mix[e], mix[e], sums[0]);
                sums[1] = fmaf(mix[e], dmix[e] * w[e], sums[1]);
            }
            const float sum = block_sums<2>(sums, norm_scratch + parity * WARPS * 2, lane, folded<2>(lane));
            const float unit = rsqrt_fast(shuffle(sum, 0) * (1.0f / WIDTH) + norm_eps);
            const float along = unit * unit * (1.0f / WIDTH) * shuffle(sum, 1);
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) {
                dw[e] = fmaf(dmix[e] * unit, mix[e], dw[e]);
                dmix[e] = unit * (dmix[e] * w[e] - along * mix[e]);
            }
        }
#pragma unroll
        for (int j = 0; j < M; j++) {
            if (!HAS_NORM) wait_for_all_but(RING - 1 - j);
            ring.read(v, j + 1);
            pull[j] = 0.0f;
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) pull[j] = fmaf(dmix[e], v[e], pull[j]);
        }
        if (!KEEP) load_floats(c, score_weight);
        const float along = block_sums<M>(pull, scratch + parity * WARPS * M, lane, mine);
        const float slope = weight * (along - warp_total(lane < M ? weight * along : 0.0f));  // gradient of this lane's score
        if (GIVEN && thread == 0) dgiven[row] = slope;
        const float factor = slope * rstd, decay = factor * score * rstd * (1.0f / WIDTH);
#pragma unroll
        for (int j = 0; j < M; j++) {
            float dv[NUMBERS];
            const float p = shuffle(weight, j), f = shuffle(factor, j), d = shuffle(decay, j);
            ring.read(v, j + 1);
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) dv[e] = p * dmix[e];
            if (!GIVEN || j > 0) {
#pragma unroll
                for (int e = 0; e < NUMBERS; e++) {
                    dc[e] = fmaf(f, v[e], dc[e]);
                    dv[e] = fmaf(f, c[e], fmaf(-d, v[e], dv[e]));
                }
            }
            if (HAS_TOTAL && j == M - 1) {
                copy_wait<RING - 2>();
                ring.read(v, M + 1);
#pragma unroll
                for (int e = 0; e < NUMBERS; e++) dv[e] += v[e];
            }
            refill(j + 1, row);
            store_row(gradients.rows[j] + row * WIDTH, dv);
        }
        if (HAS_TOTAL) refill(M + 1, row);
        ring.advance();
    }
    copy_wait<0>();
    store_floats(dscore + (i64)blockIdx.x * WIDTH, dc);
    if (HAS_NORM) store_floats(dnorm + (i64)blockIdx.x * WIDTH, dw);
}
