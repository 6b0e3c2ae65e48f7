"""Which engine is asked."""

import asyncio
import contextlib
import socket
import time
from types import SimpleNamespace

from intbmoe.serve import links, messages
from intbmoe.serve.links import LEFT, Call, Dispatcher, Line, ServedVersion
from intbmoe.tasks.serving.requests import Encoded


class FakeLine(Line):
    """An engine that answers at once, unless it hangs; ``held`` are the calls that it has not answered."""

    def __init__(self, hangs=False):
        super().__init__()
        self.hangs, self.asked, self.held = hangs, 0, []

    @property
    def is_open(self):
        return True

    def retire(self):
        pass

    def _post(self, kind, number, *content):
        if kind == messages.CANCEL:
            return
        self.asked += 1
        if self.hangs:
            self.held.append(number)
        else:
            asyncio.get_running_loop().call_soon(self.deliver, messages.ANSWER, number, {})


def served(**lines):
    encoder = SimpleNamespace(
        action="recommend", streams=False, request_schema={}, encode=lambda request: Encoded(3, {})
    )
    made = ServedVersion(1, SimpleNamespace(encoder=encoder, version="one"))
    made.links.update(lines)
    return made


async def ask(dispatcher, deadline_s=0.01):
    call = Call(b"{}", time.monotonic() + deadline_s)
    await call.encode(dispatcher.current)
    dispatcher.send(call)
    return (await call.done).name


def test_an_engine_that_hangs_is_soon_not_asked_any_more():
    async def run():
        well, hung = FakeLine(), FakeLine(hangs=True)
        dispatcher = Dispatcher()
        dispatcher.switch(served(hung=hung, well=well))
        outcomes = [await ask(dispatcher) for _ in range(50)]
        assert outcomes.count("expired") == hung.asked == 1
        assert outcomes.count("answered") == well.asked == 49
        hung.hangs = False
        hung.deliver(messages.REFUSED, hung.held.pop(), "its deadline has passed", 0.0)
        assert (hung.load, well.load) == (0, 0)
        assert await ask(dispatcher) == "answered"
        assert hung.asked == 2  # it is back

    asyncio.run(run())


def test_an_engine_that_says_nothing_of_what_was_given_up_is_asked_when_the_others_are_busy():
    async def run():
        idle, busy = FakeLine(), FakeLine(hangs=True)
        dispatcher = Dispatcher()
        dispatcher.switch(served(idle=idle, busy=busy))
        call = Call(b"{}", time.monotonic() + 5)
        await call.encode(dispatcher.current)
        idle.hangs = True
        dispatcher.send(call)
        call.finish(LEFT)
        idle.hangs = False
        assert idle.load == 3
        first = asyncio.create_task(ask(dispatcher, 0.2))
        second = asyncio.create_task(ask(dispatcher, 0.2))
        assert await second == "answered"
        assert (busy.asked, idle.asked, idle.load) == (1, 2, 0)
        assert await first == "expired"

    asyncio.run(run())


def test_with_one_engine_there_is_no_choice():
    async def run():
        only = FakeLine(hangs=True)
        dispatcher = Dispatcher()
        dispatcher.switch(served(only=only))
        assert await ask(dispatcher) == "expired"
        only.hangs = False
        assert await ask(dispatcher) == "answered"
        assert only.load == 0

    asyncio.run(run())


def test_what_an_engine_does_not_read_is_not_heaped_up_for_it(tmp_path, monkeypatch):
    """Otherwise requests whose clients were answered long ago would stay in the front's memory."""
    monkeypatch.setattr(links, "UNSENT_BYTES", 2**20)
    path, size = str(tmp_path / "engine"), 100_000

    async def run():
        with socket.socket(socket.AF_UNIX) as engine:
            engine.bind(path)
            engine.listen()
            dispatcher, made = Dispatcher(), served()
            await dispatcher.connect(made, path)
            dispatcher.switch(made)
            outcomes = []
            for _ in range(60):
                call = Call(b"{}", time.monotonic() + 0.005)
                await call.encode(made)
                call.content = bytes(size)
                dispatcher.send(call)
                outcomes.append((await call.done).name)
            assert set(outcomes) == {"expired", "refused"}
            assert outcomes.count("expired") * size < 2**20 + 500_000  # plus what the system buffers
            accepted, _ = engine.accept()
            with accepted:
                accepted.settimeout(0.2)
                loop = asyncio.get_running_loop()
                with contextlib.suppress(TimeoutError):
                    while await loop.run_in_executor(None, accepted.recv, 2**20):
                        pass
                call = Call(b"{}", time.monotonic() + 0.01)
                await call.encode(made)
                dispatcher.send(call)
                assert (await call.done).name == "expired"  # the engine is asked again

    asyncio.run(run())
