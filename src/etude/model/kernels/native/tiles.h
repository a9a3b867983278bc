/* Products of small blocks that lie in the cache: what gradients and attention are made of.
 *
 * A tile of the result is kept in registers and adds up its terms one by one from the first to the last, whatever
 * its shape: its bits depend on its row and its column alone.
 */

#ifndef ETUDE_TILES_H
#define ETUDE_TILES_H

#include "common.h"

#if LANES == 16 || defined(__ARM_NEON)
#define TILE_VECTORS 4          /* vectors of columns of the widest tile; thirty-two registers */
#define TILE_ROWS(vectors) ((vectors) == 4 ? 6 : (vectors) == 3 ? 8 : 12)
#else
#define TILE_VECTORS 2          /* sixteen registers: twelve sums, two vectors of b, one value of a */
#define TILE_ROWS(vectors) ((vectors) == 2 ? 6 : 8)
#endif

/* The left side of a product: value (r, i) lies at values[r * row + i * step]. */
typedef struct {
    const float *values;
    int64_t row, step;
} Left;

/* What becomes of the values that a product's place has. CONTINUE: their sums go on where they are, as if the terms
 * had been one block; ADD: the block's own sum is added to them. */
enum { SET, ADD, CONTINUE };

/* c[rows, vectors] (+)= a b, where b[k, ldb] and c[rows, ldc] hold whole vectors. All but k, the pointers and the
 * strides are constants at each call. */
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

/* c[rows, columns] (+)= a[rows, k] b[k, columns]; `columns`, a multiple of LANES. */
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

/* Memory of the calling thread, at least `floats` long and aligned to a cache line, until its next call. */
float *thread_memory(int64_t floats);

#endif
