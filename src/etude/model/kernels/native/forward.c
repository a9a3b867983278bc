/* One forward pass over the rows of an engine step: Llama, Qwen2, Qwen3, dense or with experts, and DeepSeek-V3.
 *
 * All threads execute the pass together and divide each phase's work: rows, columns of a product, runs of
 * attention or experts. Keys and values of all rows are stored before any row attends, so that decoding and
 * prefilling are the same computation.
 */

#include "forward.h"

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static Pages pages_of(const Model *model, const Layer *layer, const Step *step)
{
    static float nowhere;       /* measuring only needs to know whether there are values, not their address */
    return (Pages){model->heads, model->kv_heads, model->dim, model->value_dim, step->tables, step->max_pages,
                   layer ? layer->keys : NULL, layer ? layer->values : model->latent ? NULL : &nowhere};
}

static Experts experts_of(const Model *model, const Layer *layer)
{
    Experts experts = {model->experts, model->top_k, model->width, model->expert_size,
                       layer ? layer->gate_up : NULL, layer ? layer->down : NULL};
    if (layer && layer->factors) {
        experts.gate_up_factors = layer->factors + GATE_UP;
        experts.down_factors = layer->factors + DOWN;
    }
    return experts;
}

static float *lowered_of(const Pass *pass, int thread)
{
    return pass->lowered + thread * ADAPTED_ROWS * pass->model->adapter_rank;
}

void add_factors(const Pass *pass, const Layer *layer, int kind, int64_t index, int thread, int threads, Strided from,
                 Strided to)
{
    int64_t first, end;
    if (!pass->adapters)
        return;
    share(pass->step->rows, thread, threads, &first, &end);
    adapt(layer->factors + kind, index, pass->adapters, first, end, from, to, lowered_of(pass, thread));
}

/* Lays the pass out in `memory` (NULL: only measures); returns the bytes that it takes. */
static int64_t lay_out(Pass *pass, int64_t rows, int64_t threads, char *memory)
{
    const Model *m = pass->model;
    Step none = {0};
    Pages pages = pages_of(m, NULL, &none);
    Experts experts = experts_of(m, NULL);
    int64_t used = 0, top_k = m->experts ? m->top_k : 0, inner = larger(m->inner, m->shared_inner);
    int64_t query_rows = m->latent ? rows * m->heads : 0;
#define PLACE(field, count) \
    do { \
        pass->field = (void *)(memory + used); \
        used += ((count) * (int64_t)sizeof *pass->field + 63) / 64 * 64; \
    } while (0)
    pass->private_floats = larger(attention_scratch(&pages), m->experts ? expert_scratch(&experts) : 0);
    pass->private_floats = larger(pass->private_floats, route_scratch(m) + m->dim) / 16 * 16 + 16;
    PLACE(runs, rows);
    PLACE(counters, 2 * m->layers);
    PLACE(chosen, rows * top_k);
    PLACE(order, rows * top_k);
    PLACE(starts, m->experts + 2);
    PLACE(adapters, rows);
    PLACE(lowered, threads * ADAPTED_ROWS * m->adapter_rank);
    PLACE(normed, rows * m->width);
    PLACE(qkv, rows * projected_width(m));
    PLACE(raised, m->query_rank ? query_rows * (m->nope + m->rope) : 0);
    PLACE(queries, query_rows * m->dim);
    PLACE(attended, rows * m->heads * m->value_dim);
    PLACE(headed, query_rows * m->head_value_dim);
    PLACE(wide, rows * 2 * inner);
    PLACE(narrow, rows * inner);
    PLACE(gates, rows * top_k);
    PLACE(mixed, rows * top_k * m->width);
    PLACE(joined, m->drafting ? rows * 2 * m->width : 0);
    PLACE(private, threads * pass->private_floats);
#undef PLACE
    return used;
}

/* Bytes of scratch space for a step of this number of rows. */
int64_t etude_scratch_bytes(const Model *model, int64_t rows, int64_t threads)
{
    Pass pass = {.model = model};
    return lay_out(&pass, rows, threads, NULL);
}

/* Adds biases to queries or normalises them, and rotates them, in place; stores keys and values in their pages. */
static void prepare_row(const Pass *pass, const Layer *layer, const Pages *pages, int64_t t, float *turned)
{
    const Model *m = pass->model;
    int64_t dim = m->dim, position = pass->step->positions[t];
    float *row = pass->qkv + t * projected_width(m);
    const float *cosine = m->cosine + position * dim, *sine = m->signed_sine + position * dim;
    if (layer->qkv_bias)
        add_rows(projected_width(m), layer->qkv_bias, row);
    for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
        float *head = row + h * dim;
        if (layer->query_norm)
            rms_norm(dim, head, h < m->heads ? layer->query_norm : layer->key_norm, m->eps, head);
        rotate(dim, head, cosine, sine, turned);
        memcpy(head, turned, (size_t)dim * sizeof(float));
    }
    const float *key = row + m->heads * dim;
    store_row(pages, pass->step->sequences[t], position, key, key + m->kv_heads * dim);
}

