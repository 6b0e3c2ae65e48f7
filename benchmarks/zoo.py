"""Adds a finished run to the zoo, with its card.

    python -m benchmarks.zoo runs/digits/intbmoe/0 digits --command "intbmoe train digits" --about "…"

This script measures the card's score itself; ``--half`` stores the weights in half precision. A hub shows README.md,
whose head names licence, library and score; the rest is the run itself, changed to work on any machine: in float32, and
without the path of the data. ``--data FILE.tar`` is for Tiny-ImageNet, which may not be redistributed: the model gets
substitute pictures (``benchmarks/zoo_stand_in.py``) and its scores on them, which can be checked anywhere.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from platform import python_version

import torch
import yaml
from benchmarks.zoo_stand_in import write_stand_in

from intbmoe.files import to_json
from intbmoe.recipes import recipe_to_dict
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train import RunDirectory, evaluate, load
from intbmoe.train.evaluation import halve
from intbmoe.zoo import FOLDER, STAND_IN

CARD = """---
{head}---

# {name}

{about}

```python
import intbmoe

model = intbmoe.load("zoo:{name}")
```

| | |
|:--|:--|
| made by | `{command}` (seed {seed}) |
| with | {versions} |
| trained in | {precision} |
| parameters | {params:,} |
| test {metric} | {score:.4f}{where} |
| SHA-256 of model.safetensors | `{digest}` |

`intbmoe eval zoo:{name}{data}` measures the score again. Trained again on another machine or by another
version, the model differs slightly.
"""
PICTURES, CLASSES = 4, slice(0, None, 20)  # which substitute pictures, and which scores of each, are kept


def scores_on_stand_in(run: RunDirectory) -> list[list[float]]:
    """Returns some of the model's scores on the substitute pictures, to check a model without its data."""
    task = make_task(run.recipe_on(run.stand_in))
    batch = task.held_out().batch(list(range(PICTURES)), epoch=0, seed=0)
    with torch.inference_mode():
        return task.run_model(load(run), batch, torch.float32)[:, CLASSES].tolist()


def portable(recipe: Recipe) -> Recipe:
    """Returns the recipe for machines without the trainer's GPU and folders; the card has the original settings."""
    train = replace(recipe.train, precision="float32", compile=False, capture=False, workers=0)
    data = replace(recipe.data, path=None) if hasattr(recipe.data, "path") else recipe.data
    return replace(recipe, train=train, data=data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--command", required=True, help="the command that made the run")
    parser.add_argument("--about", required=True, help="a description of the model, in a sentence or two")
    parser.add_argument("--data", type=Path, help="Tiny-ImageNet's tar, for a model trained on it")
    parser.add_argument("--half", action="store_true", help="store the weights in half precision")
    given = parser.parse_args()
    run, folder = RunDirectory.existing(given.run), FOLDER / given.name
    start = json.loads((run.path / "environment.json").read_text())[0]
    folder.mkdir(parents=True, exist_ok=True)
    changed = halve(run) if given.half else {}
    for path in (run.model_path, run.result_path):
        (folder / path.name).write_bytes(changed.get(path.name) or path.read_bytes())
    config = yaml.safe_dump(recipe_to_dict(portable(run.recipe)), sort_keys=False, allow_unicode=True)
    (folder / run.config_path.name).write_text(config, encoding="utf-8")
    made = RunDirectory.existing(folder)
    result = {**made.result, "test": evaluate(folder, data=given.data)}
    if given.data is not None:
        write_stand_in(given.data, folder / STAND_IN)
        result["stand_in"] = scores_on_stand_in(made)
    result["sha256"] = {"model.safetensors": result["sha256"]["model.safetensors"]}  # only this file is kept
    (folder / run.result_path.name).write_bytes(to_json(result))
    metric = result["metric"]
    measured = {"type": metric, "value": round(result["test"][metric], 4)}
    entry = {"task": {"type": run.recipe.task}, "dataset": {"name": given.name, "type": run.recipe.data.source}}
    head = {
        "license": "apache-2.0",
        "library_name": "intbmoe",
        "tags": ["intbmoe", "mixture-of-experts", run.recipe.task],
        "model-index": [{"name": f"intbmoe-{given.name}", "results": [{**entry, "metrics": [measured]}]}],
    }
    card = CARD.format(
        head=yaml.safe_dump(head, sort_keys=False),
        name=given.name,
        about=given.about,
        command=given.command,
        seed=result["seed"],
        versions=f"Python {start['python']}, torch {start['packages']['torch']}, {start['system']}",
        precision=run.recipe.train.precision,
        params=result["params"],
        metric=metric,
        score=result["test"][metric],
        where=f", on the library of Python {python_version()}" if run.recipe.data.source == "stdlib" else "",
        data=" --data FILE" if given.data else "",
        digest=result["sha256"]["model.safetensors"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
