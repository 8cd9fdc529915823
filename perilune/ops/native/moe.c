/* Mixture-of-experts kernels for CPU: routing, load histograms, the dispatch plan, and the passes around the GEMMs.
 *
 * Shapes: N tokens, E experts, A active experts, L latent width, F hidden width, R = N*A routed rows. All arrays are
 * dense and row-major. Every result is independent of the thread count: threads own disjoint outputs, and each sum runs
 * in a fixed order.
 */
#include "matvec.h"

#define EXPORT __attribute__((visibility("default")))

enum { BLOCK = 16, SMALL_WORK = 1 << 14 };

static const float INFINITE = __builtin_inff();

/* Indices of the `k` largest of key[0..E), largest first, equal keys lowest index first, into index[0..k);
 * their keys into top[0..k). Keys must not be NaN. */
static void top_k(const float *restrict key, int64_t E, int k, float *restrict top, int32_t *restrict index) {
    int filled = 0;
    for (int64_t base = 0; base < E; base += BLOCK) {
        int64_t end = base + BLOCK < E ? base + BLOCK : E;
        if (filled == k) {
            float least = top[k - 1];
            int any = 0;
            for (int64_t e = base; e < end; e++) any |= key[e] > least;
            if (!any) continue;
        }
        for (int64_t e = base; e < end; e++) {
            float value = key[e];
            if (filled == k && !(value > top[k - 1])) continue;
            int at = filled < k ? filled++ : k - 1;
            for (; at > 0 && value > top[at - 1]; at--) {
                top[at] = top[at - 1];
                index[at] = index[at - 1];
            }
            top[at] = value;
            index[at] = (int32_t)e;
        }
    }
}

/* Sigmoid scores and biased keys of one token. A NaN counts as the largest key, so that it reaches the weights. */
static void score_token(const float *restrict logit, const float *restrict bias, int64_t E, float *restrict score,
                        float *restrict key) {
#pragma omp simd
    for (int64_t e = 0; e < E; e++) {
        float s = pl_sigmoidf(logit[e]);
        float biased = s + bias[e];
        score[e] = s;
        key[e] = biased != biased ? INFINITE : biased;
    }
}

static void mix_weights(const float *restrict score, const int32_t *restrict chosen, int A, int renormalize,
                        float scaling, float *restrict weight) {
    float total = 0.0f;
    for (int a = 0; a < A; a++) total += score[chosen[a]];
    float factor = renormalize ? scaling / (total + 1e-20f) : scaling;
    for (int a = 0; a < A; a++) weight[a] = score[chosen[a]] * factor;
}

