"""Examines a Hugging Face model folder without loading it. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pdserve.core.errors import ModelError

INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_LFS_BEGINNING = b"version https://git-lfs.github.com/spec/"


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
