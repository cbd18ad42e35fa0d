"""Reads tensors of safetensors files into tensors of a model, in pieces and with several threads.

On a CPU, a piece is read from the file into its target if the dtypes are the same. All other pieces are read into one
of a few buffers. From there they are converted or dequantized, or a GPU copies them while the next pieces are read.

Values are read by calls and not through a mapping, so a file that is truncated meanwhile is an error and does not
end the process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.model.share import Kept
from engine.model.weights import QuantizedTensor
from pdserve.core.errors import ModelError
from runtime.cuda import Cuda

_ALL = Kept()
PIECE_BYTES = 8 * 2**20  # at most, unless one row has more
MAX_THREADS = 8


class TensorFile:
    """An open safetensors file, as a context that closes it. Every method raises `ModelError` if the file is corrupt or
    truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as stack, self._named():
            self._tensors: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._file = stack.enter_context(path.open("rb", buffering=0))
            header_bytes = int.from_bytes(self._file.read(8), "little")
            self._header = json.loads(self._file.read(header_bytes))
            self._data_start = 8 + header_bytes
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        with self._named():
            dtype: torch.dtype = self._tensors.get_tensor(name).dtype  # maps the file, and reads nothing
            return dtype

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor."""
        with self._named():
            return torch.Size(self._header[name]["shape"])

    def start(self, name: str) -> int:
        """The offset of the first byte of a tensor in the file."""
        with self._named():
            return self._data_start + int(self._header[name]["data_offsets"][0])

    def load(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        with self._named():
            tensor: torch.Tensor = torch.empty_like(self._tensors.get_tensor(name))
        self.read(self.start(name), tensor)
        return tensor

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fill ``target``, which is contiguous and on the CPU, with the bytes from ``offset`` on. May be called by
        several threads at the same time."""
        memory = target.view(-1).view(torch.uint8).numpy().data
        with self._named():
            while memory:
                length = os.preadv(self._file.fileno(), [memory], offset)
                if length == 0:
                    raise EOFError(f"it ends at byte {offset}")
                offset, memory = offset + length, memory[length:]

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, EOFError, ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: corrupt or truncated: {' '.join(str(error).split())}") from None


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a tensor, ``shape`` in all: they are in ``file`` at ``offset``, in ``dtype``, and go to
    ``target``, or only their ``columns`` do. For rows that are to be dequantized, ``scales`` returns their scales
    (``[rows, groups]``), of which each belongs to ``group`` columns."""

    file: TensorFile
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    target: torch.Tensor
    columns: range | None = None
    scales: Callable[[], torch.Tensor] | None = None
    group: int | None = None

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.shape.numel() * self.dtype.itemsize

    def fill(self, rows: torch.Tensor) -> None:
        """Convert or dequantize the rows, which are on the device of their target."""
        if self.scales is not None:
            scales = self.scales().to(rows.device)
            rows = QuantizedTensor(rows, scales, self.group).dequantized(torch.float32)
        self.target.copy_(rows if self.columns is None else rows[:, self.columns.start : self.columns.stop])


def pieces_of(
    file: TensorFile,
    name: str,
    target: torch.Tensor,
    kept: Kept = _ALL,
    scales: Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: int | None = None,
) -> Iterator[Piece]:
    """The pieces of tensor ``name`` of which ``target`` is to hold what is ``kept``. ``scales`` returns those of the
    rows with the given numbers."""
    dtype, shape, start = file.dtype(name), file.shape(name), file.start(name)
    row_bytes = shape[1:].numel() * dtype.itemsize
    height = max(1, PIECE_BYTES // row_bytes)
    filled = 0
    for rows in kept.rows or [range(shape[0])]:
        for begin in range(rows.start, rows.stop, height):
            numbers = torch.arange(begin, min(begin + height, rows.stop))
            into = target[filled : filled + len(numbers)]
            own = None if scales is None else partial(scales, numbers)
            size = torch.Size((len(numbers), *shape[1:]))
            yield Piece(file, start + begin * row_bytes, dtype, size, into, kept.columns, own, group)
            filled += len(numbers)


def read_pieces(pieces: Sequence[Piece], cuda: Cuda | None, index: int) -> None:
    """Read all ``pieces``. Their targets are on GPU ``index``, which is reached by ``cuda``, or on the CPU (None).

    Raises the `ModelError` of the first piece that cannot be read. At most ``MAX_THREADS + 1`` buffers of the size of a
    piece are used, which are pinned for a GPU."""
    num_threads, compute_threads = min(MAX_THREADS, len(os.sched_getaffinity(0))), torch.get_num_threads()
    buffered = [piece.num_bytes for piece in pieces if cuda is not None or not _is_direct(piece)]
    buffers = SimpleQueue[_Buffer]()
    for _ in range(num_threads + 1 if buffered else 0):
        size = max(buffered)
        buffers.put((torch.empty(size, dtype=torch.uint8) if cuda is None else cuda.pinned(size), _nothing))

    def start_thread() -> None:
        torch.set_num_threads(1)  # the threads of this pool convert, each its own piece
        if cuda is not None:
            cuda.init(index)

    try:
        with ThreadPoolExecutor(num_threads, "weights", start_thread) as pool:
            for _ in pool.map(partial(_read, buffers, cuda, index), pieces):
                pass
    finally:
        torch.set_num_threads(compute_threads)  # which holds for threads that are yet to start
        while not buffers.empty():
            buffers.get()[1]()


_Buffer = tuple[torch.Tensor, Callable[[], None]]
"""Memory, and what waits until it may be written."""


def _read(buffers: SimpleQueue[_Buffer], cuda: Cuda | None, index: int, piece: Piece) -> None:
    direct = _is_direct(piece)
    if cuda is None and direct:
        piece.file.read(piece.offset, piece.target)
        return
    memory, wait = buffers.get()
    try:
        wait()
        wait = _nothing
        rows = memory[: piece.num_bytes].view(piece.dtype).view(piece.shape)
        piece.file.read(piece.offset, rows)
        if cuda is None:
            piece.fill(rows)
        elif direct:
            wait = cuda.to_device(rows, piece.target, index)
        else:
            values = torch.empty_like(rows, device=piece.target.device)
            cuda.to_device(rows, values, index)()
            piece.fill(values)
    finally:
        buffers.put((memory, wait))


def _is_direct(piece: Piece) -> bool:
    return piece.scales is None and piece.columns is None and piece.dtype is piece.target.dtype


def _nothing() -> None:
    pass
