/* y = x W^T for a few rows of x and one weight or several: what decoding does. Each row of a weight is read from memory once
 * and used for all rows of x. A result depends neither on the other rows of x nor on the threads.
 */
#include "matvec.h"

enum { BLOCK = 8, MAX_TOKENS = 8, MAX_WEIGHTS = 8 };

/* w[i] [out[i], in] for `count` weights; x [tokens, in], at most MAX_TOKENS tokens; y [tokens, sum of out], side by side. */
void pl_many_weights_f32(const float *restrict x, const float *const *w, float *restrict y, const int64_t *out,
                         int64_t count, int64_t tokens, int64_t in, int64_t threads) {
    int64_t block[MAX_WEIGHTS + 1] = {0}, column[MAX_WEIGHTS + 1] = {0}; /* where each weight begins */
    const float *from[MAX_TOKENS];
    for (int64_t i = 0; i < count; i++) {
        block[i + 1] = block[i] + (out[i] + BLOCK - 1) / BLOCK;
        column[i + 1] = column[i] + out[i];
    }
    for (int64_t token = 0; token < tokens; token++) from[token] = x + token * in;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t b = 0; b < block[count]; b++) {
        int64_t i = 0;
        while (b >= block[i + 1]) i++;
        int64_t first = (b - block[i]) * BLOCK, last = first + BLOCK < out[i] ? first + BLOCK : out[i];
        float *to[MAX_TOKENS];
        for (int64_t token = 0; token < tokens; token++) to[token] = y + token * column[count] + column[i];
        pl_matvecs(w[i], in, first, last, in, tokens, from, to, 0);
    }
}

void pl_one_weight_f32(const float *x, const float *w, float *y, int64_t out, int64_t tokens, int64_t in, int64_t threads) {
    pl_many_weights_f32(x, &w, y, &out, 1, tokens, in, threads);
}
