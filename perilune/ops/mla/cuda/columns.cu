// Absorbed attention of 48 rows (a row is a new token and a head) with cached rows, as columns of the products:
//
//     s^T = factor k q^T,  out^T = latent^T softmax(s)^T          k = [latent 512 | shared 0 or 64], to base 2
//
// A product has 64 rows, whatever is put there, and any number of columns. 64 cached rows fill one, and so do 64 channels of the
// latent: 96 heads are two blocks of 48 columns without a gap, where as rows they would be two of 64.
//
// Block (tile, run) as in decode.cu. SHARERS neighbours are a cluster that reads the same cached rows, those of two tiles of one
// run: each has the copying unit bring its share of a block's rows to both, so a row leaves the L2 cache once.
//
// Of 12 warps one thread copies; the first eight are two warpgroups that work in turns. Group g scores the blocks of parity g,
// which lie in place g, and turns them into weights; both groups add up, group g half g of the latent's channels (256 x 48 sums,
// 96 registers a thread). For block j its owner
//
//   1. multiplies the first parts of block j with the queries,
//   2. waits until the other group has published the weights of block j - 1, and adds up its channels of block j - 1 with them,
//   3. multiplies the last part of block j, and writes its weights,
//   4. publishes them, and adds up its channels of block j.
//
// Weights are relative to a number for each column that both groups know. A larger score does not change it until it is 2^8 times as
// large: so in most blocks no maximum over the cached rows, which lie across the threads, has to be known; that there is none
// beyond is a vote. A part of a place is filled again when the group that uses it last in every sharer has given it back.
//
// Cached rows beyond the sequence come as they are, and are overwritten with zeros before weights of 0 meet them.
#include "columns_group.h"

// One thread: the parts of the `turn`-th block of cached rows, from row `row` of sequence (or page) `outer` on.
DEVICE void fill(Shared& shared, const TileMap& latent, const TileMap& extra, int turn, int outer, int row, int rank) {
    const int place = turn & 1;
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
        const bool is_extra = EXTRA && n == 0;
        const int part = part_in_turn(n, place), chunks = is_extra ? 1 : HALF_CHUNKS;
        if (turn >= 2) phase_wait(&shared.empty[place][part], ((turn >> 1) & 1) ^ 1);
        u64* const full = &shared.full[place][part];
        phase_arrive_expecting(full, chunks * CHUNK);
        for (int c = 0; c < chunks; c++) {
            u8* const to = shared.cache[place] + (part * HALF_CHUNKS + c) * CHUNK + rank * ROWS_EACH * 128;
            const int channel = is_extra ? 0 : 64 * (part * HALF_CHUNKS + c);
            copy_tile(to, is_extra ? extra : latent, channel, row + rank * ROWS_EACH, outer, full, (1 << SHARERS) - 1);
        }
    }
}

