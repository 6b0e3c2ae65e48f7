"""Metrics over all processes of a server.

Each process writes its figures to files in ``PROMETHEUS_MULTIPROC_DIR``, which the supervisor sets; the front that gets
a request for ``/metrics`` adds them up. The counts of dead processes are added to one common file, so that the number
of files does not grow however often processes are replaced.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
log = logging.getLogger(__name__)
LATENCIES = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_gauge = partial(Gauge, multiprocess_mode="livesum")  # summed over the processes that are alive


class FrontMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(_gauge, registry=registry)
        requests = counter("intbmoe_requests", "Requests by action and outcome.", ["action", "outcome"])
        seconds = Histogram(
            "intbmoe_request_seconds",
            "Time from a request's head to its answer, if it was answered; for a stream, to its first piece.",
            ["action"],
            buckets=LATENCIES,
            registry=registry,
        )
        self.in_flight = gauge("intbmoe_requests_in_flight", "Requests being answered.")
        self.body_bytes = gauge("intbmoe_body_bytes", "Bytes of the bodies of requests being answered.")
        self.retries = counter("intbmoe_retries", "Requests sent to another engine because theirs died.")
        self.streams = counter("intbmoe_streams", "Streamed texts, by how they ended.", ["outcome"])
        self.reloads = counter("intbmoe_reloads", "Reloads asked for, by outcome.", ["outcome"])
        # Looking up a labelled counter costs more than adding to it.
        self._requests, self._seconds = cache(requests.labels), cache(seconds.labels)

    def ended(self, action: str, outcome: str, seconds: float) -> None:
        """Count a request that has ended; ``docs/serving.md`` lists the outcomes."""
        self._requests(action, outcome).inc()
        if outcome == "answered":
            self._seconds(action).observe(seconds)


class EngineMetrics:
    def __init__(self, version: str, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(_gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        waited = "Time from when a front sends a request to the batch that includes it."
        self.queue_seconds = histogram("intbmoe_queue_seconds", waited, buckets=LATENCIES)
        computed = "Time the model takes for a batch."
        self.compute_seconds = histogram("intbmoe_compute_seconds", computed, buckets=LATENCIES)
        self.batch_requests = histogram("intbmoe_batch_requests", "Requests in a batch.", buckets=BATCHES)
        self.tokens = counter("intbmoe_tokens", "Tokens computed, by use.", ["use"])
        self.waiting = gauge("intbmoe_queue_requests", "Requests waiting.")
        chosen = "Tokens routed to each block, in a sample of batches."
        self.block_tokens = counter("intbmoe_block_tokens", chosen, ["layer", "block"])
        gauge("intbmoe_model_engines", "Engines that serve a version.", ["version"]).labels(version).set(1)


def read_metrics(own: CollectorRegistry) -> tuple[bytes, str]:
    """Return all processes' metrics (outside a server, the ``own`` ones) in Prometheus' text format, and its type."""
    if FOLDER not in os.environ:
        return generate_latest(own), CONTENT_TYPE_LATEST
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    with _locked(Path(os.environ[FOLDER]), fcntl.LOCK_SH):
        return generate_latest(registry), CONTENT_TYPE_LATEST


def forget_process(pid: int, folder: Path) -> None:
    mark_process_dead(pid, str(folder))
    try:
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):  # do not wait: a reader may have been stopped
            for kind in ("counter", "histogram"):  # kinds that outlive their process, in the file of process 0
                _hand_over(folder / f"{kind}_{pid}.db", folder / f"{kind}_0.db")
    except Exception as error:  # the file stays, and is read as it is
        log.warning("the figures of process %d stay in a file of their own: %s", pid, error)


def _hand_over(source: Path, target: Path) -> None:
    if not source.exists():
        return
    counted = list(MmapedDict.read_all_values_from_file(str(source)))
    with closing(MmapedDict(str(target))) as sums:
        for key, value, timestamp, _ in counted:
            sums.write_value(key, sums.read_value(key)[0] + value, timestamp)
    source.unlink()


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Keep counts from moving between files while a front adds them up: it would count some twice or not at all."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, how)
        yield
