/* Interleaved range asymmetric numeral systems (Duda 2013; Giesen 2014): value i belongs to lane i % lanes.
   Values are in groups; each has its own frequencies [NUM_SYMBOLS] that sum to SCALE. */
#include "delta.h"

#define ROW 16 /* values decoded at a time */

/* counts [groups, NUM_SYMBOLS], added to. */
void etude_delta_count(const uint32_t *values, const int64_t *starts, int64_t groups, uint32_t *counts) {
    for (int64_t group = 0; group < groups; group++)
        for (int64_t index = starts[group]; index < starts[group + 1]; index++) {
            unsigned width;
            counts[group * NUM_SYMBOLS + symbol_of(values[index], &width)]++;
        }
}

/* Bits on their way to memory, lowest first; fewer than 8 are held between two calls. */
typedef struct {
    uint8_t *to;
    int64_t written;
    uint64_t held;
    unsigned number;
} BitWriter;

static inline void put_bits(BitWriter *writer, uint64_t bits, unsigned width) {
    writer->held |= bits << writer->number;
    writer->number += width;
    memcpy(writer->to + writer->written, &writer->held, 8);
    writer->written += writer->number >> 3;
    writer->held >>= writer->number & ~7u;
    writer->number &= 7;
}

static inline void put_value(BitWriter *writer, uint32_t value) {
    unsigned width;
    symbol_of(value, &width);
    put_bits(writer, value & ((1u << width) - 1), width);
}

#ifdef HAS_VECTORS
static inline __m512i symbols_of(__m512i values, __m512i *widths) {
    __m512i three = _mm512_set1_epi32(3), two = _mm512_set1_epi32(2);
    __mmask16 wide = _mm512_cmpge_epu32_mask(values, _mm512_set1_epi32(8));
    __m512i octave = _mm512_sub_epi32(_mm512_set1_epi32(31), _mm512_lzcnt_epi32(values));
    *widths = _mm512_maskz_sub_epi32(wide, octave, two);
    __m512i quarter = _mm512_and_si512(_mm512_srlv_epi32(values, *widths), three);
    __m512i first = _mm512_slli_epi32(_mm512_sub_epi32(octave, _mm512_set1_epi32(1)), 2);
    return _mm512_mask_add_epi32(values, wide, first, quarter);
}

/* Eight numbers of these widths (a byte each), which sum up to no more than 56. */
static inline void put_fields(BitWriter *writer, __m256i fields, uint64_t widths) {
    uint64_t ends = widths * 0x0101010101010101ull;
    __m512i starts = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128((int64_t)(ends << 8)));
    __m512i shifted = _mm512_sllv_epi64(_mm512_cvtepu32_epi64(fields), starts);
    put_bits(writer, (uint64_t)_mm512_reduce_or_epi64(shifted), (unsigned)(ends >> 56));
}

static inline void put_row(BitWriter *writer, const uint32_t *row) {
    __m512i values = _mm512_loadu_si512(row), widths, one = _mm512_set1_epi32(1);
    if (!_mm512_cmpge_epu32_mask(values, _mm512_set1_epi32(8))) return;
    symbols_of(values, &widths);
    __m512i fields = _mm512_and_si512(values, _mm512_sub_epi32(_mm512_sllv_epi32(one, widths), one));
    __m128i bytes = _mm512_cvtepi32_epi8(widths);
    uint64_t low = (uint64_t)_mm_cvtsi128_si64(bytes), high = (uint64_t)_mm_extract_epi64(bytes, 1);
    if (low * 0x0101010101010101ull >> 56 > 56 || high * 0x0101010101010101ull >> 56 > 56) {
        for (int index = 0; index < ROW; index++) put_value(writer, row[index]);
        return;
    }
    put_fields(writer, _mm512_castsi512_si256(fields), low);
    put_fields(writer, _mm512_extracti64x4_epi64(fields, 1), high);
}
#endif

/* The bits below each value's symbol; returns the bytes written. `bits` has room for 4 bytes a value and 8 more. */
static int64_t write_bits(const uint32_t *values, int64_t count, uint8_t *bits) {
    BitWriter writer = {bits, 0, 0, 0};
    int64_t index = 0;
#ifdef HAS_VECTORS
    for (; index + ROW <= count; index += ROW) put_row(&writer, values + index);
#endif
    for (; index < count; index++) put_value(&writer, values[index]);
    return writer.written + (writer.number > 0);
}

