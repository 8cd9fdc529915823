// From what segments do to a state, S -> M S + N, to the state that enters each of them: see ops/kda/triton/segments.py.
//
// A block a sequence, head and ROWS value channels; a thread has four of these and every 32nd or four neighbouring key
// channels, so that what it reads of M lies in other banks than what its neighbours read. In float throughout: errors of a
// product would be carried through all segments behind it.
//
// REVERSE: from the last segment to the first by the transposed M, the cotangent of the state that leaves each.
#include "device.h"

constexpr int K = KEY_DIM, ROWS = 16, THREADS = 128, OWN_ROWS = 4, OWN = K / 32;
constexpr int STRIDE = K + 4;  // floats of a row in shared memory, against bank conflicts
constexpr int STATE = 4 * K * STRIDE;

// The key channel e of a thread.
DEVICE int channel_of(int lane, int e) { return REVERSE ? lane + 32 * e : OWN * lane + e; }

// M [units, heads, K, K] and N [units, heads, V, K], transposed as `summary` writes them, or of the scan in reverse. state_in: a row a sequence by
// strides, or null. sequences [sequences, 2]: first unit and units. entry [units, heads, V, K].
KERNEL(THREADS, 1)
fold(
    const float* M, const float* N, const float* state_in, const int* sequences, float* __restrict__ entry, i64 in_unit, i64 in_head, i64 in_v, i64 in_k, int heads, int value_dim) {
    SHARED(memory);
    wait_for_earlier();
    let_next_start();
    float* const square = (float*)memory;
    float* const shared_state = (float*)(memory + STATE);
    const int thread = threadIdx.x, lane = thread & 31, blocks = value_dim / ROWS;
    const int head = (u32)blockIdx.x / (u32)blocks, own = OWN_ROWS * (thread >> 5), row = (u32)blockIdx.x % (u32)blocks * ROWS + own;
    const int first = sequences[2 * blockIdx.y], count = sequences[2 * blockIdx.y + 1];
    const auto at = [&](int n) { return (i64)(REVERSE ? first + count - 1 - n : first + n) * heads + head; };
    const auto inside = [&](i64 place, int r, int e) { return (place * value_dim + row + r) * K + channel_of(lane, e); };
    // M of step n, the first of which has none and the last of which nobody asks.
    const auto ask = [&](int n) {
        if (n + 1 < count)
            for (int piece = thread; piece < K * K / 4; piece += THREADS)
                copy_async(square + piece / (K / 4) * STRIDE + piece % (K / 4) * 4, M + at(n) * (K * K) + 4 * piece);
        copy_commit();
    };

    float state[OWN_ROWS][OWN];
#pragma unroll
    for (int r = 0; r < OWN_ROWS; r++)
#pragma unroll
        for (int e = 0; e < OWN; e++)
            state[r][e] = state_in ? state_in[blockIdx.y * in_unit + head * in_head + (row + r) * in_v + channel_of(lane, e) * in_k] : 0.0f;
    ask(1);
#pragma unroll 1
    for (int n = 0; n < count; n++) {
        float next[OWN_ROWS][OWN];
#pragma unroll
        for (int r = 0; r < OWN_ROWS; r++)
#pragma unroll
            for (int e = 0; e < OWN; e++) {
                entry[inside(at(n), r, e)] = state[r][e];
                next[r][e] = n + 1 < count ? N[inside(at(n), r, e)] : 0.0f;
            }
        if (n > 0 && n + 1 < count) {
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++)
#pragma unroll
                for (int e = 0; e < OWN; e++) shared_state[(own + r) * STRIDE + channel_of(lane, e)] = state[r][e];
            copy_wait<0>();
            sync_threads();
#pragma unroll 4
            for (int j = 0; j < K; j += 4) {
                float by[OWN_ROWS][4], m[4][OWN];
#pragma unroll
                for (int r = 0; r < OWN_ROWS; r++) *(float4*)by[r] = *(const float4*)(shared_state + (own + r) * STRIDE + j);
#pragma unroll
                for (int i = 0; i < (REVERSE ? OWN : 4); i++) {
                    if (REVERSE) {
                        const float4 column = *(const float4*)(square + channel_of(lane, i) * STRIDE + j);
                        m[0][i] = column.x, m[1][i] = column.y, m[2][i] = column.z, m[3][i] = column.w;
                    } else {
#pragma unroll
                        for (int e = 0; e < OWN; e += 2) *(float2*)(m[i] + e) = *(const float2*)(square + (j + i) * STRIDE + OWN * lane + e);
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int r = 0; r < OWN_ROWS; r++)
#pragma unroll
                        for (int e = 0; e < OWN; e++) next[r][e] = fmaf(by[r][i], m[i][e], next[r][e]);
            }
            sync_threads();
            ask(n + 1);
        }
#pragma unroll
        for (int r = 0; r < OWN_ROWS; r++)
#pragma unroll
            for (int e = 0; e < OWN; e++) state[r][e] = next[r][e];  // of the first step the effect alone: it began with the state
    }
    copy_wait<0>();
}
