// What the kernels of this package use of the GPU beyond plain C++, one small function for each instruction.
//
// Every function here has a twin in emulator.h, with which g++ compiles the same kernel for the CPU. So a kernel includes
// this file and nothing else, and holds no inline assembly and no CUDA name outside this list:
//
//   threadIdx.x, blockIdx.{x,y,z}, gridDim.{x,y,z}; uint2, uint4, float2, float4 and make_*; __device__, __forceinline__,
//   __restrict__; #pragma unroll; math on float by operators, fmaf, fminf, fmaxf, fabsf.
//
// A warp's functions (marked "warp") are called by all 32 threads of it together. bfloat16 is carried as bits: `bf16` is
// one, a u32 holds two with the lower index in the lower half.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 bf16;

#ifdef PERILUNE_EMULATED
#include "emulator.h"
#else

// A kernel: KERNEL(threads of a block, blocks that shall fit a multiprocessor) name(parameters) { ... }
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
// The block's dynamic shared memory, at least 128-byte aligned: SHARED(name); then name is an u8*.
#define SHARED(name) extern __shared__ __align__(1024) u8 name[]
#define DEVICE static __device__ __forceinline__

DEVICE u32 bits(float x) { return __float_as_uint(x); }
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }

// Of one instruction each; results and operands below 2^-126 are 0.
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rsqrt_fast(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Two floats as bfloat16, to nearest even; `low` is the one of the lower index.
DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// Products of two pairs of bfloat16, each rounded (compute capability 9.0).
DEVICE u32 multiply_pair(u32 a, u32 b) { u32 y; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }

DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// Barrier `id` (1 .. 15) among `count` threads, whole warps: wait for them, or only be counted.
DEVICE void barrier_sync(int id, int count) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(count) : "memory"); }
DEVICE void barrier_arrive(int id, int count) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(count) : "memory"); }

// warp: the value of the thread whose lane is this one's XOR mask; of lane `from`; of `by` lanes below (own below lane by).
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle(float x, int from) { return __shfl_sync(0xffffffffu, x, from); }
DEVICE float shuffle_up(float x, int by) { return __shfl_up_sync(0xffffffffu, x, by); }
DEVICE u32 shuffle(u32 x, int from) { return __shfl_sync(0xffffffffu, x, from); }

// warp: a number that is the same in all lanes, so that the compiler knows it.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// warp: four 8x8 matrices of bfloat16 from shared memory; lane i gives the address of row i % 8 of matrix i / 8 (16 bytes,
// aligned). Of matrix j this thread gets r[j]: row lane / 4, columns 2 (lane % 4) and the next. `transposed`: of the
// transposed matrices.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// warp: the way back (compute capability 9.0).
DEVICE void store_matrices(const u32 (&r)[4], void* row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
DEVICE void store_matrices_transposed(const u32 (&r)[4], void* row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// warp: d += a b for a 16x16 and b 16x8 in bfloat16, d 16x8 in float. With i = lane / 4 and j = 2 (lane % 4):
// a[0] = rows i, columns j, j + 1; a[1] = row i + 8; a[2] = columns + 8; a[3] = both. b[0] = rows j, j + 1, column i;
// b[1] = rows + 8. d[0], d[1] = row i, columns j, j + 1; d[2], d[3] = row i + 8.
// load_matrices gives a[] from the row-major 16x16 with addresses (row lane % 16, column 8 (lane / 16)).
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// warp: the same for a 16x8 and b 8x8 in tf32 (the upper 19 bits of a float). With i = lane / 4 and j = lane % 4:
// a[0] = row i, column j; a[1] = row i + 8; a[2] = column j + 4; a[3] = both. b0 = row j, column i; b1 = row j + 4.
DEVICE void multiply_add_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A float rounded to tf32.
DEVICE u32 to_tf32(float x) { u32 y; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }

// Copy 16 bytes from global to shared memory without waiting; `there` false: write zeros and read nothing. The copies since
// the last commit are a group; wait until at most PENDING of this thread's latest groups are under way. Other threads see
// the bytes after a barrier that follows the wait.
DEVICE void copy_async(void* shared, const void* global, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// 16 bytes that this kernel does not read again.
DEVICE void store_once(void* p, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#endif

DEVICE float low_half(u32 two) { return from_bits(two << 16); }
DEVICE float high_half(u32 two) { return from_bits(two & 0xffff0000u); }
DEVICE float to_float(bf16 x) { return from_bits((u32)x << 16); }
DEVICE bf16 to_bf16(float x) { return (bf16)pack(x, 0.0f); }
