"""Metrics of processes that have ended."""

import fcntl
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from intbmoe.serve import metrics

PROGRAM = """
import os, runpy, sys
found = runpy.run_path(sys.argv[1])  # not by its package, which would take a second to import
front, engine = found["FrontMetrics"](), found["EngineMetrics"]("one")
for number in range(int(sys.argv[2])):
    front.ended("recommend", "answered", 0.01 * number)
    engine.block_tokens.labels("ffn", number % 3).inc(2)
    engine.batch_requests.observe(number)
front.in_flight.inc()
print(os.getpid())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    return tmp_path


def run_process(count):
    """Run a process that counts ``count`` requests and ends; return its id."""
    command = [sys.executable, "-c", PROGRAM, metrics.__file__, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def figures():
    text = metrics.read_metrics(CollectorRegistry())[0].decode()
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(one.labels.items())): one.value for family in families for one in family.samples}


def test_counts_of_the_dead_stay_and_their_files_do_not(folder):
    pids = [run_process(count) for count in (4, 7)]
    before = figures()
    assert before["intbmoe_requests_total", (("action", "recommend"), ("outcome", "answered"))] == 11
    for pid in pids:
        metrics.forget_process(pid, folder)
        after = figures()
    gauges = {name for name, _ in before if name.endswith(("in_flight", "engines", "body_bytes", "queue_requests"))}
    counted = {key: value for key, value in before.items() if key[0] not in gauges}
    assert len(counted) > 40
    assert {key: after.get(key) for key in counted} == counted
    assert ("intbmoe_requests_in_flight", ()) not in after
    assert {path.name for path in folder.iterdir()} == {"counter_0.db", "histogram_0.db", "lock"}
    metrics.forget_process(pids[0], folder)  # nothing is counted twice
    assert figures() == after


def test_while_figures_are_read_none_is_handed_over(folder, caplog):
    pid = run_process(3)
    before = figures()
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        metrics.forget_process(pid, folder)  # which does not wait for the lock
        assert (folder / f"counter_{pid}.db").exists()
    assert "stay in a file of their own" in caplog.text
    key = "intbmoe_requests_total", (("action", "recommend"), ("outcome", "answered"))
    assert figures()[key] == before[key] == 3
