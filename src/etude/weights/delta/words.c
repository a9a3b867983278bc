/* Where two tensors differ, and the differences put back. `size`: bytes of a word, 1, 2 or 4. */
#include "delta.h"

/* The exponents of a block's words, and which of the words there are at all. */
typedef struct {
#ifdef HAS_VECTORS
    __m512i exponents;
#else
    uint8_t exponents[BLOCK];
#endif
    uint64_t present;
} Block;

/* Which words have at least this exponent. */
static inline uint64_t reaching(const Block *block, uint8_t threshold) {
#ifdef HAS_VECTORS
    return _mm512_cmpge_epu8_mask(block->exponents, _mm512_set1_epi8((char)threshold)) & block->present;
#else
    uint64_t mask = 0;
    for (int index = 0; index < BLOCK; index++) mask |= (uint64_t)(block->exponents[index] >= threshold) << index;
    return mask & block->present;
#endif
}

/* Index of the set bit that has `rank` set bits below it. */
static inline int select_bit(uint64_t mask, int64_t rank) {
#ifdef HAS_PDEP
    return __builtin_ctzll(_pdep_u64(1ull << rank, mask));
#else
    for (; rank; rank--) mask &= mask - 1;
    return __builtin_ctzll(mask);
#endif
}

#ifdef WIDE
#define ESCAPE 255 /* a difference that no byte holds */

/* Which members of each class change, a bit each, and by how much, a byte each; and where placing has come to. */
typedef struct {
    const uint8_t *bits, *codes;
    const uint32_t *differences;
    int64_t bit[MAX_CLASSES], end[MAX_CLASSES]; /* zeros follow there */
    int64_t at[MAX_CLASSES];                    /* which change is next */
} Marks;

/* The next so many bits of a class, and perhaps some more. */
static inline uint64_t next_marks(Marks *marks, int j, int number) {
    int64_t bit = marks->bit[j] < marks->end[j] ? marks->bit[j] : marks->end[j];
    const uint8_t *first = marks->bits + (bit >> 3);
    uint64_t held, more;
    memcpy(&held, first, 8);
    held >>= bit & 7;
    if (__builtin_expect(number > 57, 0)) {
        memcpy(&more, first + 8, 8);
        held |= more << 1 << (63 - (bit & 7));
    }
    marks->bit[j] += number;
    return held;
}

/* Makes marks of gaps and differences. `scratch`: see etude_delta_place. -1 if they go beyond the end. */
static int mark(
    Marks *marks, int64_t count, int classes, const int64_t *starts, const uint32_t *values, uint64_t *scratch
) {
    int64_t total = starts[classes], words = 0, spans = 0;
    uint8_t *codes = (uint8_t *)(scratch + count / BLOCK + 3 * MAX_CLASSES);
    memset(scratch, 0, (size_t)((uint8_t *)codes - (uint8_t *)scratch));
    *marks = (Marks){.bits = (const uint8_t *)scratch, .codes = codes, .differences = values + total};
    for (int j = 0; j < classes; j++) {
        int64_t span = starts[j + 1] - starts[j], position = -1, last = -1;
        for (int64_t event = starts[j]; event < starts[j + 1]; event++) span += values[event];
        spans += span;
        if (spans > count) return -1;
        uint64_t *own = scratch + words, held = 0;
        for (int64_t event = starts[j]; event < starts[j + 1]; event++) {
            position += (int64_t)values[event] + 1;
            held &= (uint64_t)0 - (position / BLOCK == last); /* without a branch, and not by way of memory */
            last = position / BLOCK;
            held |= 1ull << (position & (BLOCK - 1));
            own[last] = held;
        }
        marks->at[j] = starts[j];
        marks->bit[j] = words * BLOCK;
        words += (span + BLOCK - 1) / BLOCK;
        marks->end[j] = words * BLOCK;
        words += 2;
    }
    for (int64_t event = 0; event < total; event++)
        codes[event] = (uint8_t)(marks->differences[event] < ESCAPE ? marks->differences[event] : ESCAPE);
    return 0;
}

static inline __m512i widened_8(const uint8_t *codes) { return _mm512_loadu_si512(codes); }
static inline __m512i halved_8(__m512i x) {
    return _mm512_and_si512(_mm512_srli_epi16(x, 1), _mm512_set1_epi8(127));
}
static inline __m512i all_8(int x) { return _mm512_set1_epi8((char)x); }
static inline __m512i more_8(__m512i x, __m512i y) { return _mm512_add_epi8(x, y); }
static inline __m512i less_8(__m512i x, __m512i y) { return _mm512_sub_epi8(x, y); }
static inline __m512i chosen_8(uint64_t mask, __m512i x, __m512i y) { return _mm512_mask_mov_epi8(x, mask, y); }

