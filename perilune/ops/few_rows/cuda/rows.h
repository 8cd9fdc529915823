// Products of a few tokens with matrices, bound by reading the matrices: out[n, r] = sum over c of x[n, c] W[r, c].
//
// A block takes 16 rows of a matrix (or of several), its warps take steps of 32 columns in turns, two that follow each other at a
// time. Tensor cores multiply: the 16 rows are the left operand, eight tokens are the columns of the right one. In a step lane
// (i, t) = (lane / 4, lane % 4) has 16 bytes of rows i and i + 8, columns 8 t .. 8 t + 7, and of token i the same columns; these
// count as columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of two products of depth 16, in the same order left and right, so no number
// changes its lane: it copies itself what it will use, several steps ahead, into places of shared memory of its own, and no copy
// needs a barrier. The warps' sums are added in their order.
//
// Copies, not loads into registers: the compiler moves loads of a matrix behind the wait for earlier kernels.
//
// A token is a column of its own and all sizes but the number of tokens fix the order of its sum: its bits do not depend on its
// company. Columns beyond the tokens are zeros: where they repeat a token the cache is asked for the same bytes by every lane.
#pragma once
#include "device.h"
#include "gated_unit.h"

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 16, STEP = 32;

// A block: `count` floats come into the cache. For parameters, before the wait for earlier kernels.
DEVICE void prefetch_floats(const float* p, int count) {
    for (int at = 32 * threadIdx.x; at < count; at += 32 * THREADS) prefetch(p + at);
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
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
DEVICE int step_of(int n, int warp) { return n / 2 * (2 * WARPS) + 2 * warp + (n & 1); }

// A warp's turns at RT tiles of matrices and NT pieces of tokens: what lies in its part of shared memory, AHEAD turns of it. SCALE:
// bytes of a matrix's number over those of a bfloat16.
template <int RT, int NT, int STEPS, int SCALE = 1> struct Ring {
    static constexpr int TURNS = turns(STEPS), MOST = RT == 1 ? 4 : 2, AHEAD = TURNS < MOST ? TURNS : MOST, PIECES = 2 * RT + NT;
    static constexpr int BYTES = AHEAD * PIECES * 16 * THREADS;  // of all warps
    const bf16* row[RT][2];  // at this lane's first column; null beyond the matrix
    uint4* places;           // of this lane
    int warp;

    // A warp's part of the block's memory is `part` bytes long.
    __device__ __forceinline__ void place(u8* memory, int warp_of_block, int lane, int part = BYTES / WARPS) {
        warp = warp_of_block;
        places = (uint4*)(memory + warp * part) + lane;
    }
    // `first` row of a tile of a matrix [rows, columns].
    __device__ __forceinline__ void tile(int r, const bf16* matrix, i64 columns, int first, int rows, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = first + (lane >> 2) + 8 * h;
            row[r][h] = at < rows ? matrix + at * columns + 8 * (lane & 3) : nullptr;
        }
    }
    __device__ __forceinline__ int turn_of(int step) { return step / (2 * WARPS) * 2 + (step & 1); }
    __device__ __forceinline__ uint4* piece(int turn, int number) { return places + (turn % AHEAD * PIECES + number) * 32; }
    __device__ __forceinline__ void fetch(int turn) {
        const int step = step_of(turn, warp);
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool there = row[r][h] && step < STEPS && turn < TURNS;
                copy_async_of_line(piece(turn, 2 * r + h), there ? row[r][h] + SCALE * STEP * step : nullptr, there);
            }
    }
    template <class Token> __device__ __forceinline__ void fetch_tokens(int turn, int tiles, Token token) {
        const int step = step_of(turn, warp);
#pragma unroll
        for (int t = 0; t < NT; t++)
            if (t < tiles) {
                const bf16* const from = token(t);
                const bool there = from && step < STEPS && turn < TURNS;
                copy_async(piece(turn, 2 * RT + t), there ? from + STEP * step : nullptr, there);
            }
    }
    // Ask for the first turns of the matrices: before the wait for earlier kernels.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int turn = 0; turn < AHEAD; turn++) fetch(turn), copy_commit();
    }
    // Every turn once its pieces are there: use(place of the turn, step). token(t): where piece t of this lane begins, of `tiles`; null
    // for zeros.
    template <class Token, class Use> __device__ __forceinline__ void run(int tiles, Token token, Use use) {
#pragma unroll
        for (int turn = 0; turn < AHEAD; turn++) fetch_tokens(turn, tiles, token), copy_commit();
#pragma unroll 1
        for (int start = 0; start < TURNS; start += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int turn = start + i, step = step_of(turn, warp);
                copy_wait<AHEAD - 1>();
                if (step < STEPS && turn < TURNS) use(i, step);
                if (TURNS > AHEAD) fetch(turn + AHEAD), fetch_tokens(turn + AHEAD, tiles, token);
                copy_commit();
            }
        }
    }
    // d[r][t] += tile r times tokens 8 t .., for t below `tiles`; right(t, step, raw): what is multiplied, given what was copied of it.
    template <int ALL, class Token, class Right>
    __device__ __forceinline__ void multiply(float (&d)[RT][ALL][4], int tiles, Token token, Right right) {
        run(tiles, token, [&](int i, int step) {
            uint4 x[ALL];  // of all tiles of tokens: there are mostly fewer of them than of rows
#pragma unroll
            for (int t = 0; t < ALL; t++)
                if (t < tiles) x[t] = right(t, step, NT ? *piece(i, 2 * RT + t) : zeros());
#pragma unroll
            for (int r = 0; r < RT; r++) {
                const uint4 a = *piece(i, 2 * r), b = *piece(i, 2 * r + 1);
                const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
                for (int t = 0; t < ALL; t++) {
                    if (t >= tiles) break;
                    multiply_add(d[r][t], low, x[t].x, x[t].y);
                    multiply_add(d[r][t], high, x[t].z, x[t].w);
                }
            }
        });
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

// Where this lane's columns of its token begin in a tile of x, whose tokens are `stride` apart; null beyond the tokens.
DEVICE const bf16* token_at(const bf16* x, int tile, int tokens, i64 stride, int lane) {
    const int token = 8 * tile + (lane >> 2);
    return token < tokens ? x + token * stride + 8 * (lane & 3) : nullptr;
}

// The sums of all warps: each leaves its own in its part of shared memory, `bytes` long; after a barrier `sum_of` adds one.
template <int RT, int NT> DEVICE void leave(u8* memory, int bytes, const float (&d)[RT][NT][4], int warp, int lane) {
    float* const own = (float*)(memory + warp * bytes) + lane;
    copy_wait<0>();
    sync_warp();  // other lanes have read what lay here
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) own[((r * NT + t) * 4 + e) * 32] = d[r][t][e];
}
template <int NT> DEVICE float sum_of(const u8* memory, int bytes, int r, int place) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += ((const float*)(memory + w * bytes))[r * NT * 128 + place];
    return sum;
}
// A block, over the numbers of a tile whose rows begin with `first`: use(row, token, place for `sum_of`), where both exist.
template <int NT, class Use> DEVICE void each_number(int first, int rows, int tokens, Use use) {
    for (int place = threadIdx.x; place < 128 * NT; place += THREADS) {
        const int row = first + (place >> 2 & 7) + 8 * (place >> 6 & 1), token = 8 * (place >> 7) + 2 * (place & 3) + (place >> 5 & 1);
        if (row < rows && token < tokens) use(row, token, place);
    }
}
