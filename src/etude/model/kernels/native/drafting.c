/* Several speculative decoding steps in one call.
 *
 * A step computes the last token of each sequence and the drafts after it, and samples at every position the token
 * that would be sampled there without drafts, with the noise of that position: a draft is accepted ("stands") if it
 * equals that token. Draft layers then run over the accepted positions, and sample the next drafts with the same
 * noise.
 */

#include "drafting.h"

typedef struct {
    const Model *model;
    const Layer *layers;
    const Matrix *head;
    const DraftRun *run;
    int64_t threads;
    char *scratch;
    float *sample_scratch;
    /* By sequence. */
    int64_t *begun;                 /* length at the beginning of the run */
    int64_t *firsts, *counts;       /* its rows in the pass: its last token and drafts; then slots of draft layers */
    int64_t *standing;              /* how many of its rows are accepted tokens */
    int64_t *rooms;                 /* drafts that its layers are to make */
    int64_t *chosen, *last;         /* sequences that draft at a depth, and their rows */
    /* By row of a pass, or of a draft layer. */
    int64_t *tokens, *sequences, *positions, *top_k, *drawn;
    float *hidden, *followed, *reached, *temperatures, *top_p, *min_p, *logits, *logprobs;
    double *noise;
    char *routes;
} Drafting;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t etude_drafting_rows(const DraftRun *run)
{
    return run->count * (1 + run->most_drafts + (run->layers ? run->layers->depth - 1 : 0));
}

static int64_t lay_out(Drafting *d, char *memory)
{
    const Model *m = d->model;
    const DraftRun *run = d->run;
    int64_t used = 0, rows = etude_drafting_rows(run), followed = run->layers ? rows * m->width : 0;
#define PLACE(field, count) \
    do { \
        d->field = (void *)(memory + used); \
        used += ((count) * (int64_t)sizeof *d->field + 63) / 64 * 64; \
    } while (0)
    PLACE(begun, run->count);
    PLACE(firsts, run->count);
    PLACE(counts, run->count);
    PLACE(standing, run->count);
    PLACE(rooms, run->count);
    PLACE(chosen, run->count);
    PLACE(last, run->count);
    PLACE(tokens, rows);
    PLACE(sequences, rows);
    PLACE(positions, rows);
    PLACE(top_k, rows);
    PLACE(drawn, rows);
    PLACE(hidden, rows * m->width);
    PLACE(followed, followed);
    PLACE(reached, followed);
    PLACE(temperatures, rows);
    PLACE(top_p, rows);
    PLACE(min_p, rows);
    PLACE(logits, rows * run->vocabulary);
    PLACE(logprobs, rows);
    PLACE(noise, rows);
    PLACE(routes, rows * (run->route_layers + (run->layers ? run->layers->model->layers : 0)) * m->top_k *
                      run->route_bytes);
#undef PLACE
    return used;
}

int64_t etude_drafting_bytes(const Model *model, const DraftRun *run)
{
    Drafting drafting = {.model = model, .run = run};
    return lay_out(&drafting, NULL);
}

int64_t etude_look_up(const Lookup *lookup, int64_t length, int32_t *tokens, int64_t most)
{
    int64_t best = lookup->shortest - 1, after = length, count = 0;
    for (int64_t i = length - 2; i >= 0 && best < lookup->longest; i--) {
        int64_t same = 0;
        while (same < lookup->longest && same <= i && tokens[i - same] == tokens[length - 1 - same])
            same++;
        if (same > best) {
            best = same;
            after = i + 1;
        }
    }
    for (; count < most && after + count < length; count++)
        tokens[length + count] = tokens[after + count];
    return count;
}

static int32_t *line_of(const DraftRun *run, int64_t n) { return run->tokens + run->lines[n] * run->max_tokens; }

/* Largest number of drafts of sequence n: bounded by `wanted`, by the tokens it may still sample, and by its pages. */
static int64_t room_of(const DraftRun *run, int64_t n)
{
    int64_t length = run->lengths[n];
    int64_t room = smaller(run->limits[n] - length - 1, run->rooms[n] - length);
    room = smaller(room, run->wanted[n]);
    return room > 0 ? room : 0;
}

/* Lays out the next pass; returns its rows. */
static int64_t gather(Drafting *d)
{
    const DraftRun *run = d->run;
    int64_t rows = 0;
    for (int64_t n = 0; n < run->count; n++) {
        int64_t length = run->lengths[n], room = room_of(run, n);
        int32_t *line = line_of(run, n);
        int64_t drafts = run->lookup ? etude_look_up(run->lookup, length, line, room) : smaller(room, run->ready[n]);
        d->firsts[n] = rows;
        d->counts[n] = 1 + drafts;
        for (int64_t j = 0; j <= drafts; j++, rows++) {
            d->tokens[rows] = line[length - 1 + j];
            d->sequences[rows] = n;
            d->positions[rows] = length - 1 + j;
        }
    }
    return rows;
}