/* Computes the queries of all rows, and stores their keys and values in the pages. */
static void project(Team *team, int thread, const Pass *pass, const Layer *layer, const Pages *pages)
{
    int64_t rows = pass->step->rows, first, end;
    int threads = team_size(team);
    multiply(&layer->qkv, rows, pass->normed, pass->qkv, 0, team, thread);
    wait_for_all(team);
    add_factors(pass, layer, QKV, 0, thread, threads, (Strided){pass->normed, pass->model->width, 0},
                (Strided){pass->qkv, projected_width(pass->model), 0});
    share(rows, thread, threads, &first, &end);
    for (int64_t t = first; t < end; t++)
        prepare_row(pass, layer, pages, t, pass->private + thread * pass->private_floats);
}

static void attend(Team *team, int thread, const Pass *pass, int64_t index)
{
    const Model *m = pass->model;
    const Layer *layer = pass->layers + index;
    int64_t rows = pass->step->rows, stride = m->latent ? m->heads * m->dim : projected_width(m), first, end;
    float *private = pass->private + thread * pass->private_floats;
    Pages pages = pages_of(m, layer, pass->step);
    int threads = team_size(team);
    share(rows, thread, threads, &first, &end);
    for (int64_t t = first; t < end; t++)
        rms_norm(m->width, pass->step->hidden + t * m->width, layer->attention_norm, m->eps,
                 pass->normed + t * m->width);
    wait_for_all(team);
    (m->latent ? enter_latent : project)(team, thread, pass, layer, &pages);
    wait_for_all(team);
    attend_runs(&pages, pass->num_runs, pass->runs, m->latent ? pass->queries : pass->qkv, stride, pass->attended,
                NULL, private, pass->counters + 2 * index, threads);
    wait_for_all(team);
    if (m->latent) {
        leave_latent(team, thread, pass, layer);
        wait_for_all(team);
    }
    float *attended = m->latent ? pass->headed : pass->attended;
    multiply(&layer->out, rows, attended, pass->normed, 0, team, thread);
    wait_for_all(team);
    for (int64_t t = first; t < end; t++)
        add_rows(m->width, pass->normed + t * m->width, pass->step->hidden + t * m->width);
    add_factors(pass, layer, OUT, 0, thread, threads, (Strided){attended, layer->out.inputs, 0},
                (Strided){pass->step->hidden, m->width, 0});
    for (int64_t t = first; t < end; t++)
        rms_norm(m->width, pass->step->hidden + t * m->width, layer->experts_norm, m->eps,
                 pass->normed + t * m->width);
}

/* narrow = swiglu(gate_up(normed)), of one inner width. Needs a barrier before and after. */
static void open_up(Team *team, int thread, const Pass *pass, const Layer *layer, int64_t inner, int is_shared)
{
    int64_t rows = pass->step->rows, first, end;
    int threads = team_size(team);
    multiply(is_shared ? layer->shared_gate_up : layer->gate_up, rows, pass->normed, pass->wide, 0, team, thread);
    wait_for_all(team);
    add_factors(pass, layer, is_shared ? SHARED_GATE_UP : GATE_UP, 0, thread, threads,
                (Strided){pass->normed, pass->model->width, 0}, (Strided){pass->wide, 2 * inner, 0});
    share(rows, thread, threads, &first, &end);
    for (int64_t t = first; t < end; t++) {
        const float *gate = pass->wide + t * 2 * inner;
        swiglu(inner, gate, gate + inner, pass->narrow + t * inner);
    }
}

/* The layer's dense part: hidden += down(swiglu(gate_up(normed))). */
static void feed(Team *team, int thread, const Pass *pass, const Layer *layer)
{
    const Model *m = pass->model;
    int64_t rows = pass->step->rows, first, end;
    int threads = team_size(team);
    wait_for_all(team);
    open_up(team, thread, pass, layer, m->inner, 0);
    wait_for_all(team);
    multiply(layer->down, rows, pass->narrow, pass->normed, 0, team, thread);
    wait_for_all(team);
    add_factors(pass, layer, DOWN, 0, thread, threads, (Strided){pass->narrow, m->inner, 0},
                (Strided){pass->normed, m->width, 0});
    share(rows, thread, threads, &first, &end);
    for (int64_t t = first; t < end; t++)
        add_rows(m->width, pass->normed + t * m->width, pass->step->hidden + t * m->width);
}

