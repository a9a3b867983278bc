/* Interleaved range asymmetric numeral systems (Duda 2013; Giesen 2014): value i belongs to lane i % lanes.
   Values are in groups; each has its own frequencies [NUM_SYMBOLS] that sum to SCALE. Lanes do not wait for each
   other, so that the processor works on several values at a time as long as no branch is in between. */
#include "delta.h"

#define LANES 8 /* that are worked on together */
typedef uint32_t Lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias)); /* in memory */

/* counts [groups, NUM_SYMBOLS], added to. */
void etude_delta_count(const uint32_t *values, const int64_t *starts, int64_t groups, uint32_t *counts) {
    for (int64_t group = 0; group < groups; group++) {
        uint32_t own[4][NUM_SYMBOLS] = {{0}}; /* four, since one would wait for its own last addition */
        for (int64_t index = starts[group]; index < starts[group + 1]; index++) {
            unsigned width;
            own[index & 3][symbol_of(values[index], &width)]++;
        }
        for (int symbol = 0; symbol < NUM_SYMBOLS; symbol++)
            counts[group * NUM_SYMBOLS + symbol] +=
                own[0][symbol] + own[1][symbol] + own[2][symbol] + own[3][symbol];
    }
}

/* Bits on their way to memory, lowest first; fewer than 8 are held between two calls. */
typedef struct {
    uint8_t *to;
    int64_t written;
    uint64_t held;
    unsigned number;
} BitWriter;

/* At most 56 bits. */
static inline void put_bits(BitWriter *writer, uint64_t bits, unsigned width) {
    writer->held |= bits << writer->number;
    writer->number += width;
    memcpy(writer->to + writer->written, &writer->held, 8);
    writer->written += writer->number >> 3;
    writer->held >>= writer->number & ~7u;
    writer->number &= 7;
}

/* The bits below each value's symbol; returns the bytes written. `bits` has room for 4 bytes a value and 8 more. */
static int64_t write_bits(const uint32_t *values, int64_t count, uint8_t *bits) {
    BitWriter writer = {bits, 0, 0, 0};
    int64_t index = 0;
    for (; index + 4 <= count; index += 4) {
        const uint32_t *own = values + index;
        unsigned widths[4];
        uint64_t fields[4];
        if ((own[0] | own[1] | own[2] | own[3]) < 8) continue;
        for (int next = 0; next < 4; next++) {
            symbol_of(own[next], widths + next);
            fields[next] = own[next] & ((1u << widths[next]) - 1);
        }
        unsigned second = widths[0], third = second + widths[1], fourth = third + widths[2];
        if (__builtin_expect(fourth + widths[3] <= 56, 1))
            put_bits(
                &writer, fields[0] | fields[1] << second | fields[2] << third | fields[3] << fourth,
                fourth + widths[3]
            );
        else
            for (int next = 0; next < 4; next++) put_bits(&writer, fields[next], widths[next]);
    }
    for (unsigned width; index < count; index++) {
        symbol_of(values[index], &width);
        put_bits(&writer, values[index] & ((1u << width) - 1), width);
    }
    return writer.written + (writer.number > 0);
}

/* What coding takes of a symbol. A state over its frequency is the upper half of a product with 2^64 / frequency,
   rounded up: exact for states of 32 bits. Where the frequency is 1 it is 1 too small, and `before` makes up for it. */
typedef struct {
    uint64_t reciprocal;
    uint16_t frequency, rest; /* SCALE - frequency */
    uint32_t before;
} Symbol;

static int fill_symbols(const uint16_t *frequencies, Symbol *table) {
    uint32_t before = 0;
    for (int symbol = 0; symbol < NUM_SYMBOLS; symbol++) {
        uint32_t own = frequencies[symbol], rest = SCALE - own;
        table[symbol] = (Symbol){own ? ~0ull / own + (own > 1) : 0, (uint16_t)own, (uint16_t)rest, before};
        if (own == 1) table[symbol].before += rest;
        before += own;
    }
    return before == SCALE ? 0 : -1;
}

/* See symbol_of. The position of the highest bit is the exponent of a float that is not rounded up. */
static inline void find_symbols(const uint32_t *values, uint32_t *symbols) {
    Lanes value = *(const Unaligned *)values, half = (value | 4) >> 1; /* which is not negative */
    Floats rounded = __builtin_convertvector((Integers)(half & ~(half >> 1)), Floats);
    Lanes width = ((Lanes)rounded >> 23) - 128;
    *(Unaligned *)symbols = 4 * width + (value >> width);
}

