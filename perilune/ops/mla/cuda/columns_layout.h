// Sizes of columns.cu and the places of things in shared memory. Macros: EXTRA (0 or 64 shared channels), SHARERS (1 or 2
// blocks that read the same cached rows, a cluster).
#pragma once
#include "runs.h"

constexpr int COLUMNS = 48, LATENT = 512;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;  // of the last 128 one copies
constexpr int CHUNK = 8192;                             // bytes: 64 cached rows, 64 channels of each
constexpr int QUERIES = 128 * COLUMNS;                  // bytes: 64 channels of each query
constexpr int LATENT_CHUNKS = LATENT / 64, CHUNKS = LATENT_CHUNKS + EXTRA / 64;
constexpr int HALF_CHUNKS = LATENT_CHUNKS / 2;
constexpr int SHARED_PART = 2, PARTS = 2 + EXTRA / 64;  // of a place: two halves of the latent, the shared channels
constexpr int ROWS_EACH = KEYS / SHARERS;               // cached rows of a block of them that a sharer copies, for all
constexpr int MINE = COLUMNS / 4;                       // columns of a thread

struct Shared {
    u8 cache[2][CHUNKS * CHUNK];
    u8 query[CHUNKS * QUERIES];
    u8 weights[2][QUERIES];         // of blocks of each parity: 64 cached rows of each query
    float highest[2][COLUMNS];      // what the scores are relative to after a block of this parity that has raised it
    float warp_highest[4][COLUMNS];
    float total[2][4][COLUMNS];     // denominators of the blocks of each group, by warps
    u8 raises[2][4];                // a warp of the group that scored a block of this parity met scores that are too high
    u64 full[2][PARTS], empty[2][PARTS];
};

// Barriers besides 0; PUBLISHED and OWN plus the group's number.
enum { PUBLISHED = 1, OWN = 3, BOTH = 5 };

// The part of place `place` that is waited for as the n-th: the shared channels, then the half that is given back first.
DEVICE constexpr int part_in_turn(int n, int place) {
    return EXTRA == 0 ? place ^ n : n == 0 ? SHARED_PART : place ^ (n - 1);
}
