// Routes of a few tokens and what the experts' kernels want to know of them, by one block: a warp chooses for a token, then a
// thread looks at an expert.
//
//     s = sigmoid(logits);  chosen = the ACTIVE largest of s + bias, equal ones by the lower number;  weight = s / sum of chosen s
//
// Experts that some token chose are listed in ascending order: {expert, tokens as bits, first pair, pairs}; the rest of the list
// is zeros. The pairs (token, expert) of an expert follow each other by token; `pair` says which one is a token's n-th choice.
//
// Macros: EXPERTS (at most 1024), ACTIVE (at most 32), TOKENS (most tokens, at most 32), THREADS, RENORMALIZE.
#include "device.h"

constexpr int KEYS = (EXPERTS + 31) / 32, WARPS = THREADS / 32;
constexpr float LOG2E = 1.4426950408889634f, FLOOR = 1e-20f;

// A float's bits as an unsigned number of the same order, NaN the largest; 0 is below all.
DEVICE u32 ordered(float x) {
    const u32 b = bits(x);
    return b >> 31 ? ~b : b | 0x80000000u;
}

KERNEL(THREADS, 1) route(
    const float* logits, const float* __restrict__ bias, float* weight, int* pair, uint4* list, int tokens, int most, float scaling) {
    SHARED(memory);
    float* const totals = (float*)memory;            // of the warps' experts
    u8* const choice = memory + 128;                 // [TOKENS][EXPERTS]: 1 + the number of the choice, or 0
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    let_next_start();
    for (int i = thread; i < TOKENS * EXPERTS; i += THREADS) choice[i] = 0;
    wait_for_earlier();
    sync_threads();
    for (int token = warp; token < tokens; token += WARPS) {
        u32 key[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            const int expert = lane + 32 * j;
            key[j] = 0;
            if (expert < EXPERTS) {
                const float score = reciprocal(1.0f + exp2_fast(-LOG2E * logits[token * EXPERTS + expert]));
                key[j] = ordered(score + bias[expert]);
            }
        }
        int mine = 0;  // the choice of the lane's number
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
        float value = lane < ACTIVE ? reciprocal(1.0f + exp2_fast(-LOG2E * logits[token * EXPERTS + mine])) : 0.0f;
        if (RENORMALIZE) {
            float sum = value;
#pragma unroll
            for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
            value = value / (sum + FLOOR);
        }
        if (lane < ACTIVE) {
            weight[token * ACTIVE + lane] = value * scaling;
            choice[token * EXPERTS + mine] = 1 + lane;
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
    for (int w = 0; w < WARPS; w++) all += totals[w];
    const int sum = (int)(before - own), place = sum >> 10, start = sum & 1023, used = (int)all >> 10;
    if (count) {
        list[place] = make_uint4(thread, chosen, start, count);
        for (int token = 0, n = start; token < tokens; token++)
            if (choice[token * EXPERTS + thread]) pair[token * ACTIVE + choice[token * EXPERTS + thread] - 1] = n++;
    }
    for (int i = used + thread; i < most; i += THREADS) list[i] = make_uint4(0, 0, 0, 0);
}
