/* Shared declarations of the native kernels: vectors, the thread team, matrices, transformer blocks; in float32.
 *
 * The order of every sum depends on the row alone: neither on the other rows, nor on how work is divided
 * between threads, nor on whether a block is called by the engine's pass (forward.c) or by the trainer
 * (blocks.c). Therefore: one function per block, never inlined into two callers; no reassociation and no
 * fusing by the compiler (-ffp-contract=off); products add up their terms one by one.
 */

#ifndef ETUDE_COMMON_H
#define ETUDE_COMMON_H

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 6
#define COLUMNS 4
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 6
#define COLUMNS 2
#else
#define LANES 4
#define ROWS 4
#define COLUMNS 2
#endif

#define PANEL 64        /* columns of a packed matrix that are stored together */
#define PAGE 16         /* positions of a page of keys and values */

#if defined(__clang__)
#define BLOCK __attribute__((noinline))
#else
#define BLOCK __attribute__((noipa))
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));
typedef float unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias)); /* in memory */

/* ---- vectors ---------------------------------------------------------------------------------- */

INLINE vector load(const float *from) { return *(const unaligned *)from; }
INLINE void store(float *to, vector value) { *(unaligned *)to = value; }
INLINE vector splat(float value) { return value - (vector){0}; }
INLINE vector choose(integers mask, vector yes, vector no)
{
    return (vector)((mask & (integers)yes) | (~mask & (integers)no));
}

/* a b + c, in one rounding where the processor can. Named, not left to the compiler: it would fuse in some copies of
 * a loop and not in others. */
INLINE vector add_product(vector c, vector a, vector b)
{
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* The first `count` < LANES values; the others are 0. */
INLINE vector load_some(const float *from, int64_t count)
{
#if defined(__AVX512F__)
    return (vector)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    float lanes[LANES] = {0};
    memcpy(lanes, from, (size_t)count * sizeof(float));
    return load(lanes);
#endif
}

INLINE void store_some(float *to, vector value, int64_t count)
{
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value);
#else
    float lanes[LANES];
    store(lanes, value);
    memcpy(to, lanes, (size_t)count * sizeof(float));
#endif
}

INLINE vector load_up_to(const float *from, int64_t left) { return left >= LANES ? load(from) : load_some(from, left); }

INLINE void store_up_to(float *to, vector value, int64_t left)
{
    if (left >= LANES)
        store(to, value);
    else
        store_some(to, value, left);
}

#if defined(__AVX512F__)
/* `operation` of all lanes, half upon half: of two lanes it takes the lower one first. */
#define REDUCE(operation, value) \
    do { \
        __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)(value), 1)); \
        __m256 eight = _mm256_##operation##_ps(_mm512_castps512_ps256((__m512)(value)), upper); \
        __m128 four = _mm_##operation##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
        __m128 two = _mm_##operation##_ps(four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(_mm_##operation##_ss(two, _mm_movehdup_ps(two))); \
    } while (0)
#else
#define REDUCE(operation, value) \
    do { \
        float lanes[LANES]; \
        store(lanes, value); \
        for (int half = LANES / 2; half; half /= 2) \
            for (int i = 0; i < half; i++) \
                lanes[i] = lane_##operation(lanes[i], lanes[i + half]); \
        return lanes[0]; \
    } while (0)
INLINE float lane_add(float a, float b) { return a + b; }
INLINE float lane_max(float a, float b) { return a > b ? a : b; }
#endif

/* The sum of all lanes. */
INLINE float add_up(vector value) { REDUCE(add, value); }
/* The largest of all lanes. */
INLINE float largest(vector value) { REDUCE(max, value); }

