/* Products of matrix rows with one vector or a few, for fp32 and bf16 rows; and the calling form of torch's sgemm.
 *
 * Every dot product is summed in the same order, whatever tile it falls in, so a result depends on its row and its vector
 * alone: not on the other vectors, nor on how threads divide the rows.
 */
#ifndef PERILUNE_MATVEC_H
#define PERILUNE_MATVEC_H

#include <stddef.h>
#include <stdlib.h>

#include "vector.h"

#define PL_PLAIN(x) (x)

/* NAME: y += sum of c[i] * row i, rows `step` elements apart, n elements each. */
#define PL_ADD_ROWS(NAME, TYPE, LOAD)                                                                                    \
    PL_INLINE void NAME(const TYPE *restrict w, int64_t step, int64_t rows, int64_t n, const float *restrict c,    \
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

PL_ADD_ROWS(pl_add_rows_f32, float, PL_PLAIN)
PL_ADD_ROWS(pl_add_rows_bf16, uint16_t, pl_from_bf16)

typedef uint16_t pl_half_vec __attribute__((vector_size(PL_LANES * 2), aligned(2), may_alias));
typedef uint32_t pl_word_vec __attribute__((vector_size(PL_LANES * 4)));

/* PL_LANES elements from the i-th on, as fp32. */
PL_INLINE pl_vec pl_lanes(const void *row, int64_t i, const int half) {
    if (!half) return pl_load((const float *)row + i);
    return (pl_vec)(__builtin_convertvector(*(const pl_half_vec *)((const uint16_t *)row + i), pl_word_vec) << 16);
}

PL_INLINE float pl_element(const void *row, int64_t i, const int half) {
    return half ? pl_from_bf16(((const uint16_t *)row)[i]) : ((const float *)row)[i];
}

/* out[v][r] = <row r, x[v]> for a tile of `rows` x `vectors`, both constants at every call. Eight independent sums cover the
 * latency of a multiply-add. */
PL_INLINE void pl_dot_tile(const int rows, const int vectors, const int half, const void *w, int64_t step, int64_t n,
                           const float *const *x, float *const *out) {
    const char *row[8];
    pl_vec sum[8][2];
    int64_t whole = n - n % PL_LANES;
    for (int r = 0; r < rows; r++) {
        row[r] = (const char *)w + r * step * (half ? 2 : 4);
        for (int v = 0; v < vectors; v++) sum[r][v] = (pl_vec){0.0f};
    }
    for (int64_t i = 0; i < whole; i += PL_LANES)
        for (int r = 0; r < rows; r++) {
            pl_vec line = pl_lanes(row[r], i, half);
            for (int v = 0; v < vectors; v++) sum[r][v] += line * pl_load(x[v] + i);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            float total = pl_sum(sum[r][v]);
            for (int64_t i = whole; i < n; i++) total += pl_element(row[r], i, half) * x[v][i];
            out[v][r] = total;
        }
}

PL_INLINE void pl_dot_rows(const int vectors, const int half, const void *w, int64_t step, int64_t first, int64_t last,
                           int64_t n, const float *const *x, float *const *out) {
    for (int64_t r = first; r < last;) {
        const void *row = (const char *)w + r * step * (half ? 2 : 4);
        float *const at[2] = {out[0] + r, vectors == 2 ? out[1] + r : NULL};
        if (vectors == 1 && r + 8 <= last) pl_dot_tile(8, 1, half, row, step, n, x, at), r += 8;
        else if (r + 4 <= last) pl_dot_tile(4, vectors, half, row, step, n, x, at), r += 4;
        else if (vectors == 2) pl_dot_tile(1, 2, half, row, step, n, x, at), r += 1;
        else {
            /* Twice the same vector: for a tile of one sum GCC takes multiply and add apart on some processors (its tuning
             * against chains of fused ones), and the result would depend on how many vectors there are. */
            float again;
            const float *same = x[0];
            __asm__("" : "+r"(same)); /* the compiler is not to see that it is */
            const float *const twice[2] = {x[0], same};
            float *const both[2] = {at[0], &again};
            pl_dot_tile(1, 2, half, row, step, n, twice, both), r += 1;
        }
    }
}

/* out[v][first..last) = W x[v] for `count` vectors and rows of n elements, `step` apart. */
static void pl_matvecs(const void *w, int64_t step, int64_t first, int64_t last, int64_t n, int64_t count,
                       const float *const *x, float *const *out, int half) {
    int64_t v = 0;
    for (; v + 2 <= count; v += 2) {
        if (half) pl_dot_rows(2, 1, w, step, first, last, n, x + v, out + v);
        else pl_dot_rows(2, 0, w, step, first, last, n, x + v, out + v);
    }
    if (v < count) {
        if (half) pl_dot_rows(1, 1, w, step, first, last, n, x + v, out + v);
        else pl_dot_rows(1, 0, w, step, first, last, n, x + v, out + v);
    }
}

/* out[first..last) = W x for rows of n elements, `step` apart. */
PL_INLINE void pl_matvec(const void *w, int64_t step, int64_t first, int64_t last, int64_t n, const float *x, float *out,
                         int half) {
    pl_matvecs(w, step, first, last, n, 1, &x, &out, half);
}

/* y[0..n) += c W for W [rows, n], rows `step` apart. */
PL_INLINE void pl_vecmat_add(const void *w, int64_t step, int64_t rows, int64_t n, const float *c, float *y, int half) {
    if (half) pl_add_rows_bf16(w, step, rows, n, c, y);
    else pl_add_rows_f32(w, step, rows, n, c, y);
}

/* Element `offset` of an array of fp32 or bf16. */
PL_INLINE const void *pl_at(const void *base, int64_t offset, int half) {
    return (const char *)base + offset * (half ? 2 : 4);
}

/* Fortran sgemm: column-major, 32-bit integers; the trailing lengths are those of the two character arguments. */
typedef void (*pl_sgemm)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                         const int *, const float *, const int *, const float *, float *, const int *, size_t, size_t);

#endif
