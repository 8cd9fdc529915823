/* Kimi Delta Attention on CPU cores: forward and backward over whole sequences, one (sequence, head) per task.
 *
 * q and k normalisation, the decay gate and the sigmoid of beta are part of it. float32 inside; float32 or bfloat16
 * outside; states float32. The forward pass keeps the state at every PL_SEGMENT tokens, the backward pass recomputes the
 * rest of a segment from there, in cache. No result depends on the number of threads. See kda_chunk.h for the algebra.
 */
#include "kda_chunk.h"

static void forward_task(const kda_args *a, int64_t n, int head, int K, int V, float *memory) {
    int64_t begin = a->offsets[n], end = a->offsets[n + 1], state_size = a->key_dim * a->value_dim;
    float *state = memory, *read = state + (size_t)K * V, *k_inv_T = read + 2 * PL_CHUNK * V;
    kda_chunk c;
    kda_chunk_place(&c, k_inv_T + PL_CHUNK * K, K, V, state);
    const float *initial = a->initial_state ? a->initial_state + (n * a->heads + head) * state_size : 0;
    kda_state_read(a, state, initial, K, V);
    for (int64_t first = begin; first < end; first += c.count) {
        if (a->kept && (first - begin) % PL_SEGMENT == 0) {
            int64_t slot = (a->kept_offsets[n] + (first - begin) / PL_SEGMENT) * a->heads + head;
            float *kept = a->kept + slot * state_size;
            for (int i = 0; i < a->key_dim; i++)
                memcpy(kept + i * a->value_dim, state + i * V, sizeof(float) * a->value_dim);
        }
        kda_chunk_load(a, &c, head, begin, first, end, K, V);
        kda_chunk_products(&c, K, k_inv_T);
        for (int i = 0; i < K; i++)
            PL_SIMD for (int j = 0; j < V; j++) state[i * V + j] *= c.alpha[i];
        pl_matmul(2 * PL_CHUNK, V, K, c.queries, K, 1, state, V, read, V, 0);
        kda_chunk_solve(&c, read + PL_CHUNK * V, V);
        for (int r = 0; r < c.count; r++) {
            pl_combine(V, r + 1, c.products + r * PL_CHUNK, 1, c.u, V, read + r * V);
            int64_t at = ((first + r) * a->heads + head) * a->value_dim;
            pl_write(a->o, at, read + r * V, (int)a->value_dim, (int)a->type);
        }
        pl_matmul(K, V, PL_CHUNK, c.k_end, 1, K, c.u, V, state, V, c.since + (PL_CHUNK - 1) * K);
    }
    if (a->final_state) kda_state_write(a, a->final_state + (n * a->heads + head) * state_size, state, V);
}

static float *allocate(size_t floats) {
    void *memory = 0;
    return posix_memalign(&memory, 64, floats * sizeof(float)) ? 0 : memory;
}

/* The recurrence itself, token by token: no result depends on where a sequence is cut. */
static void recurrent_task(const kda_args *a, int64_t n, int head, int K, int V, float *memory) {
    int64_t state_size = a->key_dim * a->value_dim;
    int key_dim = (int)a->key_dim, value_dim = (int)a->value_dim, type = (int)a->type;
    int qk_head = head / (int)(a->heads / a->qk_heads);
    float *state = memory, *q = state + (size_t)K * V, *k = q + K, *alpha = k + K, *u = alpha + K, *o = u + V;
    const float *initial = a->initial_state ? a->initial_state + (n * a->heads + head) * state_size : 0;
    kda_state_read(a, state, initial, K, V);
    for (int64_t token = a->offsets[n]; token < a->offsets[n + 1]; token++) {
        float beta;
        pl_read(q, a->q, token * a->q_stride + (int64_t)qk_head * key_dim, key_dim, K, type);
        pl_read(k, a->k, token * a->k_stride + (int64_t)qk_head * key_dim, key_dim, K, type);
        pl_read(u, a->v, token * a->v_stride + (int64_t)head * value_dim, value_dim, V, type);
        pl_read(&beta, a->beta, token * a->beta_stride + head, 1, 1, (int)a->beta_type);
        if (a->beta_sigmoid) beta = a->beta_scale * pl_sigmoidf(beta);
        kda_normalise(q, K, (int)a->l2_norm);
        kda_normalise(k, K, (int)a->l2_norm);
        kda_decay(a, head, token, K, alpha, 0, 0);
        for (int i = 0; i < K; i++) {
            PL_SIMD for (int j = 0; j < V; j++) {
                state[i * V + j] *= alpha[i];
                u[j] -= k[i] * state[i * V + j];
            }
        }
        PL_SIMD for (int j = 0; j < V; j++) u[j] *= beta, o[j] = 0.0f;
        for (int i = 0; i < K; i++) {
            float scaled = a->scale * q[i];
            PL_SIMD for (int j = 0; j < V; j++) {
                state[i * V + j] += k[i] * u[j];
                o[j] += scaled * state[i * V + j];
            }
        }
        pl_write(a->o, (token * a->heads + head) * value_dim, o, value_dim, type);
    }
    if (a->final_state) kda_state_write(a, a->final_state + (n * a->heads + head) * state_size, state, V);
}

