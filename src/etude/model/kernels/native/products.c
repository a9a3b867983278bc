/* Products of matrices that change at every step: c (+)= a b, whatever the strides of a and b.
 *
 * Blocks of b are packed into panels of TILE_COLUMNS columns, and blocks of a whose rows are not contiguous into
 * bands of TILE_ROWS rows, in the order in which the tiles read them (Goto and van de Geijn 2008). The threads divide
 * c among them; each value is summed in blocks of DEPTH terms, in an order independent of the number of threads.
 * With `as_engine`, each block continues the sum of the one before: the terms are added in order into one
 * accumulator, as in matrices.c, and the result is bitwise equal to the engine's.
 */

#include "products.h"

#include <pthread.h>
#include <stdlib.h>

#define DEPTH 256               /* terms of a block: what a tile reads of b stays in the nearest cache */
#define WIDTH 512               /* columns of a packed block of b */
#define BAND (16 * TILE_ROWS(TILE_VECTORS))     /* rows of a packed block of a */
#define TILE_COLUMNS (TILE_VECTORS * LANES)
#define MOST_KEPT (1 << 24)     /* floats of a thread's memory that outlast the call that wanted them */

static _Thread_local float *memory;
static _Thread_local int64_t memory_floats;
static pthread_key_t ending; /* has a thread's memory freed when the thread ends */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void watch_endings(void)
{
    if (pthread_key_create(&ending, free))
        abort();
}

float *thread_memory(int64_t floats)
{
    if (floats > memory_floats || memory_floats > MOST_KEPT) {
        pthread_once(&once, watch_endings);
        free(memory);
        memory_floats = (floats + 1023) / 1024 * 1024;
        memory = aligned_alloc(64, (size_t)memory_floats * sizeof(float));
        if (!memory || pthread_setspecific(ending, memory))
            abort(); /* a thread cannot return an error */
    }
    return memory;
}

/* Packs b into panels [columns / TILE_COLUMNS][depth][TILE_COLUMNS]; the last is padded with zeros. */
static void pack_right(const Product *p, int64_t first, int64_t depth, int64_t column, int64_t columns, float *to)
{
    for (int64_t panel = 0; panel < columns; panel += TILE_COLUMNS, to += depth * TILE_COLUMNS) {
        int64_t count = columns - panel < TILE_COLUMNS ? columns - panel : TILE_COLUMNS;
        const float *from = p->b + first * p->b_step + (column + panel) * p->b_column;
        if (count < TILE_COLUMNS)
            memset(to, 0, (size_t)(depth * TILE_COLUMNS) * sizeof(float));
        if (p->b_column == 1)
            for (int64_t i = 0; i < depth; i++)
                memcpy(to + i * TILE_COLUMNS, from + i * p->b_step, (size_t)count * sizeof(float));
        else
            for (int64_t block = 0; block < depth; block += 16)
                for (int64_t j = 0; j < count; j++)
                    for (int64_t i = block; i < depth && i < block + 16; i++)
                        to[i * TILE_COLUMNS + j] = from[i * p->b_step + j * p->b_column];
    }
}

/* Packs a into bands [rows / tile][depth][tile]; rows after the last are not written. */
static void pack_left(const Product *p, int64_t row, int64_t rows, int64_t first, int64_t depth, float *to)
{
    const int64_t tile = TILE_ROWS(TILE_VECTORS);
    for (int64_t r = 0; r < rows; r += tile, to += depth * tile) {
        int64_t count = rows - r < tile ? rows - r : tile;
        const float *from = p->a + (row + r) * p->a_row + first * p->a_step;
        if (count == tile && p->a_row == 1)
            for (int64_t i = 0; i < depth; i++)
                memcpy(to + i * tile, from + i * p->a_step, TILE_ROWS(TILE_VECTORS) * sizeof(float));
        else if (count == tile)
            for (int64_t i = 0; i < depth; i++)
                for (int64_t j = 0; j < tile; j++)
                    to[i * tile + j] = from[j * p->a_row + i * p->a_step];
        else
            for (int64_t i = 0; i < depth; i++)
                for (int64_t j = 0; j < count; j++)
                    to[i * tile + j] = from[j * p->a_row + i * p->a_step];
    }
}

