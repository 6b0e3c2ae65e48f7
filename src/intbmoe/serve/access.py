"""Who may send requests: API keys, and protection of a server without keys from reloads by other sites' pages."""

import hmac
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from intbmoe.serve.http import HttpError
from intbmoe.serve.settings import Settings

AUTHORITY = re.compile(r"(\[[0-9a-fA-F:]+\]|[a-zA-Z0-9.-]+)(?::[0-9]+)?")


class Access:
    def __init__(self, settings: Settings, keys: Sequence[bytes] = ()) -> None:
        self.keys = keys
        self.with_key = settings.api_key_file is not None
        self._on_loopback = settings.on_loopback

    def authorise(self, headers: Mapping[str, str]) -> None:
        """Refuse requests without a valid key, with 401."""
        if not self.with_key:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
        # Every key is compared, each in constant time, so timing says nothing about the keys.
        if not any([hmac.compare_digest(key, known) for known in self.keys]):  # noqa: C419
            message = "this server requires a key: send the header 'Authorization: Bearer KEY'"
            raise HttpError(401, message, outcome="unauthorised", headers={"www-authenticate": "Bearer"})

    def authorise_reload(self, headers: Mapping[str, str]) -> None:
        """Refuse requests that may use the server but not change it, with 403.

        Without keys, anyone on this machine may reload. But a browser on this machine also runs pages of any site. A
        page that uses this machine's address is recognised by the headers that browsers send (``Sec-Fetch-Site``,
        ``Origin``). A page whose domain name resolves to this machine (DNS rebinding) looks to the browser like a page
        of this server, but its requests still carry that name: so ``Host`` must be a name that no one else can own.
        """
        self.authorise(headers)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise _forbidden("another site's page may not reload this server")
        if self.with_key:
            return
        if not self._on_loopback:
            raise _forbidden(
                "without a key, a server that others can reach is reloaded only by a SIGHUP to its supervisor"
            )
        origin = headers.get("origin", "")
        for name, authority in (("Host", headers.get("host", "")), ("Origin", origin.partition("://")[2] or origin)):
            if authority and not is_loopback(authority):
                who = f"{name} {authority[:100]!r}"
                raise _forbidden(f"without a key, {who} may not reload this server: only localhost may")


def is_loopback(authority: str) -> bool:
    """Whether ``name:port`` means this machine without asking a name server."""
    found = AUTHORITY.fullmatch(authority)
    if found is None:
        return False
    try:
        return found[1].lower() == "localhost" or ip_address(found[1].strip("[]")).is_loopback
    except ValueError:
        return False


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, outcome="unauthorised")
