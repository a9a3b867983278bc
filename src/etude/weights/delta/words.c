/* Where two tensors differ, and the differences put back. `size`: bytes of a word, 1, 2 or 4. */
#include "delta.h"

#define TILE 1024 /* words looked at together: what is noted of them stays in the first cache */
#define BLOCK 64  /* words of one mask */
#define BLOCKS (TILE / BLOCK)
#define SPAN (64 * TILE) /* words copied at a time: they stay in the second cache */
#define NEVER (INT64_MAX / 2)

#ifdef HAS_AVX2
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
typedef int16_t Ranks __attribute__((vector_size(BLOCKS * 2)));

/* The sign bits of a vector's bytes, the first one lowest. */
static inline uint64_t sign_bits(Bytes bytes) {
#ifdef HAS_AVX2
    return (uint32_t)_mm256_movemask_epi8((__m256i)bytes);
#elif defined(HAS_SSE2)
    return (uint32_t)_mm_movemask_epi8((__m128i)bytes);
#else
    uint64_t halves[2];
    memcpy(halves, &bytes, sizeof halves);
    for (int half = 0; half < 2; half++) /* bit 8i + 7 comes to bit 56 + i */
        halves[half] = (halves[half] >> 7 & ONES) * 0x0102040810204080ull >> 56;
    return halves[0] | halves[1] << 8;
#endif
}

/* Which bytes of a block are below the bound. */
static inline uint64_t below(const Bytes *block, Bytes bound) {
    uint64_t mask = 0;
    for (int part = 0; part < BLOCK / WIDTH; part++)
        mask |= sign_bits((Bytes)(block[part] < bound)) << (part * WIDTH);
    return mask;
}

static inline unsigned lowest_bit(uint64_t mask) { return (unsigned)__builtin_ctzll(mask | 1ull << 63); }

/* Where, in bits, the first byte is that has more than `rank` with those below it. `counts`: at most 127 together. */
static inline unsigned byte_beyond(uint64_t counts, unsigned rank) {
    uint64_t beyond = (counts * ONES | ONES << 7) - (rank + 1) * ONES;
    return (unsigned)__builtin_ctzll(beyond & ONES << 7) - 7;
}

/* Index of the set bit that has `rank` set bits below it (Vigna 2008). */
static inline unsigned select_bit(uint64_t mask, unsigned rank) {
#ifdef HAS_PDEP
    return (unsigned)__builtin_ctzll(_pdep_u64(1ull << rank, mask));
#else
    uint64_t counts = mask - (mask >> 1 & 0x5555555555555555ull);
    counts = (counts & 0x3333333333333333ull) + (counts >> 2 & 0x3333333333333333ull);
    counts = (counts + (counts >> 4)) & 0x0f0f0f0f0f0f0f0full; /* of each byte */
    unsigned shift = byte_beyond(counts, rank);
    rank -= (unsigned)(counts * ONES << 8 >> shift & 0xff);
    return shift + byte_beyond(spread_bits(mask >> shift & 0xff), rank) / 8;
#endif
}

/* A tile's words by class. Row j + 1: which words of each block belong to class j or one before it, and how many of
   the words in the blocks before do; row 0 is empty. */
typedef struct {
    Bytes exponents[TILE / WIDTH]; /* in signed order: 128 less */
    uint64_t under[MAX_CLASSES + 1][BLOCKS];
    int16_t before[MAX_CLASSES + 1][BLOCKS] __attribute__((aligned(BLOCKS * 2)));
    int total[MAX_CLASSES + 1];
} Tile;

/* Once: the first row and the last one, which all words are under. */
static inline void begin_tiles(Tile *tile, int classes) {
    memset(tile, 0, sizeof *tile);
    for (int block = 0; block < BLOCKS; block++) {
        tile->under[classes][block] = ~0ull;
        tile->before[classes][block] = (int16_t)(block * BLOCK);
    }
    tile->total[classes] = TILE;
}

