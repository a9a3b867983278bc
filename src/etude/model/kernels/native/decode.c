/* Several decoding steps in one call: each token that is drawn is what the next step computes. */

#include "forward.h"
#include "sampling.h"

typedef struct {
    int64_t steps;                  /* at most */
    const int64_t *first_stops;     /* [rows + 1] where the tokens that end each row begin in `stops` */
    const int64_t *stops;
} DecodeRun;

static int ends(const DecodeRun *run, int64_t row, int64_t token)
{
    for (int64_t i = run->first_stops[row]; i < run->first_stops[row + 1]; i++)
        if (run->stops[i] == token)
            return 1;
    return 0;
}

/* Steps until a row ends, or all of them; returns how many. `tokens` and `positions` [rows], the first step's, are
 * written over; `step` has places for routes [steps, rows, layers, top_k], `draw` for noise, tokens and
 * log-probabilities [steps, rows]. Both scratches are those of a single step. */
int64_t etude_decode(const Model *model, const Layer *layers, const Matrix *head, const Step *step, const Draw *draw,
                     const DecodeRun *run, int64_t *tokens, int64_t *positions, int64_t threads, char *scratch,
                     float *sample_scratch)
{
    int64_t rows = step->rows, route_bytes = rows * step->route_layers * model->top_k * step->route_bytes;
    Step now = *step;
    Draw drawn = *draw;
    now.tokens = tokens;
    now.positions = positions;
    for (int64_t done = 0; done < run->steps;) {
        int ended = 0;
        etude_forward(model, layers, &now, threads, scratch);
        etude_sample(&drawn, head, threads, sample_scratch);
        done++;
        for (int64_t t = 0; t < rows; t++) {
            tokens[t] = drawn.tokens[t];
            positions[t]++;
            ended |= ends(run, t, tokens[t]);
        }
        if (ended)
            return done;
        now.routes = (char *)now.routes + route_bytes;
        drawn.draws += rows;
        drawn.tokens += rows;
        drawn.logprobs += rows;
    }
    return run->steps;
}
