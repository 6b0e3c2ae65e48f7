/* SPDX-License-Identifier: Apache-2.0 */
/* ``kernels.h`` in float and double for one set of instructions, SET. */

#define NAME(x) JOIN(x, SET, float)
#define REAL float
#define BITS uint32_t
#define EXPONENT_SHIFT 23
#define EXPONENT_BIAS 127
#define ROUND_BY_ADDING 12582912.0f
#define TERMS 7
#define TAIL tail_float
#define SQUARE_ROOT sqrtf
#include "kernels.h"
#undef NAME
#undef REAL
#undef BITS
#undef EXPONENT_SHIFT
#undef EXPONENT_BIAS
#undef ROUND_BY_ADDING
#undef TERMS
#undef TAIL
#undef SQUARE_ROOT

#define NAME(x) JOIN(x, SET, double)
#define REAL double
#define BITS uint64_t
#define EXPONENT_SHIFT 52
#define EXPONENT_BIAS 1023
#define ROUND_BY_ADDING 6755399441055744.0
#define TERMS 13
#define TAIL tail_double
#define SQUARE_ROOT sqrt
#include "kernels.h"
#undef NAME
#undef REAL
#undef BITS
#undef EXPONENT_SHIFT
#undef EXPONENT_BIAS
#undef ROUND_BY_ADDING
#undef TERMS
#undef TAIL
#undef SQUARE_ROOT

static const Kernels TABLE(SET) = {
    TEXT(SET),
    {{JOIN(take_rows, SET, float), JOIN(multiply_layer, SET, float), JOIN(finish_layer, SET, float),
      JOIN(combine, SET, float), JOIN(route, SET, float), JOIN(compose, SET, float),
      JOIN(compose_backward, SET, float)},
     {JOIN(take_rows, SET, double), JOIN(multiply_layer, SET, double), JOIN(finish_layer, SET, double),
      JOIN(combine, SET, double), JOIN(route, SET, double), JOIN(compose, SET, double),
      JOIN(compose_backward, SET, double)}},
};

#undef SET
#undef VECTOR_BYTES
#undef ROWS_AT_ONCE
#undef FACTORS_BY_LANE
