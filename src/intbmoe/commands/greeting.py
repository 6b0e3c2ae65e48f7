"""``intbmoe`` alone: what is here, what to try first, what this machine can do."""

from importlib.util import find_spec

from intbmoe.commands.doctor import EXTRAS, machine
from intbmoe.commands.terminal import say
from intbmoe.ops import native
from intbmoe.registry import list_methods
from intbmoe.version import program_version

TRY = {
    "intbmoe serve zoo:journeys": "a trained model, and a page to try it: http://127.0.0.1:8000/",
    "intbmoe train digits": "train a small IntBMoE on handwritten digits, in half a minute",
    "intbmoe compare digits --methods switch,intbmoe": "two methods side by side, in a table and a report",
    "intbmoe demo": "every method on handwritten digits, in a few minutes; opens the report",
}


def greet() -> None:
    width = max(map(len, TRY))
    lines = [f"intbmoe {program_version()}: {len(list_methods())} mixture-of-experts layers for PyTorch, one contract"]
    lines += ["", "Try", *(f"  {command:{width}}  {about}" for command, about in TRY.items())]
    lines += ["", "This machine", *(f"  {name:16}  {value}" for name, value in _machine())]
    lines += ["", "intbmoe --help lists all commands; intbmoe doctor checks this machine."]
    say("\n".join(lines))


def _machine() -> list[tuple[str, str]]:
    """Quick, so nothing is imported or computed: ``intbmoe doctor`` does that."""
    found = [(finding.name, finding.value) for finding in machine()]
    missing = [extra for extra, modules in EXTRAS.items() if any(find_spec(module) is None for module in modules)]
    install = f"not installed: pip install 'intbmoe[{','.join(missing)}]'"
    return [*found, ("compiled library", native.STATUS), ("extras", install if missing else "all installed")]
