/* Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024).
 *
 * The cache holds one key per position for all heads, [compressed | rotary], of which the compressed part is also
 * the value. A head's key projection is applied to its query, and its value projection to the output of attention.
 */

#include "forward.h"

int64_t projected_width(const Model *m)
{
    if (!m->latent)
        return (m->heads + 2 * m->kv_heads) * m->dim;
    return (m->query_rank ? m->query_rank : m->heads * (m->nope + m->rope)) + m->dim;
}

/* Normalises the compressed part of a row, and stores its key. */
static void compress_row(const Pass *pass, const Layer *layer, const Pages *pages, int64_t t, float *key)
{
    const Model *m = pass->model;
    int64_t position = pass->step->positions[t], width = projected_width(m), rank = m->value_dim;
    float *row = pass->qkv + t * width, *compressed = row + width - m->dim;
    if (m->query_rank)
        rms_norm(m->query_rank, row, layer->query_norm, m->latent_eps, row);
    rms_norm(rank, compressed, layer->key_norm, m->latent_eps, key);
    rotate(m->rope, compressed + rank, m->cosine + position * m->rope, m->signed_sine + position * m->rope, key + rank);
    store_row(pages, pass->step->sequences[t], position, key, NULL);
}

/* Rotates the rotary parts of a row's queries, and scales the queries. */
static BLOCK void finish_queries(const Pass *pass, int64_t t, const float *heads)
{
    const Model *m = pass->model;
    int64_t position = pass->step->positions[t], rank = m->value_dim;
    for (int64_t h = 0; h < m->heads; h++) {
        float *query = pass->queries + (t * m->heads + h) * m->dim;
        rotate(m->rope, heads + h * (m->nope + m->rope) + m->nope, m->cosine + position * m->rope,
               m->signed_sine + position * m->rope, query + rank);
        for (int64_t d = 0; d < m->dim; d++)
            query[d] *= m->query_scale;
    }
}

/* `add_factors` head by head. */
static void adapt_heads(const Pass *pass, const Layer *layer, int kind, int thread, int threads, Strided from, Strided to)
{
    for (int64_t h = 0; h < pass->model->heads; h++, from.values += from.step, to.values += to.step)
        add_factors(pass, layer, kind, h, thread, threads, from, to);
}

void enter_latent(Team *team, int thread, const Pass *pass, const Layer *layer, const Pages *pages)
{
    const Model *m = pass->model;
    int64_t rows = pass->step->rows, head_dim = m->nope + m->rope, first, end;
    int threads = team_size(team);
    Strided heads = {pass->qkv, projected_width(m), head_dim};
    Strided queries = {pass->queries, m->heads * m->dim, m->dim};
    multiply(&layer->qkv, rows, pass->normed, pass->qkv, 0, team, thread);
    wait_for_all(team);
    Strided normed = {pass->normed, m->width, 0};
    add_factors(pass, layer, QKV, 0, thread, threads, normed, heads);
    add_factors(pass, layer, COMPRESS, 0, thread, threads, normed,
                (Strided){pass->qkv + heads.stride - m->dim, heads.stride, 0});
    share(rows, thread, threads, &first, &end);
    for (int64_t t = first; t < end; t++)
        compress_row(pass, layer, pages, t, pass->private + thread * pass->private_floats);
    if (m->query_rank) {
        Strided compressed = {pass->qkv, heads.stride, 0};
        heads = (Strided){pass->raised, m->heads * head_dim, head_dim};
        wait_for_all(team);
        multiply_heads(1, &layer->query_up, rows, compressed, heads, 0, team, thread);
        wait_for_all(team);
        add_factors(pass, layer, QUERY_UP, 0, thread, threads, compressed, heads);
    }
    if (pass->adapters)
        wait_for_all(team);
    multiply_heads(m->heads, layer->key_up, rows, heads, queries, 0, team, thread);
    wait_for_all(team);
    adapt_heads(pass, layer, KEY_UP, thread, threads, heads, queries);
    for (int64_t t = first; t < end; t++)
        finish_queries(pass, t, heads.values + t * heads.stride);
}

void leave_latent(Team *team, int thread, const Pass *pass, const Layer *layer)
{
    const Model *m = pass->model;
    Strided attended = {pass->attended, m->heads * m->value_dim, m->value_dim};
    Strided headed = {pass->headed, m->heads * m->head_value_dim, m->head_value_dim};
    multiply_heads(m->heads, layer->value_up, pass->step->rows, attended, headed, 0, team, thread);
    if (pass->adapters)
        wait_for_all(team);
    adapt_heads(pass, layer, VALUE_UP, thread, team_size(team), attended, headed);
}
