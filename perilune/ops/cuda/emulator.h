// The functions of device.h on a CPU: a block's threads are fibers that yield at barriers and at a warp's instructions.
//
// What it finds that a GPU would hide or turn into a rare wrong number:
// - a barrier that is missing: `order` runs warps and lanes forwards or backwards, and results must not differ by a bit;
// - shared memory that is read before it is written, copied into after its use, or left too early: it starts as NaN, and an
//   asynchronous copy happens only at the wait for it;
// - lanes of a warp that meet different instructions, barriers that not all threads reach, writes beyond shared memory.
// Products of the tensor cores are summed in double and rounded once; elementary functions are the C library's.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <tuple>
#include <utility>
#include <vector>
#include <ucontext.h>

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __forceinline__ inline
#define DEVICE static inline
#define KERNEL(threads, blocks) static void
#define SHARED(name) u8* const name = emulator::block.shared

inline u32 bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float from_bits(u32 x) { float y; memcpy(&y, &x, 4); return y; }

struct EmulatedPhase;

namespace emulator {

constexpr int WARP = 32, MAX_THREADS = 1024, BARRIERS = 16, GUARD = 1024;
constexpr size_t STACK = 256 * 1024;

struct Index { u32 x, y, z; };
struct Copy { void* to; const void* from; };

enum Instruction { NONE, SYNC, SHUFFLE, LOAD, STORE, MULTIPLY, MULTIPLY_TF32, PRODUCTS, VOTE };
const char* const NAMES[] = {"none", "sync_warp", "shuffle", "load_matrices", "store_matrices", "multiply_add", "multiply_add_tf32", "products_wait", "any"};

// A product of a warpgroup as one thread sees it: its part of the left operand, and where its part of the result goes.
struct Product {
    float* d;
    int columns;
    u32 a[4];
    u64 left, b;  // left: the left operand where it lies in shared memory, else 0
    bool add, across;
};

struct Thread {
    ucontext_t start;
    jmp_buf place;
    bool started, finished, waiting;
    Instruction met;
    u32 words[10];  // operands of a warp's instruction, then its results
    void* row;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    std::vector<std::vector<Product>> product_groups;
    std::vector<Product> open_products;
    std::map<float*, std::vector<float>> results;  // of products under way; their variables are NaN meanwhile
    bool products_begun;
};

struct Block {
    Index index, grid;
    int threads, order;
    u8* shared;
    size_t shared_bytes;
    int arrived[BARRIERS];
    bool at_barrier[BARRIERS][MAX_THREADS];
    int in_warp[MAX_THREADS / WARP];
    void (*enter)();
    jmp_buf scheduler, failure;
    char* message;
    bool passed_on;  // the running warp gives way to the others
};

static Block block;
static std::vector<Thread> threads;
static std::vector<u8> stacks;
static Thread* current;
static std::vector<std::pair<EmulatedPhase*, Thread*>> waiters;  // for phases to end

[[noreturn]] inline void fail(const char* what, int thread) {
    snprintf(block.message, 256, "block (%u, %u, %u), thread %d: %s", block.index.x, block.index.y, block.index.z, thread, what);
    longjmp(block.failure, 1);
}

inline int number() { return int(current - threads.data()); }

// Hand over to the scheduler until somebody clears `waiting`.
__attribute__((noinline)) static void wait() {
    current->waiting = true;
    if (!_setjmp(current->place)) _longjmp(block.scheduler, 1);
}

// Let the other warps run before this thread goes on.
__attribute__((noinline)) static void pass_on() {
    block.passed_on = true;
    if (!_setjmp(current->place)) _longjmp(block.scheduler, 1);
}

static void body() {
    block.enter();
    current->finished = true;
    _longjmp(block.scheduler, 1);
}

__attribute__((noinline)) static void resume(Thread& thread) {
    current = &thread;
    if (_setjmp(block.scheduler)) return;
    if (thread.started) _longjmp(thread.place, 1);
    thread.started = true;
    setcontext(&thread.start);
}

inline void barrier(int id, int count, bool waits) {
    if (id < 0 || id >= BARRIERS || count % WARP || count > block.threads) fail("a barrier of this number or size does not exist", number());
    block.at_barrier[id][number()] = waits;
    if (++block.arrived[id] < count) {
        if (waits) wait();
        return;
    }
    block.arrived[id] = 0;
    for (int i = 0; i < block.threads; i++)
        if (block.at_barrier[id][i]) {
            block.at_barrier[id][i] = false;
            threads[i].waiting = false;
        }
    current->waiting = false;
}

// All lanes bring their operands; the last one computes for all of them.
template <class Compute> inline void together(Instruction instruction, Compute compute) {
    const int warp = number() / WARP;
    current->met = instruction;
    if (++block.in_warp[warp] < WARP) return wait();
    block.in_warp[warp] = 0;
    Thread* lanes = &threads[warp * WARP];
    for (int i = 0; i < WARP; i++)
        if (lanes[i].met != instruction) {
            static char text[128];
            snprintf(text, sizeof text, "its warp met %s here and %s in lane %d", NAMES[instruction], NAMES[lanes[i].met], i);
            fail(text, number());
        }
    compute(lanes);
    for (int i = 0; i < WARP; i++) {
        lanes[i].met = NONE;
        lanes[i].waiting = false;
    }
}

inline void run_block() {
    memset(block.shared - GUARD, 0xA5, block.shared_bytes + 2 * GUARD);
    memset(block.shared, 0xFF, block.shared_bytes);
    memset(block.arrived, 0, sizeof block.arrived);
    memset(block.at_barrier, 0, sizeof block.at_barrier);
    memset(block.in_warp, 0, sizeof block.in_warp);
    waiters.clear();
    for (int i = 0; i < block.threads; i++) {
        Thread& t = threads[i];
        t.started = t.finished = t.waiting = false;
        t.met = NONE;
        t.groups.clear();
        t.open.clear();
        t.product_groups.clear();
        t.open_products.clear();
        t.results.clear();
        t.products_begun = false;
        getcontext(&t.start);
        t.start.uc_stack.ss_sp = stacks.data() + i * STACK;
        t.start.uc_stack.ss_size = STACK;
        t.start.uc_link = nullptr;
        makecontext(&t.start, body, 0);
    }
    const int warps = block.threads / WARP;
    bool progress;
    do {  // a warp runs until all its lanes wait at a barrier, then the next one
        progress = false;
        for (int w = 0; w < warps; w++) {
            bool ran;
            do {
                ran = false;
                for (int l = 0; l < WARP; l++) {
                    const int i = w * WARP + l;
                    Thread& t = threads[block.order ? block.threads - 1 - i : i];
                    if (t.finished || t.waiting) continue;
                    resume(t);
                    ran = progress = true;
                    if (block.passed_on) break;
                }
            } while (ran && !block.passed_on);
            block.passed_on = false;
        }
    } while (progress);
    for (int i = 0; i < block.threads; i++) {
        if (!threads[i].finished)
            fail(threads[i].met == NONE ? "waits at a barrier that the others never reach" : "waits for lanes that never come", i);
        for (auto& group : threads[i].groups)
            if (!group.empty()) fail("ended with a copy under way", i);
        if (!threads[i].open.empty()) fail("ended with a copy under way", i);
        if (!threads[i].open_products.empty() || !threads[i].product_groups.empty()) fail("ended with a product under way", i);
    }
    for (int i = 0; i < GUARD; i++)
        if (block.shared[-1 - i] != 0xA5 || block.shared[block.shared_bytes + i] != 0xA5) fail("wrote beyond shared memory", 0);
}

// The kernel's parameters out of a buffer laid out as the driver takes it: each at its natural alignment.
template <class T> inline T take(const u8* buffer, size_t& at) {
    at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
    T value;
    memcpy(&value, buffer + at, sizeof value);
    at += sizeof value;
    return value;
}

template <class... A> struct Call {
    static inline void (*kernel)(A...);
    static inline std::tuple<A...> arguments;
    static void enter() { std::apply(kernel, arguments); }
};

// Run a grid block by block. Returns 0, or 1 with the reason in `message` (256 bytes).
template <class... A>
inline int run(void (*kernel)(A...), const u8* buffer, size_t size, const u32* grid, int count, size_t shared, int order, char* message) {
    size_t at = 0;
    Call<A...>::kernel = kernel;
    Call<A...>::arguments = std::tuple<A...>{take<A>(buffer, at)...};
    block.message = message;
    if (at != size) {
        snprintf(message, 256, "the kernel takes %zu bytes of parameters, given were %zu", at, size);
        return 1;
    }
    block.enter = Call<A...>::enter;
    block.threads = count;
    block.order = order;
    block.passed_on = false;
    block.grid = {grid[0], grid[1], grid[2]};
    block.shared_bytes = shared;
    std::vector<u8> memory(shared + 2 * GUARD + 1024);
    block.shared = (u8*)(((size_t)memory.data() + GUARD + 1023) / 1024 * 1024);
    threads.resize(count);
    if (stacks.size() < count * STACK) stacks.resize(count * STACK);
    if (_setjmp(block.failure)) return 1;
    for (u32 z = 0; z < grid[2]; z++)
        for (u32 y = 0; y < grid[1]; y++)
            for (u32 x = 0; x < grid[0]; x++) {
                block.index = {x, y, z};
                run_block();
            }
    return 0;
}

inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
inline u16 rounded(float x) {
    const u32 y = bits(x);
    if ((y & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return u16((y + 0x7fffu + ((y >> 16) & 1)) >> 16);
}
inline float half_of(u32 two, int which) { return from_bits(which ? two & 0xffff0000u : two << 16); }

}  // namespace emulator

#define threadIdx (emulator::Index{(u32)emulator::number(), 0, 0})
#define blockIdx (emulator::block.index)
#define gridDim (emulator::block.grid)

inline float exp2_fast(float x) { return emulator::flushed(std::exp2(x)); }
inline float log2_fast(float x) { return std::log2(emulator::flushed(x)); }
inline float reciprocal(float x) { return emulator::flushed(1.0f / emulator::flushed(x)); }
inline float rsqrt_fast(float x) { return 1.0f / std::sqrt(emulator::flushed(x)); }
inline u32 pack(float low, float high) { return emulator::rounded(low) | (u32)emulator::rounded(high) << 16; }

inline u32 multiply_pair(u32 a, u32 b) {
    return pack(emulator::half_of(a, 0) * emulator::half_of(b, 0), emulator::half_of(a, 1) * emulator::half_of(b, 1));
}

inline void sync_threads() { emulator::barrier(0, emulator::block.threads, true); }
inline void barrier_sync(int id, int count) { emulator::barrier(id, count, true); }
inline void barrier_arrive(int id, int count) { emulator::barrier(id, count, false); }
inline void sync_warp() { emulator::together(emulator::SYNC, [](emulator::Thread*) {}); }

inline u32 emulated_shuffle(u32 x, int from) {
    emulator::current->words[0] = x;
    emulator::current->words[1] = u32(from);
    emulator::together(emulator::SHUFFLE, [](emulator::Thread* lanes) {
        for (int i = 0; i < 32; i++) lanes[i].words[2] = lanes[lanes[i].words[1] & 31].words[0];
    });
    return emulator::current->words[2];
}
inline u32 shuffle(u32 x, int from) { return emulated_shuffle(x, from); }
inline float shuffle(float x, int from) { return from_bits(emulated_shuffle(bits(x), from)); }
inline float shuffle_xor(float x, int mask) { return shuffle(x, (emulator::number() & 31) ^ mask); }
inline float shuffle_up(float x, int by) {
    const int lane = emulator::number() & 31;
    return shuffle(x, lane < by ? lane : lane - by);
}

inline int uniform(int x) { return (int)emulated_shuffle((u32)x, 0); }

inline void emulated_load(u32 (&r)[4], const void* row, bool transposed) {
    emulator::current->row = const_cast<void*>(row);
    emulator::together(emulator::LOAD, [transposed](emulator::Thread* lanes) {
        for (int i = 0; i < 32; i++)
            for (int j = 0; j < 4; j++)
                for (int h = 0; h < 2; h++) {
                    const int r = transposed ? 2 * (i % 4) + h : i / 4, c = transposed ? i / 4 : 2 * (i % 4) + h;
                    memcpy((u16*)&lanes[i].words[j] + h, (const u16*)lanes[8 * j + r].row + c, 2);
                }
    });
    memcpy(r, emulator::current->words, 16);
}
inline void emulated_store(const u32 (&r)[4], void* row, bool transposed) {
    emulator::current->row = row;
    memcpy(emulator::current->words, r, 16);
    emulator::together(emulator::STORE, [transposed](emulator::Thread* lanes) {
        for (int i = 0; i < 32; i++)
            for (int j = 0; j < 4; j++)
                for (int h = 0; h < 2; h++) {
                    const int r = transposed ? 2 * (i % 4) + h : i / 4, c = transposed ? i / 4 : 2 * (i % 4) + h;
                    memcpy((u16*)lanes[8 * j + r].row + c, (u16*)&lanes[i].words[j] + h, 2);
                }
    });
}
inline void load_matrices(u32 (&r)[4], const void* row) { emulated_load(r, row, false); }
inline void load_matrices_transposed(u32 (&r)[4], const void* row) { emulated_load(r, row, true); }
inline void store_matrices(const u32 (&r)[4], void* row) { emulated_store(r, row, false); }
inline void store_matrices_transposed(const u32 (&r)[4], void* row) { emulated_store(r, row, true); }

// Operands a, b, d in words 0..3, 4..5, 6..9; the result over d.
template <int DEPTH> inline void emulated_multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, emulator::Instruction name) {
    u32* words = emulator::current->words;
    memcpy(words, a, 16);
    words[4] = b0;
    words[5] = b1;
    memcpy(words + 6, d, 16);
    emulator::together(name, [](emulator::Thread* lanes) {
        static float left[16][DEPTH], right[DEPTH][8];
        for (int i = 0; i < 32; i++)
            for (int e = 0; e < 4; e++) {
                const int row = i / 4 + 8 * (e & 1);
                if (DEPTH == 16)
                    for (int h = 0; h < 2; h++) {
                        left[row][2 * (i % 4) + h + 8 * (e >> 1)] = emulator::half_of(lanes[i].words[e], h);
                        if (e < 2) right[2 * (i % 4) + h + 8 * e][i / 4] = emulator::half_of(lanes[i].words[4 + e], h);
                    }
                else {
                    left[row][i % 4 + 4 * (e >> 1)] = from_bits(lanes[i].words[e] & 0xffffe000u);
                    if (e < 2) right[i % 4 + 4 * e][i / 4] = from_bits(lanes[i].words[4 + e] & 0xffffe000u);
                }
            }
        for (int i = 0; i < 32; i++)
            for (int e = 0; e < 4; e++) {
                const int row = i / 4 + 8 * (e >> 1), column = 2 * (i % 4) + (e & 1);
                double sum = from_bits(lanes[i].words[6 + e]);
                for (int k = 0; k < DEPTH; k++) sum += (double)left[row][k] * right[k][column];
                lanes[i].words[6 + e] = bits((float)sum);
            }
    });
    memcpy(d, words + 6, 16);
}
inline void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated_multiply<16>(d, a, b0, b1, emulator::MULTIPLY);
}
inline void multiply_add_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated_multiply<8>(d, a, b0, b1, emulator::MULTIPLY_TF32);
}
inline u32 to_tf32(float x) { return (bits(x) + 0x1000u) & 0xffffe000u; }