static void keep_routes(const Drafting *d, int64_t rows)
{
    const DraftRun *run = d->run;
    size_t bytes = (size_t)(run->route_layers * d->model->top_k * run->route_bytes);
    for (int64_t t = 0; bytes && t < rows; t++) {
        int64_t page = run->tables[d->sequences[t] * run->max_pages + d->positions[t] / PAGE];
        memcpy(run->routes + (size_t)(page * PAGE + d->positions[t] % PAGE) * bytes, d->routes + (size_t)t * bytes, bytes);
    }
}

static void compute(Drafting *d, int64_t rows)
{
    const DraftRun *run = d->run;
    Step step = {rows,      run->max_pages, run->route_layers, run->route_bytes, d->tokens, d->sequences, d->positions,
                 run->tables, d->hidden,    d->routes,       run->adapters};
    etude_forward(d->model, d->layers, &step, d->threads, d->scratch);
    keep_routes(d, rows);
}

/* Samples a token from each of `rows` hidden states; row t is of sequence owners[t], for position places[t]. */
static void draw(Drafting *d, int64_t rows, const float *hidden, const int64_t *owners, const int64_t *places)
{
    const DraftRun *run = d->run;
    for (int64_t t = 0; t < rows; t++) {
        int64_t n = owners[t];
        d->temperatures[t] = run->temperatures[n];
        d->top_p[t] = run->top_p[n];
        d->min_p[t] = run->min_p[n];
        d->top_k[t] = run->top_k[n];
        d->noise[t] = run->noise[n * run->noise_places + places[t] - d->begun[n]];
    }
    Draw asked = {rows,     run->vocabulary, hidden,   d->temperatures, d->top_p,    d->min_p,
                  d->top_k, d->noise,        d->logits, d->drawn,       d->logprobs, NULL};
    etude_sample(&asked, d->head, d->threads, d->sample_scratch);
}

static int ends(const DraftRun *run, int64_t n, int64_t token)
{
    for (int64_t i = run->first_stops[n]; i < run->first_stops[n + 1]; i++)
        if (run->stops[i] == token)
            return 1;
    return 0;
}

/* Appends the accepted tokens to sequence n, up to one that ends it; returns whether there was one. */
static int take(Drafting *d, int64_t n)
{
    const DraftRun *run = d->run;
    int64_t length = run->lengths[n], first = d->firsts[n], drafts = d->counts[n] - 1, right = 0, taken = 0;
    int32_t *line = line_of(run, n);
    int ended = 0;
    while (right < drafts && line[length + right] == d->drawn[first + right])
        right++;
    run->drafted[n] += drafts;
    run->stood[n] += right;
    for (; taken <= right && !ended; taken++) {
        line[length + taken] = (int32_t)d->drawn[first + taken];
        run->logprobs[run->lines[n] * run->max_tokens + length + taken] = d->logprobs[first + taken];
        ended = ends(run, n, d->drawn[first + taken]);
    }
    d->standing[n] = taken;
    run->lengths[n] = length + taken;
    run->ready[n] = 0;
    ended |= run->lengths[n] == run->limits[n];
    d->rooms[n] = ended ? 0 : room_of(run, n);
    return ended;
}

/* Runs one draft layer over prepared rows, with the tokens that are `ahead` of their positions. */
static void run_layer(Drafting *d, int64_t layer, int64_t rows, int64_t ahead, float *hidden)
{
    const DraftRun *run = d->run;
    const DraftLayers *drafts = run->layers;
    for (int64_t t = 0; t < rows; t++) {
        int64_t place = smaller(d->positions[t] + ahead, run->max_tokens - 1);
        d->tokens[t] = line_of(run, d->sequences[t])[place];
    }
    Step step = {rows,      run->max_pages, drafts->model->layers, run->route_bytes, d->tokens, d->sequences,
                 d->positions, run->tables, hidden,                d->routes};
    etude_draft_layer(drafts->model, drafts->layers, drafts->entrances, layer, &step, d->threads, d->scratch);
}

/* Samples the `number`-th draft of the sequences that need one, from their `last` rows of hidden states; returns how
 * many did. */
