"""An exported model answers over HTTP, within a latency budget.

    supervisor   starts the others, restarts what dies, reloads, drains           supervisor.py, children.py
      fronts     HTTP: validate, encode, hold connection and deadline             front*.py, connection.py, bodies.py,
                                                                                  access.py, responses.py, page.*
      engines    batch over all fronts and run the model                          engine*.py, batcher.py
    wire         msgpack over Unix sockets between fronts and engines             wire.py, links.py
    control      JSON lines between the supervisor and each of the others         control.py

What is answered, and how a request is checked, is the artifact's predictor (``intbmoe.export``): nothing here knows a
task. ``docs/serving.md`` is the manual.
"""

from importlib.util import find_spec

NEEDED = ("starlette", "uvicorn", "httptools", "uvloop", "msgpack", "prometheus_client")


def require_packages() -> None:
    """Raise, saying what to install, where a package is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"serving needs {', '.join(missing)}: pip install 'intbmoe[serve]'")
