/* Causal attention over packed sequences with gradients, without storing a sequence's scores.
 *
 * Blocks of QUERIES rows are combined with blocks of KEYS positions: in the forward pass with a running maximum and
 * sum, in the backward pass with the stored log-sum-exp, from which each block's weights are recomputed (Dao et al.
 * 2022; Dao 2023). A sequence's keys and values are transposed once per key head. Each pair of a sequence and a key
 * head is computed by one thread: the order of sums is independent of the number of threads.
 */

#include "tiles.h"

#define QUERIES 24
#define KEYS 64
#define PADDED(size) (((size) + LANES - 1) / LANES * LANES)

typedef struct {
    int64_t sequences, heads, kv_heads, dim, value_dim;
    const int64_t *starts;      /* [sequences + 1] */
    const int64_t *unused;      /* [sequences]: rows at the start of each whose results are not used */
    float scale;
    const float *queries, *keys, *values;       /* row t begins at t * its stride; heads lie side by side */
    int64_t query_row, key_row, value_row;
    float *out;                 /* [rows, heads, value_dim] */
    float *log_sums;            /* [rows, heads] */
    const float *to_out;        /* gradients, of the shapes of out, queries, keys and values, without gaps */
    float *to_queries, *to_keys, *to_values;
    atomic_long counter;
} Flash;

/* A sequence and a key head; queries are computed from `query` on. */
typedef struct {
    int64_t first, length, kv_head, query;
} Part;

static Part find_part(const Flash *f, int64_t number)
{
    int64_t sequence = number / f->kv_heads;
    return (Part){f->starts[sequence], f->starts[sequence + 1] - f->starts[sequence], number % f->kv_heads,
                  f->unused[sequence] / QUERIES * QUERIES};
}

/* Blocks [length / KEYS][dim][KEYS] of rows that lie `row` apart, with zeros behind the last. */
static void turn_rows(int64_t length, int64_t dim, const float *from, int64_t row, float *to)
{
    for (int64_t first = 0; first < length; first += KEYS, to += dim * KEYS) {
        int64_t count = length - first < KEYS ? length - first : KEYS;
        if (count < KEYS)
            memset(to, 0, (size_t)(dim * KEYS) * sizeof(float));
        for (int64_t block = 0; block < dim; block += 16)
            for (int64_t t = 0; t < count; t++)
                for (int64_t d = block; d < dim && d < block + 16; d++)
                    to[d * KEYS + t] = from[(first + t) * row + d];
    }
}

/* [rows][PADDED(dim)] of rows that lie `row` apart. */
static void copy_rows(int64_t rows, int64_t dim, const float *from, int64_t row, float *to)
{
    int64_t padded = PADDED(dim);
    for (int64_t t = 0; t < rows; t++, to += padded) {
        memcpy(to, from + t * row, (size_t)dim * sizeof(float));
        for (int64_t d = dim; d < padded; d++)
            to[d] = 0;
    }
}

/* Positions of a block of keys that any of `rows` queries from `query` on attends to, rounded up to vectors. */
INLINE int64_t seen(int64_t query, int64_t rows, int64_t key)
{
    int64_t count = query + rows - key;
    return count < KEYS ? PADDED(count) : KEYS;
}

/* How many of the positions from `key` on a query attends to, at most `columns`. */
INLINE int64_t visible(int64_t query, int64_t key, int64_t columns)
{
    int64_t count = query - key + 1;
    return count < 0 ? 0 : count < columns ? count : columns;
}

INLINE integers lanes_before(int64_t count)
{
    integers lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    return lane < (integers)((integers){0} + (int32_t)count);
}

/* Turns a row of scores into weights, and rescales the earlier sums to the new maximum. */
INLINE void weigh_row(float *row, int64_t columns, int64_t limit, float scale, float *highest, float *sums,
                      int64_t width, float *out)
{
    vector most = splat(-INFINITY), total;
    for (int64_t j = 0; j < columns; j += LANES) {
        vector score = load(row + j) * splat(scale);
        if (j + LANES > limit)
            score = choose(lanes_before(limit - j), score, splat(-INFINITY));
        store(row + j, score);
        most = choose(score > most, score, most);
    }
    float top = largest(most);
    total = load(sums);
    if (top > *highest) {
        float factor = *highest == -INFINITY ? 0 : expf(*highest - top);
        *highest = top;
        total *= splat(factor);
        for (int64_t d = 0; d < width; d += LANES)
            store(out + d, load(out + d) * splat(factor));
    }
    for (int64_t j = 0; j < columns; j += LANES) {
        vector mass = exponential(load(row + j) - splat(*highest));
        if (j + LANES > limit)
            mass = choose(lanes_before(limit - j), mass, splat(0));
        store(row + j, mass);
        total += mass;
    }
    store(sums, total);
}

