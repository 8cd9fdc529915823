/* Row kernels around the matrix products: norms, short convolution with SiLU, gated units, softmax cross-entropy.
 *
 * The file includes itself once for each element type, so every kernel exists as name_f32 and name_bf16. Activations
 * have that type; parameters, statistics and sums are float. A row is contiguous; rows may be a stride apart.
 *
 * Sums over rows (parameter gradients) go into one partial row for each of `blocks` groups of consecutive rows, and the
 * partial rows are added in order: the result depends on `blocks`, which the caller derives from the sizes alone, and
 * not on the number of threads.
 */
#ifndef T

#include "math.h"

#define CHANNEL_BLOCK 512 /* channels that one convolution task handles: its tap rows and weights stay in L1 */
#define MAX_TAPS 16

/* e^x = power * (1 + tail) for x <= 0, clamped where e^x would leave the normal range (1e-38). Half the work of pl_expf,
 * and power * tail + (power - 1) is e^x - 1 without cancellation. NaN stays NaN through tail. */
PL_INLINE float exp_parts(float x, float *power) {
    x = x < -87.0f ? -87.0f : x;
    const float rounding = 12582912.0f; /* 1.5 * 2^23 leaves round(x / ln2) in the low mantissa bits */
    float shifted = x * 1.44269504088896f + rounding;
    float whole = shifted - rounding;
    float r = x - whole * 0.693359375f; /* ln2 in two parts */
    r = r - whole * -2.12194440054690581e-4f;
    float q = 1.393364352e-3f; /* e^r = 1 + r + r^2 q, as in math.h */
    q = q * r + 8.363175565e-3f;
    q = q * r + 4.166646498e-2f;
    q = q * r + 1.666657700e-1f;
    q = q * r + 0.5f;
    *power = pl_from_bits((pl_bits(shifted) << 23) + (127u << 23));
    return (r * r) * q + r;
}

/* sigma(x) and its derivative, both relatively accurate in both tails. */
PL_INLINE float sigmoid_slope(float x, float *slope) {
    float power, tail = exp_parts(-pl_absf(x), &power);
    float e = power * tail + power;
    float s = 1.0f / (1.0f + e), other = e * s;
    *slope = other * s;
    return x < 0.0f ? other : s;
}

PL_INLINE float sigmoid(float x) {
    float slope;
    return sigmoid_slope(x, &slope);
}

/* tanh x = -m / (2 + m) with m = e^-2|x| - 1, and its derivative 4q / (1 + q)^2 with q = 1 + m: neither cancels, near 0
 * or far out, where the derivative goes to 0. */
PL_INLINE float tanh_slope(float x, float *slope) {
    float power, tail = exp_parts(-2.0f * pl_absf(x), &power);
    float m = power * tail + (power - 1.0f), q = power * tail + power;
    float r = 1.0f / (2.0f + m), t = -m * r;
    *slope = 4.0f * q * (r * r);
    return x < 0.0f ? -t : t;
}

PL_INLINE float tanh_only(float x) {
    float slope;
    return tanh_slope(x, &slope);
}

/* log x for a normal x >= 1 (a softmax denominator); NaN passes. */
PL_INLINE float log_above_one(float x) {
    uint32_t bits = pl_bits(x);
    float exponent = (float)((int32_t)(bits >> 23) - 127);
    float tail = pl_log1p_unit(pl_from_bits((bits & 0x007fffffu) | 0x3f800000u) - 1.0f);
    return x != x ? x : exponent * 0.693147180559945f + tail;
}

/* Add the partial rows in order. */
static void add_partials(const float *restrict partial, float *restrict total, int64_t blocks, int64_t stride, int64_t n) {
    for (int64_t d = 0; d < n; d++) total[d] = 0.0f;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t d = 0; d < n; d++) total[d] += partial[b * stride + d];
}

#define SELF "elementwise.c"
#include "typed.h"

#else

/* sum of a*a over n; two chains of vectors, so that the adder's latency does not set the pace. */
PL_INLINE float NAME(sum_squares)(const T *restrict a, int64_t n) {
    int64_t half = n / 2;
    const T *restrict b = a + half;
    float s = 0.0f, t = 0.0f;
#pragma omp simd reduction(+ : s, t)
    for (int64_t d = 0; d < half; d++) {
        s += LOAD(a[d]) * LOAD(a[d]);
        t += LOAD(b[d]) * LOAD(b[d]);
    }
    return s + t + (n % 2 ? LOAD(a[n - 1]) * LOAD(a[n - 1]) : 0.0f);
}

