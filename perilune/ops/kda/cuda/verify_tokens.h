// What verify.cu's tokens have to do with each other, whatever the state: numbers of one head.
#pragma once
#include "verify_layout.h"

// Where w(p + 1, 8) has column c: as the product with it reads them, a float4 a lane for 16 columns, at places free of
// bank conflicts both ways.
DEVICE int folded_at(int p, int c) {
    const int t = p >> 1, piece = c >> 4, i = c >> 2 & 3, g = 2 * i + (c & 1);
    return ((8 * piece + (g ^ (piece & 1))) * 4 + (t ^ i)) * 4 + 2 * (p & 1) + (c >> 1 & 1);
}

// warp: w of places 2 `pair` and the next, on their way to later ones, and what they have in common with their k and q; half
// of the warp each, where a lane has four of every 64 columns. What `common` has of a place and of itself, or of those before it,
// nobody reads: o of itself excepted.
DEVICE void compare(Shared& shared, int pair, float unit, int empty, int lane) {
    const int column = lane & 15, place = 2 * pair + (lane >> 4), begin = 2 * pair + 1 < empty ? PLACES : 2 * pair;
    const float by = shuffle(unit, place);
    float w[PARTS][4], sums[2][16];
    auto load = [&](float (&x)[PARTS][4], const float* row) {
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            const float4 four = *(const float4*)(row + 64 * n + 4 * column);
            x[n][0] = four.x, x[n][1] = four.y, x[n][2] = four.z, x[n][3] = four.w;
        }
    };
    load(w, shared.rows[place]);
#pragma unroll
    for (int n = 0; n < 32; n++) sums[n / 16][n % 16] = 0.0f;
#pragma unroll
    for (int t = 0; t < PLACES; t++) {
        if (t == FOLDED && empty < FOLDED && place < FOLDED)
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int c = 64 * n + 4 * column + i;
                    (place ? shared.folded[folded_at(place - 1, c)] : shared.first[c]) = by * w[n][i];
                }
        if (t < begin) continue;
        float x[PARTS][4];
        auto add = [&](float& sum) {
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sum = fmaf(w[n][i], x[n][i], sum);
        };
        if (t > begin) {
            load(x, shared.alpha[t]);
            if (t % 2 && t == begin + 1 && lane >= 16)  // where the second place begins
#pragma unroll
                for (int n = 0; n < PARTS; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 1.0f;
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) w[n][i] *= x[n][i];
            load(x, shared.rows[t]);
            add(sums[t / 16][t % 16]);
        }
        if (t >= FOLDED) {
            load(x, shared.rows[FOLDED + t]);
            add(sums[(FOLDED + t) / 16][(FOLDED + t) % 16]);
        }
    }
    if (begin == PLACES) return;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        fold<8, 8>(sums[n], lane);
        const float common = sums[n][0] * by * shuffle(unit, 16 * n + column);
        shared.common[place][16 * n + column] = 16 * n + column == BETA ? shared.beta[place] : common;
    }
}

// warp: how writes u and outputs o follow from the places' x = v - S_0 D k alone. A lane has the recurrence
//     u_s = beta_s x_s,   x_t -= u_s common(s, t),   o_t += u_s common(s, PLACES + t)
// begin at 1 for one x and 0 for all else. `answers` has u of places 1 .. 8, a row that nobody reads, and o; of x of places
// 1 .. 16, of place 0 and of place 17.
DEVICE void answer(Shared& shared, int empty, int lane) {
    const int mine = lane < 16 ? lane + 1 : lane == 16 ? 0 : lane == 17 ? 17 : PLACES;
    float x[PLACES], o[SCORED];
    auto tell = [&](int row, float number) {
        if (lane < 18) shared.answers[row][lane] = number;
    };
#pragma unroll
    for (int t = 0; t < PLACES; t++) x[t] = t == mine ? 1.0f : 0.0f;
#pragma unroll
    for (int t = 0; t < SCORED; t++) o[t] = 0.0f;
    float common[2][32];  // of this step, and of the next one, whose way is long
    auto load = [&](int s) {
#pragma unroll
        for (int n = (s + 1) / 4 * 4; n < 28; n += 4) {
            const float4 four = *(const float4*)(shared.common[s] + n);
            float* const to = common[s % 2] + n;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    };
    load(0);
#pragma unroll
    for (int s = 0; s < PLACES; s++) {
        if (s + 1 < PLACES) load(s + 1);
        if (s < empty) {
            if (s > 0 && s < FOLDED) tell(s - 1, 0.0f);
            continue;
        }
        const float* const by = common[s % 2];
        const float write = by[BETA] * x[s];
        if (s > 0 && s < FOLDED) tell(s - 1, write);
#pragma unroll
        for (int t = s + 1; t < PLACES; t++) x[t] = fmaf(-by[t], write, x[t]);
#pragma unroll
        for (int t = s < FOLDED ? 0 : s - FOLDED; t < SCORED; t++) o[t] = fmaf(by[PLACES + t], write, o[t]);
    }
    tell(8, 0.0f);
#pragma unroll
    for (int t = 0; t < SCORED; t++) tell(9 + t, o[t]);
}

// D into the rows, which are normalized with it; one column.
DEVICE void let_decay(Shared& shared, int empty, int c) {
    float left = 1.0f, unit[32];
#pragma unroll
    for (int n = 0; n < LISTED; n += 4) {
        const float4 four = *(const float4*)(shared.unit + n);
        unit[n] = four.x, unit[n + 1] = four.y, unit[n + 2] = four.z, unit[n + 3] = four.w;
    }
#pragma unroll
    for (int t = 0; t < PLACES; t++) {
        if (t == FOLDED) shared.left[c] = left;
        if (t < FOLDED && empty == FOLDED) continue;
        left *= shared.alpha[t][c];
        shared.rows[t][c] *= left * unit[t];
        if (t >= FOLDED) shared.rows[FOLDED + t][c] *= left * unit[FOLDED + t];
    }
}
