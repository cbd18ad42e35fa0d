"""Train `models/tiny`: a small real Llama-shaped model and its tokenizer, from text every Python installation carries.

The corpus is the standard library of the running interpreter: its sources (without tests and generated tables), its
functions and classes one by one, its docstrings and the language reference that `pydoc` ships. Prose is rarer there
than code, so it is repeated. Documents are separated by the end-of-text token, so the model learns to end.

Nothing is downloaded and every random choice hangs on one seed: the same Python, torch, transformers and machine kind
give the same folder again. The folder in the repository was made with Python 3.11.7, torch 2.13.0 (CPU) and
transformers 5.23.0, one thread, by

    python scripts/train_tiny.py

On Linux, glibc hands big tensors back to the kernel after each use; telling it not to makes the run markedly faster:

    MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=134217728 \\
        python scripts/train_tiny.py
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import math
import os
import platform
import random
import sysconfig
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Annotated, Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before tokenizers starts its threads: merges in one order

import tokenizers
import torch
import transformers
import typer
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048

# Never seen in training, neither by the model nor by the tokenizer: the held-out loss is measured on them.
HELD_OUT = ("textwrap.py", "heapq.py", "fractions.py", "graphlib.py")

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
# Tables of names and numbers, and what the build wrote: no language in it (or, the latter, paths of one machine).
SKIPPED_FILES = {"html/entities.py", "encodings/aliases.py", "locale.py", "pydoc_data/topics.py"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "msilib/")

PROMPTS = ("def read_lines(path):\n", "import os\n", "The following example shows", "class Stack:\n")


LR = 6e-3  # at its peak
SEED = 0  # of the first weights and of the order of the documents

# Share of all steps, rows, and their length. Mostly short rows, because they are fast; then longer ones, so that every
# position up to the limit has been trained.
STAGES = ((0.82, 16, 256), (0.11, 4, 1024), (0.07, 2, 2048))


# --- corpus -----------------------------------------------------------------------------------------------------------


def source_files() -> list[tuple[str, str]]:
    """Every usable standard library source as (path relative to the library, text), in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & set(name.split("/")) or name in SKIPPED_FILES or name.startswith(SKIPPED_PREFIXES):
            continue
        with tokenize.open(path) as file:
            text = file.read()
        if name.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
            continue
        if text.strip():
            found.append((name, text))
    return found


