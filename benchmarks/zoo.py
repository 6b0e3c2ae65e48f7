"""Put a finished run into the zoo, with its card.

    python -m benchmarks.zoo runs/digits/intbmoe/0 digits --command "intbmoe train digits" --about "…"

The card's score is measured here and now; ``--half`` stores the weights in half precision. What a hub shows is
README.md, whose head names licence, library and score; the rest is the run itself.
"""

import argparse
import json
from pathlib import Path
from platform import python_version

import yaml

from intbmoe.files import to_json
from intbmoe.train import RunDirectory, evaluate
from intbmoe.train.evaluation import halve
from intbmoe.zoo import FOLDER

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
| parameters | {params:,} |
| test {metric} | {score:.4f}{where} |
| SHA-256 of model.safetensors | `{digest}` |

`intbmoe eval zoo:{name}` measures the score again.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--command", required=True, help="what made the run, as a user types it")
    parser.add_argument("--about", required=True, help="what the model is, in a sentence or two")
    parser.add_argument("--half", action="store_true", help="store the weights in half precision")
    given = parser.parse_args()
    run, folder = RunDirectory.existing(given.run), FOLDER / given.name
    start = json.loads((run.path / "environment.json").read_text())[0]
    folder.mkdir(parents=True, exist_ok=True)
    changed = halve(run) if given.half else {}
    for path in (run.config_path, run.model_path, run.result_path):
        (folder / path.name).write_bytes(changed.get(path.name) or path.read_bytes())
    result = {**RunDirectory.existing(folder).result, "test": evaluate(folder)}
    result["sha256"] = {"model.safetensors": result["sha256"]["model.safetensors"]}  # the rest stays behind
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
        params=result["params"],
        metric=metric,
        score=result["test"][metric],
        where=f", on the library of Python {python_version()}" if run.recipe.data.source == "stdlib" else "",
        digest=result["sha256"]["model.safetensors"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
