// One token of KDA for a sequence and head: convolution, norms, gates, recurrence on the state, output norm and gate.
//
//     q, k, v = SiLU(conv(window + token));  q, k = q, k / |.|;  alpha = exp(gate(decay_logit))
//     S = S alpha + u k^T,  u = sigmoid(beta_logit) (v - (S alpha) k)            S [V, K] float, in place
//     o = RMSNorm(scale S q) norm_weight sigmoid(gate)
//
// All that counts is the traffic of the states, so it never stops: a block walks over (sequence, head) pairs with the
// stride of the grid, and the states of the next two are under way to shared memory while one is computed. A thread
// copies exactly the pieces that it will use, so their arrival needs no barrier. What else the next pair needs is on its
// way to registers, all of it at once: one after another, these small loads would take longer than the state. Both sums
// over k are taken from the decayed state before the write, since S' q = S q + u (k . q).
//
// Each warp owns V / 8 rows of S; K / 4 lanes share a row, four numbers each. The sums of R of a lane's rows are folded
// over the lanes together: each step halves the numbers that a lane still sums, so 31 exchanges do for 32 sums. Rows need
// nothing of each other before the output norm: with several GROUPS of rows the first is written while the last is still
// under way, which counts where a block has one pair only.
//
// Macros: GROUPS of rows, KEY_DIM, VALUE_DIM (64 or 128), TAPS (of the convolution, at least 2), BOUNDED, HAS_A, HAS_BIAS, INDEXED, LONG
// (64-bit slots), BY_HEAD (a window holds the channels of one head after the other's, not q of all heads first), RANK (0, or a
// multiple of 32: decay_logit is [rows, RANK], and its product with decay_up [heads K, RANK] the logits, rounded to bfloat16; the
// same bits as by few_rows/cuda/project.cu).
#include "decode_gates.h"
#include "decode_sums.h"

constexpr int K = KEY_DIM, V = VALUE_DIM, THREADS = 256, WARPS = 8, STAGES = 3;
constexpr int ACROSS = K / 4;               // lanes of a row
constexpr int SIDE = 32 / ACROSS;           // rows that a warp holds side by side
constexpr int M = V / WARPS / SIDE;         // rows of a lane
constexpr int R = M / GROUPS;               // of which so many arrive together
constexpr int SPREAD = ACROSS / (2 * R);    // lanes that end with one and the same sum
constexpr int CHANNELS = 2 * K + V;         // of a head, behind the convolution

#if LONG
typedef i64 slot_type;
#else
typedef int slot_type;
#endif

struct Shared {
    float state[STAGES][V * K];
    float mixed[CHANNELS];  // q | k | v
    float alpha[K];
    float squares[WARPS];   // of a warp's outputs
};

constexpr int EACH = (CHANNELS + THREADS - 1) / THREADS;  // channels of a thread

// copy_wait for a number that is constant once loops are unrolled.
template <int MOST> DEVICE void wait_for_all_but(int pending) {
    if (pending == MOST) copy_wait<MOST>();
    else if constexpr (MOST > 0) wait_for_all_but<MOST - 1>(pending);
}

// The decay's logits of 16 channels, by one warp: a product of depth RANK in steps of 32, two of them to a sum.
constexpr int STEPS = RANK / 32, TILES = K / 16;
struct Logits {
    uint4 weights[STEPS ? STEPS : 1][2], tokens[STEPS ? STEPS : 1];
    float bias[2];
};

// What a thread needs of a (sequence, head) besides the state.
struct Inputs {
    i64 slot;
    bf16 newest[EACH], old[EACH][TAPS - 1], z, beta, gate[GROUPS];
    float taps[EACH][TAPS], bias, A, norm[GROUPS];
    Logits logits;
};

