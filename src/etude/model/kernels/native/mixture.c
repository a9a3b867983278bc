/* A layer's experts in a training step, forward and backward, each in few calls for all of them.
 *
 * Rows are copied once per choice and sorted by expert; a piece of work is a block of one expert's rows, which stays
 * in the cache from one product to the next. The order of each sum depends on the shapes only, not on blocks and
 * threads.
 */

#include "products.h"

#define LEAST_ROWS 96           /* of a piece, except for an expert's last: a matrix is packed for each piece */
#define MOST_ROWS 768

typedef struct {
    int64_t tokens, top_k, experts, width, inner, as_engine;
    const float *gate_up;       /* [experts, width, 2 inner] */
    const float *down;          /* [experts, inner, width] */
    const int64_t *chosen;      /* [tokens, top_k] */
    const float *weights;       /* [tokens, top_k] */
    const float *x;             /* [tokens, width] */
    int64_t *starts;            /* [experts + 1]: the first copy of each expert, and the end */
    int64_t *places;            /* [tokens, top_k]: where a choice's copy lies */
    float *rows;                /* [copies, width]: x, sorted by expert; copies = tokens * top_k */
    float *gates;               /* [copies]: weights, sorted */
    float *opened;              /* [copies, 2 inner]: output of the first product */
    float *mixed;               /* [copies, width] */
    float *out;                 /* [tokens, width] */
    int64_t block;              /* rows of a piece */
    atomic_long counter;
} Mixture;

typedef struct {
    Mixture made;               /* of the forward pass; `mixed` and `out`: the gradients of `rows` and x */
    const float *to_out;        /* [tokens, width] */
    float *to_gate_up, *to_down;    /* like the matrices; NULL where not wanted */
    float *to_weights;          /* [tokens, top_k] */
    float *back;                /* [copies, width]: to_out, sorted */
    float *inner;               /* [copies, inner]: input of the second product */
    float *to_opened;           /* [copies, 2 inner] */
    float *to_gates;            /* [copies] */
    int64_t slices;             /* of each matrix's gradient, computed separately */
    atomic_long counter;
} Gradients;

typedef struct {
    int64_t expert, first, count;
} Rows;

/* The next piece, in the order of copies; 0 when there is none. `piece` and `rows`: the thread's last piece. */
static int next_rows(Mixture *m, int64_t *piece, Rows *rows)
{
    int64_t wanted = take_next(&m->counter);
    while (rows->expert < m->experts) {
        int64_t left = m->starts[rows->expert + 1] - rows->first;
        if (left <= 0) {
            rows->expert++;
            continue;
        }
        rows->count = left < m->block ? left : m->block;
        if ((*piece)++ == wanted)
            return 1;
        rows->first += rows->count;
    }
    return 0;
}

/* Copies are contiguous, so a thread that continues after its last piece finds the next expert's first. */
static int64_t choose_block(int64_t copies, int64_t threads)
{
    int64_t rows = copies / (8 * threads);
    return rows < LEAST_ROWS ? LEAST_ROWS : rows > MOST_ROWS ? MOST_ROWS : rows;
}

/* Fills starts and places; returns whether all choices are experts. */
int64_t etude_sort_copies(Mixture *m)
{
    int64_t copies = m->tokens * m->top_k, sum = 0;
    memset(m->starts, 0, (size_t)(m->experts + 1) * sizeof(int64_t));
    for (int64_t a = 0; a < copies; a++) {
        if (m->chosen[a] < 0 || m->chosen[a] >= m->experts)
            return 0;
        m->starts[m->chosen[a]]++;
    }
    for (int64_t e = 0; e <= m->experts; e++) {
        int64_t count = m->starts[e];
        m->starts[e] = sum;
        sum += count;
    }
    for (int64_t a = 0; a < copies; a++)
        m->places[a] = m->starts[m->chosen[a]]++;
    for (int64_t e = m->experts; e > 0; e--)
        m->starts[e] = m->starts[e - 1];
    m->starts[0] = 0;
    return 1;
}

