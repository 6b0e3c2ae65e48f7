"""A server in virtual time: the front's application, its decoders' queues and the engine are real.

Work that other processes would do only advances a clock, so that a second of overload is simulated in a fraction of
a second, and in the same way on every machine.
"""

import asyncio
import random
import selectors
from collections import Counter, deque
from types import SimpleNamespace

import fake_model
import msgpack
from asgi import ask

from intbmoe.serve import decoders, front, links
from intbmoe.serve.access import Access
from intbmoe.serve.bodies import prepare
from intbmoe.serve.decoders import Decoders
from intbmoe.serve.door import Door
from intbmoe.serve.engine import Engine
from intbmoe.serve.links import Dispatcher, Line, ServedVersion
from intbmoe.serve.loading import Opened
from intbmoe.serve.metrics import FrontMetrics
from intbmoe.serve.settings import Settings

SENDING_S = 0.0002  # for a message between processes


class _Timers(selectors.SelectSelector):
    """A selector with nothing to read: instead of waiting, it advances the clock."""

    now = 1000.0

    def select(self, timeout=None):
        assert timeout is not None, "all tasks wait, and no timer is set"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.timers = _Timers()
        super().__init__(self.timers)

    def time(self):
        return self.timers.now


class _EngineLine(Line):
    """An engine that computes in parallel to the front, as a separate process does."""

    is_open = True

    def __init__(self, loop, predictor, settings, noise, monkeypatch):
        super().__init__()
        self._loop, self._ahead = loop, 0.0  # how far its clock is ahead while it computes
        self.engine = Engine(predictor, settings, clock=lambda: loop.time() + self._ahead)
        self._inbox, self._came = deque(), asyncio.Event()
        self.computing_s = 0.0

        def sleep(seconds):
            self._ahead += seconds * noise()

        monkeypatch.setattr(fake_model, "sleep", sleep)
        self._task = loop.create_task(self._run())

    def retire(self):
        self._task.cancel()

    def _post(self, *message):
        self._loop.call_later(SENDING_S, self._arrive, message)

    def _arrive(self, message):
        self._inbox.append(message)
        self._came.set()

    async def _run(self):
        while True:
            await self._came.wait()
            self._came.clear()
            while self._inbox or self.engine.busy:
                replies = []
                while self._inbox:
                    replies += self.engine.receive(*self._inbox.popleft())
                replies += self.engine.step()
                seconds, self._ahead = self._ahead, 0.0
                self.computing_s += seconds
                await asyncio.sleep(seconds)
                for reply in replies:
                    self._loop.call_later(SENDING_S, self.deliver, reply.kind, reply.key, *reply.content)


class _DecoderLine:
    """The line to a decoder that encodes one request after the other."""

    def __init__(self, decoder, encoder, seconds):
        self._decoder, self._encoder, self._seconds = decoder, encoder, seconds

    def write(self, data):
        reply = (decoders.ENCODED, *prepare(self._encoder, float("inf"), msgpack.unpackb(data)))
        asyncio.get_running_loop().call_later(self._seconds(), self._decoder.data_received, msgpack.packb(reply))

    def close(self):
        pass


class VirtualServer:
    """``limits`` are those of ``fake_model``; times vary randomly by the fraction ``spread``."""

    def __init__(self, monkeypatch, spread=0.2, **limits):
        self.loop = VirtualLoop()
        self.random = random.Random(0)
        for module in (front, links, decoders):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.loop.time))
        self._noise = lambda: self.random.uniform(1 - spread, 1 + spread)
        about = {"version": "one", "action": "recommend", "delay_ms": 0, "item_ms": 0, "offset": 0} | limits
        self._encode_s = about.pop("encode_ms", 0) / 1000
        self.loop.run_until_complete(self._open(about, monkeypatch))

    async def _open(self, about, monkeypatch):
        settings, encoder = Settings(artifact="fake"), fake_model.FakePredictor({**about, "untrusted": False})
        opened, pool = Opened("one", {}, encoder, []), None
        if about.get("untrusted"):

            async def add(lane):
                decoder = decoders._Decoder(lane, 1)
                decoder.connection_made(_DecoderLine(decoder, encoder, lambda: self._encode_s * self._noise()))
                lane._all.add(decoder)
                decoder.data_received(msgpack.packb((decoders.READY,)))
                return decoder

            monkeypatch.setattr(decoders._Lane, "_add", add)
            pool = Decoders(SimpleNamespace(kill=None), 1, "fake", opened, settings.decoders)
            await pool.open()
        self.served = ServedVersion(1, opened, pool)
        self.door = self.served.door = Door(self.loop.time)
        self.line = _EngineLine(self.loop, encoder, settings, self._noise, monkeypatch)
        self.served.links["engine"] = self.line
        dispatcher = Dispatcher()
        dispatcher.switch(self.served)
        self._app = front.Front(settings, dispatcher, FrontMetrics(), None, Access(settings, ())).app()

    async def _ask(self, deadline_ms):
        headers = () if deadline_ms is None else ((b"x-deadline-ms", b"%d" % deadline_ms),)
        status, _ = await ask(self._app, "/v1/recommend", {"history": [1]}, headers)
        return status

    def open_loop(self, rate, seconds, deadline_ms=None):
        """Statuses of requests that arrive at random, ``rate`` per second on average, whether or not others wait."""

        async def run():
            asked, end = [], self.loop.time() + seconds
            while self.loop.time() < end:
                asked.append(asyncio.create_task(self._ask(deadline_ms)))
                await asyncio.sleep(self.random.expovariate(rate))
            return Counter(await asyncio.gather(*asked))

        return self.loop.run_until_complete(run())

    def closed_loop(self, clients, seconds, deadline_ms=None, pause_s=0.001):
        """Statuses of clients that ask again when they have an answer, with a pause after a refusal."""

        async def client(found, end):
            while self.loop.time() < end:
                status = await self._ask(deadline_ms)
                found[status] += 1
                await asyncio.sleep(pause_s if status == 429 else 0.0001)

        async def run():
            found, end = Counter(), self.loop.time() + seconds
            await asyncio.gather(*(client(found, end) for _ in range(clients)))
            return found

        return self.loop.run_until_complete(run())

    def close(self):
        self.served.retire()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
