"""A real server in its own processes for tests, on loopback and a free port."""

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import intbmoe
from forked import ForkedPopen

HERE = Path(__file__).parent
SOURCE = Path(intbmoe.__file__).parents[1]


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)


class Server:
    """``with Server(artifact=…, workers=2) as server: server.post("/v1/recommend", {…})``.

    Its engines and fronts are forked, like the supervisor; with ``fresh`` each starts a new Python, as for users.
    """

    def __init__(self, wait=180, fresh=False, **settings):
        self.settings = {"port": 0, "loader": "fake_model", "spare": False, **settings}
        self.settings["artifact"] = str(self.settings["artifact"])
        self.wait, self.fresh = wait, fresh
        self.log = []

    def __enter__(self):
        paths = [str(HERE), str(SOURCE), os.environ.get("PYTHONPATH", "")]
        self.process = ForkedPopen(
            [sys.executable, HERE / "start_server.py", json.dumps(self.settings), *([] if self.fresh else ["forked"])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        lines = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        end = time.monotonic() + self.wait
        try:
            while True:
                line = lines.get(timeout=max(0.1, end - time.monotonic()))
                if line is None:
                    raise RuntimeError("the server did not start: " + "".join(self.log))
                found = re.search(r"serving \S+ on http://127\.0\.0\.1:(\d+)", line)
                if found:
                    self.port = int(found.group(1))
                    self.until(lambda: self.get("/health/ready").status == 200, 60)
                    return self
        except BaseException:
            self.process.kill()
            raise

    def _read(self, lines):
        for line in self.process.stdout:
            self.log.append(line)
            lines.put(line)
        lines.put(None)

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def request(self, method, path, body=None, headers=None, timeout=30):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path, **more):
        return self.request("GET", path, **more)

    def post(self, path, content, headers=None, **more):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.request("POST", path, body, {"content-type": "application/json", **(headers or {})}, **more)

    def metrics(self):
        """Sums over labels, by name."""
        found = {}
        for line in self.get("/metrics").body.decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
        return found

    def engine_pids(self):
        return [pid for pid, command in self._children() if "engine_process" in command]

    def front_pids(self):
        return [pid for pid, command in self._children() if "front_process" in command]

    def _children(self):
        """Process ids, and what each runs: the name of a fork, whose command is that of the tests, or the command."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if int(parent) == self.process.pid and state != "Z":  # zombies have ended
                    name = (folder / "comm").read_text().strip()
                    yield int(folder.name), name if name.endswith("_process") else (folder / "cmdline").read_text()
            except (OSError, ValueError, IndexError):
                continue

    @staticmethod
    def until(condition, seconds):
        """Wait for ``condition``; ``seconds`` is enough on an idle machine, and four times that is allowed."""
        end = time.monotonic() + 4 * seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not true within {4 * seconds} s")
            time.sleep(0.02)
