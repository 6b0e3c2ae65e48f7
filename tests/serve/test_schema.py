"""The OpenAPI document against the server that it describes: whatever is sent, no 5xx, and nothing undocumented."""

import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis tests the OpenAPI document")

BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CONFORMANCE = (
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
)
EXCLUDED = ("/v1/reload",)
"""Each call loads a model; it has its own tests."""


def operations(server):
    document = server.get("/openapi.json").json
    # A deadline of a millisecond would rightly be answered with 504, so all requests get the longest one.
    [deadline] = document["paths"]["/v1/recommend"]["post"]["parameters"]
    deadline["schema"]["minimum"] = server.settings["deadline_ms"]
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    found = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in found if operation.path not in EXCLUDED]


def check(server, mode):
    """Send generated requests to every operation; the answers' statuses, by path."""
    return {operation.path: statuses_of(operation, mode) for operation in operations(server)}


def statuses_of(operation, mode):
    statuses = set()

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case):
        answer = case.call(timeout=10)
        case.validate_response(answer, checks=CONFORMANCE)
        statuses.add(answer.status_code)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            send()
    except Unsatisfiable:  # nothing about this operation can be invalid
        assert mode is schemathesis.GenerationMode.NEGATIVE
    return statuses


def test_valid_requests_are_answered(recommender):
    statuses = check(recommender, schemathesis.GenerationMode.POSITIVE)
    assert 200 in statuses["/v1/recommend"]
    assert statuses["/v1/recommend"] <= {200, 429}
    assert statuses["/v1/model"] == statuses["/health/live"] == {200}


def test_invalid_requests_are_refused(recommender):
    statuses = check(recommender, schemathesis.GenerationMode.NEGATIVE)
    assert 422 in statuses["/v1/recommend"]


@BOUNDED
@given(body=st.binary(max_size=500))
def test_random_bodies(recommender, body):
    assert recommender.post("/v1/recommend", body).status in (422, 413)


def test_the_example_is_answered(recommender):
    document = recommender.get("/openapi.json").json
    body = document["paths"]["/v1/recommend"]["post"]["requestBody"]["content"]["application/json"]
    for example in body["schema"]["examples"]:
        assert recommender.post("/v1/recommend", example).status == 200
