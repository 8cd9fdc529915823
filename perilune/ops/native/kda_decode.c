/* One token of a whole KDA mixer between its projections, for each row and head, in one pass over the state:
 * short convolution + SiLU, L2 norm, decay gate, recurrence, RMSNorm and sigmoid output gate.
 *
 * The state is [B, H, V, K] float32 and the window [B, X, W-1] holds the last raw projections; both change in place. A
 * state row v is read once and written once: with a = alpha * S_v, u = beta (value_v - a.k), o_v = a.q + u (k.q).
 *
 * Or both lie in pages of a pool, head by head: row b uses page `page[b]`, where a head's matrix and its q, k and v channels
 * of the window are runs of numbers.
 */
#include "vector.h"

#define PL_MAX_DIM 256
#define PL_MAX_TAPS 16
#define PL_L2_EPS 1e-6f
#define PL_PARALLEL_NUMBERS (1 << 19) /* state numbers below which waking other threads costs more than it saves */

typedef struct {
    int64_t batch, heads, key_dim, value_dim, taps, threads;
    int64_t qkv_stride, decay_stride, beta_stride, gate_stride; /* numbers from one row of the batch to the next */
    int64_t type, window_type, bounded;                         /* of the activations; of the window */
    float scale, lower_bound, norm_eps, unused;
    const float *conv_weight, *A_log, *dt_bias, *norm_weight; /* [X, W] [H] [H, K] [V]; A_log, dt_bias may be NULL */
    void *window;
    float *state;
    const void *qkv, *decay, *beta, *gate;
    void *out; /* [B, H * V] */
    const int64_t *page; /* [B], or NULL: not in pages */
    int64_t state_page, state_head, window_page, window_head; /* numbers from one page, or head, to the next */
} kda_decode_args;

/* Where the window of a head's part (0 q, 1 k, 2 v) begins, whose first channel among all is `channel`. */
static int64_t window_at(const kda_decode_args *a, int64_t row, int head, int part, int64_t channel) {
    int64_t past = a->taps - 1;
    if (a->page) return a->page[row] * a->window_page + head * a->window_head + part * a->key_dim * past;
    return (row * a->heads * (2 * a->key_dim + a->value_dim) + channel) * past;
}

/* SiLU of the convolution of `count` channels from `channel` on; shifts their window, which begins at `at`. `out` is padded with zeros. */
static void convolve(const kda_decode_args *a, int64_t row, int64_t channel, int64_t at, int count, int padded,
                     float *restrict out) {
    int taps = (int)a->taps, past = taps - 1;
    const float *weight = a->conv_weight + channel * taps;
    float fresh[PL_MAX_DIM];
    pl_read(fresh, a->qkv, row * a->qkv_stride + channel, count, count, (int)a->type);
    if (a->window_type == PL_FLOAT32 && past == 3) {
        float *window = (float *)a->window + at;
        for (int i = 0; i < count; i++, window += 3, weight += 4) {
            float w0 = window[0], w1 = window[1], w2 = window[2];
            out[i] = weight[0] * w0 + weight[1] * w1 + weight[2] * w2 + weight[3] * fresh[i];
            window[0] = w1, window[1] = w2, window[2] = fresh[i];
        }
    } else {
        for (int i = 0; i < count; i++, at += past, weight += taps) {
            float line[PL_MAX_TAPS], sum = 0.0f;
            pl_read(line, a->window, at, past, past, (int)a->window_type);
            line[past] = fresh[i];
            for (int j = 0; j < taps; j++) sum += weight[j] * line[j];
            out[i] = sum;
            pl_write(a->window, at, line + 1, past, (int)a->window_type);
        }
    }
    PL_SIMD for (int i = 0; i < count; i++) out[i] *= pl_sigmoidf(out[i]);
    for (int i = count; i < padded; i++) out[i] = 0.0f;
}

