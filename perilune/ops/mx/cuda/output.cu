// Outputs of tokens, y = sum over a token's experts of p W2 h, on MXFP4 weights.
//
// A block takes 16 output columns of one token. The steps of all of its experts, one expert's after the other's, are one
// sequence, of which each warp takes a run: so one launch makes the whole sum, in a fixed order.
#include "weights.h"

constexpr int WARPS = 8, AHEAD = 2, BLOCKS = 2;  // AHEAD: steps of a warp under way

// h [tokens active, columns]; index and weight [tokens, active]; y [tokens, rows]. Matrices [E, steps, rows, 32].
KERNEL(32 * WARPS, BLOCKS) output(
    const bf16* __restrict__ h, const i64* __restrict__ index, const float* __restrict__ weight, const void* __restrict__ codes,
    const void* __restrict__ scales, bf16* __restrict__ y, int active, int steps, int rows, int columns) {
    SHARED(memory);
    float* const sums = (float*)memory;  // [WARPS][ROWS]
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, first = blockIdx.x * ROWS;
    const i64 pairs = (i64)blockIdx.y * active;
    const int count = active * steps, run = (count + WARPS - 1) / WARPS;
    const int begin = warp * run, end = begin + run < count ? begin + run : count;

    // The next step to load of the sequence, and its expert.
    int slot = begin / steps, step = begin - slot * steps, loaded = begin;
    i64 matrix = begin < end ? index[pairs + slot] * steps * rows : 0;
    Words words[AHEAD];
    auto fetch = [&](int i) {
        words[i] = load((const u16*)codes + matrix * GROUP, (const u32*)scales + matrix, step, rows, first, loaded < end, lane);
        if (++loaded >= end || ++step < steps) return;
        step = 0, slot++;
        matrix = index[pairs + slot] * steps * rows;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i);
    int at = begin / steps, column = begin - at * steps;  // the step that is multiplied
    float d[2] = {0.0f, 0.0f}, totals[2] = {0.0f, 0.0f};
    for (int n = begin; n < end; n += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const bool there = n + i < end;
            multiply(d, words[i], load_columns(h + (pairs + at) * columns, column, there ? columns : 0, lane), lane);
            fetch(i);
            if (there && (++column == steps || n + i == end - 1)) {
                const float p = weight[pairs + at];
                column = 0, at++;
#pragma unroll
                for (int e = 0; e < 2; e++) totals[e] = fmaf(p, d[e], totals[e]), d[e] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        totals[e] = row_sum(totals[e]);
        if ((lane & 3) == 0) sums[ROWS * warp + (lane >> 2) + 8 * e] = totals[e];
    }
    sync_threads();
    if (thread >= ROWS) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[ROWS * w + thread];
    y[(i64)blockIdx.y * rows + first + thread] = to_bf16(sum);
}
