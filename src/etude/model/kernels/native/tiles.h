/* Products of small blocks that fit into the cache, used for gradients and attention.
 *
 * A tile of the result is kept in registers, and its terms are added in order, whatever its shape: the bits of a
 * value depend only on its row of a and its column of b.
 */

#ifndef ETUDE_TILES_H
#define ETUDE_TILES_H

#include "common.h"

#if LANES == 16 || defined(__ARM_NEON)
#define TILE_VECTORS 4          /* columns of the widest tile, in vectors; for 32 registers */
#define TILE_ROWS(vectors) ((vectors) == 4 ? 6 : (vectors) == 3 ? 8 : 12)
#else
#define TILE_VECTORS 2          /* for 16 registers: 12 sums, 2 vectors of b, 1 value of a */
#define TILE_ROWS(vectors) ((vectors) == 2 ? 6 : 8)
#endif

/* The left operand of a product: value (r, i) is values[r * row + i * step]. */
typedef struct {
    const float *values;
    int64_t row, step;
} Left;

/* How a product is combined with the values in its destination. SET: replaces them. ADD: is summed separately, then
 * added to them. CONTINUE: its terms are added to them one by one, as if all terms had been one block. */
enum { SET, ADD, CONTINUE };

/* c[rows, vectors] (+)= a b; rows of b[k, ldb] and c[rows, ldc] consist of whole vectors. At each call all arguments
 * except k, the pointers and the strides are compile-time constants. */
INLINE void small_tile(const int rows, const int vectors, int64_t k, Left a, const float *b, int64_t ldb, float *c,
                       int64_t ldc, int add)
{
    vector sums[12][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = add == CONTINUE ? load(c + r * ldc + v * LANES) : (vector){0};
    for (int64_t i = 0; i < k; i++) {
        vector right[TILE_VECTORS];
        for (int v = 0; v < vectors; v++)
            right[v] = load(b + i * ldb + v * LANES);
        for (int r = 0; r < rows; r++) {
            vector left = splat(a.values[r * a.row + i * a.step]);
            for (int v = 0; v < vectors; v++)
                sums[r][v] = add_product(sums[r][v], left, right[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            float *to = c + r * ldc + v * LANES;
            store(to, add == ADD ? load(to) + sums[r][v] : sums[r][v]);
        }
}

INLINE void small_column(const int vectors, int64_t rows, int64_t k, Left a, const float *b, int64_t ldb, float *c,
                         int64_t ldc, int add)
{
    int64_t r = 0;
    for (; r + TILE_ROWS(vectors) <= rows; r += TILE_ROWS(vectors))
        small_tile(TILE_ROWS(vectors), vectors, k, (Left){a.values + r * a.row, a.row, a.step}, b, ldb, c + r * ldc,
                   ldc, add);
    for (; r + 4 <= rows; r += 4)
        small_tile(4, vectors, k, (Left){a.values + r * a.row, a.row, a.step}, b, ldb, c + r * ldc, ldc, add);
    for (; r < rows; r++)
        small_tile(1, vectors, k, (Left){a.values + r * a.row, a.row, a.step}, b, ldb, c + r * ldc, ldc, add);
}

/* c[rows, columns] (+)= a[rows, k] b[k, columns]; `columns` is a multiple of LANES. */
INLINE void small_product(int64_t rows, int64_t columns, int64_t k, Left a, const float *b, int64_t ldb, float *c,
                          int64_t ldc, int add)
{
    int64_t j = 0;
    for (; j + TILE_VECTORS * LANES <= columns; j += TILE_VECTORS * LANES)
        small_column(TILE_VECTORS, rows, k, a, b + j, ldb, c + j, ldc, add);
    switch ((columns - j) / LANES) {
#if TILE_VECTORS > 2
    case 3: small_column(3, rows, k, a, b + j, ldb, c + j, ldc, add); break;
    case 2: small_column(2, rows, k, a, b + j, ldb, c + j, ldc, add); break;
#endif
    case 1: small_column(1, rows, k, a, b + j, ldb, c + j, ldc, add); break;
    }
}

/* A buffer of at least `floats` floats, aligned to a cache line; valid until the calling thread's next call. */
float *thread_memory(int64_t floats);

#endif
