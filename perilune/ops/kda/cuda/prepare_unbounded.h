// Steps 2 and 3 of prepare.cu where the decay has no bound: factors are counted from rows between a product's two rows, so that
// none exceeds 1, and which rows these are depends on nothing but the rows' numbers (traps T01).
//
// In blocks of 16 rows. A row of block I is counted from the last row before I, a key in an earlier block up to there: keys have a
// copy for each block that reads them. Inside a block rows and keys are counted from where halves of 8, 4, 2, 1 rows meet; a row
// is then read in one half and reads in the other. A warp has a block's 16 rows and half the channels, and what it
// finds it adds to what the other half's warp did.
#pragma once
#include "prepare_layout.h"

constexpr int KEY_STRIDE = 2 * K + 64;  // bytes of a key, against bank conflicts
constexpr int KEYS = ROWS + larger(4 * CHUNK * K, 4 * CHUNK * L_STRIDE);
constexpr int PARTS = KEYS + 96 * KEY_STRIDE, PARTS_OF_WARP = 6;

// For a warp's 16 rows: the length of a key over that of its rounded form. Where nothing is forgotten L has the product of these forms; of
// two equal keys it must be a square of the length itself, or equal keys that overwrite each other leave what A's bfloat16 makes of
// the difference, the same in every row. `first`: the warp's first row.
DEVICE void lengths(float* units, const u8* rows, const float* norms, int first, int i, int t) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first + i + 8 * h;
        const float norm = norms[CHUNK + row];
        float exact = 0.0f, formed = 0.0f;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            const uint4 k = *(const uint4*)(rows + ROWS_OF_K + place(row, 4 * j + t));
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const float low = low_half(word(k, p)) * norm, high = high_half(word(k, p)) * norm;
                const u32 form = pack(low, high);
                exact = fmaf(low, low, fmaf(high, high, exact));
                formed = fmaf(low_half(form), low_half(form), fmaf(high_half(form), high_half(form), formed));
            }
        }
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) exact += shuffle_xor(exact, mask), formed += shuffle_xor(formed, mask);
        const float product = exact * formed;
        if (t == 0) units[row] = product > 0.0f ? exact * rsqrt_fast(product) : 1.0f;
    }
}

// Where a key lies for the rows of `block`, which read 16 block of them.
DEVICE u8* key_for(u8* memory, int block, int key) { return memory + KEYS + (8 * block * (block - 1) + key) * KEY_STRIDE; }

// The factor between a row and the one that it is counted from or up to, by their running sums.
DEVICE float between(float x, float anchor) { return exp2_fast(-fabsf(x - anchor)); }

// Products inside a block of 16 rows as `multiply_add` leaves them, above of keys (L), below of queries (P): of rows i + 8 with
// keys 0 .. 7; of rows i + 8 h with keys 8 h .. 8 h + 7 that lie in the other half of 8, 4, or 2 rows.
struct Inside {
    float at8[4], at4[2][4], at2[2][4], at1[2][4];
};

struct Four {
    float x[4], q[4], k[4];
};
DEVICE void scaled_by(u32 (&q)[2], u32 (&k)[2], const Four& own, const float* anchor) {
    const float4 a = *(const float4*)anchor;
    const float f[4] = {between(own.x[0], a.x), between(own.x[1], a.y), between(own.x[2], a.z), between(own.x[3], a.w)};
#pragma unroll
    for (int p = 0; p < 2; p++) {
        q[p] = pack(own.q[2 * p] * f[2 * p], own.q[2 * p + 1] * f[2 * p + 1]);
        k[p] = pack(own.k[2 * p] * f[2 * p], own.k[2 * p + 1] * f[2 * p + 1]);
    }
}
DEVICE void halves_of(float (&d)[4], const Four& own, const float* anchor) {
    u32 q[2], k[2];
    scaled_by(q, k, own, anchor);
    const u32 left[4] = {k[0], q[0], k[1], q[1]};
    multiply_add(d, left, k[0], k[1]);
}

