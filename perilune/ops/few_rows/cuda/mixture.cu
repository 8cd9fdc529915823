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

// A block: one tile of rows of TILES matrices that lie side by side, times the tokens; then write(row, token, sum of each).
template <int TILES, class Token, class Write> DEVICE void product(
    u8* memory, const bf16* const (&matrix)[TILES], int first, int rows, int tokens, Token token_of, Write write) {
    typedef Ring<TILES, NT, STEPS> Turns;
    constexpr int PART = Turns::BYTES / WARPS;
    static_assert(Turns::BYTES <= SHARED_BYTES, "shared memory");
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Turns ring;
    ring.place(memory, warp, lane);
#pragma unroll
    for (int r = 0; r < TILES; r++) ring.tile(r, matrix[r], WIDTH, first, rows, lane);
    ring.begin();
    wait_for_earlier();
    float d[TILES][NT][4];
    clear(d);
    ring.multiply(d, NT, token_of, [&](int, int, uint4 here) { return here; });
    leave(memory, PART, d, warp, lane);
    sync_threads();
    each_number<NT>(first, rows, tokens, [&](int row, int token, int place) {
        float sum[TILES];
#pragma unroll
        for (int r = 0; r < TILES; r++) sum[r] = sum_of<NT>(memory, PART, r, place);
        write(row, token, sum);
    });
}

KERNEL(THREADS, 2) mixture(
    const bf16* x, const bf16* down, const float* router, const bf16* gate, const bf16* up, bf16* z, float* logits, bf16* hidden,
    i64 x_stride, int tokens, float beta, float linear_beta) {
    SHARED(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    let_next_start();
    auto token_of = [&](int t) { return token_at(x, t, tokens, x_stride, lane); };
    int tile = blockIdx.x;
#if HIDDEN
    if (tile < HIDDEN_TILES) {
        product<2>(memory, {gate, up}, ROWS * tile, HIDDEN, tokens, token_of, [&](int row, int token, const float* sum) {
            hidden[(i64)token * HIDDEN + row] = to_bf16(gated_unit<GATE_CAPPED, UP_CAPPED>(sum[0], sum[1], beta, linear_beta));
        });
        return;
    }
    tile -= HIDDEN_TILES;
#endif
#if LATENT
    if (tile < LATENT_TILES) {
        product<1>(memory, {down}, ROWS * tile, LATENT, tokens, token_of, [&](int row, int token, const float* sum) {
            z[(i64)token * LATENT + row] = to_bf16(sum[0]);
        });
        return;
    }
    tile -= LATENT_TILES;
#endif
    // A float takes twice the room of a bfloat16, so the two tiles of places hold columns 8 t .. 8 t + 3 and the four behind them.
    typedef Ring<2, NT, STEPS, 2> Turns;
    constexpr int PART = Turns::BYTES / WARPS;
    static_assert(!EXPERTS || Turns::BYTES <= SHARED_BYTES, "shared memory");
    Turns ring;
    ring.place(memory, warp, lane);
    const int row_of_lane = ROWS * tile + (lane >> 2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = row_of_lane + 8 * h;
        const float* const from = row < EXPERTS ? router + (i64)row * WIDTH + 8 * (lane & 3) : nullptr;
#pragma unroll
        for (int e = 0; e < 2; e++) ring.row[e][h] = from ? (const bf16*)(from + 4 * e) : nullptr;
    }
    ring.begin();
    wait_for_earlier();
    float d[1][NT][4];
    clear(d);
    ring.run(NT, token_of, [&](int i, int) {
        u32 parts[2][2][2][3];  // row, half of the columns, pair
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const uint4 v = *ring.piece(i, 2 * e + h);
                split(parts[h][e][0], from_bits(v.x), from_bits(v.y));
                split(parts[h][e][1], from_bits(v.z), from_bits(v.w));
            }
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const uint4 v = *ring.piece(i, 4 + t);
#pragma unroll
            for (int p = 2; p >= 0; p--) {
                const u32 low[4] = {parts[0][0][0][p], parts[1][0][0][p], parts[0][0][1][p], parts[1][0][1][p]};
                const u32 high[4] = {parts[0][1][0][p], parts[1][1][0][p], parts[0][1][1][p], parts[1][1][1][p]};
                multiply_add(d[0][t], low, v.x, v.y);
                multiply_add(d[0][t], high, v.z, v.w);
            }
        }
    });
    leave(memory, PART, d, warp, lane);
    sync_threads();
    each_number<NT>(ROWS * tile, EXPERTS, tokens, [&](int row, int token, int place) {
        logits[(i64)token * EXPERTS + row] = sum_of<NT>(memory, PART, 0, place);
    });
}
