// Steps 1 and 2 of prepare.cu: running sums, norms, and the factors of q and k.
#pragma once
#include "prepare_layout.h"

// A warp's 32 lanes add up CHANNELS channels each. Their bytes of a row of sums hold its g before: float in place, bfloat16
// in the upper half.
constexpr int CHANNELS = K / 64, SEGMENT = 128 * CHANNELS, G_BYTES = G_FLOAT ? 4 : 2, G_LOW = G_FLOAT ? 0 : SEGMENT / 2;

// A warp copies its channels of 32 rows of g.
DEVICE void copy_gates(u8* segment, const u8* g, int token_bytes, int rows, int lane) {
    constexpr int PIECES = 32 * CHANNELS * G_BYTES / 16, AT_ONCE = 32 / PIECES;
    const int first = (u32)lane / PIECES, piece = (u32)lane % PIECES * 16;
    u8* to = segment + first * (4 * SUM_STRIDE) + G_LOW + piece;
    const u8* from = g + (i64)first * token_bytes + piece;
#pragma unroll
    for (int r = 0; r < TILE; r += AT_ONCE) {
        copy_async(to + r * (4 * SUM_STRIDE), from, first + r < rows);
        from += AT_ONCE * token_bytes;
    }
}

// A warp copies 16 rows of q or k, the first of an even number.
DEVICE void copy_rows(u8* to, const bf16* x, int token, int rows, int lane) {
    constexpr int PIECES = K / 8, AT_ONCE = 32 / PIECES;
    const int first = (u32)lane / PIECES, piece = (u32)lane % PIECES;
    const bf16* from = x + (i64)first * token + 8 * piece;
#pragma unroll
    for (int r = 0; r < 16; r += AT_ONCE) {
        copy_async(to + place(first + r, piece), from, first + r < rows);
        from += AT_ONCE * token;
    }
}

// `sum` after one more row. Of logits: BOUNDED, bound sigmoid with slope and offset of its exponent; else the same of softplus, to base 2.
DEVICE float add_decay(float sum, float z, float slope, float offset, float bound, bool logits) {
    if (BOUNDED && logits) return fmaf(bound, reciprocal(1.0f + exp2_fast(fmaf(z, slope, offset))), sum);
    float d = z * LOG2E;
    if (logits) {
        const float x = fmaf(z, slope, offset);
        d = bound * (fmaxf(x, 0.0f) + log2_fast(1.0f + exp2_fast(-fabsf(x))));
    }
    return sum + (d < LEAST_LOG2 ? LEAST_LOG2 : d);  // a NaN stays
}

// From g to running sums for a warp's channels of one tile, in place.
DEVICE void add_up(
    float (&sum)[CHANNELS], u8* segment, int lane, int rows, float slope, const float (&offset)[CHANNELS], float bound,
    bool logits) {
    u8* const own = segment + 4 * CHANNELS * lane;
    const u8* const raw = segment + G_LOW + G_BYTES * CHANNELS * lane;
#pragma unroll 1
    for (int first = 0; first < TILE; first += 8) {
        float z[8][CHANNELS];
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const u8* const p = raw + (first + r) * (4 * SUM_STRIDE);
            if (!G_FLOAT && CHANNELS == 2) {
                const u32 two = *(const u32*)p;
                z[r][0] = low_half(two), z[r][CHANNELS - 1] = high_half(two);
            } else {
#pragma unroll
                for (int c = 0; c < CHANNELS; c++) z[r][c] = G_FLOAT ? ((const float*)p)[c] : to_float(((const bf16*)p)[c]);
            }
        }
        sync_warp();  // everybody has read what is overwritten now
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float row_bound = first + r < rows ? bound : 0.0f;  // rows of no token are copied as 0: no decay
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                sum[c] = add_decay(sum[c], z[r][c], slope, offset[c], row_bound, logits);
                ((float*)(own + (first + r) * (4 * SUM_STRIDE)))[c] = sum[c];
            }
        }
    }
}

// Of 16 rows, by the tensor cores: of_q[h] holds products of rows i + 8 h of q and of k with such of q, of_k[h] with such of k,
// as `multiply_add` leaves them: what belongs to one row is where `on_diagonal` finds it.
DEVICE void products_of(float (&of_q)[2][4], float (&of_k)[2][4], const u8* rows, int row, int t) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 4; e++) of_q[h][e] = of_k[h][e] = 0.0f;
#pragma unroll 2
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u8* const own = rows + place(row + 8 * h, 4 * j + t);
            const uint4 x = *(const uint4*)own, y = *(const uint4*)(own + ROWS_OF_K);
            const uint4 q = times(x, ONES), k = times(y, ONES);  // by 1: see `against_keys`
            const u32 first[4] = {q.x, k.x, q.y, k.y}, second[4] = {q.z, k.z, q.w, k.w};
            multiply_add(of_q[h], first, x.x, x.y);
            multiply_add(of_k[h], first, y.x, y.y);
            multiply_add(of_q[h], second, x.z, x.w);
            multiply_add(of_k[h], second, y.z, y.w);
        }
}
// Row i's product with its like, in the upper or lower half of a result, by the thread with t = i / 2.
DEVICE float on_diagonal(const float (&d)[4], int half, int i) { return i & 1 ? d[2 * half + 1] : d[2 * half]; }