/* Router of a batch: scores [N,E], chosen index [N,A], weight [N,A], cutoff [N]. Returns 0, or 1 if memory ran out. */
EXPORT int route(const float *logit, const float *bias, int64_t N, int64_t E, int A, int renormalize, float scaling,
                 float *score, int64_t *index, float *weight, float *cutoff, int threads) {
    size_t scratch = (size_t)E + A + 1;
    float *keys = malloc(sizeof(float) * scratch * threads);
    int32_t *picks = malloc(sizeof(int32_t) * (A + 1) * threads);
    if (!keys || !picks) {
        free(keys);
        free(picks);
        return 1;
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (N * E > SMALL_WORK)
    for (int t = 0; t < threads; t++) {
        float *key = keys + scratch * t, *top = key + E;
        int32_t *chosen = picks + (size_t)(A + 1) * t;
        for (int64_t n = N * t / threads; n < N * (t + 1) / threads; n++) {
            float *s = score + n * E;
            score_token(logit + n * E, bias, E, s, key);
            top_k(key, E, A + 1, top, chosen);
            mix_weights(s, chosen, A, renormalize, scaling, weight + n * A);
            for (int a = 0; a < A; a++) index[n * A + a] = chosen[a];
            cutoff[n] = s[chosen[A]] + bias[chosen[A]];
        }
    }
    free(keys);
    free(picks);
    return 0;
}

/* Gradient of the logits from that of the mixing weights; unchosen experts get zero. */
EXPORT void route_backward(const float *score, const int64_t *index, const float *dweight, int64_t N, int64_t E, int A,
                           int renormalize, float scaling, float *dlogit, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (N * E > SMALL_WORK)
    for (int64_t n = 0; n < N; n++) {
        const float *s = score + n * E, *dw = dweight + n * A;
        const int64_t *chosen = index + n * A;
        float *out = dlogit + n * E, total = 0.0f, mean = 0.0f, factor = scaling;
        memset(out, 0, sizeof(float) * E);
        if (renormalize) {
            for (int a = 0; a < A; a++) total += s[chosen[a]];
            total += 1e-20f;
            for (int a = 0; a < A; a++) mean += dw[a] * s[chosen[a]];
            mean /= total;
            factor = scaling / total;
        }
        for (int a = 0; a < A; a++) {
            float value = s[chosen[a]];
            out[chosen[a]] = (dw[a] - mean) * factor * value * (1.0f - value);
        }
    }
}

/* Add each valid token's required bias cutoff - score to its expert's histogram [E,B] over [low, low + B/inverse). */
EXPORT void histogram_add(int32_t *count, const float *score, const float *cutoff, const uint8_t *valid, int64_t N,
                          int64_t E, int64_t B, float low, float inverse, int threads) {
    int64_t shares = N * E > SMALL_WORK && threads < E ? threads : 1;
#pragma omp parallel for num_threads((int)shares) schedule(static) if (shares > 1)
    for (int64_t t = 0; t < shares; t++) {
        int64_t first = E * t / shares, last = E * (t + 1) / shares; /* a thread owns experts: no counter is shared */
        for (int64_t n = 0; n < N; n++) {
            if (valid && !valid[n]) continue;
            const float *s = score + n * E;
            float alpha = cutoff[n];
            for (int64_t base = first; base < last; base += BLOCK) {
                int64_t end = base + BLOCK < last ? base + BLOCK : last;
                int32_t bin[BLOCK];
#pragma omp simd
                for (int64_t e = base; e < end; e++) {
                    float at = ((alpha - s[e]) - low) * inverse;
                    at = at > 0.0f ? at : 0.0f; /* also NaN */
                    at = at < (float)(B - 1) ? at : (float)(B - 1);
                    bin[e - base] = (int32_t)at;
                }
                for (int64_t e = base; e < end; e++) count[e * B + bin[e - base]]++;
            }
        }
    }
}

/* Stable counting sort of the R routed rows by expert: offset [E+1]; slot [R] = (token, slot) number n*A + a of each
 * sorted row; place [R] = its inverse, the sorted row of each (token, slot). */
EXPORT void plan(const int64_t *index, int64_t R, int64_t E, int64_t *offset, int64_t *slot, int64_t *place) {
    memset(offset, 0, sizeof(int64_t) * (E + 1));
    for (int64_t r = 0; r < R; r++) offset[index[r] + 1]++;
    for (int64_t e = 0; e < E; e++) offset[e + 1] += offset[e];
    for (int64_t r = 0; r < R; r++) { /* offset[e] runs to the end of e's slice, which is the start of the next */
        int64_t at = offset[index[r]]++;
        slot[at] = r;
        place[r] = at;
    }
    for (int64_t e = E; e > 0; e--) offset[e] = offset[e - 1];
    offset[0] = 0;
}

/* ---- experts, training: the passes around the matrix products of the caller's BLAS -------------------------------- */

enum { ROWS = 512 }; /* routed rows at a time: the temporaries of one expert stay in cache */

typedef struct {
    float beta, linear_beta; /* caps of SiTU; beta 0 = SwiGLU, linear_beta 0 = uncapped */
} Caps;

/* C[m,n] = A[m,k] B[n,k]^T */
static void gemm_nt(pl_sgemm sgemm, int m, int n, int k, const float *A, const float *B, float *C) {
    const float one = 1.0f, zero = 0.0f;
    sgemm("T", "N", &n, &m, &k, &one, B, &k, A, &k, &zero, C, &n, 1, 1);
}

/* C[m,n] = A[m,k] B[k,n] + old C */
static void gemm_nn(pl_sgemm sgemm, int m, int n, int k, const float *A, const float *B, float old, float *C) {
    const float one = 1.0f;
    sgemm("N", "N", &n, &m, &k, &one, B, &n, A, &k, &old, C, &n, 1, 1);
}

/* C[m,n] = A[k,m]^T B[k,n] + old C */
static void gemm_tn(pl_sgemm sgemm, int m, int n, int k, const float *A, const float *B, float old, float *C) {
    const float one = 1.0f;
    sgemm("N", "T", &n, &m, &k, &one, B, &n, A, &m, &old, C, &n, 1, 1);
}

PL_INLINE float capped(float x, float cap, float inverse) { return cap > 0.0f ? cap * pl_tanhf(x * inverse) : x; }

/* Hidden activation of `count` elements, in place over the gate. */
static void glu(float *restrict gate, const float *restrict up, int64_t count, Caps caps) {
    float a = caps.beta, b = caps.linear_beta, ia = a > 0.0f ? 1.0f / a : 0.0f, ib = b > 0.0f ? 1.0f / b : 0.0f;
    if (a > 0.0f && b > 0.0f) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            gate[i] = a * pl_tanhf(gate[i] * ia) * pl_sigmoidf(gate[i]) * (b * pl_tanhf(up[i] * ib));
    } else {
        for (int64_t i = 0; i < count; i++) gate[i] = capped(gate[i], a, ia) * pl_sigmoidf(gate[i]) * capped(up[i], b, ib);
    }
}

