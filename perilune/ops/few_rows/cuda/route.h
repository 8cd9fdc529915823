// Routes of a few tokens and what the experts' kernels want to know of them, by one block: a warp chooses for a token, then a
// thread looks at an expert.
//
//     s = sigmoid(logits);  chosen = the ACTIVE largest of s + bias, equal ones by the lower number;  weight = s / sum of chosen s
//
// Experts that some token chose are listed in ascending order: {expert, tokens as bits, first pair, pairs}. The pairs (token,
// expert) of an expert follow each other by token; `pair` says which one is a token's n-th choice.
//
// Macros: EXPERTS (at most 1024), ACTIVE (at most 16), TOKENS (most tokens, at most 32), RENORMALIZE.
#pragma once
#include "device.h"

constexpr int KEYS = (EXPERTS + 31) / 32;  // of a lane
constexpr int TABLE_BYTES = 128 + (TOKENS * EXPERTS + 15) / 16 * 16;  // of shared memory for the functions below
constexpr float SUM_FLOOR = 1e-20f;

// A float's bits as an unsigned number of the same order, NaN the largest; 0 is below all.
DEVICE u32 ordered(float x) {
    const u32 b = bits(x);
    return b >> 31 ? ~b : b | 0x80000000u;
}
DEVICE float score_of(float logit) { return reciprocal(1.0f + exp2_fast(-1.4426950408889634f * logit)); }

// A warp: the choices of a token. Lane n of the first ACTIVE returns the n-th one, and its weight.
DEVICE int choose(const float* logits, const float* bias, float scaling, int lane, float& weight) {
    u32 key[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const int expert = lane + 32 * j;
        key[j] = expert < EXPERTS ? ordered(score_of(logits[expert]) + bias[expert]) : 0;
    }
    int mine = 0;
#pragma unroll 1
    for (int n = 0; n < ACTIVE; n++) {
        u32 best = key[0];
        int at = 0;
#pragma unroll
        for (int j = 1; j < KEYS; j++)
            if (key[j] > best) best = key[j], at = j;
        const u32 top = warp_largest(best);
        const u32 expert = ~warp_largest(best == top ? ~(u32)(lane + 32 * at) : 0u);
        if (lane == n) mine = expert;
        if (lane == (int)(expert & 31)) {
#pragma unroll
            for (int j = 0; j < KEYS; j++)
                if (j == (int)(expert >> 5)) key[j] = 0;
        }
    }
    float value = lane < ACTIVE ? score_of(logits[mine]) : 0.0f;
    if (RENORMALIZE) {
        float sum = value;
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
        value = value / (sum + SUM_FLOOR);
    }
    weight = value * scaling;
    return mine;
}

// A block of at least EXPERTS threads: all routes. `keep` gets a token, the number of a choice, and its weight; `pair` the same two
// and the pair's number; `entry` a place in the list and what stands there. Returns the length of the list.
template <int WARPS_OF_BLOCK, class Keep, class Pair, class Entry> DEVICE int route_all(
    u8* table, const float* logits, const float* bias, int tokens, float scaling, Keep keep, Pair pair, Entry entry) {
    float* const totals = (float*)table;  // of the warps' experts
    u8* const choice = table + 128;       // [TOKENS][EXPERTS]: 1 + the number of the choice, or 0
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    for (int i = thread; i < TOKENS * EXPERTS; i += 32 * WARPS_OF_BLOCK) choice[i] = 0;
    sync_threads();
    for (int token = warp; token < tokens; token += WARPS_OF_BLOCK) {
        float weight;
        const int expert = choose(logits + token * EXPERTS, bias, scaling, lane, weight);
        if (lane < ACTIVE) {
            keep(token, lane, weight);
            choice[token * EXPERTS + expert] = 1 + lane;
        }
    }
    sync_threads();
    // Places of the experts in the list and of their pairs, counted together: 1024 for an expert, 1 for a pair.
    u32 chosen = 0;
    int count = 0;
    if (thread < EXPERTS)
        for (int token = 0; token < tokens; token++)
            if (choice[token * EXPERTS + thread]) chosen |= 1u << token, count++;
    const float own = count ? 1024.0f + count : 0.0f;
    float before = own;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const float lower = shuffle_up(before, by);
        if (lane >= by) before += lower;
    }
    if (lane == 31) totals[warp] = before;
    sync_threads();
    for (int w = 0; w < warp; w++) before += totals[w];
    float all = 0.0f;
    for (int w = 0; w < WARPS_OF_BLOCK; w++) all += totals[w];
    const int sum = (int)(before - own), start = sum & 1023;
    if (count) {
        entry(sum >> 10, make_uint4(thread, chosen, start, count));
        for (int token = 0, n = start; token < tokens; token++)
            if (choice[token * EXPERTS + thread]) pair(token, choice[token * EXPERTS + thread] - 1, n++);
    }
    return (int)all >> 10;
}
