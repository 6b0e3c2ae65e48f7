"""A new version is served by all fronts or by none."""

import asyncio
import logging
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
from fake_model import write_artifact
from server import Server
from test_server import PATH, load_during

from intbmoe.export import ArtifactError
from intbmoe.serve import supervisor as supervising
from intbmoe.serve.front_process import FrontProcess
from intbmoe.serve.links import Dispatcher, ServedVersion
from intbmoe.serve.messages import reason
from intbmoe.serve.processes import Child, StartError
from intbmoe.serve.settings import Settings


def fronts(server):
    return {pid for pid, command in server._children() if "front_process" in command}


@pytest.fixture(scope="module")
def two_fronts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fronts")
    write_artifact(folder / "one", version="one")
    (folder / "artifact").symlink_to("one")
    with Server(artifact=folder / "artifact", fronts=2, deadline_ms=10_000, hang_s=8.0) as server:
        server.folder = folder
        server.until(lambda: len(fronts(server)) == 2, 10)
        yield server


def point_to(server, name):
    (server.folder / "next").symlink_to(name)
    (server.folder / "next").rename(server.folder / "artifact")


class Persistent:
    """A client that asks again if the connection breaks, as it does when its process is killed."""

    def __init__(self, server):
        self.server = server

    def post(self, *request):
        try:
            return self.server.post(*request)
        except ConnectionError:
            return self.server.post(*request)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("refuses", "RuntimeError: this front cannot read it"),
        pytest.param("dies", "it ended with status -9", marks=pytest.mark.slow),
        pytest.param("stops", "it ended with status -9", marks=pytest.mark.slow),
    ],
)
def test_what_one_front_does_not_serve_no_front_serves(two_fronts, what, why):
    server, before = two_fronts, fronts(two_fronts)
    [engine] = server.engine_pids()
    write_artifact(server.folder / what, version=what, offset=1000, one_front=what)
    point_to(server, what)

    def reload():
        server.process.send_signal(signal.SIGHUP)  # HTTP might reach the front that fails
        server.until(lambda: any(f"cannot serve version {what}" in line for line in server.log), 60)

    answers = load_during(server if what == "refuses" else Persistent(server), reload)
    point_to(server, "one")
    [said] = [line for line in server.log if f"cannot serve version {what}" in line]
    assert "version one keeps serving: front " in said
    assert why in said
    number, pid = said.split("front ")[1].split(")")[0].split(" (process ")
    assert number in ("1", "2")
    assert int(pid) in before
    assert len(answers) > 10
    for answer, item, _ in answers:
        assert answer.status == 200
        assert answer.headers["x-model-version"] == "one"
        assert answer.json["results"][0]["id"] == item
    server.until(lambda: server.engine_pids() == [engine], 20)  # the new ones are gone, the old one never left
    server.until(lambda: len(fronts(server)) == 2, 20)


def test_the_next_version_is_served_by_both(two_fronts):
    server = two_fronts
    write_artifact(server.folder / "two", version="two", offset=1000)
    point_to(server, "two")
    answer = server.post("/v1/reload", {}, timeout=60)
    assert (answer.status, answer.json) == (200, {"version": "two", "previous": "one"})
    versions = {server.post(PATH, {"history": [n]}).headers["x-model-version"] for n in range(30)}
    assert versions == {"two"}
    server.until(lambda: len(server.engine_pids()) == 1, 20)


class FakeFront:
    """Answers each message with the next of ``events``; None means no answer."""

    pid = 7
    is_running = True

    def __init__(self, owner, *events):
        self.owner, self.events, self.told = owner, list(events), []
        self.ready = asyncio.get_running_loop().create_future()

    def tell(self, message):
        self.told.append(message["do"])
        if message["do"] in ("prepare", "serve") and self.events:
            event = self.events.pop(0)
            if event is not None:
                asyncio.get_running_loop().call_soon(self.owner._hear, self, {"number": 2, **event})

    def kill(self):
        self.told.append("killed")


class FakeEngines:
    """Engines that are ready at once, or not."""

    def __init__(self, number, version, error=None):
        self.number, self.version, self.error, self.state = number, version, error, "new"

    async def start(self):
        if self.error is not None:
            raise self.error

    def describe(self):
        return {"number": self.number, "version": self.version}

    async def kill(self):
        self.state = "killed"

    async def drain(self, seconds):
        self.state = "drained"


def reload(*fronts, error=None):
    """What a supervisor answers to a reload, its old and new engines, and the fronts."""

    async def run():
        owner = supervising.Supervisor(Settings(artifact=""), SimpleNamespace(), print)
        old, new = FakeEngines(1, "one"), FakeEngines(2, "two", error)
        owner._engines, owner._new_engines = old, lambda: new
        owner._fronts = {number: FakeFront(owner, *events) for number, events in enumerate(fronts)}
        result = await asyncio.wait_for(owner.reload(), 5)
        await asyncio.sleep(0)
        return result, old, new, list(owner._fronts.values())

    return asyncio.run(run())


PREPARED, SERVING = {"event": "prepared"}, {"event": "serving"}


def test_fronts_serve_when_all_are_prepared():
    result, old, new, fronts = reload([PREPARED, SERVING], [PREPARED, SERVING])
    assert result == {"ok": True, "version": "two", "previous": "one"}
    assert [front.told for front in fronts] == [["prepare", "serve"]] * 2
    assert (old.state, new.state) == ("drained", "new")


