// What a segment does to the state that enters it, S -> M S + N: see ops/kda/triton/segments.py, which folds these.
//
//     R = beta (V - Kd S)      U = A R      S' = gamma S + Kr^T U
//
// from S = 0 with the segment's values for N, from unit vectors without values for M. A block a unit, head and 64 GROUPS
// columns of N or of M. See scan_tiles.h.
#include "scan_tiles.h"

// Writes M^T [units, heads, K, K] and N^T [units, heads, V, K] of every unit but the last of its sequence. A sequence's first
// unit needs no M, its N starts from the sequence's own state (a row a sequence of state_in, which may be null).
KERNEL(THREADS, 1)
summary(
    const bf16* __restrict__ v, const bf16* __restrict__ Kd, const bf16* __restrict__ Kr, const bf16* __restrict__ A,
    const float* __restrict__ gamma, const float* __restrict__ beta, const int* units, const float* state_in, float* __restrict__ M,
    float* __restrict__ N, i64 v_token, i64 v_head, i64 in_unit, i64 in_head, i64 in_v, i64 in_k, int heads, int value_dim) {
    SHARED(memory);
    Ring ring = begin_ring(memory);
    wait_for_earlier();
    let_next_start();
    const Part part = part_of(units, heads, value_dim + K);
    const Unit& unit = part.unit;
    const int value_blocks = value_dim / COLUMNS, head = part.head;
    const bool values = part.block < value_blocks, first = unit.begins >= 0;
    if (unit.ends >= 0 || (first && !values) || unit.of_nobody()) return;  // nobody has no rows: v may have fewer than are fetched
    const int column = (values ? part.block : part.block - value_blocks) * COLUMNS;

    if (fetches()) {
        as_fetching();
        const bf16* const v_own = v + head * v_head + column;
#pragma unroll 1
        for (int n = 0; n < unit.count; n++) {
            const i64 at = part.tile(n);
            u8* to = ring.place();
            fetch_wide(to, Kd, at);
            if (values)  // of whole chunks: this is not a last unit
                fetch<8 * GROUPS>(to + V_AT * BLOCK, v_own + part.token(n) * v_token, v_token, CHUNK);
            fetch_square(to + SQUARE_AT * BLOCK, A, at);
            fetch_beta(to, beta, at);
            ring.fill();
            to = ring.place();
            fetch_wide(to, Kr, at);
            fetch_gamma(to, gamma, at);
            ring.fill();
        }
        return copies_end();
    }

    as_computing();
    const Place p = place_of(threadIdx.x);
    float state[K / 2];
    if (!values) {
#pragma unroll
        for (int j = 0; j < K / 2; j++) state[j] = channel_of(j, p.lane) == column + p.row + row_of(j) ? 1.0f : 0.0f;
    } else if (first && state_in) {
        read_state(state, state_in + unit.begins * in_unit + head * in_head + (column + p.row) * in_v, in_v, in_k, p.lane);
    } else {
        clear(state);
    }

    const u8* half = ring.take();
#pragma unroll 1
    for (int n = 0; n < unit.count; n++) {
        u32 s[K / 16][4], u[4][4];
#pragma unroll
        for (int i = 0; i < K / 16; i++) round_to(s[i], state, i);
        const u8* second;
        find_writes(u, s, half, p, values, [] {}, [&] {
            second = ring.following().take();
            decay(state, second, p.lane);
        });
        ring.give(p.lane);

        half = second;
        products_begin();
        times_rows(state, u, half, true);
        products_commit();
        if (n + 1 < unit.count) half = ring.following().take();
        products_wait<0>();
        held(state);
        held(u);
        ring.give(p.lane);
    }
    const i64 place = (i64)blockIdx.y * heads + head;
    write_state(state, values ? N + (place * value_dim + column + p.row) * K : M + (place * K + column + p.row) * K, p.lane);
}
