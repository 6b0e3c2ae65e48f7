"""Compile the model ahead of time, including weights, to an AOTInductor package for this kind of machine.

``torch._inductor.aoti_load_package`` runs it, from Python or C++, without the model's source. Compiling needs a C++
compiler, and takes minutes for a large model.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from intbmoe.export.artifact import ExportError
from intbmoe.tasks.serving import Graph


@torch.no_grad()
def trace(graph: Graph, model: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Trace ``model`` to a program of tensor operations with dynamic batch size and length."""
    try:
        return torch.export.export(model, example, dynamic_shapes=graph.dynamic_shapes())
    except Exception as error:  # torch raises errors of many types if a model cannot be traced
        reason = first_line(error)
        raise ExportError(f"torch.export cannot trace this model with dynamic batch and length: {reason}") from error


def first_line(error: Exception, word: str = "") -> str:
    """The first line of a message that contains ``word``, otherwise the first line; the error's type if it is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if word in line), lines[0])


def write_aoti(graph: Graph, model: nn.Module, example: tuple[Tensor, ...], path: Path) -> None:
    program = trace(graph, model, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        except Exception as error:  # the compiler's errors have no common type
            raise ExportError(f"AOTInductor cannot compile this model: {first_line(error)}") from error


def load_aoti(graph: Graph, path: Path) -> Callable[..., Tensor]:
    return torch._inductor.aoti_load_package(str(path))
