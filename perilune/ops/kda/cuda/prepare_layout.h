// Sizes, the places of things in shared memory, and the smallest pieces of prepare.cu.
#pragma once
#include "device.h"

// K: channels, 64 or 128. G_FLOAT: g is float, else bfloat16. BLOCKS: of a multiprocessor. FULL: see prepare.cu.
constexpr int CHUNK = 64, TILE = 32, THREADS = 256, GROUPS = K / 32;
constexpr int SUM_STRIDE = K + 4, L_STRIDE = 80, A_STRIDE = 72;  // elements of a row, against bank conflicts
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
// Shared memory, in bytes.
constexpr int BETA = 0, NORMS = 256;               // of the rows; 1 / |q| times the scale, 1 / |k|
constexpr int SHIFTS = 768;                        // bits that a tile's rows are shifted
constexpr int DIAGONAL = 896;                      // of P
constexpr int UNITS = 1152;                        // without a bound: what L's rows and columns are multiplied by
constexpr int ENDS = UNITS + (BOUNDED ? 0 : 256), FACTORS = ENDS + 8 * K;  // a tile's sum, and the other tile's decay
constexpr int SUMS = FACTORS + 8 * K;              // g, then running sums, then keys; in the end blocks of the inverse
constexpr int STAGED = SUMS + 16384;               // and A
constexpr int SUMS_BYTES = larger(4 * CHUNK * SUM_STRIDE, 16384 + 2 * CHUNK * A_STRIDE);
constexpr int ROWS = SUMS + SUMS_BYTES;            // q and k, then left operands, then L
constexpr int ROW_BYTES = 2 * K, ROWS_OF_K = CHUNK * ROW_BYTES;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST_LOG2 = -150.0f;  // 2^-150 is nothing beside any other term
constexpr float L2_EPS = 1e-6f;         // added to a sum of squares
constexpr float LEAST_BETA = 1e-12f;   // a write strength of 0 is computed as this: the gradient divides by it

enum Flags { L2_NORM = 1, GATE = 2, BETA_SIGMOID = 4, BETA_FLOAT = 8, WHOLE = 16 };

DEVICE float power_of_2(int n) { return from_bits((u32)(127 + n) << 23); }

DEVICE u32 pair_of(float x) { return (bits(x) >> 16) * 0x10001u; }  // twice the same bfloat16

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
DEVICE uint4 times(uint4 v, u32 by) {
    return make_uint4(multiply_pair(v.x, by), multiply_pair(v.y, by), multiply_pair(v.z, by), multiply_pair(v.w, by));
}

constexpr u32 ONES = 0x3f803f80u;  // a pair of bfloat16

// Where 8 channels of a row of q or k lie, by the number of their 16 bytes: odd rows swap halves of 128 bytes.
DEVICE int place(int row, int piece) { return row * ROW_BYTES + (piece ^ (row & 1) << 2) * 16; }