/* to[places[a]] = from[a / top_k] for every choice a: rows of `width`. */
static void copy_rows(const Mixture *m, const float *from, float *to, int64_t first, int64_t end)
{
    for (int64_t t = first; t < end; t++)
        for (int64_t k = 0; k < m->top_k; k++)
            memcpy(to + m->places[t * m->top_k + k] * m->width, from + t * m->width, (size_t)m->width * sizeof(float));
}

/* out[t] = the sum of the rows of t's choices, in their order. */
static void sum_copies(const Mixture *m, const float *rows, float *out, int64_t first, int64_t end)
{
    for (int64_t t = first; t < end; t++) {
        const int64_t *places = m->places + t * m->top_k;
        memcpy(out + t * m->width, rows + places[0] * m->width, (size_t)m->width * sizeof(float));
        for (int64_t k = 1; k < m->top_k; k++)
            add_rows(m->width, rows + places[k] * m->width, out + t * m->width);
    }
}

/* c = a b for contiguous rows; b [depth, columns], or its transpose if `transposed`. */
static void multiply_rows(const Mixture *m, int64_t rows, int64_t depth, int64_t columns, const float *a, const float *b,
                          int transposed, float *c, float *scratch)
{
    Product p = {.rows = rows, .columns = columns, .depth = depth, .a = a, .b = b, .a_row = depth, .a_step = 1,
                 .b_step = transposed ? 1 : columns, .b_column = transposed ? depth : 1, .c = c, .c_row = columns,
                 .as_engine = m->as_engine && !transposed};
    product_part(&p, 0, rows, 0, columns, scratch);
}

/* ---- forwards --------------------------------------------------------------------------------- */

static void run_gathering(Team *team, int thread, void *argument)
{
    Mixture *m = argument;
    int64_t first, end;
    share(m->tokens, thread, team_size(team), &first, &end);
    copy_rows(m, m->x, m->rows, first, end);
    for (int64_t a = first * m->top_k; a < end * m->top_k; a++)
        m->gates[m->places[a]] = m->weights[a];
}

static void run_mixing(Team *team, int thread, void *argument)
{
    Mixture *m = argument;
    Rows r = {0};
    int64_t piece = 0;
    float *scratch = thread_memory(product_floats() + m->block * m->inner), *inner = scratch + product_floats();
    (void)team, (void)thread;
    while (next_rows(m, &piece, &r)) {
        float *opened = m->opened + r.first * 2 * m->inner;
        multiply_rows(m, r.count, m->width, 2 * m->inner, m->rows + r.first * m->width,
                      m->gate_up + r.expert * m->width * 2 * m->inner, 0, opened, scratch);
        Gate gate = {.rows = r.count, .size = m->inner, .as_engine = m->as_engine, .gate = opened,
                     .up = opened + m->inner, .stride = 2 * m->inner, .out = inner,
                     .scale = m->as_engine ? NULL : m->gates + r.first};
        for (int64_t i = 0; i < r.count; i++)
            gate_row(&gate, i);
        multiply_rows(m, r.count, m->inner, m->width, inner, m->down + r.expert * m->inner * m->width, 0,
                      m->mixed + r.first * m->width, scratch);
        r.first += r.count;
    }
}

static void run_summing(Team *team, int thread, void *argument)
{
    Mixture *m = argument;
    int64_t first, end, k = m->top_k;
    share(m->tokens, thread, team_size(team), &first, &end);
    if (!m->as_engine)
        sum_copies(m, m->mixed, m->out, first, end);
    else
        for (int64_t t = first; t < end; t++)
            mix(k, m->width, m->mixed, m->places + t * k, m->weights + t * k, m->out + t * m->width);
}

void etude_mixture(Mixture *m, int64_t threads)
{
    m->block = choose_block(m->tokens * m->top_k, threads);
    atomic_init(&m->counter, 0);
    run_pieces((int)threads, run_gathering, m);
    run_pieces((int)threads, run_mixing, m);
    run_pieces((int)threads, run_summing, m);
}

/* ---- backwards -------------------------------------------------------------------------------- */

static void run_sorting(Team *team, int thread, void *argument)
{
    Gradients *g = argument;
    int64_t first, end;
    share(g->made.tokens, thread, team_size(team), &first, &end);
    copy_rows(&g->made, g->to_out, g->back, first, end);
}

