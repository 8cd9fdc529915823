/* Products of a few rows with a vector, for fp32 and bf16 rows; and the calling form of torch's sgemm.
 *
 * Rows always go in fours counted from row 0, with a remainder one by one, so a result depends on its row alone and not on
 * how threads divide the rows.
 */
#ifndef PERILUNE_MATVEC_H
#define PERILUNE_MATVEC_H

#include <stddef.h>
#include <stdlib.h>

#include "math.h"

#define PL_PLAIN(x) (x)

/* NAME: out[i] = <row i, x>.  NAME_add: y += sum of c[i] * row i.  Four rows, `step` elements apart, n elements each. */
#define PL_FOUR_ROWS(NAME, TYPE, LOAD)                                                                                   \
    static void NAME(const TYPE *restrict w, int64_t step, int64_t n, const float *restrict x, float *restrict out) {    \
        const TYPE *restrict w1 = w + step, *restrict w2 = w + 2 * step, *restrict w3 = w + 3 * step;                    \
        float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;                                                                \
        _Pragma("omp simd reduction(+ : s0, s1, s2, s3)") for (int64_t i = 0; i < n; i++) {                              \
            s0 += LOAD(w[i]) * x[i];                                                                                     \
            s1 += LOAD(w1[i]) * x[i];                                                                                    \
            s2 += LOAD(w2[i]) * x[i];                                                                                    \
            s3 += LOAD(w3[i]) * x[i];                                                                                    \
        }                                                                                                                \
        out[0] = s0, out[1] = s1, out[2] = s2, out[3] = s3;                                                              \
    }                                                                                                                    \
    static float NAME##_one(const TYPE *restrict w, int64_t n, const float *restrict x) {                                \
        float s = 0.0f;                                                                                                  \
        _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++) s += LOAD(w[i]) * x[i];                     \
        return s;                                                                                                        \
    }                                                                                                                    \
    PL_INLINE void NAME##_add(const TYPE *restrict w, int64_t step, int64_t rows, int64_t n, const float *restrict c,    \
                              float *restrict y) {                                                                       \
        int64_t row = 0;                                                                                                 \
        for (; row + 4 <= rows; row += 4) {                                                                              \
            const TYPE *restrict w0 = w + row * step, *restrict w1 = w0 + step, *restrict w2 = w1 + step;                \
            const TYPE *restrict w3 = w2 + step;                                                                         \
            float c0 = c[row], c1 = c[row + 1], c2 = c[row + 2], c3 = c[row + 3];                                        \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++)                                                          \
                y[i] += (c0 * LOAD(w0[i]) + c1 * LOAD(w1[i])) + (c2 * LOAD(w2[i]) + c3 * LOAD(w3[i]));                   \
        }                                                                                                                \
        for (; row < rows; row++) {                                                                                      \
            const TYPE *restrict w0 = w + row * step;                                                                    \
            float c0 = c[row];                                                                                           \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] += c0 * LOAD(w0[i]);                                \
        }                                                                                                                \
    }

PL_FOUR_ROWS(pl_dot_f32, float, PL_PLAIN)
PL_FOUR_ROWS(pl_dot_bf16, uint16_t, pl_from_bf16)

/* out[first..last) = W x for rows of n elements, `step` apart; `first` is a multiple of 4. */
PL_INLINE void pl_matvec(const void *w, int64_t step, int64_t first, int64_t last, int64_t n, const float *x, float *out,
                         int half) {
    const uint16_t *b = w;
    const float *f = w;
    for (int64_t row = first; row < last; row += 4) {
        if (row + 4 <= last) {
            if (half) pl_dot_bf16(b + row * step, step, n, x, out + row);
            else pl_dot_f32(f + row * step, step, n, x, out + row);
            continue;
        }
        for (int64_t r = row; r < last; r++)
            out[r] = half ? pl_dot_bf16_one(b + r * step, n, x) : pl_dot_f32_one(f + r * step, n, x);
    }
}

/* y[0..n) += c W for W [rows, n], rows `step` apart. */
PL_INLINE void pl_vecmat_add(const void *w, int64_t step, int64_t rows, int64_t n, const float *c, float *y, int half) {
    if (half) pl_dot_bf16_add(w, step, rows, n, c, y);
    else pl_dot_f32_add(w, step, rows, n, c, y);
}

/* n elements of `from` as fp32. */
PL_INLINE void pl_load(float *restrict to, const void *from, int64_t n, int half) {
    if (half) {
        const uint16_t *restrict x = from;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = pl_from_bf16(x[i]);
    } else {
        memcpy(to, from, sizeof(float) * n);
    }
}

PL_INLINE void pl_store(void *to, const float *restrict from, int64_t n, int half) {
    if (half) {
        uint16_t *restrict y = to;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = pl_to_bf16(from[i]);
    } else {
        memcpy(to, from, sizeof(float) * n);
    }
}

/* Element `offset` of an array of fp32 or bf16. */
PL_INLINE const void *pl_at(const void *base, int64_t offset, int half) {
    return (const char *)base + offset * (half ? 2 : 4);
}

/* Fortran sgemm: column-major, 32-bit integers; the trailing lengths are those of the two character arguments. */
typedef void (*pl_sgemm)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                         const int *, const float *, const int *, const float *, float *, const int *, size_t, size_t);

#endif
