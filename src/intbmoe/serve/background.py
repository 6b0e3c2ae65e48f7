"""Tasks that nothing waits for."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background(set[asyncio.Task]):
    """The running tasks: the event loop alone does not keep a task alive."""

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
