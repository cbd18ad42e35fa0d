"""Finds a model: the embedded one, a dummy with random weights, or a Hugging Face folder. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from engine.model.folder import refuse_lfs_pointer, weight_files
from engine.model.hf_config import shape_from_hf
from engine.model.shape import ModelShape, RopeScaling
from pdserve.core.errors import ModelError

DUMMY_SEED = 20_240_607  # all workers must draw the same weights
_EDGE_BYTES = 2**20


def _dummy(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, theta: float) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        rope_scaling=RopeScaling(),
        tie_word_embeddings=hidden < 1024,
        dtype="bfloat16",
    )


DUMMIES = {
    "135m": _dummy(576, 1536, 30, 9, 3, 49_152, 10_000.0),
    "8b": _dummy(4096, 14_336, 32, 32, 8, 128_256, 500_000.0),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded: its ``shape``, and the ``folder`` of its weights (None: a dummy)."""

    name: str
    folder: Path | None
    shape: ModelShape

    @property
    def is_dummy(self) -> bool:
        """Whether the weights are random."""
        return self.folder is None

    def weight_files(self) -> list[Path]:
        """The safetensors files of the weights (empty for a dummy). `ModelError` if one is missing."""
        return [] if self.folder is None else weight_files(self.folder)

    def model_hash(self, long_rope: bool = False) -> str:
        """16 hex digits that identify the weights, and whether longrope's long factors are used (``long_rope``), as
        keys differ by that.

        The digest (xxh3-64) covers the shape, and of each safetensors file the name, size, header, and first and last
        MiB, because a whole checkpoint takes too long to read twice. `ModelError` if a file cannot be read.
        """
        shape = asdict(replace(self.shape, eos_token_ids=()))
        digest = xxhash.xxh3_64(json.dumps(shape, sort_keys=True).encode())
        if self.is_dummy:
            digest.update(f"random weights {DUMMY_SEED}".encode())
        if long_rope:
            digest.update(b"long rope")
        for path in self.weight_files():
            for part in _fingerprint(path):
                digest.update(part)
        return digest.hexdigest()


def _fingerprint(path: Path) -> Iterator[bytes]:
    try:
        size = path.stat().st_size
        yield f"{path.name} {size}".encode()
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            yield file.read(min(8 + length + _EDGE_BYTES, size))
            file.seek(max(0, size - _EDGE_BYTES))
            yield file.read(_EDGE_BYTES)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def resolve_model(path: str) -> ModelSource:
    """Find the model that ``path`` names: 'tiny' (the embedded model), 'dummy:135m', 'dummy:8b',
    'dummy:PATH/config.json', or a folder with ``config.json`` and safetensors. `ModelError` for anything else."""
    if path.startswith("dummy:"):
        kind = path.removeprefix("dummy:")
        if kind in DUMMIES:
            return ModelSource(path, None, DUMMIES[kind])
        if not kind.endswith(".json"):
            raise ModelError(f"{path}: unknown dummy; known: {', '.join(f'dummy:{k}' for k in DUMMIES)}, "
                             "dummy:PATH/config.json")  # fmt: skip
        return ModelSource(path, None, shape_from_hf(_read_json(Path(kind)), kind))
    folder = _tiny_folder() if path == "tiny" else Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{path}: no such folder; give a folder with config.json and safetensors, 'tiny', or a "
                         f"dummy ({', '.join(f'dummy:{k}' for k in DUMMIES)})")  # fmt: skip
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder}: has no config.json, so it is not a Hugging Face model folder")
    shape = shape_from_hf(_read_json(config), str(config))
    source = ModelSource(folder.resolve().name, folder.resolve(), _with_generation_config(shape, folder))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: has no *.safetensors file; only safetensors weights can be loaded")
    return source


def config_of(path: str) -> tuple[dict[str, Any], Path] | None:
    """The ``config.json`` that ``path`` names, and its place: a folder, a file ``*.json``, or 'dummy:' and either. None
    for the built-in models and where there is no such file. `ModelError` if it cannot be parsed."""
    if path == "tiny" or path.removeprefix("dummy:") in DUMMIES:
        return None
    place = Path(path.removeprefix("dummy:")).expanduser()
    file = place if place.suffix == ".json" else place / "config.json"
    return (_read_json(file), file) if file.is_file() else None


def _tiny_folder() -> Path:
    here = Path(__file__).resolve()
    places = (here.parents[2] / "models" / "tiny", here.parent / "tiny")  # a checkout, an installed wheel
    return next((p for p in places if (p / "config.json").is_file()), places[0])


def _with_generation_config(shape: ModelShape, folder: Path) -> ModelShape:
    """Add the end tokens that chat models name only in generation_config.json."""
    path = folder / "generation_config.json"
    more = _read_json(path).get("eos_token_id") if path.is_file() else None
    ids = more if isinstance(more, list) else [] if more is None else [more]
    return replace(shape, eos_token_ids=tuple(dict.fromkeys((*shape.eos_token_ids, *ids))))


def _read_json(path: Path) -> dict[str, Any]:
    refuse_lfs_pointer(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    return data
