// Absorbed attention of 64 rows (a row is a new token and a head) with cached rows:
//
//     s = factor q k^T,  out = softmax(s) latent          k = [latent 512 | shared 0 or 64], to base 2
//
// Block (tile, run): a run is an equal share of all sequences' cached rows, see runs.h. A sequence that lies within it is
// finished; of another one the run leaves its normalised sum and log2 of the denominator for merge.cu.
//
// Of 12 warps the last four copy blocks of 64 cached rows into two places, and the first eight are two warpgroups that work
// in turns. Group g scores the blocks of parity g, which always lie in place g, and turns them into weights; both groups
// add up: group g half g of the latent's channels (64 x 256 sums, 128 registers a thread). For block j its owner
//
//   1. starts to multiply q with the first parts of block j,
//   2. waits until the other group has published the weights of block j - 1 and the rows' highest scores so far, and
//      multiplies them with its channels of block j - 1,
//   3. multiplies q with the last part of block j, and finds the block's weights,
//   4. publishes them, and multiplies them, in registers, with its channels of block j.
//
// So one group's softmax runs beside the other's products, and no part of a block is held until a later one has arrived. A place has three parts, the shared channels and the two halves of
// the latent; each is given back, and filled again, as soon as the one group that uses it last is done with it. Weights need
// only one place: a group publishes after its products with what the other one published.
//
// All operands lie in shared memory as `in_block` has it, 64 rows and 64 channels a chunk; rows beyond the sequence are
// zeros there and nothing of them is read. Blocks are counted on from sequence to sequence, so that copies run ahead.
#include "decode_group.h"

// Cached rows of place `place`, by two warps: from row `first` of a block on, 16-byte piece `piece` of a chunk's row.
struct Copier {
    Shared& shared;
    const int place, first, piece;
    const bf16 *latent, *extra;
    const i64 latent_b, latent_s, extra_b, extra_s;

    // Block `block`, of which `rows` rows are there, from row `row` of sequence (or page) `outer` on.
    __device__ __forceinline__ void fill(int block, i64 outer, int row, int rows) const {
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            const bool is_extra = EXTRA && n == 0;
            const int part = part_in_turn(n, place), chunk = part * HALF_CHUNKS;
            if (block >= 2) phase_wait(&shared.empty[place][part], ((block >> 1) & 1) ^ 1);
            const i64 stride = is_extra ? extra_s : latent_s;
            const bf16* const from = (is_extra ? extra + outer * extra_b : latent + outer * latent_b + 64 * chunk) + row * stride + 8 * piece;
            u8* const to = shared.cache[place] + chunk * CHUNK;
#pragma unroll 2
            for (int r = first; r < first + 32; r += 4) {
                const bf16* const row_from = from + r * stride;
                u8* const row_to = to + in_block(r, piece);
                const bool there = r < rows;
#pragma unroll
                for (int c = 0; c < (is_extra ? 1 : HALF_CHUNKS); c++) copy_async(row_to + c * CHUNK, row_from + 64 * c, there);
            }
            phase_arrive_by_copies(&shared.full[place][part]);
        }
    }
};

