"""Comparisons of small real runs, and comparisons made up by hand."""

from intbmoe.compare.page import Comparison
from intbmoe.compare.plan import CompareOptions, make_plan, sort_out
from intbmoe.compare.summary import add_differences, confidence_intervals, make_rows, summarise

HOSTILE = "<script>alert(1)</script>\"'&"


def plan_of(recipe, root, methods="switch,intbmoe"):
    return make_plan(recipe, CompareOptions(methods=methods, seeds=2, root=root))


def compare_runs(recipe, root):
    """What ``intbmoe compare`` has at the end."""
    plan = plan_of(recipe, root)
    sound, left_out = sort_out(plan.jobs)
    rows = make_rows(summarise(sound))
    add_differences(rows, sound, "switch")
    return Comparison(plan, sound, rows, {}, left_out, "switch,intbmoe", "intbmoe compare digits")


def made_up_row(title, label, *values, flops=1_000_000, method="switch", **more):
    return {
        "title": title,
        "label": label,
        "method": method,
        "seeds": list(range(len(values))),
        "metric": "accuracy",
        "values": list(values),
        "mean": sum(values) / len(values) if values else None,
        "interval_95": confidence_intervals([values])[0],
        "params": 500_000,
        "activated": 200_000,
        "flops": flops,
        "flops_executed": flops,
        "participation": 2.0,
        "execution": 1.0,
        "materialization": 0.0,
        "materialization_per": None,
        "active_experts": None,
        "seconds": 1.5 if values else None,
        "metrics": {"accuracy": {"mean": sum(values) / len(values), "interval_95": None}} if values else {},
        "reported": {},
        "validated": True,
        "report": "last",
        **more,
    }


def made_up_run(row, seed):
    return {
        "title": row["title"],
        "label": row["label"],
        "path": f"runs/digits/{row['label']}/{seed}",
        "link": f"../{row['label']}/{seed}/",
        "name": f"digits/{row['label']}/{seed}",
        "seed": seed,
        "config_sha256": "c" * 64,
        "model_sha256": "d" * 64,
        "command": f"intbmoe train {row['label']}",
        "device": "cpu",
        "torch": "2.13",
        "test": {"accuracy": row["values"][seed]},
        "epochs": 2.0,
        "steps": 40,
        "seconds": 1.5,
    }


def made_up(*rows, **more):
    """The data of a comparison of these rows."""
    runs = [made_up_run(row, seed) for row in rows for seed in row["seeds"]]
    return {
        "recipe": "digits",
        "task": "vision",
        "metric": "accuracy",
        "higher_is_better": True,
        "methods": "all",
        "command": "intbmoe compare digits",
        "rows": list(rows),
        "sets": {},
        "floors": {},
        "ceilings": {},
        "runs": runs,
        "left_out": [],
        **more,
    }


def made_up_curves(data):
    """Losses and loads of each run, over three lines of metrics."""
    about = [
        {"title": run["title"], "label": run["label"], "seed": run["seed"], "steps": [1, 2, 3]} for run in data["runs"]
    ]
    wanted = [
        ("train", "loss"),
        ("valid", "loss"),
        ("valid", "accuracy"),
        ("train", "utilisation"),
        ("train", "entropy"),
    ]
    return [
        {**one, "split": split, "name": name, "values": [0.5, 0.75, 0.9]} for one in about for split, name in wanted
    ]
