/* Norms, rotations and gates of a training step with their gradients, each in one pass over memory. The forward pass
 * either has its own order of sums, or uses the engine's blocks to be bitwise equal to it. */

#include "products.h"

#define CHUNK 128               /* rows of a piece of work; sums over rows are taken chunk by chunk */

typedef struct {
    int64_t rows, heads, size;
    float eps;
    int64_t as_engine;
    Strided x, to_out;          /* [rows, heads, size]; rows and heads may lie apart */
    const float *weight;
    float *inverse;             /* [rows, heads]: one over the root of the mean square */
    float *out, *to_x;          /* [rows, heads, size] without gaps */
    float *to_weight;           /* [chunks, size]: a sum for each chunk of rows */
    atomic_long counter;
} Norm;

INLINE const float *head_of(Strided x, int64_t row, int64_t head)
{
    return x.values + row * x.stride + head * x.step;
}

static BLOCK void normalise(const Norm *n, int64_t row, int64_t head)
{
    const float *x = head_of(n->x, row, head);
    float *out = n->out + (row * n->heads + head) * n->size;
    if (n->as_engine) {
        n->inverse[row * n->heads + head] = rms_norm(n->size, x, n->weight, n->eps, out);
        return;
    }
    vector sum = {0};
    for (int64_t i = 0; i < n->size; i += LANES) {
        vector part = load_up_to(x + i, n->size - i);
        sum = add_product(sum, part, part);
    }
    float inverse = 1.0f / sqrtf(add_up(sum) / (float)n->size + n->eps);
    n->inverse[row * n->heads + head] = inverse;
    for (int64_t i = 0; i < n->size; i += LANES) {
        int64_t left = n->size - i;
        store_up_to(out + i, load_up_to(x + i, left) * splat(inverse) * load_up_to(n->weight + i, left), left);
    }
}

static BLOCK void normalise_backwards(const Norm *n, int64_t row, int64_t head, float *to_weight)
{
    const float *x = head_of(n->x, row, head), *gradient = head_of(n->to_out, row, head);
    float *to_x = n->to_x + (row * n->heads + head) * n->size, inverse = n->inverse[row * n->heads + head];
    vector sum = {0};
    for (int64_t i = 0; i < n->size; i += LANES) {
        int64_t left = n->size - i;
        vector part = load_up_to(x + i, left), back = load_up_to(gradient + i, left);
        vector scaled = part * splat(inverse) * back;
        store_up_to(to_weight + i, load_up_to(to_weight + i, left) + scaled, left);
        sum = add_product(sum, scaled, load_up_to(n->weight + i, left));
    }
    float share = -add_up(sum) / (float)n->size * inverse * inverse;
    for (int64_t i = 0; i < n->size; i += LANES) {
        int64_t left = n->size - i;
        vector back = load_up_to(gradient + i, left) * load_up_to(n->weight + i, left) * splat(inverse);
        store_up_to(to_x + i, add_product(back, load_up_to(x + i, left), splat(share)), left);
    }
}

static void run_norm(Team *team, int thread, void *argument)
{
    Norm *n = argument;
    (void)team, (void)thread;
    for (int64_t chunk; (chunk = take_next(&n->counter)) * CHUNK < n->rows;) {
        int64_t end = (chunk + 1) * CHUNK < n->rows ? (chunk + 1) * CHUNK : n->rows;
        for (int64_t row = chunk * CHUNK; row < end; row++)
            for (int64_t head = 0; head < n->heads; head++)
                if (n->to_x)
                    normalise_backwards(n, row, head, n->to_weight + chunk * n->size);
                else
                    normalise(n, row, head);
    }
}

/* Forwards, or backwards where `to_x` is given; `to_weight` begins as zeros. */
void etude_norm(Norm *norm, int64_t threads)
{
    atomic_init(&norm->counter, 0);
    run_pieces((int)threads, run_norm, norm);
}

