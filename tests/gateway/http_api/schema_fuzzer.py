"""Sends what schemathesis draws from the OpenAPI document of a service, valid and not, and checks answers against it.

    python -m tests.gateway.http_api.schema_fuzzer URL EXAMPLES

A process of its own: schemathesis changes hypothesis for the process that it is used in."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.fuzzing import ANSWER_S

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SHORT_TIMEOUT_S = 10.0
"""A request that asks for less time may run out of it."""


def explains_a_timeout(body: Any) -> bool:
    """Whether a request has asked for little time."""
    extension = body.get("pdserve") if isinstance(body, dict) else None
    timeout_s = extension.get("timeout_s") if isinstance(extension, dict) else None
    return isinstance(timeout_s, int | float) and timeout_s < SHORT_TIMEOUT_S


def draw(operation: Any, mode: GenerationMode, count: int, counts: Counter[str]) -> None:
    """Send ``count`` requests of one operation."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode), named=st.booleans())
    def send(case: Any, named: bool) -> None:
        if named and mode.is_positive and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = None  # hardly any other name is that of the model
        response = case.call(timeout=ANSWER_S)
        counts[f"{mode.value} {response.status_code}"] += 1
        excused = response.status_code == 504 and explains_a_timeout(case.body)
        assert response.status_code < 500 or excused, (
            f"{response.status_code}: {response.text}\n{case.as_curl_command()}"
        )
        # 413 refuses a body, too, but `negative_data_rejection` does not know it.
        case.validate_response(
            response, checks=[*CHECKS, *([] if response.status_code == 413 else [negative_data_rejection])]
        )

    send()


def main(url: str, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=schemathesis.Config())
    schema.validate()
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]
    with_body = [operation for operation in operations if operation.body]
    counts: Counter[str] = Counter()
    for operation in operations:
        if not operation.body:  # any text is a valid name, and the others take nothing
            draw(operation, GenerationMode.POSITIVE, 20 if operation.path_parameters.items else 1, counts)
    for operation in with_body:
        for mode in GenerationMode:
            draw(operation, mode, max(1, examples // (2 * len(with_body))), counts)
    print(json.dumps(counts))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
