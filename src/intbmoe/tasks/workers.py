"""Who does the parts of a preparation: this process, several on this machine, or the machines of a Ray cluster.

Each part writes its own files, which appear only when complete, and is skipped if they exist. So it does not matter who
does a part, in which order, and how often it was started: the result is the same, byte for byte.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from intbmoe.foreign import import_extra
from intbmoe.machine import usable_cores
from intbmoe.tasks.errors import DataError

Progress = Callable[[str, int, int | None], None]  # (what is being done, how much is done, out of how much if known)
Work = Callable[[Any, Progress], Any]  # (a part, progress) → what was counted; both can be pickled
AGAIN = "the same command resumes from what is finished"
RETRIES = 5  # for a part whose machine or process was lost


class Workers(Protocol):
    share: int
    """How many parts one machine does at a time: each gets this fraction of its cores and memory."""

    def run(self, stage: str, work: Work, parts: Sequence[Any], progress: Progress) -> list[Any]:
        """Apply ``work`` to every part and return the results in order; the first error ends it."""


@dataclass(frozen=True)
class Processes:
    """``share`` processes on this machine; with one, this process does the work itself."""

    share: int

    def run(self, stage: str, work: Work, parts: Sequence[Any], progress: Progress) -> list[Any]:
        if self.share == 1 or len(parts) < 2:
            return [work(part, progress) for part in parts]  # ``work`` reports its own progress
        others, server = set(multiprocessing.active_children()), multiprocessing.get_context("forkserver")
        _preload(work.__module__)  # forking this process instead would inherit the locks of its threads
        executor = ProcessPoolExecutor(min(self.share, len(parts)), server, initializer=_begin)
        try:
            futures = [executor.submit(_do, work, part, self.share) for part in parts]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(stage, done, len(parts))
            return [future.result() for future in futures]
        except BaseException as error:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            if isinstance(error, BrokenProcessPool):
                raise DataError(f"{stage}: a process was killed, perhaps for lack of memory; {AGAIN}") from error
            raise
        finally:
            executor.shutdown(cancel_futures=True)


ALONE = Processes(1)


@dataclass(frozen=True)
class OnRay:
    """Runs parts as Ray tasks of one core each; source and target have the same path on every machine."""

    address: str
    """local for this machine alone, auto for the cluster it belongs to, or that cluster's HOST:PORT."""

    @property
    def share(self) -> int:
        nodes = self._connect().nodes()
        return max(1, *(int(node["Resources"].get("CPU", 1)) for node in nodes if node["Alive"]))

    def run(self, stage: str, work: Work, parts: Sequence[Any], progress: Progress) -> list[Any]:
        ray, share = self._connect(), self.share
        from ray.exceptions import RayError, RayTaskError

        do, shared = ray.remote(num_cpus=1, max_retries=RETRIES)(_do), ray.put(work)
        pending = [do.remote(shared, part, share) for part in parts]
        numbers, results = {reference: number for number, reference in enumerate(pending)}, [None] * len(parts)
        try:
            while pending:
                [finished], pending = ray.wait(pending, num_returns=1)
                results[numbers[finished]] = ray.get(finished)
                progress(stage, len(parts) - len(pending), len(parts))
        except RayTaskError as error:
            if isinstance(error.cause, RayError):
                why = str(error.cause).splitlines()[0]
                raise DataError(f"{stage}: {why}: every machine of the cluster needs the same intbmoe") from error
            raise error.cause from error
        except RayError as error:
            raise DataError(f"{stage}: a part failed {RETRIES + 1} times on Ray ({error}); {AGAIN}") from error
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)
        return results

    def _connect(self) -> ModuleType:
        ray = import_extra("ray", "--ray", "ray")
        if not ray.is_initialized():
            own = {"include_dashboard": False} if self.address == "local" else {}
            ray.init(self.address, log_to_driver=False, **own)
        return ray


def choose_workers(number: int, ray: str | None) -> Workers:
    if ray is not None:
        if number != 1:
            raise ValueError(f"--workers {number} and --ray {ray} exclude each other: Ray uses all cores it is given")
        return OnRay(ray)
    return Processes(number)


def end_with_parent(signum: int) -> None:
    """Make the system send ``signum`` to this process when the process that started it ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signum), 0, 0, 0)  # 1 is PR_SET_PDEATHSIG


def _preload(module: str) -> None:
    """Make the fork server import the module once; importing it in each worker would take seconds."""
    multiprocessing.set_forkserver_preload([module])


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: end without a traceback
    end_with_parent(signal.SIGKILL)  # the parent is the fork server, which ends with the preparation
    if not multiprocessing.parent_process().is_alive():
        os._exit(1)  # the parent had already ended


def _do(work: Work, part: Any, share: int) -> Any:
    os.environ["RAYON_NUM_THREADS"] = str(max(1, usable_cores() // share))  # or tokenizers would use all cores
    return work(part, lambda stage, done, total: None)
