"""Write the model as an ONNX file for ONNX Runtime, with torch's dynamo exporter.

torch has no translation for two operations that sort tokens by block, so they are translated here.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.export.aoti import first_line, trace
from intbmoe.export.artifact import ExportError
from intbmoe.tasks.serving import Graph

OUTPUT = "scores"
LARGEST_FILE = 2**31 - 2**24  # bytes of weights that fit into one file; more go into a second one, model.onnx.data


def write_onnx(graph: Graph, model: nn.Module, example: tuple[Tensor, ...], path: Path) -> None:
    _require_packages()
    program = trace(graph, model, example)
    # The exporter reports its progress on standard output and through a logger.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript"):
        warnings.simplefilter("ignore")
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(graph.names),
                output_names=[OUTPUT],
                custom_translation_table=_translations(),
            )
        except Exception as error:  # an operation without a translation may raise anything
            reason = first_line(error, "No ONNX function found")
            raise ExportError(f"this model cannot be written as ONNX: {reason}") from error
        size = sum(tensor.nbytes for tensor in program.state_dict.values())
        size += sum(value.nbytes for value in program.constants.values() if isinstance(value, Tensor))
        _forget_sources(exported)
        exported.save(path, external_data=size > LARGEST_FILE)


def _forget_sources(exported: Any) -> None:
    """Remove the source locations of operations on this machine, because an artifact is given to others."""
    for graph in (exported.model.graph, *exported.model.functions.values()):
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None


def load_onnx(graph: Graph, path: Path) -> Callable[..., Tensor]:
    _require_packages()
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # the package's own errors have no common type
        raise ExportError(f"ONNX Runtime cannot load this model: {first_line(error)}") from error

    def run(*inputs: Tensor) -> Tensor:
        arrays = {name: value.numpy() for name, value in zip(graph.names, inputs, strict=True)}
        return torch.from_numpy(session.run([OUTPUT], arrays)[0])

    return run


def _translations() -> dict[Any, Callable[..., Any]]:
    from onnxscript import INT64
    from onnxscript import opset18 as op

    def sort_stable(self, stable: bool = False, dim: int = -1, descending: bool = False):
        # TopK of all entries: the standard puts the lower index first for ties, which is what stable means.
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    def searchsorted(sequence, self, out_int32: bool = False, right: bool = False, side: str = "", sorter=None):
        # The place of a value is the number of entries before it.
        value = op.Unsqueeze(self, op.Constant(value_ints=[-1]))
        before = op.LessOrEqual(sequence, value) if right or side == "right" else op.Less(sequence, value)
        count = op.ReduceSum(op.Cast(before, to=INT64.dtype), op.Constant(value_ints=[-1]), keepdims=0)
        return op.Cast(count, to=6) if out_int32 else count

    return {torch.ops.aten.sort.stable: sort_stable, torch.ops.aten.searchsorted.Tensor: searchsorted}


def _require_packages() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"--format onnx needs {package}: pip install 'intbmoe[onnx]'")


@contextlib.contextmanager
def _quiet(*names: str) -> Any:
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
