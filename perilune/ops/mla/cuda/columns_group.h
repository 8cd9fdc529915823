// What one of the two warpgroups of columns.cu does with blocks of cached rows.
#pragma once
#include "columns_layout.h"

#define NOTHING from_bits(0xff800000u)  // minus infinity: the score of what a query does not see

constexpr float SLACK = 8.0f;  // weights are at most 2^SLACK: scores are relative to a number that seldom changes

DEVICE float finite(float top) { return top == NOTHING ? 0.0f : top; }

struct Group {
    Shared& shared;
    const int number, warp, lane;  // which group; warp of the group
    const float factor;
    const int first_query, heads, seen, length;  // cached rows that the first token sees, and the last one
    float out[HALF_CHUNKS][24];    // sums: channels 64 c + 16 warp + lane / 4 (and 8 more) of this half, columns `column(i)`
    float base[MINE], totals[MINE];  // what scores are relative to, and this thread's part of the denominators

    __device__ __forceinline__ int column(int i) const { return 8 * (i >> 1) + 2 * (lane & 3) + (i & 1); }
    __device__ __forceinline__ int limit(int i) const { return least(seen + (first_query + column(i)) / heads, length); }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < HALF_CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < 24; i++) out[c][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < MINE; i++) base[i] = NOTHING, totals[i] = 0.0f;
    }

    __device__ __forceinline__ void wait_for(int place, int part, int block) const {
        phase_wait(&shared.full[place][part], (block >> 1) & 1);
    }
    __device__ __forceinline__ void give_back(int place, int part) const {
        if (lane == 0)
#pragma unroll
            for (int r = 0; r < SHARERS; r++) phase_arrive_at(&shared.empty[place][part], r);
    }

    // What was relative to `base` becomes relative to what a block of this parity left.
    __device__ __forceinline__ void raise(int parity) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const float higher = shared.highest[parity][column(i)], by = exp2_fast(base[i] - finite(higher));
            base[i] = higher;
            totals[i] *= by;
#pragma unroll
            for (int c = 0; c < HALF_CHUNKS; c++)
