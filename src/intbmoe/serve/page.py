"""The page at ``/``, assembled from its parts into one file that loads nothing from anywhere else.

page.html       its content
style.css       typefaces and colours, in light and dark, shared with the report page (report/style.css)
page.css        its layout
page-form.js    the form built from a request's schema, and what forms share
TASK/*.js       the forms that tasks bring (``Predictor.form``)
page.js         sending requests, answers, and where tokens went
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response

from intbmoe.report.style import CSS
from intbmoe.serve.openapi import known_predictors

FOLDER = Path(__file__).parent


def parts() -> dict[str, list[Path]]:
    """Return the files inside each tag, in order."""
    forms = {predictor.form for predictor in known_predictors() if predictor.form is not None}
    script = [FOLDER / "page-form.js", *sorted(forms, key=lambda form: form.name), FOLDER / "page.js"]
    return {"style": [CSS, FOLDER / "page.css"], "script": script}


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers, with a policy that lets a browser run only the page's own script and style."""
    text, digests = (FOLDER / "page.html").read_text(encoding="utf-8"), {}
    for tag, files in parts().items():
        inside = "".join(file.read_text(encoding="utf-8") for file in files)
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
        "cache-control": "no-cache",  # may be cached, but must be revalidated: another version has another page
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return body, headers


def page_response(known: str = "") -> Response:
    body, headers = _page()
    tags = [tag.strip().removeprefix("W/") for tag in known.split(",")]
    if headers["etag"] in tags:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")
