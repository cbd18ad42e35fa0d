"""Structures that outputs have to match, compiled by llguidance to masks over the vocabulary.

llguidance is written in Rust and releases the GIL while it compiles and while it computes a mask. Its budgets bound the
work, so that no grammar stops an engine: a mask takes a few milliseconds at most, and a compilation, which has a thread
of its own, some hundreds.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import StructuredOutputs

MAX_COMPILED = 32
"""Compiled structures that are kept, those used last. Each takes up to some megabytes."""
_LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=3_000, max_lexer_states=50_000, verbose_errors=False)
"""Usual masks use a hundredth of this. What exceeds it took 3 to 7 ms on one core."""
_WHITESPACE = r"[ \t\n\r]{1,32}"  # between the parts of JSON: enough to indent, and no endless output


class Matcher:
    """Follows one output that has to match a structure, token by token."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """Why the output cannot go on; empty while it can."""
        return _one_line(self._matcher.get_error())

    def append(self, token_id: int) -> None:
        """Add an output token. The end of the sequence may follow a whole output."""
        self._matcher.consume_token(token_id)

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """How many of ``token_ids`` may come next, one after the other."""
        return self._matcher.validate_tokens(list(token_ids))

    def mask(self) -> bytes:
        """The tokens that may come next: a bit for each token of the vocabulary, lowest bit first. After an `error` it
        may be anything."""
        return self._matcher.compute_bitmask()

    def after(self, token_ids: Sequence[int]) -> Matcher:
        """A copy, with ``token_ids`` added."""
        copy = Matcher(self._matcher.deep_copy())
        for token_id in token_ids:
            copy.append(token_id)
        return copy


class Structures:
    """Compiles structures for one model, and keeps those that were used last.

    ``tokenizer`` is its ``tokenizer.json`` (None: the model has none), ``vocab_size`` the width of its logits.
    ``woken`` is called, in another thread, after each result. Reading a tokenizer of 128,000 tokens takes about a
    second, in which the GIL is held: an engine does it before it is ready.
    """

    def __init__(
        self, tokenizer: Path | None, vocab_size: int, eos_token_ids: Collection[int], woken: Callable[[], None]
    ) -> None:
        self._woken = woken
        self._compiled: OrderedDict[StructuredOutputs, Matcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="structures")
        self._tokenizer: LLTokenizer | None = None
        self._lacking = "this model has no tokenizer.json, so no text to match"
        if tokenizer is None or not tokenizer.is_file():
            return
        if not eos_token_ids:
            self._lacking = "this model has no end-of-sequence token, by which a matching output would end"
            return
        text, eos = tokenizer.read_text(encoding="utf-8"), sorted(eos_token_ids)
        try:
            try:  # logits may be wider than the vocabulary of the tokenizer, or, rarely, the reverse
                self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
            except ValueError:
                self._tokenizer = LLTokenizer(text, eos_token=eos)
        except ValueError as error:
            self._lacking = f"this model's tokenizer is not supported for it: {_one_line(str(error))}"

    def match(self, wanted: StructuredOutputs, output_token_ids: Sequence[int]) -> Future[Matcher]:
        """A matcher for an output that begins with ``output_token_ids``. `InvalidRequest` if ``wanted`` cannot be
        compiled, or the output does not match it."""
        future = self._thread.submit(self._match, wanted, output_token_ids)
        future.add_done_callback(lambda _: self._woken())
        return future

    def _match(self, wanted: StructuredOutputs, output_token_ids: Sequence[int]) -> Matcher:
        matcher = self._compiled.get(wanted)
        if matcher is None:
            matcher = self._compiled[wanted] = self._compile(wanted)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(wanted)
        matcher = matcher.after(output_token_ids)
        if matcher.error:
            raise InvalidRequest(f"resume_token_ids: they do not match structured_outputs: {matcher.error}")
        return matcher

    def _compile(self, wanted: StructuredOutputs) -> Matcher:
        if self._tokenizer is None:
            raise InvalidRequest(f"structured_outputs: {self._lacking}")
        try:
            matcher = Matcher(LLMatcher(self._tokenizer, _grammar_of(wanted), log_level=0, limits=_LIMITS))
            if not matcher.error:
                matcher.mask()  # the first one takes longest
            error = matcher.error
        except ValueError as refused:  # of a schema that llguidance's own parser of JSON does not read
            error = _one_line(str(refused))
        if error:
            what = "the JSON schema" if wanted.kind == "json" else f"the {wanted.kind}"
            raise InvalidRequest(f"structured_outputs: {what} cannot be used: {error}")
        return matcher


def _grammar_of(wanted: StructuredOutputs) -> str:
    if wanted.kind == "json":
        return LLMatcher.grammar_from_json_schema(wanted.text, defaults={"whitespace_pattern": _WHITESPACE})
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(wanted.text)
    return json.dumps({"grammars": [{"lark_grammar": wanted.text}]})


def _one_line(text: str) -> str:
    return " ".join(text.partition("<state>")[0].split())[:300]
