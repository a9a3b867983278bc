/* The router: softmax over all experts, or sigmoids with selection bias and expert groups (DeepSeek-V3, 2024). */

#include "forward.h"

int64_t route_scratch(const Model *model) { return 2 * model->experts + model->groups; }

static int64_t best_of(int64_t count, const float *scores)
{
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        best = scores[i] > scores[best] ? i : best;
    return best;
}

/* Sets the scores outside the best groups to -inf; groups are ranked by the sum of their two best scores. */
static void keep_groups(const Model *m, float *scores, float *groups)
{
    int64_t size = m->experts / m->groups;
    for (int64_t g = 0; g < m->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            float score = scores[e];
            second = score > first ? first : score > second ? score : second;
            first = score > first ? score : first;
        }
        groups[g] = first + second;
    }
    for (int64_t kept = 0; kept < m->top_groups; kept++)
        groups[best_of(m->groups, groups)] = -INFINITY;
    for (int64_t e = 0; e < m->experts; e++)
        if (groups[e / size] != -INFINITY)
            scores[e] = -INFINITY;
}

/* The selection scores of the experts, from their activated scores. */
static float *rank_experts(const Model *m, const Layer *layer, float *scores, float *scratch)
{
    if (!m->sigmoid)
        return scores;
    for (int64_t e = 0; e < m->experts; e++)
        scratch[e] = scores[e] + layer->score_bias[e];
    if (m->groups > 1)
        keep_groups(m, scratch, scratch + m->experts);
    return scratch;
}

void route_row(const Pass *pass, const Layer *layer, int64_t t, float *scratch)
{
    const Model *m = pass->model;
    const Step *step = pass->step;
    int64_t *chosen = pass->chosen + t * m->top_k, place = (t * step->route_layers + layer->route_layer) * m->top_k;
    float *gates = pass->gates + t * m->top_k, *scores = scratch, sum = 0;
    multiply(&layer->router, 1, pass->normed + t * m->width, scores, 0, NULL, 0);
    (m->sigmoid ? sigmoid : softmax)(m->experts, scores);
    float *ranked = rank_experts(m, layer, scores, scratch + m->experts);
    for (int64_t k = 0; k < m->top_k; k++) {
        int64_t best = best_of(m->experts, ranked);
        chosen[k] = best;
        gates[k] = scores[best];
        sum += gates[k];
        ranked[best] = -INFINITY;
        if (step->route_bytes == 1)
            ((uint8_t *)step->routes)[place + k] = (uint8_t)best;
        else
            ((uint16_t *)step->routes)[place + k] = (uint16_t)best;
    }
    for (int64_t k = 0; k < m->top_k; k++)
        gates[k] = (m->normalise ? gates[k] / sum : gates[k]) * m->gate_scale;
}
