// Fold accepted drafts into a state, and score the tokens of the next window, for one sequence and head: a block each.
//
// A token is S = S alpha + u k^T with u = beta (v - (S alpha) k), and o = scale S q. With D_t the product of the decays up to t,
// and w(s, t) = k_s alpha_{s+1} .. alpha_t,
//
//     u_t = beta_t (v_t - S_0 (D_t k_t) - sum_{s<t} u_s w(s, t) . k_t),   o_t = scale (S_0 (D_t q_t) + sum_{s<=t} u_s w(s, t) . q_t)
//     S_m = S_0 D_m + sum_{s<=m} u_s w(s, m)^T
//
// so the state meets all tokens at once, and the chain from token to token is one number for each value channel. Products of
// decays are taken step by step, never as quotients: nothing overflows, and what a long decay leaves has all of its digits.
//
// Tokens have places: up to 8 for those that are folded, the last of them at 8, and from 9 on for those that are scored; an empty
// place has alpha 1 and zeros. What tokens do to each other is a small matrix, the same for all value channels (verify_tokens.h),
// so a warp takes its 16 rows of the state from product to product (verify_products.h).
#include "verify_inputs.h"
#include "verify_products.h"
#include "verify_tokens.h"

KERNEL(THREADS, 2) verify(
    const bf16* qkv, const bf16* decay_logit, const bf16* beta_logit, const bf16* gate, const bf16* old_qkv, const bf16* old_decay,
    const bf16* old_beta, const count_type* accepted, const float* conv_weight, const float* A_log, const float* dt_bias,
    const float* norm_weight, bf16* window, float* state, const slot_type* index, bf16* out, i64 qkv_row, i64 qkv_token,
    i64 decay_row, i64 decay_token, i64 beta_row, i64 beta_token, i64 gate_row, i64 gate_token, i64 old_qkv_row, i64 old_qkv_token,
    i64 old_decay_row, i64 old_decay_token, i64 old_beta_row, i64 old_beta_token, i64 slots, int heads, int count,
    int pending_count, float scale, float lower_bound, float norm_eps, float l2_eps) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32, head = blockIdx.x;
    const i64 row = blockIdx.y;
    const i64 slot = INDEXED ? (i64)index[row] : row;
    const i64 stands = accepted ? (i64)accepted[row] : 0;
    out += (row * count * heads + head) * V;
    const bool wild = slot >= slots || stands < 0 || stands > pending_count;
    if (slot < 0 || wild) {  // padding gives zeros; a number out of range gives NaN; both touch nothing
        for (int n = thread; n < count * V; n += THREADS) out[(i64)(n / V) * heads * V + n % V] = slot < 0 ? to_bf16(0.0f) : (bf16)0x7fff;
        return;
    }
    const int folds = (int)stands, empty = FOLDED - folds;  // places without a token, in front
    const u32 mask = TF32_BITS + ((u32)count >> 30);
    state += (slot * heads + head) * (K * V);
    window += slot * heads * CHANNELS * SEEN;

    // What is needed of all tokens is asked for at once, before the state, behind which it would queue: of two channels, or two
    // decays, a thread.
    auto gather = [&](int first) -> Inputs {  // the warp's first pair
        Inputs in;
        in.first = first;
        in.decays = first >= CHANNELS / 2;
        in.c = 2 * (first + lane - (in.decays ? CHANNELS / 2 : 0));
        in.channel = in.decays ? head * K + in.c
                   : first < K ? (in.c / K * heads + head) * K + in.c % K
                               : 2 * heads * K + head * V + (in.c - 2 * K);
        const i64 old_token = in.decays ? old_decay_token : old_qkv_token, token = in.decays ? decay_token : qkv_token;
        const bf16* old = in.channel + (in.decays ? old_decay + row * old_decay_row : old_qkv + row * old_qkv_row);
        old -= (SEEN + empty) * old_token;
        const bf16* now = in.channel + (in.decays ? decay_logit + row * decay_row : qkv + row * qkv_row);
#pragma unroll
        for (int j = 0; j < SEEN + FOLDED; j++, old += old_token) {
            const bool read = j >= FOLDED || first >= K / 2;  // of a folded token's q only what the convolution still sees
            in.x[j] = j >= SEEN + empty && read ? *(const u32*)old : 0;
        }
#pragma unroll
        for (int t = 0; t < SCORED; t++, now += token) in.x[SEEN + FOLDED + t] = t < count ? *(const u32*)now : 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            in.bias[h] = in.decays && HAS_BIAS ? dt_bias[in.channel + h] : 0.0f;
#pragma unroll
            for (int i = 0; i < TAPS; i++) in.taps[h][i] = in.decays ? 0.0f : conv_weight[(i64)(in.channel + h) * TAPS + i];
#pragma unroll
            for (int i = 0; i < SEEN; i++) in.seen[h][i] = in.decays ? (bf16)0 : window[(i64)(in.channel + h) * SEEN + i];
        }
        return in;
    };
    Inputs in;
    if (32 * warp < PAIRS) in = gather(32 * warp);
    bf16 beta = 0;
    const bool has_beta = thread < FOLDED ? thread >= empty : thread - FOLDED < count;
    if (thread < PLACES && has_beta)
        beta = thread < FOLDED ? old_beta[row * old_beta_row + (thread - empty) * old_beta_token + head]
                               : beta_logit[row * beta_row + (thread - FOLDED) * beta_token + head];
    const int mine = 16 * warp + 2 * (lane >> 2);  // of two outputs
    float raw[7];  // gates as bits; A_log
