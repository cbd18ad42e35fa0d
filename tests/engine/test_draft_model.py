"""What a draft model guesses, how few passes that takes, and that it changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from checkpoints.draft import resolve_draft
from checkpoints.source import resolve_model
from contract.engine import KVRole
from engine.core import CALM_STEPS
from engine.model.draft_model import DraftModel
from engine.model.runner import LaunchedStep, ModelRunner
from engine.scheduling.batch import LayerHook, ScheduledSeq, StepTooLarge
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.scheduling.speculation import MAX_DRAFTS, DraftContext
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import ConfigError
from tests.engine.harness import BLOCK, Outbox, make_core, make_runner, submit
from tests.random_models import greedy_tokens, save_random, save_random_model

BLOCKS = 64
PROMPT = [(7 * i) % 307 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "gqa")


class Passes(ModelRunner):
    """A runner that counts the tokens of each pass, and has too little memory for those of more than ``most``."""

    most = 10**9

    def __init__(self, runner: ModelRunner) -> None:
        self.__dict__.update(runner.__dict__)
        self.sizes: list[int] = []

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None = None) -> LaunchedStep:
        """See `ModelRunner`."""
        self.sizes.append(sum(len(seq.token_ids) for seq in seqs))
        if self.sizes[-1] > self.most:
            raise StepTooLarge("a test")
        return super().launch(seqs, hook)


@pytest.fixture
def passes(folder: Path) -> Passes:
    return Passes(make_runner(folder, BLOCKS))


def context(token_ids: Sequence[int], most: int, attempt_id: str = "r", first_block: int = 0) -> DraftContext:
    blocks = -(-(len(token_ids) + most) // BLOCK)
    return DraftContext(attempt_id, token_ids, list(range(first_block, first_block + blocks)), most)


def test_it_guesses_the_tokens_of_its_own_answer(folder: Path, passes: Passes) -> None:
    drafter, answer = DraftModel(passes, 512, 307), greedy_tokens(folder, PROMPT, 16)
    assert drafter.prepare([context(PROMPT, 5)], 100) == [5]
    assert passes.sizes == [len(PROMPT) - 1]  # the last token is computed with the first guess
    assert drafter.propose([context(PROMPT, 5)]) == [answer[:5]]
    assert passes.sizes[1:] == [1] * 5
    text = [*PROMPT, *answer[:6]]  # all right, and one more token: the last guess has no KV yet
    assert drafter.prepare([context(text, 3)], 0) == [3]
    assert drafter.propose([context(text, 3)]) == [answer[6:9]]
    assert passes.sizes[6:] == [2, 1, 1]


def test_wrong_guesses_are_computed_again(folder: Path, passes: Passes) -> None:
    drafter, answer = DraftModel(passes, 512, 307), greedy_tokens(folder, PROMPT, 3)
    drafter.prepare([context(PROMPT, 4)], 100)
    drafter.propose([context(PROMPT, 4)])
    text = [*PROMPT, *answer[:1], (answer[1] + 1) % 307]
    del passes.sizes[:]
    assert drafter.propose([context(text, 2)]) == [greedy_tokens(folder, text, 2)]
    assert passes.sizes == [1, 1]


def test_a_prompt_is_computed_in_parts(folder: Path, passes: Passes) -> None:
    drafter = DraftModel(passes, 512, 307)
    other = [(11 * i) % 307 for i in range(30)]
    both = [context(PROMPT, 2), context(other, 3, "other", 8)]
    assert drafter.prepare(both, 20) == [0, 0]
    assert drafter.prepare(both, 30) == [2, 0]
    assert drafter.prepare(both, 100) == [2, 3]
    assert passes.sizes == [20, 19 + 11, 18]
    assert drafter.propose(both) == [greedy_tokens(folder, PROMPT, 2), greedy_tokens(folder, other, 3)]
    assert passes.sizes[3:] == [2, 2, 1]


def test_what_was_forgotten_is_computed_again(passes: Passes) -> None:
    drafter = DraftModel(passes, 512, 307)
    drafter.prepare([context(PROMPT, 2)], 100)
    drafter.forget("r")
    assert drafter.prepare([context(PROMPT, 2)], 0) == [0]


@pytest.mark.parametrize(("context_length", "max_tokens"), [(50, 40), (512, 20)])
def test_requests_that_cannot_gain_are_left_out(folder: Path, context_length: int, max_tokens: int) -> None:
    """Those longer than the draft model's context, and long prompts with few tokens to come, in whose place others
    are tried."""
    config = SchedulerConfig(64, 8, 512, BLOCK, BLOCKS, prefix_caching=False)
    scheduler = Scheduler(config, MonotonicClock(), None, DraftModel(make_runner(folder, BLOCKS), context_length, 307))
    core, outbox = make_core(make_runner(folder, BLOCKS), scheduler, run_ahead=True)
    long = [(5 * i) % 307 for i in range(420)]
    core.take(submit("long", KVRole.LOCAL, long, 6, ignore_eos=True))
    core.take(submit("short", KVRole.LOCAL, PROMPT[:8], max_tokens, ignore_eos=True))
    while core.step():
        pass
    drafts = {name: sum(token.draft_tokens for token in tokens) for name, tokens in outbox.tokens.items()}
    assert drafts["long"] == 0
    assert drafts["short"] > 0
    assert outbox.token_ids["long"] == greedy_tokens(folder, long, 6)
    assert outbox.token_ids["short"] == greedy_tokens(folder, PROMPT[:8], max_tokens)


def test_ids_that_only_one_model_has(folder: Path, passes: Passes) -> None:
    answer = greedy_tokens(folder, PROMPT, 5)
    most = max(answer[:3])
    drafter = DraftModel(passes, 512, most)
    drafter.prepare([context(PROMPT, 5)], 100)
    assert drafter.propose([context(PROMPT, 5)]) == [answer[: answer.index(most)]]
    drafter.forget("r")
    drafter.prepare([context([*PROMPT[:-1], 307, 1], 2)], 100)
    assert drafter.propose([context([*PROMPT[:-1], 307, 1], 2)]) != [[]]


def test_it_guesses_nothing_without_memory(passes: Passes) -> None:
    """It tries again after a while, with less."""
    drafter = DraftModel(passes, 512, 307)
    passes.most = 20
    for expected in [0] * (CALM_STEPS + 1) + [0, 2]:
        assert drafter.prepare([context(PROMPT, 2)], 100) == [expected]
    assert passes.sizes == [39, 19, 19]
    passes.most = 0
    assert drafter.propose([context(PROMPT, 2)]) == [[]]
    for _ in range(CALM_STEPS):
        assert drafter.prepare([context(PROMPT, 2)], 100) == [0]
    passes.most = 10**9  # memory is back: passes become larger again
    del passes.sizes[:]
    for number in range(2 * CALM_STEPS):
        drafter.prepare([context(PROMPT, 2, str(number))], 100)
    assert (passes.sizes[0], passes.sizes[-1]) == (19, 39)


def served(folder: Path, draft: ModelRunner, run_ahead: bool, wanted: bool | None) -> tuple[Scheduler, Outbox]:
    config = SchedulerConfig(64, 8, 512, BLOCK, BLOCKS)
    drafter = DraftModel(draft, 512, 307)
    scheduler = Scheduler(config, MonotonicClock(), None, drafter)
    core, outbox = make_core(make_runner(folder, BLOCKS), scheduler, run_ahead)
    for number in range(3):
        core.take(submit(str(number), KVRole.LOCAL, PROMPT[number:], 40, ignore_eos=True, speculation=wanted))
    while core.step():
        pass
    for number in range(3):
        assert outbox.token_ids[str(number)] == greedy_tokens(folder, PROMPT[number:], 40)
    assert not drafter._computed
    drafted = [(step.step_started_s, step.drafted_s, step.sampled_s) for step in outbox.steps if step.drafted_s]
    assert bool(drafted) == bool(wanted)
    assert drafted == [tuple(sorted(times)) for times in drafted]
    return scheduler, outbox


@pytest.mark.parametrize("run_ahead", [False, True])
def test_tokens_are_the_same(folder: Path, tmp_path: Path, run_ahead: bool) -> None:
    same, outbox = served(folder, make_runner(folder, BLOCKS), run_ahead, wanted=True)
    assert same.load().accepted_draft_tokens == same.load().draft_tokens > 90
    assert len(outbox.steps) < 18
    other, _ = served(folder, make_runner(save_random_model(tmp_path, "mqa"), BLOCKS), run_ahead, wanted=True)
    assert other.load().accepted_draft_tokens < other.load().draft_tokens / 4
    plain, outbox = served(folder, make_runner(folder, BLOCKS), run_ahead, wanted=False)
    assert (plain.load().draft_tokens, len(outbox.steps)) == (0, 41)


def test_a_model_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    target, sizes = resolve_model(str(folder)), {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    save_random(tmp_path / "more", {"model_type": "llama", "vocab_size": 320, "num_attention_heads": 2, **sizes}, 1)
    save_random(tmp_path / "draft", {"model_type": "llama", "vocab_size": 307, "num_attention_heads": 2, **sizes}, 1)
    with pytest.raises(ConfigError, match=r"^engine\.speculation: the draft model more has other tokens than gqa"):
        resolve_draft(str(tmp_path / "more"), target, print)
    assert resolve_draft(str(tmp_path / "draft"), target, print).name == "draft"
    with pytest.raises(ConfigError, match=r"^engine\.speculation: neither off nor ngram, and no draft model: ngrm: no"):
        resolve_draft("ngrm", target, print)
    # With tokenizers, these decide: a vocabulary may be padded.
    vocabulary = {f"t{number}": number for number in range(300)}
    for name, tokens in (("target", vocabulary), ("more", vocabulary), ("draft", {**vocabulary, "t7": 8, "t8": 7})):
        path = tmp_path / name
        if name == "target":
            save_random(path, {"model_type": "llama", "vocab_size": 307, "num_attention_heads": 2, **sizes}, 2)
        Tokenizer(WordLevel(tokens, unk_token="t0")).save(str(path / "tokenizer.json"))
    target = resolve_model(str(tmp_path / "target"))
    assert resolve_draft(str(tmp_path / "more"), target, print).shape.vocab_size == 320
    with pytest.raises(ConfigError, match="other tokens"):
        resolve_draft(str(tmp_path / "draft"), target, print)
    (tmp_path / "draft" / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match=r"^engine\.speculation: .*draft/tokenizer\.json cannot be read: "):
        resolve_draft(str(tmp_path / "draft"), target, print)


def test_few_tokens_are_computed_with_the_guess(passes: Passes) -> None:
    """A pass of its own would cost more than it saves."""
    drafter = DraftModel(passes, 512, 307)
    assert drafter.prepare([context(PROMPT[: MAX_DRAFTS + 1], 2)], 0) == [2]
    assert drafter.prepare([context(PROMPT[: MAX_DRAFTS + 2], 2, "s")], 0) == [0]
    assert passes.sizes == []
