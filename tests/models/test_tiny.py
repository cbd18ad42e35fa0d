"""The embedded model is complete, small, loads as any Hugging Face folder does, and has learned something."""

from __future__ import annotations

import inspect
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


def test_transformers_loads_a_grouped_query_llama(model: Any, tokenizer: Any) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    config = model.config
    assert (config.tie_word_embeddings, config.max_position_embeddings) == (True, 2048)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert 1 < config.num_key_value_heads < config.num_attention_heads
    assert len(tokenizer) == config.vocab_size
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == config.eos_token_id == model.generation_config.eos_token_id == end


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


def losses(model: Any, tokenizer: Any, text: str) -> torch.Tensor:
    """The next-token losses of a text, in nats."""
    ids = torch.tensor(tokenizer.encode(text))[:2048]
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].float()
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")


def test_it_predicts_text_it_has_not_seen(model: Any, tokenizer: Any) -> None:
    # The module was held out of the training. Measured: 3.7 to 4.3. A model that knows nothing has ln(4096) = 8.3.
    prose = "\n\n".join(inspect.getdoc(getattr(textwrap, name)) or "" for name in sorted(textwrap.__all__))
    of_prose, of_code = (losses(model, tokenizer, text) for text in (prose, inspect.getsource(textwrap)))
    assert len(of_prose) > 256
    assert of_prose.mean() < 4.8 < math.log(4096)
    assert of_code[:1024].mean() < 4.8
    assert len(of_code) == 2047
    assert of_code[1536:].mean() < of_code[:512].mean() + 0.5, "as well far into a text as near its start"


def test_a_greedy_completion_reads_like_text(model: Any, tokenizer: Any) -> None:
    completion = tokenizer.decode(greedy(model, tokenizer, "The following example shows", 48), skip_special_tokens=True)
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
