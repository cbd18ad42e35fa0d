"""Finds a model (the embedded one, a dummy with random weights, a Hugging Face folder, or one of the Hugging Face Hub)
and checks the files of its folder. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from checkpoints.hf_config import shape_from_hf
from checkpoints.hub import Check, HubId, Report, hub_folder
from checkpoints.outline import outlined_shape
from checkpoints.shape import ModelShape, RopeScaling
from pdserve.core.errors import ModelError

DUMMY_SEED = 20_240_607  # all workers must draw the same weights
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_LFS_BEGINNING = b"version https://git-lfs.github.com/spec/"
_READ_BYTES = 2**20


def _dummy(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, theta: float, context: int
) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        rope_scaling=RopeScaling(),
        tie_word_embeddings=hidden < 1024,
        dtype="bfloat16",
    )


DUMMIES = {
    "135m": _dummy(576, 1536, 30, 9, 3, 49_152, 10_000.0, 8192),
    "8b": _dummy(4096, 14_336, 32, 32, 8, 128_256, 500_000.0, 131_072),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded: its ``shape``, and the ``folder`` of its weights (None: a dummy). ``path`` is what
    `resolve_model` takes to find the same model in another process or on another host."""

    name: str
    folder: Path | None
    shape: ModelShape
    path: str

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

        The digest (xxh3-64) covers the shape, and of each safetensors file the name, the size and every byte. So it is
        the same wherever the files are, and whenever they were written. It is not cached: xxh3 reads files that are in
        the page cache at about 9 GB/s, and others for the loader, which reads them next. `ModelError` if a file cannot
        be read.
        """
        shape = asdict(replace(self.shape, eos_token_ids=()))
        digest = xxhash.xxh3_64(json.dumps(shape, sort_keys=True).encode())
        if self.is_dummy:
            digest.update(f"random weights {DUMMY_SEED}".encode())
        if long_rope:
            digest.update(b"long rope")
        for path in self.weight_files():
            for part in _contents(path):
                digest.update(part)
        return digest.hexdigest()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context in which the files of the weights are hashed and loaded. `ModelError` at its end if one of them was
        written or replaced meanwhile, because the hash may be of other weights than those that were loaded."""
        before = self._versions()
        yield
        after = self._versions()
        for path in before | after:
            if before.get(path) != after.get(path):
                raise ModelError(f"{path}: was changed while it was loaded; start again when the folder is complete")

    def _versions(self) -> dict[Path, tuple[int, ...]]:
        return {path: _version(path) for path in self.weight_files()}


