// What the kernels of causal attention share: attend.cu, and attend_queries.cu and attend_keys.cu, its backward pass.
// Macros: KEY (channels of a key, a multiple of 16), VALUE (64 or 128).
#pragma once
#include "device.h"

constexpr int ROWS = 64, GROUPS = 2;  // rows of a warpgroup's tile; warpgroups that multiply
constexpr int CONSUMERS = 128 * GROUPS, COPIERS = 128, THREADS = CONSUMERS + COPIERS;
constexpr int KEY_CHUNKS = (KEY + 63) / 64, VALUE_CHUNKS = VALUE / 64;
constexpr int CHUNK = 128 * ROWS;  // bytes: 64 rows of 64 channels

enum { OWN = 1, TURN = 3 };  // barriers besides 0, plus the group's number

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }

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
