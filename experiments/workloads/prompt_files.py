"""Prompts from files: ShareGPT conversations, lines of a text, and the user's own prompts.

The client has no tokenizer. Lengths of text in tokens are therefore estimates by ``chars_per_token``, which can be
measured with a single request; results have the true numbers (`Generation.prompt_tokens`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self, TypeVar

import msgspec

from experiments.workloads.conversation import Conversation, Room, Turn
from experiments.workloads.synthetic import Fixed, Lengths
from pdserve.core.errors import CapacityExceeded, InvalidRequest

T = TypeVar("T")


def read_bytes(option: str, path: Path) -> bytes:
    """The content of ``path``; `InvalidRequest` naming ``option`` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{option}: {path} cannot be read: {error.strerror or error}") from None


def read_text(option: str, path: Path) -> str:
    """The content of ``path``; `InvalidRequest` naming ``option`` if it cannot be read, or is not UTF-8."""
    try:
        return read_bytes(option, path).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{option}: {path} is not UTF-8 text (byte {error.start})") from None


def read_json_lines(option: str, path: Path, kind: type[T], expected: str) -> Iterator[tuple[int, T]]:
    """Line numbers (from 1) and lines as ``kind``. Empty lines are skipped. `InvalidRequest` names ``option`` if the
    file cannot be read, and file and line, followed by ``expected``, if a line is wrong."""
    for number, line in enumerate(read_bytes(option, path).splitlines(), 1):
        if line.strip():
            yield number, decode(line, kind, f"{path}:{number}", expected)


def decode(text: bytes, kind: type[T], where: str, expected: str) -> T:
    """JSON as ``kind``; `InvalidRequest` beginning with ``where`` and ending with ``expected`` if it is not."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where}: {error}; expected {expected}") from None


CHARS_PER_TOKEN = 4.0
SHARE_GPT_EXPECTED = '[{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}, …]'


class _Message(msgspec.Struct, frozen=True):
    speaker: str = msgspec.field(name="from")
    value: str


class _Entry(msgspec.Struct, frozen=True):
    conversations: list[_Message] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShareGPT:
    """Conversations of a ShareGPT file, in an order drawn by the seed, and again from the first one if more are asked
    for. Each has up to ``turns`` turns: what the human says is sent; the answers are generated, with ``outputs``
    tokens, or (None) as many as the file's answer has. ``left_out`` counts conversations that are too long."""

    path: Path
    dialogues: tuple[tuple[tuple[str, str], ...], ...]
    outputs: Lengths | None = None
    pause_s: float = 0.0
    chars_per_token: float = CHARS_PER_TOKEN
    left_out: int = 0

    @classmethod
    def read(cls, path: Path, turns: int = 1, outputs: Lengths | None = None, pause_s: float = 0.0) -> Self:
        """Read a file with a JSON list of conversations. Those that do not begin with a question of the human and an
        answer are skipped. `InvalidRequest` if the file is of another form, or has no conversation."""
        entries = decode(read_bytes("dataset_path", path), list[_Entry], str(path), SHARE_GPT_EXPECTED)
        dialogues = tuple(pairs for entry in entries if (pairs := _pairs(entry.conversations, turns)))
        if not dialogues:
            raise InvalidRequest(
                f"dataset_path: {path} has no conversation with a question and an answer; expected {SHARE_GPT_EXPECTED}"
            )
        return cls(path, dialogues, outputs, pause_s)

    @property
    def sample(self) -> str:
        """Text to measure ``chars_per_token`` with."""
        return " ".join(pairs[0][0] for pairs in self.dialogues[:20])[:2000]

    @property
    def most_turns(self) -> int:
        return max(len(pairs) for pairs in self.dialogues)

    @property
    def own_count(self) -> int | None:
        return None

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        order = list(range(len(self.dialogues)))
        random.Random(f"order/{seed}").shuffle(order)
        for index, which in zip(range(count), itertools.cycle(order), strict=False):
            rng = random.Random(f"lengths/{seed}/{index}")
            yield Conversation(
                tuple(
                    Turn((), self._output_len(answer, rng), self.pause_s if turn else 0.0, question)
                    for turn, (question, answer) in enumerate(self.dialogues[which])
                )
            )

    def within(self, room: Room) -> Self:
        """Without the conversations that are estimated to be longer than ``room``; `CapacityExceeded` if none is
        left."""
        short = tuple(pairs for pairs in self.dialogues if self._longest(pairs) <= room.tokens)
        if not short:
            raise CapacityExceeded(
                f"dataset_path: none of the conversations of {self.path} fits the {room.tokens} tokens that the "
                "service has room for; use fewer --turns or a smaller --output-len"
            )
        return replace(self, dialogues=short, left_out=self.left_out + len(self.dialogues) - len(short))

    def describe(self) -> str:
        outputs = "as long as the file's answers" if self.outputs is None else self.outputs.describe()
        return (
            f"ShareGPT {self.path.name}: {len(self.dialogues)} conversations of up to {self.most_turns} turns "
            f"({self.left_out} longer ones left out); output {outputs}; {self.chars_per_token:.2f} characters per token"
        )

    def _output_len(self, answer: str, rng: random.Random) -> int:
        return max(1, round(len(answer) / self.chars_per_token)) if self.outputs is None else self.outputs.draw(rng)

    def _longest(self, pairs: tuple[tuple[str, str], ...]) -> int:
        """Tokens of a conversation, estimated with a margin of a tenth."""
        tokens = 0.0
        for question, answer in pairs:
            written = self.outputs.longest if self.outputs else len(answer) / self.chars_per_token + 1
            tokens += 1.1 * len(question) / self.chars_per_token + 1 + written
        return round(tokens)


