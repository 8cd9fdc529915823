// What the serial kernels share: where a chunk's tiles lie in shared memory, how they come there, and products with them.
//
// S^T, R^T, U^T and the like have the value channels as rows: a warpgroup has 64 of them, a thread rows i and i + 8 of its
// warp's 16. A product's result is then, rounded, the next one's left operand, and only what `prepare` wrote comes from shared
// memory.
//
// A chunk arrives in two halves, what is needed first and the rest, in a ring of slots that one warpgroup fills and the others,
// each at its own pace, empty: while one waits for a product, another's keeps the tensor cores busy.
#pragma once
#include "device.h"

// KEY_DIM: key channels, 64 or 128. GROUPS: warpgroups that compute, 1 or 2; the last warpgroup of a block fetches.
constexpr int K = KEY_DIM, CHUNK = 64, COMPUTING = 128 * GROUPS, FETCHING = 128, THREADS = COMPUTING + FETCHING;
constexpr int COLUMNS = 64 * GROUPS;
constexpr int BLOCK = 128 * CHUNK;  // bytes of 64 rows of 64 numbers
constexpr int WIDE = K / 64;        // blocks of a tile of key channels
constexpr int SLOTS = 5;
// Blocks of the first half: a tile of key channels, a square, values. Of the second: two of key channels, a square. Behind them
// gamma and beta.
constexpr int SQUARE_AT = WIDE, V_AT = WIDE + 1, OTHER_AT = WIDE, OTHER_SQUARE_AT = 2 * WIDE;
constexpr int FIRST_HALF = WIDE + 1 + GROUPS, SECOND_HALF = 2 * WIDE + 1;
constexpr int HALF = FIRST_HALF > SECOND_HALF ? FIRST_HALF : SECOND_HALF;
constexpr int GAMMA = HALF * BLOCK, BETA = GAMMA + 4 * K, SLOT = GAMMA + 1024;
constexpr int STAGED = SLOTS * SLOT;              // a block a warpgroup, for what leaves
constexpr int PHASES = STAGED + GROUPS * BLOCK;  // of each slot: filled, emptied

// A unit as `plan` has it: a sequence or a segment of one.
struct Unit {
    i64 first;
    int count;
    i64 token, end;
    int begins, ends;
    // Of a chunk without tokens, in tables with room for others: no sequence's, and no state enters or leaves it.
    __device__ __forceinline__ bool of_nobody() const { return begins < 0 && token >= end; }
};

// A block's part of the work: a unit of a head, of which the blocks of `columns` follow each other in the grid.
struct Part {
    Unit unit;
    int heads, head, block;
    // The place of the unit's chunk n, of this head, in what `prepare` wrote.
    __device__ __forceinline__ i64 tile(int n) const { return (unit.first + n) * heads + head; }
    __device__ __forceinline__ i64 token(int n) const { return unit.token + CHUNK * n; }
    // How many of its rows are tokens.
    __device__ __forceinline__ int rows(int n) const {
        const i64 left = unit.end - token(n);
        return left < CHUNK ? (int)left : CHUNK;
    }
};
DEVICE Part part_of(const int* units, int heads, int columns) {
    const int* const u = units + 6 * blockIdx.y;
    const u32 blocks = columns / COLUMNS;
    return {{u[0], u[1], u[2], u[3], u[4], u[5]}, heads, (int)(blockIdx.x / blocks), (int)(blockIdx.x % blocks)};
}

// Where a thread stands: its warpgroup, its warp in it, its rows' first value channel of the block's.
struct Place {
    int group, warp, lane, row;
    int transposed;  // byte of a block where this lane finds its row of a warp's matrices: tokens 0 .. 15, the warp's channels
};
DEVICE Place place_of(int thread) {
    const int number = uniform(thread >> 5), lane = thread & 31, warp = number & 3;
    return {number >> 2, warp, lane, 16 * number + (lane >> 2), in_block((lane & 7) + 8 * (lane >> 4), 2 * warp + (lane >> 3 & 1))};
}

