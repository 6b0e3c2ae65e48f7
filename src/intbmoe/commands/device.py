"""The option ``--device`` of the commands that train and evaluate."""

import os

import torch

from intbmoe.checks import require


def use_device(name: str | None) -> None:
    """Let this process, and those it starts, see only ``cpu``, ``cuda`` or one of several GPUs (``cuda:1``).

    None changes nothing: GPUs are used if there are any. Call this before anything has touched a GPU.
    """
    if name is None:
        return
    kind, _, index = name.partition(":")
    known = name in ("cpu", "cuda") or (kind == "cuda" and index.isdecimal())
    require(known, "--device", name, "cpu, cuda or, with several GPUs, one of them such as cuda:1")
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    count = torch.cuda.device_count()
    found = "cpu: torch finds no GPU" if count == 0 else f"cpu, or a GPU that torch finds, cuda:0 to cuda:{count - 1}"
    require(int(index or 0) < count, "--device", name, found)
    if index:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)]
