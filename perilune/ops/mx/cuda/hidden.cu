// Hidden values of (token, expert) pairs, h = glu(W1 x, W3 x), on MXFP4 weights.
//
// A block takes 16 hidden units of one pair, and each of its warps every WARPS-th step of 128 columns of both matrices: what
// counts is that many loads are under way. Macros: GATE_CAPPED, UP_CAPPED.
#include "gated_unit.h"
#include "weights.h"

constexpr int WARPS = 4, AHEAD = 2, BLOCKS = 3;  // AHEAD: steps of a warp under way

// x [tokens, columns] by stride; index [tokens, active]; h [tokens active, rows]. Matrices [E, steps, rows, 32].
KERNEL(32 * WARPS, BLOCKS) hidden(
    const bf16* __restrict__ x, const i64* __restrict__ index, const void* __restrict__ codes1, const void* __restrict__ scales1,
    const void* __restrict__ codes3, const void* __restrict__ scales3, bf16* __restrict__ h, i64 x_stride, int active, int steps,
    int rows, int columns, float beta, float linear_beta) {
    SHARED(memory);
    float* const sums = (float*)memory;  // [WARPS][2][ROWS]
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, first = blockIdx.x * ROWS;
    const i64 pair = blockIdx.y, expert = index[pair];
    const bf16* const row = x + pair / active * x_stride;
    const i64 matrix = expert * steps * rows;
    codes1 = (const u16*)codes1 + matrix * GROUP, scales1 = (const u32*)scales1 + matrix;
    codes3 = (const u16*)codes3 + matrix * GROUP, scales3 = (const u32*)scales3 + matrix;

    float a[2] = {0.0f, 0.0f}, b[2] = {0.0f, 0.0f};
    Words gates[AHEAD], ups[AHEAD];
    auto fetch = [&](int i, int step) {
        gates[i] = load(codes1, scales1, step, rows, first, step < steps, lane);
        ups[i] = load(codes3, scales3, step, rows, first, step < steps, lane);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i, warp + i * WARPS);
    for (int step = warp; step < steps; step += AHEAD * WARPS) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint4 here = load_columns(row, step + i * WARPS, columns, lane);
            multiply(a, gates[i], here, lane);
            multiply(b, ups[i], here, lane);
            fetch(i, step + (AHEAD + i) * WARPS);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        a[h] = row_sum(a[h]), b[h] = row_sum(b[h]);
        if ((lane & 3) == 0) {
            sums[2 * ROWS * warp + (lane >> 2) + 8 * h] = a[h];
            sums[2 * ROWS * warp + ROWS + (lane >> 2) + 8 * h] = b[h];
        }
    }
    sync_threads();
    if (thread >= ROWS) return;
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        total[0] += sums[2 * ROWS * w + thread];
        total[1] += sums[2 * ROWS * w + ROWS + thread];
    }
    h[pair * rows + first + thread] = to_bf16(gated_unit<GATE_CAPPED, UP_CAPPED>(total[0], total[1], beta, linear_beta));
}
