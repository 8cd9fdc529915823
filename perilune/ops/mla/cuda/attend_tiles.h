// What the kernels of causal attention share: attend.cu, and attend_queries.cu and attend_keys.cu, its backward pass.
// Macros: KEY (channels of a key, a multiple of 16), VALUE (64 or 128).
#pragma once
#include "reductions.h"

constexpr int ROWS = 64, GROUPS = 2;  // rows of a warpgroup's tile; warpgroups that multiply
constexpr int CONSUMERS = 128 * GROUPS, COPIERS = 128, THREADS = CONSUMERS + COPIERS;
constexpr int KEY_CHUNKS = (KEY + 63) / 64, VALUE_CHUNKS = VALUE / 64;
constexpr int CHUNK = 128 * ROWS;  // bytes: 64 rows of 64 channels

enum { OWN = 1, TURN = 3 };  // barriers besides 0, plus the group's number

// Rows `first`, `first` + STEP, .. of COUNT rows of WIDTH channels: each thread a 16-byte piece of every chunk's row. Channels
// beyond WIDTH are left as they are: they only ever meet results that nobody reads.
template <int WIDTH, int COUNT, int STEP> DEVICE void copy_rows(u8* to, const bf16* from, i64 stride, int first, int piece, int there) {
#pragma unroll 2
    for (int r = first; r < COUNT; r += STEP) {
        u8* const row = to + in_block(r, piece);
        const bf16* const source = from + r * stride + 8 * piece;
#pragma unroll
        for (int c = 0; c < (WIDTH + 63) / 64; c++)
            if (64 * c + 64 <= WIDTH || 64 * c + 8 * piece < WIDTH) copy_async(row + c * 128 * COUNT, source + 64 * c, r < there);
    }
}

// warpgroup: s += a b^T over WIDTH channels of 64 rows of each, chunk after chunk.
template <int WIDTH> DEVICE void multiply_rows(float (&s)[32], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        const int at = k / 4 * CHUNK + 32 * (k & 3);
        warpgroup_multiply<false>(s, further(a, at), further(b, at), k > 0);
    }
}

// What the backward pass knows of a query: log2 of its denominator, <do, o>.
struct Query {
    float log, delta;
};

// The keys that queries see: of this thread's two rows `row` and row + 8, those from `first` up to, not including, `limit`; all 64
// rows of the group, from g0 on, see those from `from_sure` up to `to_sure`. firsts and lasts: see attend.cu.
struct Sight {
    int first[2], limit[2], from_sure, to_sure;

    __device__ __forceinline__ Sight(const int* firsts, const int* lasts, int past, int tokens, int keys, int g0, int row) {
        const int low = least(g0, tokens - 1), high = least(g0 + ROWS, tokens) - 1;
        from_sure = firsts ? firsts[most(low, high)] : 0;
        to_sure = least(lasts ? lasts[low] + 1 : past + low + 1, keys);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int t = least(row + 8 * h, tokens - 1);
            first[h] = firsts ? firsts[t] : 0;
            limit[h] = least(lasts ? lasts[t] + 1 : past + t + 1, keys);
        }
    }
    // Scores of the 2 N keys from `key` on become minus infinity where a row does not see one.
    template <int N> __device__ __forceinline__ void hide(float (&s)[N], int key, int lane) const {
        if (key + 2 * N <= to_sure && key >= from_sure) return;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = key + 2 * (lane & 3) + 8 * (i >> 2) + (i & 1), h = i >> 1 & 1;
            if (at >= limit[h] || at < first[h]) s[i] = from_bits(0xff800000u);
        }
    }
};

// A product's 64 x 2 N results as left operands of further ones.
template <int N> DEVICE void narrow(const float (&s)[N], u32 (&left)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 8; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) left[k][e] = pack(s[8 * k + 2 * e], s[8 * k + 2 * e + 1]);
}

// group: wait until it may start products; let the other one.
DEVICE void take_turn(int number) { barrier_sync(TURN + number, CONSUMERS); }
DEVICE void pass_turn(int number) { barrier_arrive(TURN + (number ^ 1), CONSUMERS); }

// thread: set up the phases of places that copying threads fill and multiplying warps empty.
template <int PLACES> DEVICE void begin_places(u64 (&full)[PLACES], u64 (&empty)[PLACES]) {
    for (int place = 0; place < PLACES; place++) phase_begin(&full[place], COPIERS), phase_begin(&empty[place], CONSUMERS / 32);
}
