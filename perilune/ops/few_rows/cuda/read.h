// A read over depth of one token by a block of 256 threads: running-sum add, scores, softmax, mix, RMSNorm.
//
//     live = live + delta;   s_i = <v_i, c> rsqrt(mean v_i^2 + eps);   p = softmax(s);   out = norm(sum_i p_i v_i)
//
// c is the score weight times the query. All rows of the token are asked for at once and stay in registers, so between asking and
// answer there are two barriers and no loop. A thread owns runs of four numbers; all orders of sums are fixed by the sizes.
//
// Macros: WIDTH (a multiple of 4), SOURCES (M, at most 16, the running sum last), HAS_DELTA, HAS_QUERY, HAS_NORM.
#pragma once
#include "device.h"

constexpr int READERS = 256, READ_WARPS = READERS / 32, M = SOURCES;
constexpr int RUNS = WIDTH / 4, RUNS_EACH = (RUNS + READERS - 1) / READERS;
constexpr int SCRATCH_FLOATS = READ_WARPS * (2 * M + 1);  // of shared memory

template <int N> struct Sources {
    const bf16* row[N];
    i64 stride[N];
};

struct Reading {
    const bf16* delta;
    i64 delta_stride;
    const float* score_weight;
    const float* query;
    const float* norm;
    float eps, norm_eps;
};

DEVICE float4 widened(uint2 v) { return make_float4(low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y)); }
DEVICE float dot(const float4& a, const float4& b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// `keep` gets the place of four numbers and the new running sum there, `give` the same of the read, both as bfloat16.
template <class Keep, class Give> DEVICE void read_token(
    const Sources<M>& sources, const Reading& how, i64 token, float* scratch, Keep keep, Give give) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    uint2 words[M][RUNS_EACH], more[RUNS_EACH];
    float4 c[RUNS_EACH], scale[RUNS_EACH];
#pragma unroll
    for (int u = 0; u < RUNS_EACH; u++) {
        const int run = thread + u * READERS, at = 4 * run;
        const bool inside = run < RUNS;
#pragma unroll
        for (int i = 0; i < M; i++)
            words[i][u] = inside ? *(const uint2*)(sources.row[i] + token * sources.stride[i] + at) : make_uint2(0, 0);
        if (HAS_DELTA) more[u] = inside ? *(const uint2*)(how.delta + token * how.delta_stride + at) : make_uint2(0, 0);
        c[u] = inside ? *(const float4*)(how.score_weight + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (HAS_QUERY && inside) {
            const float4 q = *(const float4*)(how.query + at);
            c[u] = make_float4(c[u].x * q.x, c[u].y * q.y, c[u].z * q.z, c[u].w * q.w);
        }
        if (HAS_NORM) scale[u] = inside ? *(const float4*)(how.norm + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float sums[2 * M];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) sums[i] = 0.0f;
#pragma unroll
    for (int u = 0; u < RUNS_EACH; u++) {
        if (HAS_DELTA) {  // the source is what is stored
            const float4 a = widened(words[M - 1][u]), b = widened(more[u]);
            words[M - 1][u] = make_uint2(pack(a.x + b.x, a.y + b.y), pack(a.z + b.z, a.w + b.w));
            if (thread + u * READERS < RUNS) keep(4 * (thread + u * READERS), words[M - 1][u]);
        }
#pragma unroll
        for (int i = 0; i < M; i++) {
            const float4 v = widened(words[i][u]);
            sums[i] = dot(v, c[u], sums[i]);
            sums[M + i] = dot(v, v, sums[M + i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) sums[i] += shuffle_xor(sums[i], mask);
        if (lane == i) scratch[warp * 2 * M + i] = sums[i];
    }
    sync_threads();
    float total = 0.0f;
    if (lane < 2 * M) {
#pragma unroll
        for (int w = 0; w < READ_WARPS; w++) total += scratch[w * 2 * M + lane];
    }
    const float rstd = rsqrt_fast(shuffle(total, (lane + M) & 31) * (1.0f / WIDTH) + how.eps);
    float score = lane < M ? total * rstd : from_bits(0xff800000u), top = score;
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) top = fmaxf(top, shuffle_xor(top, mask));
    const float weight = score == score ? exp2_fast(1.4426950408889634f * (score - top)) : score;  // fmaxf drops a NaN
    float denominator = weight;
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) denominator += shuffle_xor(denominator, mask);
    const float share = weight / denominator;
    float4 mix[RUNS_EACH];
#pragma unroll
    for (int u = 0; u < RUNS_EACH; u++) mix[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < M; i++) {
        const float p = shuffle(share, i);
#pragma unroll
        for (int u = 0; u < RUNS_EACH; u++) {
            const float4 v = widened(words[i][u]);
            mix[u] = make_float4(fmaf(p, v.x, mix[u].x), fmaf(p, v.y, mix[u].y), fmaf(p, v.z, mix[u].z), fmaf(p, v.w, mix[u].w));
        }
    }
    float unit = 1.0f;
    if (HAS_NORM) {
        float square = 0.0f;
#pragma unroll
        for (int u = 0; u < RUNS_EACH; u++) square = dot(mix[u], mix[u], square);
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
        float* const squares = scratch + READ_WARPS * 2 * M;
        if (lane == 0) squares[warp] = square;
        sync_threads();
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < READ_WARPS; w++) all += squares[w];
        unit = rsqrt_fast(all * (1.0f / WIDTH) + how.norm_eps);
    }
#pragma unroll
    for (int u = 0; u < RUNS_EACH; u++) {
        if (thread + u * READERS >= RUNS) continue;
        float4 x = mix[u];
        if (HAS_NORM) x = make_float4(x.x * unit * scale[u].x, x.y * unit * scale[u].y, x.z * unit * scale[u].z, x.w * unit * scale[u].w);
        give(4 * (thread + u * READERS), make_uint2(pack(x.x, x.y), pack(x.z, x.w)));
    }
}