// `group`: the warp's first 32 channels. Reads q and k as they were copied.
DEVICE void inside_blocks(Inside& d, const u8* memory, int block, int group, int i, int t) {
    d = {};
    const float* const norms = (const float*)(memory + NORMS);
    const float* const sums = (const float*)(memory + SUMS) + 16 * block * SUM_STRIDE + 32 * group + 8 * t;
#pragma unroll 1
    for (int n = 0; n < GROUPS; n++) {  // of 16 channels, four of them a thread's
        const int j = n >> 1, channel = 32 * j + 4 * (n & 1);
        Four own[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * block + i + 8 * h;
            const u8* const at = memory + ROWS + place(row, 4 * (group + j) + t) + 8 * (n & 1);
            const uint2 q = *(const uint2*)at, k = *(const uint2*)(at + ROWS_OF_K);
            const float4 x = *(const float4*)(sums + (i + 8 * h) * SUM_STRIDE + channel);
            const float q_norm = norms[row], k_norm = norms[CHUNK + row];
            own[h].x[0] = x.x, own[h].x[1] = x.y, own[h].x[2] = x.z, own[h].x[3] = x.w;
            own[h].q[0] = low_half(q.x) * q_norm, own[h].q[1] = high_half(q.x) * q_norm;
            own[h].q[2] = low_half(q.y) * q_norm, own[h].q[3] = high_half(q.y) * q_norm;
            own[h].k[0] = low_half(k.x) * k_norm, own[h].k[1] = high_half(k.x) * k_norm;
            own[h].k[2] = low_half(k.y) * k_norm, own[h].k[3] = high_half(k.y) * k_norm;
        }
        u32 q[2], k[2], unread[2], keys[2];
        scaled_by(q, k, own[1], sums + 7 * SUM_STRIDE + channel);
        scaled_by(unread, keys, own[0], sums + 7 * SUM_STRIDE + channel);
        const u32 left[4] = {k[0], q[0], k[1], q[1]};
        multiply_add(d.at8, left, keys[0], keys[1]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float* const eight = sums + 8 * h * SUM_STRIDE + channel;
            halves_of(d.at4[h], own[h], eight + 3 * SUM_STRIDE);
            halves_of(d.at2[h], own[h], eight + ((i & 4) + 1) * SUM_STRIDE);
            halves_of(d.at1[h], own[h], eight + (i & 6) * SUM_STRIDE);
        }
    }
}
// Of L (`keys`) or P: row i with keys 2 t and 2 t + 1, row i + 8 with these, row i + 8 with the keys 8 further on. Not yet
// without what is on or above the diagonal.
DEVICE void of_kind(float (&found)[PARTS_OF_WARP], const Inside& d, bool keys, int i, int t) {
    const auto one = [&](const float (&x)[4], int e) { return keys ? x[e] : x[2 + e]; };
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int apart = i ^ (2 * t + e);
#pragma unroll
        for (int h = 0; h < 2; h++)
            found[4 * h + e] = apart & 4 ? one(d.at4[h], e) : apart & 2 ? one(d.at2[h], e) : one(d.at1[h], e);
        found[2 + e] = one(d.at8, e);
    }
}

