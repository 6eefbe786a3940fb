"""What translating and scoring share: sentences as tokens, and the checks of what they are given."""

from typing import Any

from .loading import LoadedModel


class TranslationError(ValueError):
    """Input or options that cannot be translated or scored with; the message is one sentence for the user."""


def check_options(**options: int | None) -> None:
    """Raise TranslationError for the first option that is given and below 1."""
    for option, value in options.items():
        if value is not None and value < 1:
            raise TranslationError(f"{option} is {value}; it must be at least 1.")


def tokenize(loaded: LoadedModel, sentences: list[str], *, as_target: bool = False) -> list[list[int]]:
    """Token ids of every sentence, whole whatever its length.

    Args:
        as_target: for the decoder, by a tokenizer that has two vocabularies.
    """
    if not sentences:
        return []
    side = {"text_target" if as_target else "text": sentences}
    # verbose=False: model_max_length is a habit of other models, relative positions have no ceiling.
    token_ids = loaded.tokenizer(**side, truncation=False, verbose=False)["input_ids"]
    return token_ids if as_target else [[*loaded.source_prefix, *ids] for ids in token_ids]


def check_lengths(loaded: LoadedModel, token_ids: list[list[int]], *, side: str = "source") -> None:
    """Refuse a sentence that a table of learned absolute positions cannot number."""
    config: Any = loaded.model.config
    longest = max(map(len, token_ids), default=0)
    if getattr(config, "absolute_position", None) == "learned" and longest > config.max_position_embeddings:
        raise TranslationError(
            f"A {side} of {longest} tokens is too long for {loaded.name}, whose learned absolute positions end at "
            f"{config.max_position_embeddings}."
        )