static void decode_head(const kda_decode_args *a, int64_t row, int head) {
    int key_dim = (int)a->key_dim, value_dim = (int)a->value_dim;
    int K = pl_padded(key_dim), V = pl_padded(value_dim);
    int64_t key_width = a->heads * a->key_dim;
    float q[PL_MAX_DIM], k[PL_MAX_DIM], v[PL_MAX_DIM], alpha[PL_MAX_DIM], o[PL_MAX_DIM], gate[PL_MAX_DIM], beta;
    int64_t first[3] = {(int64_t)head * key_dim, key_width + (int64_t)head * key_dim,
                        2 * key_width + (int64_t)head * value_dim};
    convolve(a, row, first[0], window_at(a, row, head, 0, first[0]), key_dim, K, q);
    convolve(a, row, first[1], window_at(a, row, head, 1, first[1]), key_dim, K, k);
    convolve(a, row, first[2], window_at(a, row, head, 2, first[2]), value_dim, V, v);
    float q_scale = a->scale * pl_rsqrtf(pl_dot(K, q, q) + PL_L2_EPS), k_scale = pl_rsqrtf(pl_dot(K, k, k) + PL_L2_EPS);
    PL_SIMD for (int i = 0; i < K; i++) q[i] *= q_scale, k[i] *= k_scale;
    float kq = pl_dot(K, q, k);

    pl_read(alpha, a->decay, row * a->decay_stride + (int64_t)head * key_dim, key_dim, K, (int)a->type);
    if (a->dt_bias) {
        const float *bias = a->dt_bias + (int64_t)head * key_dim;
        PL_SIMD for (int i = 0; i < key_dim; i++) alpha[i] += bias[i];
    }
    float e = a->A_log ? pl_expf(a->A_log[head]) : 1.0f, bound = a->lower_bound;
    if (a->bounded) {
        PL_SIMD for (int i = 0; i < K; i++) alpha[i] = pl_expf(bound * pl_sigmoidf(e * alpha[i]));
    } else {
        PL_SIMD for (int i = 0; i < K; i++) alpha[i] = pl_expf(-e * pl_softplusf(alpha[i]));
    }
    pl_read(&beta, a->beta, row * a->beta_stride + head, 1, 1, (int)a->type);
    beta = pl_sigmoidf(beta);

    float *state = a->state + (a->page ? a->page[row] * a->state_page + head * a->state_head
                                       : (row * a->heads + head) * (int64_t)value_dim * key_dim);
    int whole = key_dim / PL_LANES * PL_LANES;
    for (int j = 0; j < value_dim; j++, state += key_dim) {
        pl_vec along_k = {0.0f}, along_q = {0.0f};
        float tail_k = 0.0f, tail_q = 0.0f;
        for (int i = 0; i < whole; i += PL_LANES) {
            pl_vec s = pl_load(alpha + i) * pl_load(state + i);
            along_k += s * pl_load(k + i), along_q += s * pl_load(q + i);
        }
        for (int i = whole; i < key_dim; i++) {
            float s = alpha[i] * state[i];
            tail_k += s * k[i], tail_q += s * q[i];
        }
        float u = beta * (v[j] - (pl_sum(along_k) + tail_k));
        o[j] = pl_sum(along_q) + tail_q + u * kq;
        for (int i = 0; i < whole; i += PL_LANES)
            pl_store(state + i, pl_load(alpha + i) * pl_load(state + i) + u * pl_load(k + i));
        for (int i = whole; i < key_dim; i++) state[i] = alpha[i] * state[i] + u * k[i];
    }
    for (int j = value_dim; j < V; j++) o[j] = 0.0f;

    float rstd = pl_rsqrtf(pl_dot(V, o, o) / (float)value_dim + a->norm_eps);
    pl_read(gate, a->gate, row * a->gate_stride + (int64_t)head * value_dim, value_dim, V, (int)a->type);
    PL_SIMD for (int j = 0; j < value_dim; j++) o[j] *= rstd * a->norm_weight[j] * pl_sigmoidf(gate[j]);
    pl_write(a->out, (row * a->heads + head) * (int64_t)value_dim, o, value_dim, (int)a->type);
}

void kda_decode(const kda_decode_args *a) {
    int64_t tasks = a->batch * a->heads, numbers = tasks * a->key_dim * a->value_dim;
    int threads = numbers < PL_PARALLEL_NUMBERS ? 1 : (int)a->threads;
    if (threads == 1) {
        for (int64_t task = 0; task < tasks; task++) decode_head(a, task / a->heads, (int)(task % a->heads));
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < tasks; task++) decode_head(a, task / a->heads, (int)(task % a->heads));
}
