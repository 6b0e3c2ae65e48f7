"""The server on Ray Serve: the same answers, new versions under load, and the loss of a machine."""

import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import psutil
import pytest
from asgi import call
from fake_model import POISON, SLOW, write_artifact

from intbmoe.serve import ray as on_ray
from intbmoe.serve.local import build_app
from intbmoe.serve.ray import Replicas
from intbmoe.serve.settings import Settings

PATH = "/v1/recommend"


def test_arguments_of_rays_command_line_are_settings(monkeypatch):
    monkeypatch.setattr(on_ray, "deployment", lambda settings, replicas: (settings, replicas))
    given = {"artifact": "123", "device": "cuda", "budget_ms": "40", "max_replicas": "8", "num_gpus": "0.5"}
    settings, replicas = on_ray.app(given)
    assert (settings.artifact, settings.device, settings.budget_ms) == ("123", "cuda", 40.0)
    assert replicas == Replicas(max_replicas=8, num_gpus=0.5)
    assert on_ray.app({"artifact": "a", "max_replicas": 2})[1].max_replicas == 2
    with pytest.raises(ValueError, match="max_replica: no such setting: did you mean 'max_replicas'"):
        on_ray.app({"artifact": "a", "max_replica": "2"})
    with pytest.raises(ValueError, match="budget_ms='soon' is not allowed"):
        on_ray.app({"artifact": "a", "budget_ms": "soon"})
    with pytest.raises(ValueError, match=r"min_replicas must be at most max_replicas \(2\)"):
        on_ray.app({"artifact": "a", "max_replicas": "2", "min_replicas": "3"})


def test_replicas_are_scaled_between_two_numbers_or_fixed():
    fixed = Replicas(min_replicas=3, max_replicas=3, per_node=1).options()
    assert (fixed["num_replicas"], fixed["max_replicas_per_node"]) == (3, 1)
    assert "autoscaling_config" not in fixed
    scaled = Replicas(max_replicas=3, ongoing=20).options()
    assert scaled["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 20.0}
    assert "num_replicas" not in scaled


def test_without_ray_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs ray: pip install 'intbmoe\[ray\]'"):
        on_ray.deployment(Settings(artifact=str(write_artifact(tmp_path)), loader="fake_model"))


class Nodes:
    """A cluster of two nodes on this machine, with Ray Serve; requests go to the first."""

    def __init__(self, ray, serve, cluster, second, port):
        self.ray, self.serve, self.cluster, self.second, self.port = ray, serve, cluster, second, port

    def deploy(self, artifact, **replicas):
        settings = Settings(artifact=str(artifact), loader="fake_model", deadline_ms=20_000)
        replicas = Replicas(**{"num_cpus": 0.5, **replicas})
        self.serve.run(on_ray.deployment(settings, replicas, health_check_period_s=1), name="intbmoe")

    def running(self):
        states = self.serve.status().applications["intbmoe"].deployments["intbmoe"].replica_states
        return states.get("RUNNING", 0)

    def lose_second(self):
        """Kill the second node, with its replica and all its processes, as a power failure would."""
        raylet = self.second.all_processes["raylet"][0].process.pid
        for process in psutil.Process(raylet).children(recursive=True):
            process.kill()
        self.cluster.remove_node(self.second, allow_graceful=False)

    def post(self, content, path=PATH, **headers):
        """(status, answer, version)."""
        body = json.dumps(content).encode()
        headers = {"content-type": "application/json", **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response), response.headers["x-model-version"]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), None


@pytest.fixture(scope="module")
def nodes():
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray import serve
    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING", "0")  # one proxy for all replicas, wherever they are
        cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
        try:
            second = cluster.add_node(**options)
            cluster.wait_for_nodes()
            ray.init(cluster.address, log_to_driver=False)
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield Nodes(ray, serve, cluster, second, port)
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