inline void prefetch(const void*) {}
inline void copy_async(void* shared, const void* global, bool there = true) {
    emulator::current->open.push_back({shared, there ? global : nullptr});
}
inline void copy_async_of_line(void* shared, const void* global, bool there) { copy_async(shared, global, there); }
inline void copy_commit() {
    emulator::current->groups.push_back(std::move(emulator::current->open));
    emulator::current->open.clear();
}
template <int PENDING> inline void copy_wait() {
    auto& groups = emulator::current->groups;
    while (groups.size() > PENDING) {
        for (auto& copy : groups.front())
            if (copy.from) memcpy(copy.to, copy.from, 16);
            else memset(copy.to, 0, 16);
        groups.erase(groups.begin());
    }
}

inline u32 shared_address(const void* p) { return (u32)((const u8*)p - emulator::block.shared); }
inline void publish_operands() {}
inline void held(u32 (&)[4]) {}
template <int N> inline void held(float (&)[N]) {}

// A warpgroup's product happens at the wait for it; until then its result is NaN, so that whoever uses it early shows.
namespace emulator {
inline float operand_at(u64 b, bool across, int k, int n) {
    const u32 start = u32(b & 0x3fff) << 4, next_block = u32(b >> 16 & 0x3fff) << 4, next_rows = u32(b >> 32 & 0x3fff) << 4;
    u32 at = across ? start + n / 64 * next_block + n % 64 * 2 + k / 8 * next_rows + k % 8 * 128
                    : start + n / 8 * next_rows + n % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    if (b >> 62 != 1 || at + 2 > block.shared_bytes) fail("no such operand in shared memory", number());
    u16 value;
    memcpy(&value, block.shared + at, 2);
    return from_bits((u32)value << 16);
}

// The oldest group of every lane of a warp.
inline void multiply_group(Thread* lanes) {
    static float left[16][16], right[16][256];
    const size_t count = lanes->product_groups.front().size();
    for (size_t p = 0; p < count; p++) {
        const Product first = lanes->product_groups.front()[p];
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < first.columns; n++) right[k][n] = operand_at(first.b, first.across, k, n);
        for (int i = 0; i < WARP; i++) {
            const std::vector<Product>& group = lanes[i].product_groups.front();
            if (group.size() != count || group[p].b != first.b || group[p].left != first.left) fail("lanes of a warp began different products", i);
            for (int e = 0; e < 4; e++)
                for (int h = 0; h < 2; h++) left[i / 4 + 8 * (e & 1)][2 * (i % 4) + h + 8 * (e >> 1)] = half_of(group[p].a[e], h);
        }
        const int first_row = int(lanes - threads.data()) / WARP % 4 * 16;
        for (int r = 0; first.left && r < 16; r++)
            for (int k = 0; k < 16; k++) left[r][k] = operand_at(first.left, false, k, first_row + r);
        for (int i = 0; i < WARP; i++) {
            float* d = lanes[i].results[lanes[i].product_groups.front()[p].d].data();
            for (int j = 0; j < first.columns / 2; j++) {
                const int row = i / 4 + 8 * (j >> 1 & 1), column = j / 4 * 8 + 2 * (i % 4) + (j & 1);
                double sum = first.add ? d[j] : 0.0;
                for (int k = 0; k < 16; k++) sum += (double)left[row][k] * right[k][column];
                d[j] = (float)sum;
            }
        }
    }
    for (int i = 0; i < WARP; i++) {
        Thread& t = lanes[i];
        t.product_groups.erase(t.product_groups.begin());
        for (auto result = t.results.begin(); result != t.results.end();) {
            bool under_way = false;
            for (auto& group : t.product_groups)
                for (auto& product : group) under_way |= product.d == result->first;
            if (under_way) ++result;
            else {
                memcpy(result->first, result->second.data(), 4 * result->second.size());
                result = t.results.erase(result);
            }
        }
    }
}
}  // namespace emulator

