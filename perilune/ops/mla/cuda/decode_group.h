// What one of the two warpgroups of decode.cu does with blocks of cached rows.
#pragma once
#include "decode_layout.h"

#define NOTHING from_bits(0xff800000u)  // minus infinity: the score of what a row does not see

DEVICE float finite(float top) { return top == NOTHING ? 0.0f : top; }

struct Group {
    Shared& shared;
    const int number, warp, lane;       // which group; warp of the group
    const float factor;
    int limits[2], sure;                // the first cached row that this thread's two rows do not see; all see what is before `sure`
    float out[128], tops[2], totals[2]; // sums, highest scores and denominators of rows `row()` and 8 more

    __device__ __forceinline__ int row() const { return 16 * warp + (lane >> 2); }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 128; i++) out[i] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) tops[h] = NOTHING, totals[h] = 0.0f;
    }

    __device__ __forceinline__ u64 values(int place) const {  // this group's channels of a place
        return operand(shared.cache[place] + number * HALF_CHUNKS * CHUNK, CHUNK);
    }
    __device__ __forceinline__ void wait_for(int place, int part, int block) const {
        phase_wait(&shared.full[place][part], (block >> 1) & 1);
        publish_operands();
    }
    __device__ __forceinline__ void give_back(int place, int part) const {
        if (lane == 0) phase_arrive(&shared.empty[place][part]);
    }

    // What was relative to `tops` becomes relative to `higher`.
    __device__ __forceinline__ void rescale(float higher0, float higher1) {
        const float by[2] = {exp2_fast(tops[0] - finite(higher0)), exp2_fast(tops[1] - finite(higher1))};
        tops[0] = higher0, tops[1] = higher1;
        if (any(by[0] != 1.0f || by[1] != 1.0f)) {
#pragma unroll
            for (int h = 0; h < 2; h++) totals[h] *= by[h];
#pragma unroll
            for (int i = 0; i < 128; i++) out[i] *= by[i >> 1 & 1];
        }
    }

    // Multiply the queries with the parts FIRST to LAST - 1, in turn, of a block.
    template <int FIRST, int LAST> __device__ __forceinline__ void add_scores(float (&s)[32], int block) const {
        const u64 q = operand(shared.query), keys = operand(shared.cache[number]);
#pragma unroll
        for (int n = FIRST; n < LAST; n++) {
            const int part = part_in_turn(n, number), first = part * HALF_CHUNKS * CHUNK;
            wait_for(number, part, block);
            products_begin();
#pragma unroll
            for (int c = 0; c < (EXTRA && n == 0 ? 1 : HALF_CHUNKS); c++)
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int at = first + c * CHUNK + 32 * k;
                    warpgroup_multiply<false>(s, further(q, at), further(keys, at), n || c || k);
                }
        }
        products_commit();
        products_wait<0>();
        held(s);
    }

    // Wait for the weights of a block that the other group has scored.
    __device__ __forceinline__ void meet(int block) {
        const int place = number ^ 1;
        barrier_sync(PUBLISHED + place, CONSUMERS);
        rescale(shared.highest[place][row()], shared.highest[place][row() + 8]);
        wait_for(place, number, block);
    }
    // Start to add up the cached rows of a place with the published weights.
    __device__ __forceinline__ void begin_sums(int place) {
        const u64 weights = operand(shared.weights), channels = values(place);
        products_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            warpgroup_multiply<true>(out, further(weights, 32 * k), further(channels, 2048 * k), true);
        products_commit();
    }
    __device__ __forceinline__ void end_sums() {
        products_wait<0>();
        held(out);
    }

    // A block that this group scores, cached rows from `key` on, after the one before it. Before a sequence's `first` block the
    // published weights are zeros, and meet its own channels: products that are not made on some way through the code would
    // have to be waited for one by one.
    __device__ __forceinline__ void take_in(int block, int key, bool first) {
        float s[32];
        add_scores<0, PARTS - 1>(s, block);
        if (EXTRA) give_back(number, SHARED_PART);
        if (!first) meet(block - 1);
        begin_sums(first ? number : number ^ 1);
        end_sums();
        if (!first) give_back(number ^ 1, number);  // at once: half of the block after next is waiting for the room
        add_scores<PARTS - 1, PARTS>(s, block);

        if (key + KEYS > sure) {
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (key + 2 * (lane & 3) + 8 * (i >> 2) + (i & 1) >= limits[i >> 1 & 1]) s[i] = NOTHING;
        }
        float higher[2] = {NOTHING, NOTHING}, base[2], sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 32; i++) higher[i >> 1 & 1] = fmaxf(higher[i >> 1 & 1], s[i]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            higher[h] = fmaxf(tops[h], factor * quad_max(higher[h]));
            base[h] = -finite(higher[h]);
        }
        u32 weight[KEYS / 16][4];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[i] = exp2_fast(fmaf(s[i], factor, base[i >> 1 & 1]));
            sums[i >> 1 & 1] += s[i];
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) weight[k][e] = pack(s[8 * k + 2 * e], s[8 * k + 2 * e + 1]);

        barrier_sync(OWN + number, 128);  // all of its warps are done with the other group's weights
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            store_matrices(weight[k], shared.weights + in_block(16 * warp + (lane & 15), 2 * k + (lane >> 4)));
        if ((lane & 3) == 0)
#pragma unroll
            for (int h = 0; h < 2; h++) shared.highest[number][row() + 8 * h] = higher[h];
        publish_operands();
        barrier_arrive(PUBLISHED + number, CONSUMERS);
        rescale(higher[0], higher[1]);
#pragma unroll
        for (int h = 0; h < 2; h++) totals[h] += sums[h];
        const u64 channels = values(number);
        products_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) warpgroup_multiply<true>(out, weight[k], further(channels, 2048 * k), true);
        products_commit();
        end_sums();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) held(weight[k]);
        give_back(number, number);
    }
};