/* One row of the activation's backward. In: pre-activations gate, up, `d` = dy W2^T and the row's mixing weight.
 * Out: gate, up = their gradients, d = weight * hidden; returns <hidden, dy W2^T>, the gradient of the weight. */
static float glu_backward(float *restrict gate, float *restrict up, float *restrict d, int64_t F, float weight, Caps caps) {
    float a = caps.beta, b = caps.linear_beta, ia = a > 0.0f ? 1.0f / a : 0.0f, ib = b > 0.0f ? 1.0f / b : 0.0f;
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t f = 0; f < F; f++) {
        float g = gate[f], u = up[f], s = pl_sigmoidf(g), dh = d[f] * weight;
        float tg = pl_tanhf(g * ia), tu = pl_tanhf(u * ib);
        float left = a > 0.0f ? a * tg : g, left_slope = a > 0.0f ? 1.0f - tg * tg : 1.0f;
        float right = b > 0.0f ? b * tu : u, right_slope = b > 0.0f ? 1.0f - tu * tu : 1.0f;
        float opened = left * s, hidden = opened * right;
        dot += hidden * d[f];
        gate[f] = dh * right * (left_slope * s + opened * (1.0f - s));
        up[f] = dh * opened * right_slope;
        d[f] = weight * hidden;
    }
    return dot;
}

static void load_row(float *to, const void *from, int64_t row, int64_t L, int half) {
    pl_read(to, from, row * L, (int)L, (int)L, half);
}

static void store_row(void *to, const float *from, int64_t row, int64_t L, int half) {
    pl_write(to, row * L, from, (int)L, half);
}

/* Expert e's matrix as fp32: itself, or converted into `space`. */
static const float *expert_matrix(const void *all, int64_t e, int64_t size, int half, float *space) {
    if (!half) return (const float *)all + e * size;
    load_row(space, all, e, size, 1);
    return space;
}

static float *scratch_floats(size_t count, int threads) {
    size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    return aligned_alloc(64, bytes * threads);
}

static size_t rounded(size_t count) { return (count + 15) / 16 * 16; } /* keeps every part on a cache line */

#ifdef _OPENMP
#include <omp.h>
static int thread_number(void) { return omp_get_thread_num(); }
#else
static int thread_number(void) { return 0; }
#endif

