/* Sequences in speculative decoding, and the sources of their drafts. */

#ifndef ETUDE_DRAFTING_H
#define ETUDE_DRAFTING_H

#include "forward.h"
#include "sampling.h"

/* Prompt-lookup drafts: how many tokens must match, at first and at least. */
typedef struct {
    int64_t longest, shortest;
} Lookup;

/* Layers for multi-token prediction. They run over every accepted position, and the last one is repeated on its own
 * output for drafts beyond their number. */
typedef struct {
    const Model *model;
    const Layer *layers;
    const Entrance *entrances;
    int64_t depth;                  /* layers that run over every position */
    float *carried;                 /* [lines, depth - 1, width] the model's last hidden states of each */
    int64_t *carried_counts;        /* [lines] */
    int64_t *carried_ends;          /* [lines] slot behind them */
} DraftLayers;

typedef struct {
    int64_t count;                  /* sequences that decode */
    int64_t steps, positions;       /* at most; positions that the model computes, but for the first step */
    int64_t most_drafts;            /* of any sequence */
    int64_t max_tokens;             /* of a line */
    const int64_t *lines;           /* [count] line of each sequence in the next two, and of what is carried */
    int32_t *tokens;                /* [lines, max_tokens] */
    float *logprobs;                /* [lines, max_tokens] */
    int64_t *lengths;               /* [count] in and out: tokens that each holds, of which the last is not computed */
    const int64_t *limits;          /* [count] length at which each ends */
    const int64_t *rooms;           /* [count] positions for which it has pages */
    const int64_t *wanted;          /* [count] most drafts of each */
    int64_t *ready;                 /* [count] in and out: drafts of layers that lie behind its tokens */
    int64_t *drafted, *stood;       /* [count] out: drafts that were verified, and that were accepted */
    const int64_t *first_stops;     /* [count + 1] where the tokens that end each begin in `stops` */
    const int64_t *stops;
    const double *noise;            /* [count, noise_places] from the place behind the first length on */
    int64_t noise_places;
    const float *temperatures, *top_p, *min_p;  /* [count] */
    const int64_t *top_k;                       /* [count] */
    const int32_t *tables;          /* [count, max_pages] */
    int64_t max_pages;
    char *routes;                   /* [pages, PAGE, route_layers, top_k] */
    int64_t route_layers, route_bytes;
    int64_t vocabulary;
    const Lookup *lookup;           /* one of the two is NULL */
    const DraftLayers *layers;
    const int64_t *adapters;        /* [count], see Step */
} DraftRun;

/* Appends up to `most` tokens to the `length` of a line: those after the last earlier occurrence of its ending.
 * Returns how many. */
int64_t etude_look_up(const Lookup *lookup, int64_t length, int32_t *tokens, int64_t most);

/* Bytes of scratch space of a run, in addition to that of its passes and samples. */
int64_t etude_drafting_bytes(const Model *model, const DraftRun *run);
/* Largest number of rows of a pass in a run. */
int64_t etude_drafting_rows(const DraftRun *run);

/* Runs steps until a sequence ends or lacks a page, at most `steps`; returns how many. The sampled tokens are those of
 * single steps, with or without drafts. `workspace`: etude_drafting_bytes; the other scratches are those of a step of
 * etude_drafting_rows. */
int64_t etude_draft_run(const Model *model, const Layer *layers, const Matrix *head, const DraftRun *run,
                        int64_t threads, char *workspace, char *scratch, float *sample_scratch);

#endif
