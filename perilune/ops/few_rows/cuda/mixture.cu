// What a feed-forward layer makes of its tokens first, in one launch: latents z = W_down x, the router's logits, and the hidden
// values of a gated MLP (the shared experts, or a dense layer), h = glu(W_gate x, W_up x).
//
// The router's weights are float32 and stay exact: each is the sum of three bfloat16 numbers, so a logit is three products.
//
// Macros: WIDTH (columns, a multiple of 32), TOKEN_TILES (of 8 tokens), LATENT, EXPERTS, HIDDEN (rows of the three, 0: without),
// GATE_CAPPED, UP_CAPPED.
#include "rows.h"

constexpr int NT = TOKEN_TILES, STEPS = WIDTH / STEP;
DEVICE constexpr int tiles_of(int rows) { return (rows + ROWS - 1) / ROWS; }
constexpr int LATENT_TILES = tiles_of(LATENT), HIDDEN_TILES = tiles_of(HIDDEN);

// A float as three bfloat16 numbers, a pair of them at a time; the float is their sum.
DEVICE void split(u32 (&parts)[3], float low, float high) {
#pragma unroll
    for (int p = 0; p < 3; p++) {
        parts[p] = pack(low, high);
        low -= low_half(parts[p]), high -= high_half(parts[p]);
    }
}

KERNEL(THREADS, 2) mixture(
    const bf16* x, const bf16* down, const float* router, const bf16* gate, const bf16* up, bf16* z, float* logits, bf16* hidden,
    i64 x_stride, int tokens, float beta, float linear_beta) {
    SHARED(memory);
    float* const sums = (float*)memory;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    let_next_start();
    auto right = [&](int t, int step) {
        const int token = 8 * t + (lane >> 2);
        return token < tokens ? *(const uint4*)(x + token * x_stride + STEP * step + 8 * (lane & 3)) : zeros();
    };
    int tile = blockIdx.x;
    if (HIDDEN && tile < HIDDEN_TILES) {
        Matrices<2, STEPS> left;
        left.tile(0, gate, WIDTH, ROWS * tile, HIDDEN, lane);
        left.tile(1, up, WIDTH, ROWS * tile, HIDDEN, lane);
        left.begin(warp);
        wait_for_earlier();
        float d[2][NT][4];
        clear(d);
        left.multiply(d, NT, warp, right);
        leave(sums, d, warp, lane);
        sync_threads();
        for (int place = thread; place < 128 * NT; place += THREADS) {
            const int row = ROWS * tile + row_at(place), token = token_at(place);
            if (row >= HIDDEN || token >= tokens) continue;
            const float a = sum_of<2, NT>(sums, 0, place), b = sum_of<2, NT>(sums, 1, place);
            hidden[(i64)token * HIDDEN + row] = to_bf16(gated_unit<GATE_CAPPED, UP_CAPPED>(a, b, beta, linear_beta));
        }
        return;
    }
    tile -= HIDDEN_TILES;
    if (LATENT && tile < LATENT_TILES) {
        Matrices<1, STEPS> left;
        left.tile(0, down, WIDTH, ROWS * tile, LATENT, lane);
        left.begin(warp);
        wait_for_earlier();
        float d[1][NT][4];
        clear(d);
        left.multiply(d, NT, warp, right);
        leave(sums, d, warp, lane);
        sync_threads();
        for (int place = thread; place < 128 * NT; place += THREADS) {
            const int row = ROWS * tile + row_at(place), token = token_at(place);
            if (row < LATENT && token < tokens) z[(i64)token * LATENT + row] = to_bf16(sum_of<1, NT>(sums, 0, place));
        }
        return;
    }
    tile -= LATENT_TILES;
    constexpr int TURNS = turns(STEPS), AHEAD = 2;
    float4 words[AHEAD][2][2];  // of rows i and i + 8, columns 8 t .. 8 t + 7
    const int row_of_lane = ROWS * tile + (lane >> 2);
    auto fetch = [&](int slot, int n) {
        const int step = step_of(n, warp);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint4 found = zeros();
                const int row = row_of_lane + 8 * h;
                if (row < EXPERTS && step < STEPS && n < TURNS)
                    found = load_ahead(router + (i64)row * WIDTH + STEP * step + 8 * (lane & 3) + 4 * e);
                words[slot][h][e] = make_float4(from_bits(found.x), from_bits(found.y), from_bits(found.z), from_bits(found.w));
            }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i, i);
    wait_for_earlier();
    float d[1][NT][4];
    clear(d);
#pragma unroll 1
    for (int n = 0; n < TURNS; n += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int step = step_of(n + i, warp);
            u32 parts[2][2][2][3];  // row, half of the columns, pair
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    split(parts[h][e][0], words[i][h][e].x, words[i][h][e].y);
                    split(parts[h][e][1], words[i][h][e].z, words[i][h][e].w);
                }
            fetch(i, n + AHEAD + i);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4 v = step < STEPS ? right(t, step) : zeros();
#pragma unroll
                for (int p = 2; p >= 0; p--) {
                    const u32 low[4] = {parts[0][0][0][p], parts[1][0][0][p], parts[0][0][1][p], parts[1][0][1][p]};
                    const u32 high[4] = {parts[0][1][0][p], parts[1][1][0][p], parts[0][1][1][p], parts[1][1][1][p]};
                    multiply_add(d[0][t], low, v.x, v.y);
                    multiply_add(d[0][t], high, v.z, v.w);
                }
            }
        }
    }
    leave(sums, d, warp, lane);
    sync_threads();
    for (int place = thread; place < 128 * NT; place += THREADS) {
        const int row = ROWS * tile + row_at(place), token = token_at(place);
        if (row < EXPERTS && token < tokens) logits[(i64)token * EXPERTS + row] = sum_of<1, NT>(sums, 0, place);
    }
}
