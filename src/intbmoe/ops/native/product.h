/* SPDX-License-Identifier: Apache-2.0 */
/* Rows times a matrix, for kernels.h, which says what is given. There are three ways, by the number of rows: a few read
 * the matrix from front to back; as many as fit into registers read it panel by panel, where it is; more of them read
 * panels that were packed first. All sum in the order of the inputs, so a row's result is the same in each. */

#define CASE(n) \
    case n: \
        if (packed) NAME(multiply_rows)(n, inner, from, a_stride, panel, PANEL, onto, to, out_stride); \
        else NAME(multiply_rows)(n, inner, from, a_stride, panel, panel_stride, onto, to, out_stride); \
        break;
#define STREAMED(n) \
    case n: \
        if (w.scales) NAME(stream_rows)(n, 1, inner, columns, first, end, a, w.numbers, out, out_stride); \
        else NAME(stream_rows)(n, 0, inner, columns, first, end, a, w.numbers, out, out_stride); \
        break;

typedef REAL NAME(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef BITS NAME(bits) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL NAME(unaligned) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* The weight of a linear map: REAL, or, with a scale for each column, int8. */
typedef struct {
    const void *numbers;
    const REAL *scales;
} NAME(matrix);

static inline __attribute__((always_inline)) REAL NAME(number)(const void *numbers, int64_t i, const int in_8_bits) {
    return in_8_bits ? (REAL)((const int8_t *)numbers)[i] : ((const REAL *)numbers)[i];
}

static NAME(matrix) NAME(rows_from)(NAME(matrix) w, int64_t row, int64_t columns) {
    return (NAME(matrix)){(const char *)w.numbers + row * columns * (w.scales ? 1 : sizeof(REAL)), w.scales};
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

/* The same for any number of rows, in pieces of about the same size. */
static void NAME(multiply_panel)(int64_t rows, int64_t inner, const REAL *a, int64_t a_stride, const REAL *panel,
                                 int64_t panel_stride, int onto, REAL *out, int64_t out_stride) {
    const int64_t pieces = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int packed = panel_stride == PANEL;
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t first = rows * piece / pieces, count = rows * (piece + 1) / pieces - first;
        const REAL *from = a + first * a_stride;
        REAL *to = out + first * out_stride;
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

/* The same of a weight in 8 bits; its scales come after the product. */
static void NAME(pack_8_bits)(int64_t inner, int64_t columns, const int8_t *restrict weight, int64_t stride,
                              REAL *restrict panels) {
    for (int64_t i = 0; i < inner; i++, weight += stride, panels += PANEL) {
        if (columns >= STRIP) {
            UNROLL for (int64_t first = 0; first < STRIP; first += PANEL)
                _Pragma("omp simd") for (int64_t c = 0; c < PANEL; c++)
                    panels[first * inner + c] = weight[first + c];
            __builtin_prefetch(weight + 2 * STRIP);
        } else {
            for (int64_t c = 0; c < STRIP; c++)
                panels[c / PANEL * inner * PANEL + c % PANEL] = c < columns ? weight[c] : 0;
        }
    }
}

/* Some columns of the product over at most DEPTH inputs, ``onto`` what is there or not.
 *
 * Where rows are so few that each panel is read once, it is read where it is, unless it is the last and not full. */
static void NAME(multiply_part)(int64_t rows, int64_t inner, int64_t columns, int64_t first, int64_t end, const REAL *a,
                                int64_t a_stride, NAME(matrix) w, int onto, REAL *out, int64_t out_stride,
                                REAL *panels) {
    const REAL *whole = w.numbers;
    for (int64_t c = first; c < end; c += PANEL) {
        const REAL *panel = panels + c % STRIP * inner;
        const int direct = !w.scales && rows <= ROWS_AT_ONCE && columns - (c - c % STRIP) >= STRIP;
        if (panel == panels && w.scales)
            NAME(pack_8_bits)(inner, columns - c, (const int8_t *)w.numbers + c, columns, panels);
        else if (panel == panels && !direct)
            NAME(pack)(inner, columns - c, whole + c, columns, panels);
        NAME(multiply_panel)(rows, inner, a, a_stride, direct ? whole + c : panel, direct ? columns : PANEL, onto,
                             out + c, out_stride);
    }
}

/* The product for a few rows, which wait for memory: the weight is read from front to back. Every sum still runs in the
 * order of the inputs. */
static inline __attribute__((always_inline)) void NAME(stream_rows)(
    const int rows, const int in_8_bits, int64_t inner, int64_t columns, int64_t first, int64_t last,
    const REAL *restrict a, const void *restrict w, REAL *restrict out, int64_t out_stride) {
    for (int64_t start = first; start < last; start += CHUNK) {
        const int64_t end = last - start < CHUNK ? last : start + CHUNK;
        for (int r = 0; r < rows; r++) memset(out + r * out_stride + start, 0, (end - start) * sizeof(REAL));
        int64_t i = 0;
        for (; i + 4 <= inner; i += 4) {
            const int64_t w0 = i * columns, w1 = w0 + columns, w2 = w1 + columns, w3 = w2 + columns;
            UNROLL for (int r = 0; r < rows; r++) {
                const REAL *f = a + r * inner + i;
                const REAL f0 = f[0], f1 = f[1], f2 = f[2], f3 = f[3];
                REAL *to = out + r * out_stride;
                _Pragma("omp simd") for (int64_t c = start; c < end; c++) {
                    REAL sum = to[c];
                    sum += f0 * NAME(number)(w, w0 + c, in_8_bits);
                    sum += f1 * NAME(number)(w, w1 + c, in_8_bits);
                    sum += f2 * NAME(number)(w, w2 + c, in_8_bits);
                    sum += f3 * NAME(number)(w, w3 + c, in_8_bits);
                    to[c] = sum;
                }
            }
        }
        for (; i < inner; i++)
            UNROLL for (int r = 0; r < rows; r++) {
                const REAL f = a[r * inner + i];
                REAL *to = out + r * out_stride;
                _Pragma("omp simd") for (int64_t c = start; c < end; c++)
                    to[c] += f * NAME(number)(w, i * columns + c, in_8_bits);
            }
    }
}

static void NAME(scale_row)(int64_t width, const REAL *restrict scales, REAL *restrict v) {
    _Pragma("omp simd") for (int64_t c = 0; c < width; c++) v[c] *= scales[c];
}

/* out (rows, ≥ columns) = a (rows, inner) · w (inner, columns), a share of the columns; out_stride is a multiple of
 * PANEL. */
static void NAME(multiply)(int64_t rows, int64_t inner, int64_t columns, Share share, const REAL *a, NAME(matrix) w,
                           REAL *out, int64_t out_stride, REAL *panels) {
    const int64_t strips = (columns + STRIP - 1) / STRIP;
    const int64_t first = strips * share.first / share.parts * STRIP;
    const int64_t end = min(columns, strips * share.end / share.parts * STRIP);
    switch (rows) {
        STREAMED(1) STREAMED(2) STREAMED(3) STREAMED(4)
        default:
            for (int64_t start = 0; start < inner; start += DEPTH)
                NAME(multiply_part)(rows, min(inner - start, DEPTH), columns, first, end, a + start, inner,
                                    NAME(rows_from)(w, start, columns), start > 0, out, out_stride, panels);
    }
    if (w.scales)
        for (int64_t r = 0; r < rows; r++) NAME(scale_row)(end - first, w.scales + first, out + r * out_stride + first);
}

#undef CASE
#undef STREAMED
