/* Attention for CPU: causal softmax attention in the expanded form, forward and backward, and absorbed decode.
 *
 * Shapes: N documents, T queries and S = past + T keys of a document, H heads, K key and V value width, L latent width.
 * A tensor row (one token, one head) is contiguous; tokens and heads are any fixed number of elements apart. Each
 * (document, head) belongs to one thread and its sums run in a fixed order: results do not depend on the thread count.
 */
#include "matvec.h"

#define EXPORT __attribute__((visibility("default")))

enum { QUERIES = 64, PARALLEL_WORK = 1 << 17 };

#ifdef _OPENMP
#include <omp.h>
static int thread_number(void) { return omp_get_thread_num(); }
#else
static int thread_number(void) { return 0; }
#endif

static float *scratch_floats(size_t count, int threads) {
    return aligned_alloc(64, ((count + 15) / 16 * 16) * sizeof(float) * threads);
}

/* C[m,n] = alpha A[m,k] B[n,k]^T */
static void gemm_nt(pl_sgemm sgemm, int m, int n, int k, float alpha, const float *A, int lda, const float *B, int ldb,
                    float *C, int ldc) {
    const float zero = 0.0f;
    sgemm("T", "N", &n, &m, &k, &alpha, B, &ldb, A, &lda, &zero, C, &ldc, 1, 1);
}

/* C[m,n] = A[m,k] B[k,n] */
static void gemm_nn(pl_sgemm sgemm, int m, int n, int k, const float *A, int lda, const float *B, int ldb, float *C, int ldc) {
    const float one = 1.0f, zero = 0.0f;
    sgemm("N", "N", &n, &m, &k, &one, B, &ldb, A, &lda, &zero, C, &ldc, 1, 1);
}

/* C[m,n] += A[k,m]^T B[k,n] */
static void gemm_tn_add(pl_sgemm sgemm, int m, int n, int k, const float *A, int lda, const float *B, int ldb, float *C,
                        int ldc) {
    const float one = 1.0f;
    sgemm("N", "T", &n, &m, &k, &one, B, &ldb, A, &lda, &one, C, &ldc, 1, 1);
}

/* Softmax over the first `seen` scores, zeros in the rest of the row; returns log-sum-exp. */
static float softmax_row(float *restrict score, int64_t seen, int64_t width) {
    float most = score[0], total = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t s = 0; s < seen; s++) most = score[s] > most ? score[s] : most;
#pragma omp simd reduction(+ : total)
    for (int64_t s = 0; s < seen; s++) {
        float e = pl_expf(score[s] - most);
        score[s] = e;
        total += e;
    }
    float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t s = 0; s < seen; s++) score[s] *= inverse;
    memset(score + seen, 0, sizeof(float) * (width - seen));
    return most + __builtin_logf(total);
}

static int64_t longest(const int64_t *length, int64_t N, int64_t past) {
    int64_t most = 0;
    for (int64_t n = 0; n < N; n++) most = length[n] > most ? length[n] : most;
    return most + past;
}

/* Strides of q, k, v in elements: step[0..2] between tokens, step[3..5] between heads. begin [2,N]: first query token and
 * first key token of each document. out [tokens,H,V], lse [tokens,H]. Returns 1 if memory ran out. */
EXPORT int attention_forward(pl_sgemm sgemm, const float *q, const float *k, const float *v, const int64_t *step,
                             const int64_t *begin, const int64_t *length, int64_t N, int64_t past, int64_t H, int64_t K,
                             int64_t V, float scale, float *out, float *lse, int threads) {
    size_t parts = (QUERIES * (size_t)longest(length, N, past) + 15) / 16 * 16;
    float *scratch = scratch_floats(parts, threads);
    if (!scratch) return 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < N * H; task++) {
        int64_t n = task / H, h = task % H, first = begin[n];
        float *score = scratch + parts * thread_number();
        const float *keys = k + begin[N + n] * step[1] + h * step[4], *values = v + begin[N + n] * step[2] + h * step[5];
        for (int64_t t = 0; t < length[n]; t += QUERIES) {
            int rows = (int)(length[n] - t < QUERIES ? length[n] - t : QUERIES), seen = (int)(past + t) + rows;
            const float *queries = q + (first + t) * step[0] + h * step[3];
            gemm_nt(sgemm, rows, seen, (int)K, scale, queries, (int)step[0], keys, (int)step[1], score, seen);
            for (int r = 0; r < rows; r++)
                lse[(first + t + r) * H + h] = softmax_row(score + (int64_t)r * seen, past + t + r + 1, seen);
            gemm_nn(sgemm, rows, (int)V, seen, score, seen, values, (int)step[2], out + ((first + t) * H + h) * V, (int)(H * V));
        }
    }
    free(scratch);
    return 0;
}

