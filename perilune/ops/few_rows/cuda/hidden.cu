// Hidden values of (token, expert) pairs, h = glu(W1 x, W3 x): a block takes 16 units of one expert for all tokens that chose it.
//
// Macros: WIDTH (columns, a multiple of 32), HIDDEN (units), TOKEN_TILES (of 8 tokens), GATE_CAPPED, UP_CAPPED.
#include "rows.h"

constexpr int NT = TOKEN_TILES, STEPS = WIDTH / STEP;

// The number of the n-th lowest bit that is set; -1 if there are fewer.
DEVICE int nth_bit(u32 x, int n) {
    for (int i = 0; i < n; i++) x &= x - 1;
    return x ? lowest_bit(x) : -1;
}

KERNEL(THREADS, 2) hidden(
    const bf16* x, const uint4* list, const bf16* w1, const bf16* w3, bf16* h, i64 x_stride, float beta, float linear_beta) {
    SHARED(memory);
    float* const sums = (float*)memory;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, first = blockIdx.x * ROWS;
    let_next_start();
    wait_for_earlier();
    const uint4 entry = list[blockIdx.y];
    const int count = entry.w;
    if (count == 0) return;
    const i64 matrix = (i64)entry.x * HIDDEN * WIDTH;
    Matrices<2, STEPS> left;
    left.tile(0, w1 + matrix, WIDTH, first, HIDDEN, lane);
    left.tile(1, w3 + matrix, WIDTH, first, HIDDEN, lane);
    left.begin(warp);
    const bf16* row[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int token = nth_bit(entry.y, 8 * t + (lane >> 2));
        row[t] = token < 0 ? nullptr : x + token * x_stride + 8 * (lane & 3);
    }
    float d[2][NT][4];
    clear(d);
    left.multiply(d, (count + 7) / 8, warp, [&](int t, int step) { return row[t] ? *(const uint4*)(row[t] + STEP * step) : zeros(); });
    leave(sums, d, warp, lane);
    sync_threads();
    for (int place = thread; place < 128 * NT; place += THREADS) {
        const int unit = first + row_at(place), token = token_at(place);
        if (unit >= HIDDEN || token >= count) continue;
        const float a = sum_of<2, NT>(sums, 0, place), b = sum_of<2, NT>(sums, 1, place);
        h[(i64)(entry.z + token) * HIDDEN + unit] = to_bf16(gated_unit<GATE_CAPPED, UP_CAPPED>(a, b, beta, linear_beta));
    }
}
