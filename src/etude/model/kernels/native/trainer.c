/* The same blocks one by one, over all rows of a batch: what the trainer computes with, so that its bits are the
 * engine's. All tensors are contiguous float32. */

#include "common.h"

enum { LINEAR, RMS_NORM, ROTATE, SWIGLU, SOFTMAX, SIGMOID, LOG_SOFTMAX };

typedef struct {
    int64_t kind, rows, size, heads;
    float eps;
    const Matrix *matrix;
    const float *x, *y, *z;     /* by kind: weight, or the tables of a rotation, or what is gated */
    float *out;
} Rows;

static void run_row(const Rows *rows, int64_t t)
{
    const float *x = rows->x + t * rows->size;
    float *out = rows->out + t * rows->size, highest, log_sum;
    int64_t position = t / rows->heads;
    switch (rows->kind) {
    case RMS_NORM: rms_norm(rows->size, x, rows->y, rows->eps, out); break;
    case ROTATE: rotate(rows->size, x, rows->y + position * rows->size, rows->z + position * rows->size, out); break;
    case SWIGLU: swiglu(rows->size, x, rows->y + t * rows->size, out); break;
    case SOFTMAX:
        memcpy(out, x, (size_t)rows->size * sizeof(float));
        softmax(rows->size, out);
        break;
    case SIGMOID:
        memcpy(out, x, (size_t)rows->size * sizeof(float));
        sigmoid(rows->size, out);
        break;
    default:
        normaliser(rows->size, x, &highest, &log_sum, NULL);
        for (int64_t j = 0; j < rows->size; j++)
            out[j] = (x[j] - highest) - log_sum;
    }
}

static void run_rows(Team *team, int thread, void *argument)
{
    const Rows *rows = argument;
    int64_t first, end;
    if (rows->kind == LINEAR) {
        multiply(rows->matrix, rows->rows, rows->x, rows->out, 0, thread, team_size(team));
        return;
    }
    share(rows->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        run_row(rows, t);
}

/* One block over all rows: the rows of a head of `heads` each count as one. */
void etude_rows(const Rows *rows, int64_t threads) { run_team((int)threads, run_rows, (void *)rows); }

typedef struct {
    Pages pages;
    int64_t rows;
    const int64_t *sequences, *positions;
    const float *queries, *keys, *values;
    float *out;
    Run *runs;
    int64_t num_runs;
    float *scratch;
    atomic_long counter;
} Packed;

static void run_packed(Team *team, int thread, void *argument)
{
    Packed *packed = argument;
    const Pages *pages = &packed->pages;
    int64_t wide = pages->kv_heads * pages->dim, values = pages->kv_heads * pages->value_dim, first, end;
    share(packed->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        store_row(pages, packed->sequences[t], packed->positions[t], packed->keys + t * wide,
                  packed->values + t * values);
    wait_for_all(team);
    attend_runs(pages, packed->num_runs, packed->runs, packed->queries, pages->heads * pages->dim, packed->out,
                packed->scratch + thread * attention_scratch(pages), &packed->counter, team_size(team));
}

int64_t etude_attention_floats(const Pages *pages, int64_t rows, int64_t threads)
{
    return threads * attention_scratch(pages) + rows * (int64_t)(sizeof(Run) / sizeof(float));
}

/* Causal attention of whole sequences, queries [rows, heads, dim] and out [rows, heads, value_dim]; their pages are
 * filled here, and `values` not read where the pages have none. `scratch`: etude_attention_floats, aligned to 8 bytes. */
void etude_attention(const Pages *pages, int64_t rows, const int64_t *sequences, const int64_t *positions,
                     const float *queries, const float *keys, const float *values, float *out, int64_t threads,
                     float *scratch)
{
    Packed packed = {.pages = *pages, .rows = rows, .sequences = sequences, .positions = positions,
                     .queries = queries, .keys = keys, .values = values, .out = out, .runs = (Run *)scratch,
                     .scratch = scratch + rows * (int64_t)(sizeof(Run) / sizeof(float))};
    packed.num_runs = cut_runs(rows, sequences, positions, packed.runs);
    atomic_init(&packed.counter, 0);
    run_team((int)threads, run_packed, &packed);
}

typedef struct {
    Experts experts;
    int64_t rows;
    const float *x, *weights;
    float *out, *mixed, *scratch;
    const int64_t *order, *starts;
    atomic_long counter;
} Consultation;

static void run_consultation(Team *team, int thread, void *argument)
{
    Consultation *c = argument;
    int64_t top_k = c->experts.top_k, width = c->experts.width, first, end;
    run_experts(&c->experts, c->x, c->order, c->starts, c->mixed, c->scratch + thread * expert_scratch(&c->experts),
                &c->counter);
    wait_for_all(team);
    share(c->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        mix(top_k, width, c->mixed + t * top_k * width, c->weights + t * top_k, c->out + t * width);
}

int64_t etude_expert_floats(const Experts *experts, int64_t rows, int64_t threads)
{
    int64_t indices = 2 * (rows * experts->top_k + experts->count + 2);
    return indices + rows * experts->top_k * experts->width + threads * expert_scratch(experts);
}

/* x [rows, width], chosen and weights [rows, top_k] -> out [rows, width]. `scratch`: etude_expert_floats, aligned to
 * 8 bytes. */
void etude_experts(const Experts *experts, int64_t rows, const float *x, const int64_t *chosen,
                   const float *weights, float *out, int64_t threads, float *scratch)
{
    int64_t *order = (int64_t *)scratch, *starts = order + rows * experts->top_k;
    float *mixed = (float *)(starts + experts->count + 2);
    Consultation c = {.experts = *experts, .rows = rows, .x = x, .weights = weights, .out = out, .mixed = mixed,
                      .scratch = mixed + rows * experts->top_k * experts->width, .order = order, .starts = starts};
    sort_by_expert(experts, rows, chosen, order, starts);
    atomic_init(&c.counter, 0);
    run_team((int)threads, run_consultation, &c);
}
