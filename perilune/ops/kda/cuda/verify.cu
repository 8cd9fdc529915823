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
// Tokens have places: 0 .. 8 for those that are folded, 9 .. 17 for those that are scored; an empty place has alpha 1 and zeros.
// A thread has two rows of the state (value channels) and every fourth piece of four of their numbers.
#include "verify_layout.h"

KERNEL(THREADS, 2) verify(
    const bf16* qkv, const bf16* decay_logit, const bf16* beta_logit, const bf16* gate, const bf16* old_qkv, const bf16* old_decay,
    const bf16* old_beta, const count_type* accepted, const float* conv_weight, const float* A_log, const float* dt_bias,
    const float* norm_weight, bf16* window, float* state, const slot_type* index, bf16* out, i64 qkv_row, i64 qkv_token,
    i64 decay_row, i64 decay_token, i64 beta_row, i64 beta_token, i64 gate_row, i64 gate_token, i64 old_qkv_row, i64 old_qkv_token,
    i64 old_decay_row, i64 old_decay_token, i64 old_beta_row, i64 old_beta_token, i64 slots, int heads, int count,
    int pending_count, float scale, float lower_bound, float norm_eps, float l2_eps) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, head = blockIdx.x;
    const i64 row = blockIdx.y;
    const i64 slot = INDEXED ? (i64)index[row] : row;
    const i64 stands = accepted ? (i64)accepted[row] : 0;
    const int first = 2 * (thread / 4), quarter = thread % 4, mine = first + (quarter & 1);  // rows first, first + 1; sums of row `mine`
    out += (row * count * heads + head) * V;
    const bool wild = slot >= slots || stands < 0 || stands > pending_count;
    if (slot < 0 || wild) {  // padding gives zeros; a number out of range gives NaN; both touch nothing
        for (int n = thread; n < count * V; n += THREADS) out[(i64)(n / V) * heads * V + n % V] = slot < 0 ? to_bf16(0.0f) : (bf16)0x7fff;
        return;
    }
    const int folds = (int)stands;
    state += (slot * heads + head) * (K * V);
    window += slot * heads * CHANNELS * (TAPS - 1);

    // What is needed of all tokens is asked for at once, before the state, behind which it would queue: of two channels, or two
    // decays, a thread.
    auto gather = [&](int pair) -> Inputs {
        Inputs in;
        in.decays = pair >= CHANNELS / 2;
        in.c = 2 * (in.decays ? pair - CHANNELS / 2 : pair);
        in.channel = in.decays ? head * K + in.c
                   : in.c < 2 * K ? (in.c / K * heads + head) * K + in.c % K
                                  : 2 * heads * K + head * V + (in.c - 2 * K);
        const bf16* const old = in.channel + (in.decays ? old_decay + row * old_decay_row : old_qkv + row * old_qkv_row);
        const bf16* const now = in.channel + (in.decays ? decay_logit + row * decay_row : qkv + row * qkv_row);
        const i64 old_token = in.decays ? old_decay_token : old_qkv_token, token = in.decays ? decay_token : qkv_token;
        const int unread = !in.decays && in.c < K ? folds - (TAPS - 1) : 0;  // of a folded token's q only what the convolution still sees
#pragma unroll
        for (int t = 0; t < FOLDED; t++) in.x[t] = t < folds && t >= unread ? *(const u32*)(old + t * old_token) : 0;
#pragma unroll
        for (int t = 0; t < SCORED; t++) in.x[FOLDED + t] = t < count ? *(const u32*)(now + t * token) : 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            in.bias[h] = in.decays && HAS_BIAS ? dt_bias[in.channel + h] : 0.0f;
#pragma unroll
            for (int i = 0; i < TAPS; i++) in.taps[h][i] = in.decays ? 0.0f : conv_weight[(i64)(in.channel + h) * TAPS + i];
#pragma unroll
            for (int i = 0; i < TAPS - 1; i++) in.seen[h][i] = in.decays ? (bf16)0 : window[(i64)(in.channel + h) * (TAPS - 1) + i];
        }
        return in;
    };
    Inputs in;
    if (thread < PAIRS) in = gather(thread);
    const float rate = HAS_A ? exp2_fast(LOG2E * A_log[head]) : 1.0f;
    bf16 beta = 0, opened[SCORED];
    const bool has_beta = thread < FOLDED ? thread < folds : thread - FOLDED < count;
    if (thread < PLACES && has_beta)
        beta = thread < FOLDED ? old_beta[row * old_beta_row + thread * old_beta_token + head]
                               : beta_logit[row * beta_row + (thread - FOLDED) * beta_token + head];
