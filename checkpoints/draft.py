"""Finds a draft model, whose tokens have to be those of the model that it guesses for. Does not import torch."""

from __future__ import annotations

from checkpoints.hub import Check, Report
from checkpoints.source import TOKENIZER, ModelSource, resolve_model
from pdserve.core.errors import ConfigError, ModelError


def resolve_draft(
    path: str, target: ModelSource, report: Report | None = None, check: Check = lambda: None
) -> ModelSource:
    """The model at ``path`` (see `resolve_model`), which is to guess tokens of ``target``. ConfigError if there is
    none, or if its ids stand for other tokens."""
    try:
        draft = resolve_model(path, report, check)
    except ModelError as error:
        raise ConfigError(f"engine.speculation: neither off nor ngram, and no draft model: {error}") from None
    vocabularies = _vocabulary(draft), _vocabulary(target)
    if None in vocabularies:
        differ = draft.shape.vocab_size != target.shape.vocab_size
    else:
        differ = vocabularies[0] != vocabularies[1]
    if differ:
        raise ConfigError(
            f"engine.speculation: the draft model {draft.name} has other tokens than {target.name}; "
            "name a model of the same family"
        )
    return draft


def _vocabulary(source: ModelSource) -> dict[str, int] | None:
    """The id of each token; None if there is no tokenizer."""
    if source.folder is None or not (source.folder / TOKENIZER).exists():
        return None
    from tokenizers import Tokenizer

    try:
        ids: dict[str, int] = Tokenizer.from_file(str(source.folder / TOKENIZER)).get_vocab()
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise ConfigError(f"engine.speculation: {source.folder / TOKENIZER} cannot be read: {error}") from None
    return ids