def definitions(text: str, tree: ast.Module) -> Iterator[str]:
    """Functions, methods and small classes, each dedented to stand for itself."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last = node.end_lineno or node.lineno
        if not 3 <= last - first + 1 <= 80:
            continue
        block = textwrap.dedent("\n".join(lines[first - 1 : last]))
        if not block.startswith((" ", "\t")):
            yield block + "\n"


def docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings long enough to be prose."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) >= 80:
                yield docstring + "\n"


def digest_of(documents: list[str]) -> str:
    """A fingerprint of the text: another Python release brings another library."""
    return hashlib.sha256("".join(f"{document}\0" for document in documents).encode()).hexdigest()[:16]


def load_corpus() -> tuple[list[str], list[str]]:
    """The documents for the training, and those held out. A piece that occurs twice (a copied function, say) is kept
    once per kind."""
    files: list[str] = []
    code: dict[str, None] = {}
    prose: dict[str, None] = {}
    held_out: list[str] = []
    for name, text in source_files():
        if name in HELD_OUT:
            held_out.append(text)
            continue
        files.append(text)
        tree = ast.parse(text)
        code.update(dict.fromkeys(definitions(text, tree)))
        prose.update(dict.fromkeys(docstrings(tree)))
    reference = [textwrap.dedent(text).strip() + "\n" for _, text in sorted(topics.items())]
    return files + list(code) + 2 * (list(prose) + reference), held_out


# --- tokenizer --------------------------------------------------------------------------------------------------------


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text round-trips; token 0 ends a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # Each line break is a token to itself. Merged with the indentation after it, as GPT-2's rule alone would have it, a
    # prompt that ends in a line break would be a sequence that never occurs in the training.
    line_break = pre_tokenizers.Split("\n", behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([line_break, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[torch.Tensor]:
    """Each document as ids, its end marked."""
    backend = tokenizer.backend_tokenizer
    end = tokenizer.eos_token_id
    return [
        torch.tensor([*encoding.ids, end], dtype=torch.int32)
        for encoding in backend.encode_batch(documents, add_special_tokens=False)
    ]


def token_rows(documents: list[torch.Tensor]) -> Callable[[int, int], torch.Tensor]:
    """Gives the next tokens as [count, length + 1] for ever, the documents in a new order each epoch. A row's last
    token is the label of the one before it."""
    shuffled, order, left = list(documents), random.Random(SEED), torch.empty(0, dtype=torch.int32)

    def rows(count: int, length: int) -> torch.Tensor:
        nonlocal left
        need = count * (length + 1)
        while len(left) < need:
            order.shuffle(shuffled)
            left = torch.cat([left, *shuffled])
        taken, left = left[:need], left[need:]
        return taken.view(count, length + 1).long()

    return rows


# --- model ------------------------------------------------------------------------------------------------------------


def build_model(eos_token_id: int) -> LlamaForCausalLM:
    """The shape: grouped-query attention and tied embeddings, small enough to live in the repository."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=672,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss in nats, matrices multiplied in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: list[torch.Tensor]) -> float:
    """Mean loss per token over the held-out documents, in windows as long as the model allows."""
    total, count = 0.0, 0
    for document in documents:
        for window in torch.split(document.long(), MAX_POSITIONS):
            if len(window) > 1:
                total += loss_of(model, window[None]).item() * (len(window) - 1)
                count += len(window) - 1
    return total / count


@torch.no_grad()
def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int) -> str:
    """The greedy completion, prompt included."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0].tolist(), skip_special_tokens=True))


# --- training ---------------------------------------------------------------------------------------------------------


def optimizers_of(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    Muon gets further in so few steps: in trials of 150, the loss came to 4.6; with AdamW for all, to 5.7.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return (
        torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    warmup = max(1, min(60, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def step_function(model: LlamaForCausalLM, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss for rows of a length, in the form that is fastest on a CPU core.

    Short rows: plain attention, compiled, for which torch needs a C++ compiler. Long rows: fused causal attention as it
    is, since under compilation transformers would hand it a full mask and forfeit the causal half.
    """

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return loss_of(model, rows)

    short = length <= 256
    model.set_attn_implementation("eager" if short else "sdpa")
    return torch.compile(loss, dynamic=False) if short else loss


# --- the folder -------------------------------------------------------------------------------------------------------

README = """\
# models/tiny

A small *trained* language model, so that everything in this repository runs out of the box, on real weights and without
a download. It writes text that looks like Python or like its documentation. It knows nothing and is good for nothing
else.

| | |
|---|---|
| architecture | `LlamaForCausalLM`, {parameters:,} parameters, bfloat16, tied embeddings |
| shape | {c.num_hidden_layers} layers, hidden {c.hidden_size}, intermediate {c.intermediate_size} |
| attention | {c.num_attention_heads} heads, {c.num_key_value_heads} KV heads, head_dim {c.head_dim} |
| positions | {c.max_position_embeddings} (trained at 256, 1024 and {c.max_position_embeddings}), RoPE theta 10000 |
| KV cache | {kv_bytes:,} bytes per token |
| tokenizer | byte-level BPE, {c.vocab_size} tokens, `{end}` (id {c.eos_token_id}) ends a text; none begins one |
| chat template | questions after `Q:`, answers after `A:`; it was not trained on chats |
| trained on | {tokens:,} tokens, {epochs:.1f} epochs of {corpus_tokens:,} |
| final loss | train {train_loss:.2f}, held out {held_out_loss:.2f} nats per token (uniform: {uniform:.2f}) |
| made with | Python {python}, torch {torch}, transformers {transformers}; corpus {digest} |

## Data

The Python standard library's own text: sources (without tests, generated tables and third-party packages), each
function and small class once more by itself, docstrings, and the language reference that `pydoc` carries; prose twice.
Held out: {held_out}.

## Reproduce

    python scripts/train_tiny.py

One seed, no network, well under an hour on one core. Another Python release has another standard library and so gives
another, equally good model.

## Licence

The text is the Python standard library, under the [PSF License Agreement](https://docs.python.org/3/license.html); a
few of its files carry their own, compatible notices. The weights and the tokenizer are derived from it.

## Samples

Greedy, {sample_tokens} tokens at most:

{samples}
"""

