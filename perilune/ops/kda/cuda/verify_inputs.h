// What verify.cu makes of raw projections: decays, and k, q and v behind the convolution.
#pragma once
#include "verify_layout.h"

constexpr int PAIRS = CHANNELS / 2 + K / 2;  // of channels, then of decays
constexpr int ROUNDS = (PAIRS + THREADS - 1) / THREADS;  // of all threads, a pair each

// What a thread needs of two channels, or decays: their raw numbers at all places, and for channels what comes before the first
// token, and weights.
struct Inputs {
    bool decays;
    int first;       // pair of the warp
    int c, channel;  // of q | k | v of the head, or of its decays; of qkv or of all decays
    u32 x[SEEN + PLACES];  // from SEEN before the first place on
    bf16 seen[2][SEEN];    // the window, which goes before the first token
    float bias[2], taps[2][TAPS];
};

DEVICE void store_decays(Shared& shared, const Inputs& in, float rate, float lower_bound, int empty, int count) {
#pragma unroll
    for (int p = 0; p < PLACES; p++) {
        const u32 two = in.x[SEEN + p];
        const bool there = p < FOLDED ? p >= empty : p - FOLDED < count;
        const float low = decay(low_half(two) + in.bias[0], rate, lower_bound);
        const float high = decay(high_half(two) + in.bias[1], rate, lower_bound);
        *(float2*)(shared.alpha[p] + in.c) = make_float2(there ? low : 1.0f, there ? high : 1.0f);
    }
}

// The window to where it belongs.
DEVICE void align(Inputs& in, int empty) {
#pragma unroll
    for (int i = 0; i < SEEN; i++) {
        const u32 two = in.seen[0][i] | (u32)in.seen[1][i] << 16;
#pragma unroll
        for (int n = 0; n <= FOLDED; n++) in.x[n + i] = empty == n ? two : in.x[n + i];
    }
}

// warp: the convolution with SiLU, zeros at empty places; of rows the squares, summed over the warp's 64 channels, for their norms.
DEVICE void store_convolved(Shared& shared, const Inputs& in, int empty, int count, int lane) {
    float squares[32];
#pragma unroll
    for (int n = 0; n < 32; n++) squares[n] = 0.0f;
    auto convolved = [&](int p, int h) -> float {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < TAPS; i++) {
            const u32 two = in.x[p + i];
            total = fmaf(in.taps[h][i], h ? high_half(two) : low_half(two), total);
        }
        return total * sigmoid(total);
    };
    const bool of_q = in.first < K / 2, of_v = in.first >= K;
    float* const to = of_q ? shared.rows[FOLDED] + in.c : of_v ? shared.v[0] + (in.c - 2 * K) : shared.rows[0] + (in.c - K);
    const int step = of_v ? VALUES : ROW;
    auto store = [&](int p, bool there) -> float {
        float low = convolved(p, 0), high = convolved(p, 1);
        low = there ? low : 0.0f, high = there ? high : 0.0f;
        *(float2*)(to + p * step) = make_float2(low, high);
        return fmaf(low, low, high * high);
    };
    if (empty < FOLDED && !of_q)
#pragma unroll
        for (int p = 0; p < FOLDED; p++) squares[p] = store(p, p >= empty);
#pragma unroll
    for (int t = 0; t < SCORED; t++) {
        const float square = store(FOLDED + t, t < count);
        squares[FOLDED + t] = of_q ? 0.0f : square;
        squares[PLACES + t] = of_q ? square : 0.0f;
    }
    if (of_v) return;
    fold<16, 16>(squares, lane);
    if (lane < LISTED && (lane >= PLACES) == of_q) shared.squares[in.first / 32 % PARTS][lane] = squares[0];
}
