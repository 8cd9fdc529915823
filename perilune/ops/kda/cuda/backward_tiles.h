// Where the tiles of the backward kernel lie in shared memory, and how they go into the tensor cores.
//
// A chunk's 64 rows are four blocks of 16. Inside a block a thread of a product's result holds two rows that follow each
// other, so running sums stay mostly in a thread: the 8 rows of a matrix that the tensor cores take are every second one of
// a block. GROUP h of block b is rows 16 b + 2 i + h, i = 0 .. 7. With lane = 4 r + c a thread's results are
//
//     rows 16 b + 2 r + h, channels 32 w + 8 j + 2 c + e      h, e in 0, 1; j in 0 .. 3;      value[j][2 h + e]
//
// Rows of a tile are cut into pieces of 16 bytes, permuted so that the 8 rows of a group, and the threads of a warp, meet
// different banks.
#pragma once
#include "device.h"

constexpr int K = KEY_DIM, V = VALUE_DIM;
constexpr int CHUNK = 64;
constexpr int BLOCKS = 4;          // of 16 rows
constexpr int WIDTH = K / 32;      // warps across the key channels
constexpr int THREADS = 32 * BLOCKS * WIDTH;
constexpr int WARPS = THREADS / 32;

// Where a thread stands.
struct Place {
    int lane, warp, block, w, r, c, row;
    __device__ __forceinline__ int channel(int j) const { return 32 * w + 8 * j + 2 * c; }
};
DEVICE Place place(int thread) {
    const int lane = thread & 31, warp = thread >> 5, block = warp / WIDTH, r = lane >> 2;
    return {lane, warp, block, warp % WIDTH, r, lane & 3, 16 * block + 2 * r};
}

// Wait for the warps of the same rows.
DEVICE void sync_rows(const Place& p) { barrier_sync(1 + p.block, 32 * WIDTH); }

// Byte of piece `piece` of a row in a tile of 64 rows of D numbers; the same for a state, whose rows are value channels.
template <int D> DEVICE int row_at(int row, int piece) { return row * (2 * D) + ((piece ^ ((row >> 1) & 7)) << 4); }
DEVICE int state_at(int row, int piece) { return row * (2 * K) + ((piece ^ (row & 7)) << 4); }

// Ask for 64 rows of a token-major tensor; rows from `count` on become 0.
template <int D> DEVICE void fetch_rows(u8* tile, const bf16* rows, i64 stride, int count) {
    constexpr int PIECES = D / 8, TOGETHER = THREADS / PIECES;
    const int thread = threadIdx.x, first = thread / PIECES, piece = thread % PIECES;
    rows += first * stride + 8 * piece;
#pragma unroll
    for (int n = 0; n < CHUNK / TOGETHER; n++) {
        const int row = first + n * TOGETHER;
        copy_async(tile + row_at<D>(row, piece), rows, row < count);
        rows += TOGETHER * stride;
    }
}

// Ask for a state `[V, K]`.
DEVICE void fetch_state(u8* tile, const bf16* state) {
    constexpr int PIECES = K / 8, TOGETHER = THREADS / PIECES;
    const int thread = threadIdx.x, first = thread / PIECES, piece = thread % PIECES;
    state += 8 * thread;
#pragma unroll
    for (int n = 0; n < V / TOGETHER; n++)
        copy_async(tile + state_at(first + n * TOGETHER, piece), state + n * (8 * THREADS));
}

// This thread's part of a tile of key channels, two numbers a word: words[h][j].
DEVICE int own_at(const Place& p, int h, int j) { return row_at<K>(p.row + h, 4 * p.w + j) + 4 * p.c; }

// Pieces of a row differ in bits 4 .. of their place, in which rows are aligned: `n` pairs of pieces further is an exclusive
// or, one instruction.
DEVICE int pairs_further(int at, int n) { return at ^ (n << 5); }

// Where a lane finds its row of the four matrices of an operand: on the left the rows of `block` from `piece` on; the same of
// a square's transposed block; on the right rows `block` of a tile, channels 32 w .. 32 w + 15; or of a state, rows 0 .. 15.
template <int D> DEVICE int left_at(int block, int piece, int lane) {
    return row_at<D>(16 * block + 2 * (lane & 7) + (lane >> 3 & 1), piece + (lane >> 4));
}
DEVICE int transposed_at(int q, int k, int lane) {
    return row_at<CHUNK>(16 * q + 2 * (lane & 7) + (lane >> 4), 2 * k + (lane >> 3 & 1));
}
DEVICE int right_at(int block, int w, int lane) {
    return row_at<K>(16 * block + 2 * (lane & 7) + (lane >> 3 & 1), 4 * w + (lane >> 4));
}
DEVICE int state_right_at(int w, int lane) { return state_at(lane & 15, 4 * w + (lane >> 4)); }