#pragma unroll
    for (int t = 0; t < SCORED; t++)
        opened[t] = t < count && (t & 1) == quarter >> 1 ? gate[row * gate_row + t * gate_token + head * V + mine] : (bf16)0;
    const float norm = norm_weight[mine];
    for (int n = thread; n < V * K / 4; n += THREADS) {
        const int r = n / (K / 4), f = n % (K / 4);
        copy_async(shared.state + r * K + 4 * (f ^ ((r >> 1 & 1) << 2)), state + 4 * n);
    }
    copy_commit();

    if (thread < PLACES) shared.beta[thread] = has_beta ? sigmoid(to_float(beta)) : 0.0f;
    for (int pair = thread; pair < PAIRS; pair += THREADS) {
        if (pair != thread) in = gather(pair);
        if (in.decays) {
#pragma unroll
            for (int t = 0; t < PLACES; t++) {
                const bool there = t < FOLDED ? t < folds : t - FOLDED < count;
                shared.alpha[t][in.c] = there ? decay(low_half(in.x[t]) + in.bias[0], rate, lower_bound) : 1.0f;
                shared.alpha[t][in.c + 1] = there ? decay(high_half(in.x[t]) + in.bias[1], rate, lower_bound) : 1.0f;
            }
            continue;
        }
        float seen[2][TAPS];  // by a token's convolution, the newest last
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 1; i < TAPS; i++) seen[h][i] = to_float(in.seen[h][i - 1]);
        float* const to = in.c < K ? shared.q[0] + in.c : in.c < 2 * K ? shared.k[0] + (in.c - K) : shared.v[0] + (in.c - 2 * K);
        const int step = in.c < 2 * K ? K : V;
        auto convolve = [&](u32 two, bool there, int at, bool kept) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float total = 0.0f;
                if (there) {
#pragma unroll
                    for (int i = 0; i < TAPS - 1; i++) seen[h][i] = seen[h][i + 1];
                    seen[h][TAPS - 1] = h ? high_half(two) : low_half(two);
                    total = in.taps[h][TAPS - 1] * seen[h][TAPS - 1];
#pragma unroll
                    for (int i = 0; i < TAPS - 1; i++) total = fmaf(in.taps[h][i], seen[h][i], total);
                }
                if (kept) to[at * step + h] = there ? total * sigmoid(total) : 0.0f;
            }
        };
#pragma unroll
        for (int t = 0; t < FOLDED; t++) convolve(in.x[t], t < folds, t, in.c >= K);
        if (folds > 0)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < TAPS - 1; i++) window[(i64)(in.channel + h) * (TAPS - 1) + i] = to_bf16(seen[h][i + 1]);
#pragma unroll
        for (int t = 0; t < SCORED; t++) convolve(in.x[FOLDED + t], t < count, in.c < K ? t : FOLDED + t, true);
    }
    sync_threads();

    for (int n = warp; n < PLACES + SCORED; n += WARPS) {
        float* const x = (n < PLACES ? shared.k[n] : shared.q[n - PLACES]) + PER_LANE * lane;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) sum = fmaf(x[i], x[i], sum);
        const float unit = rsqrt_fast(warp_total(sum) + l2_eps);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) x[i] *= unit;
    }
    sync_threads();

    // A warp: w of one place, on its way to later places, and what it has in common with their k and q.
    for (int s = warp; s < PLACES; s += WARPS) {
        float w[PER_LANE], sums[32];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) w[i] = shared.k[s][PER_LANE * lane + i];
#pragma unroll
        for (int n = 0; n < 32; n++) sums[n] = 0.0f;
#pragma unroll
        for (int t = 0; t < PLACES; t++) {
            if (t == FOLDED && s < FOLDED)
#pragma unroll
                for (int i = 0; i < PER_LANE; i++) shared.folded[s][PER_LANE * lane + i] = w[i];
            if (t < s || t < FOLDED && folds == 0) continue;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const int c = PER_LANE * lane + i;
                if (t > s) w[i] *= shared.alpha[t][c];
                sums[t] = fmaf(w[i], shared.k[t][c], sums[t]);
                if (t >= FOLDED) sums[PLACES + t - FOLDED] = fmaf(w[i], shared.q[t - FOLDED][c], sums[PLACES + t - FOLDED]);
            }
        }
        fold<16, 16>(sums, lane);
        shared.common[s][lane] = sums[0];
    }
    sync_threads();
    for (int c = thread; c < K; c += THREADS) {
        float left = 1.0f;
#pragma unroll
        for (int t = 0; t < PLACES; t++) {
            if (t == FOLDED) shared.left[c] = left;
            left *= shared.alpha[t][c];
            shared.k[t][c] *= left;
            if (t >= FOLDED) shared.q[t - FOLDED][c] *= left;
        }
    }
    copy_wait<0>();
    sync_threads();

    float sums[PLACES + SCORED][2];  // S_0 (D k), S_0 (D q) of two rows
