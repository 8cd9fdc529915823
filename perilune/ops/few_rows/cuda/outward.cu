// The ways out of a layer with experts back into the model's width, in one sum: out = W_up norm(sum_a p_a y_a) + W_down h.
//
// The norm's factor of a token is applied to the finished sum of the first product, so nothing waits for it. Of up to eight tokens
// every block adds up the experts' outputs itself (PAIRS); of more, combine.cu has done it. Squares are added in one order in both
// files: four numbers in a row, then a binary tree over 128 columns, then 128 columns after the other.
//
// Macros: WIDTH (columns of W_up, a multiple of 32), SECOND (of W_down, or 0), ACTIVE (experts of a token), TOKEN_TILES (of 8
// tokens), ROW_TILES (of 16 rows), PAIRS, NORM.
#include "rows.h"
#include "squares.h"

constexpr int NT = TOKEN_TILES, RT = ROW_TILES, STEPS = WIDTH / STEP, STEP_PAIRS = (STEPS + 1) / 2;
constexpr int MOST_BYTES = 512 * RT * NT;  // of a warp's sums
typedef Ring<RT, (PAIRS ? 0 : NT), STEPS> Turns;
typedef Ring<RT, NT, (SECOND ? SECOND : STEP) / STEP> MoreTurns;
constexpr int PART = larger(Turns::BYTES / WARPS, MOST_BYTES), MORE_PART = SECOND ? larger(MoreTurns::BYTES / WARPS, MOST_BYTES) : 0;
static_assert(WARPS * (PART + MORE_PART) + 4 * 8 * STEP_PAIRS <= SHARED_BYTES, "shared memory");

// y [pairs, WIDTH], weight and pair [tokens, ACTIVE]; or x [tokens, WIDTH] with the tokens' factors.
KERNEL(THREADS, 2) outward(
    const bf16* up, const bf16* down, const float* y, const float* weight, const int* pair, const bf16* x, const float* factor,
    const float* __restrict__ norm, const bf16* h, bf16* out, int tokens, int rows, float eps) {
    SHARED(memory);
    u8* const more = memory + WARPS * PART;
    float* const squares = (float*)(more + WARPS * MORE_PART);  // [STEP_PAIRS][8], of 64 columns
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.x * ROWS * RT;
    let_next_start();
    Turns ring;
    ring.place(memory, warp, lane, PART);
#pragma unroll
    for (int r = 0; r < RT; r++) ring.tile(r, up, WIDTH, first + ROWS * r, rows, lane);
    ring.begin();
#if SECOND
    MoreTurns ring2;
    ring2.place(more, warp, lane, MORE_PART);
#pragma unroll
    for (int r = 0; r < RT; r++) ring2.tile(r, down, SECOND, first + ROWS * r, rows, lane);
    ring2.begin();
#endif
    if (NORM && PAIRS) prefetch_floats(norm, WIDTH);
    wait_for_earlier();

    float p[ACTIVE];
    int place_of[ACTIVE];  // at most 512 pairs of at most 4096 numbers
    if (PAIRS) {
        const int token = lane >> 2 < tokens ? lane >> 2 : tokens - 1;  // sums that nobody reads
#pragma unroll
        for (int a = 0; a < ACTIVE; a++) p[a] = weight[token * ACTIVE + a], place_of[a] = pair[token * ACTIVE + a] * WIDTH + 8 * (lane & 3);
    }
    float d[RT][NT][4];
    clear(d);
    auto token_of = [&](int t) { return token_at(x, t, tokens, WIDTH, lane); };
    ring.multiply(d, NT, token_of, [&](int t, int step, uint4 here) {
        if (!PAIRS) return here;
        float s[8];
#pragma unroll
        for (int e = 0; e < 8; e++) s[e] = 0.0f;
#pragma unroll
        for (int a = 0; a < ACTIVE; a++) {
            const float4 v = *(const float4*)(y + place_of[a] + STEP * step), w = *(const float4*)(y + place_of[a] + STEP * step + 4);
            s[0] = fmaf(p[a], v.x, s[0]), s[1] = fmaf(p[a], v.y, s[1]), s[2] = fmaf(p[a], v.z, s[2]), s[3] = fmaf(p[a], v.w, s[3]);
            s[4] = fmaf(p[a], w.x, s[4]), s[5] = fmaf(p[a], w.y, s[5]), s[6] = fmaf(p[a], w.z, s[6]), s[7] = fmaf(p[a], w.w, s[7]);
        }
        if (NORM) {
            float square = four_squares(s[0], s[1], s[2], s[3]) + four_squares(s[4], s[5], s[6], s[7]);
            square += shuffle_xor(square, 1);
            square += shuffle_xor(square, 2);
            float* const place = squares + step / 2 * 8 + (lane >> 2);
            if ((lane & 3) == 0) *place = step & 1 ? *place + square : square;
            const int column = STEP * step + 8 * (lane & 3);
            const float4 a = *(const float4*)(norm + column), b = *(const float4*)(norm + column + 4);
            const float scale[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int e = 0; e < 8; e++) s[e] *= scale[e];
        }
        return narrow(s);
    });
#if SECOND
    float d2[RT][NT][4];
    clear(d2);
    ring2.multiply(
        d2, NT, [&](int t) { return token_at(h, t, tokens, SECOND, lane); },
        [&](int, int, uint4 here) { return here; });
    leave(more, MORE_PART, d2, warp, lane);
#endif
    leave(memory, PART, d, warp, lane);
    sync_threads();
#pragma unroll
    for (int r = 0; r < RT; r++)
        each_number<NT>(first + ROWS * r, rows, tokens, [&](int row, int token, int place) {
            float unit = 1.0f;
            if (NORM && PAIRS) {
                float all = 0.0f;
#pragma unroll
                for (int j = 0; j < STEP_PAIRS; j += 2)
                    all += squares[8 * j + token] + (j + 1 < STEP_PAIRS ? squares[8 * (j + 1) + token] : 0.0f);
                unit = rsqrt_fast(all * (1.0f / WIDTH) + eps);
            } else if (NORM) unit = factor[token];
            float sum = unit * sum_of<NT>(memory, PART, r, place);
            if (SECOND) sum += sum_of<NT>(more, MORE_PART, r, place);
            out[(i64)token * rows + row] = to_bf16(sum);
        });
}