class Load:
    """Clients that send one request after another; records (end time, status, version, client) of each."""

    def __init__(self, nodes, clients=8):
        self.answers, self._end = [], threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(nodes, number)) for number in range(clients)]

    def _ask(self, nodes, number):
        while not self._end.is_set():
            status, _, version = nodes.post({"history": [1, 2], "top_n": 1})
            self.answers.append((time.monotonic(), status, version, number))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, number):
        """Wait until that many more requests are answered."""
        until = len(self.answers) + number
        for _ in range(600):
            if len(self.answers) >= until:
                return
            time.sleep(0.1)
        raise TimeoutError(f"{len(self.answers)} of {until} requests were answered")


@pytest.mark.slow
def test_answers_and_errors_are_those_of_the_server(nodes, tmp_path):
    artifact = write_artifact(tmp_path / "one")
    nodes.deploy(artifact)
    alone = build_app(Settings(artifact=str(artifact), loader="fake_model", deadline_ms=20_000))
    for content in ({"history": [1, 2], "top_n": 1}, {"history": []}, {"history": [1], "tpo_n": 1}, [1]):
        status, body = call(alone, PATH, content)
        found = nodes.post(content)
        assert found[0] == status
        assert (found[1] if status == 200 else json.loads(found[1])) == json.loads(body)
    assert nodes.post({"history": [SLOW + 20]}, **{"x-deadline-ms": "50"})[0] == 504
    assert nodes.post({"prompt": "a"}, "/v1/generate")[0] == 404
    assert nodes.post({}, "/v1/reload")[0] == 409


@pytest.mark.slow
def test_a_new_version_is_rolled_out_under_load_and_a_broken_one_is_not(nodes, tmp_path):
    current = tmp_path / "current"
    current.symlink_to(write_artifact(tmp_path / "one", delay_ms=20))
    nodes.deploy(current)
    with Load(nodes) as load:
        load.wait_for(20)
        current.unlink()
        current.symlink_to(write_artifact(tmp_path / "two", delay_ms=20, version="two"))
        nodes.deploy(current)
        load.wait_for(20)
        with pytest.raises(RuntimeError, match="intbmoe"):
            nodes.deploy(write_artifact(tmp_path / "three", version="three", wrong_golden=True))
        load.wait_for(20)
    assert Counter(status for _, status, *_ in load.answers) == {200: len(load.answers)}
    versions = [version for _, _, version, _ in sorted(load.answers)]
    assert versions[0] == "one"
    assert set(versions[-20:]) == {"two"}
    assert set(versions) == {"one", "two"}


@pytest.mark.slow
def test_a_replica_that_dies_is_replaced(nodes, tmp_path):
    nodes.deploy(write_artifact(tmp_path / "one"))
    assert nodes.post({"history": [POISON]})[0] >= 500
    for _ in range(60):
        if nodes.post({"history": [1], "top_n": 1})[0] == 200:
            return
        time.sleep(1)
    raise TimeoutError("no replica took its place")


@pytest.mark.slow
def test_replicas_are_added_under_load(nodes, tmp_path):
    nodes.deploy(write_artifact(tmp_path / "one", delay_ms=200), max_replicas=2, ongoing=2)
    assert nodes.running() == 1
    with Load(nodes) as load:
        for _ in range(120):
            if nodes.running() == 2:
                break
            time.sleep(1)
    assert nodes.running() == 2
    assert {status for _, status, *_ in load.answers} == {200}


@pytest.mark.slow
def test_when_a_machine_is_lost_only_what_was_in_flight_there_fails(nodes, tmp_path):
    artifact = write_artifact(tmp_path / "one", delay_ms=200)
    nodes.deploy(artifact, min_replicas=2, max_replicas=2, per_node=1, surge_percent=0)
    assert nodes.running() == 2
    with Load(nodes) as load:
        load.wait_for(40)
        nodes.lose_second()
        load.wait_for(100)
    failed = Counter(client for _, status, _, client in load.answers if status != 200)
    assert 0 < len(failed) < 8  # those whose request was on that node; without any, the test would show nothing
    assert set(failed.values()) == {1}, "a client's next request failed too"
    assert {status for _, status, *_ in load.answers} == {200, 500}