#pragma unroll
    for (int n = 0; n < PLACES + SCORED; n++) sums[n][0] = sums[n][1] = 0.0f;
    auto add = [&](float (&sum)[2], const float4& a, const float4& b, const float* x) {
        const float4 y = *(const float4*)x;
        sum[0] = fmaf(a.w, y.w, fmaf(a.z, y.z, fmaf(a.y, y.y, fmaf(a.x, y.x, sum[0]))));
        sum[1] = fmaf(b.w, y.w, fmaf(b.z, y.z, fmaf(b.y, y.y, fmaf(b.x, y.x, sum[1]))));
    };
    const int turned = (first >> 1 & 1) << 2;
#pragma unroll 1
    for (int i = 0; i < PIECES; i++) {
        const int f = 4 * i + quarter;
        const float4 a = *(const float4*)(shared.state + first * K + 4 * (f ^ turned));
        const float4 b = *(const float4*)(shared.state + (first + 1) * K + 4 * (f ^ turned));
        if (folds > 0)
#pragma unroll
            for (int t = 0; t < FOLDED; t++) add(sums[t], a, b, shared.k[t] + 4 * f);
#pragma unroll
        for (int t = 0; t < SCORED; t++) {
            add(sums[FOLDED + t], a, b, shared.k[FOLDED + t] + 4 * f);
            add(sums[PLACES + t], a, b, shared.q[t] + 4 * f);
        }
    }
    // Of row `mine`: x, what a place writes before beta, and o; each place, once it is known, is taken from those behind it.
    auto whole = [&](const float (&sum)[2]) {
        const bool upper = quarter & 1;
        const float x = (upper ? sum[1] : sum[0]) + shuffle_xor(upper ? sum[0] : sum[1], 1);
        return x + shuffle_xor(x, 2);
    };
    float x[PLACES], o[SCORED], u[FOLDED];
#pragma unroll
    for (int t = 0; t < PLACES; t++) x[t] = t >= FOLDED || folds > 0 ? shared.v[t][mine] - whole(sums[t]) : 0.0f;
#pragma unroll
    for (int t = 0; t < SCORED; t++) o[t] = whole(sums[PLACES + t]);
#pragma unroll
    for (int s = 0; s < PLACES; s++) {
        if (s < FOLDED) u[s] = 0.0f;
        if (s < FOLDED && s >= folds) continue;
        const float write = shared.beta[s] * x[s];
        if (s < FOLDED) u[s] = write;
        float common[LISTED];
#pragma unroll
        for (int n = s / 4 * 4; n < LISTED; n += 4) {
            const float4 four = *(const float4*)(shared.common[s] + n);
            common[n] = four.x, common[n + 1] = four.y, common[n + 2] = four.z, common[n + 3] = four.w;
        }
#pragma unroll
        for (int t = s + 1; t < PLACES; t++) x[t] = fmaf(-common[t], write, x[t]);
#pragma unroll
        for (int t = s < FOLDED ? 0 : s - FOLDED; t < SCORED; t++) o[t] = fmaf(common[PLACES + t], write, o[t]);
    }
#pragma unroll
    for (int t = 0; t < SCORED; t++) o[t] *= scale;
#pragma unroll
    for (int t = 0; t < SCORED; t++) {
        float square = o[t] * o[t];  // in two lanes each, of which one is summed
        square += shuffle_xor(square, 1);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) square += shuffle_xor(square, mask);
        if (lane == 0) shared.squares[warp][t] = square;
    }
    sync_threads();
#pragma unroll
    for (int t = 0; t < SCORED; t++) {
        if (t >= count || (t & 1) != quarter >> 1) continue;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared.squares[w][t];
        const float unit = rsqrt_fast(total * (1.0f / V) + norm_eps);
        out[(i64)t * heads * V + mine] = to_bf16(o[t] * unit * norm * sigmoid(to_float(opened[t])));
    }
    if (folds == 0) return;
    float by[FOLDED][2];
#pragma unroll
    for (int s = 0; s < FOLDED; s++) {
        const float other = shuffle_xor(u[s], 1);
        by[s][0] = quarter & 1 ? other : u[s], by[s][1] = quarter & 1 ? u[s] : other;
    }
#pragma unroll 1
    for (int i = 0; i < PIECES; i++) {
        const int f = 4 * i + quarter;
        const float4 d = *(const float4*)(shared.left + 4 * f);
        float4 x[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 old = *(const float4*)(shared.state + (first + h) * K + 4 * (f ^ turned));
            x[h] = make_float4(old.x * d.x, old.y * d.y, old.z * d.z, old.w * d.w);
        }
#pragma unroll
        for (int s = 0; s < FOLDED; s++) {
            const float4 w = *(const float4*)(shared.folded[s] + 4 * f);
#pragma unroll
            for (int h = 0; h < 2; h++)
                x[h] = make_float4(fmaf(by[s][h], w.x, x[h].x), fmaf(by[s][h], w.y, x[h].y), fmaf(by[s][h], w.z, x[h].z), fmaf(by[s][h], w.w, x[h].w));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) *(float4*)(state + (first + h) * K + 4 * f) = x[h];
    }
}