/* Writes words at the end of `words` [capacity: one a value and one more], and returns how many; -1 if a value has
   no frequency. `states` [lanes]; `bits`: see write_bits; *bit_bytes: how many of them. */
int64_t etude_delta_encode(
    const uint32_t *values, const int64_t *starts, int64_t groups, const uint16_t *frequencies, int64_t lanes,
    uint16_t *words, int64_t capacity, uint32_t *states, uint8_t *bits, int64_t *bit_bytes
) {
    uint16_t *word = words + capacity - 1;
    Symbol table[NUM_SYMBOLS];
    unsigned width, rests = 0;
    *bit_bytes = write_bits(values, starts[groups], bits);
    for (int64_t lane = 0; lane < lanes; lane++) states[lane] = STATE_LOW;
    for (int64_t group = groups - 1; group >= 0; group--) {
        if (fill_symbols(frequencies + group * NUM_SYMBOLS, table)) return -1;
        for (int64_t index = starts[group + 1]; index > starts[group];) {
            int number = index - starts[group] < LANES ? (int)(index - starts[group]) : LANES;
            uint32_t symbols[LANES];
            index -= number;
            if (number == LANES)
                find_symbols(values + index, symbols);
            else
                for (int next = 0; next < number; next++) symbols[next] = symbol_of(values[index + next], &width);
            for (int next = number - 1; next >= 0; next--) {
                const Symbol *own = table + symbols[next];
                uint32_t *place = states + ((index + next) & (lanes - 1)), state = *place;
                uint32_t full = state >> (32 - SCALE_BITS) >= own->frequency;
                rests |= own->rest;
                *word = (uint16_t)state;
                word -= full;
                state >>= full * 16;
                uint32_t quotient = (uint32_t)((unsigned __int128)state * own->reciprocal >> 64);
                *place = state + own->before + quotient * own->rest;
            }
        }
    }
    return rests & SCALE ? -1 : words + capacity - 1 - word;
}

/* One entry a slot: the slot's distance from its symbol's first, frequency - 1, symbol. */
static int fill_slots(const uint16_t *frequencies, uint32_t *slots) {
    uint32_t slot = 0;
    for (uint32_t symbol = 0; symbol < NUM_SYMBOLS; symbol++) {
        if (slot + frequencies[symbol] > SCALE) return -1;
        for (uint32_t index = 0; index < frequencies[symbol]; index++)
            slots[slot++] = index << 20 | (frequencies[symbol] - 1u) << 8 | symbol;
    }
    return slot == SCALE ? 0 : -1;
}

/* Where reading has come to, in words and bits. */
typedef struct {
    const uint16_t *word;
    const uint8_t *bits;
    uint64_t bit;
} Stream;

static inline uint64_t peek(const Stream *stream) {
    uint64_t held;
    memcpy(&held, stream->bits + (stream->bit >> 3), 8);
    return held >> (stream->bit & 7); /* at least 57 bits */
}

/* The next words, for the lanes that are empty; 0 for the others. */
static inline Lanes next_words(Stream *stream, Lanes empty) {
#ifdef HAS_AVX2
    unsigned mask = (unsigned)_mm256_movemask_ps((__m256)empty);
    uint64_t ranks = spread_bits(mask) * ONES << 8; /* of each lane among the empty ones */
    __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)ranks));
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)stream->word));
    stream->word += __builtin_popcount(mask);
    return (Lanes)_mm256_permutevar8x32_epi32(words, order) & empty;
#else
    Lanes words;
    for (int lane = 0; lane < LANES; lane++) {
        words[lane] = *stream->word & empty[lane];
        stream->word += empty[lane] & 1;
    }
    return words;
#endif
}

static inline uint32_t read_field(Stream *stream, unsigned width) {
    uint64_t held = peek(stream);
    stream->bit += width;
    return (uint32_t)(held & ((1ull << width) - 1));
}

/* Adds to each value as many of the next bits as its width tells. */
static inline void read_fields(Stream *stream, const uint32_t *widths, uint32_t *values) {
    for (int first = 0; first < LANES; first += 4) {
        const uint32_t *own = widths + first;
        uint32_t *to = values + first;
        unsigned second = own[0], third = second + own[1], fourth = third + own[2], total = fourth + own[3];
        if (__builtin_expect(total > 57, 0)) {
            for (int lane = 0; lane < 4; lane++) to[lane] += read_field(stream, own[lane]);
            continue;
        }
        uint64_t held = peek(stream);
        to[0] += (uint32_t)(held & ((1ull << own[0]) - 1));
        to[1] += (uint32_t)(held >> second & ((1ull << own[1]) - 1));
        to[2] += (uint32_t)(held >> third & ((1ull << own[2]) - 1));
        to[3] += (uint32_t)(held >> fourth & ((1ull << own[3]) - 1));
        stream->bit += total;
    }
}