// The ring as one thread sees it: the slot that is next, and whether it was in use an odd number of times before.
struct Ring {
    u8* memory;
    int slot, turn;
    __device__ __forceinline__ u64* filled() const { return (u64*)(memory + PHASES) + 2 * slot; }
    __device__ __forceinline__ u64* emptied() const { return filled() + 1; }
    __device__ __forceinline__ u8* at() const { return memory + slot * SLOT; }
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, turn ^= 1;
    }
    // Computing: the next half, once it is there; and that this warp needs it no more.
    __device__ __forceinline__ const u8* take() const {
        phase_wait(filled(), turn);
        publish_operands();
        return at();
    }
    __device__ __forceinline__ void give(int lane) {
        sync_warp();
        if (lane == 0) phase_arrive(emptied());
        next();
    }
    __device__ __forceinline__ Ring following() const {
        Ring r = *this;
        r.next();
        return r;
    }
    // Fetching: the next place, once everybody is done with what it held; and that what was asked for belongs there.
    __device__ __forceinline__ u8* place() const {
        phase_wait(emptied(), turn ^ 1);
        return at();
    }
    __device__ __forceinline__ void fill() {
        phase_arrive_by_copies(filled());
        next();
    }
};
DEVICE Ring begin_ring(u8* memory) {
    if (threadIdx.x < SLOTS) {
        u64* const phases = (u64*)(memory + PHASES) + 2 * threadIdx.x;
        phase_begin(phases, FETCHING);
        phase_begin(phases + 1, COMPUTING / 32);
    }
    sync_threads();
    return {memory, 0, 0};
}
// A thread may not end with copies under way.
DEVICE void copies_end() {
    copy_commit();
    copy_wait<0>();
}
DEVICE bool fetches() { return threadIdx.x >= COMPUTING; }
// The registers of a block in which two warpgroups compute are too few to be shared out evenly.
DEVICE void as_fetching() {
    if (GROUPS == 2) registers_give<40>();
}
DEVICE void as_computing() {
    if (GROUPS == 2) registers_take<232>();
}

// Ask for 64 rows of 8 PIECES numbers, as blocks; rows from `count` on become 0.
template <int PIECES> DEVICE void fetch(u8* blocks, const bf16* rows, i64 stride, int count) {
    constexpr int TOGETHER = FETCHING / PIECES;
    const int own = threadIdx.x - COMPUTING, first = own / PIECES, piece = own % PIECES;
    u8* const to = blocks + piece / 8 * BLOCK + in_block(first, piece % 8);
    rows += first * stride + 8 * piece;
#pragma unroll
    for (int n = 0; n < CHUNK / TOGETHER; n++) {
        copy_async(to + n * TOGETHER * 128, rows, first + n * TOGETHER < count);
        rows += TOGETHER * stride;
    }
}
// Ask for a tile of `prepare`, chunk and head `at`: of key channels, or a square.
DEVICE void fetch_wide(u8* blocks, const bf16* x, i64 at) { fetch<8 * WIDE>(blocks, x + at * (CHUNK * K), K, CHUNK); }
// Of a square, which is lower, what is above the blocks of 16 on its diagonal is not read.
DEVICE void fetch_square(u8* block, const bf16* x, i64 at) {
    const int own = threadIdx.x - COMPUTING, first = own / 8, piece = own % 8;
    x += at * (CHUNK * CHUNK) + own * 8;
#pragma unroll
    for (int n = 0; n < CHUNK / 16; n++) copy_async(block + in_block(first + 16 * n, piece), x + n * (16 * CHUNK), piece / 2 <= n);
}
DEVICE void fetch_gamma(u8* slot, const float* gamma, i64 at) {
    const int piece = threadIdx.x - COMPUTING;
    if (piece < K / 4) copy_async(slot + GAMMA + 16 * piece, gamma + at * K + 4 * piece);
}
DEVICE void fetch_beta(u8* slot, const float* beta, i64 at) {
    const int piece = threadIdx.x - COMPUTING;
    if (piece < CHUNK / 4) copy_async(slot + BETA + 16 * piece, beta + at * CHUNK + 4 * piece);
}

// The result of a product, columns 16 s .. 16 s + 15, as a left operand.
template <int N> DEVICE void round_to(u32 (&a)[4], const float (&d)[N], int s) {
#pragma unroll
    for (int e = 0; e < 4; e++) a[e] = pack(d[8 * s + 2 * e], d[8 * s + 2 * e + 1]);
}
// What rounding took from these columns.
template <int N> DEVICE void less(float (&d)[N], const u32 (&a)[4], int s) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        d[8 * s + 2 * e] -= low_half(a[e]);
        d[8 * s + 2 * e + 1] -= high_half(a[e]);
    }
}

