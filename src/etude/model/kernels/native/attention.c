/* Attention over paged keys and values.
 *
 * Keys are transposed within a page, [dim, PAGE], so that the scores of its positions are one vector. Every row
 * processes its positions in blocks of BLOCK_PAGES pages from position 0 on, with a running maximum and sum
 * (Milakov and Gimelshein 2018): in the same steps whether it is decoded alone or prefilled with others, and
 * however a prompt is cut into chunks. Rows of one sequence share the pages that are in the processor's caches.
 *
 * Latent attention (one key head for many query heads, a value is the beginning of its key) transposes each
 * block's values once for all query rows.
 */

#include "common.h"

#define BLOCK_PAGES 4
#define POSITIONS (BLOCK_PAGES * PAGE)
#define FEW_ROWS 16             /* up to this number, memory is slower than arithmetic */
#define LATENT_ROWS 128         /* query rows that share a transposed block: more would not fit into the cache */

typedef struct {
    const float *keys[BLOCK_PAGES], *values[BLOCK_PAGES];
    const float *next_keys[BLOCK_PAGES], *next_values[BLOCK_PAGES];    /* of the next block, to be prefetched */
    int64_t positions;          /* that any row of the run sees, at most POSITIONS */
} Block;

typedef struct {
    float highest, sum;
} Softmax;

/* The query heads of each key head that are computed together. */
typedef struct {
    int64_t first, count;
} Heads;

void store_row(const Pages *pages, int64_t sequence, int64_t position, const float *keys, const float *values)
{
    int64_t page = pages->tables[sequence * pages->max_pages + position / PAGE], slot = position % PAGE;
    int64_t dim = pages->dim;
    for (int64_t h = 0; h < pages->kv_heads; h++) {
        int64_t place = (page * pages->kv_heads + h) * dim * PAGE;
        for (int64_t d = 0; d < dim; d++)
            pages->keys[place + d * PAGE + slot] = keys[h * dim + d];
        if (pages->values)
            memcpy(pages->values + place + slot * dim, values + h * dim, (size_t)dim * sizeof(float));
    }
}

int64_t cut_runs(int64_t rows, const int64_t *sequences, const int64_t *positions, Run *runs)
{
    int64_t count = 0;
    for (int64_t t = 0; t < rows; t++) {
        Run *last = runs + count - 1;
        int follows = count && last->sequence == sequences[t] && last->first_position + last->count == positions[t];
        if (follows && last->count < MAX_RUN)
            last->count++;
        else
            runs[count++] = (Run){sequences[t], t, 1, positions[t]};
    }
    return count;
}

/* Most query rows of one key head that are computed together. */
static int64_t most_rows(const Pages *pages)
{
    int64_t rows = MAX_RUN * (pages->heads / pages->kv_heads);
    return pages->values || rows < LATENT_ROWS ? rows : LATENT_ROWS;
}

int64_t attention_scratch(const Pages *pages)
{
    int64_t rows = most_rows(pages), turned = pages->values ? 0 : POSITIONS * pages->value_dim;
    return turned + rows * POSITIONS + (rows > FEW_ROWS ? rows : FEW_ROWS) * (pages->dim + pages->value_dim + 2);
}