/* y = x * w * rsqrt(inverse * sum x^2 + eps); inverse is 1/D for RMSNorm and 1 for the L2 norm. w and rstd may be NULL. */
EXPORT void NAME(norm_forward)(const T *restrict x, int64_t x_stride, const float *restrict w, T *restrict y,
                               float *restrict rstd, int64_t rows, int64_t D, float inverse, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const T *a = x + n * x_stride;
        T *b = y + n * D;
        float r = pl_rsqrtf(NAME(sum_squares)(a, D) * inverse + eps);
        if (rstd) rstd[n] = r;
        if (w) {
#pragma omp simd
            for (int64_t d = 0; d < D; d++) b[d] = STORE(LOAD(a[d]) * r * w[d]);
        } else {
#pragma omp simd
            for (int64_t d = 0; d < D; d++) b[d] = STORE(LOAD(a[d]) * r);
        }
    }
}

/* With g = dy * w: dx = r g - x r^3 inverse <g, x>, dw = sum over rows of dy x r. partial: [blocks, D]. */
EXPORT void NAME(norm_backward)(const T *restrict x, int64_t x_stride, const float *restrict w, const float *restrict rstd,
                                const T *restrict dy, int64_t dy_stride, T *restrict dx, float *restrict partial,
                                float *restrict dw, int64_t blocks, int64_t rows, int64_t D, float inverse, int threads) {
    int64_t group = (rows + blocks - 1) / blocks;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        float *p = partial + block * D;
#pragma omp simd
        for (int64_t d = 0; d < D; d++) p[d] = 0.0f;
        int64_t end = (block + 1) * group < rows ? (block + 1) * group : rows;
        for (int64_t n = block * group; n < end; n++) {
            const T *a = x + n * x_stride, *g = dy + n * dy_stride;
            T *out = dx + n * D;
            float r = rstd[n], dot = 0.0f;
            if (w) {
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < D; d++) dot += LOAD(g[d]) * w[d] * LOAD(a[d]);
                float k = dot * inverse * r * r * r;
#pragma omp simd
                for (int64_t d = 0; d < D; d++) {
                    float gd = LOAD(g[d]), ad = LOAD(a[d]);
                    out[d] = STORE(r * (gd * w[d]) - k * ad);
                    p[d] += gd * (ad * r);
                }
            } else {
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < D; d++) dot += LOAD(g[d]) * LOAD(a[d]);
                float k = dot * inverse * r * r * r;
#pragma omp simd
                for (int64_t d = 0; d < D; d++) out[d] = STORE(r * LOAD(g[d]) - k * LOAD(a[d]));
            }
        }
    }
    if (dw) add_partials(partial, dw, blocks, D, D);
}

/* y = x * w * rsqrt(mean x^2 + eps) * sigma(gate). */
EXPORT void NAME(gated_norm_forward)(const T *restrict x, int64_t x_stride, const T *restrict gate, int64_t gate_stride,
                                     const float *restrict w, T *restrict y, float *restrict rstd, int64_t rows, int64_t D,
                                     float inverse, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const T *a = x + n * x_stride, *z = gate + n * gate_stride;
        T *b = y + n * D;
        float r = pl_rsqrtf(NAME(sum_squares)(a, D) * inverse + eps);
        if (rstd) rstd[n] = r;
#pragma omp simd
        for (int64_t d = 0; d < D; d++) b[d] = STORE(LOAD(a[d]) * r * w[d] * sigmoid(LOAD(z[d])));
    }
}

