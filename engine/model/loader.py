"""Loads the weights of a model from safetensors files, or fills those of a dummy with random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.model.folder import read_tensor_shapes
from engine.model.source import DUMMY_SEED, ModelSource
from engine.model.tensor_names import named_tensors
from engine.model.weights import ModelWeights
from pdserve.core.errors import ModelError

_DUMMY_STD = 0.02


def load_weights(source: ModelSource, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Load all weights of ``source``, converted to ``dtype``.

    Raises `ModelError` with the file and tensor that is missing, unexpected, of a wrong shape, corrupt, truncated, or
    beyond the range of ``dtype``.
    """
    weights = ModelWeights(source.shape, dtype, device)
    if source.folder is None:
        _fill_randomly(weights, device)
    else:
        _fill_from_folder(weights, source)
    weights.arrange()
    return weights


def check_weights(source: ModelSource) -> None:
    """Raise the `ModelError` that `load_weights` would raise for the folder's files, without loading them."""
    if source.folder is not None:
        _find_tensors(named_tensors(ModelWeights(source.shape, torch.float32, torch.device("meta"))), source)


def _fill_randomly(weights: ModelWeights, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for name, tensor in named_tensors(weights).items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0 - weights.shape.norm_offset)
        else:
            tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def _find_tensors(wanted: Mapping[str, torch.Tensor], source: ModelSource) -> dict[str, Path]:
    """The file of each wanted tensor. Checks all files before any is loaded."""
    found: dict[str, Path] = {}
    for path in source.weight_files():
        for name, shape in read_tensor_shapes(path).items():
            target = wanted.get(name)
            if target is None:
                _check_ignorable(name, path, source)
                continue
            if name in found:
                raise ModelError(f"{path}: tensor {name!r} is also in {found[name].name}")
            if shape != target.shape:
                raise ModelError(
                    f"{path}: tensor {name!r} is {list(shape)}, but config.json requires {list(target.shape)}"
                )
            found[name] = path
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{source.folder}: tensor {missing[0]!r}{more} is in none of its safetensors files")
    return found


def _fill_from_folder(weights: ModelWeights, source: ModelSource) -> None:
    wanted = named_tensors(weights)
    found = _find_tensors(wanted, source)
    for path in dict.fromkeys(found.values()):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in (name for name, holder in found.items() if holder == path):
                    tensor = file.get_tensor(name)
                    wanted[name].copy_(tensor)
                    if weights.norm.dtype is torch.float16 and tensor.dtype is not torch.float16:
                        _check_range(name, wanted[name], path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: corrupt or truncated: {' '.join(str(error).split())}") from None


def _check_range(name: str, tensor: torch.Tensor, path: Path) -> None:
    if not bool(tensor.isfinite().all()):
        raise ModelError(
            f"{path}: tensor {name!r} has values that float16 cannot hold; set model.dtype to float32 or bfloat16"
        )


def _check_ignorable(name: str, path: Path, source: ModelSource) -> None:
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and source.shape.tie_word_embeddings):
        return
    raise ModelError(f"{path}: unexpected tensor {name!r}; the model of config.json has none of that name")
