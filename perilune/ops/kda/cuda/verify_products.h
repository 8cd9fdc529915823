// The state's part in verify.cu, by tensor cores: what it says to all tokens, and the folding of some into it.
//
// A warp has 16 rows of the state. In a product of 16 rows, row i stands for row 2 i of the warp, and i + 8 for 2 i + 1; of 16
// columns a lane has the four that follow column 4 t (i, t: lane / 4, lane % 4), which are counted so that what one product
// leaves in a lane is what the next one wants there. `mask`: see `high_part`.
#pragma once
#include "verify_layout.h"

// Operands of one product in two parts. The higher one is cut off, or the NEAREST: what is small beside the state may be cut, but
// of what is written nothing that has always the same sign may be missing.
template <bool NEAREST> DEVICE void split(float x, u32& high, u32& low, u32 mask) {
    high = NEAREST ? nearest_part(x, mask) : high_part(x, mask);
    low = low_part(x, high);
}
struct Left {
    u32 high[4], low[4];
};
template <bool NEAREST> DEVICE void split(Left& a, float row, float below, float next, float next_below, u32 mask) {
    const float x[4] = {row, below, next, next_below};
#pragma unroll
    for (int e = 0; e < 4; e++) split<NEAREST>(x[e], a.high[e], a.low[e], mask);
}
struct Right {
    u32 high[2], low[2];
};
template <bool NEAREST> DEVICE void split(Right& b, float x, float y, u32 mask) {
    split<NEAREST>(x, b.high[0], b.low[0], mask);
    split<NEAREST>(y, b.high[1], b.low[1], mask);
}
// A product's result as the next one's operand: columns 2 t and 2 t + 1 are counted as t and t + 4.
DEVICE void split(Left& a, const float (&x)[4], u32 mask) { split<true>(a, x[0], x[2], x[1], x[3], mask); }

DEVICE void add_small(float (&d)[4], const Left& a, const Right& b) {
    multiply_add_tf32(d, a.high, b.low[0], b.low[1]);
    multiply_add_tf32(d, a.low, b.high[0], b.high[1]);
}
DEVICE void add_large(float (&d)[4], const Left& a, const Right& b) { multiply_add_tf32(d, a.high, b.high[0], b.high[1]); }
DEVICE void add_product(float (&d)[4], const Left& a, const Right& b) {
    add_small(d, a, b);
    add_large(d, a, b);
}

// Where a lane's four numbers of row 2 i and of columns 16 piece .. lie in the state, for an even piece and the odd one behind it;
// those of row 2 i + 1 K further on, those of the next two pieces 32.
DEVICE int state_at(int odd, int warp, int lane) {
    const int i = lane >> 2, t = lane & 3;
    return (16 * warp + 2 * i) * K + 16 * (odd ^ (i & 1)) + 4 * t;
}

// S_0 times rows (which have their D) 1 .. 17 | q of the scored | 0, in blocks of 8 columns. The products of 16 columns are
// added to the others as floats are, since the tensor cores cut off what does not fit. Without FOLDS the first block stays zero.
template <bool FOLDS> DEVICE void meet(float (&z)[4][4], const Shared& shared, int warp, int lane, u32 mask) {
    const int i = lane >> 2, t = lane & 3;
    const float* row = shared.rows[1 + i] + 4 * t;
    const float* last = shared.rows[i < 2 ? 25 + i : 0] + 4 * t;
    const float* from[2] = {shared.state + state_at(0, warp, lane), shared.state + state_at(1, warp, lane)};
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) z[n][e] = 0.0f;
#pragma unroll 1
    for (int piece = 0; piece < PIECES; piece += 2, row += 32, last += 32, from[0] += 32, from[1] += 32)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const float4 x = *(const float4*)from[odd], y = *(const float4*)(from[odd] + K);
            Left a[2];
            split<false>(a[0], x.x, y.x, x.y, y.y, mask);
            split<false>(a[1], x.z, y.z, x.w, y.w, mask);
#pragma unroll
            for (int n = FOLDS ? 0 : 1; n < 4; n++) {
                const float4 four = *(const float4*)((n < 3 ? row + 8 * n * ROW : last) + 16 * odd);
                Right b[2];
                split<false>(b[0], four.x, four.y, mask);
                split<false>(b[1], four.z, four.w, mask);
                float d[4] = {};
                add_small(d, a[0], b[0]);
                add_small(d, a[1], b[1]);
                add_large(d, a[0], b[0]);
                add_large(d, a[1], b[1]);
#pragma unroll
                for (int e = 0; e < 4; e++) z[n][e] += d[e];
            }
        }
}

// What places write, and outputs: o of a lane's rows 2 i and 2 i + 1, of the scored tokens `token_of`.
struct Answers {
    float u[4], first[2];  // of places 1 .. 8 as a product's result; of place 0
    float o[3][2];
};
DEVICE int token_of(int n, int t) { return n == 2 ? t ? SCORED : 8 : n == 1 ? 2 * t : t ? 2 * t - 1 : 7; }