/* partial: [blocks, 2, D]; the second row of a block holds g = dy sigma(gate) w of the row at hand. */
EXPORT void NAME(gated_norm_backward)(const T *restrict x, int64_t x_stride, const T *restrict gate, int64_t gate_stride,
                                      const float *restrict w, const float *restrict rstd, const T *restrict dy,
                                      int64_t dy_stride, T *restrict dx, T *restrict dgate, float *restrict partial,
                                      float *restrict dw, int64_t blocks, int64_t rows, int64_t D, float inverse,
                                      int threads) {
    int64_t group = (rows + blocks - 1) / blocks;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        float *restrict p = partial + block * 2 * D, *restrict g = p + D;
#pragma omp simd
        for (int64_t d = 0; d < D; d++) p[d] = 0.0f;
        int64_t end = (block + 1) * group < rows ? (block + 1) * group : rows;
        for (int64_t n = block * group; n < end; n++) {
            const T *restrict a = x + n * x_stride, *restrict z = gate + n * gate_stride, *restrict e = dy + n * dy_stride;
            T *restrict da = dx + n * D, *restrict dz = dgate + n * D;
            float r = rstd[n], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int64_t d = 0; d < D; d++) {
                float slope, s = sigmoid_slope(LOAD(z[d]), &slope);
                float hat = LOAD(a[d]) * r, ed = LOAD(e[d]);
                dz[d] = STORE(ed * hat * w[d] * slope);
                p[d] += ed * s * hat;
                g[d] = ed * s * w[d];
                dot += g[d] * hat;
            }
            float k = dot * inverse * r * r;
#pragma omp simd
            for (int64_t d = 0; d < D; d++) da[d] = STORE(r * g[d] - k * LOAD(a[d]));
        }
    }
    add_partials(partial, dw, blocks, 2 * D, D);
}

/* SiTU-GLU: y = beta tanh(a / beta) sigma(a) * cap tanh(b / cap). cap <= 0: b passes unclamped. beta <= 0: SwiGLU, the
 * tanh on the gate side is left out as well. */
PL_INLINE void NAME(glu_row)(const T *restrict a, const T *restrict b, T *restrict y, int64_t F, float beta, float cap,
                             int capped_gate, int capped_up) {
    float inverse_beta = capped_gate ? 1.0f / beta : 0.0f, inverse_cap = capped_up ? 1.0f / cap : 0.0f;
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        float g = LOAD(a[f]), u = LOAD(b[f]);
        float left = (capped_gate ? beta * tanh_only(g * inverse_beta) : g) * sigmoid(g);
        y[f] = STORE(left * (capped_up ? cap * tanh_only(u * inverse_cap) : u));
    }
}

EXPORT void NAME(glu_forward)(const T *restrict a, int64_t a_stride, const T *restrict b, int64_t b_stride, T *restrict y,
                              int64_t rows, int64_t F, float beta, float cap, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const T *p = a + n * a_stride, *q = b + n * b_stride;
        T *out = y + n * F;
        if (beta <= 0.0f) NAME(glu_row)(p, q, out, F, beta, cap, 0, 0);
        else if (cap <= 0.0f) NAME(glu_row)(p, q, out, F, beta, cap, 1, 0);
        else NAME(glu_row)(p, q, out, F, beta, cap, 1, 1);
    }
}

PL_INLINE void NAME(glu_row_backward)(const T *restrict a, const T *restrict b, const T *restrict dy, T *restrict da,
                                      T *restrict db, int64_t F, float beta, float cap, int capped_gate, int capped_up) {
    float inverse_beta = capped_gate ? 1.0f / beta : 0.0f, inverse_cap = capped_up ? 1.0f / cap : 0.0f;
#pragma omp simd
    for (int64_t f = 0; f < F; f++) {
        float g = LOAD(a[f]), u = LOAD(b[f]), e = LOAD(dy[f]);
        float slope, s = sigmoid_slope(g, &slope);
        float dt = 1.0f, dv = 1.0f;
        float t = capped_gate ? beta * tanh_slope(g * inverse_beta, &dt) : g;
        float v = capped_up ? cap * tanh_slope(u * inverse_cap, &dv) : u;
        da[f] = STORE(e * v * (dt * s + t * slope));
        db[f] = STORE(e * t * s * dv);
    }
}

EXPORT void NAME(glu_backward)(const T *restrict a, int64_t a_stride, const T *restrict b, int64_t b_stride,
                               const T *restrict dy, int64_t dy_stride, T *restrict da, T *restrict db, int64_t rows,
                               int64_t F, float beta, float cap, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const T *p = a + n * a_stride, *q = b + n * b_stride, *e = dy + n * dy_stride;
        T *dp = da + n * F, *dq = db + n * F;
        if (beta <= 0.0f) NAME(glu_row_backward)(p, q, e, dp, dq, F, beta, cap, 0, 0);
        else if (cap <= 0.0f) NAME(glu_row_backward)(p, q, e, dp, dq, F, beta, cap, 1, 0);
        else NAME(glu_row_backward)(p, q, e, dp, dq, F, beta, cap, 1, 1);
    }
}