static inline __m512i widened_16(const uint8_t *codes) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
}
static inline __m512i halved_16(__m512i x) { return _mm512_srli_epi16(x, 1); }
static inline __m512i all_16(int x) { return _mm512_set1_epi16((short)x); }
static inline __m512i more_16(__m512i x, __m512i y) { return _mm512_add_epi16(x, y); }
static inline __m512i less_16(__m512i x, __m512i y) { return _mm512_sub_epi16(x, y); }
static inline __m512i chosen_16(uint64_t mask, __m512i x, __m512i y) {
    return _mm512_mask_mov_epi16(x, (__mmask32)mask, y);
}

static inline __m512i widened_32(const uint8_t *codes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
}
static inline __m512i halved_32(__m512i x) { return _mm512_srli_epi32(x, 1); }
static inline __m512i all_32(int x) { return _mm512_set1_epi32(x); }
static inline __m512i more_32(__m512i x, __m512i y) { return _mm512_add_epi32(x, y); }
static inline __m512i less_32(__m512i x, __m512i y) { return _mm512_sub_epi32(x, y); }
static inline __m512i chosen_32(uint64_t mask, __m512i x, __m512i y) {
    return _mm512_mask_mov_epi32(x, (__mmask16)mask, y);
}
#endif

#ifdef HAS_VECTORS
static inline __m512i vector_exponents_8(const uint8_t *base, uint32_t key_mask, int shift) {
    __m512i words = _mm512_srl_epi16(_mm512_loadu_si512(base), _mm_cvtsi32_si128(shift));
    return _mm512_and_si512(words, _mm512_set1_epi8((char)(key_mask >> shift)));
}
#endif

#define WORD uint8_t
#define SIGNED int8_t
#define BITS 8
#define NAME(name) name##_8
#define DIFFERING _mm512_cmpneq_epu8_mask
#include "words.h"
#undef WORD
#undef SIGNED
#undef BITS
#undef NAME
#undef DIFFERING

#ifdef HAS_VECTORS
static inline __m512i vector_exponents_16(const uint16_t *base, uint32_t key_mask, int shift) {
    __m128i by = _mm_cvtsi32_si128(shift);
    __m512i mask = _mm512_set1_epi16((short)key_mask);
    __m512i low = _mm512_srl_epi16(_mm512_and_si512(_mm512_loadu_si512(base), mask), by);
    __m512i high = _mm512_srl_epi16(_mm512_and_si512(_mm512_loadu_si512(base + 32), mask), by);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)), _mm512_cvtepi16_epi8(high), 1);
}
#endif

#define WORD uint16_t
#define SIGNED int16_t
#define BITS 16
#define NAME(name) name##_16
#define DIFFERING _mm512_cmpneq_epu16_mask
#include "words.h"
#undef WORD
#undef SIGNED
#undef BITS
#undef NAME
#undef DIFFERING

#ifdef HAS_VECTORS
static inline __m512i vector_exponents_32(const uint32_t *base, uint32_t key_mask, int shift) {
    __m128i by = _mm_cvtsi32_si128(shift), parts[4];
    __m512i mask = _mm512_set1_epi32((int)key_mask);
    for (int part = 0; part < 4; part++) {
        __m512i words = _mm512_and_si512(_mm512_loadu_si512(base + 16 * part), mask);
        parts[part] = _mm512_cvtepi32_epi8(_mm512_srl_epi32(words, by));
    }
    return _mm512_loadu_si512(parts);
}
#endif

#define WORD uint32_t
#define SIGNED int32_t
#define BITS 32
#define NAME(name) name##_32
#define DIFFERING _mm512_cmpneq_epu32_mask
#include "words.h"

#define BY_SIZE(size, name, ...) \
    ((size) == 1 ? name##_8(__VA_ARGS__) : (size) == 2 ? name##_16(__VA_ARGS__) : name##_32(__VA_ARGS__))

/* Returns how many words differ, with their positions and differences [up to count]. counts [256, NUM_SYMBOLS]:
   by the old word's exponent and the difference's symbol; added to. */
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

/* The reverse; returns how many changes lie beyond the end. `target` may be `base`: a block is read before it
   is written. scratch: room for count / 8 bytes, one a change, and 512 more. */
int64_t etude_delta_place(
    int64_t size, const void *base, void *target, int64_t count, uint32_t key_mask, int64_t shift,
    const uint8_t *thresholds, int64_t classes, const int64_t *starts, const uint32_t *values, void *scratch
) {
    return BY_SIZE(
        size, place, base, target, count, key_mask, (int)shift, thresholds, (int)classes, starts, values, scratch
    );
}
