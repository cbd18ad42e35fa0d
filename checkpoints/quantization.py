"""Checkpoints whose matrices are stored in 8 bits with scales, as ``quantization_config`` describes them.

Whether activations are quantized too depends on the device that computes, not on the checkpoint's scheme for them.
Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from checkpoints.config_fields import ConfigFields

Block = tuple[int | None, int | None]

_INSTEAD = (
    "use the model's float32, bfloat16 or float16 weights, or its FP8 or INT8 version (compressed-tensors, fp8, "
    "fbgemm_fp8, or bitsandbytes in 8 bits)"
)
_FLOAT_FORMATS, _INT_FORMATS = ("float-quantized", "naive-quantized"), ("int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How matrices are stored."""

    values: Literal["int8", "float8_e4m3fn"]  # the type of the stored numbers
    scale: str  # the name of the tensor of scales, which takes the place of ``weight`` in the matrix's name
    block: Block  # the rows and columns that share a scale (None: all of them)
    divisor: float = 1.0  # stored scales are divided by it
    # the modules that are not quantized: names, ends or beginnings of names, or ``re:`` and an expression
    ignored: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Whether ``module`` (as ``model.layers.0.self_attn.q_proj``) is quantized."""
        return not any(_matches(pattern, module) for pattern in self.ignored)

    @property
    def fp8_rows(self) -> bool:
        """Whether all numbers of a row are FP8 and share a scale, as the FP8 products of GPUs require."""
        return self.values == "float8_e4m3fn" and self.block[1] is None

    def column_groups(self, columns: int) -> int:
        """Scales of one row of a matrix of so many columns."""
        return 1 if self.block[1] is None else -(-columns // self.block[1])

    def scale_name(self, weight: str) -> str:
        """The name of the scales of the tensor ``weight``, whose name ends with ``weight``."""
        return weight.removesuffix("weight") + self.scale

    def scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of a matrix may have."""
        height, width = self.block
        if height is None:
            return ((1,), (), (1, 1))
        shape = (-(-rows // height), self.column_groups(columns))
        return (shape, shape[:1]) if width is None else (shape,)


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """The quantization of the checkpoint; None if it has none. `ModelError` for what is not supported."""
    config = fields.object("quantization_config")
    if not config:
        return None
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(config, fields)
    skipped = config.get("modules_to_not_convert") or ()
    if method == "fp8":
        size = config.get("weight_block_size")
        if size is None:
            return Quantization("float8_e4m3fn", "weight_scale_inv", (None, None), ignored=tuple(skipped))
        if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise fields.error(f"'weight_block_size' of 'quantization_config' must be two numbers, got {size!r}")
        return Quantization("float8_e4m3fn", "weight_scale_inv", (size[0], size[1]), ignored=tuple(skipped))
    if method == "fbgemm_fp8":
        return Quantization("float8_e4m3fn", "weight_scale", (1, None), ignored=tuple(skipped))
    if method == "bitsandbytes" and config.get("load_in_8bit") and not config.get("load_in_4bit"):
        return Quantization("int8", "SCB", (1, None), 127.0, tuple(config.get("llm_int8_skip_modules") or ()))
    raise fields.error(
        f"'quantization_config': checkpoints of {method or 'an unknown method'!r} are not supported; {_INSTEAD}"
    )


def _compressed_tensors(config: Mapping[str, Any], fields: ConfigFields) -> Quantization:
    def refuse(what: str) -> Exception:
        return fields.error(f"'quantization_config': {what}; {_INSTEAD}")

    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise refuse("'config_groups' must be an object with one group")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or list(group.get("targets", [])) != ["Linear"]:
        raise refuse("the group must have 'weights', and target 'Linear'")
    kind, bits, layout = weights.get("type"), weights.get("num_bits"), config.get("format")
    if bits != 8 or layout not in (_FLOAT_FORMATS if kind == "float" else _INT_FORMATS):
        raise refuse(f"format {layout!r} of {bits} bits is not supported")
    if not weights.get("symmetric", True):
        raise refuse("asymmetric weights are not supported")
    if config.get("kv_cache_scheme"):
        raise refuse("'kv_cache_scheme' is set; engine.kv_dtype: fp8 has scales of its own, so remove it")
    blocks: dict[Any, Block] = {"tensor": (None, None), "channel": (1, None)}
    strategy = weights.get("strategy")
    if strategy == "group" and isinstance(weights.get("group_size"), int) and weights["group_size"] > 0:
        blocks["group"] = (1, weights["group_size"])
    structure = weights.get("block_structure")
    if strategy == "block" and isinstance(structure, list) and len(structure) == 2:
        blocks["block"] = (int(structure[0]), int(structure[1]))
    if strategy not in blocks:
        raise refuse(f"strategy {strategy!r} is not supported")
    values: Literal["int8", "float8_e4m3fn"] = "float8_e4m3fn" if kind == "float" else "int8"
    return Quantization(values, "weight_scale", blocks[strategy], ignored=tuple(config.get("ignore") or ()))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or f".{pattern}." in f"{module}."
