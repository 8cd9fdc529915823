// Output columns put together from what the warps of output.cu left of them.
#include "weights.h"

constexpr int THREADS = 64, EAGER = 24, TILE = 2 * ROWS;  // parts that a thread asks for at once

// parts [tokens, warps, 2, TILE]; y [tokens, rows]. A tile has the second part of the run in which it begins, unless it begins
// with it, and the first of the runs that follow.
KERNEL(THREADS, 8) sum(
    const float* __restrict__ parts, bf16* __restrict__ y, int warps, int rows, int count, int run) {
    const int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows) return;
    const int start = row / TILE * count, from = start / run, to = (start + count - 1) / run;
    parts += (i64)blockIdx.y * warps * 2 * TILE + row % TILE;
    float eager[EAGER];
#pragma unroll
    for (int i = 0; i < EAGER; i++)
        eager[i] = from + i <= to ? parts[(from + i) * 2 * TILE + (i == 0 && from * run < start ? TILE : 0)] : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EAGER; i++) sum += eager[i];
    for (int warp = from + EAGER; warp <= to; warp++) sum += parts[warp * 2 * TILE];
    y[(i64)blockIdx.y * rows + row] = to_bf16(sum);
}
