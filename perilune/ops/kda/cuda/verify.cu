// Fold the accepted tokens of the pending window into the state, then compute the outputs of the new window: one read of the
// state and one write, whatever the number of tokens. The arithmetic of a token is that of decode.cu.
//
// A block walks over (sequence, head) pairs with the stride of the grid; the next pair's state is under way while one is
// worked on. Everything that does not need the state is done for all tokens at once: convolution, gates, the lengths of q
// and k. Then each warp takes its rows of the state through the tokens without waiting for the other warps, and the
// output norm follows at the end. After the last accepted token the state is written; the new tokens change it in
// registers only.
//
// Macros: those of recurrence.h; TAPS (at least 2), OLD_TOKENS (tokens of the pending window, 0 = there is none), NEW_TOKENS, HAS_A,
// HAS_BIAS, INDEXED, LONG_COUNT (64-bit counts).
#include "recurrence.h"

constexpr int TOKENS = OLD_TOKENS + NEW_TOKENS, STAGES = 2;
constexpr int EACH = (CHANNELS + THREADS - 1) / THREADS;  // channels of a thread

struct Shared {
    float state[STAGES][V * K];
    float mixed[TOKENS][CHANNELS];  // q | k | v
    float alpha[TOKENS][K];
    float out[NEW_TOKENS][V];
    float unit[TOKENS][4];          // 1 / |q|, 1 / |k|, <q, k> / (|q| |k|), beta
};

#if LONG_COUNT
typedef i64 count_type;
#else
typedef int count_type;
#endif

// The projections of a window, `[B, T, ...]` each, and the numbers from a sequence and from a token to the next.
struct Window {
    const bf16 *qkv, *decay, *beta;
    i64 qkv_row, qkv_token, decay_row, decay_token, beta_row, beta_token;
};