SAMPLE_TOKENS = 80
CHAT_TEMPLATE = Path(__file__).resolve().parents[1] / "models" / "tiny" / "chat_template.jinja"


def save_folder(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, facts: dict[str, Any]) -> None:
    """Write the whole folder, each file complete before it takes its name. ``facts`` are the training's, for the
    README."""
    model = copy.deepcopy(model).to(torch.bfloat16).eval()
    samples = [complete(model, tokenizer, prompt, SAMPLE_TOKENS) for prompt in PROMPTS]

    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / CHAT_TEMPLATE.name).write_bytes(CHAT_TEMPLATE.read_bytes())
    # The name that every transformers release knows.
    settings_path = partial / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text(encoding="utf-8"))
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    config = model.config
    readme = README.format(
        c=config,
        parameters=sum(p.numel() for p in model.parameters()),
        kv_bytes=2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2,
        end=END_OF_TEXT,
        uniform=math.log(config.vocab_size),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        held_out=", ".join(f"`{name}`" for name in HELD_OUT),
        sample_tokens=SAMPLE_TOKENS,
        samples="\n\n".join("```text\n" + sample.rstrip() + "\n```" for sample in samples),
        **facts,
    )
    (partial / "README.md").write_text(readme, encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(partial.iterdir()):
        path.chmod(0o644)
        path.replace(out / path.name)
    partial.rmdir()


def main(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("models/tiny"),
    steps: Annotated[int, typer.Option(help="Optimizer steps of 4096 tokens.")] = 1750,
) -> None:
    """Train the model on one core and write the folder."""
    torch.set_num_threads(1)  # another number rounds differently
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)

    train_texts, held_out_texts = load_corpus()
    tokenizer = train_tokenizer(train_texts)
    train, held_out = encode(tokenizer, train_texts), encode(tokenizer, held_out_texts)
    corpus_tokens = sum(map(len, train))
    typer.echo(f"{len(train):,} documents, {corpus_tokens:,} tokens")

    end = int(tokenizer.eos_token_id)
    model = build_model(end)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    optimizers = optimizers_of(model)
    rows_of = token_rows(train)
    losses: list[float] = []
    share, tokens = 0.0, 0
    for part, rows, length in STAGES:
        share += part
        last = steps if (part, rows, length) == STAGES[-1] else round(steps * share)
        loss_function = step_function(model, length)
        while len(losses) < last:
            loss = loss_function(rows_of(rows, length))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = LR * lr_factor(len(losses), steps)
                optimizer.step()  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
            losses.append(loss.item())
            tokens += rows * length
            if len(losses) % 50 == 0:
                typer.echo(f"step {len(losses)} of {steps}: length {length}, loss {fmean(losses[-50:]):.3f}")
    model.set_attn_implementation("sdpa")
    facts = {
        "tokens": tokens,
        "corpus_tokens": corpus_tokens,
        "epochs": tokens / corpus_tokens,
        "train_loss": fmean(losses[-50:]),
        "held_out_loss": held_out_loss(model, held_out),
        "digest": digest_of(train_texts),
    }
    typer.echo(facts)
    save_folder(out, model, tokenizer, facts)


if __name__ == "__main__":
    typer.run(main)
