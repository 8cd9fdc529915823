/* Names of memory pages: SHA-256 with the processor's instructions for it, two pages at a time.
 *
 * The instructions of one hash wait for each other; those of two do not, so that two pages take little longer than one. The constants and
 * the message schedule are those of FIPS 180-4.
 */
#include <cpuid.h>
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { PAGE = 4096, BLOCK = 64, NAME = 16 };

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* The state as the instructions want it: words A B E F and C D G H, the last one lowest. */
struct state {
    __m128i abef, cdgh;
};

#define SHA __attribute__((target("sha,ssse3,sse4.1")))

/* Four rounds of one state; `w` are the four words of the message, which are replaced by those of sixteen rounds later. */
#define ROUNDS(s, w0, w1, w2, w3, at, more)                                                                                              \
    do {                                                                                                                                 \
        __m128i add = _mm_add_epi32(w0, _mm_load_si128((const __m128i *)(K + (at))));                                                    \
        s.cdgh = _mm_sha256rnds2_epu32(s.cdgh, s.abef, add);                                                                             \
        s.abef = _mm_sha256rnds2_epu32(s.abef, s.cdgh, _mm_shuffle_epi32(add, 0x0E));                                                    \
        if (more)                                                                                                                        \
            w0 = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4)), w3);                      \
    } while (0)

SHA static inline __attribute__((always_inline)) void two_blocks(struct state *first, struct state *second, const uint8_t *one,
                                                                 const uint8_t *two)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    struct state a = *first, b = *second;
    __m128i v[4], w[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(one + 16 * i)), big_endian);
        w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(two + 16 * i)), big_endian);
    }
#pragma GCC unroll 4
    for (int at = 0; at < 64; at += 16) {
        const int more = at < 48;
        ROUNDS(a, v[0], v[1], v[2], v[3], at, more);
        ROUNDS(b, w[0], w[1], w[2], w[3], at, more);
        ROUNDS(a, v[1], v[2], v[3], v[0], at + 4, more);
        ROUNDS(b, w[1], w[2], w[3], w[0], at + 4, more);
        ROUNDS(a, v[2], v[3], v[0], v[1], at + 8, more);
        ROUNDS(b, w[2], w[3], w[0], w[1], at + 8, more);
        ROUNDS(a, v[3], v[0], v[1], v[2], at + 12, more);
        ROUNDS(b, w[3], w[0], w[1], w[2], at + 12, more);
    }
    first->abef = _mm_add_epi32(first->abef, a.abef);
    first->cdgh = _mm_add_epi32(first->cdgh, a.cdgh);
    second->abef = _mm_add_epi32(second->abef, b.abef);
    second->cdgh = _mm_add_epi32(second->cdgh, b.cdgh);
}

/* Words A to D, most significant byte first: the half of the hash that is the name. */
SHA static void write_name(const struct state *s, uint8_t *name)
{
    const __m128i reversed = _mm_set_epi64x(0x0001020304050607, 0x08090a0b0c0d0e0f);
    __m128i abcd = _mm_unpackhi_epi64(s->cdgh, s->abef);
    _mm_storeu_si128((__m128i *)name, _mm_shuffle_epi8(abcd, reversed));
}

SHA static void two_pages(const uint8_t *one, const uint8_t *two, uint8_t *first_name, uint8_t *second_name)
{
    const struct state begun = {
        _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c),
        _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19),
    };
    static const uint8_t end[BLOCK] = {[0] = 0x80, [BLOCK - 2] = (PAGE * 8) >> 8, [BLOCK - 1] = (PAGE * 8) & 255};
    struct state first = begun, second = begun;
    for (int at = 0; at < PAGE; at += BLOCK)
        two_blocks(&first, &second, one + at, two + at);
    two_blocks(&first, &second, end, end);
    write_name(&first, first_name);
    write_name(&second, second_name);
}

/* Whether this processor has the instructions. */
int perilune_can_name(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA) != 0;
}

/* The names of the `count` pages whose places are in `rows`, 16 bytes each. */
void perilune_names(const uint8_t *pages, const int64_t *rows, size_t count, uint8_t *names)
{
    for (size_t at = 0; at < count; at += 2) {
        const uint8_t *one = pages + rows[at] * PAGE;
        uint8_t unused[NAME];
        int last = at + 1 == count;
        two_pages(one, last ? one : pages + rows[at + 1] * PAGE, names + at * NAME, last ? unused : names + (at + 1) * NAME);
    }
}