// d = left x^T for a tile x of key channels. Call `products_begin` before it.
DEVICE void times_wide(float (&d)[32], const u32 (&left)[K / 16][4], const u8* blocks) {
    const u64 x = operand(blocks);
#pragma unroll
    for (int s = 0; s < K / 16; s++) warpgroup_multiply<false>(d, left[s], further(x, s / 4 * BLOCK + s % 4 * 32), s > 0);
}
// d = left x^T for a square x, or d += .
DEVICE void times_square(float (&d)[32], const u32 (&left)[4][4], const u8* block, bool add) {
    const u64 x = operand(block);
#pragma unroll
    for (int s = 0; s < 4; s++) warpgroup_multiply<false>(d, left[s], further(x, 32 * s), add || s > 0);
}
// d = left x for x of 64 rows, d's columns wide; or d += .
template <int N> DEVICE void times_rows(float (&d)[N], const u32 (&left)[4][4], const u8* blocks, bool add) {
    const u64 x = operand(blocks, BLOCK);
#pragma unroll
    for (int s = 0; s < 4; s++) warpgroup_multiply<true>(d, left[s], further(x, 2048 * s), add || s > 0);
}
template <int N> DEVICE void held(u32 (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) held(a[n]);
}

// This warpgroup's 64 rows of values out of a first half, transposed, as a left operand.
DEVICE void read_values(u32 (&v)[4], const u8* slot, const Place& p, int s) {
    load_matrices_transposed(v, slot + (V_AT + p.group) * BLOCK + p.transposed + s * (16 * 128));
}

// beta of this thread's two tokens of eight.
DEVICE float2 beta_of(const u8* slot, int first, int lane) { return *(const float2*)(slot + BETA + 4 * first + 8 * (lane & 3)); }

// U^T = (V^T - S^T Kd^T) diag(beta) A^T, rounded, `slot` being a first half; without `values` V = 0. `work` is done while the
// first product is under way, `then` while the second is.
template <class Work, class Then>
DEVICE void find_writes(u32 (&u)[4][4], u32 (&s)[K / 16][4], const u8* slot, const Place& p, bool values, Work work, Then then) {
    float d[32];
    products_begin();
    times_wide(d, s, slot);
    products_commit();
    work();
    u32 v[4][4] = {};
    if (values)
#pragma unroll
        for (int n = 0; n < 4; n++) read_values(v[n], slot, p, n);
    products_wait<0>();
    held(s);
    u32 r[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 b = beta_of(slot, 16 * n + 8 * (e >> 1), p.lane);
            r[n][e] = pack(b.x * (low_half(v[n][e]) - d[8 * n + 2 * e]), b.y * (high_half(v[n][e]) - d[8 * n + 2 * e + 1]));
        }
    }
    products_begin();
    times_square(d, r, slot + SQUARE_AT * BLOCK, false);
    products_commit();
    then();
    products_wait<0>();
    held(r);
#pragma unroll
    for (int n = 0; n < 4; n++) round_to(u[n], d, n);
}

// S^T = gamma S^T, `slot` being a second half.
DEVICE void decay(float (&state)[K / 2], const u8* slot, int lane) {
    const float* const gamma = (const float*)(slot + GAMMA) + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < K / 8; j++) {
        const float2 g = *(const float2*)(gamma + 8 * j);
        state[4 * j] *= g.x;
        state[4 * j + 1] *= g.y;
        state[4 * j + 2] *= g.x;
        state[4 * j + 3] *= g.y;
    }
}
// A thread's element j of a state: its channel, and how many rows below the thread's it is.
DEVICE int channel_of(int j, int lane) { return j / 4 * 8 + 2 * (lane & 3) + (j & 1); }
DEVICE int row_of(int j) { return 8 * (j >> 1 & 1); }

// A state in float from or to memory, by strides; `own` is the thread's first row.
DEVICE void read_state(float (&state)[K / 2], const float* own, i64 row, i64 channel, int lane) {
#pragma unroll
    for (int j = 0; j < K / 2; j++) state[j] = own[row_of(j) * row + channel_of(j, lane) * channel];
}
DEVICE void write_state(const float (&state)[K / 2], float* own, i64 row, i64 channel, int lane) {
#pragma unroll
    for (int j = 0; j < K / 2; j++) own[row_of(j) * row + channel_of(j, lane) * channel] = state[j];
}
// The same to rows of K that follow each other.
DEVICE void write_state(const float (&state)[K / 2], float* own, int lane) {
#pragma unroll
    for (int j = 0; j < K / 2; j += 2) *(float2*)(own + row_of(j) * K + channel_of(j, lane)) = make_float2(state[j], state[j + 1]);
}
DEVICE void clear(float (&state)[K / 2]) {
#pragma unroll
    for (int j = 0; j < K / 2; j++) state[j] = 0.0f;
}