// value += a 16x16 operand times 16 rows of a tile, `at` from `right_at`.
DEVICE void add_products(float (&value)[4][4], const u32 (&a)[4], const u8* tile, int at) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        u32 b[4];
        load_matrices_transposed(b, tile + pairs_further(at, n));
        multiply_add(value[2 * n], a, b[0], b[1]);
        multiply_add(value[2 * n + 1], a, b[2], b[3]);
    }
}

// value += the warp's rows of a tile of value channels times a state.
DEVICE void through_state(float (&value)[4][4], const u8* rows, const u8* state, const Place& p) {
    const int at = left_at<V>(p.block, 0, p.lane), right = state_right_at(p.w, p.lane);
#pragma unroll
    for (int n = 0; n < V / 16; n++) {
        u32 a[4];
        load_matrices(a, rows + pairs_further(at, n));
        add_products(value, a, state + n * (32 * K), right);
    }
}

// The same for two tiles of rows at once.
DEVICE void through_state(
    float (&one)[4][4], float (&two)[4][4], const u8* rows_one, const u8* rows_two, const u8* state, const Place& p
) {
    const int at = left_at<V>(p.block, 0, p.lane), right = state_right_at(p.w, p.lane);
#pragma unroll
    for (int n = 0; n < V / 16; n++) {
        u32 a1[4], a2[4], b[4];
        load_matrices(a1, rows_one + pairs_further(at, n));
        load_matrices(a2, rows_two + pairs_further(at, n));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrices_transposed(b, state + n * (32 * K) + pairs_further(right, i));
            multiply_add(one[2 * i], a1, b[0], b[1]);
            multiply_add(one[2 * i + 1], a1, b[2], b[3]);
            multiply_add(two[2 * i], a2, b[0], b[1]);
            multiply_add(two[2 * i + 1], a2, b[2], b[3]);
        }
    }
}

// Sums over a thread's channels, then over the four threads that share its rows.
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// Sums over the warp's 16 rows of x[j][e], one channel a thread: that of channel 8 (r >> 1) + 2 c + (r & 1).
DEVICE float column_sum(const float (&x)[4][2], int lane) {
    float four[2][2], two[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const bool upper = lane & 16;
            const float mine = upper ? x[j + 2][e] : x[j][e], other = upper ? x[j][e] : x[j + 2][e];
            four[j][e] = mine + shuffle_xor(other, 16);
        }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const bool upper = lane & 8;
        const float mine = upper ? four[1][e] : four[0][e], other = upper ? four[0][e] : four[1][e];
        two[e] = mine + shuffle_xor(other, 8);
    }
    const bool upper = lane & 4;
    return (upper ? two[1] : two[0]) + shuffle_xor(upper ? two[0] : two[1], 4);
}
DEVICE int column_of(int w, int lane) { return 32 * w + 8 * (lane >> 3) + 2 * (lane & 3) + ((lane >> 2) & 1); }

// Sums of the rows before this thread's two, within the block, of x = the sum of its own two. x becomes the sum with its
// own, in the last rows' threads of the whole block.
// Added in the order of rows, never as a difference: later rows do not move earlier ones by a bit. (traps T01)
DEVICE float sum_before(float& x, int lane) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
        const float y = shuffle_up(x, by);
        if (lane >= by) x += y;
    }
    const float before = shuffle_up(x, 4);
    return lane < 4 ? 0.0f : before;
}

// The same for the rows after; x becomes the whole block's sum in the first rows' threads.
DEVICE float sum_after(float& x, int lane) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
        const float y = shuffle(x, lane + by);
        if (lane + by < 32) x += y;
    }
    const float after = shuffle(x, lane + 4);
    return lane > 27 ? 0.0f : after;
}

// Write a thread's numbers of one row, x[j][2 h + e]; `row` points at the warp's 32 channels. As bfloat16 the four threads
// of a row trade first, so that each writes 16 bytes.
DEVICE void store_row(bf16* row, const float (&x)[4][4], int h, int lane, bool there) {
    const bool odd = lane & 1, upper = lane & 2;
    u32 two[4];
#pragma unroll
    for (int j = 0; j < 4; j++) two[j] = pack(x[j][2 * h], x[j][2 * h + 1]);
    const u32 a = shuffle(odd ? two[0] : two[1], lane ^ 1), b = shuffle(odd ? two[2] : two[3], lane ^ 1);
    const u32 low_0 = odd ? a : two[0], low_1 = odd ? two[1] : a, high_0 = odd ? b : two[2], high_1 = odd ? two[3] : b;
    const u32 c = shuffle(upper ? low_0 : high_0, lane ^ 2), d = shuffle(upper ? low_1 : high_1, lane ^ 2);
    const uint4 eight = upper ? make_uint4(c, d, high_0, high_1) : make_uint4(low_0, low_1, c, d);
    if (there) store_once(row + 8 * (lane & 3), eight);
}
DEVICE void store_row(float* row, const float (&x)[4][4], int h, int lane, bool there) {
    if (!there) return;
#pragma unroll
    for (int j = 0; j < 4; j++) *(float2*)(row + 8 * j + 2 * (lane & 3)) = make_float2(x[j][2 * h], x[j][2 * h + 1]);
}
