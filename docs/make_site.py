"""Makes the site's pages: docs/, and pages generated from README.md, the tour, the methods and the public names.

    python docs/make_site.py [FOLDER]     build/site by default; .ci/site then builds the site from it

Links to files that are not on the site become plain text. Equations become MathML, so that pages need no script.
"""

import argparse
import inspect
import re
import shutil
import sys
from dataclasses import MISSING, fields
from functools import cache
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import latex2mathml.converter
import torch

HOUSE = Path(__file__).parent.parent
sys.path.insert(0, str(HOUSE))  # for benchmarks.study, whose functions read the study's figures

from benchmarks.study.plan import RESULTS, read_summaries  # noqa: E402
from benchmarks.study.studies import REAL  # noqa: E402
from benchmarks.study.tables import TITLES, find_rows  # noqa: E402

import intbmoe  # noqa: E402
from intbmoe.analysis.quantities import quantities_of  # noqa: E402
from intbmoe.commands.overrides import setting_texts  # noqa: E402
from intbmoe.parallel.ways import WAYS, refusals  # noqa: E402
from intbmoe.recipes.sets import PLACED  # noqa: E402
from intbmoe.registry import find_method, list_methods  # noqa: E402
from intbmoe.report.tables import Table  # noqa: E402

METHODS_IN_NAV = '"methods/index.md"'
TOP_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FENCED = re.compile(r"(^```.*?^```|^ {4}.*?$|`[^`\n]*`)", flags=re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the site's pages from docs/, README.md, the tour and the code.")
    parser.add_argument("folder", nargs="?", type=Path, help="a new folder (default: build/site, which is replaced)")
    folder = parser.parse_args().folder
    if folder is not None and folder.exists():
        parser.error(f"{folder} exists; name a new folder, since everything in it would be deleted")
    target = folder or HOUSE / "build" / "site"
    make(target)
    sys.stdout.write(f"{target}\n")


def make(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    docs = target / "docs"
    shutil.copytree(HOUSE / "docs", docs, ignore=shutil.ignore_patterns("*.py", "drawings", "__pycache__"))
    for source, name in TOP_PAGES.items():
        (docs / name).write_text(_moved((HOUSE / source).read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "tour.md").write_text(tour_page((HOUSE / "docs" / "tour.py").read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "methods").mkdir()
    for name in list_methods():
        (docs / "methods" / f"{name}.md").write_text(method_page(name), encoding="utf-8")
    (docs / "methods" / "index.md").write_text(methods_page(), encoding="utf-8")
    (docs / "reference.md").write_text(reference_page(), encoding="utf-8")
    for page in docs.rglob("*.md"):
        page.write_text(with_equations(_linked(page.read_text(encoding="utf-8"), page)), encoding="utf-8")
    nav = ", ".join([METHODS_IN_NAV, *(f'"methods/{name}.md"' for name in list_methods())])
    settings = (HOUSE / "zensical.toml").read_text(encoding="utf-8")
    if METHODS_IN_NAV not in settings:
        raise ValueError(f"zensical.toml must contain {METHODS_IN_NAV} in nav: the methods' pages are added after it")
    (target / "zensical.toml").write_text(settings.replace(METHODS_IN_NAV, nav), encoding="utf-8")


# Links and equations.


def _moved(text: str) -> str:
    """Rewrites the links of a page at the top of the repository so that they work from docs/."""
    for source, name in TOP_PAGES.items():
        text = text.replace(f"]({source})", f"]({name})")
    return text.replace("](docs/tour.py)", "](tour.md)").replace("](docs/", "](")


def _linked(text: str, page: Path) -> str:
    def keep(found: re.Match[str]) -> str:
        words, link = found[1], found[2]
        there = "://" in link or link.startswith("#") or (page.parent / link.partition("#")[0]).exists()
        return found[0] if there else words

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", keep, text)


def with_equations(text: str) -> str:
    """Converts ``$…$`` and ``$$…$$`` outside of code to MathML."""
    parts = FENCED.split(text)
    parts[::2] = [
        re.sub(r"\$\$(.+?)\$\$|\$([^$\n]+(?:\n[^$\n]+)?)\$", _mathml, part, flags=re.DOTALL) for part in parts[::2]
    ]
    return "".join(parts)


def _mathml(found: re.Match[str]) -> str:
    display = found[1] is not None
    tex = found[1] or found[2]
    made = latex2mathml.converter.convert(tex.strip(), display="block" if display else "inline")
    return f'\n\n<div class="equation">{made}</div>\n\n' if display else made


def tour_page(script: str) -> str:
    """Turns a notebook in jupytext's percent format into a page, without the header before its first cell."""
    parts = []
    for cell in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        kind, _, body = cell.partition("\n")
        if "[markdown]" in kind:
            parts.append(re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE))
        else:
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


# A page for each method.


def method_page(name: str) -> str:
    method = find_method(name)
    layer = _example(name)
    three = quantities_of(method)
    about = "~" if three.decided_by_router else ""
    reason = method.noncausal_reason()
    facts = {
        "name": f"`{name}`",
        "paper": method.paper,
        "family": three.family,
        "participation": f"{about}{three.participation:g}",
        "execution": f"{about}{three.execution:g}",
        "materialization": str(three.materialization),
        "causal": "yes" if reason is None else f"no: {reason}",
        "on several devices": ", ".join(f"`{way}`" for way in WAYS if way not in refusals(layer)),
        "parameters": f"{sum(p.numel() for p in layer.parameters()):,}",
        "active per token": f"{layer.active_parameters():,}",
    }
    source = inspect.getmodule(method.layer)
    return (
        "\n\n".join(
            [
                f"# {method.title}",
                _docstring(inspect.getdoc(source) or ""),
                "## At a glance",
                _table(["", ""], list(facts.items())),
                "Quantities and sizes are those of a layer in place of an FFN 192 → 768 → 192 with the paper's budget "
                "at E = 16. [Side by side](../baselines.md) lists the choices that its paper and code leave open.",
                "## In the study",
                in_the_study(name),
                "## Use",
                f'```python\nimport intbmoe\n\nlayer = intbmoe.create("{name}", 192, '
                f'**intbmoe.match_budget("{name}", 192, 768, experts=16))\n```',
                f"`intbmoe train digits --moe.name {name}` trains it.",
                "## Options",
                _options(method.layer.Config, layer.config),
            ]
        )
        + "\n"
    )


def _example(name: str) -> Any:
    with torch.device("meta"):
        return intbmoe.create(name, 192, **intbmoe.match_budget(name, 192, 768, experts=16))


def _options(config: type, found: Any) -> str:
    texts = setting_texts(config)
    rows = []
    for f in fields(config):
        default = "" if f.default is MISSING else f"`{f.default!r}`"
        rows.append((f"`{f.name}`", default, f"`{getattr(found, f.name)!r}`", texts.get(f.name, "")))
    return _table(["option", "default", "in the budget above", "meaning"], rows)


def in_the_study(name: str) -> str:
    """Tabulates the method's mean test metric on the study's data, with dense in a mixture's place and IntBMoE."""
    beside = {PLACED: "Dense in a mixture's place", "intbmoe": "IntBMoE"}
    labels = {name: find_method(name).title, **{label: title for label, title in beside.items() if label != name}}
    rows = []
    for study in REAL:
        found = study_rows(study)
        if name in found:
            found.setdefault(PLACED, found["dense"])  # on places, a dense FFN has a mixture's initialisation already
            means = [mean_metric(found[label]) for label in labels]
            rows.append((TITLES[study], *means))
    if not rows:
        return "It is not in the tables of the [study](../results/index.md)."
    told = (
        "Test split, mean over (seeds). Data are small and runs short: [the study](../results/index.md) explains them."
    )
    return _table(["", *labels.values()], rows) + f"\n\n{told}"


@cache
def study_rows(study: str) -> dict[str, list[dict[str, Any]]]:
    return find_rows(study, all_summaries())[0]


@cache
def all_summaries() -> list[dict[str, Any]]:
    return read_summaries(RESULTS)  # seconds, for hundreds of runs


def mean_metric(runs: list[dict[str, Any]]) -> str:
    metric = runs[0]["metric"]
    mean = fmean(run["test"][metric] for run in runs)
    shown = f"{100 * mean:.1f} %" if metric == "accuracy" else f"{metric} {mean:.3f}"
    return f"{shown} ({len(runs)})"


def methods_page() -> str:
    rows = []
    for name in list_methods():
        method, three = find_method(name), quantities_of(find_method(name))
        about = "~" if three.decided_by_router else ""
        numbers = f"{about}{three.participation:g}", f"{about}{three.execution:g}", str(three.materialization)
        bold = "**" if name == "intbmoe" else ""
        rows.append((f"{bold}[{method.title}]({name}.md){bold}", *numbers, method.paper))
    return (
        "\n\n".join(
            [
                "# Methods",
                "Each method is one file, and its page is the file's docstring. The three quantities are those at the "
                "paper's budget on images, E = 16; ~ means that a trained router decides.",
                "![The three quantities of all methods](../images/quantities.svg)",
                _table(["method", "participation", "execution", "materialization", "paper"], rows),
                "[IntBMoE, equation by equation](../method.md) · [the others side by side](../baselines.md)",
            ]
        )
        + "\n"
    )


def _table(header: list[str], rows: list[tuple[str, ...]]) -> str:
    safe = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return Table.of_texts("", header, safe).markdown().replace("--:", ":--")


def _docstring(text: str) -> str:
    """Converts a module's docstring: indented lines become equations, double backquotes become code."""
    parts = []
    for part in re.split(r"\n\s*\n", text):
        lines = part.splitlines()
        if all(line.startswith("    ") for line in lines if line.strip()):
            parts.append(_equations(lines))
        else:
            parts.append(_marked(part))
    return "\n\n".join(parts)


def _marked(text: str) -> str:
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([_*$<])", r"\\\1", part) for part in parts)


def _equations(lines: list[str]) -> str:
    """Makes each line a paragraph, which may break on a phone where the source has two or more spaces."""
    rows = []
    for line in lines:
        parts = [f"<span>{_indices(part)}</span>" for part in re.split(r"\s{2,}", line.strip())]
        rows.append(f"<p>{' '.join(parts)}</p>")
    return f'<div class="equations">{"".join(rows)}</div>'


def _indices(text: str) -> str:
    text = escape(text).replace("``", "")
    for sign, tag in ((r"\^", "sup"), ("_", "sub")):
        for pattern in (r"\{([^{}]*)\}", r"(\w)"):
            text = re.sub(rf"(?<=[\w)}}>\u0300-\u036f]){sign}{pattern}", rf"<{tag}>\1</{tag}>", text)
    return text


# The public names.


def reference_page() -> str:
    parts = ["# Reference", "The public names of `import intbmoe`; everything else may change."]
    for name in sorted(intbmoe.__all__, key=str.lower):
        thing = getattr(intbmoe, name)
        parts += [f"## `{name}`", f"```python\n{_signature(name, thing)}\n```", _docstring(inspect.getdoc(thing) or "")]
        if inspect.isclass(thing):
            for method, function in sorted(vars(thing).items()):
                if not method.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
                    parts += [f"### `{name}.{method}`", f"```python\n{_signature(method, function)}\n```"]
                    parts.append(_docstring(inspect.getdoc(function) or ""))
    return "\n\n".join(parts) + "\n"


def _signature(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    if "Annotated[" in str(signature):  # settings, which are described in their help texts
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        signature = inspect.Signature(bare)
    text = re.sub(r"(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", str(signature))  # module names mean nothing to a caller
    if len(text) > 90:
        text = "(\n    " + re.sub(r", (?=[*\w]+(?:[:=,)]|$))", ",\n    ", text[1:])
    return f"{'class' if inspect.isclass(thing) else 'def'} {name}{text}"


if __name__ == "__main__":
    main()
