// All routes of a few tokens as a kernel of its own, one block. Macros: see route.h; THREADS, at least EXPERTS.
#include "route.h"

static_assert(TABLE_BYTES <= SHARED_BYTES && EXPERTS <= THREADS, "a thread for each expert");

KERNEL(THREADS, 1) route(
    const float* logits, const float* __restrict__ bias, float* weight, int* pair, uint4* list, int tokens, int most, float scaling) {
    SHARED(memory);
    let_next_start();
    wait_for_earlier();
    const int used = route_all<THREADS / 32>(
        memory, logits, bias, tokens, scaling, [&](int token, int n, float p) { weight[token * ACTIVE + n] = p; },
        [&](int token, int n, int number) { pair[token * ACTIVE + n] = number; }, [&](int place, uint4 entry) { list[place] = entry; });
    for (int i = used + threadIdx.x; i < most; i += THREADS) list[i] = make_uint4(0, 0, 0, 0);
}