typedef void forward_function(const kda_args *, int64_t, int, int, int, float *);

static int for_each_head(const kda_args *a, forward_function *run, int K, int V, size_t floats) {
    int failed = 0;
    int64_t tasks = a->sequences * a->heads;
#pragma omp parallel num_threads((int)a->threads) reduction(| : failed)
    {
        float *memory = allocate(floats);
        failed = memory == 0;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++)
            if (memory) run(a, task / a->heads, (int)(task % a->heads), K, V, memory);
        free(memory);
    }
    return failed;
}

/* These return 0, or 1 if memory ran out. */
int kda_forward(const kda_args *a) {
    int K = pl_padded((int)a->key_dim), V = pl_padded((int)a->value_dim);
    size_t floats = (size_t)K * V + 2 * PL_CHUNK * V + PL_CHUNK * K + kda_chunk_floats(K, V, 0);
    return for_each_head(a, forward_task, K, V, floats);
}

int kda_recurrent(const kda_args *a) {
    int K = pl_padded((int)a->key_dim), V = pl_padded((int)a->value_dim);
    return for_each_head(a, recurrent_task, K, V, (size_t)K * V + 3 * K + 2 * V);
}

typedef struct {
    float *d_state;            /* [K, V] cotangent of the state, walking backwards */
    float *transposed;         /* [V, K] */
    float *d_out;              /* [32, V] dO over -E */
    float *d_r;                /* [16, V] */
    float *d_u;                /* [16, V] */
    float *u_T;                /* [V, 16] */
    float *k_inv_T;            /* [K, 16] */
    float *d_queries;          /* [32, K] dQa over dKa */
    float *d_k_inv, *d_k_end;  /* [16, K] */
    float *d_g;                /* [16, K] */
    float *d_bias, *d_rate;    /* [K] sums over tokens */
    float *d_last;             /* [K] */
    float d_products[2 * PL_CHUNK * PL_CHUNK];
} backward_buffers;

static size_t backward_place(backward_buffers *b, float *memory, int K, int V) {
    struct {
        float **field;
        size_t size;
    } parts[] = {{&b->d_state, (size_t)K * V}, {&b->transposed, (size_t)K * V}, {&b->d_out, 2 * PL_CHUNK * V},
                 {&b->d_r, PL_CHUNK * V}, {&b->d_u, PL_CHUNK * V}, {&b->u_T, PL_CHUNK * V}, {&b->k_inv_T, PL_CHUNK * K},
                 {&b->d_queries, 2 * PL_CHUNK * K}, {&b->d_k_inv, PL_CHUNK * K}, {&b->d_k_end, PL_CHUNK * K},
                 {&b->d_g, PL_CHUNK * K}, {&b->d_bias, K}, {&b->d_rate, K}, {&b->d_last, K}};
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (memory) *parts[i].field = memory + used;
        used += parts[i].size;
    }
    return used;
}

