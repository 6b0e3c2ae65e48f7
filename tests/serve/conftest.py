import pytest
from fake_model import write_artifact
from server import Server


@pytest.fixture(scope="session")
def recommender(tmp_path_factory):
    """A server with a fake model and two engines; its artifact is a symbolic link."""
    folder = tmp_path_factory.mktemp("recommender")
    write_artifact(folder / "one", version="one")
    (folder / "artifact").symlink_to("one")
    settings = {"workers": 2, "queue": 4, "patience_s": 1.0, "deadline_ms": 2000}
    with Server(artifact=folder / "artifact", **settings) as server:
        server.folder = folder
        yield server


@pytest.fixture(autouse=True)
def _server_has_settled(request):
    """After each test, wait until the shared server is idle and has all its engines again."""
    yield
    if "recommender" in request.fixturenames:
        server = request.getfixturevalue("recommender")
        server.until(lambda: server.metrics().get("intbmoe_requests_in_flight") == 0, 10)
