/* Newton-Schulz iterations on a batch of matrices: each matrix stays with one thread, and so in its cache, for all steps. */
#include "matvec.h"

#define EXPORT __attribute__((visibility("default")))

#ifdef _OPENMP
#include <omp.h>
static int thread_number(void) { return omp_get_thread_num(); }
#else
static int thread_number(void) { return 0; }
#endif

/* x [B,M,N], M <= N, in place: `steps` times A = X X^T, X = a X + (b A + c A^2) X. Returns 1 if memory ran out. */
EXPORT int newton_schulz(pl_sgemm sgemm, float *x, int64_t B, int64_t M, int64_t N, int steps, float a, float b, float c,
                         int threads) {
    size_t square = ((size_t)M * M + 15) / 16 * 16, parts = 2 * square + ((size_t)M * N + 15) / 16 * 16;
    float *scratch = aligned_alloc(64, parts * sizeof(float) * threads);
    if (!scratch) return 1;
    const float one = 1.0f, zero = 0.0f;
    const int m = (int)M, n = (int)N;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < B; i++) {
        float *gram = scratch + parts * thread_number(), *poly = gram + square, *next = poly + square, *now = x + i * M * N;
        for (int step = 0; step < steps; step++) { /* row-major matrices read as their transposes by a Fortran BLAS */
            sgemm("T", "N", &m, &m, &n, &one, now, &n, now, &n, &zero, gram, &m, 1, 1);
            memcpy(poly, gram, sizeof(float) * M * M);
            sgemm("N", "N", &m, &m, &m, &c, gram, &m, gram, &m, &b, poly, &m, 1, 1);
            memcpy(next, now, sizeof(float) * M * N);
            sgemm("N", "N", &n, &m, &m, &one, now, &n, poly, &m, &a, next, &n, 1, 1);
            float *swap = now;
            now = next, next = swap;
        }
        if (steps % 2) memcpy(next, now, sizeof(float) * M * N); /* after an odd number the result lies in the scratch */
    }
    free(scratch);
    return 0;
}