static int64_t draft(Drafting *d, int64_t number, const float *hidden)
{
    const DraftRun *run = d->run;
    int64_t count = 0, width = d->model->width;
    for (int64_t n = 0; n < run->count; n++) {
        if (d->rooms[n] <= number)
            continue;
        memcpy(d->reached + count * width, hidden + d->last[n] * width, (size_t)width * sizeof(float));
        d->chosen[count] = n;
        d->positions[count] = run->lengths[n] + number;
        count++;
    }
    if (count)
        draw(d, count, d->reached, d->chosen, d->positions);
    for (int64_t i = 0; i < count; i++) {
        int64_t n = d->chosen[i];
        line_of(run, n)[run->lengths[n] + number] = (int32_t)d->drawn[i];
        run->ready[n] = number + 1;
    }
    return count;
}

/* Prepares the accepted slots of sequence n, after those that were carried over; returns the number of rows so far. */
static int64_t follow_one(Drafting *d, int64_t n, int64_t rows)
{
    const DraftRun *run = d->run;
    const DraftLayers *drafts = run->layers;
    int64_t line = run->lines[n], width = d->model->width, start = run->lengths[n] - 1 - d->standing[n];
    int64_t most = drafts->depth - 1, back = drafts->carried_ends[line] == start ? drafts->carried_counts[line] : 0;
    int64_t count = back + d->standing[n], kept = smaller(count, most);
    float *carried = drafts->carried + line * most * width, *to = d->followed + rows * width;
    memcpy(to, carried, (size_t)(back * width) * sizeof(float));
    memcpy(to + back * width, d->hidden + d->firsts[n] * width, (size_t)(d->standing[n] * width) * sizeof(float));
    memcpy(carried, to + (count - kept) * width, (size_t)(kept * width) * sizeof(float));
    drafts->carried_counts[line] = kept;
    drafts->carried_ends[line] = run->lengths[n] - 1;
    d->counts[n] = count;
    d->last[n] = rows + count - 1;
    return rows + count;
}

static void lay_out_slots(Drafting *d)
{
    for (int64_t n = 0; n < d->run->count; n++)
        for (int64_t back = 0; back < d->counts[n]; back++) {
            d->sequences[d->last[n] - back] = n;
            d->positions[d->last[n] - back] = d->run->lengths[n] - 2 - back;
        }
}

/* Runs the draft layers over the accepted slots, and drafts for the sequences that continue. */
static void follow(Drafting *d)
{
    const DraftRun *run = d->run;
    int64_t depth = run->layers->depth, rows = 0, width = d->model->width;
    for (int64_t n = 0; n < run->count; n++)
        rows = follow_one(d, n, rows);
    for (int64_t layer = 0; layer < depth; layer++) {
        lay_out_slots(d);
        run_layer(d, layer, rows, 1 + layer, d->followed);
        draft(d, layer, d->followed);
    }
    for (int64_t number = depth; number < run->most_drafts; number++) {
        int64_t count = 0;
        for (int64_t n = 0; n < run->count; n++) {
            if (d->rooms[n] <= number)
                continue;
            memmove(d->followed + count * width, d->followed + d->last[n] * width, (size_t)width * sizeof(float));
            d->sequences[count] = n;
            d->positions[count] = run->lengths[n] - 1 + number - depth;
            d->last[n] = count++;
        }
        if (!count)
            return;
        run_layer(d, depth - 1, count, depth, d->followed);
        draft(d, number, d->followed);
    }
}

/* Whether every sequence has a page for its next position. */
static int all_have_room(const DraftRun *run)
{
    for (int64_t n = 0; n < run->count; n++)
        if (run->lengths[n] > run->rooms[n])
            return 0;
    return 1;
}

int64_t etude_draft_run(const Model *model, const Layer *layers, const Matrix *head, const DraftRun *run,
                        int64_t threads, char *workspace, char *scratch, float *sample_scratch)
{
    Drafting d = {.model = model, .layers = layers, .head = head, .run = run, .threads = threads,
                  .scratch = scratch, .sample_scratch = sample_scratch};
    int64_t done = 0, computed = 0;
    int ended = 0;
    lay_out(&d, workspace);
    memcpy(d.begun, run->lengths, (size_t)run->count * sizeof *d.begun);
    while (done < run->steps && !ended && all_have_room(run) && (!done || computed < run->positions)) {
        int64_t rows = gather(&d);
        compute(&d, rows);
        for (int64_t t = 0; t < rows; t++)
            d.positions[t]++;       /* from here on the places that are drawn */
        draw(&d, rows, d.hidden, d.sequences, d.positions);
        for (int64_t n = 0; n < run->count; n++)
            ended |= take(&d, n);
        if (run->layers)
            follow(&d);
        done++;
        computed += rows;
    }
    return done;
}
