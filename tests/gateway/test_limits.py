"""docs/limits.md has a row for every field of the public API whose size a peer chooses."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pdserve.pb import inference_pb2

LIMITS = Path(__file__).resolve().parents[2] / "docs" / "limits.md"


def sized_fields(message: Descriptor) -> list[str]:
    """The fields that hold a string, bytes, or any number of values."""
    sized = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return [f"{message.name}.{field.name}" for field in message.fields if field.is_repeated or field.type in sized]


def rows() -> dict[str, list[str]]:
    """Each field named in the first column of a table, with the row's other columns."""
    named: dict[str, list[str]] = {}
    for line in LIMITS.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            first, *others = (column.strip() for column in line.strip("|").split("|"))
            named |= dict.fromkeys(re.findall(r"`(\w+\.\w+)`", first), others)
    return named


def test_every_field_whose_size_a_peer_chooses_has_a_row() -> None:
    fields = [
        name for message in inference_pb2.DESCRIPTOR.message_types_by_name.values() for name in sized_fields(message)
    ]
    assert {"Sampling.stop_token_ids", "GenerateRequest.text", "TokenIds.ids"} <= set(fields)
    missing = [name for name in fields if not rows().get(name)]
    assert not missing, f"docs/limits.md says nothing of {missing}"


def test_rows_name_fields_that_exist() -> None:
    messages = inference_pb2.DESCRIPTOR.message_types_by_name
    for name in rows():
        message, _, field = name.partition(".")
        if message in messages:
            assert field in messages[message].fields_by_name, name
