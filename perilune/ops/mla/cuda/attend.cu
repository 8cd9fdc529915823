// Causal attention of tiles of 128 queries with the keys and values of their head, online softmax:
//
//     o[t] = sum over first[t] <= s <= last[t] of softmax_s(scale q[t].k[s]) v[s]
//
// A block is one tile of one head. Of its 12 warps the last four copy blocks of 128 keys and values into two places; the
// first eight are two warpgroups with 64 queries each. A group starts the scores of block j and, behind them, the products of
// block j - 1's weights with its values; it turns the scores into weights while the latter still run. The groups take turns in
// starting products, so that one group's softmax runs beside the other's products.
//
// Operands lie in shared memory as `in_block` has it, 64 channels a chunk; what is not there is zeros.
// Macros: KEY (channels of a key, a multiple of 16), VALUE (64 or 128), WIDE (an output in float instead of bfloat16).
#include "attend_tiles.h"

constexpr int BLOCK = 128, BLOCK_CHUNK = 128 * BLOCK;  // keys of a block; bytes of 64 of their channels
constexpr float NOTHING_SEEN = -1e38f;

struct Shared {
    u8 query[GROUPS][KEY_CHUNKS * CHUNK];
    u8 keys[2][KEY_CHUNKS * BLOCK_CHUNK];
    u8 values[2][VALUE_CHUNKS * BLOCK_CHUNK];
    u64 full_keys[2], full_values[2], empty_keys[2], empty_values[2];
};

struct Group {
    Shared& shared;
    const int number, warp, lane;
    const float factor;
    const Sight sight;
    float out[VALUE / 2], top[2], total[2];

    __device__ __forceinline__ void give_back(u64* phase) const {
        if (lane == 0) phase_arrive(phase);
    }
    __device__ __forceinline__ void begin_scores(float (&s)[BLOCK / 2], int j) const {
        const u64 q = operand(shared.query[number]), keys = operand(shared.keys[j & 1]);
        phase_wait(&shared.full_keys[j & 1], j >> 1 & 1);
        publish_operands();
        products_begin();
#pragma unroll
        for (int k = 0; k < KEY / 16; k++)
            warpgroup_multiply<false>(s, further(q, k / 4 * CHUNK + 32 * (k & 3)), further(keys, k / 4 * BLOCK_CHUNK + 32 * (k & 3)), k > 0);
        products_commit();
    }
    __device__ __forceinline__ void begin_sums(const u32 (&weight)[BLOCK / 16][4], int j) {
        const u64 values = operand(shared.values[j & 1], BLOCK_CHUNK);
        phase_wait(&shared.full_values[j & 1], j >> 1 & 1);
        publish_operands();
        products_begin();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++) warpgroup_multiply<true>(out, weight[k], further(values, 2048 * k), true);
        products_commit();
    }

    // Scores of the keys from `key` on become weights relative to the rows' highest scores, which `by` makes sums relative to.
    __device__ __forceinline__ void weigh(float (&s)[BLOCK / 2], int key, float (&by)[2]) {
        sight.hide(s, key, lane);
        float higher[2] = {s[0], s[2]}, base[2];
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) higher[i >> 1 & 1] = fmaxf(higher[i >> 1 & 1], s[i]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float now = fmaxf(top[h], factor * quad_max(higher[h]));
            by[h] = exp2_fast(top[h] - now);
            top[h] = now, base[h] = -now, total[h] *= by[h];
        }
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], factor, base[i >> 1 & 1]));
            total[i >> 1 & 1] += s[i];
        }
    }
};

