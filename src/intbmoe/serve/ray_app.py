"""The same server on Ray Serve, over several machines: ``ray.serve.run(deployment(settings, replicas=8))``.

Each replica is engine and front in one process (``local.py``); Ray's proxies distribute requests, and its controller
replaces the supervisor: it starts, scales, updates and restarts replicas. The artifact must be at the same path on
every machine.
"""

import os
from typing import Any

from intbmoe.serve.settings import Settings


def deployment(settings: Settings, *, replicas: int = 1, **options: Any) -> Any:
    """A Ray Serve application; ``options`` are Ray's own, such as ``ray_actor_options={"num_gpus": 1}``."""
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("serving over machines needs Ray: pip install 'intbmoe[ray]'") from error
    settings.check()
    content = settings.to_json()

    def build() -> Any:
        """Runs on the replica."""
        import torch

        from intbmoe.serve.local import build_app

        found = Settings.from_json(content)
        torch.set_num_threads(found.engine_threads())
        torch.set_grad_enabled(False)
        return build_app(found, on_death=lambda: os._exit(1))  # Ray starts another replica

    # Requests beyond the current batch wait in the engine's own bounded queue, which refuses with 429.
    options = {"max_ongoing_requests": settings.queue + 64, "num_replicas": replicas, **options}
    return serve.deployment(serve.ingress(build)(), name="intbmoe", **options).bind()
