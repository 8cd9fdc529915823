// The serial part of the backward pass: walk the chunks of a unit in reverse with the cotangent of the state.
//
//     dU = P^T dO + Kr dS'      E = beta A^T dU      dS = gamma dS' + Qd^T dO - Kd^T E
//
// E is the gradient of V. A block a unit, head and 64 GROUPS value channels; see scan_tiles.h.
//
// SUMMARY: only what a unit adds to the cotangent of its entry state.
#include "scan_leave.h"

// dO [tokens, heads, V] by strides; Qd, Kd, Kr [chunks, heads, 64, K], P, A [chunks, heads, 64, 64], gamma [chunks, heads, K],
// beta [chunks, heads, 64];
// units: see `plan`. state_in by strides, the cotangent of the state that leaves: null or with a row a unit if split, else a row
// a sequence, of its last unit. E [tokens, heads, V]; dS [chunks, heads, V, K], of the state that leaves each chunk; state_out
// null or by strides, of a sequence's entry state; SUMMARY: a row a unit that does not begin a sequence, instead of all these.
KERNEL(THREADS, 1)
scan_backward(
    const bf16* __restrict__ dO, const bf16* __restrict__ Qd, const bf16* __restrict__ Kd, const bf16* __restrict__ Kr,
    const bf16* __restrict__ P, const bf16* __restrict__ A, const float* __restrict__ gamma, const float* __restrict__ beta,
    const int* units,
    const float* state_in, float* __restrict__ state_out, bf16* __restrict__ E, bf16* __restrict__ dS,
    i64 o_token, i64 o_head, i64 in_unit, i64 in_head, i64 in_v, i64 in_k, i64 out_unit, i64 out_head, i64 out_v, i64 out_k,
    int heads, int value_dim, int split) {
    SHARED(memory);
    Ring ring = begin_ring(memory);
    wait_for_earlier();
    let_next_start();
    const Part part = part_of(units, heads, value_dim);
    const Unit& unit = part.unit;
    const int head = part.head, column = part.block * COLUMNS;
    if (SUMMARY && unit.begins >= 0) return;

    if (fetches()) {
        as_fetching();
        const bf16* const o_own = dO + head * o_head + column;
#pragma unroll 1
        for (int n = unit.count - 1; n >= 0; n--) {
            const i64 at = part.tile(n);
            u8* to = ring.place();
            fetch_wide(to, Kr, at);
            fetch<8 * GROUPS>(to + V_AT * BLOCK, o_own + part.token(n) * o_token, o_token, part.rows(n));
            fetch_square(to + SQUARE_AT * BLOCK, P, at);
            ring.fill();
            to = ring.place();
            fetch_square(to + OTHER_SQUARE_AT * BLOCK, A, at);
            fetch_beta(to, beta, at);
            fetch_wide(to, Qd, at);
            fetch_wide(to + OTHER_AT * BLOCK, Kd, at);
            fetch_gamma(to, gamma, at);
            ring.fill();
        }
        return copies_end();
    }

    as_computing();
    const Place p = place_of(threadIdx.x);
    u8* const staged = memory + STAGED + p.group * BLOCK;
    float state[K / 2];
    const i64 entry = split ? (i64)blockIdx.y : unit.ends;
    if (state_in && entry >= 0 && !unit.of_nobody())
        read_state(state, state_in + entry * in_unit + head * in_head + (column + p.row) * in_v, in_v, in_k, p.lane);
    else
        clear(state);

    const u8* half = unit.count > 0 ? ring.take() : memory;
#pragma unroll 1
    for (int n = unit.count - 1; n >= 0; n--) {
        u32 s[K / 16][4], o[4][4], u[4][4], e[4][4];
#pragma unroll
        for (int i = 0; i < K / 16; i++) round_to(s[i], state, i);
        float d[32];
#pragma unroll
        for (int i = 0; i < 4; i++) read_values(o[i], half, p, i);
        products_begin();
        times_wide(d, s, half);
        times_rows(d, o, half + SQUARE_AT * BLOCK, true);
        products_commit();
        if (!SUMMARY) leave_state(dS + (part.tile(n) * value_dim + column) * K, s, staged, p);
        half = ring.following().take();
        products_wait<0>();
        held(s);
        held(o);
        held(d);
        ring.give(p.lane);
        // A's diagonal is 1 and not rounded: added to what rounding took away, A^T times the rest has dU there as it was found.
#pragma unroll
        for (int i = 0; i < 4; i++) {
            round_to(u[i], d, i);
            less(d, u[i], i);
        }

        products_begin();
        times_rows(d, u, half + OTHER_SQUARE_AT * BLOCK, true);
        products_commit();
        decay(state, half, p.lane);
        products_begin();
        times_rows(state, o, half, true);
        products_commit();
        products_wait<1>();
        held(u);
        held(d);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 b = beta_of(half, 16 * i + 8 * (j >> 1), p.lane);
                e[i][j] = pack(b.x * d[8 * i + 2 * j], b.y * d[8 * i + 2 * j + 1]);
                u[i][j] = e[i][j] ^ 0x80008000u;
            }
        products_begin();
        times_rows(state, u, half + OTHER_AT * BLOCK, true);
        products_commit();
        if (!SUMMARY) {
            bf16* const to = E + (part.token(n) * heads + head) * value_dim + column + 64 * p.group;
            leave(to, (i64)heads * value_dim, part.rows(n), e, staged, p);
        }
        if (n > 0) half = ring.following().take();
        products_wait<0>();
        held(state);
        held(o);
        held(u);
        ring.give(p.lane);
    }
    if (SUMMARY)
        write_state(state, state_out + (((i64)blockIdx.y * heads + head) * value_dim + column + p.row) * K, p.lane);
    else if (state_out && unit.begins >= 0)
        write_state(state, state_out + unit.begins * out_unit + head * out_head + (column + p.row) * out_v, out_v, out_k, p.lane);
}