def _contents(path: Path) -> Iterator[bytes | memoryview]:
    """Name and size of a file, then its bytes. Each part is valid until the next one."""
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            yield f"{path.name} {os.fstat(file.fileno()).st_size}".encode()
            while length := file.readinto(buffer):
                yield buffer[:length]
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _version(path: Path) -> tuple[int, ...]:
    """Differs whenever a file was written or replaced. The time of its last change (ctime) cannot be set back, unlike
    that of its last write."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def resolve_model(
    path: str, report: Report | None = None, check: Check = lambda: None, *, served: bool = True
) -> ModelSource:
    """Find the model that ``path`` names: 'tiny' (the embedded model), 'dummy:135m', 'dummy:8b',
    'dummy:PATH/config.json', a folder with ``config.json`` and safetensors, or, where there is no such folder,
    ``org/name`` or ``org/name@revision`` on the Hugging Face Hub. The latter is downloaded if it is not in this host's
    cache and ``report`` is given; see `hub_folder`. Unless it is ``served`` by pdserve's engine, a model of any
    architecture will do (see `outlined_shape`). `ModelError` for anything else."""
    if path.startswith("dummy:"):
        kind = path.removeprefix("dummy:")
        if kind in DUMMIES:
            return ModelSource(path, None, DUMMIES[kind], path)
        if not kind.endswith(".json"):
            raise ModelError(f"{path}: unknown dummy; known: {', '.join(f'dummy:{k}' for k in DUMMIES)}, "
                             "dummy:PATH/config.json")  # fmt: skip
        return ModelSource(path, None, shape_from_hf(_read_json(Path(kind)), kind), path)
    folder = _tiny_folder() if path == "tiny" else Path(path).expanduser()
    name, shown = folder.resolve().name, str(folder)
    if not folder.is_dir():
        hub = HubId.of(path)
        if hub is None:
            raise ModelError(f"{path}: no such folder; give a folder with config.json and safetensors, the id of a "
                             "model on the Hugging Face Hub (org/name), 'tiny', or a dummy "
                             f"({', '.join(f'dummy:{k}' for k in DUMMIES)})")  # fmt: skip
        folder = hub_folder(hub, report, check)
        name, shown, path = hub.repo, str(hub), str(HubId(hub.repo, folder.name))
    elif HubId.of(path) is not None:
        path = str(folder.absolute())  # in another working folder it would be taken for an id
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{shown}: has no config.json, so it is not a Hugging Face model folder")
    values = _read_json(config)
    try:
        shape = shape_from_hf(values, str(config))
    except ModelError:
        if served:
            raise
        shape = outlined_shape(values, str(config))
    source = ModelSource(name, folder.resolve(), _with_generation_config(shape, folder), path)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{shown}: has no *.safetensors file; only safetensors weights can be loaded")
    return source


def config_of(path: str, report: Report) -> tuple[dict[str, Any], Path] | None:
    """The ``config.json`` that ``path`` names, and its place: a folder, a file ``*.json``, 'dummy:' and either, or a
    model on the Hugging Face Hub, of which no more is downloaded (``report`` gets the progress). None for the built-in
    models and where there is no such file. `ModelError` if it cannot be parsed or downloaded."""
    if path == "tiny" or path.removeprefix("dummy:") in DUMMIES:
        return None
    place = Path(path.removeprefix("dummy:")).expanduser()
    if not place.exists() and (hub := HubId.of(path)) is not None:
        place = hub_folder(hub, report, lambda: None, ("config.json",))
    file = place if place.suffix == ".json" else place / "config.json"
    return (_read_json(file), file) if file.is_file() else None


def _tiny_folder() -> Path:
    here = Path(__file__).resolve()
    places = (here.parents[1] / "models" / "tiny", here.parent / "tiny")  # a checkout, an installed wheel
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


def refuse_lfs_pointer(path: Path) -> None:
    """Raise `ModelError` if ``path`` cannot be read or is a Git LFS pointer. A clone without Git LFS has such pointers
    in place of large files."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_BEGINNING)) == _LFS_BEGINNING
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if is_pointer:
        raise ModelError(f"{path}: is a Git LFS pointer instead of the file; run `git lfs pull` in {path.parent}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the weights, sorted by name: those in the index, or all if there is no index.
    `ModelError` if the index is invalid or a file in it is missing."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    refuse_lfs_pointer(index)
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index: {type(error).__name__}: {error}") from None
    paths = [folder / str(name) for name in sorted(names, key=str)]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        more = f" (and {len(missing) - 1} of the other files that it names)" if len(missing) > 1 else ""
        raise ModelError(f"{missing[0]}: missing, but {INDEX} names it{more}; download the model again")
    return paths


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by name. `ModelError` if the file is a Git LFS pointer, corrupt
    or truncated."""
    refuse_lfs_pointer(path)
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: corrupt or truncated: {' '.join(str(error).split())}") from None


def check_weight_files(folder: Path) -> None:
    """Raise `ModelError` if a file of the weights is missing, truncated, corrupt, or a Git LFS pointer.
    `engine.model.loader.check_weights` also compares their tensors with config.json."""
    for path in weight_files(folder):
        read_tensor_shapes(path)


def tokenizer_note(folder: Path | None) -> str:
    """A note for users if the folder has no tokenizer.json; empty if it has one, or there is no folder (a dummy).
    `ModelError` if tokenizer.json is a Git LFS pointer."""
    if folder is None:
        return ""
    if (folder / TOKENIZER).is_file():
        refuse_lfs_pointer(folder / TOKENIZER)
        return ""
    packages = "transformers"
    if (folder / "tokenizer.model").is_file():
        packages = "transformers, sentencepiece and protobuf"  # which read a tokenizer.model
    return (
        f"{folder} has no {TOKENIZER}: prompts must be token ids, and outputs have no text. If the folder has the "
        f"files of another kind of tokenizer, convert them (with {packages} installed): "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )
