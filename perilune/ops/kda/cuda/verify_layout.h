// Sizes of verify.cu and the places of things in shared memory.
//
// Macros: KEY_DIM, VALUE_DIM (64 or 128), TAPS, BOUNDED, HAS_A, HAS_BIAS, INDEXED and LONG (32- or 64-bit slots), LONG_COUNTS.
#pragma once
#include "decode_gates.h"
#include "decode_sums.h"

constexpr int K = KEY_DIM, V = VALUE_DIM, THREADS = 2 * V, WARPS = THREADS / 32;
constexpr int FOLDED = 9, SCORED = 9, PLACES = FOLDED + SCORED;
constexpr int LISTED = (PLACES + SCORED + 3) / 4 * 4;  // at most 32, a number a lane
constexpr int CHANNELS = 2 * K + V, PER_LANE = K / 32, PIECES = K / 16;  // PIECES of four numbers of a row: of a thread

#if LONG
typedef i64 slot_type;
#else
typedef int slot_type;
#endif
#if LONG_COUNTS
typedef i64 count_type;
#else
typedef int count_type;
#endif

struct Shared {
    float state[V * K];          // piece f of row r at f ^ 4 (r / 2 % 2)
    float k[PLACES][K], q[SCORED][K], alpha[PLACES][K], v[PLACES][V];
    float folded[FOLDED][K];     // w(s, FOLDED - 1)
    float left[K];               // D of place FOLDED - 1
    float common[PLACES][32];    // of which LISTED count: of place s, at t: w(s, t) . k_t; at PLACES + t: . q_t of the t-th that is scored
    float beta[PLACES];
    float squares[WARPS][SCORED];
};

constexpr int PAIRS = CHANNELS / 2 + K / 2;  // of channels, then of decays

// What a thread needs of two channels: their raw projections, or decays, of all places, and for the convolution.
struct Inputs {
    bool decays;
    int c, channel;  // of q | k | v of the head, or of its decays; of qkv or of all decays
    u32 x[PLACES];
    float bias[2], taps[2][TAPS];
    bf16 seen[2][TAPS - 1];
};
