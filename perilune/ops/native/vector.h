/* Small dense products on row-major float buffers that lie in the first two cache levels.
 *
 * All leading dimensions and column counts are multiples of PL_PAD, so there are no tails. Every output element is summed
 * in the order of the inner index, whatever tile it falls in: results do not depend on how rows are grouped, and a row
 * never reads another row's data. GCC and Clang vector extensions; lane count follows the target.
 */
#ifndef PERILUNE_VECTOR_H
#define PERILUNE_VECTOR_H

#include "math.h"

#define PL_PAD 16
/* The iterations of the next loop do not depend on each other: with many pointers GCC would not vectorise without it. */
#define PL_SIMD _Pragma("omp simd")
#if defined(__AVX512F__)
#define PL_LANES 16
#define PL_ROWS 8 /* rows of a register tile: enough independent sums to cover the latency of a multiply-add */
#else
#define PL_LANES 8
#define PL_ROWS 6
#endif
#define PL_VECS (PL_PAD / PL_LANES)

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PL_SHUFFLED 1 /* GCC 12, Clang */
#endif
#endif

typedef float pl_vec __attribute__((vector_size(PL_LANES * 4), aligned(4), may_alias));

PL_INLINE pl_vec pl_load(const float *x) { return *(const pl_vec *)x; }
PL_INLINE void pl_store(float *x, pl_vec v) { *(pl_vec *)x = v; }
PL_INLINE int pl_padded(int n) { return (n + PL_PAD - 1) / PL_PAD * PL_PAD; }

