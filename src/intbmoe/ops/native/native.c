/* SPDX-License-Identifier: Apache-2.0 */
/* On the CPU: IntBMoE's blocks, or a sparse method's experts, without gradients, from tokens to weighted sums in one
 * call; the choice of blocks; and the composition of blocks, with its gradients.
 *
 * At a few hundred tokens most of the time of the layer is not arithmetic: operations of 10 µs each, rows written
 * and read between them, and products of some ten rows that two threads share badly. Here each thread takes some rows
 * of one block all the way through, in memory that stays in its cache.
 *
 * ``kernels.h`` has the arithmetic, in float and double, compiled for each set of instructions below; which one runs
 * is decided when the library is loaded. ctypes calls the functions that are not static; ``naive.py`` in
 * ``ops/blocks/``, ``ops/experts/``, ``ops/choose/`` and ``ops/compose/`` is their specification.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define API __attribute__((visibility("default")))
#define RMS_EPS 1e-8
#define LAYER_NORM_EPS 1e-5
#define FEWEST_ROWS 12 /* that are worth reading a weight for */
#define FEWEST_BYTES 65536 /* of weights that are worth waking a thread for */
#define FEW_ROWS 4 /* for each thread: dealt out by pieces, they would leave threads idle */
#define MOST_ROWS 128  /* beyond these, what a thread holds leaves its cache */
#define TOKENS_AT_ONCE 512
#define DEPTH 384  /* inputs of a product that are summed at once: so many rows of a weight are at hand (TLB, cache) */
#define CHUNK 1024 /* columns of a weight that a few rows are multiplied by at once: their sums stay in the cache */
#define CACHED 65536 /* entries of all matrices whose gradients are computed at once, so that they stay in the cache */
#define NARROWEST 32 /* columns of bases that can be composed */
#define MOST_ROWS_COMPOSED 128 /* bases, and blocks times paths: one panel of all of them lies on the stack */
#define STRIP_BYTES 128 /* of each row of a weight that are packed at once: whole lines of the cache */
#define PANELS_BYTES (DEPTH * STRIP_BYTES)

enum { BLOCK, GELU, SWIGLU };

/* What ``problem.py`` fills in; the two must agree field by field. Experts are blocks of another ``network``, with two
 * layers, where those fields are NULL that they have no use for. */
typedef struct {
    int64_t tokens, choices, blocks, layers, threads, is_double, network;
    const int64_t *widths;               /* d_0 … d_L */
    const void *x;
    int64_t x_stride;
    const void *token_term, *block_term; /* (tokens, d) and (blocks, d) of the filter, or NULL */
    const int64_t *ids;                  /* (tokens, choices), −1 for none */
    const void *route_weights;           /* (tokens, choices) */
    const void *shared;                  /* (tokens, d) or NULL */
    int64_t shared_stride;
    const void **weights, **biases, **gains, **norm_gains, **norm_shifts; /* one of each a layer; SWIGLU: 3 weights */
    const void **scales; /* one a weight, (blocks, columns): the weights are int8 and multiplied by them; or NULL */
    const void *scale;                                                   /* λ; NULL without a gate */
    void *y;
    int64_t *load;
    void *scratch;
    /* The rest is filled in here. */
    int64_t *token, *row_of, *end;
    void *rows;
    int64_t most_inner, most_columns, rows_at_once;
} Problem;

/* What ``ops/compose/native.py`` fills in; the two must agree field by field. */
typedef struct {
    int64_t paths, blocks, bases, lines, width, chunks, threads, is_double;
    const void *coefficients; /* (paths, blocks, bases); backward: (bases, paths, blocks) */
    const void *pool;         /* (bases, lines, width) */
    void *composed;           /* (blocks, lines, paths, width); backward: its gradient */
    void *pool_grad;          /* as the pool, or NULL */
    void *sums;               /* (chunks, paths, blocks, bases), of which the first becomes a gradient, or NULL */
} Composition;

/* Some rows of one block, among the rows of all blocks. */
typedef struct {
    int64_t block, first, count;
} Rows;

/* Of the columns of a product, from first/parts to end/parts. */
typedef struct {
    int64_t first, end, parts;
} Share;

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t round_up(int64_t bytes) { return (bytes + 127) / 128 * 128; }