def test_a_front_that_refuses_or_is_silent_leaves_all_as_it_was(monkeypatch):
    monkeypatch.setattr(supervising, "START_S", 0.1)
    refused = {"event": "cannot", "why": "no room"}
    for second, why in ((refused, "no room"), (None, "it did not answer within 0.1 s")):
        result, old, new, fronts = reload([PREPARED], [second])
        assert result["ok"] is False
        assert f"version one keeps serving: front 2 (process 7) cannot serve version two: {why}" in result["why"]
        assert [front.told for front in fronts] == [["prepare", "abandon"]] * 2
        assert (old.state, new.state) == ("new", "killed")


def test_a_front_that_was_prepared_and_does_not_switch_is_replaced(monkeypatch):
    monkeypatch.setattr(supervising, "START_S", 0.1)
    result, old, _, fronts = reload([PREPARED, SERVING], [PREPARED, None])
    assert result["ok"] is True
    assert [front.told for front in fronts] == [["prepare", "serve"], ["prepare", "serve", "killed"]]
    assert old.state == "drained"


def test_a_reload_does_not_begin_before_all_fronts_have_started(monkeypatch):
    """The supervisor waits for one operation at a time; otherwise the start would count as failed."""
    monkeypatch.setattr(supervising, "START_S", 1.0)

    async def run():
        owner = supervising.Supervisor(Settings(artifact=""), SimpleNamespace(), print)
        groups = [FakeEngines(2, "one"), FakeEngines(2, "two")]
        owner._new_engines = lambda: groups.pop(0)
        owner._fronts = {0: FakeFront(owner, None, SERVING)}
        starting = asyncio.create_task(owner._start_first())
        await asyncio.sleep(0.05)
        result = await asyncio.wait_for(owner.reload(), 5)
        owner._hear(owner._fronts[0], {"number": 2, **SERVING})
        await asyncio.wait_for(starting, 0.5)
        return result, owner._fronts[0].told

    result, told = asyncio.run(run())
    assert result == {"ok": False, "why": "the server is starting, reloading or shutting down: try again later"}
    assert told == ["serve"]


def test_a_version_that_was_opened_too_late_leaves_its_engines():
    """The front must leave them, because engines end only when every front has closed its connection."""
    opened = SimpleNamespace(encoder=SimpleNamespace(action="recommend", request_schema={}))
    front = SimpleNamespace(_dispatcher=Dispatcher(), _prepared=None, _ready=asyncio.Event())
    front._ready.set()

    class Line:
        retired = False

        def retire(self):
            self.retired = True

    old, new = ServedVersion(1, opened), ServedVersion(2, opened)
    for served in (old, new):
        served.links["path"] = Line()
    for served in (new, old, new):
        FrontProcess._serve(front, served)
    assert front._dispatcher.current is new
    assert (old.links["path"].retired, new.links["path"].retired) == (True, False)


def test_too_long_a_path_for_sockets_is_named_with_what_to_do(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setattr(supervising.tempfile, "tempdir", str(folder))
    with pytest.raises(OSError, match=f"{folder}.* has too long a path for sockets: set TMPDIR to a shorter path"):
        supervising.serve(Settings(artifact=""), print)
    assert list(folder.iterdir()) == []


def test_our_own_errors_are_told_by_their_message_alone_and_others_by_their_kind_too():
    assert reason(ArtifactError("model.safetensors is missing")) == "model.safetensors is missing"
    assert reason(type("Own", (RuntimeError,), {"__module__": "__main__"})("of the process itself")) == (
        "of the process itself"
    )
    assert reason(KeyError("files")) == "KeyError: 'files'"
    assert len(reason(ArtifactError("x" * 10_000))) == 2000


@pytest.mark.parametrize("error", [StartError("torn"), OSError("torn"), KeyError("torn")])
def test_a_reload_that_fails_in_any_way_is_answered(error, caplog):
    caplog.set_level(logging.CRITICAL)
    result, old, new, _ = reload([], error=error)
    assert result["ok"] is False
    assert "torn" in result["why"]
    assert (old.state, new.state) == ("new", "killed")


def test_a_link_to_engines_that_are_left_is_closed_again(tmp_path):
    """An engine that should end waits until every front has closed its connection."""

    async def run():
        closed, connections = asyncio.Event(), []

        async def hear(reader, writer):
            connections.append(writer)
            await reader.read()
            closed.set()

        path = str(tmp_path / "engine")
        engine = await asyncio.start_unix_server(hear, path)
        opened = SimpleNamespace(encoder=SimpleNamespace(action="recommend", request_schema={}))
        dispatcher, served = Dispatcher(), ServedVersion(1, opened)
        await asyncio.gather(*(dispatcher.connect(served, path) for _ in range(3)))
        served.retire()
        await asyncio.wait_for(closed.wait(), 2)
        assert len(connections) == 1
        closed.clear()
        await dispatcher.connect(served, path)  # requested before the switch to the other engines
        await asyncio.wait_for(closed.wait(), 2)
        engine.close()

    asyncio.run(run())


def test_a_process_that_talks_nonsense_is_ended_and_noticed(caplog):
    caplog.set_level(logging.CRITICAL)
    program = "import socket, sys, time; socket.socket(fileno=int(sys.argv[1])).send(b'{\\n'); time.sleep(60)"

    async def run():
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, str(theirs.fileno()), pass_fds=[theirs.fileno()]
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        child = Child(process, writer)
        child.ended = asyncio.create_task(child._listen(reader, lambda child, message: None))
        return await asyncio.wait_for(child.watch(60), 10)

    assert asyncio.run(run()) == -signal.SIGKILL
