"""Loads the weights of a model from safetensors files, or fills those of a dummy with random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from checkpoints.families import family_of
from checkpoints.shape import ModelShape
from checkpoints.source import DUMMY_SEED, ModelSource, read_tensor_shapes
from engine.model.reading import Piece, TensorFile, pieces_of, read_pieces
from engine.model.share import Kept, Share
from engine.model.weights import Matrix, ModelWeights, QuantizedTensor, named_tensors, quantized_parts
from pdserve.core.errors import ModelError
from runtime.cuda import Cuda

_DUMMY_STD = 0.02
_DUMMY_LEVELS = 40.0  # standard deviation of quantized weights
_UNUSED = (".input_scale", ".weight_format")  # of activations, which are not quantized; of bitsandbytes


def load_weights(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    keep_fp8: bool = False,
    cuda: Cuda | None = None,
    share: Share | None = None,
) -> ModelWeights:
    """Load all weights of ``source``, or those of a ``share``, converted to ``dtype``. Matrices that are stored in 8
    bits are dequantized; with ``keep_fp8`` those that `engine.model.layers.FP8Linear` can compute with stay as they
    are. ``cuda`` is how ``device`` is reached if it is a GPU (default: torch).

    Raises `ModelError` with the file and tensor that is missing, unexpected, of a wrong shape, corrupt, truncated, or
    beyond the range of ``dtype``.
    """
    weights = ModelWeights(source.shape if share is None else share.shape, dtype, device, keep_fp8)
    kept = {} if share is None else share.kept()
    if source.folder is None:
        _fill_randomly(weights, source.shape, device, kept)
    else:
        cuda = Cuda() if cuda is None and device.type == "cuda" else cuda
        _fill_from_folder(weights, source, cuda, device.index or 0, kept)
    weights.arrange()
    return weights


def check_weights(source: ModelSource) -> None:
    """Raise the `ModelError` that `load_weights` would raise for the folder's files, without loading them."""
    if source.folder is not None:
        _find_tensors(_stored_shapes(source.shape), source)


def _fill_randomly(weights: ModelWeights, whole: ModelShape, device: torch.device, kept: Mapping[str, Kept]) -> None:
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    shapes = {name: tensor.shape for name, tensor in _whole_tensors(whole).items()}
    for name, tensor in named_tensors(weights).items():
        if isinstance(tensor, QuantizedTensor):
            tensor.scales.fill_(_DUMMY_STD / _DUMMY_LEVELS)
            drawn = torch.empty(tensor.shape, device=device).normal_(0.0, _DUMMY_LEVELS, generator=generator)
            tensor.values.copy_(drawn.round_().clamp_(-127, 127))
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0 - weights.shape.norm_offset)
        elif name in kept:  # so that all shares are of the same model
            drawn = torch.empty(shapes[name], dtype=tensor.dtype, device=device)
            tensor.copy_(_share_of(drawn.normal_(0.0, _DUMMY_STD, generator=generator), kept[name]))
        else:
            tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def _share_of(tensor: torch.Tensor, kept: Kept) -> torch.Tensor:
    if kept.nothing:
        return torch.zeros_like(tensor)
    if kept.rows is not None:
        tensor = torch.cat([tensor[rows.start : rows.stop] for rows in kept.rows])
    return tensor if kept.columns is None else tensor[:, kept.columns.start : kept.columns.stop]


def _whole_tensors(shape: ModelShape) -> dict[str, Matrix]:
    """All tensors of a model, without their values."""
    return named_tensors(ModelWeights(shape, torch.float32, torch.device("meta")))


