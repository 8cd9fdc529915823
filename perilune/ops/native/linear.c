/* y = x W^T for a few rows of x and one weight or several: what decoding does. Each row of a weight is read from memory once
 * and used for all rows of x. A result depends neither on the other rows of x nor on the threads.
 */
#include "matvec.h"

enum { BLOCK = 8, MAX_TOKENS = 8, MAX_WEIGHTS = 8 };

/* w[i] [out[i], in] -> y[i] [tokens, out[i]] for `count` weights; x [tokens, in], at most MAX_TOKENS tokens. */
void pl_many_weights_f32(const float *restrict x, const float *const *w, float *const *y, const int64_t *out, int64_t count,
                     int64_t tokens, int64_t in, int64_t threads) {
    int64_t begin[MAX_WEIGHTS + 1] = {0};
    const float *from[MAX_TOKENS];
    for (int64_t i = 0; i < count; i++) begin[i + 1] = begin[i] + (out[i] + BLOCK - 1) / BLOCK;
    for (int64_t token = 0; token < tokens; token++) from[token] = x + token * in;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t block = 0; block < begin[count]; block++) {
        int64_t i = 0;
        while (block >= begin[i + 1]) i++;
        int64_t first = (block - begin[i]) * BLOCK, last = first + BLOCK < out[i] ? first + BLOCK : out[i];
        float *to[MAX_TOKENS];
        for (int64_t token = 0; token < tokens; token++) to[token] = y[i] + token * out[i];
        pl_matvecs(w[i], in, first, last, in, tokens, from, to, 0);
    }
}

void pl_one_weight_f32(const float *x, const float *w, float *y, int64_t out, int64_t tokens, int64_t in, int64_t threads) {
    pl_many_weights_f32(x, &w, &y, &out, 1, tokens, in, threads);
}
