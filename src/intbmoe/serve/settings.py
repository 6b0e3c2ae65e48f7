"""A server's settings; the supervisor passes them to its processes as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from intbmoe.checks import require
from intbmoe.machine import usable_cores
from intbmoe.settings import Checked, MustBe, Positive, PositiveInt

TOLD = tyro.conf.arg(help_behavior_hint="")  # for a setting whose text says the default
LOADER = "intbmoe.serve.loading"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
STREAM_DEADLINE_MS = 60_000.0  # default deadline of generated text, which clients read while it is written


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """How an artifact is served."""

    artifact: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ARTIFACT")]]
    """The folder that intbmoe export wrote, or a link to it; or a model of the zoo, such as zoo:journeys."""
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can connect."""
    port: Annotated[int, MustBe("from 0 to 65535", lambda value: 0 <= value < 65536)] = 8000
    """0 picks a free port."""
    budget_ms: Positive = 60.0
    """Target latency: a batch is limited to what can be computed in half of it."""
    deadline_ms: Annotated[Positive | None, TOLD] = None
    """When a request is abandoned and answered with 504. Default: ten budgets; for generated text, a minute."""
    workers: PositiveInt = 1
    """Engine processes, each with the model."""
    fronts: PositiveInt = 1
    """HTTP processes."""
    spare: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: a spare is kept)")] = True
    """--no-spare: no HTTP process waits in reserve to replace one that dies."""
    decoders: PositiveInt = 2
    """Processes per front that decode images; there is one more for large ones."""
    threads: Annotated[PositiveInt | None, TOLD] = None
    """CPU threads of each engine's model. Default: the cores not used by fronts, divided among the engines."""
    device: str = "cpu"
    """Where the model runs, such as cuda."""
    queue: PositiveInt = 1024
    """Maximum number of requests waiting in one engine; more are refused with 429."""
    batch_tokens: PositiveInt = 65_536
    """Maximum number of tokens in a batch, including padding, whatever the budget allows."""
    streams: PositiveInt = 32
    """Texts that an engine writes at a time; each has its own place in the cache."""
    body_bytes: Annotated[PositiveInt | None, TOLD] = None
    """Largest request. Default: what the artifact's predictor says."""
    body_memory_mb: Positive = 256.0
    """Maximum memory for the bodies of all requests in one front; more are refused with 429."""
    connections: PositiveInt = 4096
    """Maximum number of connections of one front; more are answered with 503."""
    address_connections: Annotated[PositiveInt | None, TOLD] = None
    """Of these, the maximum from one address. Default: half; behind a proxy, as many as --connections."""
    patience_s: Positive = 10.0
    """A client that takes longer to send its request is cut off."""
    drain_s: Positive = 15.0
    """How long requests in flight may take at shutdown."""
    hang_s: Positive = 60.0
    """A process that is silent for this long is killed and replaced."""
    api_key_file: Annotated[str | None, TOLD] = None
    """A file with one key per line; lines that start with # are comments. Without it no key is needed."""
    loader: tyro.conf.Suppress[str] = LOADER
    """The module that opens artifacts; tests use one of their own."""

    def check(self) -> None:
        """Raise, naming the setting, if settings contradict each other; nothing has been started yet."""
        if self.body_bytes is not None:
            allowed = f"at least as much as one request of body_bytes={self.body_bytes}"
            require(self.body_memory_bytes >= self.body_bytes, "body_memory_mb", self.body_memory_mb, allowed)
        self.api_keys()

    @property
    def body_memory_bytes(self) -> int:
        return int(self.body_memory_mb * 2**20)

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK

    def deadline_s(self, streams: bool) -> float:
        """Return how long a request may take if the client does not say; ``streams``: whether answers are streamed."""
        usual = STREAM_DEADLINE_MS if streams else 10 * self.budget_ms
        return (self.deadline_ms or usual) / 1000

    def engine_threads(self) -> int:
        return self.threads or max(1, (usable_cores() - self.fronts) // self.workers)

    def api_keys(self) -> tuple[bytes, ...]:
        if self.api_key_file is None:
            return ()
        try:
            lines = Path(self.api_key_file).read_bytes().splitlines()
        except OSError as error:
            raise ValueError(f"api_key_file={self.api_key_file!r} cannot be read: {error}") from error
        keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith(b"#"))
        require(bool(keys), "api_key_file", self.api_key_file, "a file with one key per line")
        return keys

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        return cls(**json.loads(text))