static const double inverse_factorial[] = {
    1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800,
    1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800,
};

#define COUNT(table) ((int)(sizeof(table) / sizeof *(table)))
/* e^(z²)·erfc(z) in t = (z − 3)/(z + 3), interpolated at Chebyshev's nodes in 60 digits. erfc is off by less than 3e-9
 * and 5e-17, before rounding. */
static const double tail_float[] = {
    0.1790011512, -0.3262336487, 0.2456037436, -0.1501141485, 0.07166700699, -0.02440273849, 0.004262462967,
    0.0007322226274, -0.0005812243768, 1.831984227e-5, 4.686422793e-5,
};
static const double tail_double[] = {
    0.17900115118138995, -0.326233560043036393, 0.245603801712330275, -0.150115936500851078, 0.0716658371980315794,
    -0.0243924993167297744, 0.00426913633144050011, 0.000707746415182294912, -0.000597061931538900391,
    0.0000452554611347997453, 0.0000640564402886566145, -0.0000128611845396775844, -7.97765502995170468e-6,
    2.12189112403884135e-6, 1.25123255576462661e-6, -2.97322501085048395e-7, -2.32463352012317046e-7,
    3.24188601841105752e-8, 4.44260054612182701e-8, -1.73792450195424319e-9, -7.13672163644283761e-9,
    -8.07188332772663987e-11, 6.64600336868902482e-10,
};

typedef struct {
    const char *name;
    struct {
        void (*take_rows)(const Problem *, Rows, void *slot);
        void (*multiply_layer)(const Problem *, Rows, int64_t layer, Share, void *slot, void *panels);
        void (*finish_layer)(const Problem *, Rows, int64_t layer, void *slot);
        void (*combine)(const Problem *, int64_t first, int64_t end);
        void (*route)(int64_t first, int64_t end, int64_t blocks, int64_t choices, const void *, int64_t *, void *);
        void (*compose)(const Composition *, int64_t first, int64_t end);
        void (*compose_backward)(const Composition *, int64_t first, int64_t end, void *sums);
    } of[2]; /* float, double */
} Kernels;

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define TABLE_(set) set##_kernels
#define TABLE(set) TABLE_(set)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

#define SET plain
#define VECTOR_BYTES 16
#define ROWS_AT_ONCE 4
#include "instructions.h"

#ifdef __aarch64__ /* every such CPU has these instructions, and 32 registers for sums where ``plain`` counts on 16 */
#define SET neon
#define VECTOR_BYTES 16
#define ROWS_AT_ONCE 8
#define FACTORS_BY_LANE
#include "instructions.h"
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define X86
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define SET avx2
#define VECTOR_BYTES 32
#define ROWS_AT_ONCE 6
#include "instructions.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma")
#define SET avx512
#define VECTOR_BYTES 64
#define ROWS_AT_ONCE 12
#include "instructions.h"
#pragma GCC pop_options
#endif

static const Kernels *kernels = &plain_kernels;

/* Use the instructions so named, or with "" the best there are; their name, or NULL when the CPU has them not. */
API const char *intbmoe_select(const char *name) {
    const Kernels *found = !*name || !strcmp(name, "plain") ? &plain_kernels : NULL;
#ifdef __aarch64__
    if (!*name || !strcmp(name, "neon")) found = &neon_kernels;
#endif
#ifdef X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (avx2 && (!*name || !strcmp(name, "avx2"))) found = &avx2_kernels;
    if (avx512 && (!*name || !strcmp(name, "avx512"))) found = &avx512_kernels;
#endif
    if (found) kernels = found;
    return found ? found->name : NULL;
}

/* SOURCE is a checksum of these files, so that a library built from older ones can be told. */
API uint32_t intbmoe_source(void) { return SOURCE; }

/* Bytes that a row needs on its way: its numbers, and their product. */
static int64_t row_bytes(const Problem *p) {
    int64_t size = p->is_double ? sizeof(double) : sizeof(float);
    return round_up(p->most_inner * size) + (p->network == SWIGLU ? 2 : 1) * round_up(p->most_columns * size);
}