KERNEL(THREADS, 1) verify(
    const bf16* qkv, const bf16* decay_logit, const bf16* beta_logit, const bf16* gate, const bf16* old_qkv,
    const bf16* old_decay, const bf16* old_beta, const count_type* accepted, const float* conv_weight, const float* A_log,
    const float* dt_bias, const float* norm_weight, bf16* window, float* state, const slot_type* index, bf16* out,
    i64 qkv_row, i64 qkv_token, i64 decay_row, i64 decay_token, i64 beta_row, i64 beta_token, i64 gate_row, i64 gate_token,
    i64 old_qkv_row, i64 old_qkv_token, i64 old_decay_row, i64 old_decay_token, i64 old_beta_row, i64 old_beta_token,
    i64 slots, int heads, int programs, float scale, float lower_bound, float norm_eps, float l2_eps) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const Window fresh = {qkv, decay_logit, beta_logit, qkv_row, qkv_token, decay_row, decay_token, beta_row, beta_token};
    const Window pending = {old_qkv, old_decay, old_beta, old_qkv_row, old_qkv_token, old_decay_row, old_decay_token, old_beta_row, old_beta_token};
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int side = lane / ACROSS, across = lane % ACROSS;
    const int sum = across / SPREAD;                   // which sum this lane ends with: M of S k, then M of S q
    const bool reads = sum >= M, speaks = reads && across % SPREAD == 0;
    const int mine = side * ACROSS + (reads ? sum - M : sum) * SPREAD;  // the lane with the write of that row
    const int first = warp * (V / WARPS) + side;       // this lane's rows: first + SIDE m
    const int row_of_sum = first + SIDE * (reads ? sum - M : sum);

    // The slot of a program: below 0 a padding row, `slots` or above one outside the pool.
    auto slot_of = [&](int program) -> i64 {
        const int row = program / heads;
        return INDEXED ? (i64)index[row] : (i64)row;
    };
    auto fetch = [&](int program, int stage) {
        if (program < programs) {
            const i64 slot = slot_of(program);
            if (slot >= 0 && slot < slots) {
                const float* from = state + (slot * heads + program % heads) * (V * K) + first * K + 4 * across;
                float* to = shared.state[stage] + first * K + 4 * across;
#pragma unroll
                for (int m = 0; m < M; m++) copy_async(to + m * SIDE * K, from + m * SIDE * K);
            }
        }
        copy_commit();
    };

    int program = blockIdx.x, stage = 0;
    fetch(program, 0);
    for (; program < programs; program += gridDim.x, stage ^= 1) {
        fetch(program + gridDim.x, stage ^ 1);
        const int row = program / heads, head = program % heads;
        const i64 slot = slot_of(program);
        const i64 folded = OLD_TOKENS ? (i64)accepted[row] : 0;
        bf16* target = out + ((i64)row * NEW_TOKENS * heads + head) * V;  // of token t: t heads V further
        if (slot < 0 || slot >= slots || folded < 0 || folded > OLD_TOKENS) {  // the same for the whole block
            copy_wait<1>();
            const bf16 blank = slot < 0 ? to_bf16(0.0f) : (bf16)0x7fff;
            if (thread < V)
                for (int t = 0; t < NEW_TOKENS; t++) target[(i64)t * heads * V + thread] = blank;
            continue;
        }
        const int begin = OLD_TOKENS - (int)folded;  // token t of the block is pending token t - begin while t < OLD_TOKENS

        // Tokens are numbered so that the folded ones end where the new ones begin, at OLD_TOKENS.
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int c = thread + e * THREADS;
            if (c >= CHANNELS) break;
            const i64 channel = c < 2 * K ? (i64)(c / K * heads + head) * K + c % K : (i64)2 * heads * K + head * V + (c - 2 * K);
            bf16* seen = window + (slot * heads * CHANNELS + channel) * (TAPS - 1);
            bf16 raw[TAPS - 1 + TOKENS];
            float taps[TAPS], line[TAPS];
#pragma unroll
            for (int t = 0; t < TAPS - 1; t++) raw[t] = seen[t];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                raw[TAPS - 1 + t] = 0;
                if (t >= OLD_TOKENS) raw[TAPS - 1 + t] = fresh.qkv[row * fresh.qkv_row + (t - OLD_TOKENS) * fresh.qkv_token + channel];
                else if (t >= begin) raw[TAPS - 1 + t] = pending.qkv[row * pending.qkv_row + (t - begin) * pending.qkv_token + channel];
            }
#pragma unroll
            for (int t = 0; t < TAPS; t++) taps[t] = conv_weight[channel * TAPS + t];
#pragma unroll
            for (int t = 0; t < TAPS - 1; t++) line[t + 1] = to_float(raw[t]);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t == OLD_TOKENS && folded)
#pragma unroll
                    for (int i = 0; i < TAPS - 1; i++) seen[i] = to_bf16(line[i + 1]);
                if (t < OLD_TOKENS && t < begin) continue;
#pragma unroll
                for (int i = 0; i < TAPS - 1; i++) line[i] = line[i + 1];
                line[TAPS - 1] = to_float(raw[TAPS - 1 + t]);
                float total = taps[TAPS - 1] * line[TAPS - 1];
