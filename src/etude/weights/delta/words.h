/* What is written once for words of 1, 2 and 4 bytes: included by words.c with WORD, SIGNED and NAME(x). */

/* TILE words from `words` on, of which `left` are there: where that is fewer, a copy that goes on with zeros. */
static inline const WORD *NAME(whole_tile)(const WORD *words, int64_t left, WORD *copy) {
    if (left >= TILE) return words;
    memset(copy, 0, TILE * sizeof(WORD));
    memcpy(copy, words, (size_t)left * sizeof(WORD));
    return copy;
}

/* The exponents of a tile's words as ordered signed bytes. */
static inline void NAME(read_exponents)(const WORD *base, uint32_t key_mask, int shift, Bytes *exponents) {
    typedef WORD Words __attribute__((vector_size(WIDTH), aligned(sizeof(WORD)), may_alias));
    union { WORD words[TILE]; Words vectors[TILE * sizeof(WORD) / WIDTH]; } keys;
    int8_t *to = (int8_t *)exponents;
    for (size_t part = 0; part < TILE * sizeof(WORD) / WIDTH; part++)
        keys.vectors[part] = (((const Words *)base)[part] & (WORD)key_mask) >> (WORD)shift;
    for (int index = 0; index < TILE; index++) to[index] = (int8_t)(keys.words[index] ^ 0x80);
}

/* 0 for one step up, 1 for one down, 2 for two up...; words are unsigned, so a step may wrap around. */
static inline uint32_t NAME(difference)(WORD before, WORD after) {
    int32_t step = (SIGNED)(WORD)(after - before);
    uint32_t beyond = (uint32_t)step - (step > 0); /* without a branch: signs are a coin's toss */
    return beyond << 1 ^ (0u - (beyond >> 31));
}

static inline WORD NAME(stepped)(WORD before, uint32_t difference) {
    uint32_t size = (difference >> 1) + 1;
    return (WORD)(difference & 1 ? before - size : before + size);
}

/* Positions, from `start` on, of the words of a tile that differ; returns how many. Room for 4 more. */
static inline int64_t NAME(find_changes)(
    const WORD *base, const WORD *target, uint32_t start, uint32_t *positions
) {
    union { int8_t bytes[TILE]; Bytes vectors[TILE / WIDTH]; } differs;
    int64_t found = 0;
    for (int index = 0; index < TILE; index++) differs.bytes[index] = (int8_t)-(base[index] != target[index]);
    for (int block = 0; block < BLOCKS; block++) {
        uint64_t mask = below(differs.vectors + block * (BLOCK / WIDTH), (Bytes){0});
        int number = __builtin_popcountll(mask);
        int done = 0;
        do /* hardly ever twice, so that there is no branch to foretell */
            for (int next = 0; next < 4; next++, mask &= mask - 1)
                positions[found + done++] = start + (uint32_t)block * BLOCK + lowest_bit(mask);
        while (__builtin_expect(done < number, 0));
        found += number;
    }
    return found;
}

static int64_t NAME(scan)(
    const WORD *base, const WORD *target, int64_t count, uint32_t key_mask, int shift, uint32_t *positions,
    uint32_t *differences, uint32_t *counts
) {
    WORD ends[2][TILE];
    int64_t found = 0;
    for (int64_t start = 0; start < count; start += TILE) {
        const WORD *before = NAME(whole_tile)(base + start, count - start, ends[0]);
        const WORD *after = NAME(whole_tile)(target + start, count - start, ends[1]);
        int64_t stop = found + NAME(find_changes)(before, after, (uint32_t)start, positions + found);
        for (; found < stop; found++) {
            WORD word = base[positions[found]];
            uint32_t difference = NAME(difference)(word, target[positions[found]]);
            unsigned width, symbol = symbol_of(difference, &width);
            counts[((word & key_mask) >> shift) * NUM_SYMBOLS + symbol]++;
            differences[found] = difference;
        }
    }
    return found;
}

static void NAME(gather)(
    const WORD *base, int64_t count, const uint32_t *positions, const uint32_t *differences, int64_t found,
    uint32_t key_mask, int shift, const uint8_t *thresholds, int classes, const int64_t *starts,
    uint32_t *values
) {
    WORD end[TILE];
    Tile tile;
    begin_tiles(&tile, classes);
    int64_t next[MAX_CLASSES] = {0}; /* member after the last change, from the tile's first one on */
    uint32_t *to[MAX_CLASSES];
    uint8_t class_of[256];
    for (int j = 0; j < classes; j++) {
        to[j] = values + starts[j];
        memset(class_of + thresholds[j], j, (size_t)(256 - thresholds[j]));
    }
    for (int64_t start = 0, event = 0; event < found; start += TILE) {
        NAME(read_exponents)(NAME(whole_tile)(base + start, count - start, end), key_mask, shift, tile.exponents);
        sort_tile(&tile, thresholds, classes);
        for (; event < found && positions[event] < start + TILE; event++) {
            size_t at = (size_t)(positions[event] - start), block = at / BLOCK;
            int j = class_of[(base[positions[event]] & key_mask) >> shift];
            uint64_t earlier = members(&tile, j, block) & ((1ull << at % BLOCK) - 1);
            int64_t rank = members_before(&tile, j, block) + __builtin_popcountll(earlier);
            *to[j] = (uint32_t)(rank - next[j]);
            to[j][found] = differences[event];
            to[j]++;
            next[j] = rank + 1;
        }
        for (int j = 0; j < classes; j++) next[j] -= num_members(&tile, j);
    }
}

/* A span is copied, then changed in place: between arrays whose addresses have the same last 12 bits, as large ones
   do, copying tile by tile makes the processor wait for stores that it takes for those of what it reads next. */
static int64_t NAME(place)(
    const WORD *base, WORD *target, int64_t count, uint32_t key_mask, int shift, const uint8_t *thresholds,
    int classes, const int64_t *starts, const uint32_t *values
) {
    WORD end[TILE];
    Tile tile;
    Class class;
    begin_tiles(&tile, classes);
    const uint32_t *gaps = values, *differences = values + starts[classes];
    int64_t away[MAX_CLASSES], at[MAX_CLASSES]; /* members of the class until its next change; which change */
    int64_t missing = 0;
    for (int j = 0; j < classes; j++) {
        at[j] = starts[j];
        away[j] = starts[j] < starts[j + 1] ? (int64_t)gaps[starts[j]] : NEVER;
    }
    for (int64_t start = 0; start < count; start += TILE) {
        WORD *words = target + start;
        size_t size = (size_t)(count - start), span = size < SPAN ? size : SPAN;
        if (target != base && start % SPAN == 0) memcpy(words, base + start, span * sizeof(WORD));
        NAME(read_exponents)(NAME(whole_tile)(words, count - start, end), key_mask, shift, tile.exponents);
        sort_tile(&tile, thresholds, classes);
        for (int j = 0; j < classes; j++) {
            int number = num_members(&tile, j);
            int64_t next = away[j], event = at[j], stop = starts[j + 1];
            if (next < number) take_class(&tile, j, &class);
            for (; next < number; event++) {
                size_t position = find_member(&class, (unsigned)next);
                if (position >= size) return 1;
                words[position] = NAME(stepped)(words[position], differences[event]);
                next = event + 1 < stop ? next + gaps[event + 1] + 1 : NEVER;
            }
            at[j] = event;
            away[j] = next - number;
        }
    }
    for (int j = 0; j < classes; j++) missing += starts[j + 1] - at[j];
    return missing;
}
