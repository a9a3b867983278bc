/* Sampling of one token per row. */

#ifndef ETUDE_SAMPLING_H
#define ETUDE_SAMPLING_H

#include "common.h"

typedef struct {
    int64_t rows, vocabulary;
    const float *hidden;            /* [rows, width] */
    const float *temperatures;      /* [rows]; 0: the most likely token, its log-probability at 1 */
    const float *top_p, *min_p;     /* [rows] */
    const int64_t *top_k;           /* [rows]; 0: no limit */
    const double *draws;            /* [rows]: random numbers in [0, 1) */
    float *logits;                  /* out: [rows, vocabulary] */
    int64_t *tokens;                /* out: [rows] */
    float *logprobs;                /* out: [rows] under the distribution sampled from */
    float *raw_logprobs;            /* out: [rows] at temperature 1, not truncated; or NULL */
} Draw;

/* Samples a token per row on up to `threads` threads. `scratch`: etude_sample_floats floats. */
void etude_sample(const Draw *draw, const Matrix *head, int64_t threads, float *scratch);

#endif
