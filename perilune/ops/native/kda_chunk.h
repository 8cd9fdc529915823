/* One chunk of Kimi Delta Attention for one head: loading, decays, products, and the triangular solve.
 *
 * A chunk is at most 16 tokens and ends earlier where the decay since its first token would fall below PL_TINY on some
 * channel, or at a multiple of PL_SEGMENT tokens. So k / decay stays in range for any log-decay <= 0, minus infinity
 * included, and where a chunk begins depends on past tokens only. The bounded gate (g >= -5) always fills its chunks.
 *
 * Decays are cumulative products of alpha = e^g anchored at the chunk's first token, not exponentials of cumulative sums:
 *   since[r] = alpha_1 ... alpha_r (1 for r = 0)      until[r] = alpha_{r+1} ... alpha_last
 * and the first token's own decay is applied to the state when the chunk begins: Sbar = alpha_0 S. With that,
 *   Qa = scale q since     Ka = k since     Kinv = k / since     Kend = k until
 *   P = tril(Qa Kinv^T), diagonal scale q.k     KK = tril(Ka Kinv^T, -1)
 *   R = V - Ka Sbar     U = (I + beta KK)^-1 beta R     O = Qa Sbar + P U     S' = since_last Sbar + Kend^T U
 */
#ifndef PERILUNE_KDA_CHUNK_H
#define PERILUNE_KDA_CHUNK_H

#include <stdlib.h>

#include "vector.h"

#define PL_CHUNK 16
#define PL_SEGMENT 64      /* tokens between the states that the forward pass keeps for the backward pass */
#define PL_TINY 2e-34f     /* below e^-75 = 2.7e-33, which fifteen steps at the lowest bound reach */
#define PL_L2_EPS 1e-6f

typedef struct {
    int64_t sequences, heads, qk_heads, key_dim, value_dim, threads;
    int64_t q_stride, k_stride, v_stride, g_stride, beta_stride; /* numbers from one token to the next */
    int64_t type, g_type, beta_type, dqk_type;                   /* of q k v o; g; beta; dq dk */
    int64_t l2_norm, gate, bounded, beta_sigmoid, state_v_first; /* gate: 0 = g holds log-decays */
    float scale, lower_bound, beta_scale, unused;
    const int64_t *offsets; /* [sequences + 1] first token of each sequence */
    const void *q, *k, *v, *g, *beta;
    const float *A_log, *dt_bias, *initial_state; /* each may be NULL */
    float *kept;                                  /* states at multiples of PL_SEGMENT, or NULL */
    const int64_t *kept_offsets;                  /* [sequences] first kept state of each sequence, in heads * K * V */
    void *o;
    float *final_state; /* may be NULL */
    /* backward only; dq and dk are per value head */
    const void *d_o;
    const float *d_final_state; /* may be NULL */
    void *dq, *dk, *dv, *dg, *dbeta;
    float *dA_log, *d_dt_bias, *d_initial_state; /* per (sequence, head): [.], [., K], state */
} kda_args;

/* Buffers of one chunk; rows are tokens, K and V padded to multiples of PL_PAD. */
typedef struct {
    int count;      /* tokens in the chunk */
    int64_t first;  /* its first token */
    float *q, *k;   /* [16, K] normalised, q not yet scaled */
    float *alpha, *since, *until, *inverse; /* [16, K] */
    float *queries; /* [32, K] Qa over Ka */
    float *k_inv, *k_end;                   /* [16, K] */
    float *slope, *rate;                    /* [16, K] dg/dz and dg/dA_log, backward only */
    float *r, *u;                           /* [16, V] */
    float *state;                           /* [K, V] Sbar */
    float products[2 * PL_CHUNK * PL_CHUNK]; /* P over KK */
    float beta[PL_CHUNK], q_rstd[PL_CHUNK], k_rstd[PL_CHUNK], qk[PL_CHUNK];
} kda_chunk;

PL_INLINE size_t kda_chunk_floats(int K, int V, int backward) {
    return (size_t)PL_CHUNK * K * (backward ? 12 : 10) + (size_t)PL_CHUNK * V * 2 + (backward ? (size_t)K * V : 0);
}

/* Lay a chunk's buffers out in `memory`; a forward pass keeps one state outside. */
PL_INLINE void kda_chunk_place(kda_chunk *c, float *memory, int K, int V, float *state) {
    float **fields[] = {&c->q, &c->k, &c->alpha, &c->since, &c->until, &c->inverse, &c->k_inv, &c->k_end};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++, memory += PL_CHUNK * K) *fields[i] = memory;
    c->queries = memory, memory += 2 * PL_CHUNK * K;
    c->r = memory, memory += PL_CHUNK * V;
    c->u = memory, memory += PL_CHUNK * V;
    c->state = state, c->slope = c->rate = 0;
    if (!state) {
        c->slope = memory, memory += PL_CHUNK * K;
        c->rate = memory, memory += PL_CHUNK * K;
        c->state = memory;
    }
}

