"""The tables of the documents are what the code says (`scripts.reference`), and no limit is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pdserve.pb import inference_pb2
from scripts.reference import DOCUMENTS, ROOT, described, filled

LIMITS = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_are_what_the_code_says(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert filled(text) == text, f"{document.name} is stale: run `make reference`"


def test_a_table_that_is_stale_is_found() -> None:
    assert "| 1,024 |" in LIMITS
    assert filled(LIMITS.replace("| 1,024 |", "| 1,025 |")) == LIMITS


def test_every_limit_is_in_a_table() -> None:
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()} - {"tests"}
    limits = list(described("Limit", *folders))
    assert len(limits) > 40
    assert [each.name for each in limits if f"{each.what} | " not in LIMITS] == []


def sized_fields(message: Descriptor) -> list[str]:
    """The fields of a message, and of those in it, that hold a string, bytes, or any number of values."""
    sized = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    own = [f"{message.name}.{field.name}" for field in message.fields if field.is_repeated or field.type in sized]
    inner = [field.message_type for field in message.fields if field.message_type and not field.is_repeated]
    return [*own, *(name for each in inner for name in sized_fields(each))]


def test_every_field_whose_size_a_client_chooses_has_a_limit() -> None:
    fields = sized_fields(inference_pb2.DESCRIPTOR.message_types_by_name["GenerateRequest"])
    assert {"Sampling.stop_token_ids", "GenerateRequest.text", "TokenIds.ids", "StructuredOutputs.json"} <= set(fields)
    assert [name for name in fields if f"`{name}`" not in LIMITS] == []


def test_only_fields_that_exist_are_named() -> None:
    messages = inference_pb2.DESCRIPTOR.message_types_by_name
    for message, field in re.findall(r"`([A-Z]\w+)\.(\w+)`", LIMITS):
        assert field in messages[message].fields_by_name, f"{message}.{field}"
