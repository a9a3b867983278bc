/* One forward pass of a Qwen3 mixture of experts over the rows of an engine step, on one core, in float32.
 *
 * Every row is one token of one slot. Keys and values of all rows are stored first; then each row attends to
 * positions 0..its own of its slot's strip, so that decoding and prefilling are the same thing. Each row's
 * arithmetic is in an order that does not depend on which other rows there are.
 *
 * Matrices lie as [inputs, outputs]. The products are tiles of ROWS x (COLUMNS vectors) kept in registers
 * (Goto and van de Geijn 2008, without packing: everything fits into the caches).
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 6
#define COLUMNS 4
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 4
#define COLUMNS 2
#else
#define LANES 4
#define ROWS 4
#define COLUMNS 4
#endif

#define MAX_DIM 256
#define MAX_EXPERTS 255

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef float unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  /* in memory */

typedef struct {
    int64_t width, heads, kv_heads, dim, experts, top_k, inner, layers, max_tokens;
    float eps;
    const float *embedding;                 /* [vocabulary, width] */
    const float *cosine, *signed_sine;      /* [positions, dim] */
    const float *final_norm;                /* [width] */
} Model;

typedef struct {
    const float *attention_norm;            /* [width] */
    const float *qkv;                       /* [width, (heads + 2 kv_heads) dim] */
    const float *query_norm, *key_norm;     /* [dim] */
    const float *out;                       /* [heads dim, width] */
    const float *experts_norm;              /* [width] */
    const float *router;                    /* [experts, width] */
    const float *gate_up;                   /* [experts, width, 2 inner] */
    const float *down;                      /* [experts, inner, width] */
    float *keys, *values;                   /* [slots, kv_heads, max_tokens, dim] */
} Layer;

typedef struct {
    int64_t num_rows;
    const int64_t *tokens, *slots, *positions;  /* [rows] */
    float *hidden;                              /* out: [rows, width], after the last norm */
    uint8_t *routes;                            /* out: [rows, layers, top_k], best first */
} Step;

/* ---- products --------------------------------------------------------------------------------- */

/* c[rows, columns] (+)= a[rows, k] b[k, columns] for one tile; rows and vectors are constants at each call. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const int vectors, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
    float *c, int64_t ldc, int add)
{
    vector sums[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = (vector){0};
    for (int64_t i = 0; i < k; i++) {
        vector right[COLUMNS];
        for (int v = 0; v < vectors; v++)
            right[v] = *(const unaligned *)(b + i * ldb + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] += right[v] * a[r * lda + i];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            unaligned *place = (unaligned *)(c + r * ldc + v * LANES);
            *place = add ? (vector)*place + sums[r][v] : sums[r][v];
        }
}

static inline __attribute__((always_inline)) void row_band(
    const int rows, int64_t n, int64_t k, const float *a, int64_t lda, const float *b, float *c, int add)
{
    int64_t j = 0;
    for (; j + COLUMNS * LANES <= n; j += COLUMNS * LANES)
        tile(rows, COLUMNS, k, a, lda, b + j, n, c + j, n, add);
    for (; j + LANES <= n; j += LANES)
        tile(rows, 1, k, a, lda, b + j, n, c + j, n, add);
    for (; j < n; j++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (int64_t i = 0; i < k; i++)
                sum += a[r * lda + i] * b[i * n + j];
            c[r * n + j] = add ? c[r * n + j] + sum : sum;
        }
}

/* c[m, n] (+)= a[m, k] b[k, n] */
static void product(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float *c, int add)
{
    for (int64_t i = 0; i < m; i += ROWS) {
        const float *from = a + i * k;
        float *to = c + i * n;
        switch (m - i) {
        case 1: row_band(1, n, k, from, k, b, to, add); break;
        case 2: row_band(2, n, k, from, k, b, to, add); break;
        case 3: row_band(3, n, k, from, k, b, to, add); break;
#if ROWS > 4
        case 4: row_band(4, n, k, from, k, b, to, add); break;
        case 5: row_band(5, n, k, from, k, b, to, add); break;
#endif
        default: row_band(ROWS, n, k, from, k, b, to, add); break;
        }
    }
}

