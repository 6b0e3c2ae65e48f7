"""Serves an exported model over HTTP, within a latency budget.

    supervisor   starts the others, restarts what dies, reloads, drains     supervisor.py, processes.py
      fronts     HTTP: validate, encode, hold connection and deadline       front.py, front_process.py, connection.py,
                                                                            http.py, bodies.py, access.py, openapi.py,
                                                                            page.*
      decoders   encode images, within a budget                             decoders.py, decoder_process.py
      engines    batch the requests of all fronts and run the model         engine.py, engine_process.py, batcher.py
    links        a front's connections to the engines                       links.py
    messages     what all of them send each other                           messages.py
    background   tasks that nothing waits for                               background.py
    local        engine and front in one process, for Ray Serve             local.py, ray.py

The artifact's predictor (``intbmoe.export``) checks requests and computes the answers; nothing here knows a task.
``docs/serving.md`` is the manual.
"""

from importlib.util import find_spec

NEEDED = ("starlette", "uvicorn", "httptools", "uvloop", "msgpack", "prometheus_client")


def require_packages() -> None:
    """Raise if a package is missing, saying what to install."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"serving needs {', '.join(missing)}: pip install 'intbmoe[serve]'")