KERNEL(THREADS, 1) decode(
    const bf16* qkv, const float* conv_weight, bf16* window, const bf16* decay_logit, const bf16* decay_up, const float* A_log, const float* dt_bias,
    const bf16* beta_logit, const bf16* gate, const float* norm_weight, float* state, const slot_type* index, bf16* out,
    i64 qkv_stride, i64 decay_stride, i64 beta_stride, i64 gate_stride, i64 state_slot, i64 state_head, i64 window_slot,
    i64 window_head, i64 slots, int heads, int programs,
    float scale, float lower_bound, float norm_eps, float l2_eps) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int side = lane / ACROSS, across = lane % ACROSS;
    const int sum = across / SPREAD;                   // which sum this lane ends with: R of S k, then R of S q
    const bool reads = sum >= R, speaks = reads && across % SPREAD == 0;
    const int mine = side * ACROSS + (reads ? sum - R : sum) * SPREAD;  // the lane with the write of that row
    const int first = warp * (V / WARPS) + side;       // this lane's rows: first + SIDE m
    const int row_of_sum = first + SIDE * (reads ? sum - R : sum);  // of the first group; R rows on, that of the next

    // The slot of a program: below 0 a padding row, `slots` or above one outside the pool.
    auto slot_of = [&](int program) -> i64 {
        const int row = program / heads;
        return INDEXED ? (i64)index[row] : (i64)row;
    };
    auto channel_of = [&](int c, int head) -> i64 {  // in qkv, of channel c of q | k | v of a head
        if (c < 2 * K) return (i64)(c / K * heads + head) * K + c % K;
        return (i64)2 * heads * K + head * V + (c - 2 * K);
    };
    auto window_of = [&](i64 slot, int head, int c) -> bf16* {
        if (BY_HEAD) return window + slot * window_slot + head * window_head + c * (TAPS - 1);
        return window + slot * window_slot + channel_of(c, head) * (TAPS - 1);
    };
    auto gather = [&](int program) -> Inputs {
        Inputs x;
        x.slot = -1;
        if (program >= programs) return x;
        x.slot = slot_of(program);
        if (x.slot < 0 || x.slot >= slots) return x;
        const int row = program / heads, head = program % heads;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int c = thread + e * THREADS;
            if (c >= CHANNELS) break;
            const i64 channel = channel_of(c, head);
            const bf16* seen = window_of(x.slot, head, c);
            x.newest[e] = qkv[row * qkv_stride + channel];
#pragma unroll
            for (int t = 0; t < TAPS - 1; t++) x.old[e][t] = seen[t];
#pragma unroll
            for (int t = 0; t < TAPS; t++) x.taps[e][t] = conv_weight[channel * TAPS + t];
        }
        if (RANK) {
            if (warp < TILES) {
                const int key = head * K + 16 * warp + (lane >> 2);
#pragma unroll
                for (int h = 0; h < 2; h++) x.logits.bias[h] = HAS_BIAS ? dt_bias[key + 8 * h] : 0.0f;
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    const int column = 32 * s + 8 * (lane & 3);
#pragma unroll
                    for (int h = 0; h < 2; h++) x.logits.weights[s][h] = *(const uint4*)(decay_up + (i64)(key + 8 * h) * RANK + column);
                    x.logits.tokens[s] = lane < 4 ? *(const uint4*)(decay_logit + row * decay_stride + column) : make_uint4(0, 0, 0, 0);
                }
            }
        } else {
            const int key = head * K + (thread < K ? thread : 0);
            x.z = decay_logit[row * decay_stride + key];
            x.bias = HAS_BIAS ? dt_bias[key] : 0.0f;
        }
        x.A = HAS_A ? A_log[head] : 0.0f;
        x.beta = beta_logit[row * beta_stride + head];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            x.gate[g] = gate[row * gate_stride + head * V + row_of_sum + g * R * SIDE];
            x.norm[g] = norm_weight[row_of_sum + g * R * SIDE];
        }
        return x;
    };
    auto fetch = [&](int program, int stage) {
        const i64 slot = program < programs ? slot_of(program) : -1;
        const bool there = slot >= 0 && slot < slots;
        const float* from = state + slot * state_slot + program % heads * state_head + first * K + 4 * across;
        float* to = shared.state[stage] + first * K + 4 * across;
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (there) copy_async(to + m * SIDE * K, from + m * SIDE * K);
            if (m % R == R - 1) copy_commit();
        }
    };

    let_next_start();
    // Parameters of the first pair come into the L2 cache meanwhile, and where there is more to do than one pair a block, the first
    // states: the kernel before leaves memory idle as it ends. What it still writes there, or to the index, does not matter:
    // nothing is read yet that is computed on.
    for (int c = thread; c < CHANNELS; c += THREADS)
        if (c % 8 == 0) prefetch(conv_weight + channel_of(c, blockIdx.x % heads) * TAPS);
    for (int s = 0; s < 2 && programs > gridDim.x; s++) {
        const int program = blockIdx.x + s * gridDim.x, row = program / heads;
        if (program >= programs) break;
        const i64 slot = INDEXED ? (i64)*(const volatile slot_type*)(index + row) : (i64)row;  // not out of, nor into, the L1 cache
        if (slot < 0 || slot >= slots) continue;
        const float* from = state + slot * state_slot + program % heads * state_head;
        for (int line = thread; line < V * K / 32; line += THREADS) prefetch(from + 32 * line);
    }
    if (RANK && warp < TILES) prefetch(decay_up + (i64)(blockIdx.x % heads * K + 16 * warp + lane / 2) * RANK + lane % 2 * (RANK / 2));
    wait_for_earlier();
    int program = blockIdx.x, stage = 0;
    Inputs next = gather(program);  // before the state: the first pair waits for them, and they would queue behind it
    fetch(program, 0);
    fetch(program + gridDim.x, 1);
    for (; program < programs; program += gridDim.x) {
        const Inputs now = next;
        next = gather(program + gridDim.x);
        fetch(program + 2 * gridDim.x, (stage + 2) % STAGES);
        const int row = program / heads, head = program % heads;
        const i64 slot = now.slot;
        bf16* target = out + ((i64)row * heads + head) * V;
        if (slot < 0 || slot >= slots) {  // the same for the whole block
            copy_wait<2 * GROUPS>();
            if (thread < V) target[thread] = slot < 0 ? to_bf16(0.0f) : (bf16)0x7fff;
            stage = (stage + 1) % STAGES;
            continue;
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int c = thread + e * THREADS;
            if (c >= CHANNELS) break;
            float total = now.taps[e][TAPS - 1] * to_float(now.newest[e]);
            bf16* seen = window_of(slot, head, c);
#pragma unroll
            for (int t = 0; t < TAPS - 1; t++) {
                total = fmaf(now.taps[e][t], to_float(now.old[e][t]), total);
                seen[t] = t < TAPS - 2 ? now.old[e][t + 1] : now.newest[e];
            }
            shared.mixed[c] = total * sigmoid(total);
        }
        const float rate = HAS_A ? exp2_fast(LOG2E * now.A) : 1.0f;
        if (RANK && warp < TILES) {
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < STEPS; s += 2) {
                float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = s; i < STEPS && i < s + 2; i++) {
                    const uint4 a = now.logits.weights[i][0], b = now.logits.weights[i][1], x = now.logits.tokens[i];
                    const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
                    multiply_add(d, low, x.x, x.y);
                    multiply_add(d, high, x.z, x.w);
                }
                sums[0] += d[0], sums[2] += d[2];
            }
            if ((lane & 3) == 0)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    shared.alpha[16 * warp + (lane >> 2) + 8 * h] =
                        decay(to_float(to_bf16(sums[2 * h])) + now.logits.bias[h], rate, lower_bound);
        }
        if (!RANK && thread < K) shared.alpha[thread] = decay(to_float(now.z) + now.bias, rate, lower_bound);
        const float beta = sigmoid(to_float(now.beta));
        sync_threads();

        const float4 alpha = ((const float4*)shared.alpha)[across];
        float4 q = ((const float4*)shared.mixed)[across], k = ((const float4*)(shared.mixed + K))[across];
        float lengths[2] = {q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w, k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w};
        float cross = q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