/* dR from the back: dU_r = (Kend dS')_r + sum_{j >= r} P_jr dO_j;  dR_r = dU_r - sum_{j > r} beta_j KK_jr dR_j. */
static void backward_solve(const kda_chunk *c, backward_buffers *b, int V) {
    for (int r = c->count - 1; r >= 0; r--) {
        int after = c->count - r - 1;
        float coefficient[PL_CHUNK];
        float *row = b->d_r + r * V;
        memcpy(row, b->d_u + r * V, sizeof(float) * V);
        pl_combine(V, after + 1, c->products + r * PL_CHUNK + r, PL_CHUNK, b->d_out + r * V, V, row);
        for (int j = 0; j < after; j++)
            coefficient[j] = -c->beta[r + 1 + j] * c->products[(PL_CHUNK + r + 1 + j) * PL_CHUNK + r];
        pl_combine(V, after, coefficient, 1, row + V, V, row);
    }
    memset(b->d_r + c->count * V, 0, sizeof(float) * (PL_CHUNK - c->count) * V);
}

/* Cotangents of the chunk's rows, once dR and the outgoing state's cotangent are known; dS' becomes dSbar. */
static void backward_rows(const kda_chunk *c, backward_buffers *b, int K, int V, float *d_beta) {
    const float *last = c->since + (PL_CHUNK - 1) * K;
    float *d_qa = b->d_queries, *d_ka = d_qa + PL_CHUNK * K;
    for (int r = 0; r < PL_CHUNK; r++)
        PL_SIMD for (int i = 0; i < V; i++) b->d_out[(PL_CHUNK + r) * V + i] = -c->beta[r] * b->d_r[r * V + i];
    /* cotangents of P and of -KK, both from products with U^T */
    pl_transpose(PL_CHUNK, V, c->u, V, b->u_T, PL_CHUNK);
    pl_matmul(PL_CHUNK, PL_CHUNK, V, b->d_out, V, 1, b->u_T, PL_CHUNK, b->d_products, PL_CHUNK, 0);
    pl_matmul(PL_CHUNK, PL_CHUNK, V, b->d_r, V, 1, b->u_T, PL_CHUNK, b->d_products + PL_CHUNK * PL_CHUNK, PL_CHUNK, 0);
    for (int r = 0; r < c->count; r++) {
        float *d_kk = b->d_products + (PL_CHUNK + r) * PL_CHUNK;
        const float *kk = c->products + (PL_CHUNK + r) * PL_CHUNK;
        float sum = pl_dot(V, b->d_r + r * V, c->r + r * V);
        for (int j = 0; j < r; j++) {
            sum -= d_kk[j] * kk[j];
            d_kk[j] *= -c->beta[r];
        }
        d_beta[r] = sum;
    }
    pl_transpose(K, V, c->state, V, b->transposed, K);
    pl_matmul(2 * PL_CHUNK, K, V, b->d_out, V, 1, b->transposed, K, b->d_queries, K, 0);
    pl_transpose(K, V, b->d_state, V, b->transposed, K);
    pl_matmul(PL_CHUNK, K, V, c->u, V, 1, b->transposed, K, b->d_k_end, K, 0);
    memset(b->d_k_inv, 0, sizeof(float) * PL_CHUNK * K);
    for (int r = 0; r < c->count; r++) {
        const float *d_p = b->d_products + r * PL_CHUNK, *d_kk = d_p + PL_CHUNK * PL_CHUNK;
        pl_combine(K, r, d_p, 1, c->k_inv, K, d_qa + r * K);
        pl_combine(K, r, d_kk, 1, c->k_inv, K, d_ka + r * K);
        int after = c->count - r - 1;
        pl_combine(K, after, d_p + PL_CHUNK + r, PL_CHUNK, c->queries + (r + 1) * K, K, b->d_k_inv + r * K);
        pl_combine(K, after, d_kk + PL_CHUNK + r, PL_CHUNK, c->queries + (PL_CHUNK + r + 1) * K, K, b->d_k_inv + r * K);
    }
    for (int i = 0; i < K; i++) b->d_last[i] = last[i] * pl_dot(V, c->state + i * V, b->d_state + i * V);
    pl_matmul(K, V, 2 * PL_CHUNK, c->queries, 1, K, b->d_out, V, b->d_state, V, last);
    /* Log-decays of rows 1 and on. A row's decay scales what earlier rows write to the state (summed from the front) and
     * what is read at or after it (summed from the back). Row 0 acts through the entry state alone. */
    for (int r = 1; r < c->count; r++)
        PL_SIMD for (int i = 0; i < K; i++) {
            int at = r * K + i, before = at - K;
            b->d_g[at] = (r > 1 ? b->d_g[before] : 0.0f) + c->k_end[before] * b->d_k_end[before];
        }
    float *sum = b->d_last;
    for (int r = c->count - 1; r > 0; r--) {
        const float *qa = c->queries + r * K, *ka = qa + PL_CHUNK * K;
        PL_SIMD for (int i = 0; i < K; i++) {
            int at = r * K + i;
            sum[i] += qa[i] * d_qa[at] + ka[i] * d_ka[at] - c->k_inv[at] * b->d_k_inv[at];
            b->d_g[at] += sum[i];
        }
    }
    for (int i = 0; i < K; i++) {
        b->d_g[i] = pl_dot(V, c->state + i * V, b->d_state + i * V);
        PL_SIMD for (int j = 0; j < V; j++) b->d_state[i * V + j] *= c->alpha[i];
    }
}

