// The gradients of the keys and values of causal attention, with p and ds as in attend_queries.cu:
//
//     dv[s] = sum_t p[t,s] do[t],  dk[s] = scale sum_t ds[t,s] q[t]
//
// A block is a tile of 128 keys of one head, two warpgroups with 64 of them each, and goes through blocks of 64 queries. Keys are
// the rows: p^T and ds^T come out of the tensor cores as the left operands of the sums. While one group turns scores into them, the
// other one's products run. ds is made of the rounded p: beside 160 sums a thread there is no room for 32 floats more.
#include "attend_tiles.h"

constexpr int BLOCK = 64, PLACES = 3;  // queries

struct Shared {
    u8 keys[GROUPS][KEY_CHUNKS * CHUNK];
    u8 values[GROUPS][VALUE_CHUNKS * CHUNK];
    u8 query[PLACES][KEY_CHUNKS * CHUNK];
    u8 dout[PLACES][VALUE_CHUNKS * CHUNK];
    Query known[PLACES][BLOCK];
    u64 full[PLACES], empty[PLACES];
};

struct Group {
    Shared& shared;
    const int number, warp, lane;
    const float factor;
    const int key;  // the first of the group's
    float dk[KEY_CHUNKS][32], dv[VALUE_CHUNKS][32];

    // A block of queries from `t` on. They see keys up to past + t, and those of `masked` blocks from `firsts` on.
    __device__ __forceinline__ void take_in(int j, int t, int past, int tokens, const int* firsts, bool masked) {
        const int place = j % PLACES;
        float s[32], pull[32];
        u32 p[BLOCK / 16][4], ds[BLOCK / 16][4];
        phase_wait(&shared.full[place], j / PLACES & 1);
        publish_operands();
        products_begin();
        multiply_rows<KEY>(s, operand(shared.keys[number]), operand(shared.query[place]));
        products_commit();
        const Query* const known = shared.known[place] + 2 * (lane & 3);
        products_wait<0>();
        held(s);
        if (masked) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int query = t + 2 * (lane & 3) + 8 * (i >> 2) + (i & 1), row = key + 16 * warp + (lane >> 2) + 8 * (i >> 1 & 1);
                if (row > past + query || (firsts && query < tokens && row < firsts[query])) s[i] = from_bits(0xff800000u);
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 two = *(const float4*)(known + 8 * n);  // log, delta of two queries
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * n + e] = exp2_fast(fmaf(s[4 * n + e], factor, e & 1 ? -two.z : -two.x));
#pragma unroll
            for (int h = 0; h < 2; h++) p[n / 2][2 * (n & 1) + h] = pack(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]);
        }
        const u64 douts = operand(shared.dout[place]), queries = operand(shared.query[place]);
        products_begin();
        multiply_rows<VALUE>(pull, operand(shared.values[number]), douts);
        products_commit();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++)
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; c++) warpgroup_multiply<true>(dv[c], p[k], further(douts, c * CHUNK + 2048 * k), true);
        products_commit();
        products_wait<1>();
        held(pull);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float4 two = *(const float4*)(known + 8 * n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 weights = p[n / 2][2 * (n & 1) + h];
                const float* const pulls = pull + 4 * n + 2 * h;
                ds[n / 2][2 * (n & 1) + h] = pack(low_half(weights) * (pulls[0] - two.y), high_half(weights) * (pulls[1] - two.w));
            }
        }
        products_begin();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++)
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; c++) warpgroup_multiply<true>(dk[c], ds[k], further(queries, c * CHUNK + 2048 * k), true);
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; c++) held(dv[c]);
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) held(dk[c]);
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++) held(p[k]), held(ds[k]);
        if (lane == 0) phase_arrive(&shared.empty[place]);
    }
};

