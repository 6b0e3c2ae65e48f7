"""Where the numbers of a report come from: run, settings, command; and which runs cannot be reported."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intbmoe.files import digest
from intbmoe.report.numbers import NOTHING
from intbmoe.train.errors import TrainingError
from intbmoe.train.files import read_bytes
from intbmoe.train.run import RunDirectory


def trace_run(run: RunDirectory) -> dict[str, Any]:
    """What identifies a finished run, without its location on disk: a copy of the run has the same trace."""
    recipe, result = run.recipe, run.result
    starts = run.starts()
    last = starts[-1] if starts else {}
    return {
        "name": f"{recipe.name}/{recipe.moe.label or recipe.moe.name}/{recipe.train.seed}",
        "seed": recipe.train.seed,
        "config_sha256": digest(read_bytes(run.config_path, None)),
        "model_sha256": result["sha256"]["model.safetensors"],
        "command": _command(last.get("command")),
        "starts": len(starts),
        "started": last.get("time"),
        "device": last.get("device"),
        "torch": _inside(last.get("packages"), "torch"),
        "commit": _inside(last.get("git"), "commit"),  # None if the package is not in a checkout
        "test": result["test"],
        "params": result.get("params"),
        "steps": result.get("steps"),
        "epochs": result.get("epochs"),
        "seconds": result.get("seconds"),
    }


def _inside(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def _command(words: Any) -> str | None:
    if not isinstance(words, list) or not words:
        return None
    program = "intbmoe" if Path(str(words[0])).name in ("cli.py", "intbmoe") else str(words[0])
    return shlex.join([program, *map(str, words[1:])])


def find_flaw(run: RunDirectory, metric: str) -> str | None:
    """Why a run cannot be reported; None if it can."""
    if not run.finished:
        return "not finished"
    try:
        result = run.result
        missing = [name for name in ("seconds", "higher_is_better", "steps", "epochs") if name not in result]
        missing += [] if metric in result["test"] else [metric]
        if missing:
            return f"damaged: {missing[0]!r} is missing from its done.json"
        if not _finite(result["test"][metric]) or not _finite(result["seconds"]):
            return "done.json: a result is not a finite number"
        read_bytes(run.model_path, result["sha256"]["model.safetensors"])
        run.metrics()
        trace_run(run)
    except TrainingError as error:
        return str(error)
    except OSError as error:
        return f"damaged: {error}"
    return None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def trained_for(trace: Mapping[str, Any]) -> str:
    forms = {"epochs": "{:g} epochs", "steps": "{:,} steps", "seconds": "{:,.1f} s"}
    words = [form.format(trace[name]) for name, form in forms.items() if trace[name] is not None]
    return ", ".join(words) or NOTHING