// q [B, tokens, heads, KEY], k and v [B, keys, heads, ..] by strides in numbers; first and last int [tokens], of each query the
// first and the last key that it sees, both non-decreasing, or null: 0, and past + t. out [B, tokens, heads, VALUE];
// logs float [B, heads, tokens], log2 of the denominators, or null; largest float [B, heads, tiles, 8], the largest score times
// factor of each warp's rows, or null. factor: on the scores, to base 2.
KERNEL(THREADS, 1) attend(
    const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v, const int* __restrict__ firsts,
    const int* __restrict__ lasts, void* __restrict__ out, float* __restrict__ logs, float* __restrict__ largest, i64 q_b, i64 q_t,
    i64 q_h, i64 k_b, i64 k_s, i64 k_h, i64 v_b, i64 v_s, i64 v_h, int tokens, int keys, int past, int heads, float factor) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31;
    const int tile = gridDim.x - 1 - blockIdx.x;  // the longest first
    const int t0 = tile * ROWS * GROUPS, t1 = least(t0 + ROWS * GROUPS, tokens);
    const i64 head = blockIdx.y, batch = blockIdx.z;
    const int begin = firsts ? firsts[t0] / BLOCK * BLOCK : 0;
    const int end = least(lasts ? lasts[t1 - 1] + 1 : past + t1, keys);
    const int blocks = (end - begin + BLOCK - 1) / BLOCK;

    if (thread == 0) {
        begin_places(shared.full_keys, shared.empty_keys);
        begin_places(shared.full_values, shared.empty_values);
    }
    sync_threads();

    if (warp >= CONSUMERS / 32) {
        registers_give<40>();
        const int row = (thread - CONSUMERS) >> 3, piece = thread & 7;
        k += batch * k_b + head * k_h + begin * k_s, v += batch * v_b + head * v_h + begin * v_s;
        for (int j = 0; j < blocks; j++) {
            const int place = j & 1, there = end - begin - j * BLOCK;
            if (j >= 2) phase_wait(&shared.empty_keys[place], (j >> 1 & 1) ^ 1);
            copy_rows<KEY, BLOCK, COPIERS / 8>(shared.keys[place], k + (i64)j * BLOCK * k_s, k_s, row, piece, there);
            phase_arrive_by_copies(&shared.full_keys[place]);
            if (j >= 2) phase_wait(&shared.empty_values[place], (j >> 1 & 1) ^ 1);
            copy_rows<VALUE, BLOCK, COPIERS / 8>(shared.values[place], v + (i64)j * BLOCK * v_s, v_s, row, piece, there);
            phase_arrive_by_copies(&shared.full_values[place]);
        }
        copy_commit();
        copy_wait<0>();
        return;
    }

    registers_take<232>();
    const int number = warp >> 2, g0 = t0 + ROWS * number, g1 = least(g0 + ROWS, tokens);
    const int row = g0 + 16 * (warp & 3) + (lane >> 2);
    Group group = {shared, number, warp & 3, lane, factor, Sight(firsts, lasts, past, tokens, keys, g0, row)};
    copy_rows<KEY, ROWS, 16>(
        shared.query[number], q + batch * q_b + head * q_h + g0 * q_t, q_t, (thread & 127) >> 3, thread & 7, tokens - g0);
    copy_commit();
#pragma unroll
    for (int h = 0; h < 2; h++) group.top[h] = NOTHING_SEEN, group.total[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUE / 2; i++) group.out[i] = 0.0f;
    copy_wait<0>();
    publish_operands();
    barrier_sync(OWN + number, 128);
    if (number == 1) pass_turn(number);

    float s[BLOCK / 2], by[2];
    u32 weight[BLOCK / 16][4];
    take_turn(number);
    group.begin_scores(s, 0);
    pass_turn(number);
    products_wait<0>();
    held(s);
    group.give_back(&shared.empty_keys[0]);
    group.weigh(s, begin, by);
    narrow(s, weight);
    for (int j = 1; j < blocks; j++) {
        take_turn(number);
        group.begin_scores(s, j);
        group.begin_sums(weight, j - 1);
        pass_turn(number);
        products_wait<1>();
        held(s);
        group.give_back(&shared.empty_keys[j & 1]);
        group.weigh(s, begin + j * BLOCK, by);
        products_wait<0>();
        held(group.out);
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++) held(weight[k]);
        group.give_back(&shared.empty_values[(j - 1) & 1]);
#pragma unroll
        for (int i = 0; i < VALUE / 2; i++) group.out[i] *= by[i >> 1 & 1];
        narrow(s, weight);
    }
    if (number == 0) take_turn(number);  // what the other group passed on last
    group.begin_sums(weight, blocks - 1);
    products_wait<0>();
    held(group.out);

    if (largest) {
        const float own = fmaxf(row < tokens ? group.top[0] : NOTHING_SEEN, row + 8 < tokens ? group.top[1] : NOTHING_SEEN);
        const float all = warp_max(own);
        if (lane == 0) largest[((batch * heads + head) * gridDim.x + tile) * 8 + warp] = all;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int t = row + 8 * h;
        const float sum = quad_sum(group.total[h]), inverse = 1.0f / sum;
        if (t >= g1) continue;
        const i64 place = ((batch * tokens + t) * heads + head) * VALUE + 2 * (lane & 3);
        if (logs && (lane & 3) == 0) logs[(batch * heads + head) * tokens + t] = group.top[h] + log2_fast(sum);
#pragma unroll
        for (int j = 0; j < VALUE / 8; j++) {
            const float low_one = group.out[4 * j + 2 * h] * inverse, high_one = group.out[4 * j + 2 * h + 1] * inverse;
            if (WIDE) *(float2*)((float*)out + place + 8 * j) = make_float2(low_one, high_one);
            else *(u32*)((bf16*)out + place + 8 * j) = pack(low_one, high_one);
        }
    }
}
