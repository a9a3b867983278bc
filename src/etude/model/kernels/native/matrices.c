/* Packed matrices and products.
 *
 * A product is cut into tiles of ROWS x (COLUMNS vectors) kept in registers (Goto and van de Geijn 2008). The
 * matrix is packed once, so that each tile reads it sequentially: decoding a few rows streams the weights at the
 * memory's bandwidth. Each value of the result sums its terms from the first to the last in one register, whatever
 * the tile: its bits depend only on its row and its column.
 */

#include "tiles.h"

#define BAND 96         /* rows that stay in the cache while all panels are read */
#define LINE 64         /* bytes of a cache line */
#define NEAR 64         /* prefetch distance within a panel, in terms of a sum */

typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef uint16_t unaligned_halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

static int64_t panel_columns(int64_t outputs, int64_t panel)
{
    int64_t left = outputs - panel * PANEL;
    return left >= PANEL ? PANEL : (left + 15) / 16 * 16;
}

/* Number of values of a packed matrix. */
int64_t etude_packed_size(int64_t inputs, int64_t outputs) { return inputs * ((outputs + 15) / 16 * 16); }

static uint16_t round_to_half(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Packs source[o * output_stride + i * input_stride], float32, as float32 or (`half`) bfloat16. */
void etude_pack(int64_t inputs, int64_t outputs, const float *source, int64_t input_stride, int64_t output_stride,
                int half, void *packed)
{
    for (int64_t panel = 0; panel * PANEL < outputs; panel++) {
        int64_t columns = panel_columns(outputs, panel);
        for (int64_t first = 0; first < inputs; first += 16)
            for (int64_t o = 0; o < columns; o++) {
                int64_t column = panel * PANEL + o, end = first + 16 < inputs ? first + 16 : inputs;
                for (int64_t i = first; i < end; i++) {
                    int64_t place = panel * PANEL * inputs + i * columns + o;
                    float value = column < outputs ? source[column * output_stride + i * input_stride] : 0;
                    if (half)
                        ((uint16_t *)packed)[place] = round_to_half(value);
                    else
                        ((float *)packed)[place] = value;
                }
            }
    }
}

INLINE vector widen(const uint16_t *from)
{
    integers wide = __builtin_convertvector(*(const unaligned_halves *)from, integers) << 16;
    return (vector)wide;
}

/* Memory that is prefetched while a tile is computed: at each step of its sum, the line `pace` bytes further. A core
 * has fewer outstanding loads than the memory's bandwidth needs, so it has to prefetch continuously. */
typedef struct {
    const char *from;
    int64_t pace;
} Ahead;

/* c (+)= a b for one tile, `add` as in tiles.h; all but k, the pointers, strides and what follows them are constants at
 * each call. `left`: columns to write. */
INLINE void tile(const int rows, const int vectors, const int half, int64_t k, const float *a, int64_t lda,
                 const void *panel, int64_t ldb, Ahead ahead, float *c, int64_t ldc, int64_t left, int add)
{
    vector sums[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = add == CONTINUE ? load_up_to(c + r * ldc + v * LANES, left - v * LANES) : (vector){0};
    for (int64_t i = 0; i < k; i++) {
        for (int j = 0; j < vectors * LANES * (half ? 2 : 4); j += LINE)
            __builtin_prefetch(ahead.from + i * ahead.pace + j, 0, 2);
        vector right[COLUMNS];
        for (int v = 0; v < vectors; v++)
            right[v] = half ? widen((const uint16_t *)panel + i * ldb + v * LANES)
                            : load((const float *)panel + i * ldb + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] = add_product(sums[r][v], right[v], splat(a[r * lda + i]));
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            float *to = c + r * ldc + v * LANES;
            int64_t here = left - v * LANES;
            if (here >= LANES)
                store(to, add == ADD ? load(to) + sums[r][v] : sums[r][v]);
            else if (here > 0)
                store_some(to, add == ADD ? load_some(to, here) + sums[r][v] : sums[r][v], here);
        }
}

/* One band of up to ROWS rows times `k` rows of a panel, the `part`-th of `parts`. Tiles prefetch equal shares of the
 * next k rows; the only tile of a panel prefetches what it reads NEAR terms later. Either may be beyond the end. */
INLINE void band(const int rows, const int half, int64_t k, const float *a, int64_t lda, const char *panel,
                 int64_t columns, int64_t part, int64_t parts, float *c, int64_t ldc, int64_t left, int add)
{
    const int64_t size = half ? 2 : 4, wide = COLUMNS * LANES, tiles = PANEL / wide, row = columns * size;
    int64_t j = 0, pace = row / (parts * tiles);
    const char *share = panel + k * (row + part * tiles * pace);
    for (; j + wide <= columns; j += wide, share += k * pace) {
        Ahead ahead = parts * tiles == 1 ? (Ahead){panel + NEAR * row, row} : (Ahead){share, pace};
        tile(rows, COLUMNS, half, k, a, lda, panel + j * size, columns, ahead, c + j, ldc, left - j, add);
    }
    for (; j + LANES <= columns; j += LANES) {
        Ahead ahead = {panel + NEAR * row + j * size, row};
        tile(rows, 1, half, k, a, lda, panel + j * size, columns, ahead, c + j, ldc, left - j, add);
    }
}

/* With few rows, computing takes about as long as loading a panel: its rows are then processed in blocks of NEAR, each
 * of which is loaded while the one before it, in the first-level cache, is multiplied with all bands. */
INLINE void panel_product(const int half, const Matrix *matrix, int64_t panel, int64_t rows, const float *a,
                          int64_t lda, float *c, int64_t ldc, int add)
{
    int64_t n = matrix->outputs, columns = panel_columns(n, panel), left = n - panel * PANEL, depth;
    int64_t bands = (rows + ROWS - 1) / ROWS, most = bands > 1 && bands <= 4 && !add ? NEAR : matrix->inputs;
    const char *from = (const char *)matrix->panels + panel * PANEL * matrix->inputs * (half ? 2 : 4);
    for (int64_t k = 0; k < matrix->inputs; k += depth, from += depth * columns * (half ? 2 : 4)) {
        depth = matrix->inputs - k < most ? matrix->inputs - k : most;
        for (int64_t i = 0; i < bands; i++) {
            const float *left_rows = a + i * ROWS * lda + k;
            float *to = c + i * ROWS * ldc + panel * PANEL;
#define BAND_OF(count) \
    band(count, half, depth, left_rows, lda, from, columns, i, bands, to, ldc, left, k ? CONTINUE : add ? ADD : SET)
            switch (rows - i * ROWS) {
            case 1: BAND_OF(1); break;
            case 2: BAND_OF(2); break;
            case 3: BAND_OF(3); break;
#if ROWS > 4
            case 4: BAND_OF(4); break;
            case 5: BAND_OF(5); break;
#endif
            default: BAND_OF(ROWS); break;
            }
#undef BAND_OF
        }
    }
}

static BLOCK void float_product(const Matrix *matrix, int64_t panel, int64_t rows, const float *a, int64_t lda,
                                float *c, int64_t ldc, int add)
{
    panel_product(0, matrix, panel, rows, a, lda, c, ldc, add);
}

static BLOCK void half_product(const Matrix *matrix, int64_t panel, int64_t rows, const float *a, int64_t lda,
                               float *c, int64_t ldc, int add)
{
    panel_product(1, matrix, panel, rows, a, lda, c, ldc, add);
}

void multiply_heads(int64_t heads, const Matrix *matrices, int64_t rows, Strided from, Strided to, int add, Team *team,
                    int thread)
{
    int64_t panels = (matrices->outputs + PANEL - 1) / PANEL, bands = (rows + BAND - 1) / BAND;
    Job job = begin_job(team, thread, heads * bands * panels);
    for (int64_t piece; (piece = take_piece(&job)) >= 0;) {
        int64_t head = piece / (bands * panels), start = piece / panels % bands * BAND;
        int64_t count = rows - start < BAND ? rows - start : BAND;
        const Matrix *matrix = matrices + head;
        const float *a = from.values + head * from.step + start * from.stride;
        float *c = to.values + head * to.step + start * to.stride;
        (matrix->half ? half_product : float_product)(matrix, piece % panels, count, a, from.stride, c, to.stride, add);
    }
}

void multiply(const Matrix *matrix, int64_t rows, const float *a, float *c, int add, Team *team, int thread)
{
    Strided from = {(float *)a, matrix->inputs, 0}, to = {c, matrix->outputs, 0};
    multiply_heads(1, matrix, rows, from, to, add, team, thread);
}

void adapt(const Factors *factors, int64_t index, const int64_t *adapters, int64_t first, int64_t end, Strided from,
           Strided to, float *lowered)
{
    for (int64_t t = first, count; t < end; t += count) {
        for (count = 1; count < ADAPTED_ROWS && t + count < end && adapters[t + count] == adapters[t];)
            count++;
        int64_t place = adapters[t] * factors->count + index;
        if (adapters[t] < 0 || !factors->down[place].inputs)
            continue;
        const Matrix *down = factors->down + place;
        Strided low = {lowered, down->outputs, 0};
        Strided here = {from.values + t * from.stride, from.stride, 0}, there = {to.values + t * to.stride, to.stride, 0};
        multiply_heads(1, down, count, here, low, 0, NULL, 0);
        multiply_heads(1, factors->up + place, count, low, there, 1, NULL, 0);
    }
}
