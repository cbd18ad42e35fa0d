"""`pdserve config`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def config() -> None:
    """Print the default configuration as YAML, every field with its description."""
    typer.echo(documented_defaults(), nl=False)


def documented_defaults() -> str:
    """The default configuration as a commented file; `PdserveConfig.parse` reads it back."""
    from pdserve.core.config import PdserveConfig

    lines = [
        "# The configuration of `pdserve up -c FILE`: all keys with their defaults. Omit the ones you do not change."
    ]
    for name, section in PdserveConfig.model_fields.items():
        lines += ["", f"# {section.description}", f"{name}:"]
        assert section.annotation is not None
        for key, field in section.annotation.model_fields.items():
            lines.append(f"  # {_described(field)}")
            lines.append(f"  {key}: {_yaml(field.get_default(call_default_factory=True, validated_data={}))}")
    return "\n".join(lines) + "\n"


def _described(field: FieldInfo) -> str:
    choices = list(_choices(field.annotation))
    suffix = f" [{' | '.join(choices)}]" if choices else ""
    return f"{field.description}{suffix}"


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (str(choice) for choice in get_args(annotation))
    elif get_origin(annotation) is not dict:
        for part in get_args(annotation):
            yield from _choices(part)


def _yaml(value: Any) -> str:
    import yaml
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("...\n").strip()