/* dx = (dy - y (y . dy)) / |x| for y = x / |x|, in place. */
static void backward_norm(float *restrict d, const float *restrict y, float rstd, int K, int l2_norm) {
    if (!l2_norm) return;
    float along = pl_dot(K, d, y);
    PL_SIMD for (int i = 0; i < K; i++) d[i] = (d[i] - y[i] * along) * rstd;
}

static void backward_write(const kda_args *a, const kda_chunk *c, backward_buffers *b, int head, int K, int V,
                           const float *d_beta) {
    int key_dim = (int)a->key_dim;
    for (int r = 0; r < c->count; r++) {
        int64_t row = (c->first + r) * a->heads + head;
        float *d_q = b->d_queries + r * K, *d_k = d_q + PL_CHUNK * K, *d_g = b->d_g + r * K;
        const float *q = c->q + r * K, *k = c->k + r * K, *since = c->since + r * K, *inverse = c->inverse + r * K;
        const float *until = c->until + r * K, *d_k_inv = b->d_k_inv + r * K, *d_k_end = b->d_k_end + r * K;
        const float *slope = c->slope + r * K, *rate = c->rate + r * K;
        float diagonal = b->d_products[r * PL_CHUNK + r], scale = a->scale;
        PL_SIMD for (int i = 0; i < K; i++) {
            d_q[i] = scale * (since[i] * d_q[i] + diagonal * k[i]);
            d_k[i] = since[i] * d_k[i] + inverse[i] * d_k_inv[i] + until[i] * d_k_end[i] + diagonal * scale * q[i];
            b->d_rate[i] += d_g[i] * rate[i];
            d_g[i] *= slope[i];
            b->d_bias[i] += d_g[i];
        }
        backward_norm(d_q, q, c->q_rstd[r], K, (int)a->l2_norm);
        backward_norm(d_k, k, c->k_rstd[r], K, (int)a->l2_norm);
        float beta = d_beta[r];
        if (a->beta_sigmoid) { /* s (1 - s) from s alone would lose its small factor to rounding */
            float x;
            pl_read(&x, a->beta, (c->first + r) * a->beta_stride + head, 1, 1, (int)a->beta_type);
            beta *= a->beta_scale * pl_sigmoidf(x) * pl_sigmoidf(-x);
        }
        float *d_v = b->d_out + (PL_CHUNK + r) * V;
        PL_SIMD for (int i = 0; i < V; i++) d_v[i] = -d_v[i];
        pl_write(a->dq, row * key_dim, d_q, key_dim, (int)a->dqk_type);
        pl_write(a->dk, row * key_dim, d_k, key_dim, (int)a->dqk_type);
        pl_write(a->dv, row * a->value_dim, d_v, (int)a->value_dim, (int)a->type);
        pl_write(a->dg, row * key_dim, d_g, key_dim, (int)a->g_type);
        pl_write(a->dbeta, row, &beta, 1, (int)a->beta_type);
    }
}