template <int N> inline void emulated_product(float (&d)[N], const u32* a, u64 left, u64 b, bool add, bool across) {
    emulator::Thread& thread = *emulator::current;
    if (!thread.products_begun) emulator::fail("a product without products_begin before it", emulator::number());
    if (!thread.results.count(d)) {
        thread.results[d].assign(d, d + N);
        memset(d, 0xFF, sizeof d);
    }
    thread.open_products.push_back({d, 2 * N, {}, left, b, add, across});
    if (a) memcpy(thread.open_products.back().a, a, 16);
}
template <bool ACROSS, int N> inline void warpgroup_multiply(float (&d)[N], const u32 (&a)[4], u64 b, bool add) {
    emulated_product(d, a, 0, b, add, ACROSS);
}
template <bool ACROSS, int N> inline void warpgroup_multiply(float (&d)[N], u64 a, u64 b, bool add) {
    emulated_product(d, nullptr, a, b, add, ACROSS);
}
inline void products_begin() { emulator::current->products_begun = true; }
inline void products_commit() {
    emulator::current->product_groups.push_back(std::move(emulator::current->open_products));
    emulator::current->open_products.clear();
}
template <int PENDING> inline void products_wait() {
    emulator::current->products_begun = false;
    emulator::together(emulator::PRODUCTS, [](emulator::Thread* lanes) {
        while (lanes->product_groups.size() > PENDING) emulator::multiply_group(lanes);
    });
}