// Operands as for attend_queries; ends int [tokens], of each token the first one behind its document, or null. dk [B, keys, heads,
// KEY] and dv [B, keys, heads, VALUE] dense.
KERNEL(THREADS, 1) attend_keys(
    const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v, const bf16* __restrict__ dout,
    const int* __restrict__ firsts, const int* __restrict__ ends, const Query* __restrict__ queries, bf16* __restrict__ dk,
    bf16* __restrict__ dv, i64 q_b, i64 q_t, i64 q_h, i64 k_b, i64 k_s, i64 k_h, i64 v_b, i64 v_s, i64 v_h, i64 do_b, i64 do_t,
    i64 do_h, int tokens, int keys, int past, int heads, int pitch, float factor, float scale) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31;
    const int s0 = blockIdx.x * ROWS * GROUPS;  // early keys have the most queries
    const i64 head = blockIdx.y, batch = blockIdx.z;
    const int begin = most(s0 - past, 0) / BLOCK * BLOCK, end = ends ? ends[least(s0 + ROWS * GROUPS, keys) - 1] : tokens;
    const int blocks = (end - begin + BLOCK - 1) / BLOCK;

    if (thread == 0) begin_places(shared.full, shared.empty);
    sync_threads();

    if (warp >= CONSUMERS / 32) {
        registers_give<24>();
        const int row = (thread - CONSUMERS) >> 3, piece = thread & 7;
        q += batch * q_b + head * q_h, dout += batch * do_b + head * do_h, queries += (batch * heads + head) * pitch;
        for (int j = 0; j < blocks; j++) {
            const int place = j % PLACES, t = begin + j * BLOCK;
            if (j >= PLACES) phase_wait(&shared.empty[place], (j / PLACES & 1) ^ 1);
            copy_rows<KEY, BLOCK, COPIERS / 8>(shared.query[place], q + t * q_t, q_t, row, piece, tokens - t);
            copy_rows<VALUE, BLOCK, COPIERS / 8>(shared.dout[place], dout + t * do_t, do_t, row, piece, tokens - t);
            if (thread < CONSUMERS + BLOCK / 2) copy_async(shared.known[place] + 2 * (thread - CONSUMERS), queries + t + 2 * (thread - CONSUMERS));
            phase_arrive_by_copies(&shared.full[place]);
        }
        copy_commit();
        copy_wait<0>();
        return;
    }

    registers_take<240>();
    const int number = warp >> 2, key = s0 + ROWS * number, own = (thread & 127) >> 3, piece = thread & 7;
    Group group = {shared, number, warp & 3, lane, factor, key};
    copy_rows<KEY, ROWS, 16>(shared.keys[number], k + batch * k_b + head * k_h + key * k_s, k_s, own, piece, keys - key);
    copy_rows<VALUE, ROWS, 16>(shared.values[number], v + batch * v_b + head * v_h + key * v_s, v_s, own, piece, keys - key);
    copy_commit();
#pragma unroll
    for (int i = 0; i < 32; i++) {
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) group.dk[c][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; c++) group.dv[c][i] = 0.0f;
    }
    copy_wait<0>();
    publish_operands();
    barrier_sync(OWN + number, 128);

    int next_first = firsts ? firsts[least(begin + BLOCK, tokens) - 1] : 0;  // of the block's last query, asked for a block ahead
    for (int j = 0; j < blocks; j++) {
        const int t = begin + j * BLOCK, first = next_first;
        if (firsts && j + 1 < blocks) next_first = firsts[least(t + 2 * BLOCK, tokens) - 1];
        group.take_in(j, t, past, tokens, firsts, key + ROWS - 1 > past + t || key < first);
    }

#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = key + 16 * (warp & 3) + (lane >> 2) + 8 * h;
        if (row >= keys) continue;
        const i64 place = (batch * keys + row) * heads + head;
        bf16 *const to_key = dk + place * KEY + 2 * (lane & 3), *const to_value = dv + place * VALUE + 2 * (lane & 3);
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (64 * c + 8 * j < KEY) *(u32*)(to_key + 64 * c + 8 * j) = pack(group.dk[c][4 * j + 2 * h] * scale, group.dk[c][4 * j + 2 * h + 1] * scale);
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 8; j++) *(u32*)(to_value + 64 * c + 8 * j) = pack(group.dv[c][4 * j + 2 * h], group.dv[c][4 * j + 2 * h + 1]);
    }
}
