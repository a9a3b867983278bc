/* The engine's blocks one by one, over all rows of a batch, for a trainer that must be bitwise equal to the engine.
 * Tensors are float32, and contiguous where no stride is given. */

#include "common.h"

enum { LINEAR, SOFTMAX, SIGMOID, LOG_SOFTMAX };

typedef struct {
    int64_t kind, rows, size;
    const Matrix *matrix;       /* of LINEAR */
    const float *x;
    float *out;
} Rows;

static void run_row(const Rows *rows, int64_t t)
{
    const float *x = rows->x + t * rows->size;
    float *out = rows->out + t * rows->size, highest, log_sum;
    if (rows->kind == LOG_SOFTMAX) {
        normaliser(rows->size, x, &highest, &log_sum, NULL);
        for (int64_t j = 0; j < rows->size; j++)
            out[j] = (x[j] - highest) - log_sum;
        return;
    }
    memcpy(out, x, (size_t)rows->size * sizeof(float));
    (rows->kind == SOFTMAX ? softmax : sigmoid)(rows->size, out);
}

static void run_rows(Team *team, int thread, void *argument)
{
    const Rows *rows = argument;
    int64_t first, end;
    if (rows->kind == LINEAR) {
        multiply(rows->matrix, rows->rows, rows->x, rows->out, 0, team, thread);
        return;
    }
    share(rows->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        run_row(rows, t);
}

/* One block over all rows. */
void etude_rows(const Rows *rows, int64_t threads) { run_pieces((int)threads, run_rows, (void *)rows); }

/* Given tokens under the distributions of rows of logits. */
typedef struct {
    int64_t rows, size, keep;   /* `keep`: masses become the distributions */
    const float *logits;        /* [rows, size] */
    const int64_t *tokens;      /* [rows] */
    float *masses;              /* [rows, size]: e^(x - highest) */
    float *chosen, *entropy, *log_sums;     /* [rows] */
} Choice;

static BLOCK void choose_token(const Choice *c, int64_t t)
{
    const float *row = c->logits + t * c->size;
    float *masses = c->masses + t * c->size, highest, log_sum;
    normaliser(c->size, row, &highest, &log_sum, masses);
    int64_t token = c->tokens[t];
    c->chosen[t] = token >= 0 && token < c->size ? (row[token] - highest) - log_sum : NAN;
    c->log_sums[t] = highest + log_sum;
    double total = 0, spread = 0;
    for (int64_t first = 0; first < c->size; first += 64 * LANES) {
        vector sum = {0}, weighted = {0};
        for (int64_t i = first; i < c->size && i < first + 64 * LANES; i += LANES) {
            int64_t left = c->size - i;
            vector mass = load_up_to(masses + i, left);
            sum += mass;
            weighted = add_product(weighted, mass, load_up_to(row + i, left) - splat(highest));
        }
        total += add_up(sum);
        spread += add_up(weighted);
    }
    c->entropy[t] = log_sum - (float)(spread / total);
    vector share = splat((float)(1 / total));
    for (int64_t i = 0; c->keep && i < c->size; i += LANES)
        store_up_to(masses + i, load_up_to(masses + i, c->size - i) * share, c->size - i);
}

static void run_choice(Team *team, int thread, void *argument)
{
    const Choice *choice = argument;
    int64_t first, end;
    share(choice->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        choose_token(choice, t);
}

void etude_choice(const Choice *choice, int64_t threads) { run_pieces((int)threads, run_choice, (void *)choice); }

typedef struct {
    Pages pages;
    int64_t rows;
    const int64_t *sequences, *positions;               /* [rows] */
    const float *queries, *keys, *values;               /* row t begins at t * its stride; heads lie side by side */
    int64_t query_row, key_row, value_row;
    float *out, *log_sums;                              /* [rows, heads, value_dim], [rows, heads] */
    float *scratch;                                     /* etude_attention_floats, aligned to 8 bytes */
    Run *runs;
    int64_t num_runs;
    atomic_long counter;
} Packed;

static void run_storing(Team *team, int thread, void *argument)
{
    Packed *packed = argument;
    int64_t first, end;
    share(packed->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        store_row(&packed->pages, packed->sequences[t], packed->positions[t], packed->keys + t * packed->key_row,
                  packed->values + t * packed->value_row);
}

static void run_attending(Team *team, int thread, void *argument)
{
    Packed *packed = argument;
    const Pages *pages = &packed->pages;
    attend_runs(pages, packed->num_runs, packed->runs, packed->queries, packed->query_row, packed->out,
                packed->log_sums, packed->scratch + thread * attention_scratch(pages), &packed->counter,
                team_size(team));
}

int64_t etude_attention_floats(const Pages *pages, int64_t rows, int64_t threads)
{
    return threads * attention_scratch(pages) + rows * (int64_t)(sizeof(Run) / sizeof(float));
}

/* Attention of whole sequences; their pages are filled here, and `values` not read where the pages have none. */
void etude_attention(Packed *packed, int64_t threads)
{
    packed->runs = (Run *)packed->scratch;
    packed->scratch += packed->rows * (int64_t)(sizeof(Run) / sizeof(float));
    packed->num_runs = cut_runs(packed->rows, packed->sequences, packed->positions, packed->runs);
    atomic_init(&packed->counter, 0);
    run_pieces((int)threads, run_storing, packed);
    run_pieces((int)threads, run_attending, packed);
}
