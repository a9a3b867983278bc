/* The trainer's experts: a product of matrices, whole or in parts, and the activation (SwiGLU) between two of them. */

#ifndef ETUDE_PRODUCTS_H
#define ETUDE_PRODUCTS_H

#include "tiles.h"

typedef struct {
    int64_t rows, columns, depth;
    const float *a, *b;
    int64_t a_row, a_step;      /* value (r, i) of a lies at a[r * a_row + i * a_step] */
    int64_t b_step, b_column;   /* value (i, j) of b at b[i * b_step + j * b_column] */
    float *c;
    int64_t c_row;              /* and (r, j) of c at c[r * c_row + j] */
    int64_t add;
    int64_t as_engine;          /* bitwise as in the engine; not together with `add` */
} Product;

/* Size in floats of the scratch memory, aligned to a cache line, that a thread needs for its part of any product. */
int64_t product_floats(void);
/* Computes these rows and columns on the calling thread. Each value has the same bits however c is divided. */
void product_part(const Product *p, int64_t row, int64_t row_end, int64_t column, int64_t column_end, float *scratch);

/* silu(gate) * up * scale, row by row. */
typedef struct {
    int64_t rows, size, as_engine;
    const float *gate, *up;     /* rows lie `stride` apart */
    int64_t stride;
    const float *scale;         /* [rows], or NULL for ones */
    float *out;                 /* [rows, size] */
    const float *to_out;        /* [rows, size]: its gradient; NULL: forward pass only */
    float *to_gate, *to_up;     /* rows lie `to_stride` apart */
    int64_t to_stride;
    float *to_scale;            /* [rows]; NULL without `scale` */
    atomic_long counter;
} Gate;

/* Computes `out` if it is not NULL, and the gradients if `to_out` is not. */
void gate_row(const Gate *gate, int64_t row);

#endif
