"""Finds the runs of a study's tables among all summaries."""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.study.plan import TUNED, TUNING, own_rates
from benchmarks.study.studies import STUDIES

from intbmoe.budget import TABLE_1, TABLE_2

ORDER = {label: place for place, label in enumerate(dict.fromkeys((*TABLE_1, *TABLE_2)))}
BROKEN = 2.0
"""A run broke down if its test loss is more than this many times dense's."""
Runs = list[dict[str, Any]]
Rows = dict[str, Runs]


def find_rows(study: str, summaries: Sequence[Mapping[str, Any]]) -> tuple[Rows, int]:
    """Returns the runs of a study's tables, by label in the paper's order, and the number with other settings.

    Runs that broke down are not among them: a spread that covers them would hide every other difference.
    """
    groups = _groups(study, summaries)
    chosen = _chosen(groups)
    failed = _broken(chosen)
    rows: Rows = {}
    for summary in sorted(chosen, key=lambda summary: (place(summary), summary["seed"])):
        if summary not in failed:
            rows.setdefault(summary["label"], []).append(summary)
    return rows, sum(map(len, groups)) - len(chosen)


def find_broken(study: str, summaries: Sequence[Mapping[str, Any]]) -> Runs:
    """Returns the runs that ``find_rows`` leaves out because they broke down."""
    return _broken(_chosen(_groups(study, summaries)))


def rows_at_own_rates(name: str, found: Mapping[str, Rows], summaries: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns the runs of each method at its own best rate, given all ``found`` rows by study.

    ``name`` is a study of rates; its parent has the runs at the common rate.
    """
    rows: Rows = {}
    for label, rate in own_rates(name, summaries).items():
        runs = [run for study in (STUDIES[name].recipe, name) for run in found[study].get(label, [])]
        own = [{**run, "title": f"{run['title']}, {rate:g}"} for run in runs if run["recipe"]["train"]["lr"] == rate]
        if own:
            rows[label] = sorted(own, key=lambda run: run["seed"])
    return dict(sorted(rows.items(), key=lambda row: place(row[1][0])))


def place(summary: Mapping[str, Any]) -> tuple[bool, int, list[str | int]]:
    """Sorts in the paper's order, then by name, with numbers compared as numbers."""
    parts = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", summary["label"])]
    return summary["label"] not in ORDER, ORDER.get(summary["method"], len(ORDER)), parts


def warm_up_steps(run: Mapping[str, Any]) -> int:
    """Returns how many steps the learning rate took to reach its peak."""
    return round(run["recipe"]["train"]["warmup"] * run["steps"] / run["epochs"])


def _groups(study: str, summaries: Sequence[Mapping[str, Any]]) -> list[Runs]:
    """Returns the study's runs, grouped by the settings that all methods share."""
    groups: dict[str, Runs] = {}
    for summary in summaries:
        if summary["study"] == study and summary["stage"] != TUNING:
            one = STUDIES[study]  # the variants of some studies differ in steps, rates or the number of experts
            shared = "" if one.as_long_as or one.own_rates or one.sets else summary["shared_digest"]
            groups.setdefault(shared, []).append(summary)
    return list(groups.values())


def _chosen(groups: Sequence[Runs]) -> Runs:
    """Returns the group with the best validation mean of dense and IntBMoE, then with the most runs."""

    def standing(group: Runs) -> tuple[float, int]:
        sign = 1 if group[0]["higher_is_better"] else -1
        found = [[sign * run["valid"][run["metric"]] for run in group if run["label"] == label] for label in TUNED]
        return fmean(map(fmean, found)) if all(found) else -math.inf, len(group)

    return max(groups, key=standing, default=[])


def _broken(group: Runs) -> Runs:
    usual = [run["test"]["loss"] for run in group if run["label"] == "dense" and "loss" in run["test"]]
    return [run for run in group if usual and run["test"].get("loss", 0) > BROKEN * fmean(usual)]
