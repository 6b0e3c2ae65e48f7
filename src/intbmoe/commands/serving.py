"""Commands that export a run as an artifact, and use it to answer requests."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from intbmoe.checks import require
from intbmoe.commands.terminal import DEFAULT_IS_TOLD, cleaned_up_on_sigterm, explained, say
from intbmoe.serve.settings import Settings
from intbmoe.version import program_version
from intbmoe.zoo import find_in_zoo, in_zoo


def export(
    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]],
    to: Path,
    format: tyro.conf.UseAppendAction[tuple[Literal["onnx", "aoti", "huggingface"], ...]] = (),
    dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32",
    compute: Annotated[Literal["float32", "bfloat16"] | None, DEFAULT_IS_TOLD] = None,
    no_precompose: bool = False,
    data: Annotated[Path | None, DEFAULT_IS_TOLD] = None,
) -> None:
    """Export a finished run as an artifact for serving: it is checked against the trained model, or not written.

    Args:
        run: A run directory, runs/<recipe>/<method>/<seed>, or a model of the zoo, such as zoo:digits.
        to: The folder to write; an older artifact there is replaced.
        format: Also export the model for ONNX Runtime (onnx) or compiled ahead of time (aoti); may be repeated.
            huggingface: write a folder for transformers' from_pretrained instead of an artifact.
        dtype: The type of the weights; int8 and fp8 store the large ones in 8 bits and routers in float32.
        compute: The type that 8-bit weights are converted to for computing, and that of the rest. Default: float32.
        no_precompose: Keep IntBMoE's pools and compose at every request, for comparison.
        data: Where the data is. Default: where it was in training.
    """
    with explained(ModuleNotFoundError):
        from intbmoe.export.export import describe, export_run
        from intbmoe.train.run import moved_data_is_explained
    with (
        cleaned_up_on_sigterm(),
        explained(ValueError, ModuleNotFoundError),
        moved_data_is_explained(run),
        Console(stderr=True).status("") as status,
    ):
        options = {"dtype": dtype, "formats": format, "precompose": not no_precompose, "data": data}
        if "huggingface" in format:
            from intbmoe.export.huggingface import export_huggingface

            require(compute is None, "compute", compute, "left out: it is for 8-bit weights, which this format lacks")
            told = export_huggingface(run, to, **options, tell=status.update)
        else:
            told = describe(export_run(run, to, compute=compute, **options, tell=status.update))
    say(told)


def generate(
    artifact: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="ARTIFACT")]],
    prompt: str,
    max_tokens: Annotated[int | None, DEFAULT_IS_TOLD] = None,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Continue a text with an exported language model: intbmoe generate ARTIFACT --prompt "def ".

    Args:
        artifact: The folder that intbmoe export wrote.
        prompt: The text to continue; empty for a new text.
        max_tokens: The most new tokens. Default: 64, or as many as the model was trained to see.
        temperature: 0 takes the most likely token; higher values vary more.
        seed: Seed of the random choice if the temperature is not 0.
        device: Where the model runs, such as cuda.
    """
    with explained(ValueError, RuntimeError, ModuleNotFoundError):
        from intbmoe.export import ArtifactError, load_artifact

        loaded = load_artifact(_exported(artifact))
        if not loaded.predictor_type().streams:
            raise ArtifactError(f"{artifact} is a model of the task {loaded.task!r}: generate needs a text model")
        request = {"prompt": prompt, "temperature": temperature, "seed": seed}
        request |= {} if max_tokens is None else {"max_tokens": max_tokens}
        predictor = loaded.predictor(device)
        for pieces in predictor.stream([predictor.encode(request)]):
            sys.stdout.write("".join(piece.text for piece in pieces))
            sys.stdout.flush()
    say("")


def serve(settings: Annotated[Settings, tyro.conf.OmitArgPrefixes]) -> None:
    """Answer requests over HTTP with an exported model: intbmoe serve ARTIFACT --port 8000 --budget-ms 60 --workers 2.

    Zoo models such as zoo:journeys need no export. A page to try the model is at http://127.0.0.1:8000/. SIGTERM and
    Ctrl-C answer the requests under way and then end the server; SIGHUP reloads the artifact.
    """
    with explained(ModuleNotFoundError):
        from intbmoe.serve import require_packages

        require_packages()
        from intbmoe.serve.supervisor import serve as run_server
    with explained(ValueError):
        run_server(replace(settings, artifact=str(_exported(settings.artifact))), say)


def _exported(artifact: str | Path) -> Path:
    """Return the artifact itself; for a zoo model, export it the first time it is needed."""
    if not in_zoo(artifact):
        return Path(artifact)
    from intbmoe.export import load_artifact
    from intbmoe.export.export import export_run
    from intbmoe.train import RunDirectory

    with explained():
        weights = RunDirectory.existing(artifact).result["sha256"]["model.safetensors"]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "intbmoe" / program_version()
    folder = cache / f"{find_in_zoo(artifact).name}-{weights[:12]}"
    if not folder.is_dir():
        with Console(stderr=True).status(f"exporting {artifact} to {folder}, once"):
            export_run(artifact, folder)
    return load_artifact(folder).path