/* out[c] = sum_j w_j[c] row_j[c] over up to W rows; four at a time, so that the usual case is one fused loop. */
PL_INLINE void NAME(weighted_rows)(const T *const *row, const float *w, int64_t X, int64_t c0, int64_t n, int W,
                                   float *restrict out) {
    int j = 0;
    if (W >= 4) {
        const T *restrict r0 = row[0] + c0, *restrict r1 = row[1] + c0, *restrict r2 = row[2] + c0, *restrict r3 = row[3] + c0;
        const float *restrict w0 = w + c0, *restrict w1 = w0 + X, *restrict w2 = w1 + X, *restrict w3 = w2 + X;
#pragma omp simd
        for (int64_t c = 0; c < n; c++)
            out[c] = w0[c] * LOAD(r0[c]) + w1[c] * LOAD(r1[c]) + w2[c] * LOAD(r2[c]) + w3[c] * LOAD(r3[c]);
        j = 4;
    } else {
#pragma omp simd
        for (int64_t c = 0; c < n; c++) out[c] = 0.0f;
    }
    for (; j < W; j++) {
        const T *restrict r = row[j] + c0;
        const float *restrict wj = w + j * X + c0;
#pragma omp simd
        for (int64_t c = 0; c < n; c++) out[c] += wj[c] * LOAD(r[c]);
    }
}

/* share[j, c] += d[c] tap_j[c] for every tap. */
PL_INLINE void NAME(weight_share)(const T *const *tap, const float *restrict d, int64_t X, int64_t c0, int64_t n, int W,
                                  float *share) {
    int j = 0;
    if (W >= 4) {
        const T *restrict t0 = tap[0] + c0, *restrict t1 = tap[1] + c0, *restrict t2 = tap[2] + c0, *restrict t3 = tap[3] + c0;
        float *restrict s0 = share, *restrict s1 = s0 + X, *restrict s2 = s1 + X, *restrict s3 = s2 + X;
#pragma omp simd
        for (int64_t c = 0; c < n; c++) {
            s0[c] += d[c] * LOAD(t0[c]);
            s1[c] += d[c] * LOAD(t1[c]);
            s2[c] += d[c] * LOAD(t2[c]);
            s3[c] += d[c] * LOAD(t3[c]);
        }
        j = 4;
    }
    for (; j < W; j++) {
        const T *restrict t = tap[j] + c0;
        float *restrict s = share + j * X;
#pragma omp simd
        for (int64_t c = 0; c < n; c++) s[c] += d[c] * LOAD(t[c]);
    }
}

/* Rows that the W taps of token t read: the token's own document, then the carried window, else zeros.
 * first[t] (may be NULL: 0) is the index in the row of the first token of t's document; window is [W-1, X] or NULL. */
PL_INLINE void NAME(tap_rows)(const T **tap, const T *x, int64_t stride, const T *window, const T *zeros, int64_t X, int64_t t,
                              const int64_t *first, int W) {
    int64_t start = first ? first[t] : 0;
    for (int j = 0; j < W; j++) {
        int64_t s = t - (W - 1) + j;
        tap[j] = s >= start ? x + s * stride : (window && s < 0 ? window + (s + W - 1) * X : zeros);
    }
}

