"""Loading: sharded folders work, and every fault of a folder is a `ModelError` that names it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import engine.process.build
from checkpoints.source import ModelSource, check_weight_files, resolve_model, tokenizer_note
from engine.model.loader import check_weights, load_weights
from engine.model.weights import ModelWeights
from engine.model.weights import named_tensors as all_tensors
from engine.spec import EngineSpec
from pdserve.core.errors import ModelError
from tests.local_cluster import ROOT
from tests.random_models import save_random

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny model in one file."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(tmp_path)
    return tmp_path


def named_tensors(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """All tensors by name; none is quantized."""
    return {name: tensor for name, tensor in all_tensors(weights).items() if isinstance(tensor, torch.Tensor)}


def _load(folder: Path) -> ModelWeights:
    return load_weights(resolve_model(str(folder)), torch.float32, CPU)


def _edit(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def _store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def test_shards_give_the_same_weights(folder: Path, tmp_path: Path) -> None:
    whole = named_tensors(_load(folder))
    tensors = _edit(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in named_tensors(_load(folder)).items())

    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2-of-2\.safetensors: missing, but .*index\.json names it"):
        _load(folder)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(ModelError, match=r"index\.json: not a safetensors index"):
        _load(folder)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.1.self_attn.k_proj.weight", None, r"k_proj\.weight' is in none"),
        ("model.layers.0.self_attn.q_proj.bias", (16,), r"model\.safetensors: unexpected tensor .*q_proj\.bias"),
        ("model.norm.weight", (17,), r"'model\.norm\.weight' is \[17\], but config\.json requires \[16\]"),
    ],
)
def test_a_faulty_tensor_is_named(folder: Path, name: str, shape: tuple[int, ...] | None, message: str) -> None:
    tensors = _edit(folder)
    tensors.pop(name, None)
    _store(folder, tensors | ({name: torch.zeros(shape)} if shape else {}))
    check_weight_files(folder)  # which compares nothing with config.json
    with pytest.raises(ModelError, match=message):
        _load(folder)
    with pytest.raises(ModelError, match=message):
        check_weights(resolve_model(str(folder)))


@pytest.mark.parametrize("damage", ["empty", "cut in the header", "cut at the end", "header"])
def test_a_damaged_file_is_named(folder: Path, damage: str) -> None:
    """Also without loading it."""
    source = resolve_model(str(folder))
    checks: list[Callable[[], object]] = [
        lambda: _load(folder), lambda: check_weights(source), lambda: check_weight_files(folder)
    ]  # fmt: skip
    for check in checks:
        check()
    file = folder / "model.safetensors"
    data = file.read_bytes()
    damaged = {
        "empty": b"",
        "cut in the header": data[:200],
        "cut at the end": data[:-1],
        "header": data[:8] + b"\xff" * 32 + data[40:],
    }
    file.write_bytes(damaged[damage])
    for check in checks:
        with pytest.raises(ModelError, match=r"model\.safetensors: corrupt or truncated"):
            check()


def test_tied_heads_share_the_embedding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = _load(folder)  # the checkpoint's own lm_head is of no use then
    assert weights.head is weights.embedding


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", '{"architectures": [', "not valid JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("model.safetensors", None, "no \\*.safetensors file"),
    ],
)
def test_faults_of_a_folder(folder: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with a model in two files of 5 MiB."""
    config = {
        "model_type": "llama", "vocab_size": 5000, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    save_random(tmp_path, config, seed=5)
    tensors = _edit(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + ('lm_head' not in name)}-of-2.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file in place, and set its times back."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def _middles(path: Path) -> list[int]:
    """The offsets of the bytes in the middle of each tensor."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    places = [about["data_offsets"] for name, about in header.items() if name != "__metadata__"]
    return [8 + size + (start + end) // 2 for start, end in places]


def test_the_hash_changes_with_any_byte_of_any_file(shards: Path) -> None:
    """Also where the times of the file do not."""
    draw = random.Random(7)
    source = resolve_model(str(shards))
    seen = {source.model_hash()}
    num_flips = 0
    for path in source.weight_files():
        size = path.stat().st_size
        assert size > 5e6
        for offset in (0, 8, size - 1, *_middles(path), *(draw.randrange(size) for _ in range(8))):
            flip(path, offset)
            num_flips += 1
            seen.add(source.model_hash())
            assert len(seen) == 1 + num_flips, (path.name, offset)
            flip(path, offset)
            assert source.model_hash() in seen
            assert len(seen) == 1 + num_flips


def test_the_hash_is_the_same_on_every_host(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Places, times and inodes differ between hosts."""
    copy = tmp_path_factory.mktemp("another") / "model"
    shutil.copytree(shards, copy, copy_function=shutil.copyfile)
    assert resolve_model(str(copy)).model_hash() == resolve_model(str(shards)).model_hash()


def _replace(path: Path) -> None:
    """Put another file in the place of one, of the same size and with the same times."""
    status = path.stat()
    new = path.with_suffix(".new")
    shutil.copyfile(path, new)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.rename(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "written": lambda path: flip(path, 3_000_000),
    "replaced": _replace,
    "deleted": Path.unlink,
}


@pytest.mark.parametrize(("number", "change"), list(enumerate(CHANGES)))
def test_weights_that_change_while_they_are_loaded_are_refused(
    shards: Path, change: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After they were hashed: the hash would be of other weights than those in use."""
    path = resolve_model(str(shards)).weight_files()[number % 2]

    def load(source: ModelSource, *arguments: Any, **more: Any) -> ModelWeights:
        weights = load_weights(source, *arguments, **more)
        CHANGES[change](path)
        return weights

    monkeypatch.setattr(engine.process.build, "load_weights", load)
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda _: None)  # which works once in a process
    with pytest.raises(ModelError, match=rf"{path.name}: (was changed while it was loaded; start again|missing)"):
        engine.process.build.build_engine(EngineSpec(str(shards), "float32", num_blocks=4), memory_fd=-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_biases_and_head_norms_land_where_they_belong(tmp_path: Path, family: str) -> None:
    config = {
        "model_type": family, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
        "attention_bias": True, "mlp_bias": True,
    }  # fmt: skip
    save_random(tmp_path, config, seed=3)
    stored = _edit(tmp_path)
    named = named_tensors(_load(tmp_path))
    assert named.keys() == stored.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in stored.items())
    own = {"llama": "mlp.up_proj.bias", "qwen2": "self_attn.v_proj.bias", "qwen3": "self_attn.k_norm.weight"}[family]
    del stored[f"model.layers.1.{own}"]
    _store(tmp_path, stored)
    with pytest.raises(ModelError, match=rf"'model\.layers\.1\.{own}' is in none"):
        _load(tmp_path)

    dummy = named_tensors(load_weights(resolve_model(f"dummy:{tmp_path / 'config.json'}"), torch.float32, CPU))
    for name, tensor in dummy.items():
        assert torch.equal(tensor, torch.ones_like(tensor)) == name.endswith("norm.weight"), name


def test_dummies() -> None:
    small, large = resolve_model("dummy:135m"), resolve_model("dummy:8b")
    assert (small.is_dummy, small.folder) == (True, None)
    assert 130e6 < small.shape.num_parameters < 140e6
    assert 8.0e9 < large.shape.num_parameters < 8.1e9
    assert small.model_hash() == resolve_model("dummy:135m").model_hash() != large.model_hash()
    check_weights(small)
    with pytest.raises(ModelError, match="unknown dummy; known: dummy:135m, dummy:8b"):
        resolve_model("dummy:9b")


def test_dummies_of_a_config_draw_the_same_weights_everywhere(folder: Path) -> None:
    source: ModelSource = resolve_model(f"dummy:{folder / 'config.json'}")
    first, second = (named_tensors(load_weights(source, torch.float32, CPU)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["model.norm.weight"], torch.ones(16))
    assert first["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.2)


LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_git_lfs_pointer_is_named_as_such(folder: Path, name: str) -> None:
    (folder / name).write_text(LFS_POINTER)
    with pytest.raises(ModelError, match=rf"{name}: is a Git LFS pointer .*; run `git lfs pull` in {folder}"):
        _load(folder)
    with pytest.raises(ModelError, match=rf"{name}: is a Git LFS pointer"):
        check_weights(resolve_model(str(folder)))


def test_files_that_the_index_does_not_name_are_left_alone(folder: Path) -> None:
    """As Mistral's folders have: the same weights once more, under other names."""
    tensors = _edit(folder)
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = resolve_model(str(folder)).model_hash()
    save_file({f"layers.{name}": tensor for name, tensor in tensors.items()}, folder / "consolidated.safetensors")
    _load(folder)
    assert resolve_model(str(folder)).model_hash() == before


def test_values_that_float16_cannot_hold_are_refused(folder: Path) -> None:
    tensors = _edit(folder)
    tensors["model.norm.weight"][3] = 7e4
    _store(folder, tensors)
    source = resolve_model(str(folder))
    assert load_weights(source, torch.bfloat16, CPU).norm[3] > 6e4
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has values that float16 cannot hold; set "):
        load_weights(source, torch.float16, CPU)


def test_a_missing_tokenizer_is_told(folder: Path) -> None:
    assert tokenizer_note(None) == tokenizer_note(ROOT / "models" / "tiny") == ""
    assert "sentencepiece" not in tokenizer_note(folder)
    (folder / "tokenizer.model").write_bytes(b"\x0a")
    assert "(with transformers, sentencepiece and protobuf installed)" in tokenizer_note(folder)
    (folder / "tokenizer.json").write_text(LFS_POINTER)
    with pytest.raises(ModelError, match=r"tokenizer\.json: is a Git LFS pointer"):
        tokenizer_note(folder)