// Operands as those of decode.cu; latent and extra as tiles of ROWS_EACH rows of a sequence, or of a page if there is a table.
KERNEL_OF_CLUSTERS(THREADS, 1, SHARERS) columns(
    const bf16* __restrict__ query, const bf16* __restrict__ query_extra, const int* __restrict__ lengths,
    const int* __restrict__ table, bf16* __restrict__ out, float* __restrict__ sums, float* __restrict__ logs, i64 query_b,
    i64 query_t, i64 query_h, i64 table_b, int page_blocks, int cached, int sequences, int tokens, int heads, float factor,
    TILE_MAP latent, TILE_MAP extra) {
    SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = threadIdx.x, warp = uniform(thread >> 5), lane = thread & 31;
    const int count = tokens * heads, first_row = blockIdx.x * COLUMNS;
    const Sequences all = {lengths, cached, sequences};
    const int total = blocks_before(all, sequences), run = run_length(total, gridDim.y);
    const int from = least(blockIdx.y * run, total), to = least(from + run, total);
    Place place_of_block = sequence_of(all, from);

    if (thread == 0)
        for (int place = 0; place < 2; place++)
            for (int part = 0; part < PARTS; part++) {
                phase_begin(&shared.full[place][part], 1);
                phase_begin(&shared.empty[place][part], 4 * SHARERS);
            }
    cluster_sync();

    if (warp >= CONSUMERS / 32) {
        registers_give<40>();
        if (thread == CONSUMERS) {
            const int rank = cluster_rank();
            int sequence = place_of_block.sequence, start = place_of_block.start;
            for (int at = from; at < to;) {
                const int end = least(start + all.blocks(sequence), to);
                const int* const pages = table + sequence * table_b;
                int page = table ? pages[(at - start) / page_blocks] : sequence;
                for (int block = at; block < end; block++) {
                    const int number = block - start, outer = page;  // number: of the block in its sequence
                    if (table && block + 1 < end) page = pages[(number + 1) / page_blocks];  // long before it is needed
                    fill(shared, latent, extra, block - from, outer, KEYS * (table ? number % page_blocks : number), rank);
                }
                at = end, start += all.blocks(sequence), sequence++;
            }
        }
        sync_warp();
        cluster_sync();  // a sharer may still copy to this block
        return;
    }

    registers_take<232>();
    const int number = warp >> 2;
    int sequence = place_of_block.sequence, start = place_of_block.start;
    for (int at = from; at < to;) {
        const int blocks = all.blocks(sequence), end = least(start + blocks, to), length = all.length(sequence);
        Group group = {shared, number, warp & 3, lane, factor, first_row, heads, length - tokens + 1, length};
        for (int n = thread; n < COLUMNS * CHUNKS * 8; n += CONSUMERS) {  // the queries; rows beyond the last as zeros
            const int r = n / (CHUNKS * 8), chunk = n / 8 % CHUNKS, piece = n & 7, q = first_row + r;
            const bf16* source = query + ((i64)sequence * count + q) * LATENT + 64 * chunk + 8 * piece;
            if (EXTRA && chunk == LATENT_CHUNKS)
                source = query_extra + sequence * query_b + q / heads * query_t + q % heads * query_h + 8 * piece;
            copy_async(shared.query + chunk * QUERIES + in_block(r, piece), source, q < count);
        }
        copy_commit();
        for (int n = thread; n < 2 * QUERIES / 16; n += CONSUMERS) ((uint4*)shared.weights)[n] = make_uint4(0, 0, 0, 0);
        group.clear();
        copy_wait<0>();
        publish_operands();
        barrier_sync(BOTH, CONSUMERS);

        for (int block = at + ((at - from ^ number) & 1); block < end; block += 2)
            group.take_in(block - from, KEYS * (block - start), block == at);
        if (((end - 1 - from) & 1) != number) {
            group.meet(end - 1 - from);
            group.add_values(number ^ 1, false);
            group.give_back(number ^ 1, number);
        }

        // Both groups' sums are relative to the same scores now.
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            float sum = group.totals[i];
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
            if (lane < 4) shared.total[number][warp & 3][group.column(i)] = sum;
        }
        barrier_sync(BOTH, CONSUMERS);
        const bool whole = end - at == blocks;
        const i64 first = whole ? (i64)sequence * count : (2 * blockIdx.y + (at > from)) * (i64)count;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int row = first_row + group.column(i);
            if (row >= count) continue;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) sum += shared.total[w >> 2][w & 3][group.column(i)];
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (!whole && warp == 0 && lane < 4) logs[first + row] = group.base[i] + log2_fast(sum);
            const i64 channel = (first + row) * LATENT + 64 * HALF_CHUNKS * number + 16 * (warp & 3) + (lane >> 2);
#pragma unroll
            for (int c = 0; c < HALF_CHUNKS; c++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float x = group.out[c][4 * (i >> 1) + 2 * h + (i & 1)] * inverse;
                    if (whole) out[channel + 64 * c + 8 * h] = to_bf16(x);
                    else sums[channel + 64 * c + 8 * h] = x;
                }
        }
        at = end, start += blocks, sequence++;
    }
    cluster_sync();
}