// Step 2. `row` and row + 8 are this thread's rows, `group` its first 32 channels, 8 t .. 8 t + 7
// its channels of them.
struct Rows {
    u8* memory;
    int row, group, t;

    // To memory, to shared memory as keys and as left operands. LOWER: rows of the second tile. `first`: this thread's
    // first element of Qd, Kd and Kr.
    template <bool LOWER> __device__ __forceinline__ void times_factors(bf16* Qd, bf16* Kd, bf16* Kr, i64 first) const {
        const float* const norms = (const float*)(memory + NORMS);
        const float* const ends = (const float*)(memory + ENDS) + LOWER * K + 32 * group + 8 * t;
        const float* const factors = (const float*)(memory + FACTORS) + LOWER * K + 32 * group + 8 * t;
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            const int r = row + 8 * h, shifted = ((const int*)(memory + SHIFTS))[r & 31];
            const float q_norm = norms[r], k_norm = norms[CHUNK + r], step = (float)shifted, unstep = power_of_2(-shifted);
            const u32 unstep_pair = pair_of(unstep);
            float* const sums = (float*)(memory + SUMS) + r * SUM_STRIDE + 32 * group + 8 * t;
#pragma unroll 1
            for (int j = 0; j < GROUPS / 2; j++) {
                float* const own = sums + 32 * j;
                uint4* const own_q = (uint4*)(memory + ROWS + place(r, 4 * (group + j) + t));
                uint4* const own_k = (uint4*)((u8*)own_q + ROWS_OF_K);
                const uint4 q_raw = *own_q, k_raw = *own_k;
                float sum[8], end[8], factor[8];
#pragma unroll
                for (int c = 0; c < 8; c += 4) {
                    *(float4*)(sum + c) = *(const float4*)(own + c);
                    *(float4*)(end + c) = *(const float4*)(ends + 32 * j + c);
                    *(float4*)(factor + c) = *(const float4*)(factors + 32 * j + c);
                }
                u32 q_up[4], k_up[4], near[4], far[4], q_out[4], k_out[4], r_out[4];
#pragma unroll
                for (int p = 0; p < 4; p++) {
                    const u32 q_two = word(q_raw, p), k_two = word(k_raw, p);
                    float qs[2] = {low_half(q_two) * q_norm, high_half(q_two) * q_norm};
                    float ks[2] = {low_half(k_two) * k_norm, high_half(k_two) * k_norm};
                    float down[2], to[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float x = sum[2 * p + e], s = x + step;
                        const float up = exp2_fast(s);
                        down[e] = ks[e] * exp2_fast(-s);
                        to[e] = ks[e] * exp2_fast(end[2 * p + e] - x);
                        qs[e] *= up;
                        ks[e] *= up;
                    }
                    q_up[p] = pack(qs[0], qs[1]);
                    k_up[p] = pack(ks[0], ks[1]);
                    near[p] = pack(down[0], down[1]);
                    far[p] = pack(to[0], to[1]);
                    if (LOWER) {
                        q_out[p] = pack(qs[0] * unstep * factor[2 * p], qs[1] * unstep * factor[2 * p + 1]);
                        k_out[p] = pack(ks[0] * unstep * factor[2 * p], ks[1] * unstep * factor[2 * p + 1]);
                        r_out[p] = far[p];
                    } else {  // a power of 2: nothing is rounded twice
                        q_out[p] = multiply_pair(q_up[p], unstep_pair);
                        k_out[p] = multiply_pair(k_up[p], unstep_pair);
                        r_out[p] = pack(to[0] * factor[2 * p], to[1] * factor[2 * p + 1]);
                    }
                }
                *(uint4*)own = make_uint4(near[0], near[1], near[2], near[3]);
                if (!LOWER) *(uint4*)(own + 4) = make_uint4(far[0], far[1], far[2], far[3]);
                *own_q = make_uint4(q_up[0], q_up[1], q_up[2], q_up[3]);
                *own_k = make_uint4(k_up[0], k_up[1], k_up[2], k_up[3]);
                const i64 at = first + 8 * h * K + 32 * j;
                store_once(Qd + at, make_uint4(q_out[0], q_out[1], q_out[2], q_out[3]));
                store_once(Kd + at, make_uint4(k_out[0], k_out[1], k_out[2], k_out[3]));
                store_once(Kr + at, make_uint4(r_out[0], r_out[1], r_out[2], r_out[3]));
            }
        }
    }
};
