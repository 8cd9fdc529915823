// The gradient of the queries of causal attention, dq[t] = scale sum_s ds[t,s] k[s] with
//
//     p[t,s] = exp2(factor q[t].k[s] - log[t]),  ds[t,s] = p[t,s] (do[t].v[s] - delta[t])
//
// A block is a tile of 128 queries of one head, as in attend.cu, with blocks of 64 keys: behind the two products of block j a
// group starts ds k of block j - 1, and makes ds of block j while that runs.
#include "attend_tiles.h"

constexpr int BLOCK = 64, PLACES = 3;  // keys

struct Shared {
    u8 query[GROUPS][KEY_CHUNKS * CHUNK];
    u8 dout[GROUPS][VALUE_CHUNKS * CHUNK];
    u8 keys[PLACES][KEY_CHUNKS * CHUNK];
    u8 values[PLACES][VALUE_CHUNKS * CHUNK];
    u64 full[PLACES], empty[PLACES];
};

struct Group {
    Shared& shared;
    const int number, warp, lane;
    const float factor;
    const Sight sight;
    float log[2], delta[2], dq[KEY_CHUNKS][32];

    __device__ __forceinline__ void begin_block(float (&s)[32], float (&pull)[32], int j) const {
        phase_wait(&shared.full[j % PLACES], j / PLACES & 1);
        publish_operands();
        products_begin();
        multiply_rows<KEY>(s, operand(shared.query[number]), operand(shared.keys[j % PLACES]));
        multiply_rows<VALUE>(pull, operand(shared.dout[number]), operand(shared.values[j % PLACES]));
        products_commit();
    }
    __device__ __forceinline__ void begin_sums(const u32 (&ds)[BLOCK / 16][4], int j) {
        const u64 keys = operand(shared.keys[j % PLACES]);
        products_begin();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++)
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; c++) warpgroup_multiply<true>(dq[c], ds[k], further(keys, c * CHUNK + 2048 * k), true);
        products_commit();
    }
    __device__ __forceinline__ void end_sums(u32 (&ds)[BLOCK / 16][4], int j) {
        products_wait<0>();
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) held(dq[c]);
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++) held(ds[k]);
        if (lane == 0) phase_arrive(&shared.empty[j % PLACES]);
    }
    // Scores of the keys from `key` on become ds.
    __device__ __forceinline__ void differentiate(float (&s)[32], const float (&pull)[32], int key) const {
        sight.hide(s, key, lane);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int h = i >> 1 & 1;
            s[i] = exp2_fast(fmaf(s[i], factor, -log[h])) * (pull[i] - delta[h]);
        }
    }
};

// q, dout [B, tokens, heads, ..] and k, v [B, keys, heads, ..] by strides in numbers; firsts as for attend; queries
// [B, heads, pitch] of attend_stats.cu; dq [B, tokens, heads, KEY] dense.
KERNEL(THREADS, 1) attend_queries(
    const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v, const bf16* __restrict__ dout,
    const int* __restrict__ firsts, const Query* __restrict__ queries, bf16* __restrict__ dq, i64 q_b, i64 q_t, i64 q_h, i64 k_b,
    i64 k_s, i64 k_h, i64 v_b, i64 v_s, i64 v_h, i64 do_b, i64 do_t, i64 do_h, int tokens, int keys, int past, int heads, int pitch,
    float factor, float scale) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31;
    const int tile = gridDim.x - 1 - blockIdx.x;  // the longest first
    const int t0 = tile * ROWS * GROUPS, t1 = least(t0 + ROWS * GROUPS, tokens);
    const i64 head = blockIdx.y, batch = blockIdx.z;
    const int begin = firsts ? firsts[t0] / BLOCK * BLOCK : 0, end = least(past + t1, keys);
    const int blocks = (end - begin + BLOCK - 1) / BLOCK;

    if (thread == 0) begin_places(shared.full, shared.empty);
    sync_threads();

    if (warp >= CONSUMERS / 32) {
        registers_give<40>();
        const int row = (thread - CONSUMERS) >> 3, piece = thread & 7;
        k += batch * k_b + head * k_h + begin * k_s, v += batch * v_b + head * v_h + begin * v_s;
        for (int j = 0; j < blocks; j++) {
            const int place = j % PLACES, there = end - begin - j * BLOCK;
            if (j >= PLACES) phase_wait(&shared.empty[place], (j / PLACES & 1) ^ 1);
            copy_rows<KEY, BLOCK, COPIERS / 8>(shared.keys[place], k + (i64)j * BLOCK * k_s, k_s, row, piece, there);
            copy_rows<VALUE, BLOCK, COPIERS / 8>(shared.values[place], v + (i64)j * BLOCK * v_s, v_s, row, piece, there);
            phase_arrive_by_copies(&shared.full[place]);
        }
        copy_commit();
        copy_wait<0>();
        return;
    }

    registers_take<232>();
    const int number = warp >> 2, g0 = t0 + ROWS * number;
    const int row = g0 + 16 * (warp & 3) + (lane >> 2);
    Group group = {shared, number, warp & 3, lane, factor, Sight(firsts, nullptr, past, tokens, keys, g0, row)};
    const int own = (thread & 127) >> 3, piece = thread & 7;
    copy_rows<KEY, ROWS, 16>(shared.query[number], q + batch * q_b + head * q_h + g0 * q_t, q_t, own, piece, tokens - g0);
    copy_rows<VALUE, ROWS, 16>(shared.dout[number], dout + batch * do_b + head * do_h + g0 * do_t, do_t, own, piece, tokens - g0);
    copy_commit();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const Query known = queries[(batch * heads + head) * pitch + row + 8 * h];
        group.log[h] = known.log, group.delta[h] = known.delta;
    }
#pragma unroll
    for (int c = 0; c < KEY_CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 32; i++) group.dq[c][i] = 0.0f;
    copy_wait<0>();
    publish_operands();
    barrier_sync(OWN + number, 128);
    if (number == 1) pass_turn(number);

    float s[32], pull[32];
    u32 ds[BLOCK / 16][4];
    take_turn(number);
    group.begin_block(s, pull, 0);
    pass_turn(number);
    products_wait<0>();
    held(s);
    held(pull);
    group.differentiate(s, pull, begin);
    narrow(s, ds);
    for (int j = 1; j < blocks; j++) {
        take_turn(number);
        group.begin_block(s, pull, j);
        group.begin_sums(ds, j - 1);
        pass_turn(number);
        products_wait<1>();
        held(s);
        held(pull);
        group.differentiate(s, pull, begin + j * BLOCK);
        group.end_sums(ds, j - 1);
        narrow(s, ds);
    }
    if (number == 0) take_turn(number);  // what the other group passed on last
    group.begin_sums(ds, blocks - 1);
    group.end_sums(ds, blocks - 1);

#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int t = row + 8 * h;
        if (t >= tokens) continue;
        bf16* const to = dq + ((batch * tokens + t) * heads + head) * KEY + 2 * (lane & 3);
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (64 * c + 8 * j < KEY) *(u32*)(to + 64 * c + 8 * j) = pack(group.dq[c][4 * j + 2 * h] * scale, group.dq[c][4 * j + 2 * h + 1] * scale);
    }
}
