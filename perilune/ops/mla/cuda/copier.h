// How cached rows come to shared memory. Included after the layout of a kernel: Shared, and what its parts are.
#pragma once

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
