/* Attention over depth (Block AttnRes, report Eq. 8-10): softmax over M sources for each token, forward and backward.
 *
 * The file includes itself once for each element type, so every kernel exists as name_f32 and name_bf16. Sources are M
 * separate tensors of `rows` rows of D contiguous elements, each with its own row stride; nothing is stacked. One token's
 * sources are read from memory once: the second pass finds them in cache.
 */
#ifndef T

#include "math.h"

#define TILE 256 /* elements of a row that are summed at a time */

#define SELF "attnres.c"
#include "typed.h"

#else

/* <v, x> and <v, c> in one read. Each quarter of the row has chains of its own: short chains round less, and eight of
 * them keep the adders busy. */
PL_INLINE float NAME(products)(const T *restrict v, const T *restrict x, const float *restrict c, int64_t D, float *with_x) {
    int64_t q = D / 4;
    float x0 = 0.0f, x1 = 0.0f, x2 = 0.0f, x3 = 0.0f, c0 = 0.0f, c1 = 0.0f, c2 = 0.0f, c3 = 0.0f;
#pragma omp simd reduction(+ : x0, x1, x2, x3, c0, c1, c2, c3)
    for (int64_t d = 0; d < q; d++) {
        float v0 = LOAD(v[d]), v1 = LOAD(v[d + q]), v2 = LOAD(v[d + 2 * q]), v3 = LOAD(v[d + 3 * q]);
        x0 += v0 * LOAD(x[d]), x1 += v1 * LOAD(x[d + q]), x2 += v2 * LOAD(x[d + 2 * q]), x3 += v3 * LOAD(x[d + 3 * q]);
        c0 += v0 * c[d], c1 += v1 * c[d + q], c2 += v2 * c[d + 2 * q], c3 += v3 * c[d + 3 * q];
    }
    for (int64_t d = 4 * q; d < D; d++) x0 += LOAD(v[d]) * LOAD(x[d]), c0 += LOAD(v[d]) * c[d];
    *with_x = (x0 + x1) + (x2 + x3);
    return (c0 + c1) + (c2 + c3);
}

/* s_i = <v_i, c> rsqrt(mean v_i^2 + eps); p = softmax(s); out = sum_i p_i v_i. Writes p to weights [rows, M], and the
 * rsqrt to rstd [rows, M] unless that is NULL. */
EXPORT void NAME(mix_forward)(const T *const *source, const int64_t *stride, const float *restrict c, T *out, float *weights,
                              float *rstd, int64_t rows, int64_t M, int64_t D, float eps, int threads) {
    float inverse = 1.0f / (float)D;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        float *p = weights + n * M;
        float top = -__builtin_inff(), sum = 0.0f;
        for (int64_t i = 0; i < M; i++) {
            const T *v = source[i] + n * stride[i];
            float squares, u = NAME(products)(v, v, c, D, &squares);
            float r = pl_rsqrtf(squares * inverse + eps);
            if (rstd) rstd[n * M + i] = r;
            p[i] = u * r;
            top = p[i] > top ? p[i] : top;
        }
        for (int64_t i = 0; i < M; i++) sum += p[i] = pl_expf(p[i] - top);
        for (int64_t i = 0; i < M; i++) p[i] /= sum;
        for (int64_t d0 = 0; d0 < D; d0 += TILE) {
            int64_t width = D - d0 < TILE ? D - d0 : TILE;
            float mix[TILE];
#pragma omp simd
            for (int64_t d = 0; d < width; d++) mix[d] = 0.0f;
            int64_t i = 0;
            for (; i + 1 < M; i += 2) {
                const T *restrict v = source[i] + n * stride[i] + d0, *restrict w = source[i + 1] + n * stride[i + 1] + d0;
                float pv = p[i], pw = p[i + 1];
#pragma omp simd
                for (int64_t d = 0; d < width; d++) mix[d] += pv * LOAD(v[d]) + pw * LOAD(w[d]);
            }
            for (; i < M; i++) {
                const T *restrict v = source[i] + n * stride[i] + d0;
                float pv = p[i];
#pragma omp simd
                for (int64_t d = 0; d < width; d++) mix[d] += pv * LOAD(v[d]);
            }
            T *restrict o = out + n * D + d0;
#pragma omp simd
            for (int64_t d = 0; d < width; d++) o[d] = STORE(mix[d]);
        }
    }
}

/* With g_i = <dout, v_i>, u_i = <c, v_i>, r_i = rstd: ds_i = p_i (g_i - sum_j p_j g_j),
 * dv_i = p_i dout + ds_i (r_i c - u_i r_i^3 v_i / D), dc = sum over rows and sources of ds_i r_i v_i.
 * dsource[i] may be NULL. partial: [blocks, D + 2M]: a block's share of dc, then two rows of scratch. The shares are
 * added in order, so dc depends on `blocks` and not on the threads. */
EXPORT void NAME(mix_backward)(const T *const *source, const int64_t *stride, const float *restrict c, const T *dout,
                               int64_t dout_stride, const float *weights, const float *rstd, T *const *dsource,
                               float *partial, float *dc, int64_t blocks, int64_t rows, int64_t M, int64_t D, int threads) {
    float inverse = 1.0f / (float)D;
    int64_t group = (rows + blocks - 1) / blocks, width_of_partial = D + 2 * M;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        float *restrict share = partial + block * width_of_partial, *restrict along = share + D, *restrict back = along + M;
#pragma omp simd
        for (int64_t d = 0; d < D; d++) share[d] = 0.0f;
        int64_t end = (block + 1) * group < rows ? (block + 1) * group : rows;
        for (int64_t n = block * group; n < end; n++) {
            const float *p = weights + n * M, *r = rstd + n * M;
            const T *restrict g = dout + n * dout_stride;
            float mean = 0.0f;
            for (int64_t i = 0; i < M; i++) {
                back[i] = NAME(products)(source[i] + n * stride[i], g, c, D, &along[i]);
                mean += p[i] * along[i];
            }
            for (int64_t i = 0; i < M; i++) {
                float ds = p[i] * (along[i] - mean);
                along[i] = ds * r[i];                                 /* factor of c in dv, and of v in dc */
                back[i] = along[i] * back[i] * r[i] * r[i] * inverse; /* factor of v in dv */
            }
            for (int64_t i = 0; i < M; i++) {
                const T *restrict v = source[i] + n * stride[i];
                float pi = p[i], a = along[i], k = back[i];
                if (dsource[i]) {
                    T *restrict dv = dsource[i] + n * D;
#pragma omp simd
                    for (int64_t d = 0; d < D; d++) {
                        float vd = LOAD(v[d]);
                        dv[d] = STORE(pi * LOAD(g[d]) + a * c[d] - k * vd);
                        share[d] += a * vd;
                    }
                } else {
#pragma omp simd
                    for (int64_t d = 0; d < D; d++) share[d] += a * LOAD(v[d]);
                }
            }
        }
    }
#pragma omp simd
    for (int64_t d = 0; d < D; d++) dc[d] = 0.0f;
    for (int64_t block = 0; block < blocks; block++)
#pragma omp simd
        for (int64_t d = 0; d < D; d++) dc[d] += partial[block * width_of_partial + d];
}

#endif