/* y[b, t, c] = silu(sum_j w[j, c] x[b, t - W + 1 + j, c]). w is [W, X], window [B, W-1, X], first [B, L], zeros [X]. */
EXPORT void NAME(conv_forward)(const T *x, int64_t batch_stride, int64_t stride, const float *w, const T *window,
                               const int64_t *first, const T *zeros, T *y, int64_t B, int64_t L, int64_t X, int W,
                               int64_t time_block, int threads) {
    int64_t times = (L + time_block - 1) / time_block, channels = (X + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t task = 0; task < B * times * channels; task++) {
        int64_t b = task / (times * channels), t0 = task / channels % times * time_block;
        int64_t c0 = task % channels * CHANNEL_BLOCK, n = X - c0 < CHANNEL_BLOCK ? X - c0 : CHANNEL_BLOCK;
        int64_t t1 = t0 + time_block < L ? t0 + time_block : L;
        const T *tap[MAX_TAPS];
        float pre[CHANNEL_BLOCK];
        for (int64_t t = t0; t < t1; t++) {
            NAME(tap_rows)(tap, x + b * batch_stride, stride, window ? window + b * (W - 1) * X : 0, zeros, X, t,
                           first ? first + b * L : 0, W);
            NAME(weighted_rows)(tap, w, X, c0, n, W, pre);
            T *restrict out = y + (b * L + t) * X + c0;
#pragma omp simd
            for (int64_t c = 0; c < n; c++) out[c] = STORE(pre[c] * sigmoid(pre[c]));
        }
    }
}

/* Each task owns [t0, t1) x channels: it writes dx there, and its share of dw into partial[b, time block] ([W, X]). It
 * recomputes the W-1 pre-activation gradients beyond t1 that also read its tokens. dwindow is [B, W-1, X] or NULL. */
EXPORT void NAME(conv_backward)(const T *x, int64_t batch_stride, int64_t stride, const float *w, const T *window,
                                const int64_t *first, const T *zeros, const T *dy, int64_t dy_batch_stride,
                                int64_t dy_stride, T *dx, T *dwindow, float *partial, float *dw, int64_t B, int64_t L,
                                int64_t X, int W, int64_t time_block, int threads) {
    int64_t times = (L + time_block - 1) / time_block, channels = (X + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t task = 0; task < B * times * channels; task++) {
        int64_t b = task / (times * channels), t0 = task / channels % times * time_block;
        int64_t c0 = task % channels * CHANNEL_BLOCK, n = X - c0 < CHANNEL_BLOCK ? X - c0 : CHANNEL_BLOCK;
        int64_t t1 = t0 + time_block < L ? t0 + time_block : L;
        const int64_t *starts = first ? first + b * L : 0;
        const T *tap[MAX_TAPS];
        float ring[MAX_TAPS][CHANNEL_BLOCK];
        float *share = partial + task / channels * W * X + c0;
        for (int j = 0; j < W; j++)
#pragma omp simd
            for (int64_t c = 0; c < n; c++) share[j * X + c] = 0.0f;
        int64_t next = t0;
        for (int64_t s = t0 == 0 && dwindow ? 1 - W : t0; s < t1; s++) {
            int64_t last = s + W - 1 < L - 1 ? s + W - 1 : L - 1; /* the last token that reads s */
            for (; next <= last; next++) {
                float *restrict d = ring[next % W];
                NAME(tap_rows)(tap, x + b * batch_stride, stride, window ? window + b * (W - 1) * X : 0, zeros, X, next,
                               starts, W);
                NAME(weighted_rows)(tap, w, X, c0, n, W, d);
                const T *restrict e = dy + b * dy_batch_stride + next * dy_stride + c0;
#pragma omp simd
                for (int64_t c = 0; c < n; c++) {
                    float slope, g = sigmoid_slope(d[c], &slope);
                    d[c] = LOAD(e[c]) * (g + d[c] * slope);
                }
                if (next < t1) NAME(weight_share)(tap, d, X, c0, n, W, share);
            }
            float sum[CHANNEL_BLOCK];
            if (W == 4 && s >= 0 && last == s + 3 && !(starts && starts[last] > s)) {
                const float *restrict d0 = ring[s % 4], *restrict d1 = ring[(s + 1) % 4];
                const float *restrict d2 = ring[(s + 2) % 4], *restrict d3 = ring[(s + 3) % 4];
                const float *restrict w0 = w + c0, *restrict w1 = w0 + X, *restrict w2 = w1 + X, *restrict w3 = w2 + X;
#pragma omp simd
                for (int64_t c = 0; c < n; c++) sum[c] = w3[c] * d0[c] + w2[c] * d1[c] + w1[c] * d2[c] + w0[c] * d3[c];
            } else {
#pragma omp simd
                for (int64_t c = 0; c < n; c++) sum[c] = 0.0f;
                for (int64_t reader = s < 0 ? 0 : s; reader <= last; reader++) {
                    if (starts && starts[reader] > s) break; /* a later document; so are all that follow */
                    const float *restrict d = ring[reader % W];
                    const float *restrict wj = w + (s + W - 1 - reader) * X + c0;
#pragma omp simd
                    for (int64_t c = 0; c < n; c++) sum[c] += wj[c] * d[c];
                }
            }
            T *restrict out = (s < 0 ? dwindow + (b * (W - 1) + s + W - 1) * X : dx + (b * L + s) * X) + c0;
#pragma omp simd
            for (int64_t c = 0; c < n; c++) out[c] = STORE(sum[c]);
        }
    }
    add_partials(partial, dw, B * times, W * X, W * X);
}