/* The rotary embedding: forwards the engine's own. */
typedef struct {
    int64_t rows, heads, size, backwards;
    Strided x;                  /* [rows, heads, size]; gradients backwards */
    const float *cosine, *signed_sine;      /* [rows, size] */
    float *out;                 /* [rows, heads, size] without gaps */
    atomic_long counter;
} Rotation;

static BLOCK void rotate_back(int64_t size, const float *gradient, const float *cosine, const float *signed_sine,
                              float *out)
{
    int64_t half = size / 2;
    for (int64_t side = 0; side < 2; side++) {
        int64_t here = side * half, other = half - here;
        for (int64_t i = 0; i < half; i += LANES) {
            int64_t left = half - i;
            vector back = load_up_to(gradient + here + i, left) * load_up_to(cosine + here + i, left);
            vector turned = load_up_to(gradient + other + i, left), sine = load_up_to(signed_sine + other + i, left);
            store_up_to(out + here + i, add_product(back, turned, sine), left);
        }
    }
}

static void run_rotation(Team *team, int thread, void *argument)
{
    Rotation *r = argument;
    (void)team, (void)thread;
    for (int64_t chunk; (chunk = take_next(&r->counter)) * CHUNK < r->rows;) {
        int64_t end = (chunk + 1) * CHUNK < r->rows ? (chunk + 1) * CHUNK : r->rows;
        for (int64_t row = chunk * CHUNK; row < end; row++)
            for (int64_t head = 0; head < r->heads; head++)
                (r->backwards ? rotate_back : rotate)(r->size, head_of(r->x, row, head), r->cosine + row * r->size,
                                                      r->signed_sine + row * r->size,
                                                      r->out + (row * r->heads + head) * r->size);
    }
}

void etude_rotation(Rotation *rotation, int64_t threads)
{
    atomic_init(&rotation->counter, 0);
    run_pieces((int)threads, run_rotation, rotation);
}

INLINE vector logistic(vector x)
{
    return splat(1.0f) / (exponential(choose(x < splat(-80.0f), splat(80.0f), -x)) + splat(1.0f));
}

BLOCK void gate_row(const Gate *g, int64_t row)
{
    const float *gate = g->gate + row * g->stride, *up = g->up + row * g->stride;
    if (g->as_engine) {         /* forwards, without a scale */
        swiglu(g->size, gate, up, g->out + row * g->size);
        return;
    }
    vector scale = splat(g->scale ? g->scale[row] : 1.0f), sum = {0};
    for (int64_t i = 0; i < g->size; i += LANES) {
        int64_t left = g->size - i, place = row * g->size + i, to = row * g->to_stride + i;
        vector x = load_up_to(gate + i, left), other = load_up_to(up + i, left), open = logistic(x);
        vector risen = x * open, inner = risen * other;
        if (g->out)
            store_up_to(g->out + place, inner * scale, left);
        if (!g->to_out)
            continue;
        vector back = load_up_to(g->to_out + place, left);
        sum = add_product(sum, back, inner);
        back *= scale;
        store_up_to(g->to_gate + to, back * other * open * (splat(1.0f) + x - risen), left);
        store_up_to(g->to_up + to, back * risen, left);
    }
    if (g->to_scale)
        g->to_scale[row] = add_up(sum);
}

static void run_gate(Team *team, int thread, void *argument)
{
    Gate *g = argument;
    (void)team, (void)thread;
    for (int64_t chunk; (chunk = take_next(&g->counter)) * CHUNK < g->rows;) {
        int64_t end = (chunk + 1) * CHUNK < g->rows ? (chunk + 1) * CHUNK : g->rows;
        for (int64_t row = chunk * CHUNK; row < end; row++)
            gate_row(g, row);
    }
}

/* `out` where it is given, and gradients where `to_out` is. */
void etude_gate(Gate *gate, int64_t threads)
{
    atomic_init(&gate->counter, 0);
    run_pieces((int)threads, run_gate, gate);
}