/* ---- elementwise ------------------------------------------------------------------------------ */

/* e^x for x <= 88, within 2 units in the last place (Cephes' polynomial); branch-free, so loops vectorise. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    int32_t whole = (int32_t)(x * 1.44269504f + (x < 0 ? -0.5f : 0.5f));
    float n = (float)whole;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (whole + 127) << 23;
    float scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

/* out[n] = x / rms(x) * weight */
static void rms_norm(int64_t n, const float *x, const float *weight, float eps, float *out)
{
    float sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

/* Normalises a head [dim] and turns it by its position: Hugging Face's half-split layout. */
static void norm_and_rotate(
    int64_t dim, const float *x, const float *weight, float eps, const float *cosine, const float *signed_sine,
    float *out)
{
    float normed[MAX_DIM];
    rms_norm(dim, x, weight, eps, normed);
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        out[i] = normed[i] * cosine[i] + normed[i + half] * signed_sine[i];
        out[i + half] = normed[i + half] * cosine[i + half] + normed[i] * signed_sine[i + half];
    }
}

/* ---- attention -------------------------------------------------------------------------------- */

/* One query head [dim] over keys and values [length, dim]; scores [length] is scratch. Inlined for each `dim`. */
static inline __attribute__((always_inline)) void attend_head(
    const int64_t dim, int64_t length, const float *query, const float *keys, const float *values, float *scores,
    float *out)
{
    float scale = 1.0f / sqrtf((float)dim), highest = -INFINITY, sum = 0;
    float mixed[MAX_DIM];
    for (int64_t j = 0; j < length; j++) {
        float dot = 0;
        for (int64_t d = 0; d < dim; d++)
            dot += query[d] * keys[j * dim + d];
        scores[j] = dot * scale;
    }
    for (int64_t j = 0; j < length; j++)
        highest = scores[j] > highest ? scores[j] : highest;
    for (int64_t j = 0; j < length; j++)
        scores[j] = exponential(scores[j] - highest);
    for (int64_t j = 0; j < length; j++)
        sum += scores[j];
    for (int64_t d = 0; d < dim; d++)
        mixed[d] = 0;
    for (int64_t j = 0; j < length; j++)
        for (int64_t d = 0; d < dim; d++)
            mixed[d] += scores[j] * values[j * dim + d];
    for (int64_t d = 0; d < dim; d++)
        out[d] = mixed[d] / sum;
}

static void attend(int64_t dim, int64_t length, const float *query, const float *keys, const float *values,
                   float *scores, float *out)
{
    switch (dim) {
    case 32: attend_head(32, length, query, keys, values, scores, out); break;
    case 64: attend_head(64, length, query, keys, values, scores, out); break;
    case 128: attend_head(128, length, query, keys, values, scores, out); break;
    default: attend_head(dim, length, query, keys, values, scores, out); break;
    }
}

static void attention(const Model *model, const Layer *layer, const Step *step, const float *qkv, float *scores,
                      float *attended)
{
    int64_t dim = model->dim, heads = model->heads, kv_heads = model->kv_heads;
    int64_t stride = (heads + 2 * kv_heads) * dim, group = heads / kv_heads;
    for (int64_t t = 0; t < step->num_rows; t++) {
        const float *cosine = model->cosine + step->positions[t] * dim;
        const float *sine = model->signed_sine + step->positions[t] * dim;
        const float *key = qkv + t * stride + heads * dim, *value = key + kv_heads * dim;
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t place = ((step->slots[t] * kv_heads + h) * model->max_tokens + step->positions[t]) * dim;
            norm_and_rotate(dim, key + h * dim, layer->key_norm, model->eps, cosine, sine, layer->keys + place);
            memcpy(layer->values + place, value + h * dim, (size_t)dim * sizeof(float));
        }
    }
    for (int64_t t = 0; t < step->num_rows; t++) {
        const float *cosine = model->cosine + step->positions[t] * dim;
        const float *sine = model->signed_sine + step->positions[t] * dim;
        for (int64_t h = 0; h < heads; h++) {
            float query[MAX_DIM];
            int64_t strip = (step->slots[t] * kv_heads + h / group) * model->max_tokens * dim;
            norm_and_rotate(
                dim, qkv + t * stride + h * dim, layer->query_norm, model->eps, cosine, sine, query);
            attend(dim, step->positions[t] + 1, query, layer->keys + strip, layer->values + strip, scores,
                   attended + (t * heads + h) * dim);
        }
    }
}

