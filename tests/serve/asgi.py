"""Requests to an ASGI application without a server."""

import asyncio
import json

LOOP = asyncio.Runner()
"""One event loop for all requests: an application is bound to the loop of its first request."""


async def ask(app, path, content=None, headers=()):
    """Send one request; return status and body."""
    body = b"" if content is None else json.dumps(content).encode()
    scope = {
        "type": "http",
        "method": "GET" if content is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers],
        "scheme": "http",
        "server": ("test", 80),
    }
    sent, answered = [{"type": "http.request", "body": body}], []

    async def receive():
        if not sent:
            await asyncio.sleep(60)
        return sent.pop()

    async def send(message):
        answered.append(message)

    await asyncio.wait_for(app(scope, receive, send), 30)
    return answered[0]["status"], b"".join(message.get("body", b"") for message in answered[1:])


def ask_all(app, path, contents):
    """Send requests at the same time; return the statuses and values of their answers."""

    async def run():
        return await asyncio.gather(*(ask(app, path, content) for content in contents))

    return [(status, json.loads(body)) for status, body in LOOP.run(run())]


def call(app, path, content=None, headers=()):
    return LOOP.run(ask(app, path, content, headers))