/* The product of a band of rows and one panel; writes its first `columns` columns. */
static BLOCK void panel_band(int64_t rows, int64_t columns, int64_t depth, Left a, const float *panel, float *c,
                             int64_t c_row, int add)
{
    if (columns == TILE_COLUMNS) {
        small_column(TILE_VECTORS, rows, depth, a, panel, TILE_COLUMNS, c, c_row, add);
        return;
    }
    float edge[TILE_ROWS(TILE_VECTORS) * TILE_COLUMNS] = {0};
    if (add == CONTINUE)
        for (int64_t r = 0; r < rows; r++)
            memcpy(edge + r * TILE_COLUMNS, c + r * c_row, (size_t)columns * sizeof(float));
    small_column(TILE_VECTORS, rows, depth, a, panel, TILE_COLUMNS, edge, TILE_COLUMNS, add == ADD ? SET : add);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++)
            c[r * c_row + j] =
                add == ADD ? c[r * c_row + j] + edge[r * TILE_COLUMNS + j] : edge[r * TILE_COLUMNS + j];
}

static void product_block(const Product *p, int64_t row, int64_t rows, int64_t first, int64_t depth, int64_t column,
                          int64_t columns, const float *right, float *packed)
{
    const int64_t tile = TILE_ROWS(TILE_VECTORS);
    int along = p->a_step == 1, add = first ? (p->as_engine ? CONTINUE : ADD) : p->add ? ADD : SET;
    if (!along)
        pack_left(p, row, rows, first, depth, packed);
    for (int64_t panel = 0; panel < columns; panel += TILE_COLUMNS) {
        int64_t count = columns - panel < TILE_COLUMNS ? columns - panel : TILE_COLUMNS;
        for (int64_t r = 0; r < rows; r += tile) {
            Left a = along ? (Left){p->a + (row + r) * p->a_row + first, p->a_row, 1}
                           : (Left){packed + r * depth, 1, tile};
            panel_band(rows - r < tile ? rows - r : tile, count, depth, a, right + panel * depth,
                       p->c + (row + r) * p->c_row + column + panel, p->c_row, add);
        }
    }
}

int64_t product_floats(void) { return DEPTH * WIDTH + BAND * DEPTH; }

BLOCK void product_part(const Product *p, int64_t row, int64_t row_end, int64_t column, int64_t column_end, float *scratch)
{
    float *right = scratch, *left = scratch + DEPTH * WIDTH;
    for (int64_t j = column; j < column_end; j += WIDTH) {
        int64_t columns = column_end - j < WIDTH ? column_end - j : WIDTH;
        for (int64_t first = 0; first < p->depth; first += DEPTH) {
            int64_t depth = p->depth - first < DEPTH ? p->depth - first : DEPTH;
            pack_right(p, first, depth, j, columns, right);
            for (int64_t r = row; r < row_end; r += BAND)
                product_block(p, r, row_end - r < BAND ? row_end - r : BAND, first, depth, j, columns, right, left);
        }
    }
}

static void run_product(Team *team, int thread, void *argument)
{
    const Product *p = argument;
    const int64_t tile = TILE_ROWS(TILE_VECTORS);
    int64_t first, end;
    float *scratch = thread_memory(product_floats());
    if (p->rows >= p->columns) {
        share((p->rows + tile - 1) / tile, thread, team_size(team), &first, &end);
        end = end * tile < p->rows ? end * tile : p->rows;
        product_part(p, first * tile, end, 0, p->columns, scratch);
    } else {
        share((p->columns + TILE_COLUMNS - 1) / TILE_COLUMNS, thread, team_size(team), &first, &end);
        end = end * TILE_COLUMNS < p->columns ? end * TILE_COLUMNS : p->columns;
        product_part(p, 0, p->rows, first * TILE_COLUMNS, end, scratch);
    }
}

void etude_product(const Product *product, int64_t threads) { run_pieces((int)threads, run_product, (void *)product); }

/* Number of floats per SIMD vector on this machine. */
int64_t etude_lanes(void) { return LANES; }

/* Whether these products are faster than PyTorch's MKL, as on AMD processors: a few percent per product, plus the
 * call saved per expert, whose two products are one call. */
int64_t etude_outruns_mkl(void)
{
#if defined(__AVX2__) && defined(__FMA__) && defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}
