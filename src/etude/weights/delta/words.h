/* What is written once for words of 1, 2 and 4 bytes: included by words.c with WORD, SIGNED, BITS and NAME(x). */

static inline uint64_t NAME(differing)(const WORD *base, const WORD *target, int64_t count) {
    uint64_t mask = 0;
#ifdef HAS_VECTORS
    if (count == BLOCK) {
        for (int part = 0; part < BLOCK * BITS / 512; part++) {
            __m512i left = _mm512_loadu_si512(base + part * (512 / BITS));
            __m512i right = _mm512_loadu_si512(target + part * (512 / BITS));
            mask |= (uint64_t)DIFFERING(left, right) << (part * (512 / BITS));
        }
        return mask;
    }
#endif
    for (int64_t index = 0; index < count; index++) mask |= (uint64_t)(base[index] != target[index]) << index;
    return mask;
}

static inline Block NAME(read_block)(const WORD *base, int64_t count, uint32_t key_mask, int shift) {
    Block block = {.present = count == BLOCK ? ~0ull : (1ull << count) - 1};
    uint8_t exponents[BLOCK] = {0};
#ifdef HAS_VECTORS
    if (count == BLOCK) {
        block.exponents = NAME(vector_exponents)(base, key_mask, shift);
        return block;
    }
#endif
    for (int64_t index = 0; index < count; index++)
        exponents[index] = (uint8_t)((base[index] & key_mask) >> shift);
    memcpy(&block.exponents, exponents, BLOCK);
    return block;
}

/* 0 for one step up, 1 for one down, 2 for two up...; words are unsigned, so a step may wrap around. */
static inline uint32_t NAME(difference)(WORD before, WORD after) {
    SIGNED step = (SIGNED)(WORD)(after - before);
    return step > 0 ? ((uint32_t)step - 1) * 2 : ((0u - (uint32_t)(int32_t)step) - 1) * 2 + 1;
}

static inline WORD NAME(stepped)(WORD before, uint32_t difference) {
    uint32_t size = (difference >> 1) + 1;
    return (WORD)(difference & 1 ? before - size : before + size);
}

static int64_t NAME(scan)(
    const WORD *base, const WORD *target, int64_t count, uint32_t key_mask, int shift, uint32_t *positions,
    uint32_t *differences, uint32_t *counts
) {
    int64_t found = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t size = count - start < BLOCK ? count - start : BLOCK;
        uint64_t mask = NAME(differing)(base + start, target + start, size);
        for (; mask; mask &= mask - 1) {
            int64_t position = start + __builtin_ctzll(mask);
            WORD before = base[position];
            uint32_t difference = NAME(difference)(before, target[position]);
            unsigned width, symbol = symbol_of(difference, &width);
            counts[((before & key_mask) >> shift) * NUM_SYMBOLS + symbol]++;
            positions[found] = (uint32_t)position;
            differences[found++] = difference;
        }
    }
    return found;
}

static void NAME(gather)(
    const WORD *base, int64_t count, const uint32_t *positions, const uint32_t *differences, int64_t found,
    uint32_t key_mask, int shift, const uint8_t *thresholds, int classes, const int64_t *starts,
    uint32_t *values
) {
    uint64_t members[MAX_CLASSES], seen[MAX_CLASSES] = {0}, next[MAX_CLASSES] = {0};
    int64_t filled[MAX_CLASSES];
    uint8_t class_of[256];
    for (int j = 0; j < classes; j++) {
        filled[j] = starts[j];
        memset(class_of + thresholds[j], j, (size_t)(256 - thresholds[j]));
    }
    for (int64_t start = 0, event = 0; event < found; start += BLOCK) {
        int64_t size = count - start < BLOCK ? count - start : BLOCK;
        Block block = NAME(read_block)(base + start, size, key_mask, shift);
        uint64_t above = block.present;
        for (int j = 0; j < classes; j++) {
            uint64_t reached = j + 1 < classes ? reaching(&block, thresholds[j + 1]) : 0;
            members[j] = above & ~reached;
            seen[j] += (uint64_t)__builtin_popcountll(members[j]);
            above = reached;
        }
        for (; event < found && positions[event] < start + size; event++) {
            int64_t bit = positions[event] - start;
            int j = class_of[(base[positions[event]] & key_mask) >> shift];
            uint64_t rank = seen[j] - (uint64_t)__builtin_popcountll(members[j] >> bit);
            values[filled[j]] = (uint32_t)(rank - next[j]);
            values[found + filled[j]++] = differences[event];
            next[j] = rank + 1;
        }
    }
}

#ifdef WIDE
/* Steps of words: `codes` has a difference in the byte of each word that `changed` names. */
static inline void NAME(step_block)(const WORD *base, WORD *target, uint64_t changed, __m512i codes) {
    uint8_t held[BLOCK];
    _mm512_storeu_si512(held, codes);
    for (int part = 0; part < BITS / 8; part++) {
        const int lanes = 512 / BITS;
        __m512i words = _mm512_loadu_si512(base + part * lanes);
        __m512i own = NAME(widened)(held + part * lanes), one = NAME(all)(1);
        __m512i down = NAME(less)(_mm512_setzero_si512(), _mm512_and_si512(own, one)); /* all bits, or none */
        __m512i size = NAME(more)(NAME(halved)(own), one);
        __m512i stepped = NAME(more)(words, NAME(less)(_mm512_xor_si512(size, down), down));
        words = NAME(chosen)(changed >> (part * lanes), words, stepped);
        _mm512_storeu_si512(target + part * lanes, words);
    }
}