// Qd, Kd and Kr to memory, rows in place of q and k, and keys for the blocks behind. Reads and replaces what this thread alone has read.
DEVICE void leave_factors(u8* memory, int block, int group, int i, int t, bf16* Qd, bf16* Kd, bf16* Kr, i64 first) {
    const int tile = block >> 1, channel = 32 * group + 8 * t;
    const float* const norms = (const float*)(memory + NORMS);
    const float* const sums = (const float*)(memory + SUMS) + channel;
    const float* const ends = (const float*)(memory + ENDS) + channel;
    const float* const factors = (const float*)(memory + FACTORS) + tile * K + channel;
#pragma unroll 1
    for (int n = 0; n < GROUPS; n++) {
        const int j = n >> 1, h = n & 1, row = 16 * block + i + 8 * h;
        const float q_norm = norms[row], k_norm = norms[CHUNK + row];
        u8* const own = memory + ROWS + place(row, 4 * (group + j) + t);
        const uint4 q_raw = *(const uint4*)own, k_raw = *(const uint4*)(own + ROWS_OF_K);
        u32 q_out[4], k_out[4], r_out[4], q_row[4], k_row[4], next[4], second[4], third[4];
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float q[2] = {low_half(word(q_raw, p)) * q_norm, high_half(word(q_raw, p)) * q_norm};
            float k[2] = {low_half(word(k_raw, p)) * k_norm, high_half(word(k_raw, p)) * k_norm};
            float qd[2], kd[2], kr[2], qs[2], ks[2], to[3][2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int c = 32 * j + 2 * p + e;
                const float x = sums[row * SUM_STRIDE + c], from = exp2_fast(x), end = exp2_fast(ends[tile * K + c] - x), other = factors[c];
                qd[e] = q[e] * from, kd[e] = k[e] * from, kr[e] = k[e] * end;
                const float begins = sums[(32 * tile + 15) * SUM_STRIDE + c];  // where the tile's second block does
                const float start = block & 1 ? exp2_fast(x - begins) : from;
                qs[e] = q[e] * start, ks[e] = k[e] * start;
                to[0][e] = block & 1 ? kr[e] : k[e] * exp2_fast(begins - x);  // up to the next block
                to[1][e] = kr[e];                                             // up to the second tile, and its second block
                to[2][e] = k[e] * exp2_fast(ends[c] - x + sums[47 * SUM_STRIDE + c]);
                if (tile) qd[e] *= other, kd[e] *= other;
                else kr[e] *= other;
            }
            q_out[p] = pack(qd[0], qd[1]), k_out[p] = pack(kd[0], kd[1]), r_out[p] = pack(kr[0], kr[1]);
            q_row[p] = pack(qs[0], qs[1]), k_row[p] = pack(ks[0], ks[1]);
            next[p] = pack(to[0][0], to[0][1]), second[p] = pack(to[1][0], to[1][1]), third[p] = pack(to[2][0], to[2][1]);
        }
        const i64 at = first + 8 * h * K + 32 * j;
        store_once(Qd + at, make_uint4(q_out[0], q_out[1], q_out[2], q_out[3]));
        store_once(Kd + at, make_uint4(k_out[0], k_out[1], k_out[2], k_out[3]));
        store_once(Kr + at, make_uint4(r_out[0], r_out[1], r_out[2], r_out[3]));
        *(uint4*)own = make_uint4(q_row[0], q_row[1], q_row[2], q_row[3]);
        *(uint4*)(own + ROWS_OF_K) = make_uint4(k_row[0], k_row[1], k_row[2], k_row[3]);
        const int byte = 2 * (channel + 32 * j);
        if (block < 3) *(uint4*)(key_for(memory, block + 1, row) + byte) = make_uint4(next[0], next[1], next[2], next[3]);
        if (block == 0) *(uint4*)(key_for(memory, 2, row) + byte) = make_uint4(second[0], second[1], second[2], second[3]);
        if (block < 2) *(uint4*)(key_for(memory, 3, row) + byte) = make_uint4(third[0], third[1], third[2], third[3]);
    }
}

// The block's rows of q or of k against the keys of the blocks before it. Column n of half b of a block is its key 4 (n / 2) + 2 b + n % 2, so
// that a thread holds, of rows i and i + 8, keys 4 t .. 4 t + 3 of each in the order [b][e].
DEVICE void against_blocks(float (&d)[3][2][4], u8* memory, const u8* rows, int block, int i, int t) {
    const int row = 16 * block + i;
#pragma unroll 1
    for (int j = 0; j < GROUPS; j++) {
        const uint4 x = times(*(const uint4*)(rows + place(row, 4 * j + t)), ONES);  // by 1: see `against_keys`
        const uint4 y = times(*(const uint4*)(rows + place(row + 8, 4 * j + t)), ONES);
        const u32 first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
        for (int other = 0; other < 3; other++)
            if (other < block)
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int key = 16 * other + 4 * (i >> 1) + 2 * b + (i & 1);
                    const uint4 k = *(const uint4*)(key_for(memory, block, key) + 16 * (4 * j + t));
                    multiply_add(d[other][b], first, k.x, k.y);
                    multiply_add(d[other][b], second, k.z, k.w);
                }
    }
}
