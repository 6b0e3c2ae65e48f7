/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of native.c for one type and one instruction set; included once for each pair.
 *
 * Given by the includer: REAL and BITS, the number and the unsigned integer of its size; EXPONENT_SHIFT and
 * EXPONENT_BIAS of its format; ROUND_BY_ADDING, 1.5 · 2^(bits of the fraction); TERMS of the exponential's series;
 * TAIL, the polynomial of the normal distribution's tail; SQUARE_ROOT, the C library's; VECTOR_BYTES and ROWS_AT_ONCE,
 * at most 12, of the product; FACTORS_BY_LANE where an instruction can multiply by one lane of a register, which saves
 * loads; NAME(x), a name of this pair.
 *
 * Every sum runs in an order that depends on the width alone, so a row's result depends neither on the rows beside it
 * nor on how rows are dealt to threads.
 */

#define LANES (VECTOR_BYTES / (int64_t)sizeof(REAL))
#define PANEL (2 * LANES)
#define STRIP (STRIP_BYTES / (int64_t)sizeof(REAL))
#define LINE (64 / (int64_t)sizeof(REAL)) /* of the cache */
#define PADDED(columns) (((columns) + PANEL - 1) / PANEL * PANEL)
#define UNROLL _Pragma("GCC unroll 32")
#define CASE(n) \
    case n: \
        if (direct) NAME(multiply_rows)(n, inner, from, a_stride, weight + c, columns, onto, to, out_stride); \
        else NAME(multiply_rows)(n, inner, from, a_stride, panel, PANEL, onto, to, out_stride); \
        break;
#define STREAMED(n) case n: NAME(stream_rows)(n, inner, columns, a, a_stride, weight, out, out_stride); return;

