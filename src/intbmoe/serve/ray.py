"""The same server on Ray Serve, over several machines: ``serve run intbmoe.serve.ray:app artifact=/models/one``.

Each replica is an engine and a front in one process (``local.py``); Ray's proxies distribute requests, and its
controller replaces the supervisor: it starts, scales, updates and restarts replicas. The artifact must be at the same
path on every machine, each version in a folder of its own.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from intbmoe.checks import did_you_mean, require
from intbmoe.foreign import import_extra
from intbmoe.serve.settings import Settings
from intbmoe.settings import AtMost, Checked, MustBe, NonNegative, Positive, PositiveInt, field_types, from_plain
from intbmoe.zoo import in_zoo


@dataclass(frozen=True, kw_only=True)
class Replicas(Checked):
    """How many replicas there are, and the resources of each."""

    max_replicas: PositiveInt = 1
    min_replicas: Annotated[PositiveInt, AtMost("max_replicas")] = 1
    """If less than ``max_replicas``, Ray starts and stops replicas with the load."""
    ongoing: Positive = 16.0
    """Requests that a replica should have at a time, in its batch and waiting; beyond that Ray adds replicas."""
    surge_percent: Annotated[int, MustBe("an integer from 0 to 100", lambda value: 0 <= value <= 100)] = 25
    """Replicas of a new version that may run beside the old ones, at least one. 0 if there is no room for that: then
    each new one takes the place of an old one, and requests wait for it."""
    num_cpus: NonNegative = 1.0
    num_gpus: NonNegative = 0.0
    per_node: PositiveInt | None = None
    """The most replicas on one machine."""

    def options(self) -> dict[str, Any]:
        """Return the options as ``ray.serve.deployment`` takes them."""
        resources = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        found = {"ray_actor_options": resources, "max_surge_percent": self.surge_percent}
        if self.per_node is not None:
            found["max_replicas_per_node"] = self.per_node
        if self.min_replicas == self.max_replicas:
            return {**found, "num_replicas": self.max_replicas}
        limits = {"min_replicas": self.min_replicas, "max_replicas": self.max_replicas}
        return {**found, "autoscaling_config": {**limits, "target_ongoing_requests": self.ongoing}}


def app(arguments: Mapping[str, Any]) -> Any:
    """Build the application for ``serve run`` and ``serve deploy``: settings of ``Replicas`` and ``intbmoe serve``."""
    known = field_types(Replicas) | field_types(Settings)
    for name in arguments:
        if name not in known:
            raise ValueError(f"{name}: no such setting: {did_you_mean(name, known)}")
    given = {name: _read(known[name], value) for name, value in arguments.items()}
    own = {name: given.pop(name) for name in field_types(Replicas) if name in given}
    return deployment(from_plain(Settings, given, ""), from_plain(Replicas, own, ""))


def _read(kind: Any, value: Any) -> Any:
    """Convert a setting from Ray's command line, which passes only strings, to the number that it stands for."""
    import yaml

    if not isinstance(value, str):
        return value
    try:
        from_plain(kind, value, "")
    except ValueError:
        return yaml.safe_load(value)
    return value


def deployment(settings: Settings, replicas: Replicas | None = None, **options: Any) -> Any:
    """Return a Ray Serve application for ``ray.serve.run``; ``options`` are further options of Ray's deployments.

    When it is deployed again under the same name, Ray replaces the replicas one after another.
    """
    serve = import_extra("ray.serve", "serving over machines", "ray")
    replicas = replicas or Replicas()
    require(not in_zoo(settings.artifact), "artifact", settings.artifact, "a folder: export it first (intbmoe export)")
    settings.check()
    # Resolve a link now, in case it is moved to another version: replicas that Ray starts later must match these.
    threads = settings.threads or max(1, int(replicas.num_cpus))
    settings = replace(settings, artifact=os.path.realpath(settings.artifact), threads=threads)
    version = importlib.import_module(settings.loader).open_artifact(settings.artifact).version
    content = settings.to_json()

    def build() -> Any:
        """Build the server on the replica."""
        import torch

        from intbmoe.serve.local import build_app

        found = Settings.from_json(content)
        torch.set_num_threads(found.engine_threads())
        torch.set_grad_enabled(False)
        built = build_app(found, on_death=lambda: os._exit(1))  # Ray starts another replica
        if built.state.version != version:
            message = f"{found.artifact} holds version {built.state.version}, but {version} was deployed"
            raise RuntimeError(f"{message}: keep each version in a folder of its own")
        return built

    @serve.ingress(build)
    class Replica:
        def check_health(self) -> None:
            """Raise if the engine has failed: Ray calls this every few seconds, and replaces a replica that raises."""
            self.app.state.check_health()

    # Requests beyond the current batch wait in the engine's own bounded queue, which refuses with 429.
    options = {"max_ongoing_requests": settings.queue + 64, **replicas.options(), **options}
    drain_s = max(settings.drain_s, settings.deadline_s(streams=True))
    options = {"graceful_shutdown_timeout_s": drain_s, **options}
    return serve.deployment(Replica, name="intbmoe", **options).bind()