/* chunks[0 .. PL_SEGMENT) are placed in `memory` as they are needed: a segment of full chunks touches four of them. */
static void backward_task(const kda_args *a, int64_t n, int head, int K, int V, kda_chunk *chunks, float *memory,
                          backward_buffers *b) {
    int64_t begin = a->offsets[n], end = a->offsets[n + 1], state_size = a->key_dim * a->value_dim;
    int64_t task = n * a->heads + head;
    size_t chunk_floats = kda_chunk_floats(K, V, 1);
    int key_dim = (int)a->key_dim, value_dim = (int)a->value_dim;
    kda_state_read(a, b->d_state, a->d_final_state ? a->d_final_state + task * state_size : 0, K, V);
    memset(b->d_bias, 0, sizeof(float) * K);
    memset(b->d_rate, 0, sizeof(float) * K);
    int64_t segments = (end - begin + PL_SEGMENT - 1) / PL_SEGMENT;
    for (int64_t segment = segments - 1; segment >= 0; segment--) {
        int64_t first = begin + segment * PL_SEGMENT, stop = first + PL_SEGMENT < end ? first + PL_SEGMENT : end;
        int count = 0;
        for (; first < stop; first += chunks[count - 1].count) {
            kda_chunk *c = chunks + count;
            kda_chunk_place(c, memory + count * chunk_floats, K, V, 0);
            if (count == 0) {
                const float *kept = a->kept + ((a->kept_offsets[n] + segment) * a->heads + head) * state_size;
                memset(c->state, 0, sizeof(float) * K * V);
                for (int i = 0; i < key_dim; i++) memcpy(c->state + i * V, kept + i * value_dim, sizeof(float) * value_dim);
            } else {
                const kda_chunk *previous = c - 1;
                memcpy(c->state, previous->state, sizeof(float) * K * V);
                pl_matmul(K, V, PL_CHUNK, previous->k_end, 1, K, previous->u, V, c->state, V,
                          previous->since + (PL_CHUNK - 1) * K);
            }
            kda_chunk_load(a, c, head, begin, first, end, K, V);
            kda_chunk_products(c, K, b->k_inv_T);
            for (int i = 0; i < K; i++)
                PL_SIMD for (int j = 0; j < V; j++) c->state[i * V + j] *= c->alpha[i];
            pl_matmul(PL_CHUNK, V, K, c->queries + PL_CHUNK * K, K, 1, c->state, V, b->d_u, V, 0);
            kda_chunk_solve(c, b->d_u, V);
            count++;
        }
        while (count-- > 0) {
            kda_chunk *c = chunks + count;
            float d_beta[PL_CHUNK];
            for (int r = 0; r < PL_CHUNK; r++) {
                float *row = b->d_out + r * V;
                int64_t at = ((c->first + r) * a->heads + head) * value_dim;
                if (r < c->count)
                    pl_read(row, a->d_o, at, value_dim, V, (int)a->type);
                else
                    memset(row, 0, sizeof(float) * V);
            }
            pl_matmul(PL_CHUNK, V, K, c->k_end, K, 1, b->d_state, V, b->d_u, V, 0);
            backward_solve(c, b, V);
            backward_rows(c, b, K, V, d_beta);
            backward_write(a, c, b, head, K, V, d_beta);
        }
    }
    if (a->d_initial_state) kda_state_write(a, a->d_initial_state + task * state_size, b->d_state, V);
    float total = 0.0f;
    for (int i = 0; i < key_dim; i++) total += b->d_rate[i];
    a->dA_log[task] = total;
    memcpy(a->d_dt_bias + task * key_dim, b->d_bias, sizeof(float) * key_dim);
}

/* Returns 0, or 1 if memory ran out. */
int kda_backward(const kda_args *a) {
    int K = pl_padded((int)a->key_dim), V = pl_padded((int)a->value_dim), failed = 0;
    size_t floats = kda_chunk_floats(K, V, 1) * PL_SEGMENT + backward_place(0, 0, K, V);
    int64_t tasks = a->sequences * a->heads;
#pragma omp parallel num_threads((int)a->threads) reduction(| : failed)
    {
        float *memory = allocate(floats); /* address space: pages that no chunk touches cost nothing */
        kda_chunk *chunks = malloc(sizeof(kda_chunk) * PL_SEGMENT);
        backward_buffers *b = malloc(sizeof *b);
        failed = !memory || !chunks || !b;
        if (!failed) backward_place(b, memory + kda_chunk_floats(K, V, 1) * PL_SEGMENT, K, V);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++)
            if (!failed) backward_task(a, task / a->heads, (int)(task % a->heads), K, V, chunks, memory, b);
        free(memory), free(chunks), free(b);
    }
    return failed;
}
