/* A product of matrices, whole or in parts, and the gate between two of them: what the trainer's experts are made of. */

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
    int64_t as_engine;          /* not with `add` */
} Product;

/* Floats of scratch space, aligned to a cache line, that a thread needs for its part of any product. */
int64_t product_floats(void);
/* The rows and columns that are given, by one thread; their bits do not depend on which are. */
void product_part(const Product *p, int64_t row, int64_t row_end, int64_t column, int64_t column_end, float *scratch);

/* silu(gate) * up * scale, row by row. */
typedef struct {
    int64_t rows, size, as_engine;
    const float *gate, *up;     /* rows lie `stride` apart */
    int64_t stride;
    const float *scale;         /* [rows], or NULL for ones */
    float *out;                 /* [rows, size] */
    const float *to_out;        /* [rows, size], or NULL: forwards alone */
    float *to_gate, *to_up;     /* rows lie `to_stride` apart */
    int64_t to_stride;
    float *to_scale;            /* [rows], where there is a scale */
    atomic_long counter;
} Gate;

/* `out` where it is given, and gradients where `to_out` is. */
void gate_row(const Gate *gate, int64_t row);

#endif
