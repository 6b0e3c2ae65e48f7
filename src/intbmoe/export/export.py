"""``intbmoe export RUN --to DIR``: precompose, write, compare with the trained model, and keep it if they agree."""

import copy
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intbmoe.checks import require, some
from intbmoe.export import aoti, artifact, onnx
from intbmoe.export.artifact import ABOUT, DTYPES, FORMAT_VERSION, STORAGES, Artifact, ExportError, load_artifact
from intbmoe.export.golden import make_golden
from intbmoe.export.parity import Parity
from intbmoe.files import file_digest, replacing_folder, to_json
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.parts.quantized import Storage
from intbmoe.precomposition import cast_for_serving
from intbmoe.precomposition import precompose as precompose_model
from intbmoe.quantization import lines_of, quantize
from intbmoe.recipes import recipe_to_dict
from intbmoe.registry import plugin_options
from intbmoe.tasks import Task, find_task, make_task
from intbmoe.tasks.serving import Catalogue
from intbmoe.train.evaluation import load
from intbmoe.train.files import full_disk_is_explained, pack_tensors
from intbmoe.train.run import RunDirectory
from intbmoe.version import program_version

FORMATS = {
    "onnx": (artifact.ONNX, onnx.write_onnx, onnx.load_onnx),
    "aoti": (artifact.AOTI, aoti.write_aoti, aoti.load_aoti),
}
TRACED_ROWS, TRACED_LENGTH = 3, 7  # sizes of the example that graphs are traced with; no check uses them