/* Gradients; dq, dk [tokens,H,K], dv [tokens,H,V] dense, dk and dv zero on entry; dout [tokens,H,V] dense. */
EXPORT int attention_backward(pl_sgemm sgemm, const float *q, const float *k, const float *v, const int64_t *step,
                              const int64_t *begin, const int64_t *length, int64_t N, int64_t past, int64_t H, int64_t K,
                              int64_t V, float scale, const float *lse, const float *dout, float *dq, float *dk, float *dv,
                              int threads) {
    size_t half = (QUERIES * (size_t)longest(length, N, past) + 15) / 16 * 16;
    float *scratch = scratch_floats(2 * half, threads);
    if (!scratch) return 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < N * H; task++) {
        int64_t n = task / H, h = task % H, first = begin[n];
        float *p = scratch + 2 * half * thread_number(), *dp = p + half;
        const float *keys = k + begin[N + n] * step[1] + h * step[4], *values = v + begin[N + n] * step[2] + h * step[5];
        float *dkeys = dk + (begin[N + n] * H + h) * K, *dvalues = dv + (begin[N + n] * H + h) * V;
        for (int64_t t = 0; t < length[n]; t += QUERIES) {
            int rows = (int)(length[n] - t < QUERIES ? length[n] - t : QUERIES), seen = (int)(past + t) + rows;
            const float *queries = q + (first + t) * step[0] + h * step[3], *dy = dout + ((first + t) * H + h) * V;
            gemm_nt(sgemm, rows, seen, (int)K, scale, queries, (int)step[0], keys, (int)step[1], p, seen);
            gemm_nt(sgemm, rows, seen, (int)V, 1.0f, dy, (int)(H * V), values, (int)step[2], dp, seen);
            for (int r = 0; r < rows; r++) {
                float *restrict pr = p + (int64_t)r * seen, *restrict dr = dp + (int64_t)r * seen;
                float norm = lse[(first + t + r) * H + h], mean = 0.0f;
                int64_t own = past + t + r + 1;
#pragma omp simd reduction(+ : mean)
                for (int64_t s = 0; s < own; s++) {
                    float e = pl_expf(pr[s] - norm);
                    pr[s] = e;
                    mean += e * dr[s];
                }
#pragma omp simd
                for (int64_t s = 0; s < own; s++) dr[s] = pr[s] * (dr[s] - mean) * scale;
                memset(pr + own, 0, sizeof(float) * (seen - own));
                memset(dr + own, 0, sizeof(float) * (seen - own));
            }
            gemm_tn_add(sgemm, seen, (int)V, rows, p, seen, dy, (int)(H * V), dvalues, (int)(H * V));
            gemm_tn_add(sgemm, seen, (int)K, rows, dp, seen, queries, (int)step[0], dkeys, (int)(H * K));
            gemm_nn(sgemm, rows, (int)K, seen, dp, seen, keys, (int)step[1], dq + ((first + t) * H + h) * K, (int)(H * K));
        }
    }
    free(scratch);
    return 0;
}

/* Absorbed attention against cached latents. qn [B,T,H,n], qr [B,T,H,r] and out [B,T,H,v] dense; cache rows of L latents
 * and r shared key channels, step[0], step[1] elements from row to row and step[2], step[3] from sequence to sequence;
 * W_UK [H,n,L] and W_UV [H,v,L] with heads step[4], step[5] apart and dense rows. Returns 1 if memory ran out. */