// A phase as 8 bytes of shared memory. What a copy's arrival counts is made on the spot: whoever reads without waiting, or
// lets a place be filled again too early, shows in one of the two orders.
struct EmulatedPhase {
    u16 count, missing;
    u32 ended;
};
namespace emulator {
inline void arrive(EmulatedPhase* phase) {
    if (phase->missing == 0 || phase->missing > phase->count) fail("more arrivals than the phase counts", number());
    if (--phase->missing) return;
    phase->missing = phase->count;
    phase->ended++;
    for (auto waiter = waiters.begin(); waiter != waiters.end();) {
        if (waiter->first != phase) { ++waiter; continue; }
        waiter->second->waiting = false;
        waiter = waiters.erase(waiter);
    }
    pass_on();  // so that what the arrival allowed happens before whatever its thread should have done first
}
}  // namespace emulator

inline void phase_begin(u64* phase, int count) { *(EmulatedPhase*)phase = {(u16)count, (u16)count, 0}; }
inline void phase_arrive(u64* phase) { emulator::arrive((EmulatedPhase*)phase); }
inline void phase_arrive_by_copies(u64* phase) {
    copy_commit();
    copy_wait<0>();
    emulator::arrive((EmulatedPhase*)phase);
}
inline void phase_wait(u64* phase, int parity) {
    EmulatedPhase* const mine = (EmulatedPhase*)phase;
    while ((mine->ended & 1) == (u32)parity) {
        emulator::waiters.push_back({mine, emulator::current});
        emulator::wait();
    }
}
template <int COUNT> inline void registers_give() {}
template <int COUNT> inline void registers_take() {}

inline bool any(bool x) {
    emulator::current->words[0] = x;
    emulator::together(emulator::VOTE, [](emulator::Thread* lanes) {
        u32 some = 0;
        for (int i = 0; i < 32; i++) some |= lanes[i].words[0];
        for (int i = 0; i < 32; i++) lanes[i].words[0] = some;
    });
    return emulator::current->words[0];
}

inline u32 warp_largest(u32 x) {
    emulator::current->words[0] = x;
    emulator::together(emulator::VOTE, [](emulator::Thread* lanes) {
        u32 most = 0;
        for (int i = 0; i < 32; i++) most = lanes[i].words[0] > most ? lanes[i].words[0] : most;
        for (int i = 0; i < 32; i++) lanes[i].words[0] = most;
    });
    return emulator::current->words[0];
}
inline int lowest_bit(u32 x) { return __builtin_ctz(x); }

inline void wait_for_earlier() {}
inline void let_next_start() {}
inline uint4 load_once(const uint4* p) { return *p; }
inline void store_once(void* p, uint4 v) { memcpy(p, &v, 16); }
