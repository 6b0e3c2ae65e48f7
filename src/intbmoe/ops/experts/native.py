"""Experts without gradients on the CPU, from tokens to weighted sums in one call of the compiled library."""

from collections.abc import Sequence

from torch import Tensor

from intbmoe.ops.native import problem


def run_experts(
    network: problem.Network,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    scales: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """The same as ``naive.run_experts``; with ``scales``, (E, 1, outputs) for each matrix, the matrices are int8."""
    if network == "gelu":
        up, up_bias, down, down_bias = parameters
        lists = {"weights": (up, down), "biases": (up_bias, down_bias), "scales": scales}
    else:
        lists = {"weights": parameters, "scales": scales}
    hidden = parameters[0].shape[2]
    return problem.run(network, (x.shape[1], hidden, x.shape[1]), x, ids, weights, lists, {})