#pragma unroll
        for (int mask = ACROSS / 2; mask; mask >>= 1) {
            lengths[0] += shuffle_xor(lengths[0], mask);
            lengths[1] += shuffle_xor(lengths[1], mask);
            cross += shuffle_xor(cross, mask);
        }
        const float q_unit = rsqrt_fast(lengths[0] + l2_eps), k_unit = rsqrt_fast(lengths[1] + l2_eps);
        q = make_float4(q.x * q_unit, q.y * q_unit, q.z * q_unit, q.w * q_unit);
        k = make_float4(k.x * k_unit, k.y * k_unit, k.z * k_unit, k.w * k_unit);
        cross *= q_unit * k_unit;

        float o[GROUPS], squares = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            wait_for_all_but<3 * GROUPS - 1>(3 * GROUPS - 1 - g);
            float4 S[R];
            float sums[2 * R];
            const int begin = (first + g * R * SIDE) * K + 4 * across;
            const float* held = shared.state[stage] + begin;
#pragma unroll
            for (int m = 0; m < R; m++) {
                float4 s = *(const float4*)(held + m * SIDE * K);
                s = make_float4(s.x * alpha.x, s.y * alpha.y, s.z * alpha.z, s.w * alpha.w);
                sums[m] = fmaf(s.w, k.w, fmaf(s.z, k.z, fmaf(s.y, k.y, s.x * k.x)));
                sums[R + m] = fmaf(s.w, q.w, fmaf(s.z, q.z, fmaf(s.y, q.y, s.x * q.x)));
                S[m] = s;
            }
            fold<R, ACROSS / 2>(sums, lane);
            // u only where this lane's sum is one of S k, o only where it is one of S q
            const float u = beta * (shared.mixed[2 * K + row_of_sum + g * R * SIDE] - sums[0]);
            o[g] = scale * fmaf(shuffle(u, mine), cross, sums[0]);
            float* to = state + slot * state_slot + head * state_head + begin;
#pragma unroll
            for (int m = 0; m < R; m++) {
                const float w = shuffle(u, side * ACROSS + m * SPREAD);
                *(float4*)(to + m * SIDE * K) =
                    make_float4(fmaf(w, k.x, S[m].x), fmaf(w, k.y, S[m].y), fmaf(w, k.z, S[m].z), fmaf(w, k.w, S[m].w));
            }
            squares += speaks ? o[g] * o[g] : 0.0f;
        }
        squares = warp_total(squares);
        if (lane == 0) shared.squares[warp] = squares;
        sync_threads();
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared.squares[w];
        const float unit = rsqrt_fast(total * (1.0f / V) + norm_eps);
        if (speaks)
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                target[row_of_sum + g * R * SIDE] = to_bf16(o[g] * unit * now.norm[g] * sigmoid(to_float(now.gate[g])));
        stage = (stage + 1) % STAGES;
    }
    copy_wait<0>();
}