#pragma unroll
    for (int n = 0; n < 3; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int t = token_of(n, lane & 3);
            raw[2 * n + h] = from_bits(t < count ? gate[row * gate_row + t * gate_token + head * V + mine + h] : 0);
        }
    raw[6] = HAS_A ? A_log[head] : 0.0f;
    const float norm = thread < V ? norm_weight[thread] : 0.0f;
    const int r = thread / (K / 4), f = thread % (K / 4);
    const float* const from = state + 4 * thread;
    float* const to = shared.state + r * K + 4 * (f ^ ((r >> 1 & 1) << 2));
#pragma unroll
    for (int n = 0; n < V * K; n += 4 * THREADS) copy_async(to + n, from + n);
    copy_commit();
    held(raw);  // or the compiler makes something of them, and waits, before it copies
    u32 opened[4] = {};  // the gates of two rows each
#pragma unroll
    for (int n = 0; n < 3; n++) opened[n] = bits(raw[2 * n]) | bits(raw[2 * n + 1]) << 16;
    held(opened);
    const float rate = HAS_A ? exp2_fast(LOG2E * raw[6]) : 1.0f;

    if (thread < V) shared.norm[thread] = norm;
    if (thread < PLACES) shared.beta[thread] = has_beta ? sigmoid(to_float(beta)) : 0.0f;
#pragma unroll 1
    for (int n = 0; n < ROUNDS; n++) {
        const int first = 32 * warp + n * THREADS;
        if (first >= PAIRS) break;
        if (n) in = gather(first);
        if (in.decays) {
            store_decays(shared, in, rate, lower_bound, empty, count);
            continue;
        }
        align(in, empty);
        if (folds > 0)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < SEEN; i++) window[(i64)(in.channel + h) * SEEN + i] = (bf16)(in.x[FOLDED + i] >> 16 * h);
        store_convolved(shared, in, empty, count, lane);
    }
    sync_threads();

    float unit = 0.0f;
#pragma unroll
    for (int n = 0; n < PARTS; n++)
        if (lane < LISTED) unit += shared.squares[n][lane];
    unit = rsqrt_fast(unit + l2_eps) * (lane < PLACES ? 1.0f : scale);
    if (warp == 0) shared.unit[lane] = unit;
    for (int n = warp; n < PLACES / 2; n += WARPS)  // the shortest two for one of eight warps
        compare(shared, n < 8 ? 7 - n : 8, unit, empty, lane);
    sync_threads();
    if (warp == WARPS - 1) answer(shared, empty, lane);
    if (thread < K) let_decay(shared, empty, thread);
    copy_wait<0>();
    sync_threads();

    float z[4][4];
    if (folds > 0) meet<true>(z, shared, warp, lane, mask);
    else meet<false>(z, shared, warp, lane, mask);
    Answers y;
    follow(y, z, shared, empty, warp, lane, mask);
#pragma unroll
    for (int n = 0; n < 3; n++) {
        float square = fmaf(y.o[n][0], y.o[n][0], y.o[n][1] * y.o[n][1]);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) square += shuffle_xor(square, mask);
        if (lane < 4 && token_of(n, lane) < SCORED) shared.of_outputs[token_of(n, lane)][warp] = square;
    }
    if (folds > 0) fold_into(state, y, shared, empty, warp, lane, mask);
    sync_threads();
    const float2 weight = *(const float2*)(shared.norm + mine);
#pragma unroll
    for (int n = 0; n < 3; n++) {
        const int t = token_of(n, lane & 3);
        if (t >= count) continue;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared.of_outputs[t][w];
        const float by = rsqrt_fast(total * (1.0f / V) + norm_eps);
        const float low = y.o[n][0] * by * weight.x * sigmoid(low_half(opened[n]));
        const float high = y.o[n][1] * by * weight.y * sigmoid(high_half(opened[n]));
        *(u32*)(out + (i64)t * heads * V + mine) = pack(low, high);
    }
}
