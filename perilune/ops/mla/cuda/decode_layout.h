// Sizes of decode.cu and the places of things in shared memory. Macro: EXTRA (0 or 64 shared channels).
#pragma once
#include "runs.h"

constexpr int ROWS = 64, LATENT = 512, HALF = LATENT / 2;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int CHUNK = 8192;                             // bytes: 64 rows of 64 channels
constexpr int LATENT_CHUNKS = LATENT / 64, CHUNKS = LATENT_CHUNKS + EXTRA / 64;
constexpr int HALF_CHUNKS = LATENT_CHUNKS / 2;
constexpr int SHARED_PART = 2, PARTS = 2 + EXTRA / 64;  // of a place: two halves of the latent, the shared channels
constexpr int COPIERS = 64;                             // threads that fill a place

struct Shared {
    u8 query[CHUNKS * CHUNK];
    u8 cache[2][CHUNKS * CHUNK];
    u8 weights[CHUNK];
    float highest[2][ROWS];  // scores after a block of this parity
    float total[2][ROWS];    // denominators of the blocks of each group
    u64 full[2][PARTS], empty[2][PARTS];
};

// Barriers besides 0; PUBLISHED and OWN plus the group's number.
enum { PUBLISHED = 1, OWN = 3, BOTH = 5 };

// The part of place `place` that is waited for as the n-th: the shared channels, then the half that is given back first.
DEVICE constexpr int part_in_turn(int n, int place) {
    return EXTRA == 0 ? place ^ n : n == 0 ? SHARED_PART : place ^ (n - 1);
}