/* One register tile of pl_matmul; `rows` is a constant at every call. */
PL_INLINE void pl_tile(const int rows, int depth, const float *restrict x, int xm, int xk, const float *restrict y, int ldy,
                       float *restrict out, int ldo, const float *restrict factor) {
    pl_vec sum[PL_ROWS][PL_VECS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PL_VECS; j++) {
            sum[i][j] = (pl_vec){0.0f};
            if (factor) sum[i][j] = factor[i] * pl_load(out + i * ldo + j * PL_LANES);
        }
    for (int k = 0; k < depth; k++, x += xk, y += ldy) {
        pl_vec line[PL_VECS];
        for (int j = 0; j < PL_VECS; j++) line[j] = pl_load(y + j * PL_LANES);
        for (int i = 0; i < rows; i++) {
            float scalar = x[i * xm];
            for (int j = 0; j < PL_VECS; j++) sum[i][j] += scalar * line[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PL_VECS; j++) pl_store(out + i * ldo + j * PL_LANES, sum[i][j]);
}

/* out[m][n] = (factor ? factor[m] * out[m][n] : 0) + sum_k x[m * xm + k * xk] * y[k * ldy + n].
 * rows: even; columns: a multiple of PL_PAD. */
PL_INLINE void pl_matmul(int rows, int columns, int depth, const float *restrict x, int xm, int xk,
                         const float *restrict y, int ldy, float *restrict out, int ldo, const float *restrict factor) {
    for (int n = 0; n < columns; n += PL_PAD) {
        int m = 0;
        for (; m + PL_ROWS <= rows; m += PL_ROWS)
            pl_tile(PL_ROWS, depth, x + m * xm, xm, xk, y + n, ldy, out + m * ldo + n, ldo, factor ? factor + m : 0);
        for (; m + 4 <= rows; m += 4)
            pl_tile(4, depth, x + m * xm, xm, xk, y + n, ldy, out + m * ldo + n, ldo, factor ? factor + m : 0);
        for (; m < rows; m += 2)
            pl_tile(2, depth, x + m * xm, xm, xk, y + n, ldy, out + m * ldo + n, ldo, factor ? factor + m : 0);
    }
}

/* out[n] += sum_{c < count} coefficient[c * stride] * y[c * ldy + n]: one row of a triangular product. */
PL_INLINE void pl_combine(int columns, int count, const float *restrict coefficient, int stride,
                          const float *restrict y, int ldy, float *restrict out) {
    int n = 0;
    for (; n + 4 * PL_PAD <= columns; n += 4 * PL_PAD) {
        pl_vec sum[4 * PL_VECS];
        for (int j = 0; j < 4 * PL_VECS; j++) sum[j] = pl_load(out + n + j * PL_LANES);
        for (int c = 0; c < count; c++)
            for (int j = 0; j < 4 * PL_VECS; j++)
                sum[j] += coefficient[c * stride] * pl_load(y + c * ldy + n + j * PL_LANES);
        for (int j = 0; j < 4 * PL_VECS; j++) pl_store(out + n + j * PL_LANES, sum[j]);
    }
    for (; n < columns; n += PL_PAD) {
        pl_vec sum[PL_VECS];
        for (int j = 0; j < PL_VECS; j++) sum[j] = pl_load(out + n + j * PL_LANES);
        for (int c = 0; c < count; c++)
            for (int j = 0; j < PL_VECS; j++)
                sum[j] += coefficient[c * stride] * pl_load(y + c * ldy + n + j * PL_LANES);
        for (int j = 0; j < PL_VECS; j++) pl_store(out + n + j * PL_LANES, sum[j]);
    }
}

/* Sum of the lanes, in halves: the same order for every call. */
PL_INLINE float pl_sum(pl_vec v) {
#if defined(PL_SHUFFLED) && PL_LANES == 8
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    return v[0];
#else
    float lane[PL_LANES];
    memcpy(lane, &v, sizeof v);
    for (int width = PL_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

PL_INLINE float pl_dot(int n, const float *restrict x, const float *restrict y) {
    pl_vec sum = {0.0f};
    for (int i = 0; i < n; i += PL_LANES) sum += pl_load(x + i) * pl_load(y + i);
    return pl_sum(sum);
}

typedef float pl_v8 __attribute__((vector_size(32), aligned(4), may_alias));

/* out[c][r] = x[r][c]; rows and columns are multiples of 8. */
PL_INLINE void pl_transpose(int rows, int columns, const float *restrict x, int ldx, float *restrict out, int ldo) {
#ifdef PL_SHUFFLED
    for (int r = 0; r < rows; r += 8) {
        for (int c = 0; c < columns; c += 8) {
            pl_v8 a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = *(const pl_v8 *)(x + (r + i) * ldx + c);
            for (int i = 0; i < 8; i += 2) { /* interleave neighbouring rows */
                b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
                b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
            }
            for (int i = 0; i < 8; i += 4) { /* then pairs of rows */
                for (int j = 0; j < 2; j++) {
                    a[i + j] = __builtin_shufflevector(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
                    a[i + j + 2] = __builtin_shufflevector(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
                }
            }
            for (int j = 0; j < 4; j++) { /* then halves */
                b[j] = __builtin_shufflevector(a[j], a[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                b[j + 4] = __builtin_shufflevector(a[j], a[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
            }
            for (int i = 0; i < 8; i++) *(pl_v8 *)(out + (c + i) * ldo + r) = b[i];
        }
    }
#else
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) out[c * ldo + r] = x[r * ldx + c];
#endif
}

enum { PL_FLOAT32 = 0, PL_BFLOAT16 = 1 };

/* Copy n numbers to floats and fill up to `padded` with zeros. */
PL_INLINE void pl_read(float *restrict out, const void *restrict x, int64_t offset, int n, int padded, int type) {
    if (type == PL_BFLOAT16) {
        const uint16_t *source = (const uint16_t *)x + offset;
        PL_SIMD for (int i = 0; i < n; i++) out[i] = pl_from_bf16(source[i]);
    } else {
        memcpy(out, (const float *)x + offset, n * sizeof(float));
    }
    for (int i = n; i < padded; i++) out[i] = 0.0f;
}

PL_INLINE void pl_write(void *restrict out, int64_t offset, const float *restrict x, int n, int type) {
    if (type == PL_BFLOAT16) {
        uint16_t *target = (uint16_t *)out + offset;
        PL_SIMD for (int i = 0; i < n; i++) target[i] = pl_to_bf16(x[i]);
    } else {
        memcpy((float *)out + offset, x, n * sizeof(float));
    }
}

#endif
