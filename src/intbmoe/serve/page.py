"""The page at ``/``: its parts put into one, which loads nothing from anywhere else.

page.html       what stands on it
page.css        how it looks, in light and dark
page-forms.js   a form for each action
page.js         asking, answers, and where tokens went
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from starlette.responses import Response

PARTS = {"style": ("page.css",), "script": ("page-forms.js", "page.js")}


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page with its headers, among them a policy under which a browser runs its own script and style only."""
    text, digests = _read("page.html"), {}
    for tag, names in PARTS.items():
        inside = "".join(_read(name) for name in names)
        text = text.replace(f"<{tag}></{tag}>", f"<{tag}>{inside}</{tag}>")
        digests[tag] = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'"
    )
    body = text.encode()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # may be kept, but is asked for each time: another version has another page
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return body, headers


def _read(name: str) -> str:
    return files("intbmoe.serve").joinpath(name).read_text(encoding="utf-8")


def page_response(known: str = "") -> Response:
    """The page over HTTP, or 304 where ``known``, the request's If-None-Match, names it."""
    body, headers = _page()
    tags = [tag.strip().removeprefix("W/") for tag in known.split(",")]
    if headers["etag"] in tags:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")
