// Products of a few tokens with matrices, bound by reading the matrices: out[n, r] = sum over c of x[n, c] W[r, c].
//
// A block takes 16 rows of a matrix (or of several), its warps take steps of 32 columns in turns, two that follow each other at a
// time. Tensor cores multiply: the 16 rows are the left operand, straight from global memory to registers, eight tokens are the
// columns of the right one. In a step lane (i, t) = (lane / 4, lane % 4) loads 16 bytes of rows i and i + 8, columns 8 t .. 8 t + 7,
// and of token i the same columns; these count as columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of two products of depth 16, in the same
// order left and right, so no number changes its lane. The warps' sums are added in their order.
//
// A token is a column of its own and all sizes but the number of tokens fix the order of its sum: its bits do not depend on its
// company.
#pragma once
#include "device.h"

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 16, STEP = 32;
constexpr float LOG2E = 1.4426950408889634f;

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }
DEVICE float at_least(float x, float least) { return x < least ? least : x; }  // NaN stays
DEVICE float at_most(float x, float most) { return x > most ? most : x; }

// beta tanh(a / beta) sigmoid(a) linear_beta tanh(b / linear_beta); a sigmoid(a) b without the caps. Exponents are bounded so
// that no product overflows.
template <bool GATE, bool UP> DEVICE float gated_unit(float a, float b, float beta, float linear_beta) {
    const float opened = reciprocal(1.0f + exp2_fast(at_least(a, -56.0f) * -LOG2E));
    float left = a, right = b;
    if (GATE) {
        const float u = exp2_fast(at_most(a * (-2.0f * LOG2E / beta), 40.0f));
        left = beta * (1.0f - u) * reciprocal(1.0f + u);
    }
    if (UP) {
        const float v = exp2_fast(at_most(b * (-2.0f * LOG2E / linear_beta), 40.0f));
        right = linear_beta * (1.0f - v) * reciprocal(1.0f + v);
    }
    return left * opened * right;
}

DEVICE uint4 zeros() { return make_uint4(0, 0, 0, 0); }
DEVICE void widen(float (&x)[8], uint4 v) {
    x[0] = low_half(v.x), x[1] = high_half(v.x), x[2] = low_half(v.y), x[3] = high_half(v.y);
    x[4] = low_half(v.z), x[5] = high_half(v.z), x[6] = low_half(v.w), x[7] = high_half(v.w);
}
DEVICE uint4 narrow(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// Steps of a warp out of `steps`, and its n-th one.
DEVICE constexpr int turns(int steps) { return (steps + 2 * WARPS - 1) / (2 * WARPS) * 2; }
DEVICE int step_of(int n, int warp) { return n / 2 * (2 * WARPS) + 2 * warp + (n & 1); }

// 16 bytes of this lane's rows of RT tiles of matrices, several steps of them under way.
template <int RT, int STEPS> struct Matrices {
    static constexpr int TURNS = turns(STEPS), AHEAD = TURNS < 8 / RT ? TURNS : 8 / RT;
    const bf16* row[RT][2];  // at this lane's first column, or null beyond the matrix
    uint4 words[AHEAD][RT][2];

    // `first` row of a tile of a matrix [rows, columns].
    __device__ __forceinline__ void tile(int r, const bf16* matrix, i64 columns, int first, int rows, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = first + (lane >> 2) + 8 * h;
            row[r][h] = at < rows ? matrix + at * columns + 8 * (lane & 3) : nullptr;
        }
    }
    __device__ __forceinline__ void fetch(int slot, int n, int warp) {
        const int step = step_of(n, warp);
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                words[slot][r][h] = row[r][h] && step < STEPS && n < TURNS ? load_ahead(row[r][h] + STEP * step) : zeros();
    }
    __device__ __forceinline__ void begin(int warp) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) fetch(i, i, warp);
    }
    // d[r][t] += tile r times tokens 8 t .., for t below `tiles`; right(t, step): this lane's 8 numbers of its token of tile t.
    template <int NT, class Right> __device__ __forceinline__ void multiply(float (&d)[RT][NT][4], int tiles, int warp, Right right) {
#pragma unroll 1
        for (int n = 0; n < TURNS; n += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int step = step_of(n + i, warp);
                const bool there = n + i < TURNS && step < STEPS;
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    if (t >= tiles) break;
                    const uint4 x = there ? right(t, step) : zeros();
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        const uint4 a = words[i][r][0], b = words[i][r][1];
                        const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
                        multiply_add(d[r][t], low, x.x, x.y);
                        multiply_add(d[r][t], high, x.z, x.w);
                    }
                }
                if (n + AHEAD < TURNS) fetch(i, n + AHEAD + i, warp);
            }
        }
    }
};

template <int RT, int NT> DEVICE void clear(float (&d)[RT][NT][4]) {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) d[r][t][e] = 0.0f;
}

// The sums of all warps: each leaves its own in shared memory, `WARPS * RT * NT * 128` floats; after a barrier `sum_of` adds one.
template <int RT, int NT> DEVICE void leave(float* shared, const float (&d)[RT][NT][4], int warp, int lane) {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) shared[(warp * RT * NT * 4 + (r * NT + t) * 4 + e) * 32 + lane] = d[r][t][e];
}
template <int RT, int NT> DEVICE float sum_of(const float* shared, int r, int place) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[(w * RT + r) * NT * 128 + place];
    return sum;
}
// Of the number at `place` (below 128 NT) of a tile of rows: its row of 16 and its token.
DEVICE int row_at(int place) { return (place >> 2 & 7) + 8 * (place >> 6 & 1); }
DEVICE int token_at(int place) { return 8 * (place >> 7) + 2 * (place & 3) + (place >> 5 & 1); }
