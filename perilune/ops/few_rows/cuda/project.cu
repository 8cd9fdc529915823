// Projections of a few tokens by several matrices of one width: y_s[n] = W_s x'[n].
//
// x' is x, or its RMSNorm (the tokens' factor is applied to the sums, so that nothing waits for it), or x sigmoid(gate). With a
// second operand, y[n] = W x[n] + W2 x2[n] in one sum.
//
// Macros: WIDTH (columns, a multiple of 32), SECOND (those of the second operand, or 0), SEGMENTS (matrices; one with a second
// operand), TOKEN_TILES (of 8 tokens), ROW_TILES (of 16 rows in a block), NORM, GATED.
#include "rows.h"

constexpr int NT = TOKEN_TILES, RT = ROW_TILES, STEPS = WIDTH / STEP;

template <int S> struct Segments {  // a type of its own for each S: the emulator's libraries share a process
    const bf16* weight[S];  // [rows, WIDTH]
    bf16* out[S];
    int rows[S];
};

KERNEL(THREADS, 2) project(
    Segments<SEGMENTS> segments, const bf16* x, const bf16* gate, const float* __restrict__ norm, const bf16* weight2, const bf16* x2,
    i64 x_stride, i64 gate_stride, i64 x2_stride, i64 out_stride, int tokens, float eps) {
    SHARED(memory);
    float* const sums = (float*)memory;                     // of every warp
    float* const squares = sums + WARPS * RT * NT * 128;    // [WARPS][8 NT]
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
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

    Matrices<RT, STEPS> left;
#pragma unroll
    for (int r = 0; r < RT; r++) left.tile(r, weight, WIDTH, first + ROWS * r, rows, lane);
    left.begin(warp);
#if SECOND
    Matrices<RT, SECOND / STEP> left2;
#pragma unroll
    for (int r = 0; r < RT; r++) left2.tile(r, weight2, SECOND, first + ROWS * r, rows, lane);
    left2.begin(warp);
#endif
    wait_for_earlier();

    float d[RT][NT][4], square[NT];
    clear(d);
#pragma unroll
    for (int t = 0; t < NT; t++) square[t] = 0.0f;
    left.multiply(d, NT, warp, [&](int t, int step) {
        const int token = 8 * t + (lane >> 2), column = STEP * step + 8 * (lane & 3);
        if (token >= tokens) return zeros();
        const uint4 here = *(const uint4*)(x + token * x_stride + column);
        if (!NORM && !GATED) return here;
        float v[8], w[8];
        widen(v, here);
        if (GATED) {
            widen(w, *(const uint4*)(gate + token * gate_stride + column));
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] *= sigmoid(w[e]);
        }
        if (NORM) {
            const float4 a = *(const float4*)(norm + column), b = *(const float4*)(norm + column + 4);
            const float scale[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int e = 0; e < 8; e++) square[t] = fmaf(v[e], v[e], square[t]), v[e] *= scale[e];
        }
        return narrow(v);
    });
#if SECOND
    left2.multiply(d, NT, warp, [&](int t, int step) {
        const int token = 8 * t + (lane >> 2);
        return token < tokens ? *(const uint4*)(x2 + token * x2_stride + STEP * step + 8 * (lane & 3)) : zeros();
    });
#endif
    leave(sums, d, warp, lane);
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
        for (int place = thread; place < 128 * NT; place += THREADS) {
            const int row = first + ROWS * r + row_at(place), token = token_at(place);
            if (row >= rows || token >= tokens) continue;
            float sum = sum_of<RT, NT>(sums, r, place);
            if (NORM) {
                float all = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) all += squares[w * 8 * NT + token];
                sum *= rsqrt_fast(all * (1.0f / WIDTH) + eps);
            }
            out[token * out_stride + row] = to_bf16(sum);
        }
}
