// Projections of a few tokens by several matrices of one width: y_s[n] = W_s x'[n].
//
// x' is x, or its RMSNorm (the tokens' factor is applied to the sums, so that nothing waits for it), or x sigmoid(gate).
//
// Macros: WIDTH (columns, a multiple of 32), SEGMENTS (matrices), TOKEN_TILES (of 8 tokens), ROW_TILES (of 16 rows in a block),
// NORM, GATED.
#include "rows.h"

constexpr int NT = TOKEN_TILES, RT = ROW_TILES;
typedef Ring<RT, (GATED ? 2 : 1) * NT, WIDTH / STEP> Turns;
constexpr int PART = Turns::BYTES / WARPS;  // of a warp
static_assert(Turns::BYTES + 4 * WARPS * 8 * NT <= SHARED_BYTES && 512 * RT * NT <= PART, "shared memory");

template <int S> struct Segments {  // a type of its own for each S: the emulator's libraries share a process
    const bf16* weight[S];  // [rows, WIDTH]
    bf16* out[S];
    int rows[S];
};

// Two blocks have 128 registers a thread each: the sums of 4 by 4 tiles are 64, of 8 by 4 all of them.
KERNEL(THREADS, RT * NT < 16 ? 2 : 1) project(
    Segments<SEGMENTS> segments, const bf16* x, const bf16* gate, const float* __restrict__ norm, i64 x_stride, i64 gate_stride,
    i64 out_stride, int tokens, float eps) {
    SHARED(memory);
    float* const squares = (float*)(memory + Turns::BYTES);  // [WARPS][8 NT]
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    let_next_start();
    int segment = 0, first = blockIdx.x * ROWS * RT;
#pragma unroll
    for (int s = 0; s + 1 < SEGMENTS; s++) {
        const int length = (segments.rows[s] + ROWS * RT - 1) / (ROWS * RT) * (ROWS * RT);
        if (segment == s && first >= length) segment = s + 1, first -= length;
    }
    const bf16* weight = segments.weight[0];
    bf16* out = segments.out[0];
    int rows = segments.rows[0];
#pragma unroll
    for (int s = 1; s < SEGMENTS; s++)
        if (segment == s) weight = segments.weight[s], out = segments.out[s], rows = segments.rows[s];

    Turns ring;
    ring.place(memory, warp, lane);
#pragma unroll
    for (int r = 0; r < RT; r++) ring.tile(r, weight, WIDTH, first + ROWS * r, rows, lane);
    ring.begin();
    if (NORM) prefetch_floats(norm, WIDTH);
    wait_for_earlier();

    float d[RT][NT][4], square[NT];
    clear(d);
#pragma unroll
    for (int t = 0; t < NT; t++) square[t] = 0.0f;
    auto token_of = [&](int t) -> const bf16* {  // tokens, then their gates
        return t < NT ? token_at(x, t, tokens, x_stride, lane) : token_at(gate, t - NT, tokens, gate_stride, lane);
    };
    ring.multiply(d, GATED ? 2 * NT : NT, token_of, [&](int t, int step, uint4 here) {
        if (!NORM && !GATED) return here;
        float v[8], w[8];
        widen(v, here);
        if (GATED) {
            widen(w, *ring.piece(ring.turn_of(step), 2 * RT + NT + t));
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] *= sigmoid(w[e]);
        }
        if (NORM) {
            const int column = STEP * step + 8 * (lane & 3);
            const float4 a = *(const float4*)(norm + column), b = *(const float4*)(norm + column + 4);
            const float scale[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int e = 0; e < 8; e++) square[t] = fmaf(v[e], v[e], square[t]), v[e] *= scale[e];
        }
        return narrow(v);
    });
    leave(memory, PART, d, warp, lane);
    if (NORM) {
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float all = square[t];
            all += shuffle_xor(all, 1);
            all += shuffle_xor(all, 2);
            if ((lane & 3) == 0) squares[warp * 8 * NT + 8 * t + (lane >> 2)] = all;
        }
    }
    sync_threads();
#pragma unroll
    for (int r = 0; r < RT; r++)
        each_number<NT>(first + ROWS * r, rows, tokens, [&](int row, int token, int place) {
            float sum = sum_of<NT>(memory, PART, r, place);
            if (NORM) {
                float all = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) all += squares[w * 8 * NT + token];
                sum *= rsqrt_fast(all * (1.0f / WIDTH) + eps);
            }
            out[token * out_stride + row] = to_bf16(sum);
        });
}