/* e^x for x <= 88, within 2 units in the last place (Cephes' polynomial); e^-87 below -87. */
INLINE vector exponential(vector x)
{
    const vector shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    x = choose(x < splat(-87.0f), splat(-87.0f), x);
    vector shifted = add_product(shift, x, splat(1.44269504f));
    vector whole = shifted - shift;
    vector r = add_product(x, whole, splat(-0.693359375f));
    r = add_product(r, whole, splat(2.12194440e-4f));
    vector p = splat(1.9875691500e-4f);
    p = add_product(splat(1.3981999507e-3f), p, r);
    p = add_product(splat(8.3334519073e-3f), p, r);
    p = add_product(splat(4.1665795894e-2f), p, r);
    p = add_product(splat(1.6666665459e-1f), p, r);
    p = add_product(splat(5.0000001201e-1f), p, r);
    vector q = add_product(r, p * r, r) + splat(1.0f);
    integers power = ((integers)shifted - (integers)shift + 127) << 23;
    return q * (vector)power;
}

/* ---- threads ---------------------------------------------------------------------------------- */

typedef struct Team Team;
typedef void (*Work)(Team *team, int thread, void *argument);

/* Runs `work` once on each of up to `threads` threads, of which the caller is number 0; returns when all are
 * done. While another caller uses the threads, this one works alone. */
void run_team(int threads, Work work, void *argument);
/* The same for work between PyTorch's operators, on PyTorch's own threads if available: others would compete with
 * them, since they wait actively. Pieces must not wait for each other (`wait_for_all`): some may run one after the
 * other. */
void run_pieces(int threads, Work work, void *argument);
int team_size(const Team *team);
/* Barrier of the team's threads; what they wrote before can then be read. */
void wait_for_all(Team *team);
/* The next piece of work of a counter that starts at 0; each number is returned to one thread. */
INLINE int64_t take_next(atomic_long *counter) { return atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); }
/* The part of 0..count that belongs to thread `thread`. */
INLINE void share(int64_t count, int thread, int threads, int64_t *first, int64_t *end)
{
    *first = count * thread / threads;
    *end = count * (thread + 1) / threads;
}

/* Pieces 0..count of a job between two barriers (`wait_for_all`), each done by one thread of a team. */
typedef struct {
    Team *team;
    int64_t count, own;         /* own: pieces taken, without a team that takes them from each other */
    int thread, asked, parity;
} Job;

/* `team`: NULL for a thread by itself. */
Job begin_job(Team *team, int thread, int64_t count);
/* Claims a piece; below 0 when there are no more. A thread does the pieces of its own part, one after the other, and
 * then steals remaining ones of other threads: cores are not always equally fast. */
int64_t take_piece(Job *job);

/* ---- matrices --------------------------------------------------------------------------------- */

/* A matrix [inputs, outputs], packed: panels of PANEL columns (the last one padded with zeros to whole vectors of
 * 16), each panel [inputs, its columns]. */
typedef struct {
    int64_t inputs, outputs;
    int64_t half;               /* whether values are bfloat16 */
    const void *panels;
} Matrix;

/* c[rows, outputs] (+)= a[rows, inputs] matrix, with the team (NULL: this thread alone). Has a barrier before and
 * after. */
void multiply(const Matrix *matrix, int64_t rows, const float *a, float *c, int add, Team *team, int thread);

/* Rows of values with a stride of `stride`, and of `step` between heads. */
typedef struct {
    float *values;
    int64_t stride, step;
} Strided;

/* to (+)= from matrices[head], head by head, all of one size; as `multiply`, whose bits it has. */
void multiply_heads(int64_t heads, const Matrix *matrices, int64_t rows, Strided from, Strided to, int add, Team *team,
                    int thread);

/* What low-rank adapters add to a weight, or to each of `count` weights. */
typedef struct {
    int64_t count;
    const Matrix *down, *up;    /* [adapters, count] each: [inputs, rank] and [rank, outputs]; down of no inputs
                                 * where an adapter leaves the weight as it is */
} Factors;

#define ADAPTED_ROWS 48
/* to[t] += from[t] down up, of weight `index`, for rows first..end; `adapters` [rows]: whose factors, below 0: nobody's.
 * `lowered`: ADAPTED_ROWS times the largest rank. */
