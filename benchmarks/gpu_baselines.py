"""Times our sparse baselines next to third-party code at equal shapes: Hugging Face's Mixtral block, torch's products.

    python benchmarks/gpu_baselines.py                      # a minute and a half
    python benchmarks/gpu_baselines.py --json figures.json  # also every figure
    python benchmarks/gpu_baselines.py --device cpu --tiny  # a dry run without a GPU

All have bfloat16 weights and SwiGLU experts. "graph" is a replayed CUDA graph; "eager" includes the host where it is
the slower one. "Experts" is the measured mean number of experts per token; DeepSeek-V3 also has a shared one. Routers
with a threshold are set to open as many experts as top-k methods choose; ReMoE is also timed with 1/E of them open.
"Products" are the three grouped products of already sorted rows and the activation between them, without routing. All
layers are in evaluation mode, so auxiliary losses are not timed.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_layers import mixtral_block
from gpu_timing import both_call, describe, eager_ms, forward_call, graph_ms, number, print_table, reason, say
from measure import write
from torch import Tensor, nn

from intbmoe import create, record_routing
from intbmoe.layer import MoELayer

EXPERTS, TOP = 8, 2


class Sizes(NamedTuple):
    dim: int
    hidden: int
    tokens: int = 8192


SIZES = (Sizes(768, 2048), Sizes(2048, 5632))
TINY = (Sizes(16, 24, 20),)


class Products(nn.Module):
    """Only the grouped products, with rows divided evenly among the experts."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(0.02 * torch.randn(EXPERTS, dim, 2 * hidden))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).repeat(TOP, 1)
        ends = torch.arange(1, EXPERTS + 1, device=x.device, dtype=torch.int32) * (len(rows) // EXPERTS)
        gate, up = F.grouped_mm(rows, self.inner, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends).view(TOP, *x.shape).sum(0)


def ours(method: str, sizes: Sizes, **options: Any) -> MoELayer:
    return create(method, sizes.dim, sizes.hidden, experts=EXPERTS, expert="swiglu", **options).bfloat16()


@torch.no_grad()
def remoe(sizes: Sizes, x: Tensor, wanted: int) -> MoELayer:
    """Builds a ReMoE with ``wanted`` open experts per token; the first feature of ``x``, a 1, carries the threshold."""
    layer = ours("remoe", sizes)
    weight = layer.router.weight
    weight[:, 0] = 0
    scores = x.reshape(-1, sizes.dim).float() @ weight.float().t()
    weight[:, 0] = -_quantile(scores, 1 - wanted / EXPERTS)
    return layer


@torch.no_grad()
def dynmoe(sizes: Sizes, x: Tensor) -> MoELayer:
    layer = ours("dynmoe", sizes, initial_experts=EXPERTS)
    cosine = F.normalize(x.reshape(-1, sizes.dim).float(), dim=-1) @ F.normalize(layer.embeddings.float(), dim=-1).t()
    layer.thresholds.copy_(_quantile(cosine, 1 - TOP / EXPERTS))
    return layer


def _quantile(scores: Tensor, share: float) -> Tensor:
    """Returns the quantile of each column."""
    return scores.sort(dim=0).values[min(len(scores) - 1, int(share * len(scores)))]


def modules(sizes: Sizes, x: Tensor) -> dict[str, Callable[[], nn.Module]]:
    mass = {"initial_experts": EXPERTS, "top_p": TOP / EXPERTS - 0.01}
    return {
        "Switch": lambda: ours("switch", sizes),
        "V-MoE": lambda: ours("vmoe", sizes, top_k=TOP),
        "DeepSeek-V3": lambda: ours("deepseek", sizes, top_k=TOP),
        "ReMoE": lambda: remoe(sizes, x, TOP),
        "ReMoE, 1/E open": lambda: remoe(sizes, x, 1),
        "DynMoE": lambda: dynmoe(sizes, x),
        "MASS": lambda: ours("mass", sizes, **mass),
        "torch: products alone": lambda: Products(sizes.dim, sizes.hidden).bfloat16(),
        "Hugging Face Mixtral, grouped_mm": lambda: mixtral_block(*sizes[:2], EXPERTS, "grouped_mm"),
        "Hugging Face Mixtral, eager": lambda: mixtral_block(*sizes[:2], EXPERTS, "eager"),
    }


def time_module(module: nn.Module, x: Tensor, graph: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"experts": experts_of_a_token(module, x)}
    for name, make in (("forward", forward_call), ("both", both_call)):
        call = make(module, x, autocast=False)
        call()
        found[f"{name}_eager_ms"] = eager_ms(call, x.device, least=5)
        found[f"{name}_graph_ms"] = graph_ms([call], x.device) if graph else None
    return found


def experts_of_a_token(module: nn.Module, x: Tensor) -> float:
    if not isinstance(module, MoELayer):
        return TOP
    with torch.no_grad(), record_routing(module) as log:
        module(x)
    (routing,) = log.values()
    return (routing.ids >= 0).sum().item() / (x.numel() / x.shape[-1])


def time_sizes(sizes: Sizes, device: torch.device) -> tuple[list[tuple[str, ...]], dict[str, Any], list[str]]:
    rows, found, notes = [], {}, []
    torch.manual_seed(0)
    x = torch.randn(1, sizes.tokens, sizes.dim, device=device).bfloat16()
    x[..., 0] = 1
    for name, make in modules(sizes, x).items():
        try:
            with device:
                module = make().eval()
            # The eager block reads numbers back from the device, which a graph cannot do.
            found[name] = time_module(module, x, graph="Face Mixtral, eager" not in name)
        except Exception as error:
            notes.append(f"{name} left out: {reason(error)}")
            continue
        times = (found[name][key] for key in ("forward_eager_ms", "forward_graph_ms", "both_eager_ms", "both_graph_ms"))
        rows.append((name, number(found[name]["experts"], 2), *(number(ms) for ms in times)))
        del module
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows, found, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every figure here")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, whose figures mean nothing")
    arguments = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(arguments.device)
    facts, results = describe(device), {}
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    over = ("", "", "fwd", "fwd", "fwd+bwd", "fwd+bwd")
    header = ("layer", "experts", "eager", "graph", "eager", "graph")
    for sizes in TINY if arguments.tiny else SIZES:
        rows, found, notes = time_sizes(sizes, device)
        heading = f"d {sizes.dim}, h {sizes.hidden}, E {EXPERTS}, {sizes.tokens:,} tokens, bf16, ms"
        print_table(heading, header, rows, "\n".join(notes), over)
        results[f"{sizes.dim}→{sizes.hidden}"] = found
    say(f"[{time.perf_counter() - begin:.0f} s in all]")
    if arguments.json:
        write(arguments.json, {"machine": facts, "layers": results})


if __name__ == "__main__":
    main()
