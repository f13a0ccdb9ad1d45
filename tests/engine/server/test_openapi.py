"""The OpenAPI document is true: requests made from it get the answers that it promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from servers import MODEL
from starlette.testclient import TestClient

from vattn.engine import LLM
from vattn.engine.server.app import make_app, make_service
from vattn.engine.server.settings import ServerSettings

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    llm = LLM(MODEL, memory_budget="8MiB", max_num_seqs=8, max_model_len=64)
    # The model's own template knows three roles, of which random text is none.
    template = "{% for message in messages %}{{ message.content }}{% endfor %}Answer:"
    service = make_service(llm, ServerSettings(admin_endpoints=True, chat_template=template), "tiny")
    made = make_app(service)
    with TestClient(made):
        yield made
        assert not service.engine.dead
        assert service.engine.num_unfinished == 0


@pytest.mark.slow
def test_answers_are_those_of_the_document(app: Any) -> None:
    # Of schemathesis' own integration with pytest nothing is used, so that other tests do not load it.
    operations = [found.ok() for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert len(operations) == 15
    answers: dict[str, Counter[int]] = {operation.path: Counter() for operation in operations}
    for operation in operations:
        if operation.path == "/sleep":  # the others would refuse everything
            continue

        @settings(
            max_examples=25,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            answers[case.path][case.call_and_validate(checks=CHECKS).status_code] += 1

        check()
    # Random values seldom fit one another, but some do.
    assert all(answers[path][200] for path in answers if path not in ("/sleep", "/v1/models/{name}"))