void adapt(const Factors *factors, int64_t index, const int64_t *adapters, int64_t first, int64_t end, Strided from,
           Strided to, float *lowered);

/* ---- blocks, a row at a time ------------------------------------------------------------------ */

/* Returns the factor on x before the weight is applied. */
float rms_norm(int64_t size, const float *x, const float *weight, float eps, float *out);
void rotate(int64_t dim, const float *x, const float *cosine, const float *signed_sine, float *out);
void swiglu(int64_t size, const float *gate, const float *up, float *out);
void add_rows(int64_t size, const float *x, float *out);
void softmax(int64_t size, float *row);
void sigmoid(int64_t size, float *row);

/* ---- attention -------------------------------------------------------------------------------- */

typedef struct {
    int64_t heads, kv_heads, dim;
    int64_t value_dim;          /* dim, or less in latent attention */
    const int32_t *tables;      /* [sequences, max_pages] */
    int64_t max_pages;
    float *keys;                /* [pages, kv_heads, dim, PAGE] */
    float *values;              /* [pages, kv_heads, PAGE, value_dim]; NULL in latent attention: there is one key
                                 * head, and a value is the first value_dim entries of its key */
} Pages;

/* Stores a row's keys [kv_heads, dim] and values [kv_heads, value_dim] at `position` of a sequence. */
void store_row(const Pages *pages, int64_t sequence, int64_t position, const float *keys, const float *values);

/* A run of rows of one sequence, at positions that follow each other. */
typedef struct {
    int64_t sequence, first_row, count, first_position;
} Run;

#define MAX_RUN 16              /* rows of a run */
/* Cuts rows into runs [at most rows] and returns how many. Rows of a sequence follow each other. */
int64_t cut_runs(int64_t rows, const int64_t *sequences, const int64_t *positions, Run *runs);
/* Floats of scratch space that a thread needs to attend. */
int64_t attention_scratch(const Pages *pages);
/* Attention of all rows of the runs over the positions up to their own. Row t's queries [heads, dim] begin at
 * queries + t * stride; out [rows, heads, value_dim], and the log of the sum of each row's e^score [rows, heads]
 * where it is asked for. Threads share the work by `counter`. */
void attend_runs(const Pages *pages, int64_t num_runs, const Run *runs, const float *queries, int64_t stride,
                 float *out, float *log_sums, float *scratch, atomic_long *counter, int threads);

/* ---- experts ---------------------------------------------------------------------------------- */

typedef struct {
    int64_t count, top_k, width, inner;
    const Matrix *gate_up, *down;   /* [count] each: [width, 2 inner], [inner, width] */
    const Factors *gate_up_factors, *down_factors;
    const int64_t *adapters;        /* [rows], or NULL: none */
    float *lowered;                 /* see `adapt` */
} Experts;

#define EXPERT_ROWS 48
int64_t expert_scratch(const Experts *experts);
/* Orders the assignments of rows to experts by expert: order [rows * top_k], starts [count + 2]. */
void sort_by_expert(const Experts *experts, int64_t rows, const int64_t *chosen, int64_t *order, int64_t *starts);
/* mixed [rows * top_k, width]: each assignment's expert on its row. Threads share the work by `counter`. */
void run_experts(const Experts *experts, const float *x, const int64_t *order, const int64_t *starts, float *mixed,
                 float *scratch, atomic_long *counter);
/* out [width]: the weighted sum of a row's experts, in the order in which they were chosen; they lie at `places` in
 * mixed [any, width], or one after the other where there are none. */
void mix(int64_t top_k, int64_t width, const float *mixed, const int64_t *places, const float *weights, float *out);

/* ---- distributions ---------------------------------------------------------------------------- */

/* The largest value of a row of logits and the log of the sum of e^(x - largest); these terms too where `masses`
 * [size] is given. The log-probability of token t is (row[t] - highest) - log_sum. */
void normaliser(int64_t size, const float *row, float *highest, float *log_sum, float *masses);

#endif