/* Where writing has come to: from the end to the beginning. */
typedef struct {
    uint16_t *words;
    int64_t left;
    uint32_t *states;
    int64_t lanes;
} BackWriter;

/* Values [start, stop) of one group, the last one first. table [NUM_SYMBOLS]: frequency and what is before it. */
static inline int64_t encode_values(
    BackWriter *writer, int64_t start, int64_t stop, const uint32_t *table, const uint32_t *values
) {
    for (int64_t index = stop - 1; index >= start; index--) {
        unsigned width;
        uint32_t entry = table[symbol_of(values[index], &width)], frequency = entry >> 16;
        uint32_t *place = writer->states + (index & (writer->lanes - 1)), state = *place;
        if (!frequency) return -1;
        int full = state >> (32 - SCALE_BITS) >= frequency;
        writer->words[writer->left - 1] = (uint16_t)state; /* without a branch: it would be a coin's toss */
        writer->left -= full;
        state = full ? state >> 16 : state;
        *place = (state / frequency << SCALE_BITS) + state % frequency + (entry & 0xffff);
    }
    return 0;
}

#ifdef HAS_VECTORS
static inline __m256i quotients(__m256i states, __m256i frequencies) {
    /* Exact: doubles hold both, and no quotient comes within their rounding of the next whole number. */
    return _mm512_cvttpd_epu32(_mm512_div_pd(_mm512_cvtepu32_pd(states), _mm512_cvtepu32_pd(frequencies)));
}

/* As encode_values, for whole rows: `start` and `stop` are multiples of ROW, and so is the number of lanes. */
static int64_t encode_rows(
    BackWriter *writer, int64_t start, int64_t stop, const uint32_t *table, const uint32_t *values
) {
    for (int64_t index = stop - ROW; index >= start; index -= ROW) {
        __m512i widths, symbols = symbols_of(_mm512_loadu_si512(values + index), &widths);
        __m512i entries = _mm512_i32gather_epi32(symbols, table, 4);
        __m512i frequencies = _mm512_srli_epi32(entries, 16);
        uint32_t *place = writer->states + (index & (writer->lanes - 1));
        __m512i states = _mm512_loadu_si512(place);
        if (_mm512_testn_epi32_mask(frequencies, frequencies)) return -1;
        __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(states, 32 - SCALE_BITS), frequencies);
        unsigned number = (unsigned)__builtin_popcount(full);
        __m256i out = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, states));
        writer->left -= number;
        _mm256_mask_storeu_epi16(writer->words + writer->left, (__mmask16)((1u << number) - 1), out);
        states = _mm512_mask_srli_epi32(states, full, states, 16);
        __m256i low = quotients(_mm512_castsi512_si256(states), _mm512_castsi512_si256(frequencies));
        __m256i high =
            quotients(_mm512_extracti64x4_epi64(states, 1), _mm512_extracti64x4_epi64(frequencies, 1));
        __m512i quotient = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        __m512i rest = _mm512_sub_epi32(states, _mm512_mullo_epi32(quotient, frequencies));
        __m512i first = _mm512_add_epi32(rest, _mm512_and_si512(entries, _mm512_set1_epi32(0xffff)));
        _mm512_storeu_si512(place, _mm512_add_epi32(_mm512_slli_epi32(quotient, SCALE_BITS), first));
    }
    return 0;
}
#endif

static int64_t encode_group(
    BackWriter *writer, int64_t start, int64_t stop, const uint32_t *table, const uint32_t *values
) {
#ifdef HAS_VECTORS
    int64_t first = (start + ROW - 1) / ROW * ROW, last = stop / ROW * ROW;
    if (writer->lanes >= ROW && first < last) {
        if (encode_values(writer, last, stop, table, values)) return -1;
        if (encode_rows(writer, first, last, table, values)) return -1;
        stop = first;
    }
#endif
    return encode_values(writer, start, stop, table, values);
}

/* Writes words at the end of `words` [capacity: one a value and one more], and returns how many; -1 if a value has
   no frequency. `states` [lanes]; `bits`: see write_bits; *bit_bytes: how many of them. */
