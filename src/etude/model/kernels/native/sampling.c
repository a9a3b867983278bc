/* Sampling: the output head, temperature, truncation, and inversion of the cumulative distribution. */

#include "sampling.h"

#include <stdlib.h>

#define STRETCH 256     /* tokens per block: the sum of a block decides whether it is searched */

typedef struct {
    const Draw *draw;
    const Matrix *head;
    float *scratch;                 /* [threads, 4 vocabulary] */
} Sampling;

typedef struct {
    float mass;
    int32_t token;
} Candidate;

int64_t etude_sample_floats(int64_t vocabulary, int64_t threads) { return threads * 4 * (vocabulary + 16); }

/* Orders by descending mass, then by ascending token id. */
static int compare(const void *a, const void *b)
{
    const Candidate *left = a, *right = b;
    if (left->mass != right->mass)
        return left->mass < right->mass ? 1 : -1;
    return left->token < right->token ? -1 : 1;
}

static int64_t collect(int64_t size, const float *masses, float least, Candidate *candidates)
{
    int64_t count = 0;
    for (int64_t j = 0; j < size; j++) {
        candidates[count] = (Candidate){masses[j], (int32_t)j};
        count += masses[j] >= least;
    }
    return count;
}

/* Applies top-k, top-p and min-p: sets the masses of excluded tokens to 0 and returns the sum of the rest. The
 * largest mass is 1. To sort few tokens, only those above a bound are; it is lowered until they suffice. */
static double truncate_masses(int64_t size, double total, int64_t top_k, float top_p, float min_p, float *masses,
                              Candidate *candidates)
{
    int64_t count = 0, kept = 0;
    for (float least = 0x1p-6f;; least *= 0x1p-12f) {
        int all = least < 1e-30f;
        float bound = all ? 0 : least;
        count = collect(size, masses, bound > min_p ? bound : min_p, candidates);
        double held = 0;
        for (int64_t i = 0; i < count; i++)
            held += candidates[i].mass;
        if (all || bound <= min_p || (top_k && count >= top_k) || (top_p < 1 && held >= top_p * total))
            break;
    }
    qsort(candidates, (size_t)count, sizeof *candidates, compare);
    double sum = 0;
    memset(masses, 0, (size_t)size * sizeof(float));
    for (; kept < count && !(top_k && kept >= top_k) && (top_p >= 1 || sum < top_p * total); kept++) {
        masses[candidates[kept].token] = candidates[kept].mass;
        sum += candidates[kept].mass;
    }
    return sum;
}

/* The first token whose cumulative mass exceeds `share` of the total. Its mass is never 0, except if masses are NaN. */
static int64_t invert(int64_t size, const float *masses, double share)
{
    double total = 0, before = 0;
    for (int pass = 0; pass < 2; pass++) {
        double threshold = share * total, cumulative = 0;
        for (int64_t first = 0; first < size; first += STRETCH) {
            int64_t end = first + STRETCH < size ? first + STRETCH : size, last = -1;
            double here = 0;
            for (int64_t j = first; j < end; j++)
                here += masses[j];
            before = cumulative;
            cumulative += here;
            if (!pass || !(cumulative > threshold))
                continue;
            for (int64_t j = first; j < end; j++) {
                before += masses[j];
                last = masses[j] > 0 ? j : last;
                if (before > threshold)
                    break;
            }
            return last;
        }
        total = cumulative;
    }
    for (int64_t j = size; j-- > 0;)
        if (masses[j] > 0)
            return j;
    return 0;
}

static void draw_row(const Draw *draw, int64_t t, float *scratch)
{
    int64_t size = draw->vocabulary;
    float *row = draw->logits + t * size, *scaled = scratch, *masses = scaled + size, highest, log_sum;
    float temperature = draw->temperatures[t];
    int cut = draw->top_k[t] > 0 || draw->top_p[t] < 1 || draw->min_p[t] > 0;
    for (int64_t j = 0; j < size; j++)
        scaled[j] = temperature > 0 && temperature != 1 ? row[j] / temperature : row[j];
    normaliser(size, scaled, &highest, &log_sum, masses);
    int64_t chosen = 0;
    if (temperature > 0) {
        if (cut)
            log_sum = (float)log(truncate_masses(size, exp((double)log_sum), draw->top_k[t], draw->top_p[t],
                                                 draw->min_p[t], masses, (Candidate *)(masses + size)));
        chosen = invert(size, masses, draw->draws[t]);
    } else {
        while (chosen < size - 1 && scaled[chosen] != highest)
            chosen++;
    }
    draw->tokens[t] = chosen;
    draw->logprobs[t] = (scaled[chosen] - highest) - log_sum;
    if (draw->raw_logprobs) {
        normaliser(size, row, &highest, &log_sum, NULL);
        draw->raw_logprobs[t] = (row[chosen] - highest) - log_sum;
    }
}

static void run_sampling(Team *team, int thread, void *argument)
{
    const Sampling *sampling = argument;
    const Draw *draw = sampling->draw;
    int64_t first, end;
    multiply(sampling->head, draw->rows, draw->hidden, draw->logits, 0, team, thread);
    wait_for_all(team);
    share(draw->rows, thread, team_size(team), &first, &end);
    for (int64_t t = first; t < end; t++)
        draw_row(draw, t, sampling->scratch + thread * 4 * (draw->vocabulary + 16));
}

void etude_sample(const Draw *draw, const Matrix *head, int64_t threads, float *scratch)
{
    Sampling sampling = {draw, head, scratch};
    run_team((int)threads, run_sampling, &sampling);
}
