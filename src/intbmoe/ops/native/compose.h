/* SPDX-License-Identifier: Apache-2.0 */
/* Composition of blocks and its gradients, for kernels.h. A line is a row of a matrix, and lies at the same place in the
 * matrices of all bases. Some lines of all matrices are in the cache at the same time, so that the pool, the blocks and
 * their gradients go to and from memory once.
 *
 * For the blocks and the pool's gradient, a panel of the same line of each matrix is gathered first: distances near
 * powers of two would map them to the same sets of the cache. A line must have at least PANEL columns; if its last panel
 * would not be full, it begins earlier, and computes some columns again. */

_Static_assert(PANEL <= NARROWEST, "a line of NARROWEST columns must fill a panel");
#define DOTS (ROWS_AT_ONCE > 6 ? 4 : 3) /* blocks and bases whose products are summed in registers at once */
#define PANEL_OF(column, width) ((column) + PANEL <= (width) ? (column) : (width) - PANEL)

/* A panel of some rows, side by side; the next is on its way meanwhile. */
static inline void NAME(gather)(int64_t rows, const REAL *restrict from, int64_t stride, REAL *restrict panel) {
    for (int64_t r = 0; r < rows; r++, from += stride, panel += PANEL) {
        *(NAME(unaligned) *)panel = *(const NAME(unaligned) *)from;
        *(NAME(unaligned) *)(panel + LANES) = *(const NAME(unaligned) *)(from + LANES);
        for (int64_t ahead = PANEL; ahead < 2 * PANEL; ahead += LINE) __builtin_prefetch(from + ahead);
    }
}

/* Lines of the blocks: coefficients (paths, blocks, bases) times the bases. */
static void NAME(compose)(const Composition *p, int64_t first, int64_t end) {
    const int64_t size = p->lines * p->width, path_size = p->blocks * p->bases;
    REAL panel[MOST_ROWS_COMPOSED * PANEL];
    for (int64_t line = first; line < end; line++)
        for (int64_t column = 0; column < p->width; column += PANEL) {
            const int64_t c = PANEL_OF(column, p->width);
            NAME(gather)(p->bases, (const REAL *)p->pool + line * p->width + c, size, panel);
            for (int64_t path = 0; path < p->paths; path++)
                NAME(multiply_panel)(p->blocks, p->bases, (const REAL *)p->coefficients + path * path_size, p->bases,
                                     panel, PANEL, 0,
                                     (REAL *)p->composed + (line * p->paths + path) * p->width + c, p->paths * size);
        }
}

/* Lines of the pool's gradient: coefficients (bases, paths, blocks) times the blocks' gradient. */
static void NAME(pool_gradient)(const Composition *p, int64_t first, int64_t end) {
    const int64_t size = p->lines * p->width, rows = p->paths * p->blocks;
    REAL panel[MOST_ROWS_COMPOSED * PANEL];
    for (int64_t line = first; line < end; line++)
        for (int64_t column = 0; column < p->width; column += PANEL) {
            const int64_t c = PANEL_OF(column, p->width);
            for (int64_t path = 0; path < p->paths; path++)
                NAME(gather)(p->blocks, (const REAL *)p->composed + (line * p->paths + path) * p->width + c,
                             p->paths * size, panel + path * p->blocks * PANEL);
            NAME(multiply_panel)(p->bases, rows, p->coefficients, rows, panel, PANEL, 0,
                                 (REAL *)p->pool_grad + line * p->width + c, size);
        }
}

/* A vector of numbers of which the first ``skipped`` are zero. */
static inline NAME(vector) NAME(last_of)(const REAL *from, int64_t skipped) {
    NAME(bits) kept;
    for (int64_t lane = 0; lane < LANES; lane++) kept[lane] = lane < skipped ? 0 : ~(BITS)0;
    return (NAME(vector))((NAME(bits))*(const NAME(unaligned) *)from & kept);
}

/* Add to DOTS × DOTS of the coefficients' gradient what some lines contribute. Blocks and bases beyond the last are the
 * last again, and not stored. If columns remain, the last vector of a line begins earlier, with zeros. */
static void NAME(add_dots)(const Composition *p, int64_t path, int64_t block, int64_t base, int64_t first, int64_t end,
                           REAL *sums) {
    const int64_t size = p->lines * p->width;
    const REAL *grads[DOTS], *bases[DOTS];
    NAME(vector) totals[DOTS][DOTS] = {0};
    for (int i = 0; i < DOTS; i++) {
        const int64_t k = block + i < p->blocks ? block + i : p->blocks - 1;
        const int64_t e = base + i < p->bases ? base + i : p->bases - 1;
        grads[i] = (const REAL *)p->composed + k * p->paths * size + path * p->width;
        bases[i] = (const REAL *)p->pool + e * size;
    }
    for (int64_t line = first; line < end; line++) {
        const int64_t from = line * p->paths * p->width, at = line * p->width;
        int64_t c = 0;
        for (; c + LANES <= p->width; c += LANES) {
            NAME(vector) values[DOTS];
            UNROLL for (int j = 0; j < DOTS; j++) values[j] = *(const NAME(unaligned) *)(bases[j] + at + c);
            UNROLL for (int i = 0; i < DOTS; i++) {
                NAME(vector) grad = *(const NAME(unaligned) *)(grads[i] + from + c);
                UNROLL for (int j = 0; j < DOTS; j++) totals[i][j] += grad * values[j];
            }
        }
        if (c < p->width) {
            const int64_t start = p->width - LANES;
            NAME(vector) values[DOTS];
            UNROLL for (int j = 0; j < DOTS; j++) values[j] = NAME(last_of)(bases[j] + at + start, c - start);
            UNROLL for (int i = 0; i < DOTS; i++) {
                NAME(vector) grad = NAME(last_of)(grads[i] + from + start, c - start);
                UNROLL for (int j = 0; j < DOTS; j++) totals[i][j] += grad * values[j];
            }
        }
    }
    for (int i = 0; i < DOTS && block + i < p->blocks; i++)
        for (int j = 0; j < DOTS && base + j < p->bases; j++) {
            REAL sum = 0;
            for (int lane = 0; lane < LANES; lane++) sum += totals[i][j][lane];
            sums[(path * p->blocks + block + i) * p->bases + base + j] += sum;
        }
}

/* What some lines contribute to both gradients; the coefficients' is added to ``sums``. */
static void NAME(compose_backward)(const Composition *p, int64_t first, int64_t end, void *sums) {
    if (p->pool_grad) NAME(pool_gradient)(p, first, end);
    if (sums)
        for (int64_t path = 0; path < p->paths; path++)
            for (int64_t block = 0; block < p->blocks; block += DOTS)
                for (int64_t base = 0; base < p->bases; base += DOTS)
                    NAME(add_dots)(p, path, block, base, first, end, sums);
}

#undef DOTS
#undef PANEL_OF
