"""The page at ``/``: one file, which loads nothing from anywhere else."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response


@cache
def _page() -> tuple[bytes, str]:
    """The page, and a policy under which a browser runs its own script and style and nothing else."""
    text = files("intbmoe.serve").joinpath("page.html").read_text(encoding="utf-8")
    digests = {}
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL).group(1)
        digests[tag] = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'"
    )
    return text.encode(), policy


def page_response() -> Response:
    """The page over HTTP."""
    body, policy = _page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(body, headers=headers, media_type="text/html")