/* The layer's experts: hidden += experts(normed) + shared(normed). */
static void consult(Team *team, int thread, const Pass *pass, const Layer *layer, int64_t index)
{
    const Model *m = pass->model;
    int64_t rows = pass->step->rows, first, end;
    int threads = team_size(team);
    float *private = pass->private + thread * pass->private_floats;
    Experts experts = experts_of(m, layer);
    experts.adapters = pass->adapters;
    experts.lowered = lowered_of(pass, thread);
    share(rows, thread, threads, &first, &end);
    for (int64_t t = first; t < end; t++)
        route_row(pass, layer, t, private);
    wait_for_all(team);
    if (thread == 0)
        sort_by_expert(&experts, rows, pass->chosen, pass->order, pass->starts);
    if (m->shared_inner)
        open_up(team, thread, pass, layer, m->shared_inner, 1);
    wait_for_all(team);
    run_experts(&experts, pass->normed, pass->order, pass->starts, pass->mixed, private,
                pass->counters + 2 * index + 1);
    wait_for_all(team);
    for (int64_t t = first; t < end; t++)
        mix(m->top_k, m->width, pass->mixed + t * m->top_k * m->width, NULL, pass->gates + t * m->top_k,
            pass->normed + t * m->width);
    if (m->shared_inner) {
        wait_for_all(team);
        multiply(layer->shared_down, rows, pass->narrow, pass->mixed, 0, team, thread);
        wait_for_all(team);
        add_factors(pass, layer, SHARED_DOWN, 0, thread, threads, (Strided){pass->narrow, m->shared_inner, 0},
                    (Strided){pass->mixed, m->width, 0});
        for (int64_t t = first; t < end; t++)
            add_rows(m->width, pass->mixed + t * m->width, pass->normed + t * m->width);
    }
    for (int64_t t = first; t < end; t++)
        add_rows(m->width, pass->normed + t * m->width, pass->step->hidden + t * m->width);
}

static void run_layer(Team *team, int thread, const Pass *pass, int64_t index)
{
    const Layer *layer = pass->layers + index;
    attend(team, thread, pass, index);
    if (layer->route_layer < 0)
        feed(team, thread, pass, layer);
    else
        consult(team, thread, pass, layer, index);
}

static void run_pass(Team *team, int thread, void *argument)
{
    const Pass *pass = argument;
    const Model *m = pass->model;
    const Step *step = pass->step;
    int64_t width = m->width, first, end;
    share(step->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        memcpy(step->hidden + t * width, m->embedding + step->tokens[t] * width, (size_t)width * sizeof(float));
    for (int64_t l = 0; l < m->layers; l++)
        run_layer(team, thread, pass, l);
    for (int64_t t = first; t < end; t++)
        rms_norm(width, step->hidden + t * width, m->final_norm, m->eps, step->hidden + t * width);
}

static Pass begin(const Model *model, const Layer *layers, const Step *step, int64_t threads, char *scratch)
{
    Pass pass = {.model = model, .layers = layers, .step = step};
    lay_out(&pass, step->rows, threads, scratch);
    memset(pass.counters, 0, (size_t)(2 * model->layers) * sizeof *pass.counters);
    for (int64_t t = 0; step->adapters && t < step->rows; t++)
        pass.adapters[t] = step->adapters[step->sequences[t]];
    if (!step->adapters)
        pass.adapters = NULL;
    pass.num_runs = cut_runs(step->rows, step->sequences, step->positions, pass.runs);
    return pass;
}

void etude_forward(const Model *model, const Layer *layers, const Step *step, int64_t threads, char *scratch)
{
    Pass pass = begin(model, layers, step, threads, scratch);
    run_team((int)threads, run_pass, &pass);
}

typedef struct {
    Pass pass;
    const Entrance *entrance;
    int64_t index;
} DraftPass;

static void run_draft_layer(Team *team, int thread, void *argument)
{
    const DraftPass *drafting = argument;
    const Pass *pass = &drafting->pass;
    const Entrance *entrance = drafting->entrance;
    const Model *m = pass->model;
    const Step *step = pass->step;
    int64_t width = m->width, first, end;
    int threads = team_size(team);
    share(step->rows, thread, threads, &first, &end);
    for (int64_t t = first; t < end; t++) {
        float *joined = pass->joined + t * 2 * width;
        rms_norm(width, m->embedding + step->tokens[t] * width, entrance->token_norm, m->eps, joined);
        rms_norm(width, step->hidden + t * width, entrance->hidden_norm, m->eps, joined + width);
    }
    wait_for_all(team);
    multiply(&entrance->projection, step->rows, pass->joined, step->hidden, 0, team, thread);
    wait_for_all(team);
    run_layer(team, thread, pass, drafting->index);
    for (int64_t t = first; t < end; t++)
        rms_norm(width, step->hidden + t * width, entrance->final_norm, m->eps, step->hidden + t * width);
}

void etude_draft_layer(const Model *model, const Layer *layers, const Entrance *entrances, int64_t index,
                       const Step *step, int64_t threads, char *scratch)
{
    DraftPass drafting = {begin(model, layers, step, threads, scratch), entrances + index, index};
    run_team((int)threads, run_draft_layer, &drafting);
}
