/* The model, a step, and the pass that computes it. */

#ifndef ETUDE_FORWARD_H
#define ETUDE_FORWARD_H

#include "common.h"

typedef struct {
    int64_t width, heads, kv_heads, dim, value_dim, layers, experts, top_k, expert_size, inner, normalise;
    int64_t latent;                         /* whether attention is latent: the next four count, dim is rank + rope */
    int64_t query_rank;                     /* width through which queries are projected; 0: directly */
    int64_t nope, rope, head_value_dim;     /* of each head before compression */
    int64_t sigmoid;                        /* whether the router has a bias and groups; else softmax */
    int64_t groups, top_groups;             /* of experts */
    int64_t shared_inner;                   /* of the shared experts, which process every row; 0: none */
    int64_t drafting;                       /* whether its layers are draft layers, each with an Entrance */
    int64_t adapter_rank;                   /* the largest of any adapter; 0: there are none */
    float eps, latent_eps, query_scale, gate_scale;
    const float *embedding;                 /* [vocabulary, width] */
    const float *cosine, *signed_sine;      /* [positions, rope or dim] */
    const float *final_norm;                /* [width] */
} Model;

/* Weights of a layer that can have adapters. QKV is the first part of `qkv` in latent attention, COMPRESS the other;
 * KEY_UP and VALUE_UP exist for each head, GATE_UP and DOWN for each expert. */
enum { QKV, COMPRESS, QUERY_UP, OUT, KEY_UP, VALUE_UP, GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN };

typedef struct {
    const float *attention_norm, *query_norm, *key_norm, *experts_norm; /* latent: the two norms of compressed rows */
    const float *qkv_bias;                  /* [columns of qkv]; NULL: none, as the norms of queries and keys */
    const float *score_bias;                /* [experts], on the choice alone */
    Matrix qkv;                             /* latent: queries (or their compressed rows), then the compressed key */
    Matrix query_up, out, router;
    const Matrix *key_up, *value_up;        /* [heads] each: [nope, rank], [rank, head_value_dim] */
    const Matrix *gate_up, *down;           /* one of each for a dense layer, else one per expert */
    const Matrix *shared_gate_up, *shared_down;
    float *keys, *values;                   /* see Pages */
    int64_t route_layer;                    /* place among the layers that route; -1: dense */
    const Factors *factors;                 /* of each weight that can have adapters; NULL without adapters */
} Layer;

/* The input projection of a draft layer, from [token | hidden state] to one width, and its final norm. */
typedef struct {
    const float *token_norm, *hidden_norm, *final_norm; /* [width] */
    Matrix projection;                                  /* [2 width, width] */
} Entrance;

typedef struct {
    int64_t rows, max_pages, route_layers, route_bytes;
    const int64_t *tokens, *sequences, *positions;  /* [rows] */
    const int32_t *tables;                          /* [sequences, max_pages] */
    float *hidden;                                  /* out: [rows, width], after the last norm */
    void *routes;                                   /* out: [rows, route_layers, top_k], best first */
    const int64_t *adapters;                        /* [sequences] of each, below 0: none; NULL: none at all */
} Step;

typedef struct {
    const Model *model;
    const Layer *layers;
    const Step *step;
    int64_t num_runs;
    Run *runs;                              /* [rows] */
    atomic_long *counters;                  /* [layers, 2] */
    int64_t *chosen, *order, *starts;       /* [rows, top_k] both, [experts + 2] */
    int64_t *adapters;                      /* [rows]; NULL: none */
    float *lowered;                         /* of each thread, see `adapt` */
    float *normed, *qkv, *raised, *queries, *attended, *headed, *wide, *narrow, *gates, *mixed, *joined, *private;
    int64_t private_floats;                 /* of each thread */
} Pass;

/* Adds the adapters' product with a weight's inputs to its own, for this thread's rows; does nothing without
 * adapters. `index`: of the weight among those of its kind. */
void add_factors(const Pass *pass, const Layer *layer, int kind, int64_t index, int thread, int threads, Strided from,
                 Strided to);

/* Columns of `qkv`. */
int64_t projected_width(const Model *model);

/* Latent attention, around the attention itself: queries and cached keys of all rows; then, from what was
 * attended, what goes to the output projection. Each needs a barrier before and after. */
void enter_latent(Team *team, int thread, const Pass *pass, const Layer *layer, const Pages *pages);
void leave_latent(Team *team, int thread, const Pass *pass, const Layer *layer);

/* Chooses a row's experts, the best first, the lower index on a tie; computes their gates, and records them. */
void route_row(const Pass *pass, const Layer *layer, int64_t t, float *scratch);
/* Floats of `scratch`. */
int64_t route_scratch(const Model *model);

/* Computes a step on up to `threads` threads. `scratch`: etude_scratch_bytes, aligned to 64 bytes. */
void etude_forward(const Model *model, const Layer *layers, const Step *step, int64_t threads, char *scratch);

/* Computes draft layer `index` over rows with the given tokens, whose `hidden` is the output of the layer before it, or
 * of the model; `hidden` is overwritten with the output after the layer's last norm. */
void etude_draft_layer(const Model *model, const Layer *layers, const Entrance *entrances, int64_t index,
                       const Step *step, int64_t threads, char *scratch);

#endif
