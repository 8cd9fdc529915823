// How the cached rows of all sequences are dealt out: their blocks of 64 rows, one sequence after the other, are one line,
// and a GPU block takes a run of it, all runs of the same length. So the work is even however lengths differ. A sequence
// within one run is finished there; of others each run leaves a part. A run has at most two parts: of its first sequence,
// and of its last.
#pragma once
#include "reductions.h"

constexpr int KEYS = 64;

struct Sequences {
    const int* lengths;  // null: `cached` of each
    int cached, count;

    __device__ __forceinline__ int length(int sequence) const { return lengths ? lengths[sequence] : cached; }
    __device__ __forceinline__ int blocks(int sequence) const {  // an empty sequence has one, for its zeros
        const int n = length(sequence);
        return n > 0 ? (n + KEYS - 1) / KEYS : 1;
    }
};

struct Place {
    int sequence, start;  // and blocks before it
};

DEVICE int warp_sum(int x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += (int)shuffle((u32)x, (threadIdx.x & 31) ^ mask);
    return x;
}

// warp: blocks of the first `count` sequences.
DEVICE int blocks_before(const Sequences& all, int count) {
    if (!all.lengths) return count * all.blocks(0);
    int sum = 0;
    for (int s = threadIdx.x & 31; s < count; s += 32) sum += all.blocks(s);
    return warp_sum(sum);
}

// warp: the sequence of a block of the line.
DEVICE Place sequence_of(const Sequences& all, int block) {
    if (!all.lengths) return {block / all.blocks(0), block / all.blocks(0) * all.blocks(0)};
    const int lane = threadIdx.x & 31;
    int start = 0, first = 0;
    for (; first < all.count; first += 32) {
        const int own = first + lane < all.count ? all.blocks(first + lane) : 0;
        int sum = own;  // of the lanes up to this one
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int below = (int)shuffle((u32)sum, lane - by);
            if (lane >= by) sum += below;
        }
        const int here = warp_sum(start + sum <= block);  // sequences of the 32 that end before the block
        if (here < 32) return {first + here, start + (int)shuffle((u32)(sum - own), here)};
        start += (int)shuffle((u32)sum, 31);
    }
    return {all.count, start};
}

DEVICE int run_length(int total, int runs) { return (total + runs - 1) / runs; }
