"""Preparations by several processes or by Ray: the same bytes, whichever process is killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from intbmoe.cli import main
from intbmoe.tasks import list_preparations
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.generator import make_journeys
from intbmoe.tasks.travel.inttravel import prepare
from intbmoe.tasks.travel.rows import Budget
from intbmoe.tasks.workers import ALONE, OnRay, Processes, choose_workers
from inttravel_tables import write_tables
from ranks import run_ranks  # noqa: F401 - processes then start from a server that has imported all they need

sys.path += [str(Path(__file__).parent / task) for task in ("language", "vision")]
from fake_images import write_parquet
from fake_text import files_of, write_minipile

pytestmark = pytest.mark.usefixtures("_same_server")
SMALL = Budget(chunk_bytes=4_000, shard_rows=200)


@pytest.fixture
def _same_server(monkeypatch):
    """Keep the fork server of ``ranks`` for later tests in this process."""
    monkeypatch.setattr("intbmoe.tasks.workers._preload", lambda module: None)


def silent(stage, done, total):
    pass


def prepare_journeys(source, target, workers=ALONE, progress=silent):
    return prepare(source, target, skip_bad=False, progress=progress, workers=workers, budget=SMALL)


def prepare_texts(source, target, workers=ALONE, progress=silent):
    return list_preparations()["minipile"].run(source, target, skip_bad=False, progress=progress, workers=workers)


def prepare_images(source, target, workers=ALONE, progress=silent):
    return list_preparations()["imagenet"].run(source, target, skip_bad=False, progress=progress, workers=workers)


KINDS = {"texts": prepare_texts, "images": prepare_images, "journeys": prepare_journeys}
STAGES = {"texts": ["tokens (files)"], "images": ["unpacking (files)"]}
STAGES["journeys"] = ["reading user_action (chunks)", "sorting (shards)"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    pytest.importorskip("duckdb")
    root = tmp_path_factory.mktemp("sources")
    write_minipile(root / "texts")
    write_parquet(root / "images")
    write_tables(make_journeys(seed=3, users=60, weeks=4, sessions=(5, 20), side=3), root / "journeys")
    for kind, prepare_one in KINDS.items():
        prepare_one(root / kind, root / f"{kind}-prepared")
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_write_the_same_bytes(kind, sources, tmp_path):
    stages = []
    counted = KINDS[kind](
        sources / kind, tmp_path / "out", Processes(2), lambda stage, done, total: stages.append((stage, done, total))
    )
    assert counted == KINDS[kind](sources / kind, sources / f"{kind}-prepared")
    assert files_of(tmp_path / "out") == files_of(sources / f"{kind}-prepared")
    for stage in STAGES[kind]:
        [total] = {total for name, _, total in stages if name == stage}
        assert [done for name, done, _ in stages if name == stage] == list(range(1, total + 1))
        assert total > 1


@dataclass(frozen=True)
class Touch:
    """Records each part that is started; some fail or are killed the first time."""

    folder: Path
    kill: int | None = None
    fail: int | None = None

    def __call__(self, part, progress):
        begun = len(list(self.folder.glob(f"{part}-*")))
        (self.folder / f"{part}-{begun}").touch()
        if part == self.kill and not begun:
            os.kill(os.getpid(), signal.SIGKILL)
        if part == self.fail:
            raise DataError("row 7 is bad")
        return 10 * part


def test_a_failure_is_told_and_leaves_no_process(tmp_path):
    assert Processes(2).run("x", Touch(tmp_path), [3, 1, 2], silent) == [30, 10, 20]
    with pytest.raises(DataError, match="row 7 is bad"):
        Processes(2).run("x", Touch(tmp_path, fail=5), range(20), silent)
    with pytest.raises(DataError, match=r"x: a process was killed.*the same command resumes"):
        Processes(2).run("x", Touch(tmp_path, kill=30), [30, 31], silent)
    assert not multiprocessing.active_children()


def test_who_works_is_chosen_by_the_options(capsys):
    assert choose_workers(1, None) == ALONE
    assert choose_workers(3, None) == Processes(3)
    assert choose_workers(1, "auto") == OnRay("auto")
    with pytest.raises(SystemExit, match="--workers 2 and --ray auto exclude each other"):
        main(["prepare", "minipile", "a", "b", "--workers", "2", "--ray", "auto"])


def test_without_ray_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"--ray needs ray: pip install 'intbmoe\[ray\]'"):
        OnRay("local").run("x", Touch(tmp_path), [1], silent)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the end of a parent is noticed on Linux alone")
def test_the_command_killed_with_its_workers_ends_with_the_same_bytes(sources, tmp_path):
    command = [
        sys.executable,
        "-m",
        "intbmoe.cli",
        "prepare",
        "minipile",
        str(sources / "texts"),
        str(tmp_path / "out"),
    ]
    command += ["--workers", "2"]
    for seconds in (5, 8, 10):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        process.kill()
        process.wait()
    subprocess.run(command, check=True, capture_output=True)
    assert files_of(tmp_path / "out") == files_of(sources / "texts-prepared")


@pytest.fixture
def two_nodes(monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")]))
    options = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        second = cluster.add_node(**options)
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False)
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_two_ray_nodes_of_which_one_is_killed_write_the_same_bytes(sources, tmp_path, two_nodes):
    cluster, second = two_nodes
    killed = []

    def kill_once(stage, done, total):
        if stage == "reading user_action (chunks)" and done == 2 and not killed:
            killed.append(stage)
            cluster.remove_node(second, allow_graceful=False)

    prepare_journeys(sources / "journeys", tmp_path / "journeys", OnRay(cluster.address), kill_once)
    assert killed
    assert files_of(tmp_path / "journeys") == files_of(sources / "journeys-prepared")
    prepare_texts(sources / "texts", tmp_path / "texts", OnRay(cluster.address))
    assert files_of(tmp_path / "texts") == files_of(sources / "texts-prepared")


@pytest.mark.slow
def test_ray_repeats_a_part_whose_process_was_killed_and_tells_of_bad_rows(tmp_path, two_nodes):
    cluster, _ = two_nodes
    workers = OnRay(cluster.address)
    assert workers.run("x", Touch(tmp_path, kill=2), [1, 2, 3], silent) == [10, 20, 30]
    assert (tmp_path / "2-1").exists()
    with pytest.raises(DataError, match=r"^row 7 is bad$"):
        workers.run("x", Touch(tmp_path, fail=5), [4, 5], silent)
