"""What is counted, over all processes of a server.

Each process writes its figures to files in ``PROMETHEUS_MULTIPROC_DIR``, which the supervisor sets; whichever front is
asked for ``/metrics`` adds them up. What a process that died has counted is added to one file for all the dead, so that
there are no more files than processes, however often one is replaced.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
COUNTED = ("counter", "histogram")
"""Kinds of figures that outlive their process."""
THE_DEAD = "0"
"""Instead of a process's number."""
log = logging.getLogger(__name__)
LATENCIES = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class FrontMetrics:
    """What a front sees."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = self.registry = registry or CollectorRegistry()
        self._requests = Counter(
            "intbmoe_requests", "Requests by action and outcome.", ["action", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "intbmoe_request_seconds",
            "From the request's head to its answer, of those that were answered; for a stream, to its first piece.",
            ["action"],
            buckets=LATENCIES,
            registry=registry,
        )
        self.in_flight = Gauge(
            "intbmoe_requests_in_flight",
            "Requests being answered.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.body_bytes = Gauge(
            "intbmoe_body_bytes",
            "Bytes of the bodies of requests being answered.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.retries = Counter(
            "intbmoe_retries", "Requests sent to another engine because theirs died.", registry=registry
        )
        self.streams = Counter("intbmoe_streams", "Streamed texts, by how they ended.", ["outcome"], registry=registry)
        self.reloads = Counter("intbmoe_reloads", "Reloads asked for, by outcome.", ["outcome"], registry=registry)
        self._outcomes: dict[tuple[str, str], Counter] = {}
        self._latency: dict[str, Histogram] = {}

    def ended(self, action: str, outcome: str, seconds: float) -> None:
        """A request has ended; ``outcome`` is one of ``docs/serving.md``, such as answered or refused."""
        # Looking a labelled figure up costs more than adding to it.
        counter = self._outcomes.get((action, outcome))
        if counter is None:
            counter = self._outcomes[action, outcome] = self._requests.labels(action, outcome)
        counter.inc()
        if outcome == "answered":
            histogram = self._latency.get(action)
            if histogram is None:
                histogram = self._latency[action] = self._seconds.labels(action)
            histogram.observe(seconds)


class EngineMetrics:
    """What an engine sees."""

    def __init__(self, version: str, registry: CollectorRegistry | None = None) -> None:
        registry = self.registry = registry or CollectorRegistry()
        self.queue_seconds = Histogram(
            "intbmoe_queue_seconds",
            "From a front's sending a request to the batch that it is in.",
            buckets=LATENCIES,
            registry=registry,
        )
        self.compute_seconds = Histogram(
            "intbmoe_compute_seconds", "Time of the model for a batch.", buckets=LATENCIES, registry=registry
        )
        self.batch_requests = Histogram(
            "intbmoe_batch_requests", "Requests in a batch.", buckets=BATCHES, registry=registry
        )
        self.tokens = Counter("intbmoe_tokens", "Tokens computed, by use.", ["use"], registry=registry)
        self.waiting = Gauge(
            "intbmoe_queue_requests", "Requests that wait.", registry=registry, multiprocess_mode="livesum"
        )
        self.block_tokens = Counter(
            "intbmoe_block_tokens",
            "Tokens each block was chosen for, in a sample of batches.",
            ["layer", "block"],
            registry=registry,
        )
        model = Gauge(
            "intbmoe_model_engines",
            "Engines that serve a version.",
            ["version"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        model.labels(version).set(1)


def read_metrics(own: CollectorRegistry) -> tuple[bytes, str]:
    """The figures of all processes, or, outside a server, one's ``own``, in Prometheus' text format, and its type."""
    if FOLDER not in os.environ:
        return generate_latest(own), CONTENT_TYPE_LATEST
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    with _locked(Path(os.environ[FOLDER]), fcntl.LOCK_SH):
        return generate_latest(registry), CONTENT_TYPE_LATEST


def forget_process(pid: int, folder: Path) -> None:
    """A process has ended: its gauges go, its counts stay."""
    mark_process_dead(pid, str(folder))
    try:
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):  # who reads may have been stopped: not to be waited for
            for kind in COUNTED:
                _hand_over(folder / f"{kind}_{pid}.db", folder / f"{kind}_{THE_DEAD}.db")
    except Exception as error:  # its file stays, and is read as it is
        log.warning("the figures of process %d stay in a file of their own: %s", pid, error)


def _hand_over(source: Path, target: Path) -> None:
    """Add what was counted in one file to another, and remove it."""
    if not source.exists():
        return
    counted = list(MmapedDict.read_all_values_from_file(str(source)))
    sums = MmapedDict(str(target))
    try:
        for key, value, timestamp, _ in counted:
            sums.write_value(key, sums.read_value(key)[0] + value, timestamp)
    finally:
        sums.close()
    source.unlink()


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """While a front adds files up none of them is handed over, or counts would be there twice or not at all."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, how)
        yield