#pragma unroll
                for (int h = 0; h < 2; h++) out[c][4 * (i >> 1) + 2 * h + (i & 1)] *= by;
        }
    }
    __device__ __forceinline__ bool raised(int parity) const { return *(const u32*)shared.raises[parity] != 0; }

    // Multiply parts FIRST to LAST - 1, in turn, of a block with the queries.
    template <int FIRST, int LAST> __device__ __forceinline__ void add_scores(float (&s)[24], int block) const {
        const u64 q = operand(shared.query), keys = operand(shared.cache[number]);
#pragma unroll
        for (int n = FIRST; n < LAST; n++) {
            const int part = part_in_turn(n, number), first = part * HALF_CHUNKS;
            wait_for(number, part, block);
            products_begin();
#pragma unroll
            for (int c = 0; c < (EXTRA && n == 0 ? 1 : HALF_CHUNKS); c++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    warpgroup_multiply<false, false>(
                        s, further(keys, (first + c) * CHUNK + 32 * k), further(q, (first + c) * QUERIES + 32 * k), n || c || k);
        }
        products_commit();
        products_wait<0>();
        held(s);
    }

    // Add up the cached rows of a place, this group's channels of them, with their weights; or `nothing`, as long as all weights are zeros.
    __device__ __forceinline__ void add_values(int place, bool nothing) {
        const u64 channels = operand(nothing ? shared.weights[0] : shared.cache[place] + number * HALF_CHUNKS * CHUNK);
        const u64 weights = operand(shared.weights[place]);
        const int chunk = nothing ? 0 : CHUNK;
        products_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int c = 0; c < HALF_CHUNKS; c++)
                warpgroup_multiply<true, false>(out[c], further(channels, c * chunk + 2048 * k), further(weights, 32 * k), true);
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int c = 0; c < HALF_CHUNKS; c++) held(out[c]);
    }

    // Wait for the weights of a block that the other group has scored.
    __device__ __forceinline__ void meet(int block) {
        const int place = number ^ 1;
        barrier_sync(PUBLISHED + place, CONSUMERS);
        if (raised(place)) raise(place);
        wait_for(place, number, block);
    }

    // Write the weights that follow from scores, to base 2 after `factor`; add them up.
    __device__ __forceinline__ void weigh(const float (&s)[24], float (&sums)[MINE]) const {
#pragma unroll
        for (int i = 0; i < MINE; i++) sums[i] = 0.0f;
        u32 weight[12];
#pragma unroll
        for (int i = 0; i < 24; i += 2) {  // columns 2 (i >> 2) and the next of MINE; row lane / 4, or 8 more
            const int of = i >> 2 << 1;
            const float low = exp2_fast(fmaf(s[i], factor, -finite(base[of])));
            const float high = exp2_fast(fmaf(s[i + 1], factor, -finite(base[of + 1])));
            sums[of] += low, sums[of + 1] += high;
            weight[i >> 1] = pack(low, high);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) {
            const u32 four[4] = {weight[4 * j], weight[4 * j + 1], weight[4 * j + 2], weight[4 * j + 3]};
            const int row = 16 * j + (lane >> 4) * 8 + (lane & 7), piece = 2 * warp + (lane >> 3 & 1);
            store_matrices_transposed(four, shared.weights[number] + in_block(row, piece));
        }
        publish_operands();
    }

    // A block that this group scores, cached rows from `key` on, after the one before it. Before a sequence's `first` block
    // zeros are added up: products that are not made on some way through the code would have to be waited for one by one.
    __device__ __forceinline__ void take_in(int block, int key, bool first) {
        float s[24], sums[MINE];
        add_scores<0, PARTS - 1>(s, block);
        if (EXTRA) give_back(number, SHARED_PART);
        if (!first) meet(block - 1);
        add_values(number ^ 1, first);
        if (!first) give_back(number ^ 1, number);  // at once: half of the block after next is waiting for the room
        add_scores<PARTS - 1, PARTS>(s, block);

        if (key + KEYS > seen) {
#pragma unroll
            for (int i = 0; i < 24; i++)
                if (key + 16 * warp + (lane >> 2) + 8 * (i >> 1 & 1) >= limit((i >> 2 << 1) + (i & 1))) s[i] = NOTHING;
        }
        if (key + KEYS > length) {  // weights of 0 must meet numbers
            for (int n = lane; n < 16 * 8 * LATENT_CHUNKS; n += 32) {
                const int row = 16 * warp + (n >> 3 & 15), piece = n & 7, chunk = n >> 7;
                if (key + row >= length) *(uint4*)(shared.cache[number] + chunk * CHUNK + in_block(row, piece)) = make_uint4(0, 0, 0, 0);
            }
        }
        weigh(s, sums);
        bool high = false;
#pragma unroll
        for (int i = 0; i < 24; i++) high |= factor * s[i] > base[(i >> 2 << 1) + (i & 1)] + SLACK;
        high = any(high);
        if (lane == 0) shared.raises[number][warp] = high;
        barrier_sync(OWN + number, 128);
        if (raised(number)) {  // once or twice a sequence
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                const int at = 4 * (i >> 1) + (i & 1);
                float most = fmaxf(s[at], s[at + 2]);
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
                if (lane < 4) shared.warp_highest[warp][column(i)] = factor * most;
            }
            barrier_sync(OWN + number, 128);
            if (warp == 0)
#pragma unroll
                for (int i = 0; i < MINE; i++) {
                    float most = base[i];
#pragma unroll
                    for (int w = 0; w < 4; w++) most = fmaxf(most, shared.warp_highest[w][column(i)]);
                    if (lane < 4) shared.highest[number][column(i)] = most;
                }
            barrier_sync(OWN + number, 128);
            raise(number);
            weigh(s, sums);
            barrier_sync(OWN + number, 128);
        }
        barrier_arrive(PUBLISHED + number, CONSUMERS);
#pragma unroll
        for (int i = 0; i < MINE; i++) totals[i] += sums[i];
        add_values(number, false);
        give_back(number, number);
    }
};
