// Hidden values of (token, expert) pairs, h = glu(W1 x, W3 x): a block takes some units of one expert for all tokens that chose it.
//
// ROUTES: every block finds the routes by itself, and the first one writes them down for the kernels that follow; where there are
// few experts that takes less time than a kernel of its own would.
//
// Macros: WIDTH (columns, a multiple of 32), HIDDEN (units), UNIT_TILES (of 16 units, in a block), TOKEN_TILES (of 8 tokens),
// GATE_CAPPED, UP_CAPPED, ROUTES; with it those of route.h, EXPERTS at most 256.
#include "rows.h"
#if ROUTES
#include "route.h"
#endif

constexpr int NT = TOKEN_TILES, UT = UNIT_TILES;
typedef Ring<2 * UT, NT, WIDTH / STEP> Turns;
constexpr int PART = Turns::BYTES / WARPS;
static_assert(Turns::BYTES <= SHARED_BYTES && 512 * 2 * UT * NT <= PART, "shared memory");
#if ROUTES
static_assert(TABLE_BYTES + 16 <= SHARED_BYTES && EXPERTS <= THREADS, "a thread for each expert");
#endif

// The number of the n-th lowest bit that is set, of some that are.
DEVICE int nth_bit(u32 x, int n) {
    for (int i = 0; i < n; i++) x &= x - 1;
    return lowest_bit(x);
}

KERNEL(THREADS, 2) hidden(
    const bf16* x, uint4* list, const bf16* w1, const bf16* w3, bf16* h, const float* logits, const float* __restrict__ bias, float* weight,
    int* pair, i64 x_stride, int tokens, float scaling, float beta, float linear_beta) {
    SHARED(memory);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, first = blockIdx.x * ROWS * UT, place_of_block = blockIdx.y;
    let_next_start();
    wait_for_earlier();
#if ROUTES
    const bool writes = blockIdx.x == 0 && place_of_block == 0;
    uint4* const mine = (uint4*)(memory + TABLE_BYTES);
    if (thread == 0) *mine = make_uint4(0, 0, 0, 0);
    const int used = route_all<WARPS>(
        memory, logits, bias, tokens, scaling,
        [&](int token, int n, float p) { if (writes) weight[token * ACTIVE + n] = p; },
        [&](int token, int n, int number) { if (writes) pair[token * ACTIVE + n] = number; },
        [&](int place, uint4 found) {
            if (writes) list[place] = found;
            if (place == place_of_block) *mine = found;
        });
    if (writes)
        for (int i = used + thread; i < (int)gridDim.y; i += THREADS) list[i] = make_uint4(0, 0, 0, 0);
    sync_threads();
    const uint4 entry = *mine;
    sync_threads();  // the sums are left where the routes stand
#else
    const uint4 entry = list[place_of_block];
#endif
    const int count = entry.w;
    if (count == 0) return;
    const i64 matrix = (i64)entry.x * HIDDEN * WIDTH;
    Turns ring;
    ring.place(memory, warp, lane);
#pragma unroll
    for (int u = 0; u < UT; u++) {
        ring.tile(2 * u, w1 + matrix, WIDTH, first + ROWS * u, HIDDEN, lane);
        ring.tile(2 * u + 1, w3 + matrix, WIDTH, first + ROWS * u, HIDDEN, lane);
    }
    ring.begin();
    const bf16* row[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int token = 8 * t + (lane >> 2);
        row[t] = token < count ? x + nth_bit(entry.y, token) * x_stride + 8 * (lane & 3) : nullptr;
    }
    float d[2 * UT][NT][4];
    clear(d);
    ring.multiply(d, (count + 7) / 8, [&](int t) { return row[t]; }, [&](int, int, uint4 here) { return here; });
    leave(memory, PART, d, warp, lane);
    sync_threads();
#pragma unroll
    for (int u = 0; u < UT; u++)
        each_number<NT>(first + ROWS * u, HIDDEN, count, [&](int unit, int token, int place) {
            const float a = sum_of<NT>(memory, PART, 2 * u, place), b = sum_of<NT>(memory, PART, 2 * u + 1, place);
            h[(i64)(entry.z + token) * HIDDEN + unit] = to_bf16(gated_unit<GATE_CAPPED, UP_CAPPED>(a, b, beta, linear_beta));
        });
}
