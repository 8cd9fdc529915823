// What the backward kernel keeps of a chunk, in shared memory and in registers.
#pragma once
#include "backward_tiles.h"

#if WIDE
typedef float qk_out;
#else
typedef bf16 qk_out;
#endif
#if BETA_FLOAT
typedef float beta_type;
DEVICE float beta_in(float x) { return x; }
DEVICE float beta_out(float x) { return x; }
#else
typedef bf16 beta_type;
DEVICE float beta_in(bf16 x) { return to_float(x); }
DEVICE bf16 beta_out(float x) { return to_bf16(x); }
#endif

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST_LOG2 = -150.0f;  // 2^-150 is nothing beside any other term
constexpr float LEAST_BETA = 1e-12f;  // a write strength of 0 is computed as this: the gradient divides by it
constexpr int ROWS_K = CHUNK * K * 2, ROWS_V = CHUNK * V * 2, STATE = V * K * 2, SQUARE = CHUNK * CHUNK * 2;

// A chunk of a head: its number, the head, its first token and how many it has, and the head's e^A_log.
struct Chunk {
    int program, head, start, count;
    float rate;
};

struct Shared {
    u8 q[ROWS_K], k[ROWS_K];  // raw, then q up and -k up
    u8 g[ROWS_K];
    u8 d_o[ROWS_V], e[ROWS_V], u[ROWS_V];
    u8 s[STATE], ds[STATE];
    u8 near[ROWS_K], far[ROWS_K];  // k / up (without a bound: see backward_unbounded.h) and k to
    u8 dp[SQUARE], eu[SQUARE];
    float decay[BLOCKS][K];                // 2^(log-decay of a block of rows)
    float after[BLOCKS][K];                // sums over a block of dG
    float tail[BLOCKS][K];                 // of k times what reaches later chunks
    float bias[BLOCKS][K];                 // of dz
    float through[K];                      // gamma sum_v S dS
    float squares[2][CHUNK][WIDTH];        // |q|^2 and |k|^2 of a warp's channels
    float along[2][CHUNK][WIDTH];          // of q dq and k dk
    float q_rstd[CHUNK], k_rstd[CHUNK];    // 1 / |q| and 1 / |k|
    float diagonal[CHUNK];                 // of scale dP
    float written[CHUNK], strength[CHUNK]; // of beta's gradient: sum_v E v, and the factor of it; see `strengths`
    float corrected[CHUNK][WIDTH];         // the rest: of k times d_query of a warp's channels
    float rate[WARPS];                     // of e^A_log's gradient
    alignas(16) float dt_bias[2][K];       // of this chunk's head and of the next one's, in turn
    Chunk next;
    int thread[THREADS];                   // each thread's own number
};

// Where this thread stands, found anew in every step. The compiler cannot know that it reads the same number again: what it
// derives from it, mostly addresses, would otherwise stay in registers from one step to the next.
DEVICE Place here(const Shared& m) { return place(*(volatile const int*)&m.thread[threadIdx.x]); }

DEVICE float total(const float (&part)[WIDTH]) {
    float sum = part[0];
#pragma unroll
    for (int i = 1; i < WIDTH; i++) sum += part[i];
    return sum;
}

DEVICE void scale_columns(float (&x)[4][4], const float* factor, const Place& p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 f = *(const float2*)(factor + p.channel(j));
#pragma unroll
        for (int i = 0; i < 4; i++) x[j][i] *= i & 1 ? f.y : f.x;
    }
}
DEVICE void scale_columns(float (&x)[4][4], float (&y)[4][4], const float* factor, const Place& p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 f = *(const float2*)(factor + p.channel(j));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[j][i] *= i & 1 ? f.y : f.x;
            y[j][i] *= i & 1 ? f.y : f.x;
        }
    }
}

DEVICE float half_of(u32 two, int e) { return e ? high_half(two) : low_half(two); }

// What a thread keeps of its 2 rows and 8 channels, from the raw inputs to the gradients: q and k before the L2 norm. A
// gradient is multiplied by 1 / the norm at once, so that its product with the raw q or k is that of the normalised ones.
struct Own {
    u32 q[2][4], k[2][4];
    float up[4][4];  // where the decay has no bound its logarithm
    __device__ __forceinline__ float up_at(int j, int i) const { return BOUNDED ? up[j][i] : exp2_fast(up[j][i]); }
    __device__ __forceinline__ float q_at(int j, int i) const { return half_of(q[i >> 1][j], i & 1); }
    __device__ __forceinline__ float k_at(int j, int i) const { return half_of(k[i >> 1][j], i & 1); }
};