int64_t etude_delta_encode(
    const uint32_t *values, const int64_t *starts, int64_t groups, const uint16_t *frequencies, int64_t lanes,
    uint16_t *words, int64_t capacity, uint32_t *states, uint8_t *bits, int64_t *bit_bytes
) {
    BackWriter writer = {words, capacity, states, lanes};
    *bit_bytes = write_bits(values, starts[groups], bits);
    for (int64_t lane = 0; lane < lanes; lane++) states[lane] = STATE_LOW;
    for (int64_t group = groups - 1; group >= 0; group--) {
        const uint16_t *own = frequencies + group * NUM_SYMBOLS;
        uint32_t table[NUM_SYMBOLS], before = 0;
        for (int symbol = 0; symbol < NUM_SYMBOLS; before += own[symbol++])
            table[symbol] = (uint32_t)own[symbol] << 16 | before;
        if (encode_group(&writer, starts[group], starts[group + 1], table, values)) return -1;
    }
    return capacity - writer.left;
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

static inline uint64_t peek(const uint8_t *bits, int64_t bytes, uint64_t offset) {
    uint64_t held = 0;
    int64_t first = (int64_t)(offset >> 3);
    if (first + 8 <= bytes)
        memcpy(&held, bits + first, 8);
    else if (first < bytes)
        memcpy(&held, bits + first, (size_t)(bytes - first));
    return held >> (offset & 7);
}

/* Where reading has come to. `words` has ROW more than num_words. */
typedef struct {
    const uint16_t *words;
    int64_t num_words, word;
    uint32_t *states;
    int64_t lanes;
    const uint8_t *bits;
    int64_t bit_bytes;
    uint64_t bit;
} Stream;

static inline uint32_t read_field(Stream *stream, unsigned width) {
    uint64_t held = peek(stream->bits, stream->bit_bytes, stream->bit);
    stream->bit += width;
    return (uint32_t)(held & ((1ull << width) - 1));
}

/* Values [start, stop) of one group. `plain`: none of its symbols has bits of its own; the compiler makes a loop
   for each case. */
static inline __attribute__((always_inline)) int64_t decode_values(
    Stream *stream, int64_t start, int64_t stop, const uint32_t *slots, uint32_t *values, int plain
) {
    for (int64_t index = start; index < stop; index++) {
        uint32_t *place = stream->states + (index & (stream->lanes - 1)), state = *place;
        uint32_t entry = slots[state & (SCALE - 1)], symbol = entry & 0xff;
        state = ((entry >> 8 & (SCALE - 1)) + 1) * (state >> SCALE_BITS) + (entry >> 20);
        int empty = state < STATE_LOW;
        *place = empty ? state << 16 | stream->words[stream->word] : state;
        stream->word += empty; /* without a branch: it would be a coin's toss */
        if (stream->word > stream->num_words) return -1;
        values[index] = plain ? symbol : least_of(symbol) + read_field(stream, width_of(symbol));
    }
    return 0;
}

#ifdef HAS_VECTORS
/* The next bits as eight numbers of these widths (a byte each). Sums of widths stay below 256: none is above 29. */
static inline __m256i read_fields(Stream *stream, uint64_t widths) {
    uint64_t ends = widths * 0x0101010101010101ull, total = ends >> 56;
    if (total > 57) { /* more than one word of 64 bits surely holds */
        uint32_t fields[8];
        for (int index = 0; index < 8; index++) fields[index] = read_field(stream, widths >> 8 * index & 0xff);
        return _mm256_loadu_si256((const __m256i *)fields);
    }
    uint64_t held = peek(stream->bits, stream->bit_bytes, stream->bit);
    __m512i starts = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128((int64_t)(ends << 8))), one = _mm512_set1_epi64(1);
    __m512i bounds = _mm512_sllv_epi64(one, _mm512_cvtepu8_epi64(_mm_cvtsi64_si128((int64_t)widths)));
    __m512i shifted = _mm512_srlv_epi64(_mm512_set1_epi64((int64_t)held), starts);
    stream->bit += total;
    return _mm512_cvtepi64_epi32(_mm512_and_si512(shifted, _mm512_sub_epi64(bounds, one)));
}