static void run_returning(Team *team, int thread, void *argument)
{
    Gradients *g = argument;
    Mixture *m = &g->made;
    Rows r = {0};
    int64_t piece = 0;
    float *scratch = thread_memory(product_floats() + m->block * m->inner), *to_inner = scratch + product_floats();
    (void)team, (void)thread;
    while (next_rows(m, &piece, &r)) {
        const float *opened = m->opened + r.first * 2 * m->inner;
        float *to_opened = g->to_opened + r.first * 2 * m->inner;
        multiply_rows(m, r.count, m->width, m->inner, g->back + r.first * m->width,
                      m->down + r.expert * m->inner * m->width, 1, to_inner, scratch);
        Gate gate = {.rows = r.count, .size = m->inner, .gate = opened, .up = opened + m->inner,
                     .stride = 2 * m->inner, .scale = m->gates + r.first, .out = g->inner + r.first * m->inner,
                     .to_out = to_inner, .to_gate = to_opened, .to_up = to_opened + m->inner,
                     .to_stride = 2 * m->inner, .to_scale = g->to_gates + r.first};
        for (int64_t i = 0; i < r.count; i++)
            gate_row(&gate, i);
        multiply_rows(m, r.count, 2 * m->inner, m->width, to_opened, m->gate_up + r.expert * m->width * 2 * m->inner, 1,
                      m->mixed + r.first * m->width, scratch);
        r.first += r.count;
    }
}

/* A slice of one expert's gradient of a matrix [rows, columns]: a^T b over its copies. */
static void weigh(const Gradients *g, int64_t expert, int64_t slice, int64_t rows, int64_t columns, const float *a,
                  const float *b, float *to, float *scratch)
{
    const Mixture *m = &g->made;
    int64_t start = m->starts[expert], depth = m->starts[expert + 1] - start, first, end;
    float *c = to + expert * rows * columns;
    share(rows, (int)slice, (int)g->slices, &first, &end);
    if (!depth) {
        memset(c + first * columns, 0, (size_t)((end - first) * columns) * sizeof(float));
        return;
    }
    Product p = {.rows = rows, .columns = columns, .depth = depth, .a = a + start * rows, .b = b + start * columns,
                 .a_row = 1, .a_step = rows, .b_step = columns, .b_column = 1, .c = c, .c_row = columns};
    product_part(&p, first, end, 0, columns, scratch);
}

static void run_weighing(Team *team, int thread, void *argument)
{
    Gradients *g = argument;
    const Mixture *m = &g->made;
    int64_t half = m->experts * g->slices;
    float *scratch = thread_memory(product_floats());
    (void)team, (void)thread;
    for (int64_t piece; (piece = take_next(&g->counter)) < 2 * half;) {
        int64_t expert = piece % half / g->slices, slice = piece % g->slices;
        if (piece < half && g->to_gate_up)
            weigh(g, expert, slice, m->width, 2 * m->inner, m->rows, g->to_opened, g->to_gate_up, scratch);
        if (piece >= half && g->to_down)
            weigh(g, expert, slice, m->inner, m->width, g->inner, g->back, g->to_down, scratch);
    }
}

static void run_spreading(Team *team, int thread, void *argument)
{
    Gradients *g = argument;
    const Mixture *m = &g->made;
    int64_t first, end;
    share(m->tokens, thread, team_size(team), &first, &end);
    sum_copies(m, m->mixed, m->out, first, end);
    for (int64_t a = first * m->top_k; a < end * m->top_k; a++)
        g->to_weights[a] = g->to_gates[m->places[a]];
}

void etude_mixture_gradients(Gradients *g, int64_t threads)
{
    g->made.block = choose_block(g->made.tokens * g->made.top_k, threads);
    g->slices = 1 + 2 * threads / g->made.experts;
    atomic_init(&g->made.counter, 0);
    atomic_init(&g->counter, 0);
    run_pieces((int)threads, run_sorting, g);
    run_pieces((int)threads, run_returning, g);
    run_pieces((int)threads, run_weighing, g);
    run_pieces((int)threads, run_spreading, g);
}
