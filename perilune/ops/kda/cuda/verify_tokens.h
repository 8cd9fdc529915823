// What verify.cu's tokens have to do with each other, whatever the state: numbers of one head.
#pragma once
#include "verify_layout.h"

// Where w(p + 1, 8) has column c: as the product with it reads them, a float4 a lane for 16 columns, at places free of
// bank conflicts both ways.
DEVICE int folded_at(int p, int c) {
    const int t = p >> 1, piece = c >> 4, i = c >> 2 & 3, g = 2 * i + (c & 1);
    return ((8 * piece + (g ^ (piece & 1))) * 4 + (t ^ i)) * 4 + 2 * (p & 1) + (c >> 1 & 1);
}

// warp: w of two places, on its way to later ones, and what it has in common with their k and q. The pairs 0 .. 7 are equally long.
DEVICE void compare(Shared& shared, int pair, float unit, int empty, int lane) {
    const int place[2] = {pair < 8 ? 7 - pair : 16, pair < 8 ? 8 + pair : 17};
    float w[2][PER_LANE], sums[2][32];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) w[h][i] = place[h] >= empty ? shared.rows[place[h]][PER_LANE * lane + i] : 0.0f;
#pragma unroll
        for (int n = 0; n < 32; n++) sums[h][n] = 0.0f;
    }
    const int begins[2] = {place[0] >= empty ? place[0] : PLACES, place[1] >= empty ? place[1] : PLACES};
#pragma unroll
    for (int t = 0; t < PLACES; t++) {
        if (t == FOLDED && empty < FOLDED)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (place[h] >= FOLDED) continue;
                const float by = shuffle(unit, place[h]);
#pragma unroll
                for (int i = 0; i < PER_LANE; i++) {
                    const int c = PER_LANE * lane + i;
                    (place[h] ? shared.folded[folded_at(place[h] - 1, c)] : shared.first[c]) = by * w[h][i];
                }
            }
        if (t < begins[0] && t < begins[1]) continue;
        float alpha[PER_LANE], k[PER_LANE], q[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int c = PER_LANE * lane + i;
            alpha[i] = shared.alpha[t][c], k[i] = shared.rows[t][c];
            if (t >= FOLDED) q[i] = shared.rows[FOLDED + t][c];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (t < FOLDED && h || t < begins[h]) continue;
            if (t > begins[h])
#pragma unroll
                for (int i = 0; i < PER_LANE; i++) {
                    w[h][i] *= alpha[i];
                    sums[h][t] = fmaf(w[h][i], k[i], sums[h][t]);
                }
            if (t >= FOLDED)
#pragma unroll
                for (int i = 0; i < PER_LANE; i++) sums[h][FOLDED + t] = fmaf(w[h][i], q[i], sums[h][FOLDED + t]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (begins[h] == PLACES) continue;
        fold<16, 16>(sums[h], lane);
        shared.common[place[h]][lane] = sums[h][0] * unit * shuffle(unit, place[h]);
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
#pragma unroll
    for (int s = 0; s < PLACES; s++) {
        if (s < empty) {
            if (s > 0 && s < FOLDED) tell(s - 1, 0.0f);
            continue;
        }
        const float write = shared.beta[s] * x[s];
        if (s > 0 && s < FOLDED) tell(s - 1, write);
        float common[32];
#pragma unroll
        for (int n = s / 4 * 4; n < LISTED; n += 4) {
            const float4 four = *(const float4*)(shared.common[s] + n);
            common[n] = four.x, common[n + 1] = four.y, common[n + 2] = four.z, common[n + 3] = four.w;
        }
#pragma unroll
        for (int t = s + 1; t < PLACES; t++) x[t] = fmaf(-common[t], write, x[t]);
#pragma unroll
        for (int t = s < FOLDED ? 0 : s - FOLDED; t < SCORED; t++) o[t] = fmaf(common[PLACES + t], write, o[t]);
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
