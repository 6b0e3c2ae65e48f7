"""Keys of a running server: changed for all fronts at once, and not lost if their file is."""

import os
import signal
from types import SimpleNamespace

import pytest
from fake_model import write_artifact
from server import Server

from intbmoe.serve.settings import Settings
from intbmoe.serve.supervisor import Supervisor

PATH, BODY = "/v1/recommend", {"history": [1]}


def test_comments_are_no_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for the shop\none\n\n  # two\n  three  \n")
    settings = Settings(artifact="", api_key_file=str(file))
    assert settings.api_keys() == (b"one", b"three")
    file.write_text("# none\n\n")
    with pytest.raises(ValueError, match="a file with one key per line"):
        settings.api_keys()


def test_the_supervisor_hands_out_the_keys_and_keeps_them_without_their_file(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("one\n")
    told = []
    supervisor = Supervisor(Settings(artifact="", api_key_file=str(file)), None, print)
    supervisor._fronts = {number: SimpleNamespace(tell=told.append) for number in range(2)}
    for content, keys in (("one\n", ["one"]), ("two\n#three\n", ["two"]), ("# none\n", None), (None, None)):
        file.unlink() if content is None else file.write_text(content)
        told.clear()
        supervisor._read_keys()
        assert told == ([] if keys is None else [{"do": "keys", "keys": keys}] * 2)
        assert ("keeping the old keys" in caplog.text) == (keys is None)
    assert supervisor._keys == (b"two",)


@pytest.mark.slow
def test_keys_change_for_all_fronts_at_once_and_outlive_their_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n")
    with Server(artifact=write_artifact(tmp_path / "artifact"), fronts=2, api_key_file=str(file)) as server:

        def statuses(key):
            """Statuses of requests, each on a new connection, so that both fronts are asked."""
            return {server.post(PATH, BODY, {"authorization": f"Bearer {key}"}).status for _ in range(12)}

        assert (statuses("one"), statuses("two")) == ({200}, {401})
        file.write_text("# since today\ntwo\n")
        server.process.send_signal(signal.SIGUSR1)
        server.until(lambda: statuses("two") == {200}, 5)
        assert statuses("one") == statuses("# since today") == {401}
        file.unlink()
        server.process.send_signal(signal.SIGUSR1)
        server.until(lambda: any("keeping the old keys" in line for line in server.log), 5)
        before = server.front_pids()
        os.kill(before[0], signal.SIGKILL)
        server.until(lambda: len(set(server.front_pids()) - {before[0]}) == 2, 10)
        assert (statuses("two"), statuses("one")) == ({200}, {401})
