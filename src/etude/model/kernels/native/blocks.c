/* The pointwise and normalising operations of a transformer, a row at a time. */

#include "common.h"

/* out[size] = x / rms(x) * weight; out may be x. */
BLOCK float rms_norm(int64_t size, const float *x, const float *weight, float eps, float *out)
{
    vector sums[4] = {{0}};
    int64_t i = 0, left;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int v = 0; v < 4; v++) {
            vector part = load(x + i + v * LANES);
            sums[v] = add_product(sums[v], part, part);
        }
    for (; i + LANES <= size; i += LANES) {
        vector part = load(x + i);
        sums[0] = add_product(sums[0], part, part);
    }
    left = size - i;
    if (left) {
        vector part = load_some(x + i, left);
        sums[1] = add_product(sums[1], part, part);
    }
    float total = add_up((sums[0] + sums[1]) + (sums[2] + sums[3]));
    float inverse = 1.0f / sqrtf(total / (float)size + eps);
    vector scale = splat(inverse);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, load(x + i) * scale * load(weight + i));
    if (left)
        store_some(out + i, load_some(x + i, left) * scale * load_some(weight + i, left), left);
    return inverse;
}

/* Rotary embedding of a head (Hugging Face's half-split layout); out must not be x. */
BLOCK void rotate(int64_t dim, const float *x, const float *cosine, const float *signed_sine, float *out)
{
    int64_t half = dim / 2;
    for (int64_t side = 0; side < 2; side++) {
        const float *here = x + side * half, *other = x + (1 - side) * half;
        const float *c = cosine + side * half, *s = signed_sine + side * half;
        float *to = out + side * half;
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            vector turned = load(here + i) * load(c + i);
            store(to + i, add_product(turned, load(other + i), load(s + i)));
        }
        if (i < half) {
            int64_t left = half - i;
            vector turned = load_some(here + i, left) * load_some(c + i, left);
            turned = add_product(turned, load_some(other + i, left), load_some(s + i, left));
            store_some(to + i, turned, left);
        }
    }
}

/* e^-x, without overflow. */
INLINE vector inverse_mass(vector x) { return exponential(choose(x < splat(-80.0f), splat(80.0f), -x)); }

INLINE vector gated(vector gate, vector up) { return gate / (inverse_mass(gate) + splat(1.0f)) * up; }

/* Each value of a row becomes 1 / (1 + e^-x). */
BLOCK void sigmoid(int64_t size, float *row)
{
    const vector one = splat(1.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(row + i, one / (inverse_mass(load(row + i)) + one));
    if (i < size)
        store_some(row + i, one / (inverse_mass(load_some(row + i, size - i)) + one), size - i);
}

/* out[size] = silu(gate) * up; out may be gate or up. */
BLOCK void swiglu(int64_t size, const float *gate, const float *up, float *out)
{
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(out + i, gated(load(gate + i), load(up + i)));
    if (i < size)
        store_some(out + i, gated(load_some(gate + i, size - i), load_some(up + i, size - i)), size - i);
}

/* out[size] += x */
BLOCK void add_rows(int64_t size, const float *x, float *out)
{
    for (int64_t i = 0; i < size; i++)
        out[i] += x[i];
}

BLOCK void normaliser(int64_t size, const float *row, float *highest, float *log_sum, float *masses)
{
    vector most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vector part = load(row + i);
        most = choose(part > most, part, most);
    }
    float top = largest(most);
    for (int64_t j = i; j < size; j++)
        top = row[j] > top ? row[j] : top;
    /* Sums of 64 vectors in float32, and these in double: a vocabulary is long. */
    double total = 0;
    vector shift = splat(top), sum = {0};
    int64_t count = 0;
    for (i = 0; i + LANES <= size; i += LANES) {
        vector mass = exponential(load(row + i) - shift);
        if (masses)
            store(masses + i, mass);
        sum += mass;
        if (++count == 64) {
            total += add_up(sum);
            sum = (vector){0};
            count = 0;
        }
    }
    total += add_up(sum);
    if (i < size) {
        float lanes[LANES];
        store(lanes, exponential(load_some(row + i, size - i) - shift));
        for (int64_t j = 0; j < size - i; j++)
            total += lanes[j];
        if (masses)
            memcpy(masses + i, lanes, (size_t)(size - i) * sizeof(float));
    }
    *highest = top;
    *log_sum = (float)log(total);
}

/* Makes a row of scores sum to 1: e^x over the sum of all. */
BLOCK void softmax(int64_t size, float *row)
{
    float highest = row[0];
    for (int64_t i = 1; i < size; i++)
        highest = row[i] > highest ? row[i] : highest;
    vector sum = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vector part = exponential(load(row + i) - splat(highest));
        store(row + i, part);
        sum += part;
    }
    float total = add_up(sum);
    if (i < size) {
        store_some(row + i, exponential(load_some(row + i, size - i) - splat(highest)), size - i);
        for (; i < size; i++)
            total += row[i];
    }
    for (i = 0; i < size; i++)
        row[i] /= total;
}
