"""The conversations that workloads make: lengths, tokens, shared parts, files, and what is refused."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from experiments.workloads.catalog import workload_of
from experiments.workloads.conversation import Conversation, Room, Workload, random_tokens
from experiments.workloads.options import WorkloadOptions
from experiments.workloads.prompt_files import OwnPrompts, ShareGPT, TextLines
from experiments.workloads.synthetic import (
    PUBLISHED_SHAPES,
    Fixed,
    Lengths,
    Lognormal,
    Synthetic,
    Uniform,
    parse_lengths,
    published,
)
from experiments.workloads.trace import Trace
from pdserve.core.errors import CapacityExceeded, InvalidRequest

VOCAB_SIZE = 1000
ROOMY = Room(context_length=1 << 20, pool_tokens=1 << 20)


def draws(lengths: Lengths, count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [lengths.draw(rng) for _ in range(count)]


def made(workload: Workload, count: int, seed: int = 0) -> list[Conversation]:
    return list(workload.conversations(count, seed, VOCAB_SIZE))


def test_tokens_depend_on_their_key_alone() -> None:
    assert random_tokens("a", 50, 1000) == random_tokens("a", 50, 1000)
    assert random_tokens("a", 50, 1000) != random_tokens("b", 50, 1000)
    assert random_tokens("a", 80, 1000)[:50] == random_tokens("a", 50, 1000)
    assert set(random_tokens("a", 500, 7)) == set(range(7))
    assert random_tokens("a", 0, 7) == ()


def test_uniform_lengths_are_uniform() -> None:
    drawn = draws(Uniform(1, 10), 10_000)
    assert set(drawn) == set(range(1, 11))
    assert min(drawn.count(length) for length in range(1, 11)) > 900


def test_lognormal_lengths_have_their_mean_and_sigma() -> None:
    logs = [math.log(length) for length in draws(Lognormal(7.0, 1.36), 20_000)]
    assert statistics.mean(logs) == pytest.approx(7.0, abs=0.03)
    assert statistics.stdev(logs) == pytest.approx(1.36, rel=0.02)
    scaled = draws(Lognormal(7.0, 1.36, scale=0.1), 20_000)
    assert statistics.median(scaled) == pytest.approx(math.exp(7) / 10, rel=0.03)


def test_truncation_leaves_out_and_says_how_much() -> None:
    whole = Lognormal(7.0, 1.0)
    cut = Lognormal(7.0, 1.0, longest=whole.percentile(0.9))
    assert cut.share_cut == pytest.approx(0.1, abs=1e-3)
    assert f"10.0% outside 1 … {cut.longest} left out" in cut.describe()
    within = [length for length in draws(whole, 20_000) if length <= cut.longest]
    drawn = draws(cut, 20_000)
    assert statistics.median(drawn) == pytest.approx(statistics.median(within), rel=0.03), "nothing sits on the limit"
    assert 1 <= min(drawn) <= max(drawn) <= cut.longest
    assert whole.limited(cut.longest + 1, "input_len").longest == cut.longest + 1
    with pytest.raises(InvalidRequest, match=r"^input_len: 50% of the lengths .* scale the inputs by 0\.\d+"):
        whole.limited(round(whole.median), "input_len")


def test_lengths_are_parsed() -> None:
    assert parse_lengths("input_len", "128") == parse_lengths("input_len", "128:128") == Fixed(128)
    assert parse_lengths("input_len", "128:1024") == Uniform(128, 1024)
    for text in ("", "x", "1:2:3", "1.5", "0", "-1", "4:3", "0:3", "1:"):
        with pytest.raises(InvalidRequest, match=r"^input_len: "):
            parse_lengths("input_len", text)


def test_equal_seeds_give_equal_conversations_and_they_are_made_lazily() -> None:
    workload = Synthetic(Uniform(5, 50), Uniform(1, 9))
    assert made(workload, 5) == made(workload, 9)[:5]
    assert made(workload, 5) != made(workload, 5, seed=1)
    lazily = Synthetic(Fixed(1 << 20), Fixed(1)).conversations(1 << 60, 0, VOCAB_SIZE)
    assert len(next(lazily).turns[0].token_ids) == 1 << 20
    for conversation in made(workload, 20):
        (turn,) = conversation.turns
        assert conversation.salt is None
        assert 5 <= len(turn.token_ids) <= 50
        assert 1 <= turn.output_len <= 9
        assert max(turn.token_ids) < VOCAB_SIZE


def test_prefixes_are_shared() -> None:
    conversations = made(Synthetic(Fixed(10), Fixed(1), prefix_len=100, num_prefixes=3), 60)
    prompts = [conversation.turns[0].token_ids for conversation in conversations]
    assert {len(prompt) for prompt in prompts} == {110}
    assert len({prompt[:100] for prompt in prompts}) == 3
    assert len({prompt[100:] for prompt in prompts}) == 60
    assert len({conversation.salt for conversation in conversations} - {None}) == 1


def test_turns_have_pauses_between_them() -> None:
    workload = Synthetic(Fixed(10), Fixed(4), prefix_len=20, turns=3, pause_s=0.5)
    (conversation,) = made(workload, 1)
    assert [len(turn.token_ids) for turn in conversation.turns] == [30, 10, 10]
    assert [turn.pause_s for turn in conversation.turns] == [0.0, 0.5, 0.5]
    assert len({turn.token_ids[-10:] for turn in conversation.turns}) == 3
    assert workload.within(Room(20 + 3 * 14, 1 << 20)) == workload
    with pytest.raises(InvalidRequest, match="output_len: 4 after 58 tokens"):
        workload.within(Room(20 + 3 * 14 - 1, 1 << 20))


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_published_shapes_fit_small_services_with_a_stated_scale(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"scale the (in|out)puts by"):
        published(name).within(Room(1024, 1 << 20))
    small = published(name, 0.01, 0.1).within(Room(2048, 1 << 20))
    assert "× 0.01 tokens" in small.describe()
    assert "× 0.1 tokens" in small.describe()
    for conversation in made(small, 200):
        (turn,) = conversation.turns
        assert len(turn.token_ids) + turn.output_len <= 2048
    inputs = [len(c.turns[0].token_ids) for c in made(published(name, 0.1).within(ROOMY), 2000)]
    whole = published(name).inputs
    assert isinstance(whole, Lognormal)
    assert statistics.median(inputs) == pytest.approx(whole.median / 10, rel=0.1)


def test_input_and_output_are_independent() -> None:
    turns = [c.turns[0] for c in made(published("azure-conv", 0.1).within(ROOMY), 2000)]
    inputs = [math.log(len(turn.token_ids)) for turn in turns]
    assert abs(statistics.correlation(inputs, [math.log(turn.output_len) for turn in turns])) < 0.06


def trace_file(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def request(at_ms: float, length: int, ids: list[int], output: int = 10) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": ids}


def test_a_trace_shares_the_blocks_of_equal_hash_ids(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path / "t", request(3000, 1024, [7, 8]), "", request(3500, 1100, [7, 8, 9]), request(4000, 600, [7, 1], 30)
    )
    trace = Trace.read(path)
    assert trace.times_s == [0.0, 0.5, 1.0]
    first, second, third = (conversation.turns[0] for conversation in made(trace, 3))
    assert [len(turn.token_ids) for turn in (first, second, third)] == [1024, 1100, 600]
    assert second.token_ids[:1024] == first.token_ids
    assert third.token_ids[:512] == first.token_ids[:512]
    assert third.token_ids[512:] != first.token_ids[512:600]
    assert {conversation.salt for conversation in made(trace, 3)} == {"shared"}
    assert trace.first(1).times_s == [0.0]
    small = Trace.read(path, block_size=16)
    assert [len(c.turns[0].token_ids) for c in made(small, 3)] == [32, 35, 19]
    assert [c.turns[0].output_len for c in made(small, 3)] == [1, 1, 1]
    assert "all lengths × 0.03125" in small.describe()
    with pytest.raises(InvalidRequest, match=r"t:3 \(all fit with --block-size (\d+)") as refused:
        trace.within(Room(600, 1 << 20))
    fits = int(str(refused.value).split("--block-size ")[1].split(",")[0])
    Trace.read(path, block_size=fits).within(Room(600, 1 << 20))


def own_prompts(path: Path) -> OwnPrompts:
    return OwnPrompts.read(path, Fixed(9))


@pytest.mark.parametrize(
    ("reader", "line", "message"),
    [
        (Trace.read, "{", "expected {"),
        (Trace.read, "[1]", "expected {"),
        (Trace.read, request(1, 0, []), "input_length"),
        (Trace.read, request(1, 513, [1]), "1 hash_ids for an input_length of 513, which is 2 blocks"),
        (Trace.read, request(-1, 1, [1]), "timestamp"),
        (Trace.read, request(0.5, 1, [1]), "earlier than the one before it"),
        (Trace.read, {"timestamp": 1}, "input_length"),
        (own_prompts, {}, "has no prompt"),
        (own_prompts, {"prompt": "a", "token_ids": [1]}, "has both"),
        (own_prompts, {"prompt": 3}, "Expected `str`"),
        (own_prompts, {"token_ids": [-1]}, "token_ids"),
        (own_prompts, {"prompt": "a", "output_len": 0}, "output_len"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(tmp_path: Path, reader: Any, line: Any, message: str) -> None:
    fine = {"prompt": "fine"} if reader is own_prompts else request(1, 1, [1])
    path = trace_file(tmp_path / "lines.jsonl", fine, line)
    with pytest.raises(InvalidRequest) as error:
        reader(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)


def test_sharegpt_questions_are_sent_and_answers_measured(tmp_path: Path) -> None:
    def says(*texts: str) -> dict[str, Any]:
        speakers = ("human", "gpt")
        return {"conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(texts)], "id": "x"}

    path = tmp_path / "s.json"
    path.write_text(json.dumps([says("one", "a" * 40, "two", "b" * 8), says("only"), says("long" * 500, "c"), {}]))
    dialogues = ShareGPT.read(path, turns=2)
    assert len(dialogues.dialogues) == 2
    short = dialogues.within(Room(100, 1 << 20))
    assert (len(short.dialogues), short.left_out) == (1, 1)
    first, second = made(short, 2)  # again from the beginning
    assert first == second
    assert [turn.text for turn in first.turns] == ["one", "two"]
    assert [turn.output_len for turn in first.turns] == [10, 2]
    assert [c.turns[0].output_len for c in made(ShareGPT.read(path, 1, Fixed(7)), 2)] == [7, 7]
    orders = {tuple(c.turns[0].text for c in made(dialogues, 2, seed)) for seed in range(9)}
    assert len(orders) == 2
    with pytest.raises(CapacityExceeded, match="none of the conversations"):
        dialogues.within(Room(5, 1 << 20))
    for text in ("{}", "[1]", "[]", '[{"conversations": [{"from": "human"}]}]', "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(InvalidRequest, match=r"expected \[\{"):
            ShareGPT.read(path)


def test_lines_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("first line\n\nsecond\nthird and last\n")
    workload = TextLines.read(path, Fixed(10), Fixed(3))
    prompts = [conversation.turns[0].text for conversation in made(workload, 20)]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len(set(prompts)) > 10
    assert all(prompt.startswith(("first line\n", "second\n", "third and last\n")) for prompt in prompts)
    path.write_text("\n \n")
    with pytest.raises(InvalidRequest, match="has no lines"):
        TextLines.read(path, Fixed(1), Fixed(1))
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match="is not UTF-8 text"):
        TextLines.read(path, Fixed(1), Fixed(1))


def test_own_prompts(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path / "p", {"prompt": "hello", "output_len": 5}, {"token_ids": [1, 2], "max_tokens": 6}, {"prompt": "x"}
    )
    workload = own_prompts(path)
    assert workload.own_count == 3
    turns = [conversation.turns[0] for conversation in made(workload, 4)]
    assert [(turn.text, turn.token_ids, turn.output_len) for turn in turns] == [
        ("hello", (), 5), ("", (1, 2), 6), ("x", (), 9), ("hello", (), 5),
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="p:2: 6 after 2 tokens"):
        workload.within(Room(7, 1 << 20))
    with pytest.raises(InvalidRequest, match="p:2: token id 2 is not in the model's vocabulary of 2"):
        list(workload.conversations(3, 0, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "nope"}, "dataset: 'nope' is none of random, sharegpt"),
        ({"dataset": "sonnet"}, "dataset_path: the dataset sonnet reads a file"),
        ({"dataset": "trace", "dataset_path": Path("/no/such")}, "dataset_path: /no/such cannot be read: No such file"),
        ({"dataset_path": Path("x")}, "dataset_path: does not apply to the dataset random"),
        ({"dataset": "azure-code", "input_len": "5"}, "input_len: does not apply to the dataset azure-code"),
        ({"dataset": "azure-code", "scale": "0"}, "scale: '0' is no positive factor"),
        ({"dataset": "azure-code", "scale": "1:2:3"}, "scale: "),
        ({"dataset": "azure-code", "scale": "1e-9"}, None),
        ({"dataset": "azure-code", "scale": "1e9"}, "scale: next to none of the lengths"),
        ({"turns": 0}, "turns: 0 is below 1"),
        ({"pause_s": -1.0}, "pause: -1 is not"),
        ({"prefix_len": -1}, "prefix_len: -1 is below 0"),
        ({"num_prefixes": 2}, "num_prefixes: there is no prefix"),
        ({"prefix_len": 5, "num_prefixes": 0}, "num_prefixes: 0 is below 1"),
        ({"input_len": "9:3"}, "input_len: the range '9:3' ends before it begins"),
    ],
)
def test_options_that_are_wrong_are_named(options: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert all(len(c.turns[0].token_ids) == 1 for c in islice(made(workload_of(WorkloadOptions(**options)), 5), 5))
        return
    with pytest.raises(InvalidRequest) as error:
        workload_of(WorkloadOptions(**options))
    assert str(error.value).startswith(message)


def test_block_sizes_of_a_trace(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t", request(0, 1, [1]))
    for wrong in (0, 513):
        with pytest.raises(InvalidRequest, match=r"^block_size: "):
            workload_of(WorkloadOptions(dataset="trace", dataset_path=path, block_size=wrong))
    path.write_text("\n")
    with pytest.raises(InvalidRequest, match="has no requests"):
        Trace.read(path)


def test_room() -> None:
    Room(100, 100).check(60, 40)
    with pytest.raises(InvalidRequest, match=r"^input_len: 100 tokens .* use at most 99"):
        Room(100, 200).check(100, 1)
    with pytest.raises(InvalidRequest, match=r"^output_len: 41 after 60 .* use at most 40"):
        Room(100, 200).check(60, 41)
    with pytest.raises(CapacityExceeded, match=r"^input_len and output_len: 60 \+ 40"):
        Room(100, 99).check(60, 40)