/* The next values of LANES lanes. `plain`: no symbol has bits of its own; the compiler makes a loop for each case. */
static inline __attribute__((always_inline)) void decode_lanes(
    Stream *stream, uint32_t *states, const uint32_t *slots, uint32_t *values, int plain
) {
    Lanes state = *(const Unaligned *)states, slot = state & (SCALE - 1), entry;
    for (int lane = 0; lane < LANES; lane++) entry[lane] = slots[slot[lane]];
    state = ((entry >> 8 & (SCALE - 1)) + 1) * (state >> SCALE_BITS) + (entry >> 20);
    Lanes empty = (Lanes)(state < STATE_LOW);
    *(Unaligned *)states = (state & ~empty) | (state << 16 & empty) | next_words(stream, empty);
    Lanes symbol = entry & 0xff;
    if (plain) {
        *(Unaligned *)values = symbol;
        return;
    }
    Lanes width = (symbol >> 2) + (Lanes)(symbol >= 4); /* see width_of and least_of: what is true is -1 */
    uint32_t widths[LANES];
    *(Unaligned *)widths = width;
    *(Unaligned *)values = (symbol - 4 * width) << width;
    read_fields(stream, widths, values);
}

static inline void decode_value(Stream *stream, uint32_t *states, const uint32_t *slots, uint32_t *value) {
    uint32_t entry = slots[*states & (SCALE - 1)], symbol = entry & 0xff;
    uint32_t state = ((entry >> 8 & (SCALE - 1)) + 1) * (*states >> SCALE_BITS) + (entry >> 20);
    uint32_t empty = state < STATE_LOW;
    *states = state << empty * 16 | (*stream->word & (0u - empty));
    stream->word += empty;
    *value = least_of(symbol) + read_field(stream, width_of(symbol));
}

/* Values [start, stop) of one group. -1 beyond the end. */
static inline __attribute__((always_inline)) int decode_values(
    Stream *whole, const Stream *end, uint32_t *states, int64_t lanes, int64_t start, int64_t stop,
    const uint32_t *slots, uint32_t *values, int plain
) {
    Stream stream = *whole; /* in registers */
    for (int64_t index = start; index < stop;) {
        uint32_t *own = states + (index & (lanes - 1));
        if (lanes >= LANES && index % LANES == 0 && stop - index >= LANES) {
            decode_lanes(&stream, own, slots, values + index, plain);
            index += LANES;
        } else {
            decode_value(&stream, own, slots, values + index);
            index++;
        }
        if (stream.word > end->word || stream.bit > end->bit) return -1;
    }
    *whole = stream;
    return 0;
}

/* Fills values [starts[groups]]. `words` has LANES more than num_words, `bits` 4 * LANES + 8 more than bit_bytes. 0 if
   words, bits and states come out even; -1 for anything damaged. */
int64_t etude_delta_decode(
    const uint16_t *words, int64_t num_words, uint32_t *states, int64_t lanes, const uint8_t *bits,
    int64_t bit_bytes, const int64_t *starts, int64_t groups, const uint16_t *frequencies, uint32_t *values
) {
    uint32_t slots[SCALE];
    Stream stream = {words, bits, 0}, end = {words + num_words, bits, (uint64_t)bit_bytes * 8};
    for (int64_t group = 0; group < groups; group++) {
        const uint16_t *own = frequencies + group * NUM_SYMBOLS;
        int64_t start = starts[group], stop = starts[group + 1];
        int last = NUM_SYMBOLS - 1;
        while (last > 0 && !own[last]) last--;
        if (fill_slots(own, slots)) return -1;
        if (last < 8 ? decode_values(&stream, &end, states, lanes, start, stop, slots, values, 1)
                     : decode_values(&stream, &end, states, lanes, start, stop, slots, values, 0))
            return -1;
    }
    for (int64_t lane = 0; lane < lanes; lane++)
        if (states[lane] != STATE_LOW) return -1;
    return stream.word == end.word && (int64_t)((stream.bit + 7) / 8) == bit_bytes ? 0 : -1;
}
