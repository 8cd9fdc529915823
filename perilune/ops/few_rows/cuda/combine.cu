// A token's experts together, choice after choice: out = sum_a p_a y_a. With NORM times the weight of an RMSNorm, whose factor,
// 1 / root mean square, goes beside it: outward.cu applies it, and adds squares in the same order.
//
// Macros: WIDTH (numbers of a token, a multiple of 4, at most 4096), ACTIVE, THREADS, NORM.
#include "device.h"
#include "squares.h"

constexpr int WARPS = THREADS / 32;

KERNEL(THREADS, 1) combine(
    const float* y, const float* weight, const int* pair, const float* __restrict__ norm, bf16* out, float* factor, float eps) {
    SHARED(memory);
    float* const squares = (float*)memory;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, column = 4 * thread;
    const i64 token = blockIdx.x;
    const bool inside = column < WIDTH;
    let_next_start();
    wait_for_earlier();
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (inside) {
#pragma unroll
        for (int a = 0; a < ACTIVE; a++) {
            const float p = weight[token * ACTIVE + a];
            const float4 v = *(const float4*)(y + (i64)pair[token * ACTIVE + a] * WIDTH + column);
            sum = make_float4(fmaf(p, v.x, sum.x), fmaf(p, v.y, sum.y), fmaf(p, v.z, sum.z), fmaf(p, v.w, sum.w));
        }
    }
    if (NORM) {
        float square = four_squares(sum.x, sum.y, sum.z, sum.w);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) square += shuffle_xor(square, mask);
        if (lane == 0) squares[warp] = square;
        sync_threads();
        if (thread == 0) {
            float all = 0.0f;
            for (int w = 0; w < WARPS; w++) all += squares[w];
            factor[token] = rsqrt_fast(all * (1.0f / WIDTH) + eps);
        }
        if (inside) {
            const float4 scale = *(const float4*)(norm + column);
            sum = make_float4(sum.x * scale.x, sum.y * scale.y, sum.z * scale.z, sum.w * scale.w);
        }
    }
    if (inside) *(uint2*)(out + token * WIDTH + column) = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
}