// What is not finite at a scored place is to be seen from there on, and not in outputs before it, whose products with it are with 0.
DEVICE void keep_behind(float (&x)[4], float (&o)[2][4], int t) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float from = SCORED;  // the first token for which that holds
#pragma unroll
        for (int e = 1; e >= 0; e--)
            if (0.0f * x[2 * h + e] != 0.0f) from = 2 * t + e, x[2 * h + e] = 0.0f;
        from = fminf(from, shuffle_xor(from, 1));
        from = fminf(from, shuffle_xor(from, 2));
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (2 * t - 1 + e >= from) o[0][2 * h + e] = from_bits(0x7fffffffu);
            if (7 + e >= from) o[1][2 * h + e] = from_bits(0x7fffffffu);
        }
    }
}

DEVICE void follow(Answers& y, const float (&z)[4][4], const Shared& shared, int empty, int warp, int lane, u32 mask) {
    const int i = lane >> 2, t = lane & 3;
    const float* const v = shared.v[0] + 16 * warp + 2 * i;
    const float* const row = shared.answers[i] + 2 * t;
    const float* const last = shared.answers[i ? 17 : 16] + 2 * t;
    auto minus = [&](const float (&z)[4], int p, float (&x)[4]) {
        const float2 one = *(const float2*)(v + p * VALUES), next = *(const float2*)(v + (p + 1) * VALUES);
        x[0] = one.x - z[0], x[1] = next.x - z[1], x[2] = one.y - z[2], x[3] = next.y - z[3];
    };
    auto add = [&](float (&d)[4], const Left& a, const float* b) {
        const float2 two = *(const float2*)b;
        Right right;
        split<true>(right, two.x, two.y, mask);
        add_product(d, a, right);
    };
    Left a;
    float x[4], o[2][4];
#pragma unroll
    for (int e = 0; e < 4; e++) y.u[e] = 0.0f, o[0][e] = z[2][e], o[1][e] = z[3][e];
    if (empty < FOLDED) {
        minus(z[0], 1 + 2 * t, x);
        split(a, x, mask);
        add(y.u, a, row);
        add(o[0], a, row + 8 * ANSWERS);
        add(o[1], a, last);
    }
    minus(z[1], 9 + 2 * t, x);
    float zero = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) zero = fmaf(0.0f, x[e], zero);
    if (any(zero != 0.0f)) keep_behind(x, o, t);
    split(a, x, mask);
    add(o[0], a, row + 8 * (ANSWERS + 1));
    add(o[1], a, last + 8);
    y.first[0] = y.first[1] = 0.0f;
    if (empty == 0)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = v[h] - shuffle(z[3][2 * h], 4 * i + 1);
            y.first[h] = shared.beta[0] * x;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                y.u[2 * h + e] = fmaf(x, shared.answers[2 * t + e][16], y.u[2 * h + e]);
                o[0][2 * h + e] = fmaf(x, shared.answers[8 + 2 * t + e][16], o[0][2 * h + e]);
                o[1][2 * h + e] = fmaf(x, shared.answers[16 + e][16], o[1][2 * h + e]);
            }
        }
#pragma unroll
    for (int h = 0; h < 2; h++) {  // place 17, whose x is where the last output is: at t = 0
        o[1][2 * h + 1] = fmaf(v[17 * VALUES + h] - z[2][2 * h], shared.answers[17][17], o[1][2 * h + 1]);
        y.o[0][h] = t ? o[0][2 * h] : o[1][2 * h];
        y.o[1][h] = o[0][2 * h + 1];
        y.o[2][h] = o[1][2 * h + 1];
    }
}

// The state behind the folded places: S_0 D_8 + u w(s, 8)^T.
DEVICE void fold_into(float* state, const Answers& y, const Shared& shared, int empty, int warp, int lane, u32 mask) {
    const int i = lane >> 2, t = lane & 3;
    Left a;
    split(a, y.u, mask);
    state += (16 * warp + 2 * i) * K + 4 * t;
    const float* from[2] = {shared.state + state_at(0, warp, lane), shared.state + state_at(1, warp, lane)};
    const float* const last = shared.folded + 4 * (t ^ (i >> 1));
    const float* written[2] = {last + 16 * i, last + 128 + 16 * (i ^ 1)};  // see `folded_at`
    const float* left = shared.left + 4 * t;
    const float* first = shared.first + 4 * t;
#pragma unroll 1
    for (int piece = 0; piece < PIECES; piece += 2, state += 32, left += 32, first += 32) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const float4 w = *(const float4*)written[odd], by = *(const float4*)(left + 16 * odd);
            float d[2][4] = {};
            Right b;
            split<true>(b, w.x, w.z, mask);
            add_product(d[0], a, b);
            split<true>(b, w.y, w.w, mask);
            add_product(d[1], a, b);
            if (empty == 0) {
                const float4 w = *(const float4*)(first + 16 * odd);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    d[0][2 * h] = fmaf(y.first[h], w.x, d[0][2 * h]), d[0][2 * h + 1] = fmaf(y.first[h], w.y, d[0][2 * h + 1]);
                    d[1][2 * h] = fmaf(y.first[h], w.z, d[1][2 * h]), d[1][2 * h + 1] = fmaf(y.first[h], w.w, d[1][2 * h + 1]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4 old = *(const float4*)(from[odd] + h * K);
                *(float4*)(state + h * K + 16 * odd) = make_float4(
                    fmaf(old.x, by.x, d[0][2 * h]), fmaf(old.y, by.y, d[0][2 * h + 1]),
                    fmaf(old.z, by.z, d[1][2 * h]), fmaf(old.w, by.w, d[1][2 * h + 1]));
            }
            from[odd] += 32, written[odd] += 256;
        }
    }
}