def _pairs(messages: list[_Message], turns: int) -> tuple[tuple[str, str], ...]:
    """Up to ``turns`` questions with their answers, from the beginning."""
    pairs: list[tuple[str, str]] = []
    for question, answer in zip(messages[::2], messages[1::2], strict=False):
        human = question.speaker in ("human", "user")
        if not (human and question.value and answer.value) or len(pairs) == turns:
            break
        pairs.append((question.value, answer.value))
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class TextLines:
    """Prompts made of random lines of a text file (vLLM's data set "sonnet"): lines are added while the prompt is
    shorter than its length of ``inputs``, and the last one is cut."""

    path: Path
    lines: tuple[str, ...]
    inputs: Lengths
    outputs: Lengths
    chars_per_token: float = CHARS_PER_TOKEN

    @classmethod
    def read(cls, path: Path, inputs: Lengths, outputs: Lengths) -> Self:
        """Read a text file; `InvalidRequest` if it has no text."""
        lines = tuple(line for line in read_text("dataset_path", path).splitlines() if line.strip())
        if not lines:
            raise InvalidRequest(f"dataset_path: {path} has no lines of text")
        return cls(path, lines, inputs, outputs)

    @property
    def sample(self) -> str:
        """Text to measure ``chars_per_token`` with."""
        return "\n".join(self.lines)[:2000]

    @property
    def most_turns(self) -> int:
        return 1

    @property
    def own_count(self) -> int | None:
        return None

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        for index in range(count):
            rng = random.Random(f"lines/{seed}/{index}")
            length = max(1, round(self.inputs.draw(rng) * self.chars_per_token))
            output_len = self.outputs.draw(rng)
            text = ""
            while len(text) < length:
                text += self.lines[rng.randrange(len(self.lines))] + "\n"
            yield Conversation((Turn((), output_len, text=text[:length]),))

    def within(self, room: Room) -> Self:
        room.check(self.inputs.longest, self.outputs.longest)
        return self

    def describe(self) -> str:
        return (
            f"lines of {self.path.name}: input about {self.inputs.describe()}; output {self.outputs.describe()}; "
            f"{self.chars_per_token:.2f} characters per token"
        )


_PROMPT_EXPECTED = '{"prompt": "text"} or {"token_ids": [numbers]}, each with "output_len" if wanted'
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _OwnPrompt(msgspec.Struct, frozen=True):
    prompt: str = ""
    token_ids: tuple[_TokenId, ...] = ()
    output_len: _Positive | None = None
    max_tokens: _Positive | None = None


@dataclass(frozen=True, slots=True)
class OwnPrompts:
    """The prompts of a file with one JSON object per line, in the file's order, and again from the first one if more
    are asked for. ``outputs`` is for lines that have no output_len (or max_tokens) of their own."""

    path: Path
    prompts: tuple[_OwnPrompt, ...]
    lines: tuple[int, ...]
    outputs: Lengths

    @classmethod
    def read(cls, path: Path, outputs: Lengths) -> Self:
        """Read the file. `InvalidRequest` names the line that is wrong."""
        lines, prompts = [], []
        for number, prompt in read_json_lines("dataset_path", path, _OwnPrompt, _PROMPT_EXPECTED):
            if bool(prompt.prompt) == bool(prompt.token_ids):
                what = "both prompt and token_ids" if prompt.prompt else "no prompt"
                raise InvalidRequest(f"{path}:{number}: has {what}; expected {_PROMPT_EXPECTED}")
            lines.append(number)
            prompts.append(prompt)
        if not prompts:
            raise InvalidRequest(f"dataset_path: {path} has no prompts; expected lines of {_PROMPT_EXPECTED}")
        return cls(path, tuple(prompts), tuple(lines), outputs)

    @property
    def most_turns(self) -> int:
        return 1

    @property
    def own_count(self) -> int | None:
        return len(self.prompts)

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        """`InvalidRequest` names the line of a prompt with a token id that the vocabulary does not have."""
        for index in range(count):
            which = index % len(self.prompts)
            prompt = self.prompts[which]
            if prompt.token_ids and max(prompt.token_ids) >= vocab_size:
                raise InvalidRequest(
                    f"{self.path}:{self.lines[which]}: token id {max(prompt.token_ids)} is not in the model's "
                    f"vocabulary of {vocab_size}"
                )
            output_len = self._outputs_of(prompt).draw(random.Random(f"lengths/{seed}/{index}"))
            yield Conversation((Turn(prompt.token_ids, output_len, text=prompt.prompt),))

    def within(self, room: Room) -> Self:
        """Checks prompts of token ids; the service itself refuses texts that are too long."""
        for line, prompt in zip(self.lines, self.prompts, strict=True):
            room.check(len(prompt.token_ids), self._outputs_of(prompt).longest, f"{self.path}:{line}")
        return self

    def describe(self) -> str:
        return f"prompts of {self.path.name} ({len(self.prompts)}); output {self.outputs.describe()} unless given there"

    def _outputs_of(self, prompt: _OwnPrompt) -> Lengths:
        own = prompt.output_len or prompt.max_tokens
        return Fixed(own) if own else self.outputs
