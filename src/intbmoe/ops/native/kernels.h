/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of native.c for one type and one instruction set; included once for each pair.
 *
 * Given by the includer: REAL and BITS, the number and the unsigned integer of its size; EXPONENT_SHIFT and
 * EXPONENT_BIAS of its format; ROUND_BY_ADDING, 1.5 · 2^(bits of the fraction); TERMS of the exponential's series;
 * TAIL, the polynomial of the normal distribution's tail; SQUARE_ROOT, the C library's; VECTOR_BYTES and ROWS_AT_ONCE,
 * at most 12, of the product; FACTORS_BY_LANE where an instruction can multiply by one lane of a register, which saves
 * loads; NAME(x), a name of this pair.
 *
 * Every sum of a row runs in an order that depends on the width alone, so its result depends neither on the rows beside
 * it nor on how rows are dealt to threads. The gradient of coefficients depends on all sizes, but not on the threads.
 */

#define LANES (VECTOR_BYTES / (int64_t)sizeof(REAL))
#define PANEL (2 * LANES)
#define STRIP (STRIP_BYTES / (int64_t)sizeof(REAL))
#define LINE (64 / (int64_t)sizeof(REAL)) /* of the cache */
#define PADDED(columns) (((columns) + PANEL - 1) / PANEL * PANEL)
#define UNROLL _Pragma("GCC unroll 32")
#include "product.h"
#include "compose.h"

/* e^x to the last place or two; 0 and infinity beyond the range of normal numbers, NaN stays NaN. */
static inline __attribute__((always_inline)) REAL NAME(exponential)(REAL x) {
    const REAL ln2 = (REAL)0.693147180559945309417232121458;
    const REAL ln2_high = sizeof(REAL) == 4 ? (REAL)0.693359375 : (REAL)0.693147180369123816490;
    const REAL ln2_low = sizeof(REAL) == 4 ? (REAL)-2.12194440054690583e-4 : (REAL)1.90821492927058770002e-10;
    const REAL highest = (EXPONENT_BIAS + 1) * ln2 + (REAL)0.1, lowest = -EXPONENT_BIAS * ln2 - (REAL)0.1;
    x = x > highest ? highest : x;
    x = x < lowest ? lowest : x;
    /* x = n·ln 2 + r; adding so large a number leaves n in the low bits. */
    union { REAL number; BITS bits; } shifted = {x * (REAL)1.44269504088896340736 + ROUND_BY_ADDING}, power;
    REAL n = shifted.number - ROUND_BY_ADDING;
    REAL r = x - n * ln2_high - n * ln2_low;
    REAL sum = (REAL)inverse_factorial[TERMS];
    UNROLL for (int i = TERMS - 1; i >= 0; i--) sum = sum * r + (REAL)inverse_factorial[i];
    power.bits = (shifted.bits + EXPONENT_BIAS) << EXPONENT_SHIFT;
    return sum * power.number;
}

static inline __attribute__((always_inline)) REAL NAME(sigmoid)(REAL x) {
    return 1 / (1 + NAME(exponential)(-x));
}

/* x·Φ(x). With z = |x|/√2 and t = (z − 3)/(z + 3), written so that it is 1 at infinity, the tail 1 − Φ(|x|) is
 * e^(−z²)·TAIL(t)/2: e^(z²)·erfc(z) is so smooth in t that a polynomial gives it to the last place. */
static inline __attribute__((always_inline)) REAL NAME(gelu)(REAL x) {
    const REAL z = (x < 0 ? -x : x) * (REAL)0.70710678118654752440;
    const REAL t = 1 - 6 / (z + 3);
    REAL sum = (REAL)TAIL[COUNT(TAIL) - 1];
    UNROLL for (int i = COUNT(TAIL) - 2; i >= 0; i--) sum = sum * t + (REAL)TAIL[i];
    const REAL tail = sum * NAME(exponential)(-z * z) / 2;
    return x * (x < 0 ? tail : 1 - tail);
}

/* The index-th weight of one block. */
static NAME(matrix) NAME(weight_of)(const Problem *p, int64_t index, int64_t block, int64_t inner, int64_t columns) {
    const REAL *scales = p->scales ? (const REAL *)p->scales[index] + block * columns : NULL;
    return NAME(rows_from)((NAME(matrix)){p->weights[index], scales}, block * inner, columns);
}

