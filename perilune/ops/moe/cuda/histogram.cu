// Bins of the required bias, cutoff - score, of EXPERTS experts and a slab of tokens, summed in shared memory.
//
// Macros: THREADS of a block, EXPERTS of a block (THREADS is a multiple of it), AHEAD loads of a thread under way.
// The histogram's edges are those of `QuantileHistogram.bounds`, computed by the same operations in the same order.
#include "device.h"
#include "atomics.h"

KERNEL(THREADS, 2)
histogram(const float* __restrict__ scores, const float* __restrict__ cutoff, const u8* __restrict__ valid,
          const float* __restrict__ bias, u32* __restrict__ count, i64 tokens, i64 slab, int experts, int bins) {
    SHARED(shared);
    float* least = (float*)shared;
    float* most = least + THREADS;
    u32* bin = (u32*)(most + THREADS);
    const int thread = threadIdx.x, first = blockIdx.x * EXPERTS;
    const int here = experts - first < EXPERTS ? experts - first : EXPERTS;

    float low = bias[0], high = bias[0];
    for (int e = thread; e < experts; e += THREADS) {
        low = fminf(low, bias[e]);
        high = fmaxf(high, bias[e]);
    }
    least[thread] = low;
    most[thread] = high;
    for (int i = thread; i < here * bins; i += THREADS) bin[i] = 0;
    sync_threads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (thread < half) {
            least[thread] = fminf(least[thread], least[thread + half]);
            most[thread] = fmaxf(most[thread], most[thread + half]);
        }
        sync_threads();
    }
    low = least[0] - 1.0f;
    const float inverse = 1.0f / ((most[0] + 1.0f - low) / (float)bins), last = (float)(bins - 1);

    const int mine = thread % EXPERTS;
    const i64 begin = blockIdx.y * slab, end = begin + slab < tokens ? begin + slab : tokens;
    constexpr int STEP = THREADS / EXPERTS;
    for (i64 token = begin + thread / EXPERTS; token < end; token += AHEAD * STEP) {
        float score[AHEAD], edge[AHEAD];
        bool seen[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const i64 t = token + i * STEP;
            seen[i] = t < end && mine < here && (valid == nullptr || valid[t]);
            score[i] = seen[i] ? scores[t * experts + first + mine] : 0.0f;
            edge[i] = seen[i] ? cutoff[t] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            // fmaxf takes the number beside a NaN: it counts in the first bin, as everything below the range.
            const int at = (int)fminf(fmaxf((edge[i] - score[i] - low) * inverse, 0.0f), last);
            if (seen[i]) add_shared(bin + mine * bins + at, 1);
        }
    }
    sync_threads();
    for (int i = thread; i < here * bins; i += THREADS) {
        if (bin[i]) add_global(count + (i64)first * bins + i, bin[i]);
    }
}