def export_run(
    run: RunDirectory | str | Path,
    to: str | Path,
    *,
    dtype: str = "float32",
    compute: str | None = None,
    formats: Sequence[str] = (),
    precompose: bool = True,
    data: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Artifact:
    """Write the artifact of a finished run; an older one at ``to`` is replaced as a whole.

    ``dtype`` "int8" or "fp8" stores the large weights in 8 bits; everything else, and all arithmetic, then has the type
    ``compute`` (default: float32).
    ``precompose`` says whether IntBMoE's blocks are precomposed; other methods are exported as they are.
    ``data`` is the place of the data if it has moved since the run; a model of the zoo may bring a substitute.
    Raises ``ExportError``, and leaves ``to`` unchanged, unless everything written agrees with the trained model.
    """
    require(dtype in (*DTYPES, *STORAGES), "dtype", dtype, f"one of {', '.join((*DTYPES, *STORAGES))}")
    storage = dtype if dtype in STORAGES else None
    if storage is None:
        require(compute in (None, dtype), "compute", compute, f"left out: weights in {dtype} compute in {dtype}")
    compute = compute or ("float32" if storage else dtype)
    require(compute in DTYPES, "compute", compute, f"one of {', '.join(DTYPES)}")
    for name in formats:
        require(name in FORMATS, "format", name, f"one of {', '.join(FORMATS)}")
    if "onnx" in formats and compute == "bfloat16":
        raise ExportError("ONNX Runtime has no bfloat16 matrix product on the CPU: export ONNX with --dtype float32")
    if "onnx" in formats and storage is not None:
        raise ExportError(f"ONNX would store {storage} weights in full precision: export ONNX with --dtype float32")
    run, to = RunDirectory.existing(run), Path(to)
    _require_replaceable(to)
    task = make_task(run.recipe_on(data or run.stand_in))
    task.find_predictor()
    trained = load(run).requires_grad_(False)
    tell("looking for held-out inputs that reach every block")
    if storage and not precompose and any(isinstance(module, IntBMoE) for module in trained.modules()):
        raise ExportError(f"--dtype {storage} quantises composed blocks, not pools: leave out --no-precompose")
    parity = Parity(task, trained, DTYPES[compute], storage)
    with (
        replacing_folder(to, _require_replaceable, sync=True) as folder,
        full_disk_is_explained(folder, "free some space and export again"),
    ):
        about = _write_model(folder, run, task, trained, (storage, compute), precompose)
        written = load_artifact(folder)
        tell("comparing with the trained model")
        checked = {**parity.describe(), **parity.check_model(written.model())}
        for name in formats:
            tell(f"writing {name}")
            checked[name] = _write_format(name, written, parity)
        about |= {"parity": checked, "formats": list(formats)}
        tell("asking golden requests")
        write_about(folder, about)
        golden = make_golden(load_artifact(folder).predictor(), task)
        (folder / artifact.GOLDEN).write_bytes(to_json(golden))
        write_about(folder, about)
    return load_artifact(to)


def describe(written: Artifact) -> str:
    parity = written.about["parity"]
    lines = [f"exported: {written.path} (version {written.version})"]
    lines += [f"{name}: {(written.path / name).stat().st_size:,} bytes" for name in written.about["files"]]
    outputs = parity["outputs"]
    checked = f"{parity['examples']} examples, error {outputs['error']:.2g}"
    lines.append(f"compared with the trained model: {checked}, tolerance {outputs['tolerance']:.2g}")
    if "quantization" in written.about:
        lines += lines_of(written.about["quantization"])
    for layer, blocks in parity["unreached_blocks"].items():
        named = ", ".join(map(str, blocks))
        which, compared = ("blocks", "they were") if len(blocks) > 1 else ("block", "it was")
        lines.append(f"{layer}: no example reaches {which} {named}; {compared} compared on inputs of the other blocks")
    serve = shlex.join(["intbmoe", "serve", str(written.path), *plugin_options()])
    return "\n".join([*lines, f"serve it: {serve}"])


def cast_model(trained: nn.Module, dtype: torch.dtype, *, precompose: bool) -> nn.Module:
    if precompose and any(isinstance(module, IntBMoE) for module in trained.modules()):
        return precompose_model(trained, dtype)
    model = copy.deepcopy(trained)
    cast_for_serving(model, dtype)
    return model


def _write_model(
    folder: Path, run: RunDirectory, task: Task, trained: nn.Module, types: tuple[Storage | None, str], precompose: bool
) -> dict[str, Any]:
    """Write the weights, the catalogue and a first ``artifact.json``, whose content is returned."""
    recipe, result = run.recipe, run.result
    storage, compute = types
    model = cast_model(trained, DTYPES[compute], precompose=precompose)
    quantized = {} if storage is None else {"compute": compute, "quantization": quantize(model, storage).describe()}
    write_content(folder, model, task.catalogue())
    module, plain = find_task(recipe.task).__module__, recipe_to_dict(recipe)
    # Without the path of the data on this machine: an artifact needs no data, and is given to others.
    data = plain["data"] | ({"path": None} if "path" in plain["data"] else {})
    about = {
        "format_version": FORMAT_VERSION,
        "written_by": f"intbmoe {program_version()}",
        "task": recipe.task,
        # To load the artifact of a task from another package, that package's module is needed.
        **({} if module.startswith("intbmoe.") else {"task_module": module}),
        "method": recipe.moe.name,
        "recipe": {**plain, "data": data},
        "dtype": storage or compute,
        **quantized,
        "precomposed": precompose and any(isinstance(module, IntBMoE) for module in trained.modules()),
        "metrics": {split: result[split] for split in ("valid", "test") if result.get(split)},
        "trained_model_sha256": result["sha256"]["model.safetensors"],
    }
    write_about(folder, about)
    return about


def _write_format(name: str, written: Artifact, parity: Parity) -> dict[str, Any]:
    file, write, load_graph = FORMATS[name]
    graph, catalogue = parity.task.graph(), written.catalogue_tensors
    batch = {key: value[:TRACED_ROWS] for key, value in parity.inputs.batches[0].items()}
    example = graph.inputs(batch, written.dtype, None if graph.longest is None else min(TRACED_LENGTH, graph.longest))
    write(graph, graph.wrap(written.model(), catalogue), example, written.path / file)
    return parity.check_runtime(name, load_graph(graph, written.path / file), graph, catalogue)


def write_content(folder: Path, model: nn.Module, catalogue: Catalogue) -> None:
    """Write the weights, and the catalogue that says what the model's numbers mean."""
    (folder / artifact.MODEL).write_bytes(pack_tensors(model.state_dict()))
    (folder / artifact.CATALOGUE).write_bytes(to_json(catalogue.about))
    if catalogue.tensors:
        (folder / artifact.CATALOGUE_TENSORS).write_bytes(pack_tensors(catalogue.tensors))
    for name, content in catalogue.files.items():
        (folder / name).write_bytes(content)


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Write ``artifact.json`` with the digests of all files in the folder, and its own checksum."""
    files = sorted(path for path in folder.iterdir() if path.name != ABOUT)
    content = {**about, "files": {path.name: file_digest(path) for path in files}}
    (folder / ABOUT).write_bytes(to_json({**content, "checksum": artifact.checksum(content)}))


def _require_replaceable(to: Path) -> None:
    """Raise unless ``to`` is empty or only an artifact, because anything else there would be lost."""
    if to.is_symlink():
        raise ExportError(f"{to} is a link: export to another folder, then point the link to it")
    if not to.exists() or (to.is_dir() and not any(to.iterdir())):
        return
    files = artifact.files_of(to)
    if files is None:
        raise ExportError(f"{to} exists and is not an artifact: give --to another folder, or remove it")
    others = sorted(path.name for path in to.iterdir() if path.name not in files)
    if others:
        raise ExportError(
            f"{to} holds other files besides an artifact ({some(others, 3)}): move them, or give --to another folder"
        )