def _stored_shapes(shape: ModelShape) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The shapes that each tensor may have in the checkpoint, by name, scales included."""
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    quantization = shape.quantization
    quantized = _quantized_names(shape)
    for name, tensor in _whole_tensors(shape).items():
        shapes[name] = (tuple(tensor.shape),)
        if quantization is not None and name in quantized:
            shapes[quantization.scale_name(name)] = quantization.scale_shapes(*tensor.shape)
    return shapes


def _quantized_names(shape: ModelShape) -> frozenset[str]:
    """The names of the weights that are stored in 8 bits."""
    family, experts = family_of(shape.architecture), shape.experts.count if shape.experts else 1
    return frozenset(
        f"model.layers.{layer}.{module}.weight".replace("experts.0.", f"experts.{expert}.")
        for layer in range(shape.num_layers)
        for part in quantized_parts(shape, layer)
        for module in family.modules(shape.has_experts(layer))[part]
        for expert in range(experts)
    )


def _find_tensors(wanted: Mapping[str, tuple[tuple[int, ...], ...]], source: ModelSource) -> dict[str, Path]:
    """The file of each wanted tensor, which has one of the given shapes. Checks all files before any is loaded."""
    found: dict[str, Path] = {}
    for path in source.weight_files():
        for name, shape in read_tensor_shapes(path).items():
            allowed = wanted.get(name)
            if allowed is None:
                _check_ignorable(name, path, source)
                continue
            if name in found:
                raise ModelError(f"{path}: tensor {name!r} is also in {found[name].name}")
            if shape not in allowed:
                raise ModelError(
                    f"{path}: tensor {name!r} is {list(shape)}, but config.json requires {list(allowed[0])}"
                )
            found[name] = path
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{source.folder}: tensor {missing[0]!r}{more} is in none of its safetensors files")
    return found


def _fill_from_folder(
    weights: ModelWeights, source: ModelSource, cuda: Cuda | None, index: int, kept: Mapping[str, Kept]
) -> None:
    targets = named_tensors(weights)
    found = _find_tensors(_stored_shapes(source.shape), source)
    quantized = _quantized_names(weights.shape)
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(TensorFile(path)) for path in dict.fromkeys(found.values())}
        files = {name: opened[path] for name, path in found.items()}
        pieces: list[Piece] = []
        for name, target in targets.items():
            mine = kept.get(name, Kept())
            if name in quantized:
                pieces += _quantized_pieces(target, name, source.shape, files, mine)
            elif isinstance(target, torch.Tensor) and mine.nothing:
                target.zero_()
            elif isinstance(target, torch.Tensor):
                pieces += pieces_of(files[name], name, target, mine)
        read_pieces(pieces, cuda, index)
        for name, target in targets.items():
            converted = weights.norm.dtype is torch.float16 and files[name].dtype(name) is not torch.float16
            if converted and isinstance(target, torch.Tensor) and not bool(target.isfinite().all()):
                raise ModelError(
                    f"{found[name]}: tensor {name!r} has values that float16 cannot hold; set model.dtype to float32 "
                    "or bfloat16"
                )


def _quantized_pieces(
    target: Matrix, name: str, shape: ModelShape, files: Mapping[str, TensorFile], kept: Kept
) -> Iterable[Piece]:
    """The pieces of a matrix that is stored in 8 bits. Fills the scales of ``target`` if it stays so."""
    quantization = shape.quantization
    assert quantization is not None
    dtype = str(files[name].dtype(name)).removeprefix("torch.")
    if dtype != quantization.values:
        raise ModelError(
            f"{files[name].path}: tensor {name!r} is {dtype}, but config.json requires {quantization.values}"
        )
    scale = quantization.scale_name(name)
    scales = files[scale].load(scale).float() / quantization.divisor
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(scales.shape[0], -1)
    rows, columns = files[name].shape(name)
    height, groups = quantization.block[0] or rows, quantization.column_groups(columns)

    def of_rows(numbers: torch.Tensor) -> torch.Tensor:
        return scales[numbers // height].expand(-1, groups)

    if isinstance(target, torch.Tensor):
        return pieces_of(files[name], name, target, kept, of_rows, quantization.block[1])
    target.scales.copy_(of_rows(torch.arange(target.shape[0])))
    return pieces_of(files[name], name, target.values)


def _check_ignorable(name: str, path: Path, source: ModelSource) -> None:
    if source.shape.quantization is not None and name.endswith(_UNUSED):
        return
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and source.shape.tie_word_embeddings):
        return
    raise ModelError(f"{path}: unexpected tensor {name!r}; the model of config.json has none of that name")