EXPORT int latent_attention(const void *qn, const void *qr, const void *latent, const void *shared, const void *uk,
                            const void *uv, const int64_t *step, int64_t B, int64_t T, int64_t H, int64_t past, int64_t n,
                            int64_t r, int64_t v, int64_t L, float scale, int q_half, int cache_half, int w_half, void *out,
                            int threads) {
    int64_t S = past + T, tasks = B * T * H;
    size_t parts = ((size_t)n + r + 2 * L + 2 * S + v + 15) / 16 * 16;
    int wide = tasks * (S * (2 * L + r) + (n + v) * L) > PARALLEL_WORK ? threads : 1;
    float *scratch = scratch_floats(parts, wide);
    if (!scratch) return 1;
#pragma omp parallel for num_threads(wide) schedule(static) if (wide > 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t b = task / (T * H), h = task % H, seen = past + task / H % T + 1;
        float *query = scratch + parts * thread_number(), *carried = query + n + r, *context = carried + L;
        float *score = context + L, *extra = score + S, *y = extra + S;
        const void *rows = pl_at(latent, b * step[2], cache_half), *keys = pl_at(shared, b * step[3], cache_half);
        pl_read(query, qn, task * n, (int)n, (int)n, q_half);
        pl_read(query + n, qr, task * r, (int)r, (int)r, q_half);
        memset(carried, 0, sizeof(float) * 2 * L);
        pl_vecmat_add(pl_at(uk, h * step[4], w_half), L, n, L, query, carried, w_half);
        pl_matvec(rows, step[0], 0, seen, L, carried, score, cache_half);
        pl_matvec(keys, step[1], 0, seen, r, query + n, extra, cache_half);
#pragma omp simd
        for (int64_t s = 0; s < seen; s++) score[s] = (score[s] + extra[s]) * scale;
        softmax_row(score, seen, seen);
        pl_vecmat_add(rows, step[0], seen, L, score, context, cache_half);
        pl_matvec(pl_at(uv, h * step[5], w_half), L, 0, v, L, context, y, w_half);
        pl_write(out, task * v, y, (int)v, q_half);
    }
    free(scratch);
    return 0;
}

/* One new token of each of B sequences against cached latents in pages. qn [B,H,n], qr [B,H,r], out [B,H,v] dense. A page
 * holds `size` rows of L latents and r shared key channels side by side; pages are step[0] elements apart. table [B,P]
 * names each sequence's pages, length [B] its tokens, the new one included. W_UK, W_UV: heads step[1], step[2] apart.
 * A sequence's sums depend on its own rows alone. Returns 1 if memory ran out. */
EXPORT int latent_attention_pages(const void *qn, const void *qr, const void *pool, const void *uk, const void *uv,
                                  const int64_t *step, const int64_t *table, const int64_t *length, int64_t B, int64_t P,
                                  int64_t size, int64_t H, int64_t n, int64_t r, int64_t v, int64_t L, float scale,
                                  int q_half, int cache_half, int w_half, void *out, int threads) {
    int64_t S = longest(length, B, 0), tasks = B * H, row = L + r, total = 0;
    for (int64_t b = 0; b < B; b++) total += length[b];
    size_t parts = ((size_t)n + r + 2 * L + 2 * S + v + 15) / 16 * 16;
    int wide = H * (total * (2 * L + r) + B * (n + v) * L) > PARALLEL_WORK ? threads : 1;
    float *scratch = scratch_floats(parts, wide);
    if (!scratch) return 1;
#pragma omp parallel for num_threads(wide) schedule(dynamic, 1) if (wide > 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t b = task / H, h = task % H, seen = length[b];
        float *query = scratch + parts * thread_number(), *carried = query + n + r, *context = carried + L;
        float *score = context + L, *extra = score + S, *y = extra + S;
        pl_read(query, qn, task * n, (int)n, (int)n, q_half);
        pl_read(query + n, qr, task * r, (int)r, (int)r, q_half);
        memset(carried, 0, sizeof(float) * 2 * L);
        pl_vecmat_add(pl_at(uk, h * step[1], w_half), L, n, L, query, carried, w_half);
        for (int64_t first = 0; first < seen; first += size) {
            const void *rows = pl_at(pool, table[b * P + first / size] * step[0], cache_half);
            int64_t count = seen - first < size ? seen - first : size;
            pl_matvec(rows, row, 0, count, L, carried, score + first, cache_half);
            pl_matvec(pl_at(rows, L, cache_half), row, 0, count, r, query + n, extra + first, cache_half);
        }
#pragma omp simd
        for (int64_t s = 0; s < seen; s++) score[s] = (score[s] + extra[s]) * scale;
        softmax_row(score, seen, seen);
        for (int64_t first = 0; first < seen; first += size) {
            const void *rows = pl_at(pool, table[b * P + first / size] * step[0], cache_half);
            pl_vecmat_add(rows, row, seen - first < size ? seen - first : size, L, score + first, context, cache_half);
        }
        pl_matvec(pl_at(uv, h * step[2], w_half), L, 0, v, L, context, y, w_half);
        pl_write(out, task * v, y, (int)v, q_half);
    }
    free(scratch);
    return 0;
}
