"""Who may reload: clients on this machine or with a key, and no page of another site."""

import json

import pytest
from asgi import call
from fake_model import write_artifact

from intbmoe.serve.access import is_loopback
from intbmoe.serve.local import build_app
from intbmoe.serve.settings import Settings

REACHED = 409
"""The status if the request was allowed: an application in one process cannot reload, and answers 409."""


def reload(folder, headers, **settings):
    app = build_app(Settings(artifact=str(write_artifact(folder)), loader="fake_model", **settings))
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    status, body = call(app, "/v1/reload", {}, given)
    return status, json.loads(body)["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "LOCALHOST", "127.0.0.1"])
def test_this_machine_may(tmp_path, host):
    assert reload(tmp_path, {"host": host})[0] == REACHED
    assert reload(tmp_path, {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"})[0] == REACHED


@pytest.mark.parametrize(
    "headers",
    [
        # Another site's name that now resolves to 127.0.0.1: to the browser, this is the same origin.
        {"host": "other.example:8000", "sec-fetch-site": "same-origin", "origin": "http://other.example:8000"},
        {"host": "other.example:8000"},
        {"host": "localhost.other.example"},
        {"host": "127.0.0.1.other.example:8000"},
        {"host": "other.example@127.0.0.1"},
        {"host": "[::1"},
        # A form on another site's page, sent by a browser that does not know Sec-Fetch-Site.
        {"host": "127.0.0.1:8000", "origin": "https://other.example"},
        {"host": "127.0.0.1:8000", "origin": "null"},
        {"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site"},
        {"host": "127.0.0.1:8000", "sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_site_may_not(tmp_path, headers):
    status, message = reload(tmp_path, headers)
    assert status == 403
    assert "may not reload this server" in message


def test_a_key_is_enough_behind_any_name(tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    settings = {"api_key_file": str(tmp_path / "keys"), "host": "0.0.0.0"}
    key = {"authorization": "Bearer secret"}
    assert reload(tmp_path, {"host": "models.example", **key}, **settings)[0] == REACHED
    assert reload(tmp_path, {"host": "localhost"}, **settings)[0] == 401
    assert reload(tmp_path, {"host": "models.example", "sec-fetch-site": "cross-site", **key}, **settings)[0] == 403


def test_without_a_key_a_server_that_others_reach_is_not_reloaded(tmp_path):
    status, message = reload(tmp_path, {"host": "localhost"}, host="0.0.0.0")
    assert status == 403
    assert "SIGHUP" in message


OTHERS = [
    "",
    ":80",
    "0.0.0.0",
    "10.0.0.1:80",
    "[2001:db8::1]",
    "127.1",
    "0x7f000001",
    "a b",
    "localhost/",
    "localhost:x",
]


@pytest.mark.parametrize("authority", OTHERS)
def test_other_addresses_are_not_this_machine(authority):
    assert not is_loopback(authority)
