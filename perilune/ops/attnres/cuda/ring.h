// Rows on their way through shared memory, and sums over a block's threads.
//
// A block walks over tokens and reads the same ITEMS rows of each, in the same order. A thread owns the same VECTORS pieces
// of 16 bytes of every row: it copies exactly the pieces that it will use itself, so their arrival and the reuse of their
// place need no barrier. The ring has RING places, more than a token has rows: each place is filled again as soon as the
// row in it has been used for the last time.
//
// Macros: WIDTH (numbers of a row, a multiple of 8), THREADS, VECTORS, ITEMS, RING.
#pragma once

constexpr int WARPS = THREADS / 32, NUMBERS = 8 * VECTORS;

// Tables of rows as parameters of a kernel. (The emulator's loader takes types of one name for one type: so the size is in it.)
template <int COUNT> struct Sources {
    const bf16* rows[COUNT];
    i64 stride[COUNT];
};
template <int COUNT> struct Gradients {
    bf16* rows[COUNT];
};

// copy_wait for a number that is constant once loops are unrolled.
template <int MOST = RING> DEVICE void wait_for_all_but(int pending) {
    if (pending == MOST) copy_wait<MOST>();
    else if constexpr (MOST > 0) wait_for_all_but<MOST - 1>(pending);
}

// The first number of a thread's piece; pieces of neighbours lie side by side.
DEVICE int piece_at(int vector) { return 8 * ((int)threadIdx.x + vector * THREADS); }
DEVICE bool piece_inside(int vector) { return (vector + 1) * THREADS * 8 <= WIDTH || piece_at(vector) < WIDTH; }

DEVICE void widen(float (&x)[8], uint4 v) {
    x[0] = low_half(v.x), x[1] = high_half(v.x), x[2] = low_half(v.y), x[3] = high_half(v.y);
    x[4] = low_half(v.z), x[5] = high_half(v.z), x[6] = low_half(v.w), x[7] = high_half(v.w);
}
DEVICE uint4 narrow(const float* x) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// This thread's pieces of a row of floats; zeros beyond its end. Rows start at multiples of 16 bytes.
DEVICE void load_floats(float (&x)[NUMBERS], const float* row) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int h = 0; h < 8; h += 4) {
            float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (piece_inside(v)) f = *(const float4*)(row + piece_at(v) + h);
            x[8 * v + h] = f.x, x[8 * v + h + 1] = f.y, x[8 * v + h + 2] = f.z, x[8 * v + h + 3] = f.w;
        }
}
DEVICE void store_floats(float* row, const float (&x)[NUMBERS]) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (piece_inside(v)) {
            *(float4*)(row + piece_at(v)) = make_float4(x[8 * v], x[8 * v + 1], x[8 * v + 2], x[8 * v + 3]);
            *(float4*)(row + piece_at(v) + 4) = make_float4(x[8 * v + 4], x[8 * v + 5], x[8 * v + 6], x[8 * v + 7]);
        }
}
DEVICE void store_row(bf16* row, const float (&x)[NUMBERS]) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (piece_inside(v)) store_once(row + piece_at(v), narrow(x + 8 * v));
}

struct Ring {
    uint4* places;  // [RING][VECTORS][THREADS]
    int head;       // the place of the current token's first row

    __device__ __forceinline__ uint4* at(int item, int vector) const {
        int place = head + item;
        if (place >= RING) place -= RING;
        return places + (place * VECTORS + vector) * THREADS + (int)threadIdx.x;
    }
    // This thread's numbers of a row that has arrived.
    __device__ __forceinline__ void read(float (&x)[NUMBERS], int item) const {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) widen(*(float (*)[8])(x + 8 * v), *at(item, v));
    }
    // Start the copy of a row (null: only count it) to the place of `item`, whose row will not be read again.
    __device__ __forceinline__ void fill(int item, const bf16* row) {
        if (row)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) copy_async(at(item, v), row + piece_at(v), piece_inside(v));
        copy_commit();
    }
    __device__ __forceinline__ void advance() {
        head += ITEMS % RING;
        if (head >= RING) head -= RING;
    }
};

// Sums over a warp of COUNT numbers, at most 32, together: each step halves what a lane still sums.
template <int COUNT, int MASK = 16, int SIZE> DEVICE void fold(float (&x)[SIZE], int lane) {
    if constexpr (MASK > 0) {
        constexpr int HALF = (COUNT + 1) / 2;
        if constexpr (COUNT > 1) {
            const bool upper = lane & MASK;
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const float other = i + HALF < COUNT ? x[i + HALF] : 0.0f;
                const float keep = upper ? other : x[i], give = upper ? x[i] : other;
                x[i] = keep + shuffle_xor(give, MASK);
            }
        } else {
            x[0] += shuffle_xor(x[0], MASK);
        }
        fold<HALF, MASK / 2>(x, lane);
    }
}
// Which of the COUNT sums a lane ends with; -1: none, another lane has it too or it does not exist.
template <int COUNT> DEVICE int folded(int lane) {
    int count = COUNT, most = COUNT, index = 0;
    for (int mask = 16; mask; mask /= 2) {
        const int half = (most + 1) / 2;
        if (most > 1 && lane & mask) index += half, count -= half;
        else if (most > 1) count = count < half ? count : half;
        else if (lane & mask) count = 0;
        most = half;
    }
    return count > 0 ? index : -1;
}

// Sums over the block of COUNT numbers of each thread: lane i of every warp gets the i-th. `scratch`: WARPS * COUNT floats
// that no thread still reads; one barrier.
template <int COUNT> DEVICE float block_sums(float (&x)[COUNT], float* scratch, int lane, int mine) {
    fold<COUNT>(x, lane);
    if (mine >= 0) scratch[(int)threadIdx.x / 32 * COUNT + mine] = x[0];
    sync_threads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += scratch[w * COUNT + (lane < COUNT ? lane : 0)];
    return total;
}

DEVICE float warp_total(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
DEVICE float warp_largest(float x) {  // NaN if there is one
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        const float other = shuffle_xor(x, mask);
        x = other > x || other != other ? other : x;
    }
    return x;
}
