// What the runs of decode.cu left of a sequence put together: out = sum_p w_p sums[p] / sum_p w_p with w_p = 2^logs[p].
//
// A block takes `width` channels of one row, and its threads all parts of them at once: in a loop of dependent loads they would
// take longer than the attention itself. Few parts: all channels of a row; many: an eighth of them.
#include "runs.h"

constexpr int LATENT = 512, THREADS = 128, EAGER = 12;  // parts that a thread asks for before it knows their weights

// sums [runs, 2, count, 512] and logs [runs, 2, count], float; out [B, count, 512] bfloat16. A sequence's parts are the second of
// the run in which it begins, unless it begins with it, and the first of the runs that follow.
KERNEL(THREADS, 7) merge(
    const float* __restrict__ sums, const float* __restrict__ logs, const int* __restrict__ lengths, bf16* __restrict__ out,
    int cached, int sequences, int runs, int count, int width) {
    SHARED(memory);
    float4* const shared = (float4*)memory;          // of every thread
    float* const weights_of = (float*)(shared + THREADS);
    const int thread = threadIdx.x, lane = thread & 31, across = width / 4, strands = THREADS / across;
    const int row = blockIdx.x, strand = thread / across, channel = blockIdx.y * width + 4 * (thread % across), sequence = blockIdx.z;
    const Sequences all = {lengths, cached, sequences};
    const int run = run_length(blocks_before(all, sequences), runs), start = blocks_before(all, sequence);
    const int first_run = start / run, parts = (start + all.blocks(sequence) - 1) / run - first_run + 1;
    if (parts == 1) return;  // finished
    const int skipped = start > first_run * run;  // its first part is the run's second
    auto place_of = [&](int part) -> i64 { return ((i64)(2 * (first_run + part) + (part == 0 && skipped))) * count + row; };

    float4 eager[EAGER];
#pragma unroll
    for (int i = 0; i < EAGER; i++) {
        const int part = strand + i * strands;
        eager[i] = part < parts ? *(const float4*)(sums + place_of(part) * LATENT + channel) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float highest = from_bits(0xff800000u);
    for (int part = lane; part < parts; part += 32) highest = fmaxf(highest, logs[place_of(part)]);
    highest = warp_max(highest);
    if (highest == from_bits(0xff800000u)) highest = 0.0f;

    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float weights = 0.0f;
    auto take = [&](int part, float4 x) {
        const float weight = exp2_fast(logs[place_of(part)] - highest);
        weights += weight;
        sum = make_float4(fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z), fmaf(weight, x.w, sum.w));
    };
#pragma unroll
    for (int i = 0; i < EAGER; i++)
        if (strand + i * strands < parts) take(strand + i * strands, eager[i]);
#pragma unroll 8
    for (int part = strand + EAGER * strands; part < parts; part += strands) take(part, *(const float4*)(sums + place_of(part) * LATENT + channel));

    shared[thread] = sum;
    if (thread % across == 0) weights_of[strand] = weights;
    sync_threads();
    if (thread >= across) return;
    for (int s = 1; s < strands; s++) {
        const float4 x = shared[thread + s * across];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    float total = weights_of[0];
    for (int s = 1; s < strands; s++) total += weights_of[s];
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    *(uint2*)(out + ((i64)sequence * count + row) * LATENT + channel) =
        make_uint2(pack(sum.x * inverse, sum.y * inverse), pack(sum.z * inverse, sum.w * inverse));
}