/* out[n] = sum over slots a of weight[n,a] * row[place[n,a]] (weight NULL: 1). */
static void combine(const float *row, const float *weight, const int64_t *place, int64_t N, int A, int64_t L, void *out,
                    int half, float *space, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (N * A * L > SMALL_WORK)
    for (int t = 0; t < threads; t++) {
        float *sum = space + rounded(L) * t;
        for (int64_t n = N * t / threads; n < N * (t + 1) / threads; n++) {
            memset(sum, 0, sizeof(float) * L);
            for (int a = 0; a < A; a++) {
                const float *restrict from = row + place[n * A + a] * L;
                float w = weight ? weight[n * A + a] : 1.0f;
#pragma omp simd
                for (int64_t l = 0; l < L; l++) sum[l] += w * from[l];
            }
            store_row(out, sum, n, L, half);
        }
    }
}

/* out [N,L] = sum_a weight * W2 glu(W1 z, W3 z). y [R,L] is fp32 working space. Returns 1 if memory ran out. */
EXPORT int experts_forward(pl_sgemm sgemm, const void *z, const float *weight, const void *w1, const void *w3,
                           const void *w2, const int64_t *offset, const int64_t *slot, const int64_t *place, int64_t N,
                           int64_t E, int A, int64_t L, int64_t F, float beta, float linear_beta, int z_half, int w_half,
                           float *y, void *out, int threads) {
    size_t parts = rounded(ROWS * L) + 2 * rounded(ROWS * F) + (w_half ? 3 * rounded(L * F) : 0);
    float *scratch = scratch_floats(parts, threads);
    if (!scratch) return 1;
    Caps caps = {beta, linear_beta};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t e = 0; e < E; e++) {
        float *x = scratch + parts * thread_number(), *gate = x + rounded(ROWS * L), *up = gate + rounded(ROWS * F);
        float *space = up + rounded(ROWS * F);
        if (offset[e] == offset[e + 1]) continue;
        const float *m1 = expert_matrix(w1, e, L * F, w_half, space);
        const float *m3 = expert_matrix(w3, e, L * F, w_half, space + rounded(L * F));
        const float *m2 = expert_matrix(w2, e, L * F, w_half, space + 2 * rounded(L * F));
        for (int64_t first = offset[e]; first < offset[e + 1]; first += ROWS) {
            int rows = (int)(offset[e + 1] - first < ROWS ? offset[e + 1] - first : ROWS);
            for (int r = 0; r < rows; r++) load_row(x + r * L, z, slot[first + r] / A, L, z_half);
            gemm_nt(sgemm, rows, (int)F, (int)L, x, m1, gate);
            gemm_nt(sgemm, rows, (int)F, (int)L, x, m3, up);
            glu(gate, up, rows * F, caps);
            gemm_nt(sgemm, rows, (int)L, (int)F, gate, m2, y + first * L);
        }
    }
    combine(y, weight, place, N, A, L, out, z_half, scratch, threads);
    free(scratch);
    return 0;
}

/* All gradients, recomputing the hidden activations. dx [R,L] is fp32 working space; dw1, dw3 [E,F,L], dw2 [E,L,F] and
 * dweight [N,A] are fp32. Returns 1 if memory ran out. */