/* One token for each row: x [B, X], window [B, X, W-1], w [X, W] (as stored) -> y [B, X] and the shifted window. */
EXPORT void NAME(conv_step)(const T *x, int64_t stride, const float *w, const T *window, T *y, T *new_window, int64_t B,
                            int64_t X, int W, int threads) {
    int64_t channels = (X + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t task = 0; task < B * channels; task++) {
        int64_t b = task / channels, c0 = task % channels * CHANNEL_BLOCK;
        int64_t n = X - c0 < CHANNEL_BLOCK ? X - c0 : CHANNEL_BLOCK;
        const T *restrict in = x + b * stride + c0, *restrict old = window + (b * X + c0) * (W - 1);
        const float *restrict weight = w + c0 * W;
        T *restrict out = y + b * X + c0, *restrict fresh = new_window + (b * X + c0) * (W - 1);
        float pre[CHANNEL_BLOCK];
        if (W == 4) {
#pragma omp simd
            for (int64_t c = 0; c < n; c++) {
                T a1 = old[3 * c + 1], a2 = old[3 * c + 2], a3 = in[c];
                pre[c] = weight[4 * c] * LOAD(old[3 * c]) + weight[4 * c + 1] * LOAD(a1) + weight[4 * c + 2] * LOAD(a2) +
                         weight[4 * c + 3] * LOAD(a3);
                fresh[3 * c] = a1, fresh[3 * c + 1] = a2, fresh[3 * c + 2] = a3;
            }
        } else {
#pragma omp simd
            for (int64_t c = 0; c < n; c++) {
                float sum = 0.0f;
                for (int j = 0; j < W - 1; j++) {
                    sum += weight[c * W + j] * LOAD(old[c * (W - 1) + j]);
                    fresh[c * (W - 1) + j] = j < W - 2 ? old[c * (W - 1) + j + 1] : in[c];
                }
                pre[c] = sum + weight[c * W + W - 1] * LOAD(in[c]);
            }
        }
#pragma omp simd
        for (int64_t c = 0; c < n; c++) out[c] = STORE(pre[c] * sigmoid(pre[c]));
    }
}

/* loss[n] = logsumexp(row) - row[target]; with `gradient` the row becomes scale[n] * (softmax(row) - onehot(target)), where
 * scale may be NULL for 1. A row whose target is `ignore` has loss 0 and gradient 0, whatever its logits hold. */
EXPORT void NAME(cross_entropy_rows)(T *restrict logits, const int64_t *restrict target, float *restrict loss, int64_t rows,
                                     const float *restrict scale, int64_t Z, int64_t ignore, int gradient, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        T *restrict a = logits + n * Z;
        if (target[n] == ignore) {
            loss[n] = 0.0f;
            if (gradient)
                for (int64_t z = 0; z < Z; z++) a[z] = 0;
            continue;
        }
        float top = -__builtin_inff(), sum = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t z = 0; z < Z; z++) top = LOAD(a[z]) > top ? LOAD(a[z]) : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t z = 0; z < Z; z++) sum += pl_expf(LOAD(a[z]) - top);
        float chosen = LOAD(a[target[n]]);
        loss[n] = log_above_one(sum) + top - chosen;
        if (!gradient) continue;
        float outer = scale ? scale[n] : 1.0f, factor = outer / sum;
        for (int64_t z = 0; z < Z; z++) a[z] = STORE(factor * pl_expf(LOAD(a[z]) - top));
        a[target[n]] = STORE(factor * pl_expf(chosen - top) - outer);
    }
}

#endif
