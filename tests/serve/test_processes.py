"""What happens when processes of a server die, hang or are killed."""

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_model import POISON, write_artifact
from server import Server

pytestmark = pytest.mark.slow
PATH = "/v1/recommend"


def fronts(server):
    return [pid for pid, command in server._children() if "front_process" in command]


def is_ready(server):
    try:
        return server.get("/health/ready").status == 200
    except OSError:
        return False


def test_two_fronts_share_a_port_and_their_figures_are_added_up(tmp_path):
    with Server(artifact=write_artifact(tmp_path), fronts=2) as server:
        assert len(fronts(server)) == 2
        with ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(lambda n: server.post(PATH, {"history": [n]}).status, range(100)))
        assert statuses == [200] * 100
        name = 'intbmoe_requests_total{action="recommend",outcome="answered"}'
        assert {server.metrics()[name] for _ in range(10)} == {100.0}
        killed = fronts(server)[0]
        os.kill(killed, signal.SIGKILL)
        server.until(lambda: len(set(fronts(server)) - {killed}) == 2, 60)
        # Connections to the port of a front that is starting wait: they are answered late, not refused.
        assert [server.post(PATH, {"history": [n]}).status for n in range(20)] == [200] * 20
        assert server.metrics()[name] == 120.0


def test_a_request_that_kills_engines_is_refused_and_they_come_back(tmp_path):
    with Server(artifact=write_artifact(tmp_path), workers=2, deadline_ms=5000) as server:
        before = set(server.engine_pids())
        started = time.monotonic()
        answer = server.post(PATH, {"history": [POISON]})
        assert answer.status == 503
        assert time.monotonic() - started < 5
        server.until(lambda: len(set(server.engine_pids()) - before) == 2 and is_ready(server), 60)
        assert server.post(PATH, {"history": [1]}).status == 200


def test_an_engine_that_hangs_is_replaced(tmp_path):
    with Server(artifact=write_artifact(tmp_path), hang_s=3.0) as server:
        [engine] = server.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        assert server.post(PATH, {"history": [1]}, {"x-deadline-ms": "300"}).status == 504
        server.until(lambda: engine not in server.engine_pids(), 60)
        time.sleep(0.2)  # until the front has noticed
        server.until(lambda: is_ready(server), 60)
        assert server.post(PATH, {"history": [1]}).status == 200


def test_beside_an_engine_that_hangs_the_other_answers(tmp_path):
    with Server(artifact=write_artifact(tmp_path), workers=2, hang_s=60.0, deadline_ms=500) as server:
        os.kill(server.engine_pids()[0], signal.SIGSTOP)
        statuses = [server.post(PATH, {"history": [1]}).status for _ in range(40)]
        assert statuses.count(504) <= 2
        assert statuses.count(200) >= 38
        os.kill(server.engine_pids()[0], signal.SIGCONT)


def test_sighup_reloads(tmp_path):
    with Server(artifact=write_artifact(tmp_path)) as server:
        write_artifact(tmp_path, version="two", broken="its weights are torn")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: any("the old version keeps serving" in line for line in server.log), 60)
        assert any("its weights are torn" in line for line in server.log)
        write_artifact(tmp_path, version="two")
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: server.get("/v1/model").json["version"] == "two", 60)


def test_a_front_that_comes_back_to_another_version_has_it_served(tmp_path):
    with Server(artifact=write_artifact(tmp_path)) as server:
        write_artifact(tmp_path, version="two")  # as an export to the same folder does
        os.kill(fronts(server)[0], signal.SIGKILL)
        server.until(lambda: is_ready(server) and server.get("/v1/model").json["version"] == "two", 60)
        assert server.post(PATH, {"history": [1]}).status == 200


def test_an_engine_that_finds_a_broken_version_comes_back_when_it_is_mended(tmp_path):
    """Even if no client asks for a reload, and the first one, which it starts itself, fails."""
    with Server(artifact=write_artifact(tmp_path)) as server:
        write_artifact(tmp_path, version="two", wrong_golden=True)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.until(lambda: any("golden request 0" in line for line in server.log), 60)
        write_artifact(tmp_path, version="three", one_front="refuses")
        server.until(lambda: any("this front cannot read it" in line for line in server.log), 60)
        server.until(lambda: is_ready(server) and server.get("/v1/model").json["version"] == "three", 60)
        assert server.post(PATH, {"history": [1]}).status == 200


def test_a_front_that_hangs_is_replaced(tmp_path):
    with Server(artifact=write_artifact(tmp_path), hang_s=4.0) as server:
        [front] = fronts(server)
        os.kill(front, signal.SIGSTOP)
        assert server.post(PATH, {"history": [1]}, timeout=60).status == 200  # by its successor, on the same port
        assert front not in fronts(server)


def test_an_engine_that_hangs_while_it_is_left_does_not_survive_the_server(tmp_path):
    with Server(artifact=write_artifact(tmp_path)) as server:
        [engine] = server.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        write_artifact(tmp_path, version="two")
        assert server.post("/v1/reload", {}).json["version"] == "two"
        assert engine in server.engine_pids()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert not _is_alive(engine)


def test_nothing_survives_a_killed_supervisor(tmp_path):
    with Server(artifact=write_artifact(tmp_path), fresh=True) as server:  # so that an engine's command has the folder
        children = dict(server._children())
        [engine] = server.engine_pids()
        folder = Path(children[engine].split("\0")[-3]).parent
        server.process.kill()
        server.process.wait()
        server.until(lambda: not any(_is_alive(pid) for pid in children), 10)
        assert folder.name.startswith("intbmoe-")
        shutil.rmtree(folder)  # only the supervisor could have removed it


def test_a_broken_artifact_ends_the_start_with_its_reason(tmp_path):
    artifact = write_artifact(tmp_path, broken="its weights are torn")
    with pytest.raises(RuntimeError, match="its weights are torn"), Server(artifact=artifact):
        pass


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_front_in_reserve_takes_the_place_of_one_that_dies(tmp_path):
    """Clients used to wait on the port until a new process had started: seconds, and eleven of them under load."""
    with Server(artifact=write_artifact(tmp_path), spare=True) as server:
        for _ in range(3):
            server.until(lambda: len(fronts(server)) == 2, 30)
            time.sleep(15)  # by then the second one is ready
            serving = min(fronts(server))
            os.kill(serving, signal.SIGKILL)
            started = time.monotonic()
            while True:
                try:
                    assert server.post(PATH, {"history": [1]}).status == 200
                    break
                except ConnectionError:  # the one that died had accepted it
                    continue
            assert time.monotonic() - started < 1.0
