/* y = x W^T for a few rows of x: what decoding does. Each row of W is read from memory once and used for all rows of x.
 *
 * Rows of W go in fours counted from row 0, so a result depends neither on the other rows of x nor on the threads.
 */
#include "matvec.h"

void pl_few_rows_f32(const float *restrict x, const float *restrict w, float *restrict y, int64_t tokens, int64_t out,
                     int64_t in, int64_t threads) {
    int64_t blocks = (out + 3) / 4;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t row = 4 * block, last = row + 4 < out ? row + 4 : out;
        for (int64_t token = 0; token < tokens; token++)
            pl_matvec(w, in, row, last, in, x + token * in, y + token * out, 0);
    }
}
