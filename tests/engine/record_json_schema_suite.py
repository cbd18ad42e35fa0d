"""Records the JSON Schema test suite's cases of draft 2020-12 in `json_schema_suite.json`, which `test_structures.py`
reads.

    python -m tests.engine.record_json_schema_suite SUITE

``SUITE`` is a checkout of JSON-Schema-Test-Suite, or the folder ``json`` in the source distribution of the package
jsonschema (the recorded cases are those of 4.26.0).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DRAFT = Path("tests", "draft2020-12")
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def read(path: Path) -> list[dict[str, Any]]:
    groups = []
    for group in json.loads(path.read_text()):
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {key: value for key, value in schema.items() if (key, value) != ("$schema", DIALECT)}
        tests = [[test["description"], test["data"], test["valid"]] for test in group["tests"]]
        groups.append({"description": group["description"], "schema": schema, "tests": tests})
    return groups


def main(suite: Path) -> None:
    files = []
    for path in sorted((suite / DRAFT).rglob("*.json")):
        name = path.relative_to(suite / DRAFT).with_suffix("").as_posix()
        files.append(f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, read(path))) + "\n]")
    licence = (suite / "LICENSE").read_text()
    head = f'{{"source": "JSON-Schema-Test-Suite, {DRAFT}", "licence": {json.dumps(licence)}, "cases": {{\n'
    Path(__file__).with_name("json_schema_suite.json").write_text(head + ",\n".join(files) + "\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
