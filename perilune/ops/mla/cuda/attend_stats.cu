// What the backward pass of causal attention needs to know of each query, and the outputs' gradient in bfloat16.
//
// A warp takes a row. <do, o> is of the gradient as the products see it, rounded, so that the sum of a row of ds is zero.
#include "attend_tiles.h"

constexpr int STATS_WARPS = 4;

// out [B, tokens, heads, VALUE] dense and dout by strides, each float (WIDE_OUT, WIDE_DOUT) or bfloat16; logs [B, heads, tokens];
// queries [B, heads, pitch], beyond `tokens` such that they weigh nothing; narrow: dout in bfloat16, dense (if WIDE_DOUT).
KERNEL(32 * STATS_WARPS, 8) attend_stats(
    const void* __restrict__ out, const void* __restrict__ dout, const float* __restrict__ logs, Query* __restrict__ queries,
    bf16* __restrict__ narrow, i64 do_b, i64 do_t, i64 do_h, int tokens, int heads, int pitch) {
    const int lane = threadIdx.x & 31, head = blockIdx.y * STATS_WARPS + (threadIdx.x >> 5), t = blockIdx.x;
    const i64 batch = blockIdx.z;
    if (head >= heads) return;
    Query* const to = queries + (batch * heads + head) * pitch + t;
    if (t >= tokens) {
        if (lane == 0) *(float2*)to = make_float2(from_bits(0x7f800000u), 0.0f);
        return;
    }
    const i64 dense = ((batch * tokens + t) * heads + head) * VALUE, from = batch * do_b + t * do_t + head * do_h;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < VALUE / 64; c++) {
        const int at = 64 * c + 2 * lane;
        float x0, x1;
        u32 both;
        if (WIDE_DOUT) {
            const float2 two = *(const float2*)((const float*)dout + from + at);
            both = pack(two.x, two.y);
            *(u32*)(narrow + dense + at) = both;
        } else both = *(const u32*)((const bf16*)dout + from + at);
        if (WIDE_OUT) {
            const float2 two = *(const float2*)((const float*)out + dense + at);
            x0 = two.x, x1 = two.y;
        } else {
            const u32 two = *(const u32*)((const bf16*)out + dense + at);
            x0 = low_half(two), x1 = high_half(two);
        }
        sum = fmaf(low_half(both), x0, fmaf(high_half(both), x1, sum));
    }
    sum = warp_sum(sum);
    if (lane == 0) *(float2*)to = make_float2(logs[(batch * heads + head) * tokens + t], sum);
}