static BLOCK void attend_block(const Flash *f, Part part, int64_t head, int64_t query, int64_t rows,
                               const float *turned_keys, const float *values, float *scratch)
{
    int64_t width = PADDED(f->value_dim), last = query + rows;
    float *scores = scratch, *sums = scores + QUERIES * KEYS, *out = sums + QUERIES * LANES;
    float highest[QUERIES];
    int64_t row = part.first + query;
    Left queries = {f->queries + row * f->query_row + head * f->dim, f->query_row, 1};
    memset(sums, 0, (size_t)(QUERIES * LANES + rows * width) * sizeof(float));
    for (int64_t r = 0; r < rows; r++)
        highest[r] = -INFINITY;
    for (int64_t key = 0; key < last; key += KEYS) {
        int64_t columns = seen(query, rows, key);
        small_product(rows, columns, f->dim, queries, turned_keys + key * f->dim, KEYS, scores, KEYS, SET);
        for (int64_t r = 0; r < rows; r++) {
            int64_t limit = visible(query + r, key, columns);
            if (limit)
                weigh_row(scores + r * KEYS, columns, limit, f->scale, highest + r, sums + r * LANES, width,
                          out + r * width);
            else
                memset(scores + r * KEYS, 0, (size_t)columns * sizeof(float));
        }
        small_product(rows, width, last - key < columns ? last - key : columns, (Left){scores, KEYS, 1},
                      values + key * width, width, out, width, ADD);
    }
    for (int64_t r = 0; r < rows; r++) {
        float total = add_up(load(sums + r * LANES));
        float *to = f->out + ((row + r) * f->heads + head) * f->value_dim;
        for (int64_t d = 0; d < f->value_dim; d++)
            to[d] = out[r * width + d] / total;
        f->log_sums[(row + r) * f->heads + head] = highest[r] + logf(total);
    }
}

static void attend_part(const Flash *f, Part part)
{
    int64_t blocks = (part.length + KEYS - 1) / KEYS * KEYS, width = PADDED(f->value_dim);
    int64_t group = f->heads / f->kv_heads;
    float *turned = thread_memory(blocks * f->dim + part.length * width + QUERIES * (KEYS + LANES + width));
    float *values = turned + blocks * f->dim, *scratch = values + part.length * width;
    turn_rows(part.length, f->dim, f->keys + part.first * f->key_row + part.kv_head * f->dim, f->key_row, turned);
    copy_rows(part.length, f->value_dim, f->values + part.first * f->value_row + part.kv_head * f->value_dim,
              f->value_row, values);
    for (int64_t g = 0; g < group; g++)
        for (int64_t query = part.query; query < part.length; query += QUERIES) {
            int64_t rows = part.length - query < QUERIES ? part.length - query : QUERIES;
            attend_block(f, part, part.kv_head * group + g, query, rows, turned, values, scratch);
        }
}

static void run_attend(Team *team, int thread, void *argument)
{
    Flash *f = argument;
    (void)team, (void)thread;
    for (int64_t i; (i = take_next(&f->counter)) < f->sequences * f->kv_heads;)
        attend_part(f, find_part(f, i));
}

void etude_flash(Flash *flash, int64_t threads)
{
    atomic_init(&flash->counter, 0);
    run_pieces((int)threads, run_attend, flash);
}

/* ---- gradients -------------------------------------------------------------------------------- */

/* A thread's buffers for one part. */
typedef struct {
    float *turned_keys, *turned_values, *keys, *to_keys, *to_values;   /* of the whole part */
    float *queries, *to_out, *to_queries;                              /* of a block of queries */
    float *weights, *to_scores;                                        /* [QUERIES][KEYS] */
    float shares[QUERIES];
} Gradients;

static Gradients lay_out(const Flash *f, Part part)
{
    int64_t blocks = (part.length + KEYS - 1) / KEYS * KEYS, dim = PADDED(f->dim), width = PADDED(f->value_dim);
    Gradients g;
    g.turned_keys = thread_memory(blocks * (f->dim + f->value_dim + 2 * dim + width) +
                                  QUERIES * (2 * dim + width + 2 * KEYS));
    g.turned_values = g.turned_keys + blocks * f->dim;
    g.keys = g.turned_values + blocks * f->value_dim;
    g.to_keys = g.keys + blocks * dim;
    g.to_values = g.to_keys + blocks * dim;
    g.queries = g.to_values + blocks * width;
    g.to_out = g.queries + QUERIES * dim;
    g.to_queries = g.to_out + QUERIES * width;
    g.weights = g.to_queries + QUERIES * dim;
    g.to_scores = g.weights + QUERIES * KEYS;
    memset(g.to_keys, 0, (size_t)(blocks * (dim + width)) * sizeof(float));
    return g;
}