/* One block; what it reads of `base` may be what it writes. */
static inline __attribute__((always_inline)) void NAME(place_block)(
    const WORD *base, WORD *target, uint64_t present, uint32_t key_mask, int shift, const uint8_t *thresholds,
    int classes, Marks *marks
) {
    Block block = {NAME(vector_exponents)(base, key_mask, shift), present};
    __m512i codes = _mm512_setzero_si512();
    uint64_t above = present, changed = 0, own[MAX_CLASSES];
    for (int j = 0; j < classes; j++) {
        uint64_t reached = j + 1 < classes ? reaching(&block, thresholds[j + 1]) : 0;
        uint64_t members = above & ~reached;
        above = reached;
        own[j] = _pdep_u64(next_marks(marks, j, __builtin_popcountll(members)), members);
        __m512i next = _mm512_loadu_si512(marks->codes + marks->at[j]);
        codes = _mm512_or_si512(codes, _mm512_maskz_expand_epi8(own[j], next));
        marks->at[j] += __builtin_popcountll(own[j]);
        changed |= own[j];
    }
    uint64_t escaped = _mm512_mask_cmpeq_epu8_mask(changed, codes, _mm512_set1_epi8((char)ESCAPE));
    NAME(step_block)(base, target, changed & ~escaped, codes);
    for (; escaped; escaped &= escaped - 1) {
        int bit = __builtin_ctzll(escaped), j = 0;
        while (!(own[j] >> bit & 1)) j++;
        int64_t event = marks->at[j] - __builtin_popcountll(own[j] >> bit);
        target[bit] = NAME(stepped)(target[bit], marks->differences[event]);
    }
}

static int64_t NAME(place)(
    const WORD *base, WORD *target, int64_t count, uint32_t key_mask, int shift, const uint8_t *thresholds,
    int classes, const int64_t *starts, const uint32_t *values, uint64_t *scratch
) {
    Marks marked, *marks = &marked;
    if (mark(&marked, count, classes, starts, values, scratch)) return 1;
    int64_t start = 0, missing = 0;
    for (; start + BLOCK <= count; start += BLOCK)
        NAME(place_block)(base + start, target + start, ~0ull, key_mask, shift, thresholds, classes, marks);
    if (start < count) {
        WORD last[BLOCK] = {0};
        memcpy(last, base + start, (size_t)(count - start) * sizeof(WORD));
        uint64_t present = (1ull << (count - start)) - 1;
        NAME(place_block)(last, last, present, key_mask, shift, thresholds, classes, marks);
        memcpy(target + start, last, (size_t)(count - start) * sizeof(WORD));
    }
    for (int j = 0; j < classes; j++) missing += starts[j + 1] - marks->at[j];
    return missing;
}
#else
static int64_t NAME(place)(
    const WORD *base, WORD *target, int64_t count, uint32_t key_mask, int shift, const uint8_t *thresholds,
    int classes, const int64_t *starts, const uint32_t *values, uint64_t *scratch
) {
    (void)scratch;
    const uint32_t *gaps = values, *differences = values + starts[classes];
    uint64_t members[MAX_CLASSES];
    int64_t away[MAX_CLASSES], at[MAX_CLASSES]; /* members of the class until its next change; which change */
    int numbers[MAX_CLASSES];
    const int64_t never = INT64_MAX / 2;
    for (int j = 0; j < classes; j++) {
        at[j] = starts[j];
        away[j] = starts[j] < starts[j + 1] ? (int64_t)gaps[starts[j]] : never;
    }
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t size = count - start < BLOCK ? count - start : BLOCK;
        unsigned hit = 0;
        Block block = NAME(read_block)(base + start, size, key_mask, shift);
        uint64_t above = block.present;
        if (target != base) memcpy(target + start, base + start, (size_t)size * sizeof(WORD));
        for (int j = 0; j < classes; j++) {
            uint64_t reached = j + 1 < classes ? reaching(&block, thresholds[j + 1]) : 0;
            members[j] = above & ~reached;
            above = reached;
            numbers[j] = __builtin_popcountll(members[j]);
            hit |= (unsigned)(away[j] < numbers[j]) << j; /* without a branch: none would be foretold */
            away[j] -= numbers[j];
        }
        for (; hit; hit &= hit - 1) {
            int j = __builtin_ctz(hit);
            do {
                int64_t position = start + select_bit(members[j], away[j] + numbers[j]);
                target[position] = NAME(stepped)(target[position], differences[at[j]]);
                at[j]++;
                away[j] += at[j] < starts[j + 1] ? (int64_t)gaps[at[j]] + 1 : never;
            } while (away[j] < 0);
        }
    }
    int64_t missing = 0;
    for (int j = 0; j < classes; j++) missing += starts[j + 1] - at[j];
    return missing;
}
#endif
