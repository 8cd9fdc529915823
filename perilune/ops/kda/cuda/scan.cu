// The serial part of the forward pass: walk the chunks of a unit (a sequence or a segment of one) with the state.
//
//     R = beta (V - Kd S)      U = A R      O = Qd S + P U      S' = gamma S + Kr^T U
//
// A block a unit, head and 64 GROUPS value channels; the state stays in registers, float. See scan_tiles.h.
//
// KEEP: U and the state that enters each chunk are kept for the backward pass.
#include "scan_leave.h"

// v [tokens, heads, V] by strides; Qd, Kd, Kr [chunks, heads, 64, K], P, A [chunks, heads, 64, 64], gamma [chunks, heads, K],
// beta [chunks, heads, 64]; units: see `plan`. state_in, state_out by strides: state_in null or with a row a unit if split, else a row a sequence;
// state_out null or with a row a sequence. o [tokens, heads, V]. KEEP: U [chunks, heads, 64, V], S [chunks, heads, V, K].
// slots null, or the place in exported [slots, heads, V, K] of the state behind each chunk, or -1.
KERNEL(THREADS, 1)
scan(
    const bf16* __restrict__ v, const bf16* __restrict__ Qd, const bf16* __restrict__ Kd, const bf16* __restrict__ Kr,
    const bf16* __restrict__ P, const bf16* __restrict__ A, const float* __restrict__ gamma, const float* __restrict__ beta,
    const int* units,
    const float* state_in, float* __restrict__ state_out, bf16* __restrict__ o, bf16* __restrict__ U,
    bf16* __restrict__ S, const int* slots, float* __restrict__ exported,
    i64 v_token, i64 v_head, i64 in_unit, i64 in_head, i64 in_v, i64 in_k, i64 out_unit, i64 out_head, i64 out_v, i64 out_k,
    int heads, int value_dim, int split) {
    SHARED(memory);
    Ring ring = begin_ring(memory);
    wait_for_earlier();
    let_next_start();
    const Part part = part_of(units, heads, value_dim);
    const Unit& unit = part.unit;
    const int head = part.head, column = part.block * COLUMNS;

    if (fetches()) {
        as_fetching();
        const bf16* const v_own = v + head * v_head + column;
#pragma unroll 1
        for (int n = 0; n < unit.count; n++) {
            const i64 at = part.tile(n);
            u8* to = ring.place();
            fetch_wide(to, Kd, at);
            fetch<8 * GROUPS>(to + V_AT * BLOCK, v_own + part.token(n) * v_token, v_token, part.rows(n));
            fetch_square(to + SQUARE_AT * BLOCK, A, at);
            fetch_beta(to, beta, at);
            ring.fill();
            to = ring.place();
            fetch_wide(to, Kr, at);
            fetch_wide(to + OTHER_AT * BLOCK, Qd, at);
            fetch_square(to + OTHER_SQUARE_AT * BLOCK, P, at);
            fetch_gamma(to, gamma, at);
            ring.fill();
        }
        return copies_end();
    }

    as_computing();
    const Place p = place_of(threadIdx.x);
    u8* const staged = memory + STAGED + p.group * BLOCK;
    float state[K / 2];
    const i64 entry = split ? (i64)blockIdx.y : unit.begins;
    if (state_in && !unit.of_nobody())
        read_state(state, state_in + entry * in_unit + head * in_head + (column + p.row) * in_v, in_v, in_k, p.lane);
    else clear(state);
    u32 out[4][4] = {};
    auto leave_outputs = [&](int n) {
        bf16* const to = o + (part.token(n) * heads + head) * value_dim + column + 64 * p.group;
        leave(to, (i64)heads * value_dim, part.rows(n), out, staged, p);
    };

    const u8* half = unit.count > 0 ? ring.take() : memory;
#pragma unroll 1
    for (int n = 0; n < unit.count; n++) {
        u32 s[K / 16][4], u[4][4];
#pragma unroll
        for (int i = 0; i < K / 16; i++) round_to(s[i], state, i);
        const auto before = [&] {
            if (n > 0) leave_outputs(n - 1);
            if (KEEP) leave_state(S + (part.tile(n) * value_dim + column) * K, s, staged, p);
        };
        const u8* second;
        find_writes(u, s, half, p, true, before, [&] {
            second = ring.following().take();
            decay(state, second, p.lane);
        });
        ring.give(p.lane);

        half = second;
        float d[32];
        products_begin();
        times_rows(state, u, half, true);
        times_wide(d, s, half + OTHER_AT * BLOCK);
        times_square(d, u, half + OTHER_SQUARE_AT * BLOCK, true);
        products_commit();
        if (KEEP) leave(U + part.tile(n) * CHUNK * value_dim + column + 64 * p.group, value_dim, CHUNK, u, staged, p);
        if (n + 1 < unit.count) half = ring.following().take();
        products_wait<0>();
        held(state);
        held(d);
        held(s);
        held(u);
        ring.give(p.lane);
#pragma unroll
        for (int i = 0; i < 4; i++) round_to(out[i], d, i);
        if (slots) {
            const i64 place = slots[unit.first + n];
            if (place >= 0) write_state(state, exported + ((place * heads + head) * value_dim + column + p.row) * K, p.lane);
        }
    }
    if (unit.count > 0) leave_outputs(unit.count - 1);
    if (state_out && unit.ends >= 0)
        write_state(state, state_out + unit.ends * out_unit + head * out_head + (column + p.row) * out_v, out_v, out_k, p.lane);
}
