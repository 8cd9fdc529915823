// A read over depth: running-sum add, scores, softmax, mix and output RMSNorm.
//
//     live = live + delta;   s_i = <v_i, c> rsqrt(mean v_i^2 + eps);   p = softmax(s);   out = norm(sum_i p_i v_i)
//
// A token's rows are in shared memory before they are scored, and are mixed out of it: no online softmax, one barrier a
// token, while the rows of the next token arrive. See ring.h.
//
// Macros beside ring.h's: SOURCES (M, at most 16), HAS_DELTA, HAS_QUERY (c = score_weight query), GIVEN (the first source is a sum over a bank, whose score is
// given), HAS_NORM, TRAINING (keep scores, 1 / root mean square, and the softmax's log-denominator), BLOCKS.
#include "device.h"
#include "ring.h"

constexpr int M = SOURCES;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;


// The source of lane or turn `j`: the running sum comes first, since what is added to it waits for nothing.
DEVICE int source_of(int j) { return j == 0 ? M - 1 : j - 1; }

KERNEL(THREADS, BLOCKS) forward(
    Sources<M> sources, const bf16* delta, i64 delta_stride, const float* given, const float* score_weight, const float* query, const float* norm_weight,
    bf16* total, bf16* out, float* statistics, i64 rows, float eps, float norm_eps) {
    SHARED(memory);
    const int thread = threadIdx.x, lane = thread % 32, mine = folded<2 * M>(lane);
    Ring ring = {(uint4*)memory, 0};
    float* const scratch = (float*)(memory + RING * VECTORS * THREADS * 16);  // [2][WARPS][2 M], then [2][WARPS]
    float* const norm_scratch = scratch + 2 * WARPS * 2 * M;
    const i64 step = gridDim.x;
    let_next_start();
    wait_for_earlier();
    float c[NUMBERS];
    load_floats(c, score_weight);
    if (HAS_QUERY) {
        float q[NUMBERS];
        load_floats(q, query);
#pragma unroll
        for (int e = 0; e < NUMBERS; e++) c[e] *= q[e];
    }

    auto row_of = [&](int item, i64 row) -> const bf16* {
        if (row >= rows) return nullptr;
        if (HAS_DELTA && item == 0) return delta + row * delta_stride;
        const int source = source_of(item - HAS_DELTA);
        return sources.rows[source] + row * sources.stride[source];
    };
    auto refill = [&](int item, i64 row) { ring.fill(item, row_of((item + RING) % ITEMS, row + (item + RING) / ITEMS * step)); };

    i64 row = blockIdx.x;
    #pragma unroll
    for (int n = 0; n < RING; n++) ring.fill(n, row_of(n % ITEMS, row + n / ITEMS * step));
    for (int parity = 0; row < rows; row += step, parity ^= 1) {
        float x[NUMBERS], sums[2 * M];
        if (HAS_DELTA) {
            copy_wait<RING - 1>();
            ring.read(x, 0);
            refill(0, row);
        }
#pragma unroll
        for (int j = 0; j < M; j++) {
            float v[NUMBERS];
            wait_for_all_but(RING - 1 - j);
            ring.read(v, j + HAS_DELTA);
            if (HAS_DELTA && j == 0) {
#pragma unroll
                for (int u = 0; u < VECTORS; u++) {
#pragma unroll
                    for (int e = 8 * u; e < 8 * u + 8; e++) v[e] += x[e];
                    const uint4 rounded = narrow(v + 8 * u);  // the source is what is stored
                    *ring.at(1, u) = rounded;
                    if (piece_inside(u)) store_once(total + row * WIDTH + piece_at(u), rounded);
                    widen(*(float (*)[8])(v + 8 * u), rounded);
                }
            }
            float product = 0.0f, square = 0.0f;
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) {
                product = fmaf(v[e], c[e], product);
                square = fmaf(v[e], v[e], square);
            }
            sums[j] = product;
            sums[M + j] = square;
        }
        const float sum = block_sums<2 * M>(sums, scratch + parity * WARPS * 2 * M, lane, mine);
        float rstd = rsqrt_fast(shuffle(sum, (lane + M) & 31) * (1.0f / WIDTH) + eps);
        float score = lane < M ? sum * rstd : from_bits(0xff800000u);
        if (GIVEN && lane == 1) score = given[row], rstd = 0.0f;
        const float top = warp_largest(score);
        const float weight = exp2_fast(LOG2E * (score - top)), denominator = warp_total(weight);
        if (TRAINING && thread < M) {
            float* const kept = statistics + row * (2 * M + 1);
            kept[source_of(lane)] = score;
            kept[M + source_of(lane)] = rstd;
            if (thread == 0) kept[2 * M] = top + LN2 * log2_fast(denominator);
        }
        const float share = weight / denominator;
        float mix[NUMBERS];
#pragma unroll
        for (int j = 0; j < M; j++) {
            const float p = shuffle(share, j);
            ring.read(x, j + HAS_DELTA);
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) mix[e] = j == 0 ? p * x[e] : fmaf(p, x[e], mix[e]);
            refill(j + HAS_DELTA, row);
        }
        if (HAS_NORM) {
            float square[1] = {0.0f};
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) square[0] = fmaf(mix[e], mix[e], square[0]);
            load_floats(x, norm_weight);
            const float all = block_sums<1>(square, norm_scratch + parity * WARPS, lane, lane == 0 ? 0 : -1);
            const float unit = rsqrt_fast(all * (1.0f / WIDTH) + norm_eps);
#pragma unroll
            for (int e = 0; e < NUMBERS; e++) mix[e] *= unit * x[e];
        }
        store_row(out + row * WIDTH, mix);
        ring.advance();
    }
    copy_wait<0>();
}