EXPORT int experts_backward(pl_sgemm sgemm, const void *z, const float *weight, const void *w1, const void *w3,
                            const void *w2, const int64_t *offset, const int64_t *slot, const int64_t *place,
                            const void *dout, int64_t N, int64_t E, int A, int64_t L, int64_t F,
                            float beta, float linear_beta, int z_half, int w_half, float *dx, void *dz, float *dweight,
                            float *dw1, float *dw3, float *dw2, int threads) {
    size_t parts = 2 * rounded(ROWS * L) + 3 * rounded(ROWS * F) + (w_half ? 3 * rounded(L * F) : 0);
    float *scratch = scratch_floats(parts, threads);
    if (!scratch) return 1;
    Caps caps = {beta, linear_beta};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t e = 0; e < E; e++) {
        float *x = scratch + parts * thread_number(), *dy = x + rounded(ROWS * L);
        float *gate = dy + rounded(ROWS * L), *up = gate + rounded(ROWS * F), *d = up + rounded(ROWS * F);
        float *space = d + rounded(ROWS * F);
        float *g1 = dw1 + e * L * F, *g3 = dw3 + e * L * F, *g2 = dw2 + e * L * F;
        if (offset[e] == offset[e + 1]) {
            memset(g1, 0, sizeof(float) * L * F);
            memset(g3, 0, sizeof(float) * L * F);
            memset(g2, 0, sizeof(float) * L * F);
            continue;
        }
        const float *m1 = expert_matrix(w1, e, L * F, w_half, space);
        const float *m3 = expert_matrix(w3, e, L * F, w_half, space + rounded(L * F));
        const float *m2 = expert_matrix(w2, e, L * F, w_half, space + 2 * rounded(L * F));
        float old = 0.0f; /* the first block of rows overwrites the gradients, later ones add */
        for (int64_t first = offset[e]; first < offset[e + 1]; first += ROWS, old = 1.0f) {
            int rows = (int)(offset[e + 1] - first < ROWS ? offset[e + 1] - first : ROWS);
            for (int r = 0; r < rows; r++) {
                load_row(x + r * L, z, slot[first + r] / A, L, z_half);
                load_row(dy + r * L, dout, slot[first + r] / A, L, z_half);
            }
            gemm_nt(sgemm, rows, (int)F, (int)L, x, m1, gate);
            gemm_nt(sgemm, rows, (int)F, (int)L, x, m3, up);
            gemm_nn(sgemm, rows, (int)F, (int)L, dy, m2, 0.0f, d);
            for (int r = 0; r < rows; r++) {
                int64_t at = slot[first + r];
                dweight[at] = glu_backward(gate + r * F, up + r * F, d + r * F, F, weight[at], caps);
            }
            gemm_tn(sgemm, (int)L, (int)F, rows, dy, d, old, g2);
            gemm_tn(sgemm, (int)F, (int)L, rows, gate, x, old, g1);
            gemm_tn(sgemm, (int)F, (int)L, rows, up, x, old, g3);
            gemm_nn(sgemm, rows, (int)L, (int)F, gate, m1, 0.0f, dx + first * L);
            gemm_nn(sgemm, rows, (int)L, (int)F, up, m3, 1.0f, dx + first * L);
        }
    }
    combine(dx, NULL, place, N, A, L, dz, z_half, scratch, threads);
    free(scratch);
    return 0;
}

/* ---- experts, a few tokens: matrix-vector products ---------------------------------------------------------------- */

enum { STRIP = 32, DECODE_WORK = 1 << 17 };

static int64_t strips(int64_t rows) { return (rows + STRIP - 1) / STRIP; }
static int64_t strip_end(int64_t strip, int64_t rows) { return (strip + 1) * STRIP < rows ? (strip + 1) * STRIP : rows; }

/* Routed rows 0..R in the order of their experts, ties in row order; begin[g] = place of group g's first row, begin[groups]
 * = R. Returns the number of groups, one an expert that has rows. */
static int64_t group_rows(const int64_t *index, int64_t R, int64_t *order, int64_t *begin) {
    for (int64_t r = 0; r < R; r++) {
        int64_t at = r;
        for (; at > 0 && index[order[at - 1]] > index[r]; at--) order[at] = order[at - 1];
        order[at] = r;
    }
    int64_t groups = 0;
    for (int64_t i = 0; i < R; i++)
        if (i == 0 || index[order[i]] != index[order[i - 1]]) begin[groups++] = i;
    begin[groups] = R;
    return groups;
}

/* The experts of a few tokens. z [N,L], index/weight [N,A]; out [N,L]. A strip of an expert's rows serves all tokens that
 * chose it while it is in cache. Returns 1 if memory ran out. */
