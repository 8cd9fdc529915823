// How outputs, writes and rounded states leave a serial kernel: through a warpgroup's block of shared memory, in whole rows.
#pragma once
#include "scan_tiles.h"

DEVICE void sync_group(const Place& p) { barrier_sync(1 + p.group, 128); }

// 64 tokens x 64 value channels from registers (transposed) to the first `count` rows of `to`, `stride` numbers apart.
DEVICE void leave(bf16* to, i64 stride, int count, const u32 (&x)[4][4], u8* block, const Place& p) {
    const int own = threadIdx.x & 127, first = own >> 3, piece = own & 7;
    sync_group(p);  // what left before has been read
#pragma unroll
    for (int n = 0; n < 4; n++) store_matrices_transposed(x[n], block + p.transposed + n * (16 * 128));
    sync_group(p);
    to += first * stride + 8 * piece;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (first + 16 * n < count) store_once(to, *(const uint4*)(block + in_block(first, piece) + n * (16 * 128)));
        to += 16 * stride;
    }
}

// A state, rounded, to `[V, K]`, a warp its 16 rows.
DEVICE void leave_state(bf16* to, const u32 (&s)[K / 16][4], u8* block, const Place& p) {
    const int row = 16 * p.warp + (p.lane & 15), first = 16 * p.warp + (p.lane >> 3), piece = p.lane & 7;
    sync_group(p);
#pragma unroll
    for (int b = 0; b < WIDE; b++) {
        sync_warp();
#pragma unroll
        for (int n = 0; n < 4; n++) store_matrices(s[4 * b + n], block + in_block(row, 2 * n + (p.lane >> 4)));
        sync_warp();
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int r = first + 4 * n;
            store_once(to + (64 * p.group + r) * K + 64 * b + 8 * piece, *(const uint4*)(block + in_block(r, piece)));
        }
    }
}
