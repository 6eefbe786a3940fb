"""Tokens as in the older papers' BLEU: Moses's, with German compounds split at their hyphens.

Vaswani et al. 2017 and Shaw et al. 2018 report BLEU of tokenized text. Moses's tokenizer cut translations and
references, then the parts of German compounds with a hyphen became tokens of their own, `rich-text` three of them:
`rich ##AT##-##AT## text`; multi-bleu.perl counted. Such scores are higher than sacreBLEU's and comparable with one
another only.
"""

import re
from collections.abc import Sequence

_COMPOUND = re.compile(r"(\S)-(\S)")


class TokenizerMissingError(ValueError):
    """The library that tokenizes is not installed; the message says what to install."""


def split_for_bleu(texts: Sequence[str], *, language: str) -> list[str]:
    """Tokens with spaces between.

    Args:
        texts: plain sentences.
        language: ISO 639 code, which the abbreviations and apostrophes depend on; German compounds are split.

    Raises:
        TokenizerMissingError: sacremoses is not installed.
    """
    tokenize = _moses(language).tokenize
    tokenized = [tokenize(text, return_str=True) for text in texts]
    if language != "de":
        return tokenized
    return [_COMPOUND.sub(r"\1 ##AT##-##AT## \2", text) for text in tokenized]


def check_installed() -> None:
    """Raise TokenizerMissingError before any work that would end in it."""
    _moses("en")


def _moses(language: str):
    try:
        from sacremoses import MosesTokenizer
    except ImportError:
        raise TokenizerMissingError("Tokenized BLEU needs Moses's tokenizer: pip install 'relpos[moses]'.") from None
    return MosesTokenizer(lang=language)