/* Turns scores into weights, and gradients of weights into those of scores. */
INLINE void differentiate_row(float *weights, float *to_scores, int64_t columns, int64_t limit, float scale,
                              float log_sum, float share)
{
    for (int64_t j = 0; j < columns; j += LANES) {
        vector weight = exponential(add_product(splat(-log_sum), load(weights + j), splat(scale)));
        if (j + LANES > limit)
            weight = choose(lanes_before(limit - j), weight, splat(0));
        store(weights + j, weight);
        store(to_scores + j, weight * (load(to_scores + j) - splat(share)) * splat(scale));
    }
}

static BLOCK void differentiate_block(const Flash *f, Part part, int64_t head, int64_t query, int64_t rows,
                                      Gradients *g)
{
    int64_t dim = PADDED(f->dim), width = PADDED(f->value_dim), last = query + rows, row = part.first + query;
    copy_rows(rows, f->dim, f->queries + row * f->query_row + head * f->dim, f->query_row, g->queries);
    copy_rows(rows, f->value_dim, f->to_out + (row * f->heads + head) * f->value_dim, f->heads * f->value_dim,
              g->to_out);
    for (int64_t r = 0; r < rows; r++) {
        const float *out = f->out + ((row + r) * f->heads + head) * f->value_dim;
        float total = 0;
        for (int64_t d = 0; d < f->value_dim; d++)
            total += out[d] * g->to_out[r * width + d];
        g->shares[r] = total;
    }
    for (int64_t key = 0; key < last; key += KEYS) {
        int64_t columns = seen(query, rows, key), count = last - key < columns ? last - key : columns;
        small_product(rows, columns, f->dim, (Left){g->queries, dim, 1}, g->turned_keys + key * f->dim, KEYS,
                      g->weights, KEYS, SET);
        small_product(rows, columns, f->value_dim, (Left){g->to_out, width, 1},
                      g->turned_values + key * f->value_dim, KEYS, g->to_scores, KEYS, SET);
        for (int64_t r = 0; r < rows; r++)
            differentiate_row(g->weights + r * KEYS, g->to_scores + r * KEYS, columns,
                              visible(query + r, key, columns), f->scale,
                              f->log_sums[(row + r) * f->heads + head], g->shares[r]);
        small_product(rows, dim, count, (Left){g->to_scores, KEYS, 1}, g->keys + key * dim, dim, g->to_queries, dim,
                      key > 0 ? ADD : SET);
        small_product(count, width, rows, (Left){g->weights, 1, KEYS}, g->to_out, width, g->to_values + key * width,
                      width, ADD);
        small_product(count, dim, rows, (Left){g->to_scores, 1, KEYS}, g->queries, dim, g->to_keys + key * dim, dim,
                      ADD);
    }
    for (int64_t r = 0; r < rows; r++)
        memcpy(f->to_queries + ((row + r) * f->heads + head) * f->dim, g->to_queries + r * dim,
               (size_t)f->dim * sizeof(float));
}

static void differentiate_part(const Flash *f, Part part)
{
    int64_t group = f->heads / f->kv_heads, dim = PADDED(f->dim), width = PADDED(f->value_dim);
    const float *keys = f->keys + part.first * f->key_row + part.kv_head * f->dim;
    const float *values = f->values + part.first * f->value_row + part.kv_head * f->value_dim;
    Gradients g = lay_out(f, part);
    turn_rows(part.length, f->dim, keys, f->key_row, g.turned_keys);
    turn_rows(part.length, f->value_dim, values, f->value_row, g.turned_values);
    copy_rows(part.length, f->dim, keys, f->key_row, g.keys);
    for (int64_t t = 0; t < part.query; t++)
        memset(f->to_queries + ((part.first + t) * f->heads + part.kv_head * group) * f->dim, 0,
               (size_t)(group * f->dim) * sizeof(float));
    for (int64_t h = 0; h < group; h++)
        for (int64_t query = part.query; query < part.length; query += QUERIES) {
            int64_t rows = part.length - query < QUERIES ? part.length - query : QUERIES;
            differentiate_block(f, part, part.kv_head * group + h, query, rows, &g);
        }
    for (int64_t t = 0; t < part.length; t++) {
        int64_t place = (part.first + t) * f->kv_heads + part.kv_head;
        memcpy(f->to_keys + place * f->dim, g.to_keys + t * dim, (size_t)f->dim * sizeof(float));
        memcpy(f->to_values + place * f->value_dim, g.to_values + t * width, (size_t)f->value_dim * sizeof(float));
    }
}

static void run_differentiate(Team *team, int thread, void *argument)
{
    Flash *f = argument;
    (void)team, (void)thread;
    for (int64_t i; (i = take_next(&f->counter)) < f->sequences * f->kv_heads;)
        differentiate_part(f, find_part(f, i));
}

void etude_flash_gradients(Flash *flash, int64_t threads)
{
    atomic_init(&flash->counter, 0);
    run_pieces((int)threads, run_differentiate, flash);
}