/* Bytes of ``scratch``; fills in the sizes that it and ``intbmoe_run_blocks`` need. */
API int64_t intbmoe_scratch_bytes(Problem *p) {
    const int64_t assignments = p->tokens * p->choices, size = p->is_double ? sizeof(double) : sizeof(float);
    int64_t most_bytes = 0;
    p->most_inner = p->most_columns = 0;
    for (int64_t layer = 0; layer < p->layers; layer++) {
        const int64_t columns = (p->scale ? 2 : 1) * p->widths[layer + 1];
        p->most_inner = max(p->most_inner, p->widths[layer]);
        p->most_columns = max(p->most_columns, columns);
        most_bytes = max(most_bytes, p->widths[layer] * columns * size);
    }
    p->threads = min(p->threads, 1 + assignments * most_bytes / FEWEST_BYTES);
    /* Twice as many pieces as threads, so that uneven ones even out; but each reads its block's weights. */
    p->rows_at_once = min(MOST_ROWS, max(FEWEST_ROWS, assignments / (2 * p->threads) + 1));
    int64_t places = (2 * assignments + p->blocks) * sizeof(int64_t);
    return 128 + round_up(assignments * p->widths[0] * size) + round_up(places) +
           p->threads * (PANELS_BYTES + p->rows_at_once * row_bytes(p));
}

/* A counting sort: the token of each row, the row of each choice, where each block's rows end. */
static void sort_by_block(Problem *p) {
    const int64_t assignments = p->tokens * p->choices;
    memset(p->load, 0, p->blocks * sizeof(int64_t));
    for (int64_t i = 0; i < assignments; i++)
        if (p->ids[i] >= 0) p->load[p->ids[i]]++;
    int64_t rows = 0;
    for (int64_t b = 0; b < p->blocks; b++) {
        p->end[b] = rows; /* its start, until its rows are placed */
        rows += p->load[b];
    }
    for (int64_t i = 0; i < assignments; i++) {
        p->row_of[i] = p->ids[i] < 0 ? -1 : p->end[p->ids[i]]++;
        if (p->row_of[i] >= 0) p->token[p->row_of[i]] = i / p->choices;
    }
}

static int64_t pieces_of(const Problem *p, int64_t block) {
    return (p->load[block] + p->rows_at_once - 1) / p->rows_at_once;
}

/* The piece-th piece of all blocks' rows, one block after the other. */
static Rows rows_of(const Problem *p, int64_t piece) {
    int64_t block = 0, pieces;
    while (piece >= (pieces = pieces_of(p, block))) {
        piece -= pieces;
        block++;
    }
    int64_t rows = p->load[block], start = p->end[block] - rows;
    int64_t first = rows * piece / pieces, end = rows * (piece + 1) / pieces;
    return (Rows){block, start + first, end - first};
}

/* One thread takes a piece all the way through. */
static void run_piece(const Problem *p, int64_t piece, void *slot, void *panels) {
    const Rows rows = rows_of(p, piece);
    kernels->of[p->is_double].take_rows(p, rows, slot);
    for (int64_t layer = 0; layer < p->layers; layer++) {
        kernels->of[p->is_double].multiply_layer(p, rows, layer, (Share){0, 1, 1}, slot, panels);
        kernels->of[p->is_double].finish_layer(p, rows, layer, slot);
    }
}

/* All threads of a team take all pieces through together, one layer after the other. Of the columns of all pieces, each
 * thread multiplies by the same number, side by side: by all of some pieces, and by a share of one or two. Each row has
 * a place of its own among the slots. */
static void share_pieces(const Problem *p, int64_t pieces, int64_t thread, int64_t threads, char *slots, void *panels) {
    const int64_t bytes = row_bytes(p), start = thread * pieces, end = start + pieces; /* in parts of a piece */
#pragma omp for
    for (int64_t i = 0; i < pieces; i++) {
        const Rows rows = rows_of(p, i);
        kernels->of[p->is_double].take_rows(p, rows, slots + rows.first * bytes);
    }
    for (int64_t layer = 0; layer < p->layers; layer++) {
        for (int64_t i = start / threads; i * threads < end; i++) {
            const Rows rows = rows_of(p, i);
            const Share share = {max(0, start - i * threads), min(threads, end - i * threads), threads};
            kernels->of[p->is_double].multiply_layer(p, rows, layer, share, slots + rows.first * bytes, panels);
        }
#pragma omp barrier
#pragma omp for
        for (int64_t i = 0; i < pieces; i++) {
            const Rows rows = rows_of(p, i);
            kernels->of[p->is_double].finish_layer(p, rows, layer, slots + rows.first * bytes);
        }
    }
}