/* z = x ⊙ sigmoid(token_term + block_term). */
static void NAME(filter_row)(int64_t width, const REAL *restrict x, const REAL *restrict token_term,
                             const REAL *restrict block_term, REAL *restrict z) {
    _Pragma("omp simd") for (int64_t c = 0; c < width; c++)
        z[c] = x[c] * NAME(sigmoid)(token_term[c] + block_term[c]);
}

/* z = v ⊙ (1 + λ·SiLU(RMSNorm(g))) of [v | g] = vg + bias. */
static void NAME(gate_row)(int64_t width, const REAL *restrict vg, const REAL *restrict bias,
                           const REAL *restrict gain, REAL scale, REAL *restrict z) {
    const REAL *g = vg + width, *gate_bias = bias + width;
    REAL squares = 0;
    _Pragma("omp simd reduction(+ : squares)") for (int64_t c = 0; c < width; c++) {
        z[c] = g[c] + gate_bias[c];
        squares += z[c] * z[c];
    }
    REAL size = 1 / SQUARE_ROOT(squares / width + (REAL)RMS_EPS);
    _Pragma("omp simd") for (int64_t c = 0; c < width; c++) {
        REAL gate = z[c] * size * gain[c];
        z[c] = (vg[c] + bias[c]) * (1 + scale * gate * NAME(sigmoid)(gate));
    }
}

static void NAME(add_bias)(int64_t width, const REAL *restrict v, const REAL *restrict bias, REAL *restrict z) {
    _Pragma("omp simd") for (int64_t c = 0; c < width; c++) z[c] = v[c] + bias[c];
}

/* z = GELU(v + bias). */
static void NAME(activate_row)(int64_t width, const REAL *restrict v, const REAL *restrict bias, REAL *restrict z) {
    _Pragma("omp simd") for (int64_t c = 0; c < width; c++) z[c] = NAME(gelu)(v[c] + bias[c]);
}

/* z = SiLU(g) ⊙ v. */
static void NAME(multiply_gate_row)(int64_t width, const REAL *restrict g, const REAL *restrict v, REAL *restrict z) {
    _Pragma("omp simd") for (int64_t c = 0; c < width; c++) z[c] = g[c] * NAME(sigmoid)(g[c]) * v[c];
}

/* LayerNorm in place. */
static void NAME(normalise_row)(int64_t width, REAL *restrict z, const REAL *restrict gain,
                                const REAL *restrict shift) {
    REAL sum = 0, squares = 0;
    _Pragma("omp simd reduction(+ : sum)") for (int64_t c = 0; c < width; c++) sum += z[c];
    REAL mean = sum / width;
    _Pragma("omp simd reduction(+ : squares)") for (int64_t c = 0; c < width; c++) {
        z[c] -= mean;
        squares += z[c] * z[c];
    }
    REAL size = 1 / SQUARE_ROOT(squares / width + (REAL)LAYER_NORM_EPS);
    _Pragma("omp simd") for (int64_t c = 0; c < width; c++) z[c] = z[c] * size * gain[c] + shift[c];
}

/* The tokens of some rows, filtered for their block. */
static void NAME(take_rows)(const Problem *p, Rows rows, void *slot) {
    const int64_t dim = p->widths[0];
    for (int64_t r = 0; r < rows.count; r++) {
        int64_t token = p->token[rows.first + r];
        const REAL *x = (const REAL *)p->x + token * p->x_stride;
        REAL *z = (REAL *)slot + r * dim;
        if (p->token_term)
            NAME(filter_row)(dim, x, (const REAL *)p->token_term + token * dim,
                             (const REAL *)p->block_term + rows.block * dim, z);
        else
            memcpy(z, x, dim * sizeof(REAL));
    }
}

/* The products of one layer: a share of their columns, from the slot's rows to what follows these in the slot. */
static void NAME(multiply_layer)(const Problem *p, Rows rows, int64_t layer, Share share, void *slot, void *panels) {
    const int64_t inner = p->widths[layer], columns = (p->scale ? 2 : 1) * p->widths[layer + 1];
    const int64_t half = PADDED(columns), twice = p->network == SWIGLU && layer == 0;
    const REAL *z = slot;
    REAL *product = (REAL *)slot + rows.count * p->most_inner;
    for (int64_t i = 0; i <= twice; i++) {
        const int64_t index = i + layer + (p->network == SWIGLU && layer == 1);
        NAME(multiply)(rows.count, inner, columns, share, z, NAME(weight_of)(p, index, rows.block, inner, columns),
                       product + i * half, (1 + twice) * half, panels);
    }
}

