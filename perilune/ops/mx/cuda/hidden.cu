// Hidden values of (token, expert) pairs, h = glu(W1 x, W3 x), on MXFP4 weights.
//
// A block takes 16 hidden units of one pair, and each of its warps every WARPS-th step of 128 columns of both matrices: what
// counts is that many loads are under way. Macros: GATE_CAPPED, UP_CAPPED.
#include "weights.h"

constexpr int WARPS = 4, AHEAD = 2, BLOCKS = 3;  // AHEAD: steps of a warp under way
constexpr float LOG2E = 1.4426950408889634f;

DEVICE float at_least(float x, float least) { return x < least ? least : x; }  // NaN stays
DEVICE float at_most(float x, float most) { return x > most ? most : x; }

// beta tanh(a / beta) sigmoid(a) linear_beta tanh(b / linear_beta); a sigmoid(a) b without the caps. Exponents are bounded so
// that no product overflows.
DEVICE float gated_unit(float a, float b, float beta, float linear_beta) {
    const float opened = reciprocal(1.0f + exp2_fast(at_least(a, -56.0f) * -LOG2E));
    float left = a, right = b;
    if (GATE_CAPPED) {
        const float u = exp2_fast(at_most(a * (-2.0f * LOG2E / beta), 40.0f));
        left = beta * (1.0f - u) * reciprocal(1.0f + u);
    }
    if (UP_CAPPED) {
        const float v = exp2_fast(at_most(b * (-2.0f * LOG2E / linear_beta), 40.0f));
        right = linear_beta * (1.0f - v) * reciprocal(1.0f + v);
    }
    return left * opened * right;
}

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
    h[pair * rows + first + thread] = to_bf16(gated_unit(total[0], total[1], beta, linear_beta));
}
