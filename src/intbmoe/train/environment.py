"""What a result depends on besides its recipe: versions, device, source and command. Nothing that names the machine."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from intbmoe.registry import describe_plugins

PACKAGES = ("intbmoe", "torch", "accelerate", "safetensors", "numpy", "timm", "torchvision", "scikit-learn")


def describe_environment(*, device: torch.device, world: int, seed: int, step: int) -> dict[str, Any]:
    """One entry of ``environment.json``: every start of a run adds one."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "command": sys.argv,
        "seed": seed,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": world,
        "threads": torch.get_num_threads(),
        "git": git_state(Path(__file__).parent),
        **({"plugins": plugins} if (plugins := describe_plugins()) else {}),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the source and whether it was changed since; None for a package that lies in no checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed package may lie inside somebody else's repository (a virtual environment in a checkout).
    if commit is None or _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