/* ---- experts ---------------------------------------------------------------------------------- */

/* Chooses experts for one row: routes [top_k] best first, gates [top_k] that sum to 1. */
static void route(const Model *model, const Layer *layer, const float *row, uint8_t *routes, float *gates)
{
    int64_t experts = model->experts;
    float scores[MAX_EXPERTS], highest = -INFINITY, sum = 0;
    for (int64_t e = 0; e < experts; e++) {
        float dot = 0;
        for (int64_t i = 0; i < model->width; i++)
            dot += row[i] * layer->router[e * model->width + i];
        scores[e] = dot;
        highest = dot > highest ? dot : highest;
    }
    for (int64_t k = 0; k < model->top_k; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < experts; e++)
            best = scores[e] > scores[best] ? e : best;
        routes[k] = (uint8_t)best;
        gates[k] = exponential(scores[best] - highest);
        sum += gates[k];
        scores[best] = -INFINITY;
    }
    for (int64_t k = 0; k < model->top_k; k++)
        gates[k] /= sum;
}

/* out[size] = silu(gate) * up; gate_up [2 size] */
static void swiglu(int64_t size, const float *gate_up, float *out)
{
    for (int64_t j = 0; j < size; j++) {
        float x = gate_up[j] < -80.0f ? -80.0f : gate_up[j];
        out[j] = x / (1.0f + exponential(-x)) * gate_up[size + j];
    }
}

/* hidden += experts(normed); writes the step's routes of this layer. */
static void experts(const Model *model, const Layer *layer, int64_t index, const Step *step, const float *normed,
                    float *gates, int64_t *rows, float *shares, float *gathered, float *inner, float *mixed)
{
    int64_t top_k = model->top_k, width = model->width, size = model->inner;
    for (int64_t t = 0; t < step->num_rows; t++)
        route(model, layer, normed + t * width, step->routes + (t * model->layers + index) * top_k,
              gates + t * top_k);
    /* Each row adds up its experts by their number, whoever else is in the batch. */
    for (int64_t e = 0; e < model->experts; e++) {
        int64_t count = 0;
        for (int64_t t = 0; t < step->num_rows; t++)
            for (int64_t k = 0; k < top_k; k++)
                if (step->routes[(t * model->layers + index) * top_k + k] == e) {
                    memcpy(gathered + count * width, normed + t * width, (size_t)width * sizeof(float));
                    shares[count] = gates[t * top_k + k];
                    rows[count++] = t;
                }
        product(count, 2 * size, width, gathered, layer->gate_up + e * width * 2 * size, inner, 0);
        for (int64_t i = 0; i < count; i++)
            swiglu(size, inner + i * 2 * size, gathered + i * size);
        product(count, width, size, gathered, layer->down + e * size * width, mixed, 0);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < width; j++)
                step->hidden[rows[i] * width + j] += shares[i] * mixed[i * width + j];
    }
}

/* ---- the pass --------------------------------------------------------------------------------- */

