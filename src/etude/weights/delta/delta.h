/* The codec of weight updates. Format and reasons: `chunks.py`; each function here has a twin in `vectorised.py`
   that gives the same results. */
#ifndef ETUDE_DELTA_H
#define ETUDE_DELTA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef ETUDE_PORTABLE
#ifdef __BMI2__
#define HAS_PDEP
#endif
#if defined(__AVX512BW__) && defined(__AVX512CD__) && defined(__AVX512VL__)
#define HAS_VECTORS /* of 512 bits */
#endif
#if defined(HAS_VECTORS) && defined(HAS_PDEP) && defined(__AVX512VBMI2__)
#define WIDE /* blocks are placed without a branch */
#endif
#endif
#if defined(HAS_VECTORS) || defined(HAS_PDEP)
#include <immintrin.h>
#endif

#define MAX_CLASSES 16
#define NUM_SYMBOLS 128
#define SCALE_BITS 12
#define SCALE (1u << SCALE_BITS)
#define STATE_LOW (1u << 16)
#define BLOCK 64 /* words looked at together: one bit of a mask each */

/* Values below 8 are symbols of their own; above, a symbol is the position of the highest bit and the two
   bits below it, and the rest follows as plain bits: `width` of them. */
static inline unsigned symbol_of(uint32_t value, unsigned *width) {
    unsigned octave = 31u - (unsigned)__builtin_clz(value | 4);
    *width = octave - 2;
    return value < 8 ? value : octave * 4 - 4 + (value >> (octave - 2) & 3u);
}

static inline unsigned width_of(unsigned symbol) { return symbol < 8 ? 0 : symbol / 4 - 1; }

static inline uint32_t least_of(unsigned symbol) {
    return symbol < 8 ? symbol : (4u + symbol % 4) << width_of(symbol);
}

#endif
