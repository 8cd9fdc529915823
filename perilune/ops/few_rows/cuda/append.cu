// New entries of a latent cache into its pages: the RMSNorm of a token's latent, then its shared key channels as they are.
//
// Macros: LATENT (numbers of a latent, a multiple of 8, at most 8192), SHARED_KEYS (a multiple of 8), THREADS.
#include "device.h"

constexpr int WARPS = THREADS / 32, PIECES = LATENT / 8, ALL = PIECES + SHARED_KEYS / 8, EACH = (ALL + THREADS - 1) / THREADS;

KERNEL(THREADS, 1) append(
    const bf16* x, const float* __restrict__ norm, const i64* page, const i64* slot, bf16* entries, i64 x_stride, i64 page_stride,
    i64 slot_stride, float eps) {
    SHARED(memory);
    float* const squares = (float*)memory;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const i64 token = blockIdx.x;
    let_next_start();
    wait_for_earlier();
    const bf16* const row = x + token * x_stride;
    bf16* const to = entries + page[token] * page_stride + slot[token] * slot_stride;
    uint4 words[EACH];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int piece = thread + i * THREADS;
        words[i] = piece < ALL ? *(const uint4*)(row + 8 * piece) : make_uint4(0, 0, 0, 0);
        if (piece >= PIECES) continue;
        const u32 two[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            square = fmaf(low_half(two[e]), low_half(two[e]), square);
            square = fmaf(high_half(two[e]), high_half(two[e]), square);
        }
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
    if (lane == 0) squares[warp] = square;
    sync_threads();
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += squares[w];
    const float unit = rsqrt_fast(all * (1.0f / LATENT) + eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int piece = thread + i * THREADS;
        if (piece >= ALL) continue;
        if (piece < PIECES) {
            u32 two[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                two[e] = pack(low_half(two[e]) * unit * norm[8 * piece + 2 * e], high_half(two[e]) * unit * norm[8 * piece + 2 * e + 1]);
            words[i] = make_uint4(two[0], two[1], two[2], two[3]);
        }
        *(uint4*)(to + 8 * piece) = words[i];
    }
}
