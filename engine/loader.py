"""Fills a model's weights: from safetensors (one file or shards), or for a dummy with random numbers of one seed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from core.errors import ModelError
from engine.model_source import DUMMY_SEED, ModelSource
from engine.model_weights import ModelWeights

_INDEX = "model.safetensors.index.json"
_DUMMY_STD = 0.02


def load_weights(source: ModelSource, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """All weights of ``source``, cast to ``dtype``. `ModelError` names the file and tensor that is missing, unexpected,
    of a wrong shape, corrupt or truncated."""
    weights = ModelWeights(source.shape, dtype, device)
    if source.folder is None:
        _fill_randomly(weights, device)
    else:
        _fill_from_folder(weights, source.folder, source)
    return weights


def _fill_randomly(weights: ModelWeights, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for name, tensor in weights.tensors().items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def _fill_from_folder(weights: ModelWeights, folder: Path, source: ModelSource) -> None:
    wanted = weights.tensors()
    filled: dict[str, Path] = {}
    for path in _files(folder, source):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    target = wanted.get(name)
                    if target is None:
                        _check_ignorable(name, path, source)
                        continue
                    if name in filled:
                        raise ModelError(f"{path}: tensor {name!r} is in {filled[name].name} already")
                    tensor = file.get_tensor(name)
                    if tensor.shape != target.shape:
                        raise ModelError(
                            f"{path}: tensor {name!r} is {list(tensor.shape)}, config.json makes it "
                            f"{list(target.shape)}"
                        )
                    target.copy_(tensor)
                    filled[name] = path
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: corrupt or truncated: {' '.join(str(error).split())}") from None
    missing = [name for name in wanted if name not in filled]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: tensor {missing[0]!r}{more} is in none of its safetensors files")


def _files(folder: Path, source: ModelSource) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return source.weight_files()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index: {type(error).__name__}: {error}") from None
    paths = [folder / str(name) for name in sorted(shards)]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path}: missing, but {_INDEX} names it")
    return paths


def _check_ignorable(name: str, path: Path, source: ModelSource) -> None:
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and source.shape.tie_word_embeddings):
        return
    raise ModelError(f"{path}: unexpected tensor {name!r}; the model of config.json has none of that name")