/* scores[rows, POSITIONS] of one band of query rows [rows, dim] against `vectors` vectors of positions. */
INLINE void score_tile(const int rows, const int vectors, int64_t dim, const float *queries, const Block *block,
                       int64_t first, float *scores)
{
    vector sums[ROWS][COLUMNS];
    const float *keys[COLUMNS], *next[COLUMNS];
    for (int v = 0; v < vectors; v++) {
        int64_t page = (first + v * LANES) / PAGE, offset = (first + v * LANES) % PAGE;
        keys[v] = block->keys[page] + offset;
        next[v] = block->next_keys[page] + offset;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = (vector){0};
    for (int64_t d = 0; d < dim; d++)
        for (int v = 0; v < vectors; v++) {
            __builtin_prefetch(next[v] + d * PAGE, 0, 2);
            vector key = load(keys[v] + d * PAGE);
            for (int r = 0; r < rows; r++)
                sums[r][v] = add_product(sums[r][v], key, splat(queries[r * dim + d]));
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            store(scores + r * POSITIONS + first + v * LANES, sums[r][v]);
}

INLINE void score_band(const int rows, int64_t dim, const float *queries, const Block *block, float *scores)
{
    int64_t first = 0, end = (block->positions + LANES - 1) / LANES * LANES;
    for (; first + COLUMNS * LANES <= end; first += COLUMNS * LANES)
        score_tile(rows, COLUMNS, dim, queries, block, first, scores);
    for (; first < end; first += LANES)
        score_tile(rows, 1, dim, queries, block, first, scores);
}

/* out[rows, dim] += weights[rows, POSITIONS] values, position by position, for `vectors` vectors of columns. */
INLINE void value_tile(const int rows, const int vectors, int64_t dim, const float *weights, const Block *block,
                       float *out)
{
    vector sums[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = load(out + r * dim + v * LANES);
    for (int64_t page = 0; page * PAGE < block->positions; page++) {
        int64_t left = block->positions - page * PAGE, count = left < PAGE ? left : PAGE;
        for (int64_t j = 0; j < count; j++)
            for (int v = 0; v < vectors; v++) {
                __builtin_prefetch(block->next_values[page] + j * dim + v * LANES, 0, 2);
                vector value = load(block->values[page] + j * dim + v * LANES);
                for (int r = 0; r < rows; r++) {
                    vector weight = splat(weights[r * POSITIONS + page * PAGE + j]);
                    sums[r][v] = add_product(sums[r][v], value, weight);
                }
            }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            store(out + r * dim + v * LANES, sums[r][v]);
}

/* The columns beyond the last whole vector. */
static BLOCK void value_rest(int64_t rows, int64_t dim, int64_t first, const float *weights, const Block *block,
                             float *out)
{
    int64_t left = dim - first;
    for (int64_t r = 0; r < rows; r++) {
        vector sums = load_some(out + r * dim + first, left);
        for (int64_t j = 0; j < block->positions; j++) {
            vector value = load_some(block->values[j / PAGE] + j % PAGE * dim + first, left);
            sums = add_product(sums, value, splat(weights[r * POSITIONS + j]));
        }
        store_some(out + r * dim + first, sums, left);
    }
}

/* The block, restricted to the columns of its values from `first` on. */
INLINE Block shift(const Block *block, int64_t first)
{
    Block shifted = *block;
    for (int page = 0; page < BLOCK_PAGES; page++) {
        shifted.values[page] += first;
        shifted.next_values[page] += first;
    }
    return shifted;
}

INLINE void value_band(const int rows, int64_t dim, const float *weights, const Block *block, float *out)
{
    int64_t d = 0;
    Block shifted;
    for (; d + COLUMNS * LANES <= dim; d += COLUMNS * LANES) {
        shifted = shift(block, d);
        value_tile(rows, COLUMNS, dim, weights, &shifted, out + d);
    }
    for (; COLUMNS > 2 && d + 2 * LANES <= dim; d += 2 * LANES) {
        shifted = shift(block, d);
        value_tile(rows, 2, dim, weights, &shifted, out + d);
    }
    for (; d + LANES <= dim; d += LANES) {
        shifted = shift(block, d);
        value_tile(rows, 1, dim, weights, &shifted, out + d);
    }
    if (d < dim)
        value_rest(rows, dim, d, weights, block, out);
}

/* Turns the scores of one row in a block into weights, and rescales the sums so far to the new maximum. `seen`:
 * positions of the block that the row attends to; the weights of later ones are 0. */
static BLOCK void weigh(int64_t seen, int64_t positions, float *scores, Softmax *state, int64_t dim, float *out)
{
    if (seen <= 0) {
        memset(scores, 0, (size_t)positions * sizeof(float));
        return;
    }
    int64_t end = (seen + LANES - 1) / LANES * LANES, count = seen < POSITIONS ? seen : POSITIONS;
    for (int64_t j = count; j < POSITIONS; j++)
        scores[j] = -INFINITY;
    vector most = splat(state->highest), sums[COLUMNS] = {{0}}, zero = {0};
    for (int64_t j = 0; j < end && j < POSITIONS; j += LANES) {
        vector part = load(scores + j);
        most = choose(part > most, part, most);
    }
    float highest = largest(most);
    if (highest > state->highest) {
        float lanes[LANES];
        store(lanes, exponential(splat(state->highest - highest)));
        for (int64_t d = 0; d < dim; d++)
            out[d] *= lanes[0];
        state->sum *= lanes[0];
        state->highest = highest;
    }
    for (int64_t j = 0; j < POSITIONS; j += COLUMNS * LANES)
        for (int v = 0; v < COLUMNS; v++) {
            vector part = load(scores + j + v * LANES);
            vector weight = choose(part == splat(-INFINITY), zero, exponential(part - splat(highest)));
            store(scores + j + v * LANES, weight);
            sums[v] += weight;
        }
    for (int v = 1; v < COLUMNS; v++)
        sums[0] += sums[v];
    state->sum += add_up(sums[0]);
}

/* All rows [rows, dim] of a run on one block, `group` of each position. `first_seen`: positions of the block that
 * the first of them sees. */
static void attend_block(const Pages *pages, int64_t rows, int64_t group, const float *queries, const Block *block,
                         int64_t first_seen, float *scores, Softmax *states, float *sums)
{
    int64_t dim = pages->dim, value_dim = pages->value_dim;
    for (int64_t r = 0; r < rows; r += ROWS) {
        const float *from = queries + r * dim;
        switch (rows - r) {
        case 1: score_band(1, dim, from, block, scores + r * POSITIONS); break;
        case 2: score_band(2, dim, from, block, scores + r * POSITIONS); break;
        case 3: score_band(3, dim, from, block, scores + r * POSITIONS); break;
#if ROWS > 4
        case 4: score_band(4, dim, from, block, scores + r * POSITIONS); break;
        case 5: score_band(5, dim, from, block, scores + r * POSITIONS); break;
#endif
        default: score_band(ROWS, dim, from, block, scores + r * POSITIONS); break;
        }
    }
    for (int64_t r = 0; r < rows; r++)
        weigh(first_seen + r / group, block->positions, scores + r * POSITIONS, states + r, value_dim,
              sums + r * value_dim);
    for (int64_t r = 0; r < rows; r += ROWS) {
        const float *weights = scores + r * POSITIONS;
        float *out = sums + r * value_dim;
        switch (rows - r) {
        case 1: value_band(1, value_dim, weights, block, out); break;
        case 2: value_band(2, value_dim, weights, block, out); break;
        case 3: value_band(3, value_dim, weights, block, out); break;
#if ROWS > 4
        case 4: value_band(4, value_dim, weights, block, out); break;
        case 5: value_band(5, value_dim, weights, block, out); break;
#endif
        default: value_band(ROWS, value_dim, weights, block, out); break;
        }
    }
}

static void find_block(const Pages *pages, const Run *run, int64_t head, int64_t first, Block *block)
{
    const int32_t *table = pages->tables + run->sequence * pages->max_pages;
    int64_t length = run->first_position + run->count - first, size = pages->dim * PAGE;
    block->positions = length < POSITIONS ? length : POSITIONS;
    for (int64_t p = 0; p < BLOCK_PAGES; p++) {
        /* Pages after the end are never read. */
        int64_t place = p * PAGE < block->positions ? (table[first / PAGE + p] * pages->kv_heads + head) * size : 0;
        block->keys[p] = pages->keys + place;
        block->values[p] = (pages->values ? pages->values : pages->keys) + place;
    }
}

/* Latent attention: the block's values, which are the beginnings of its keys [dim, PAGE], become
 * [POSITIONS, value_dim] in `turned`. */
static void turn_values(const Pages *pages, Block *block, float *turned)
{
    int64_t dim = pages->value_dim;
    for (int64_t p = 0; p * PAGE < block->positions; p++) {
        float *to = turned + p * PAGE * dim;
        for (int64_t j = 0; j < PAGE; j++)
            for (int64_t d = 0; d < dim; d++)
                to[j * dim + d] = block->keys[p][d * PAGE + j];
        block->values[p] = to;
    }
}

static BLOCK void scale_query(int64_t dim, const float *query, float *out)
{
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t d = 0; d < dim; d++)
        out[d] = query[d] * scale;
}

static BLOCK void finish_row(int64_t dim, const float *sums, float total, float *out)
{
    for (int64_t d = 0; d < dim; d++)
        out[d] = sums[d] / total;
}

/* State of a run for one key head: scaled query rows, running sums, softmax states. */
typedef struct {
    float *scaled, *sums;
    Softmax *states;
} Part;

static void begin_part(const Pages *pages, const Run *run, int64_t head, Heads heads, const float *queries,
                       int64_t stride, const Part *part)
{
    int64_t dim = pages->dim, first = head * (pages->heads / pages->kv_heads) + heads.first;
    int64_t rows = run->count * heads.count;
    for (int64_t r = 0; r < rows; r++) {
        int64_t query_head = first + r % heads.count;
        const float *query = queries + (run->first_row + r / heads.count) * stride + query_head * dim;
        scale_query(dim, query, part->scaled + r * dim);
        part->states[r] = (Softmax){-INFINITY, 0};
    }
    memset(part->sums, 0, (size_t)(rows * pages->value_dim) * sizeof(float));
}

static void finish_part(const Pages *pages, const Run *run, int64_t head, Heads heads, const Part *part, float *out,
                        float *log_sums)
{
    int64_t dim = pages->value_dim, first = head * (pages->heads / pages->kv_heads) + heads.first;
    for (int64_t r = 0; r < run->count * heads.count; r++) {
        int64_t place = (run->first_row + r / heads.count) * pages->heads + first + r % heads.count;
        finish_row(dim, part->sums + r * dim, part->states[r].sum, out + place * dim);
        if (log_sums)
            log_sums[place] = part->states[r].highest + logf(part->states[r].sum);
    }
}

/* Computes the key heads `first_head` to `end_head`, and for each the query heads `heads`. */
static void attend_run(const Pages *pages, const Run *run, int64_t first_head, int64_t end_head, Heads heads,
                       const float *queries, int64_t stride, float *out, float *log_sums, float *scratch)
{
    int64_t dim = pages->dim, value_dim = pages->value_dim, rows = run->count * heads.count;
    int64_t end = run->first_position + run->count;
    /* Few rows are bound by memory, and a page's heads are contiguous; many rows need one head's pages in the cache. */
    int64_t together = rows <= FEW_ROWS ? FEW_ROWS / rows : 1;
    float *turned = scratch, *scores = turned + (pages->values ? 0 : POSITIONS * value_dim);
    float *rest = scores + most_rows(pages) * POSITIONS;
    for (int64_t h = first_head; h < end_head; h += together) {
        Part parts[FEW_ROWS];
        int64_t count = end_head - h < together ? end_head - h : together;
        for (int64_t i = 0; i < count; i++) {
            float *from = rest + i * rows * (dim + value_dim + 2), *sums = from + rows * dim;
            parts[i] = (Part){from, sums, (Softmax *)(sums + rows * value_dim)};
            begin_part(pages, run, h + i, heads, queries, stride, parts + i);
        }
        for (int64_t first = 0; first < end; first += POSITIONS)
            for (int64_t i = 0; i < count; i++) {
                Block block, next;
                int64_t ahead = first / POSITIONS * count + i + 1, later = ahead / count * POSITIONS;
                find_block(pages, run, h + i, first, &block);
                find_block(pages, run, h + ahead % count, later < end ? later : first, &next);
                memcpy(block.next_keys, next.keys, sizeof next.keys);
                memcpy(block.next_values, next.values, sizeof next.values);
                if (!pages->values)
                    turn_values(pages, &block, turned);
                attend_block(pages, rows, heads.count, parts[i].scaled, &block, run->first_position + 1 - first,
                             scores, parts[i].states, parts[i].sums);
            }
        for (int64_t i = 0; i < count; i++)
            finish_part(pages, run, h + i, heads, parts + i, out, log_sums);
    }
}

void attend_runs(const Pages *pages, int64_t num_runs, const Run *runs, const float *queries, int64_t stride,
                 float *out, float *log_sums, float *scratch, atomic_long *counter, int threads)
{
    int64_t group = pages->heads / pages->kv_heads, item, slices = 1;
    if (num_runs < 4 * threads)
        slices = pages->values ? pages->kv_heads : group < threads ? group : threads;
    while ((item = take_next(counter)) < num_runs * slices) {
        const Run *run = runs + item / slices;
        int64_t slice = item % slices, first, end;
        share(pages->values ? pages->kv_heads : group, (int)slice, (int)slices, &first, &end);
        if (pages->values) {
            attend_run(pages, run, first, end, (Heads){0, group}, queries, stride, out, log_sums, scratch);
            continue;
        }
        int64_t most = LATENT_ROWS / run->count;
        for (; first < end; first += most) {
            Heads heads = {first, end - first < most ? end - first : most};
            attend_run(pages, run, 0, 1, heads, queries, stride, out, log_sums, scratch);
        }
    }
}
