// Reads over depth of a few tokens, a block each. Macros: see read.h.
#include "read.h"

static_assert(4 * SCRATCH_FLOATS <= SHARED_BYTES, "shared memory");

KERNEL(READERS, 1) read(
    Sources<M> sources, const bf16* delta, i64 delta_stride, const float* score_weight, const float* query, const float* norm,
    bf16* total, bf16* out, float eps, float norm_eps) {
    SHARED(memory);
    const i64 token = blockIdx.x;
    let_next_start();
    for (int at = 32 * threadIdx.x; at < WIDTH; at += 32 * READERS) {  // parameters come into the cache meanwhile
        prefetch(score_weight + at);
        if (HAS_QUERY) prefetch(query + at);
        if (HAS_NORM) prefetch(norm + at);
    }
    wait_for_earlier();
    read_token(
        sources, Reading{delta, delta_stride, score_weight, query, norm, eps, norm_eps}, token, (float*)memory,
        [&](int at, uint2 x) { *(uint2*)(total + token * WIDTH + at) = x; }, [&](int at, uint2 x) { *(uint2*)(out + token * WIDTH + at) = x; });
}