/* The rest of the layer: from products to rows, after the last layer to those of all blocks.
 *
 * A block: z = gate, and LayerNorm before another layer. An expert: GELU(z W_0 + b_0) W_1 + b_1, or
 * (SiLU(z W_0) ⊙ z W_1) W_2. */
static void NAME(finish_layer)(const Problem *p, Rows rows, int64_t layer, void *slot) {
    const int64_t width = p->widths[layer + 1], columns = (p->scale ? 2 : 1) * width, half = PADDED(columns);
    const int last = layer == p->layers - 1, gated = p->network == SWIGLU;
    const REAL *product = (const REAL *)slot + rows.count * p->most_inner;
    const REAL *bias = gated ? NULL : (const REAL *)p->biases[layer] + rows.block * columns;
    for (int64_t r = 0; r < rows.count; r++) {
        REAL *to = last ? (REAL *)p->rows + (rows.first + r) * p->widths[0] : (REAL *)slot + r * width;
        const REAL *v = product + r * (gated && layer == 0 ? 2 * half : half);
        if (gated && last)
            memcpy(to, v, width * sizeof(REAL));
        else if (gated)
            NAME(multiply_gate_row)(width, v, v + half, to);
        else if (p->network == GELU && !last)
            NAME(activate_row)(width, v, bias, to);
        else if (p->scale)
            NAME(gate_row)(width, v, bias, p->gains[layer], *(const REAL *)p->scale, to);
        else
            NAME(add_bias)(width, v, bias, to);
        if (p->network == BLOCK && !last) NAME(normalise_row)(width, to, p->norm_gains[layer], p->norm_shifts[layer]);
    }
}

/* The tokens' weighted sums over their rows, plus what the shared expert gave them. */
static void NAME(combine)(const Problem *p, int64_t first, int64_t end) {
    const int64_t dim = p->widths[0];
    for (int64_t token = first; token < end; token++) {
        REAL *restrict y = (REAL *)p->y + token * dim;
        if (p->shared)
            memcpy(y, (const REAL *)p->shared + token * p->shared_stride, dim * sizeof(REAL));
        else
            memset(y, 0, dim * sizeof(REAL));
        for (int64_t choice = token * p->choices; choice < (token + 1) * p->choices; choice++) {
            if (p->row_of[choice] < 0) continue;
            const REAL weight = ((const REAL *)p->route_weights)[choice];
            const REAL *restrict row = (const REAL *)p->rows + p->row_of[choice] * dim;
            _Pragma("omp simd") for (int64_t c = 0; c < dim; c++) y[c] += weight * row[c];
        }
    }
}

/* For each token the highest scores, equal ones by index, and their entries of the softmax over all. */
static void NAME(route)(int64_t first, int64_t end, int64_t blocks, int64_t choices, const void *all_scores,
                        int64_t *all_ids, void *all_weights) {
    for (int64_t token = first; token < end; token++) {
        const REAL *scores = (const REAL *)all_scores + token * blocks;
        int64_t *ids = all_ids + token * choices;
        REAL *weights = (REAL *)all_weights + token * choices, highest = scores[0], sum = 0;
        for (int64_t b = 1; b < blocks; b++) highest = scores[b] > highest ? scores[b] : highest;
        for (int64_t b = 0; b < blocks; b++) sum += NAME(exponential)(scores[b] - highest);
        for (int64_t filled = 0, b = 0; b < blocks; b++) {
            const REAL score = scores[b];
            int64_t place = filled;
            for (; place > 0; place--) { /* descending, NaN before all numbers, as torch sorts */
                const REAL other = scores[ids[place - 1]];
                if (!(score > other || (score != score && other == other))) break;
            }
            if (place == choices) continue;
            if (filled < choices) filled++;
            for (int64_t i = filled - 1; i > place; i--) ids[i] = ids[i - 1];
            ids[place] = b;
        }
        for (int64_t i = 0; i < choices; i++) weights[i] = NAME(exponential)(scores[ids[i]] - highest) / sum;
    }
}

#undef LANES
#undef PANEL
#undef STRIP
#undef LINE
#undef PADDED
#undef UNROLL