#pragma unroll
                for (int i = 0; i < TAPS - 1; i++) total = fmaf(taps[i], line[i], total);
                shared.mixed[t][c] = total * sigmoid(total);
            }
        }
        {
            const int key = thread % K;
            const float bias = HAS_BIAS ? dt_bias[head * K + key] : 0.0f;
            const float rate = HAS_A ? exp2_fast(LOG2E * A_log[head]) : 1.0f;
            for (int t = begin + thread / K; t < TOKENS; t += THREADS / K) {
                const bool old = t < OLD_TOKENS;
                const Window& x = old ? pending : fresh;
                const float z = to_float(x.decay[row * x.decay_row + (t - (old ? begin : OLD_TOKENS)) * x.decay_token + head * K + key]);
                shared.alpha[t][key] = decay(z + bias, rate, lower_bound);
            }
        }
        sync_threads();
        for (int t = begin + warp; t < TOKENS; t += WARPS) {
            float q_square = 0.0f, k_square = 0.0f, cross = 0.0f;
#pragma unroll
            for (int i = 0; i < K; i += 32) {
                const float q = shared.mixed[t][i + lane], k = shared.mixed[t][K + i + lane];
                q_square = fmaf(q, q, q_square);
                k_square = fmaf(k, k, k_square);
                cross = fmaf(q, k, cross);
            }
            const float q_unit = rsqrt_fast(warp_total(q_square) + l2_eps), k_unit = rsqrt_fast(warp_total(k_square) + l2_eps);
            cross = warp_total(cross) * q_unit * k_unit;
            if (lane == 0) {
                const bool old = t < OLD_TOKENS;
                const Window& x = old ? pending : fresh;
                const float beta = to_float(x.beta[row * x.beta_row + (t - (old ? begin : OLD_TOKENS)) * x.beta_token + head]);
                *(float4*)shared.unit[t] = make_float4(q_unit, k_unit, cross, sigmoid(beta));
            }
        }
        sync_threads();

        copy_wait<1>();
        float4 S[M];
        const float* held = shared.state[stage] + first * K + 4 * across;
        float* to = state + (slot * heads + head) * (V * K) + first * K + 4 * across;
#pragma unroll
        for (int m = 0; m < M; m++) S[m] = *(const float4*)(held + m * SIDE * K);
        for (int t = begin; t < TOKENS; t++) {
            const float4 unit = *(const float4*)shared.unit[t], alpha = ((const float4*)shared.alpha[t])[across];
            float4 q = ((const float4*)shared.mixed[t])[across], k = ((const float4*)(shared.mixed[t] + K))[across];
            q = make_float4(q.x * unit.x, q.y * unit.x, q.z * unit.x, q.w * unit.x);
            k = make_float4(k.x * unit.y, k.y * unit.y, k.z * unit.y, k.w * unit.y);
            float sums[2 * M];
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float4 s = make_float4(S[m].x * alpha.x, S[m].y * alpha.y, S[m].z * alpha.z, S[m].w * alpha.w);
                sums[m] = fmaf(s.w, k.w, fmaf(s.z, k.z, fmaf(s.y, k.y, s.x * k.x)));
                sums[M + m] = fmaf(s.w, q.w, fmaf(s.z, q.z, fmaf(s.y, q.y, s.x * q.x)));
                S[m] = s;
            }
            fold<M, ACROSS / 2>(sums, lane);
            const float u = unit.w * (shared.mixed[t][2 * K + row_of_sum] - sums[0]);  // where this lane's sum is one of S k
            const float o = scale * fmaf(shuffle(u, mine), unit.z, sums[0]);           // where it is one of S q
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float w = shuffle(u, side * ACROSS + m * SPREAD);
                S[m] = make_float4(fmaf(w, k.x, S[m].x), fmaf(w, k.y, S[m].y), fmaf(w, k.z, S[m].z), fmaf(w, k.w, S[m].w));
            }
            if (t >= OLD_TOKENS && speaks) shared.out[t - OLD_TOKENS][row_of_sum] = o;
            if (t == OLD_TOKENS - 1)
#pragma unroll
                for (int m = 0; m < M; m++) *(float4*)(to + m * SIDE * K) = S[m];
        }
        sync_threads();
        for (int t = warp; t < NEW_TOKENS; t += WARPS) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < V; i += 32) squares = fmaf(shared.out[t][i + lane], shared.out[t][i + lane], squares);
            const float unit = rsqrt_fast(warp_total(squares) * (1.0f / V) + norm_eps);
#pragma unroll
            for (int i = 0; i < V; i += 32) {
                const float opened = sigmoid(to_float(gate[row * gate_row + t * gate_token + head * V + i + lane]));
                target[(i64)t * heads * V + i + lane] = to_bf16(shared.out[t][i + lane] * unit * norm_weight[i + lane] * opened);
            }
        }
    }
    copy_wait<0>();
}
