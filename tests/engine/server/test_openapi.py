"""The OpenAPI document is true: requests made from it get the answers that it promises."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from tests.support.effort import effort
from tests.support.servers import MODEL
from vattn.engine import LLM
from vattn.engine.server.app import make_app, make_service
from vattn.engine.server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    llm = LLM(MODEL, memory_budget="8MiB", max_num_seqs=8, max_model_len=64)
    # The model's own template knows three roles, of which random text is none.
    template = "{% for message in messages %}{{ message.content }}{% endfor %}Answer:"
    service = make_service(llm.core, ServerSettings(admin_endpoints=True, chat_template=template), "tiny")
    made = make_app(service)
    with TestClient(made):
        yield made
        assert not service.engine.dead
        assert service.engine.num_unfinished == 0


def documented() -> set[str]:
    """The endpoints that docs/server.md lists, but for the page and its description, which are no JSON API."""
    table = (ROOT / "docs" / "server.md").read_text().split("## Endpoints")[1].split("## Fields")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    paths = {path for row in rows for path in re.findall(r"`(?:GET |POST )?(/[^`]*)`", row)}
    return {path.replace("NAME", "{name}") for path in paths} - {"/dashboard", "/openapi.json"}


@pytest.mark.slow(8)
@pytest.mark.parametrize("mode", GenerationMode)
def test_answers_are_those_of_the_document(app: Any, mode: GenerationMode) -> None:
    # Of schemathesis' own integration with pytest nothing is used, so that other tests do not load it.
    operations = [found.ok() for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert {operation.path for operation in operations} == documented()
    # After a sleep nothing runs.
    last = ["/sleep", "/wake_up"]
    operations.sort(key=lambda operation: (operation.path in last, operation.path))
    answers: dict[str, Counter[int]] = {operation.path: Counter() for operation in operations}
    for operation in operations:

        @settings(
            max_examples=effort(12, 100),
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            answers[case.path][case.call_and_validate(checks=CHECKS).status_code] += 1

        with suppress(Unsatisfiable):  # an operation without parameters cannot be called wrongly
            check()
        # No random name is the model's, and whatever slept is to wake up.
        known = {"name": "tiny"} if "{name}" in operation.path else {}
        if known or operation.path == "/wake_up":
            case = operation.Case(path_parameters=known)
            answers[case.path][case.call_and_validate(checks=CHECKS).status_code] += 1
    if mode is GenerationMode.POSITIVE:
        # Random values seldom fit one another, but some do.
        assert all(statuses[200] for statuses in answers.values())
    else:
        assert sum(statuses[400] for statuses in answers.values()) > effort(50, 100)
