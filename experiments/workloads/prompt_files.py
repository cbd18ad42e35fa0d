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

from experiments.workloads.conversation import Conversation, Room, Turn, Workload
from experiments.workloads.synthetic import Fixed, Lengths
from pdserve.core.errors import CapacityExceeded, InvalidRequest

T = TypeVar("T")


def read_bytes(path: Path) -> bytes:
    """The content of ``path``; `InvalidRequest` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"dataset_path: {path} cannot be read: {error.strerror or error}") from None


def read_json_lines(path: Path, kind: type[T], what: str, expected: str) -> Iterator[tuple[int, T]]:
    """Line numbers (from 1) and lines as ``kind``. Empty lines are skipped. `InvalidRequest` names file and line,
    followed by ``expected``, if a line is wrong, and ``what`` there is none of in a file without lines."""
    lines = [(number, line) for number, line in enumerate(read_bytes(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"dataset_path: {path} has no {what}; expected lines of {expected}")
    for number, line in lines:
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
    conversations: list[_Message] = []

    def pairs(self, turns: int) -> tuple[tuple[str, str], ...]:
        """Up to ``turns`` questions of the human with their answers, from the beginning."""
        both = zip(self.conversations[::2], self.conversations[1::2], strict=False)
        found = itertools.takewhile(lambda pair: pair[0].speaker in ("human", "user"), both)
        said = ((question.value, answer.value) for question, answer in found)
        return tuple(itertools.islice(itertools.takewhile(all, said), turns))


@dataclass(frozen=True, slots=True)
class ShareGPT(Workload):
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
        entries = decode(read_bytes(path), list[_Entry], str(path), SHARE_GPT_EXPECTED)
        dialogues = tuple(filter(None, (entry.pairs(turns) for entry in entries)))
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
        return max(map(len, self.dialogues))

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        order = [*range(len(self.dialogues))]
        random.Random(f"order/{seed}").shuffle(order)
        for index, which in zip(range(count), itertools.cycle(order), strict=False):
            rng = random.Random(f"lengths/{seed}/{index}")
            turns: list[Turn] = []
            for question, answer in self.dialogues[which]:
                written = max(1, round(len(answer) / self.chars_per_token))
                output_len = self.outputs.draw(rng) if self.outputs else written
                turns.append(Turn((), output_len, self.pause_s if turns else 0.0, question))
            yield Conversation(tuple(turns))

    def within(self, room: Room) -> Self:
        """Without the conversations that are estimated, with a margin of a tenth, to be longer than ``room``;
        `CapacityExceeded` if none is left."""

        def tokens(question: str, answer: str) -> float:
            written = self.outputs.longest if self.outputs else len(answer) / self.chars_per_token + 1
            return 1.1 * len(question) / self.chars_per_token + 1 + written

        short = tuple(each for each in self.dialogues if round(sum(tokens(*pair) for pair in each)) <= room.tokens)
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


@dataclass(frozen=True, slots=True)
class TextLines(Workload):
    """Prompts made of random lines of a text file (vLLM's data set "sonnet"): lines are added while the prompt is
    shorter than its length of ``inputs``, and the last one is cut."""

    path: Path
    lines: tuple[str, ...]
    inputs: Lengths
    outputs: Lengths
    chars_per_token: float = CHARS_PER_TOKEN

    @classmethod
    def read(cls, path: Path, inputs: Lengths, outputs: Lengths) -> Self:
        """Read a text file; `InvalidRequest` if it has no text, or is not UTF-8."""
        try:
            lines = tuple(filter(str.strip, read_bytes(path).decode().splitlines()))
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"dataset_path: {path} is not UTF-8 text (byte {error.start})") from None
        if not lines:
            raise InvalidRequest(f"dataset_path: {path} has no lines of text")
        return cls(path, lines, inputs, outputs)

    @property
    def sample(self) -> str:
        """Text to measure ``chars_per_token`` with."""
        return "\n".join(self.lines)[:2000]

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
class OwnPrompts(Workload):
    """The prompts of a file with one JSON object per line, with their lines' numbers, in the file's order, and again
    from the first one if more are asked for. ``outputs`` is for lines that have no output_len (or max_tokens) of their
    own."""

    path: Path
    prompts: tuple[tuple[int, _OwnPrompt], ...]
    outputs: Lengths

    @classmethod
    def read(cls, path: Path, outputs: Lengths) -> Self:
        """Read the file. `InvalidRequest` names the line that is wrong."""
        prompts = tuple(read_json_lines(path, _OwnPrompt, "prompts", _PROMPT_EXPECTED))
        for line, prompt in prompts:
            if bool(prompt.prompt) == bool(prompt.token_ids):
                what = "both prompt and token_ids" if prompt.prompt else "no prompt"
                raise InvalidRequest(f"{path}:{line}: has {what}; expected {_PROMPT_EXPECTED}")
        return cls(path, prompts, outputs)

    @property
    def own_count(self) -> int | None:
        return len(self.prompts)

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        """`InvalidRequest` names the line of a prompt with a token id that the vocabulary does not have."""
        for index, (line, prompt) in zip(range(count), itertools.cycle(self.prompts), strict=False):
            if (largest := max(prompt.token_ids, default=0)) >= vocab_size:
                raise InvalidRequest(
                    f"{self.path}:{line}: token id {largest} is not in the model's vocabulary of {vocab_size}"
                )
            output_len = self._outputs_of(prompt).draw(random.Random(f"lengths/{seed}/{index}"))
            yield Conversation((Turn(prompt.token_ids, output_len, text=prompt.prompt),))

    def within(self, room: Room) -> Self:
        """Checks prompts of token ids; the service itself refuses texts that are too long."""
        for line, prompt in self.prompts:
            room.check(len(prompt.token_ids), self._outputs_of(prompt).longest, f"{self.path}:{line}")
        return self

    def describe(self) -> str:
        return f"prompts of {self.path.name} ({len(self.prompts)}); output {self.outputs.describe()} unless given there"

    def _outputs_of(self, prompt: _OwnPrompt) -> Lengths:
        own = prompt.output_len or prompt.max_tokens
        return Fixed(own) if own else self.outputs
