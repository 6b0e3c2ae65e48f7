"""Sends requests at a given rate whether or not earlier ones are answered."""

import asyncio
import json
import time
from collections import Counter


async def _ask(port, idle, body, headers):
    reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    top = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(top.partition("content-length: ")[2].partition("\r\n")[0]))
    idle.append((reader, writer))
    status = int(top.split()[1])
    assert status != 429 or "retry-after: " in top
    return status


async def _run(port, rate, seconds, headers):
    started, idle, asked = time.monotonic(), [], []
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
        asked.append(asyncio.create_task(_ask(port, idle, json.dumps({"history": [number]}).encode(), headers)))
    found = Counter(await asyncio.gather(*asked))
    for _, writer in idle:
        writer.close()
    return found


def ask_at(port, rate, seconds, deadline_ms=None):
    """Count the answers by status."""
    headers = "" if deadline_ms is None else f"x-deadline-ms: {deadline_ms}\r\n"
    return asyncio.run(_run(port, rate, seconds, headers))
