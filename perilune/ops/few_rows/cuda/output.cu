// Outputs of (token, expert) pairs, y = W2 h in float32: a block takes some rows of one expert for all of its pairs.
//
// Macros: WIDTH (columns, a multiple of 32), OUT (rows), ROW_TILES (of 16 rows, in a block), TOKEN_TILES (of 8 pairs).
#include "rows.h"

constexpr int NT = TOKEN_TILES, RT = ROW_TILES;
typedef Ring<RT, NT, WIDTH / STEP> Turns;
constexpr int PART = Turns::BYTES / WARPS;
static_assert(Turns::BYTES <= SHARED_BYTES && 512 * RT * NT <= PART, "shared memory");

KERNEL(THREADS, 2) output(const bf16* h, const uint4* list, const bf16* w2, float* y) {
    SHARED(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.x * ROWS * RT;
    let_next_start();
    wait_for_earlier();
    const uint4 entry = list[blockIdx.y];
    const int count = entry.w;
    if (count == 0) return;
    Turns ring;
    ring.place(memory, warp, lane);
#pragma unroll
    for (int r = 0; r < RT; r++) ring.tile(r, w2 + (i64)entry.x * OUT * WIDTH, WIDTH, first + ROWS * r, OUT, lane);
    ring.begin();
    float d[RT][NT][4];
    clear(d);
    ring.multiply(
        d, (count + 7) / 8, [&](int t) { return token_at(h + (i64)entry.z * WIDTH, t, count, WIDTH, lane); },
        [&](int, int, uint4 here) { return here; });
    leave(memory, PART, d, warp, lane);
    sync_threads();
#pragma unroll
    for (int r = 0; r < RT; r++)
        each_number<NT>(first + ROWS * r, OUT, count, [&](int row, int pair, int place) {
            y[(i64)(entry.z + pair) * OUT + row] = sum_of<NT>(memory, PART, r, place);
        });
}