EXPORT int experts_decode(const void *z, const int64_t *index, const float *weight, const void *w1, const void *w3,
                          const void *w2, int64_t N, int A, int64_t L, int64_t F, float beta, float linear_beta,
                          int z_half, int w_half, void *out, int threads) {
    int64_t R = N * A;
    float *x = scratch_floats(N * L + R * (2 * F + L), 1);
    int64_t *order = malloc(sizeof(int64_t) * (2 * R + 1)), *begin = order + R;
    if (!x || !order) {
        free(x);
        free(order);
        return 1;
    }
    float *gate = x + N * L, *up = gate + R * F, *y = up + R * F;
    Caps caps = {beta, linear_beta};
    int64_t groups = group_rows(index, R, order, begin);
    int wide = 3 * R * L * F > DECODE_WORK ? threads : 1;
    load_row(x, z, 0, N * L, z_half);
#pragma omp parallel num_threads(wide) if (wide > 1)
    {
#pragma omp for schedule(static)
        for (int64_t s = 0; s < groups * strips(F); s++) {
            int64_t group = s / strips(F), first = s % strips(F) * STRIP, last = strip_end(s % strips(F), F);
            int64_t matrix = index[order[begin[group]]] * L * F;
            for (int64_t i = begin[group]; i < begin[group + 1]; i += 2) {
                int pair = i + 1 < begin[group + 1] ? 2 : 1;
                int64_t r[2] = {order[i], order[i + pair - 1]};
                const float *token[2] = {x + r[0] / A * L, x + r[1] / A * L};
                float *gates[2] = {gate + r[0] * F, gate + r[1] * F}, *ups[2] = {up + r[0] * F, up + r[1] * F};
                pl_matvecs(pl_at(w1, matrix, w_half), L, first, last, L, pair, token, gates, w_half);
                pl_matvecs(pl_at(w3, matrix, w_half), L, first, last, L, pair, token, ups, w_half);
                for (int p = 0; p < pair; p++) glu(gates[p] + first, ups[p] + first, last - first, caps);
            }
        }
#pragma omp for schedule(static)
        for (int64_t s = 0; s < groups * strips(L); s++) {
            int64_t group = s / strips(L), first = s % strips(L) * STRIP, last = strip_end(s % strips(L), L);
            int64_t matrix = index[order[begin[group]]] * L * F;
            for (int64_t i = begin[group]; i < begin[group + 1]; i += 2) {
                int pair = i + 1 < begin[group + 1] ? 2 : 1;
                int64_t r[2] = {order[i], order[i + pair - 1]};
                const float *hidden[2] = {gate + r[0] * F, gate + r[1] * F};
                float *to[2] = {y + r[0] * L, y + r[1] * L};
                pl_matvecs(pl_at(w2, matrix, w_half), F, first, last, F, pair, hidden, to, w_half);
            }
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            float *sum = x + n * L; /* the token itself is no longer needed */
            for (int64_t l = 0; l < L; l++) {
                float total = 0.0f;
                for (int64_t r = n * A; r < (n + 1) * A; r++) total += weight[r] * y[r * L + l];
                sum[l] = total;
            }
        }
    }
    store_row(out, x, 0, N * L, z_half);
    free(order);
    free(x);
    return 0;
}

/* Router and experts of a few tokens in one call: logit [N,E] fp32, bias [E], z [N,L] -> out [N,L]. */
EXPORT int moe_decode(const float *logit, const float *bias, const void *z, const void *w1, const void *w3,
                      const void *w2, int64_t N, int64_t E, int A, int64_t L, int64_t F, int renormalize, float scaling,
                      float beta, float linear_beta, int z_half, int w_half, void *out, int threads) {
    int64_t *index = malloc((sizeof(int64_t) + sizeof(float)) * N * A + sizeof(float) * N * (E + 1));
    if (!index) return 1;
    float *weight = (float *)(index + N * A), *score = weight + N * A, *cutoff = score + N * E;
    int failed = route(logit, bias, N, E, A, renormalize, scaling, score, index, weight, cutoff, 1) ||
                 experts_decode(z, index, weight, w1, w3, w2, N, A, L, F, beta, linear_beta, z_half, w_half, out, threads);
    free(index);
    return failed;
}
