// Sizes of verify.cu and the places of things in shared memory.
//
// Macros: KEY_DIM, VALUE_DIM (64 or 128), TAPS, BOUNDED, HAS_A, HAS_BIAS, INDEXED and LONG (32- or 64-bit slots), LONG_COUNTS.
#pragma once
#include "decode_gates.h"
#include "decode_sums.h"
#include "tf32_parts.h"

constexpr int K = KEY_DIM, V = VALUE_DIM, THREADS = 2 * V, WARPS = THREADS / 32;
constexpr int FOLDED = 9, SCORED = 9, PLACES = FOLDED + SCORED;
constexpr int LISTED = PLACES + SCORED, BETA = LISTED;  // k of every place, then q of those that are scored; behind them its beta
constexpr int CHANNELS = 2 * K + V, PARTS = K / 64, PIECES = K / 16;  // of a row: PARTS of 64 numbers, PIECES of 16
constexpr int SEEN = TAPS - 1;  // tokens that a convolution sees behind its own

// Strides in shared memory, so that what a warp reads together lies in different banks.
constexpr int ROW = K + 16, VALUES = V + 4, ANSWERS = 24;

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
    float state[V * K];           // piece f (four numbers) of row r at f ^ 4 (r / 2 % 2)
    float rows[LISTED][ROW];      // before D comes in: not normalized
    float v[PLACES][VALUES];
    float alpha[PLACES][K];
    float folded[8 * K];          // w(s, 8) of places 1 .. 8, see `folded_at`
    float first[K];               // w(0, 8)
    float left[K];                // D of place 8
    float common[PLACES][32];     // of place s, at t: w(s, t) . k_t; at PLACES + t: . q_t of the t-th that is scored; at BETA its beta
    float unit[32];               // by which the rows are to be multiplied
    float squares[PARTS][32];     // of the rows, summed over 64 channels
    float answers[18][ANSWERS];   // see `answer`
    float norm[V];                // weights of the output norm
    float beta[20];
    float of_outputs[SCORED][8];  // squares of outputs, by warp
};
