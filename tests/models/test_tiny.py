"""The embedded model is complete, small, loads as any Hugging Face folder does, and has learned something."""

from __future__ import annotations

import heapq
import inspect
import json
import math
import string
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway.chat_template import load_chat_template

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
END_OF_TEXT = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def loss(model: Any, ids: torch.Tensor) -> float:
    """Mean next-token loss in nats."""
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].float()
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item()


def greedy(model: Any, tokenizer: Any, prompt: str, tokens: int) -> list[int]:
    ids = torch.tensor([tokenizer.encode(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in out[0, ids.shape[1] :]]


def test_the_folder_is_complete_and_small() -> None:
    wanted = {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in FOLDER.iterdir()} == wanted
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10_000_000


def test_the_shape_is_a_grouped_query_llama() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 2048
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert 1 < kv_heads < heads
    assert heads % kv_heads == 0


def test_transformers_loads_it_as_it_is(model: Any, tokenizer: Any) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(tokenizer) == model.config.vocab_size
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == end


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    if x:\n        return  [1,  2]\n\n\n\tpass\n",
        "    indented first line\r\n  trailing blanks  \n",
        "Grüße aus Köln, ¿qué tal? Ελληνικά, русский, 日本語, 한국어, עברית",
        "🙂👩‍👩‍👧 𝛼≠∅ \u200b\x00\x7f",
        "don't  stop , now . it 's",
        " ",
    ],
)
def test_the_tokenizer_gives_any_text_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_the_tokenizer_is_worth_its_vocabulary(tokenizer: Any) -> None:
    text = inspect.getsource(textwrap)
    assert len(tokenizer.encode(text)) < len(text) / 2.5


@pytest.mark.parametrize("module", [textwrap, heapq], ids=lambda module: module.__name__)
def test_it_predicts_text_it_has_not_seen(model: Any, tokenizer: Any, module: Any) -> None:
    # Both modules were held out of the training. Measured: 3.7 to 4.3. A model that knows nothing has ln(4096) = 8.3.
    prose = "\n\n".join(inspect.getdoc(getattr(module, name)) or "" for name in sorted(module.__all__))
    code = inspect.getsource(module)
    for text in (prose, code):
        ids = torch.tensor(tokenizer.encode(text))[:1024]
        assert len(ids) > 256
        assert loss(model, ids) < 4.8 < math.log(4096)


def test_it_predicts_as_well_far_into_a_text_as_near_its_start(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor(tokenizer.encode(inspect.getsource(textwrap)))[:2048]
    assert len(ids) == 2048
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].float()
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    assert losses[1536:].mean() < losses[:512].mean() + 0.5


@pytest.mark.parametrize("prompt", ["def read_lines(path):\n", "import os\n", "The following example shows"])
def test_a_greedy_completion_reads_like_text(model: Any, tokenizer: Any, prompt: str) -> None:
    completion = tokenizer.decode(greedy(model, tokenizer, prompt, 48), skip_special_tokens=True)
    printable = sum(character in string.printable for character in completion)
    letters = sum(character.isalpha() for character in completion)
    assert printable >= 0.95 * len(completion) > 0
    assert letters >= 0.3 * len(completion)


def test_a_chat_becomes_questions_and_answers(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " What is a list? "},
        {"role": "assistant", "content": " A sequence."},
        {"role": "user", "content": "And a dict?"},
    ]
    text = "Be brief.\n\nQ: What is a list?\n\nA: A sequence.\n\nQ: And a dict?\n\nA:"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == text
    ours = load_chat_template(FOLDER)
    assert ours is not None
    assert ours.render(chat) == text


def test_it_ends_a_text(model: Any, tokenizer: Any) -> None:
    ids = greedy(model, tokenizer, "def __len__(self):\n    return", 64)
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) < 64