/* alpha = e^g of one token's padded channels; with `slope`, also the derivatives of g. */
PL_INLINE void kda_decay_all(const kda_args *a, int head, int64_t token, int K, float *restrict alpha,
                         float *restrict slope, float *restrict rate) {
    int key_dim = (int)a->key_dim;
    pl_read(alpha, a->g, token * a->g_stride + (int64_t)head * key_dim, key_dim, K, (int)a->g_type);
    if (!a->gate) {
        PL_SIMD for (int i = 0; i < K; i++) alpha[i] = pl_expf(alpha[i]);
        if (slope)
            PL_SIMD for (int i = 0; i < K; i++) slope[i] = 1.0f, rate[i] = 0.0f;
        return;
    }
    if (a->dt_bias) {
        const float *bias = a->dt_bias + (int64_t)head * key_dim;
        PL_SIMD for (int i = 0; i < key_dim; i++) alpha[i] += bias[i];
    }
    float e = a->A_log ? pl_expf(a->A_log[head]) : 1.0f, bound = a->lower_bound;
    if (a->bounded) {
        if (slope) {
            PL_SIMD for (int i = 0; i < K; i++) {
                float y = e * alpha[i], s = pl_sigmoidf(y), d = bound * s * pl_sigmoidf(-y);
                slope[i] = d * e, rate[i] = d * y, alpha[i] = pl_expf(bound * s);
            }
        } else {
            PL_SIMD for (int i = 0; i < K; i++) alpha[i] = pl_expf(bound * pl_sigmoidf(e * alpha[i]));
        }
    } else if (slope) {
        PL_SIMD for (int i = 0; i < K; i++) {
            float g = -e * pl_softplusf(alpha[i]);
            slope[i] = -e * pl_sigmoidf(alpha[i]), rate[i] = g, alpha[i] = pl_expf(g);
        }
    } else {
        PL_SIMD for (int i = 0; i < K; i++) alpha[i] = pl_expf(-e * pl_softplusf(alpha[i]));
    }
}

/* The same with 1 in the padding: a padded channel must not be the one that ends a chunk. */
PL_INLINE void kda_decay(const kda_args *a, int head, int64_t token, int K, float *restrict alpha,
                         float *restrict slope, float *restrict rate) {
    kda_decay_all(a, head, token, K, alpha, slope, rate);
    for (int i = (int)a->key_dim; i < K; i++) alpha[i] = 1.0f;
}

PL_INLINE float kda_normalise(float *x, int K, int l2_norm) {
    if (!l2_norm) return 1.0f;
    float rstd = pl_rsqrtf(pl_dot(K, x, x) + PL_L2_EPS);
    PL_SIMD for (int i = 0; i < K; i++) x[i] *= rstd;
    return rstd;
}

