/* A mixture's experts: rows are sorted by expert, each expert computes its rows at once, and each row sums the
 * results of its experts in the order in which they were chosen. */

#include "common.h"

int64_t expert_scratch(const Experts *experts)
{
    int64_t widest = experts->width > experts->inner ? experts->width : experts->inner;
    return EXPERT_ROWS * (2 * widest + 2 * experts->inner);
}

void sort_by_expert(const Experts *experts, int64_t rows, const int64_t *chosen, int64_t *order, int64_t *starts)
{
    int64_t assignments = rows * experts->top_k;
    memset(starts, 0, (size_t)(experts->count + 2) * sizeof(int64_t));
    for (int64_t a = 0; a < assignments; a++)
        starts[chosen[a] + 2]++;
    for (int64_t e = 2; e < experts->count + 2; e++)
        starts[e] += starts[e - 1];
    for (int64_t a = 0; a < assignments; a++)
        order[starts[chosen[a] + 1]++] = a;
}

static void run_chunk(const Experts *experts, int64_t expert, int64_t count, const float *x, const int64_t *order,
                      float *mixed, float *scratch)
{
    int64_t width = experts->width, inner = experts->inner, widest = width > inner ? width : inner;
    float *gathered = scratch, *gate_up = gathered + EXPERT_ROWS * widest, *out = gate_up + EXPERT_ROWS * 2 * inner;
    int64_t adapters[EXPERT_ROWS];
    for (int64_t i = 0; experts->adapters && i < count; i++)
        adapters[i] = experts->adapters[order[i] / experts->top_k];
    for (int64_t i = 0; i < count; i++)
        memcpy(gathered + i * width, x + order[i] / experts->top_k * width, (size_t)width * sizeof(float));
    multiply(experts->gate_up + expert, count, gathered, gate_up, 0, NULL, 0);
    if (experts->adapters)
        adapt(experts->gate_up_factors, expert, adapters, 0, count, (Strided){gathered, width, 0},
              (Strided){gate_up, 2 * inner, 0}, experts->lowered);
    for (int64_t i = 0; i < count; i++)
        swiglu(inner, gate_up + i * 2 * inner, gate_up + i * 2 * inner + inner, gathered + i * inner);
    multiply(experts->down + expert, count, gathered, out, 0, NULL, 0);
    if (experts->adapters)
        adapt(experts->down_factors, expert, adapters, 0, count, (Strided){gathered, inner, 0},
              (Strided){out, width, 0}, experts->lowered);
    for (int64_t i = 0; i < count; i++)
        memcpy(mixed + order[i] * width, out + i * width, (size_t)width * sizeof(float));
}

void run_experts(const Experts *experts, const float *x, const int64_t *order, const int64_t *starts, float *mixed,
                 float *scratch, atomic_long *counter)
{
    int64_t piece = 0, mine = take_next(counter);
    for (int64_t e = 0; e < experts->count; e++)
        for (int64_t first = starts[e]; first < starts[e + 1]; first += EXPERT_ROWS, piece++) {
            if (piece != mine)
                continue;
            int64_t left = starts[e + 1] - first, count = left < EXPERT_ROWS ? left : EXPERT_ROWS;
            run_chunk(experts, e, count, x, order + first, mixed, scratch);
            mine = take_next(counter);
        }
}

BLOCK void mix(int64_t top_k, int64_t width, const float *mixed, const int64_t *places, const float *weights, float *out)
{
    for (int64_t j = 0; j < width; j++)
        out[j] = 0;
    for (int64_t k = 0; k < top_k; k++) {
        const float *expert = mixed + (places ? places[k] : k) * width;
        for (int64_t j = 0; j < width; j++)
            out[j] += weights[k] * expert[j];
    }
}
