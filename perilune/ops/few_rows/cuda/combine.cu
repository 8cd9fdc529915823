// A token's experts together, choice after choice, and the RMSNorm of their sum: out = norm(sum_a p_a y_a).
//
// Macros: WIDTH (numbers of a token, a multiple of 4, at most 4096), ACTIVE, THREADS, NORM.
#include "device.h"

constexpr int WARPS = THREADS / 32;

KERNEL(THREADS, 1) combine(
    const float* y, const float* weight, const int* pair, const float* __restrict__ norm, bf16* out, float eps) {
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
        float square = sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w;
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
        if (lane == 0) squares[warp] = square;
        sync_threads();
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += squares[w];
        const float unit = rsqrt_fast(all * (1.0f / WIDTH) + eps);
        if (inside) {
            const float4 scale = *(const float4*)(norm + column);
            sum = make_float4(sum.x * unit * scale.x, sum.y * unit * scale.y, sum.z * unit * scale.z, sum.w * unit * scale.w);
        }
    }
    if (inside) *(uint2*)(out + token * WIDTH + column) = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
}
