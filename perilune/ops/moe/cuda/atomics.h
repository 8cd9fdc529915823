// Integer sums of many threads. Sums of integers come out the same in any order.
#pragma once

#ifdef PERILUNE_EMULATED
// Threads are fibers that yield at barriers only: an addition is never interrupted.
DEVICE void add_shared(u32* to, u32 x) { *to += x; }
DEVICE void add_global(u32* to, u32 x) { *to += x; }
#else
DEVICE void add_shared(u32* to, u32 x) {
    asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" :: "r"(shared_address(to)), "r"(x) : "memory");
}
DEVICE void add_global(u32* to, u32 x) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(__cvta_generic_to_global(to)), "r"(x) : "memory");
}
#endif