static inline __m512i row_of_values(Stream *stream, __m512i symbols) {
    __mmask16 wide = _mm512_cmpge_epu32_mask(symbols, _mm512_set1_epi32(8));
    if (!wide) return symbols;
    __m512i widths = _mm512_maskz_sub_epi32(wide, _mm512_srli_epi32(symbols, 2), _mm512_set1_epi32(1));
    __m512i quarter = _mm512_or_si512(_mm512_and_si512(symbols, _mm512_set1_epi32(3)), _mm512_set1_epi32(4));
    __m512i least = _mm512_mask_sllv_epi32(symbols, wide, quarter, widths);
    __m128i bytes = _mm512_cvtepi32_epi8(widths);
    __m256i low = read_fields(stream, (uint64_t)_mm_cvtsi128_si64(bytes));
    __m256i high = read_fields(stream, (uint64_t)_mm_extract_epi64(bytes, 1));
    return _mm512_add_epi32(least, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

/* As decode_values, for whole rows: `start` and `stop` are multiples of ROW, and so is the number of lanes. */
static inline __attribute__((always_inline)) int64_t decode_rows(
    Stream *whole, int64_t start, int64_t stop, const uint32_t *slots, uint32_t *values, int plain
) {
    Stream stream = *whole; /* in registers */
    __m512i last_slot = _mm512_set1_epi32(SCALE - 1), one = _mm512_set1_epi32(1);
    for (int64_t index = start; index < stop; index += ROW) {
        uint32_t *place = stream.states + (index & (stream.lanes - 1));
        __m512i states = _mm512_loadu_si512(place);
        __m512i entries = _mm512_i32gather_epi32(_mm512_and_si512(states, last_slot), slots, 4);
        __m512i frequencies = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(entries, 8), last_slot), one);
        states = _mm512_mullo_epi32(frequencies, _mm512_srli_epi32(states, SCALE_BITS));
        states = _mm512_add_epi32(states, _mm512_srli_epi32(entries, 20));
        __mmask16 empty = _mm512_cmplt_epu32_mask(states, _mm512_set1_epi32(STATE_LOW));
        __m256i next = _mm256_loadu_si256((const __m256i *)(stream.words + stream.word));
        __m512i refill = _mm512_maskz_expand_epi32(empty, _mm512_cvtepu16_epi32(next));
        states = _mm512_mask_or_epi32(states, empty, _mm512_slli_epi32(states, 16), refill);
        stream.word += __builtin_popcount(empty);
        if (stream.word > stream.num_words) return -1;
        _mm512_storeu_si512(place, states);
        __m512i symbols = _mm512_and_si512(entries, _mm512_set1_epi32(0xff));
        _mm512_storeu_si512(values + index, plain ? symbols : row_of_values(&stream, symbols));
    }
    *whole = stream;
    return 0;
}
#endif

static inline __attribute__((always_inline)) int64_t decode_group(
    Stream *stream, int64_t start, int64_t stop, const uint32_t *slots, uint32_t *values, int plain
) {
#ifdef HAS_VECTORS
    int64_t first = (start + ROW - 1) / ROW * ROW, last = stop / ROW * ROW;
    if (stream->lanes >= ROW && first < last) {
        if (decode_values(stream, start, first, slots, values, plain)) return -1;
        if (decode_rows(stream, first, last, slots, values, plain)) return -1;
        start = last;
    }
#endif
    return decode_values(stream, start, stop, slots, values, plain);
}

/* Fills values [starts[groups]]. `words` has ROW more than num_words. 0 if words, bits and states come out even;
   -1 for anything damaged. */
int64_t etude_delta_decode(
    const uint16_t *words, int64_t num_words, uint32_t *states, int64_t lanes, const uint8_t *bits,
    int64_t bit_bytes, const int64_t *starts, int64_t groups, const uint16_t *frequencies, uint32_t *values
) {
    uint32_t slots[SCALE];
    Stream stream = {words, num_words, 0, states, lanes, bits, bit_bytes, 0};
    for (int64_t group = 0; group < groups; group++) {
        const uint16_t *own = frequencies + group * NUM_SYMBOLS;
        int last = NUM_SYMBOLS - 1;
        while (last > 0 && !own[last]) last--;
        if (fill_slots(own, slots)) return -1;
        int64_t first = starts[group], end = starts[group + 1];
        int64_t failed = last < 8 ? decode_group(&stream, first, end, slots, values, 1)
                                  : decode_group(&stream, first, end, slots, values, 0);
        if (failed) return -1;
    }
    for (int64_t lane = 0; lane < lanes; lane++)
        if (states[lane] != STATE_LOW) return -1;
    return stream.word == num_words && (int64_t)((stream.bit + 7) / 8) == bit_bytes ? 0 : -1;
}
