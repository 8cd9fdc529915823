/* Mixture-of-experts kernels for CPU: routing, load histograms, the dispatch plan, and the passes around the GEMMs.
 *
 * Shapes: N tokens, E experts, A active experts, L latent width, F hidden width, R = N*A routed rows. All arrays are
 * dense and row-major. Every result is independent of the thread count: threads own disjoint outputs, and each sum runs
 * in a fixed order.
 */
#include "math.h"

#include <stddef.h>
#include <stdlib.h>

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

/* Stable counting sort of the R routed rows by expert: offset [E+1]; token [R] = source token of each sorted row;
 * place [R] = sorted row of each (token, slot). */
EXPORT void plan(const int64_t *index, int64_t R, int64_t E, int A, int64_t *offset, int64_t *token, int64_t *place) {
    memset(offset, 0, sizeof(int64_t) * (E + 1));
    for (int64_t r = 0; r < R; r++) offset[index[r] + 1]++;
    for (int64_t e = 0; e < E; e++) offset[e + 1] += offset[e];
    for (int64_t r = 0; r < R; r++) { /* offset[e] runs to the end of e's slice, which is the start of the next */
        int64_t at = offset[index[r]]++;
        token[at] = r / A;
        place[r] = at;
    }
    for (int64_t e = E; e > 0; e--) offset[e] = offset[e - 1];
    offset[0] = 0;
}
