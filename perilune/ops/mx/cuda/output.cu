// Outputs of tokens, y = sum over a token's experts of p W2 h, on MXFP4 weights.
//
// A tile is 32 output columns, whose two halves share the numbers of h that they meet, and takes `count` steps, those of one
// expert after the other's. All steps of a token's tiles are one line, of which each warp of the token's blocks takes a run of
// equal length, at most `count`, so that all end together. A run ends in at most two tiles: it leaves the sums of its first and of
// its second one for sum.cu. So sums have a fixed order, which no other token changes.
#include "weights.h"

constexpr int WARPS = 16, AHEAD = 1, BLOCKS = 1, TILE = 2 * ROWS;  // AHEAD: steps of a warp under way

// h [tokens active, columns]; index and weight [tokens, active]; parts [tokens, warps, 2, TILE]. Matrices [E, steps, rows, 32].
KERNEL(32 * WARPS, BLOCKS) output(
    const bf16* __restrict__ h, const i64* __restrict__ index, const float* __restrict__ weight, const void* __restrict__ codes,
    const void* __restrict__ scales, float* __restrict__ parts, int active, int steps, int rows, int columns, int run) {
    const int lane = threadIdx.x & 31, number = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int count = active * steps, total = rows / TILE * count, begin = number * run;
    const int end = begin + run < total ? begin + run : total;
    if (begin >= end) return;
    const i64 pairs = (i64)blockIdx.y * active;
    parts += ((i64)blockIdx.y * gridDim.x * WARPS + number) * 2 * TILE;

    // The next step to load of the line: its tile's first row, its expert and the step of the expert's matrix.
    int slot = begin % count / steps, step = begin % count % steps, first = begin / count * TILE, loaded = begin;
    i64 matrix = index[pairs + slot] * steps * rows;
    Words words[AHEAD][2];
    auto fetch = [&](int i) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            words[i][half] = load((const u16*)codes + matrix * GROUP, (const u32*)scales + matrix, step, rows, first + ROWS * half, loaded < end, lane);
        if (++loaded >= end || ++step < steps) return;
        step = 0, slot++;
        if (slot == active) slot = 0, first += TILE;
        matrix = index[pairs + slot] * steps * rows;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i);
    int at = begin % count / steps, column = begin % count % steps;  // the step that is multiplied
    float d[2][2] = {}, totals[2][2] = {};
    for (int n = begin; n < end; n += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const bool there = n + i < end, last = n + i == end - 1;
            const uint4 here = load_columns(h + (pairs + at) * columns, column, there ? columns : 0, lane);
#pragma unroll
            for (int half = 0; half < 2; half++) multiply(d[half], words[i][half], here, lane);
            fetch(i);
            if (!there || (++column < steps && !last)) continue;
            const float p = weight[pairs + at];
            column = 0, at++;
#pragma unroll
            for (int e = 0; e < 4; e++) totals[e >> 1][e & 1] = fmaf(p, d[e >> 1][e & 1], totals[e >> 1][e & 1]), d[e >> 1][e & 1] = 0.0f;
            if (at < active && !last) continue;
            at = 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float sum = row_sum(totals[e >> 1][e & 1]);
                if ((lane & 3) == 0) parts[(lane >> 2) + 8 * e] = sum;
                totals[e >> 1][e & 1] = 0.0f;
            }
            parts += TILE;
        }
    }
}