/* Ids are trusted to lie in −1 … blocks − 1. */
API void intbmoe_run_blocks(Problem *p) {
    const int64_t assignments = p->tokens * p->choices, bytes = p->rows_at_once * row_bytes(p);
    char *free = (char *)round_up((int64_t)p->scratch);
    p->rows = free;
    free += round_up(assignments * p->widths[0] * (p->is_double ? sizeof(double) : sizeof(float)));
    p->token = (int64_t *)free;
    p->row_of = p->token + assignments;
    p->end = p->row_of + assignments;
    char *panels = free + round_up((2 * assignments + p->blocks) * sizeof(int64_t));
    char *slots = panels + p->threads * PANELS_BYTES;
    sort_by_block(p);
    int64_t pieces = 0;
    for (int64_t b = 0; b < p->blocks; b++) pieces += pieces_of(p, b);
    /* The slots of all threads hold all rows in both cases: pieces have at most ``rows_at_once``, which is more than
     * FEW_ROWS. */
    const int shared = pieces < p->threads || assignments < FEW_ROWS * p->threads;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
#ifdef _OPENMP
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
        const int64_t thread = 0, threads = 1;
#endif
        char *own = panels + thread * PANELS_BYTES;
        if (shared) {
            share_pieces(p, pieces, thread, threads, slots, own);
        } else {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < pieces; i++) run_piece(p, i, slots + thread * bytes, own);
        }
        kernels->of[p->is_double].combine(p, p->tokens * thread / threads, p->tokens * (thread + 1) / threads);
    }
}

/* Scores (tokens, blocks) → ids and weights (tokens, choices). */
API void intbmoe_route(int64_t is_double, int64_t threads, int64_t tokens, int64_t blocks, int64_t choices,
                       const void *scores, int64_t *ids, void *weights) {
    const int64_t pieces = (tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
#pragma omp parallel for num_threads(threads) if (threads > 1 && pieces > 1)
    for (int64_t piece = 0; piece < pieces; piece++)
        kernels->of[is_double].route(piece * TOKENS_AT_ONCE, min(tokens, (piece + 1) * TOKENS_AT_ONCE), blocks, choices,
                                     scores, ids, weights);
}

/* For ``ops/compose/native.py``, which must not ask for anything else. */
API const int64_t intbmoe_narrowest = NARROWEST, intbmoe_most_rows = MOST_ROWS_COMPOSED;

API void intbmoe_compose(const Composition *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1 && p->lines > 1)
    for (int64_t line = 0; line < p->lines; line++) kernels->of[p->is_double].compose(p, line, line + 1);
}

/* Each chunk of lines has its own sums of the coefficients' gradient, which are then added in order. */
API void intbmoe_compose_backward(const Composition *p) {
    const int64_t entries = p->paths * p->blocks * p->bases, bytes = p->is_double ? sizeof(double) : sizeof(float);
    const int64_t at_once = max(1, CACHED / (p->width * (p->bases + p->paths * p->blocks)));
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1 && p->chunks > 1)
    for (int64_t chunk = 0; chunk < p->chunks; chunk++) {
        const int64_t end = p->lines * (chunk + 1) / p->chunks;
        void *sums = p->sums ? (char *)p->sums + chunk * entries * bytes : NULL;
        if (sums) memset(sums, 0, entries * bytes);
        for (int64_t line = p->lines * chunk / p->chunks; line < end; line += at_once)
            kernels->of[p->is_double].compose_backward(p, line, min(end, line + at_once), sums);
    }
    for (int64_t i = entries; p->sums && i < p->chunks * entries; i++)
        if (p->is_double) ((double *)p->sums)[i % entries] += ((double *)p->sums)[i];
        else ((float *)p->sums)[i % entries] += ((float *)p->sums)[i];
}