/* thresholds [classes]: the exponent at which each class begins, the first at 0. */
static inline void sort_tile(Tile *tile, const uint8_t *thresholds, int classes) {
    for (int j = 1; j < classes; j++) {
        Bytes bound = (Bytes){0} + (int8_t)(thresholds[j] ^ 0x80);
        int total = 0;
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++) {
            uint64_t under = below(tile->exponents + block * (BLOCK / WIDTH), bound);
            tile->under[j][block] = under;
            tile->before[j][block] = (int16_t)total;
            total += __builtin_popcountll(under);
        }
        tile->total[j] = total;
    }
}

static inline uint64_t members(const Tile *tile, int j, size_t block) {
    return tile->under[j + 1][block] & ~tile->under[j][block];
}

static inline int members_before(const Tile *tile, int j, size_t block) {
    return tile->before[j + 1][block] - tile->before[j][block];
}

static inline int num_members(const Tile *tile, int j) { return tile->total[j + 1] - tile->total[j]; }

/* A class of a tile, to find its members by rank. */
typedef struct {
    uint64_t members[BLOCKS];
    union { Ranks vector; int16_t of[BLOCKS]; } before;
} Class;

static inline void take_class(const Tile *tile, int j, Class *class) {
    for (int block = 0; block < BLOCKS; block++) class->members[block] = members(tile, j, block);
    class->before.vector = *(const Ranks *)tile->before[j + 1] - *(const Ranks *)tile->before[j];
}

/* Where the member is that has `rank` before it. */
static inline size_t find_member(const Class *class, unsigned rank) {
    union { Ranks ranks; Bytes parts[sizeof(Ranks) / WIDTH]; } beyond;
    size_t block = BLOCKS - 1;
    beyond.ranks = class->before.vector > (int16_t)rank;
    for (size_t part = 0; part < sizeof(Ranks) / WIDTH; part++)
        block -= (size_t)__builtin_popcountll(sign_bits(beyond.parts[part])) / 2; /* two bytes a rank */
    return block * BLOCK + select_bit(class->members[block], rank - (unsigned)class->before.of[block]);
}

#define WORD uint8_t
#define SIGNED int8_t
#define NAME(name) name##_8
#include "words.h"
#undef WORD
#undef SIGNED
#undef NAME

#define WORD uint16_t
#define SIGNED int16_t
#define NAME(name) name##_16
#include "words.h"
#undef WORD
#undef SIGNED
#undef NAME

#define WORD uint32_t
#define SIGNED int32_t
#define NAME(name) name##_32
#include "words.h"

#define BY_SIZE(size, name, ...) \
    ((size) == 1 ? name##_8(__VA_ARGS__) : (size) == 2 ? name##_16(__VA_ARGS__) : name##_32(__VA_ARGS__))

/* Returns how many words differ, with their positions [up to count, and 4 more] and differences [up to count].
   counts [256, NUM_SYMBOLS]: by the old word's exponent and the difference's symbol; added to. */
int64_t etude_delta_scan(
    int64_t size, const void *base, const void *target, int64_t count, uint32_t key_mask, int64_t shift,
    uint32_t *positions, uint32_t *differences, uint32_t *counts
) {
    return BY_SIZE(size, scan, base, target, count, key_mask, (int)shift, positions, differences, counts);
}

/* values [2 * found]. First, class by class, how many unchanged members of the class precede each change; then
   the differences in the same order. starts [classes + 1]: of each class among the changes. */
void etude_delta_gather(
    int64_t size, const void *base, int64_t count, const uint32_t *positions, const uint32_t *differences,
    int64_t found, uint32_t key_mask, int64_t shift, const uint8_t *thresholds, int64_t classes,
    const int64_t *starts, uint32_t *values
) {
    BY_SIZE(
        size, gather, base, count, positions, differences, found, key_mask, (int)shift, thresholds,
        (int)classes, starts, values
    );
}

/* The reverse; returns 0 unless changes lie beyond the end. `target` may be `base`: a tile is read before it is
   written. */
int64_t etude_delta_place(
    int64_t size, const void *base, void *target, int64_t count, uint32_t key_mask, int64_t shift,
    const uint8_t *thresholds, int64_t classes, const int64_t *starts, const uint32_t *values
) {
    return BY_SIZE(size, place, base, target, count, key_mask, (int)shift, thresholds, (int)classes, starts, values);
}
