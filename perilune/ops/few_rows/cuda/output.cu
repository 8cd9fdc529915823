// Outputs of (token, expert) pairs, y = W2 h in float32: a block takes 16 rows of one expert for all of its pairs.
//
// Macros: WIDTH (columns, a multiple of 32), OUT (rows), TOKEN_TILES (of 8 pairs).
#include "rows.h"

constexpr int NT = TOKEN_TILES, STEPS = WIDTH / STEP;

KERNEL(THREADS, 2) output(const bf16* h, const uint4* list, const bf16* w2, float* y) {
    SHARED(memory);
    float* const sums = (float*)memory;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, first = blockIdx.x * ROWS;
    let_next_start();
    wait_for_earlier();
    const uint4 entry = list[blockIdx.y];
    const int count = entry.w;
    if (count == 0) return;
    Matrices<1, STEPS> left;
    left.tile(0, w2 + (i64)entry.x * OUT * WIDTH, WIDTH, first, OUT, lane);
    left.begin(warp);
    float d[1][NT][4];
    clear(d);
    left.multiply(d, (count + 7) / 8, warp, [&](int t, int step) {
        const int pair = 8 * t + (lane >> 2);
        return pair < count ? *(const uint4*)(h + (i64)(entry.z + pair) * WIDTH + STEP * step + 8 * (lane & 3)) : zeros();
    });
    leave(sums, d, warp, lane);
    sync_threads();
    for (int place = thread; place < 128 * NT; place += THREADS) {
        const int row = first + row_at(place), pair = token_at(place);
        if (row < OUT && pair < count) y[(i64)(entry.z + pair) * OUT + row] = sum_of<1, NT>(sums, 0, place);
    }
}