// query [B, tokens heads, 512]; query_extra [B, tokens, heads, EXTRA] by strides; latent and extra by strides of sequences (or
// pages of `page_blocks` blocks, if there is a table) and cached rows; lengths null: `cached` of each. out [B, tokens heads, 512] bfloat16; sums [runs, 2,
// tokens heads, 512] and logs [runs, 2, tokens heads] float, parts of runs. All strides in numbers.
KERNEL(THREADS, 1) decode(
    const bf16* __restrict__ query, const bf16* __restrict__ query_extra, const bf16* __restrict__ latent,
    const bf16* __restrict__ extra, const int* __restrict__ lengths, const int* __restrict__ table, bf16* __restrict__ out,
    float* __restrict__ sums, float* __restrict__ logs, i64 query_b, i64 query_t, i64 query_h, i64 latent_b, i64 latent_s,
    i64 extra_b, i64 extra_s, i64 table_b, int page_blocks, int cached, int sequences, int tokens, int heads, float factor) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31;
    const int count = tokens * heads, first_row = blockIdx.x * ROWS;
    const Sequences all = {lengths, cached, sequences};
    const int total = blocks_before(all, sequences), run = run_length(total, gridDim.y);
    const int from = least(blockIdx.y * run, total), to = least(from + run, total);
    Place place_of_block = sequence_of(all, from);

    if (thread == 0)
        for (int place = 0; place < 2; place++)
            for (int part = 0; part < PARTS; part++) {
                phase_begin(&shared.full[place][part], COPIERS);
                phase_begin(&shared.empty[place][part], 4);
            }
    sync_threads();

    if (warp >= CONSUMERS / 32) {
        registers_give<72>();
        const int place = warp & 1, half = (warp - CONSUMERS / 32) / 2;
        const Copier copier = {shared, place, 32 * half + (lane >> 3), lane & 7, latent, extra, latent_b, latent_s, extra_b, extra_s};
        int sequence = place_of_block.sequence, start = place_of_block.start;
        for (int at = from; at < to;) {
            const int length = all.length(sequence), blocks = all.blocks(sequence), end = least(start + blocks, to);
            const int* const pages = table + sequence * table_b;
            int block = at + ((at - from ^ place) & 1);
            int page = table && block < end ? pages[(block - start) / page_blocks] : 0;
            for (; block < end; block += 2) {
                const int number = block - start;  // of the sequence
                const i64 outer = table ? page : sequence;
                if (table && block + 2 < end) page = pages[(number + 2) / page_blocks];  // long before it is needed
                copier.fill(block - from, outer, KEYS * (table ? number % page_blocks : number), length - KEYS * number);
            }
            at = end, start += blocks, sequence++;
        }
        copy_commit();
        copy_wait<0>();
        return;
    }

    registers_take<216>();
    const int number = warp >> 2, row = first_row + 16 * (warp & 3) + (lane >> 2);
    Group group = {shared, number, warp & 3, lane, factor};
    int sequence = place_of_block.sequence, start = place_of_block.start;
    for (int at = from; at < to;) {
        const int blocks = all.blocks(sequence), end = least(start + blocks, to);
        for (int n = thread; n < ROWS * CHUNKS * 8; n += CONSUMERS) {  // the queries; rows beyond the last as zeros
            const int r = n / (CHUNKS * 8), chunk = n / 8 % CHUNKS, piece = n & 7, q = first_row + r;
            const bf16* source = query + ((i64)sequence * count + q) * LATENT + 64 * chunk + 8 * piece;
            if (EXTRA && chunk == LATENT_CHUNKS)
                source = query_extra + sequence * query_b + q / heads * query_t + q % heads * query_h + 8 * piece;
            copy_async(shared.query + chunk * CHUNK + in_block(r, piece), source, q < count);
        }
        copy_commit();
        for (int n = thread; n < CHUNK / 16; n += CONSUMERS) ((uint4*)shared.weights)[n] = make_uint4(0, 0, 0, 0);
        const int length = all.length(sequence), seen = length - tokens + 1;
        group.sure = least(seen + first_row / heads, length);
#pragma unroll
        for (int h = 0; h < 2; h++) group.limits[h] = least(seen + (row + 8 * h) / heads, length);
        group.clear();
        copy_wait<0>();
        publish_operands();
        barrier_sync(BOTH, CONSUMERS);

        for (int block = at + ((at - from ^ number) & 1); block < end; block += 2)
            group.take_in(block - from, KEYS * (block - start), block == at);
        if (((end - 1 - from) & 1) != number) {
            group.meet(end - 1 - from);
            group.begin_sums(number ^ 1);
            group.end_sums();
            group.give_back(number ^ 1, number);
        }

        // Both groups' sums are relative to the same scores now.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = quad_sum(group.totals[h]);
            if ((lane & 3) == 0) shared.total[number][group.row() + 8 * h] = sum;
        }
        barrier_sync(BOTH, CONSUMERS);
        const bool whole = end - at == blocks;
        const i64 first = whole ? (i64)sequence * count : (2 * blockIdx.y + (at > from)) * (i64)count;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (row + 8 * h >= count) continue;
            const float sum = shared.total[0][group.row() + 8 * h] + shared.total[1][group.row() + 8 * h];
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const i64 number_of_row = first + row + 8 * h, channel = number_of_row * LATENT + number * HALF + 2 * (lane & 3);
            if (!whole && number == 0 && (lane & 3) == 0) logs[number_of_row] = group.tops[h] + log2_fast(sum);
#pragma unroll
            for (int j = 0; j < 32; j++) {
                const float low = group.out[4 * j + 2 * h] * inverse, high = group.out[4 * j + 2 * h + 1] * inverse;
                if (whole) *(u32*)(out + channel + 8 * j) = pack(low, high);
                else *(float2*)(sums + channel + 8 * j) = make_float2(low, high);
            }
        }
        at = end, start += blocks, sequence++;
    }
}