typedef REAL NAME(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL NAME(unaligned) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

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

/* out (rows, PANEL) = a (rows, inner) · panel (inner, PANEL), or added to it. The panel's rows are ``panel_stride``
 * apart. ``rows`` is a constant wherever this is inlined, and so is the stride of packed panels. */
static inline __attribute__((always_inline)) void NAME(multiply_rows)(
    const int rows, int64_t inner, const REAL *restrict a, int64_t a_stride, const REAL *restrict panel,
    int64_t panel_stride, int onto, REAL *restrict out, int64_t out_stride) {
    NAME(vector) sum[ROWS_AT_ONCE][2];
    UNROLL for (int r = 0; r < rows; r++) {
        sum[r][0] = sum[r][1] = (NAME(vector)){0};
        if (onto) {
            sum[r][0] = *(const NAME(unaligned) *)(out + r * out_stride);
            sum[r][1] = *(const NAME(unaligned) *)(out + r * out_stride + LANES);
        }
    }
    int64_t i = 0;
#ifdef FACTORS_BY_LANE
    for (; i + LANES <= inner; i += LANES) {
        NAME(vector) factors[ROWS_AT_ONCE];
        UNROLL for (int r = 0; r < rows; r++) factors[r] = *(const NAME(unaligned) *)(a + r * a_stride + i);
        UNROLL for (int lane = 0; lane < LANES; lane++) {
            NAME(vector) left = *(const NAME(unaligned) *)(panel + (i + lane) * panel_stride);
            NAME(vector) right = *(const NAME(unaligned) *)(panel + (i + lane) * panel_stride + LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                NAME(vector) factor = factors[r][lane] - (NAME(vector)){0};
                sum[r][0] += factor * left;
                sum[r][1] += factor * right;
            }
        }
    }
#endif
    for (; i < inner; i++) {
        if (panel_stride != PANEL) /* the next panel: strides are too long for the CPU to guess */
            for (int64_t ahead = PANEL; ahead < 2 * PANEL; ahead += LINE)
                __builtin_prefetch(panel + i * panel_stride + ahead);
        NAME(vector) left = *(const NAME(unaligned) *)(panel + i * panel_stride);
        NAME(vector) right = *(const NAME(unaligned) *)(panel + i * panel_stride + LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            NAME(vector) factor = a[r * a_stride + i] - (NAME(vector)){0};
            sum[r][0] += factor * left;
            sum[r][1] += factor * right;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        *(NAME(unaligned) *)(out + r * out_stride) = sum[r][0];
        *(NAME(unaligned) *)(out + r * out_stride + LANES) = sum[r][1];
    }
}

/* A strip of the weight's columns as panels, one after another; columns beyond the last are zeros. The next strip is on
 * its way meanwhile. */
static void NAME(pack)(int64_t inner, int64_t columns, const REAL *restrict weight, int64_t stride,
                       REAL *restrict panels) {
    for (int64_t i = 0; i < inner; i++, weight += stride, panels += PANEL) {
        if (columns >= STRIP) {
            UNROLL for (int64_t c = 0; c < STRIP; c += LANES)
                *(NAME(vector) *)(panels + c / PANEL * inner * PANEL + c % PANEL) =
                    *(const NAME(unaligned) *)(weight + c);
            if (columns > STRIP)
                for (int64_t ahead = 0; ahead < STRIP; ahead += LINE)
                    __builtin_prefetch(weight + STRIP + ahead);
        } else {
            for (int64_t c = 0; c < STRIP; c++)
                panels[c / PANEL * inner * PANEL + c % PANEL] = c < columns ? weight[c] : 0;
        }
    }
}

/* The product over at most DEPTH inputs, ``onto`` what is there or not.
 *
 * Where rows are so few that each panel is read once, it is read where it is, unless it is the last and not full. */
static void NAME(multiply_part)(int64_t rows, int64_t inner, int64_t columns, const REAL *a, int64_t a_stride,
                                const REAL *weight, int onto, REAL *out, int64_t out_stride, REAL *panels) {
    int64_t pieces = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int64_t c = 0; c < columns; c += PANEL) {
        const REAL *panel = panels + c % STRIP * inner;
        const int direct = pieces == 1 && columns - (c - c % STRIP) >= STRIP;
        if (!direct && panel == panels) NAME(pack)(inner, columns - c, weight + c, columns, panels);
        for (int64_t piece = 0; piece < pieces; piece++) {
            int64_t first = rows * piece / pieces, count = rows * (piece + 1) / pieces - first;
            const REAL *from = a + first * a_stride;
            REAL *to = out + first * out_stride + c;
            switch (count) { /* one kernel for each number, so that its sums stay in registers */
                CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS_AT_ONCE > 4
                CASE(5) CASE(6)
#endif
#if ROWS_AT_ONCE > 6
                CASE(7) CASE(8)
#endif
#if ROWS_AT_ONCE > 8
                CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
    }
}

/* The product for a few rows, which wait for memory: the weight is read from front to back. Every sum still runs in the
 * order of the inputs. */
static inline __attribute__((always_inline)) void NAME(stream_rows)(
    const int rows, int64_t inner, int64_t columns, const REAL *restrict a, int64_t a_stride,
    const REAL *restrict weight, REAL *restrict out, int64_t out_stride) {
    for (int64_t start = 0; start < columns; start += CHUNK) {
        const int64_t count = columns - start < CHUNK ? columns - start : CHUNK;
        for (int r = 0; r < rows; r++) memset(out + r * out_stride + start, 0, count * sizeof(REAL));
        int64_t i = 0;
        for (; i + 4 <= inner; i += 4) {
            const REAL *w = weight + i * columns + start;
            UNROLL for (int r = 0; r < rows; r++) {
                const REAL *f = a + r * a_stride + i;
                const REAL f0 = f[0], f1 = f[1], f2 = f[2], f3 = f[3];
                REAL *to = out + r * out_stride + start;
                _Pragma("omp simd") for (int64_t c = 0; c < count; c++) {
                    REAL sum = to[c];
                    sum += f0 * w[c];
                    sum += f1 * w[columns + c];
                    sum += f2 * w[2 * columns + c];
                    sum += f3 * w[3 * columns + c];
                    to[c] = sum;
                }
            }
        }
        for (; i < inner; i++)
            UNROLL for (int r = 0; r < rows; r++) {
                const REAL f = a[r * a_stride + i];
                REAL *to = out + r * out_stride + start;
                _Pragma("omp simd") for (int64_t c = 0; c < count; c++) to[c] += f * weight[i * columns + start + c];
            }
    }
}

/* out (rows, ≥ columns) = a (rows, inner) · weight (inner, columns); out_stride is a multiple of PANEL. */
static void NAME(multiply)(int64_t rows, int64_t inner, int64_t columns, const REAL *a, int64_t a_stride,
                           const REAL *weight, REAL *out, int64_t out_stride, REAL *panels) {
    switch (rows) {
        STREAMED(1) STREAMED(2) STREAMED(3) STREAMED(4)
    }
    for (int64_t start = 0; start < inner; start += DEPTH)
        NAME(multiply_part)(rows, inner - start < DEPTH ? inner - start : DEPTH, columns, a + start, a_stride,
                            weight + start * columns, start > 0, out, out_stride, panels);
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

/* The internal layers of one block: its filtered rows ``z``, in place, to outputs. */
static void NAME(run_block)(const Problem *p, int64_t block, int64_t first, int64_t rows, REAL *panels, REAL *z,
                            REAL *product) {
    for (int64_t layer = 0; layer < p->layers; layer++) {
        const int64_t inner = p->widths[layer], width = p->widths[layer + 1];
        const int64_t columns = p->scale ? 2 * width : width, stride = PADDED(columns);
        const REAL *weight = (const REAL *)p->weights[layer] + block * inner * columns;
        const REAL *bias = (const REAL *)p->biases[layer] + block * columns;
        const int last = layer == p->layers - 1;
        NAME(multiply)(rows, inner, columns, z, inner, weight, product, stride, panels);
        for (int64_t r = 0; r < rows; r++) {
            REAL *to = last ? (REAL *)p->rows + (first + r) * p->widths[0] : z + r * width;
            if (p->scale)
                NAME(gate_row)(width, product + r * stride, bias, p->gains[layer], *(const REAL *)p->scale, to);
            else
                NAME(add_bias)(width, product + r * stride, bias, to);
            if (!last) NAME(normalise_row)(width, to, p->norm_gains[layer], p->norm_shifts[layer]);
        }
    }
}

/* The same of an expert: GELU(z W_0 + b_0) W_1 + b_1, or (SiLU(z W_0) ⊙ z W_1) W_2. */
static void NAME(run_expert)(const Problem *p, int64_t expert, int64_t first, int64_t rows, REAL *panels, REAL *z,
                             REAL *product) {
    const int64_t dim = p->widths[0], width = p->widths[1], half = PADDED(width), size = expert * dim * width;
    const int64_t gated = p->network == SWIGLU, stride = gated ? 2 * half : half;
    const REAL *down = (const REAL *)p->weights[1 + gated] + size;
    for (int64_t i = 0; i <= gated; i++)
        NAME(multiply)(rows, dim, width, z, dim, (const REAL *)p->weights[i] + size, product + i * half, stride,
                       panels);
    for (int64_t r = 0; r < rows; r++) {
        const REAL *v = product + r * stride;
        if (gated)
            NAME(multiply_gate_row)(width, v, v + half, z + r * width);
        else
            NAME(activate_row)(width, v, (const REAL *)p->biases[0] + expert * width, z + r * width);
    }
    NAME(multiply)(rows, width, dim, z, width, down, product, PADDED(dim), panels);
    for (int64_t r = 0; r < rows; r++) {
        const REAL *v = product + r * PADDED(dim);
        REAL *to = (REAL *)p->rows + (first + r) * dim;
        if (gated)
            memcpy(to, v, dim * sizeof(REAL));
        else
            NAME(add_bias)(dim, v, (const REAL *)p->biases[1] + expert * dim, to);
    }
}

/* Some rows of one block or expert, from their tokens to their outputs, in a thread's own memory. */
static void NAME(run_rows)(const Problem *p, int64_t block, int64_t first, int64_t rows, void *scratch) {
    const int64_t dim = p->widths[0];
    REAL *panels = scratch, *z = panels + DEPTH * STRIP, *product = z + p->rows_at_once * p->most_inner;
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = p->token[first + r];
        const REAL *x = (const REAL *)p->x + token * p->x_stride;
        if (p->token_term)
            NAME(filter_row)(dim, x, (const REAL *)p->token_term + token * dim,
                             (const REAL *)p->block_term + block * dim, z + r * dim);
        else
            memcpy(z + r * dim, x, dim * sizeof(REAL));
    }
    if (p->network == BLOCK)
        NAME(run_block)(p, block, first, rows, panels, z, product);
    else
        NAME(run_expert)(p, block, first, rows, panels, z, product);
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
#undef CASE
#undef STREAMED
