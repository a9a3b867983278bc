/* The codec of weight updates. Format and reasons: `chunks.py`; each function here has a twin in `vectorised.py`
   that gives the same results. */
#ifndef ETUDE_DELTA_H
#define ETUDE_DELTA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef ETUDE_PORTABLE /* no more than vector types: what processors have that are not named here */
#if defined(__SSE2__) || defined(__AVX2__)
#define HAS_SSE2
#include <immintrin.h>
#endif
#ifdef __AVX2__
#define HAS_AVX2
#endif
#if defined(__BMI2__) && !defined(__znver1__) && !defined(__znver2__)
#define HAS_PDEP /* as one step: in microcode it takes longer than doing without */
#endif
#endif

#define MAX_CLASSES 16
#define NUM_SYMBOLS 128
#define SCALE_BITS 12
#define SCALE (1u << SCALE_BITS)
#define STATE_LOW (1u << 16)
#define ONES 0x0101010101010101ull

/* Eight bits as eight bytes of 0 or 1, the first one lowest. */
static inline uint64_t spread_bits(uint64_t byte) {
    return ((byte * ONES & 0x8040201008040201ull) + (ONES << 7) - ONES) >> 7 & ONES;
}

/* Values below 8 are symbols of their own; above, a symbol is the position of the highest bit and the two
   bits below it, and the rest follows as plain bits: `width` of them. Without branches: none would be foretold. */
static inline unsigned symbol_of(uint32_t value, unsigned *width) {
    *width = 29u - (unsigned)__builtin_clz(value | 4);
    return 4 * *width + (value >> *width);
}

static inline unsigned width_of(unsigned symbol) { return symbol / 4 - (symbol >= 4); }

static inline uint32_t least_of(unsigned symbol) { return (symbol - 4 * width_of(symbol)) << width_of(symbol); }

#endif
