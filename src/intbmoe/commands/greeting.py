"""``intbmoe`` without arguments: what the library has, what to try first, and what this machine can do."""

from importlib.util import find_spec

from intbmoe.commands.doctor import EXTRAS, machine
from intbmoe.commands.terminal import say
from intbmoe.ops import native
from intbmoe.registry import list_methods
from intbmoe.version import program_version

TRY = {
    "serve zoo:journeys": "a trained model, and a page to try it",
    "train digits": "a small IntBMoE on digits, in half a minute",
    "compare digits --methods switch,intbmoe": "two methods side by side",
    "demo": "every method on handwritten digits, and a report",
}


def greet() -> None:
    lines = [f"intbmoe {program_version()}: {len(list_methods())} mixture-of-experts layers for PyTorch"]
    lines += ["", "Try", *(f"  {f'intbmoe {command}  ':<28}# {about}" for command, about in TRY.items())]
    lines += ["", "This machine", *(f"  {name:16}  {value}" for name, value in _machine())]
    lines += ["", "intbmoe --help lists all commands; intbmoe doctor checks this machine."]
    say("\n".join(lines))


def _machine() -> list[tuple[str, str]]:
    """Describe the machine quickly, importing and computing nothing: ``intbmoe doctor`` does that."""
    found = [(finding.name, finding.value) for finding in machine()]
    missing = [extra for extra, modules in EXTRAS.items() if any(find_spec(module) is None for module in modules)]
    install = f"not installed: pip install 'intbmoe[{','.join(missing)}]'"
    return [*found, ("native library", native.STATUS), ("extras", install if missing else "all installed")]