/* Read the tokens of the chunk that begins at `first` (of a sequence that began at `begin` and ends at `end`). */
PL_INLINE void kda_chunk_load(const kda_args *a, kda_chunk *c, int head, int64_t begin, int64_t first, int64_t end,
                              int K, int V) {
    int64_t limit = begin + ((first - begin) / PL_SEGMENT + 1) * PL_SEGMENT;
    if (limit > end) limit = end;
    if (limit > first + PL_CHUNK) limit = first + PL_CHUNK;
    int wanted = (int)(limit - first), count = 0;
    for (; count < wanted; count++) {
        int at = count * K;
        float *alpha = c->alpha + at, *since = c->since + at;
        kda_decay(a, head, first + count, K, alpha, c->slope ? c->slope + at : 0, c->rate ? c->rate + at : 0);
        if (count == 0) {
            PL_SIMD for (int i = 0; i < K; i++) since[i] = 1.0f;
            continue;
        }
        int closed = 0;
        for (int i = 0; i < K; i++) {
            since[i] = since[i - K] * alpha[i];
            closed |= since[i] < PL_TINY;
        }
        if (closed) break;
    }
    c->count = count, c->first = first;
    int group = (int)(a->heads / a->qk_heads), qk_head = head / group;
    int key_dim = (int)a->key_dim, value_dim = (int)a->value_dim, type = (int)a->type;
    for (int r = 0; r < PL_CHUNK; r++) {
        float *q = c->q + r * K, *k = c->k + r * K, *since = c->since + r * K, *inverse = c->inverse + r * K;
        float *v = c->r + r * V;
        if (r < count) {
            int64_t token = first + r;
            pl_read(q, a->q, token * a->q_stride + (int64_t)qk_head * key_dim, key_dim, K, type);
            pl_read(k, a->k, token * a->k_stride + (int64_t)qk_head * key_dim, key_dim, K, type);
            pl_read(v, a->v, token * a->v_stride + (int64_t)head * value_dim, value_dim, V, type);
            c->q_rstd[r] = kda_normalise(q, K, (int)a->l2_norm);
            c->k_rstd[r] = kda_normalise(k, K, (int)a->l2_norm);
            float beta;
            pl_read(&beta, a->beta, token * a->beta_stride + head, 1, 1, (int)a->beta_type);
            c->beta[r] = a->beta_sigmoid ? a->beta_scale * pl_sigmoidf(beta) : beta;
        } else { /* a row without a token writes nothing and does not decay */
            float *alpha = c->alpha + r * K;
            for (int i = 0; i < K; i++) q[i] = k[i] = 0.0f, alpha[i] = 1.0f, since[i] = since[i - K];
            PL_SIMD for (int i = 0; i < V; i++) v[i] = 0.0f;
            c->beta[r] = 0.0f;
        }
        float *qa = c->queries + r * K, *ka = qa + PL_CHUNK * K, *k_inv = c->k_inv + r * K;
        PL_SIMD for (int i = 0; i < K; i++) {
            inverse[i] = 1.0f / since[i];
            qa[i] = a->scale * q[i] * since[i];
            ka[i] = k[i] * since[i];
            k_inv[i] = k[i] * inverse[i];
        }
        c->qk[r] = a->scale * pl_dot(K, q, k);
    }
    for (int r = PL_CHUNK - 1; r >= 0; r--) {
        float *until = c->until + r * K, *k_end = c->k_end + r * K, *k = c->k + r * K;
        PL_SIMD for (int i = 0; i < K; i++) {
            until[i] = r == PL_CHUNK - 1 ? 1.0f : until[i + K] * c->alpha[(r + 1) * K + i];
            k_end[i] = k[i] * until[i];
        }
    }
}

/* P and KK; what lies on or above their diagonals is not to be used, except P's diagonal, which is set. */
PL_INLINE void kda_chunk_products(kda_chunk *c, int K, float *k_inv_T) {
    pl_transpose(PL_CHUNK, K, c->k_inv, K, k_inv_T, PL_CHUNK);
    pl_matmul(2 * PL_CHUNK, PL_CHUNK, K, c->queries, K, 1, k_inv_T, PL_CHUNK, c->products, PL_CHUNK, 0);
    for (int r = 0; r < PL_CHUNK; r++) c->products[r * PL_CHUNK + r] = c->qk[r];
}

/* With r = V on entry and `read` = [Qa; Ka] Sbar (or its lower half alone): r = V - Ka Sbar and u by substitution. */
PL_INLINE void kda_chunk_solve(kda_chunk *c, const float *restrict ka_state, int V) {
    for (int r = 0; r < c->count; r++) {
        float *restrict rest = c->r + r * V, *restrict u = c->u + r * V;
        const float *corrections = c->products + (PL_CHUNK + r) * PL_CHUNK;
        float coefficient[PL_CHUNK];
        for (int j = 0; j < r; j++) coefficient[j] = -c->beta[r] * corrections[j];
        PL_SIMD for (int i = 0; i < V; i++) {
            rest[i] -= ka_state[r * V + i];
            u[i] = c->beta[r] * rest[i];
        }
        pl_combine(V, r, coefficient, 1, c->u, V, u);
    }
    memset(c->u + c->count * V, 0, sizeof(float) * (PL_CHUNK - c->count) * V);
}

/* Read or write a [K, V] state of the caller, in either layout. */
PL_INLINE void kda_state_read(const kda_args *a, float *restrict state, const float *restrict from, int K, int V) {
    int key_dim = (int)a->key_dim, value_dim = (int)a->value_dim;
    memset(state, 0, sizeof(float) * K * V);
    if (!from) return;
    for (int i = 0; i < key_dim; i++)
        for (int j = 0; j < value_dim; j++)
            state[i * V + j] = from[a->state_v_first ? j * key_dim + i : i * value_dim + j];
}

PL_INLINE void kda_state_write(const kda_args *a, float *restrict to, const float *restrict state, int V) {
    int key_dim = (int)a->key_dim, value_dim = (int)a->value_dim;
    for (int i = 0; i < key_dim; i++)
        for (int j = 0; j < value_dim; j++)
            to[a->state_v_first ? j * key_dim + i : i * value_dim + j] = state[i * V + j];
}

#endif