/* Floats of scratch space that a step of so many rows needs. */
int64_t etude_scratch_floats(const Model *model, int64_t num_rows)
{
    int64_t qkv = (model->heads + 2 * model->kv_heads) * model->dim;
    int64_t widest = model->inner > model->width ? model->inner : model->width;
    int64_t row = model->width + qkv + model->heads * model->dim + model->top_k + 3 + widest + 2 * model->inner
                  + model->width;
    return num_rows * row + model->max_tokens;
}

/* Computes a step. `scratch`: etude_scratch_floats floats, aligned to 8 bytes. */
void etude_forward(const Model *model, const Layer *layers, const Step *step, float *scratch)
{
    int64_t rows = step->num_rows, width = model->width, attended_width = model->heads * model->dim;
    int64_t qkv_width = (model->heads + 2 * model->kv_heads) * model->dim;
    int64_t *chosen = (int64_t *)scratch;
    float *shares = scratch + 2 * rows;
    float *normed = shares + rows;
    float *qkv = normed + rows * width;
    float *attended = qkv + rows * qkv_width;
    float *gates = attended + rows * attended_width;
    float *inner = gates + rows * model->top_k;
    float *mixed = inner + rows * 2 * model->inner;
    float *scores = mixed + rows * width;
    float *gathered = scores + model->max_tokens;
    for (int64_t t = 0; t < rows; t++)
        memcpy(step->hidden + t * width, model->embedding + step->tokens[t] * width, (size_t)width * sizeof(float));
    for (int64_t l = 0; l < model->layers; l++) {
        const Layer *layer = layers + l;
        for (int64_t t = 0; t < rows; t++)
            rms_norm(width, step->hidden + t * width, layer->attention_norm, model->eps, normed + t * width);
        product(rows, qkv_width, width, normed, layer->qkv, qkv, 0);
        attention(model, layer, step, qkv, scores, attended);
        product(rows, width, attended_width, attended, layer->out, step->hidden, 1);
        for (int64_t t = 0; t < rows; t++)
            rms_norm(width, step->hidden + t * width, layer->experts_norm, model->eps, normed + t * width);
        experts(model, layer, l, step, normed, gates, chosen, shares, gathered, inner, mixed);
    }
    for (int64_t t = 0; t < rows; t++)
        rms_norm(width, step->hidden + t * width, model->final_norm, model->eps, step->hidden + t * width);
}

/* ---- sampling --------------------------------------------------------------------------------- */

/* Draws a token per row by inverting the cumulative distribution at draws [rows] in [0, 1); takes the likeliest
 * where the temperature is 0, and then reports its log-probability at temperature 1. `head` [width, vocabulary];
 * `logits` [rows, vocabulary] is scratch. */
void etude_sample(int64_t rows, int64_t width, int64_t vocabulary, const float *hidden, const float *head,
                  const float *temperatures, const double *draws, float *logits, int64_t *tokens,
                  float *logprobs)
{
    product(rows, vocabulary, width, hidden, head, logits, 0);
    for (int64_t t = 0; t < rows; t++) {
        float *row = logits + t * vocabulary;
        float scale = temperatures[t] > 0 ? 1.0f / temperatures[t] : 1.0f;
        int64_t best = 0;
        for (int64_t j = 0; j < vocabulary; j++)
            row[j] *= scale;
        for (int64_t j = 1; j < vocabulary; j++)
            best = row[j] > row[best] ? j : best;
        float highest = row[best];
        double sum = 0;
        for (int64_t j = 0; j < vocabulary; j++)
            row[j] = exponential(row[j] - highest);
        for (int64_t j = 0; j < vocabulary; j++)
            sum += row[j];
        int64_t chosen = best;
        if (temperatures[t] > 0) {
            double threshold = draws[t] * sum, cumulative = 0;
            for (int64_t j = 0; j < vocabulary; j++) {
                cumulative += row[j];
                if (cumulative > threshold) {
                    chosen = j;
                    break;
                }
            }
        }
        tokens[t] = chosen;
        logprobs[t] = logf(row[chosen]) - (float)log(sum);
    }
}
