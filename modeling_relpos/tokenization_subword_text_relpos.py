"""The tokenizer of tensor2tensor's text problems (its SubwordTextEncoder), for models that were trained there.

It escapes every character that the vocabulary lacks by its number, which no fast tokenizer does, so there are no unknowns.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from .tokenization_relpos import RelPosTokenizer

_END = "_"
"""Ends every word. In text it is escaped as backslash and u, the backslash as two of them."""
_ESCAPING = set("\\_u;0123456789")
_ESCAPE = re.compile(r"\\u|\\\\|\\([0-9]+);")
_NO_CHARACTER = "\u3013"
"""What tensor2tensor writes for an escape whose number is no character."""


class RelPosSubwordTextTokenizer(RelPosTokenizer):
    """Cuts text into runs of letters and digits and runs of all else, and each of them into the longest pieces from left
    to right. A single space between two runs of letters and digits goes without saying.

    Args:
        source_vocabulary, target_vocabulary (`str` or `list[str]`): Pieces in the order of their ids; a JSON file or the
            list itself.
        add_source_eos (`bool`): End sources with `eos_token`.
        pad_token, eos_token (`str`): Special tokens, which no text contains.

    Raises:
        ValueError: A special token, or a character that escapes are written with, is not in a vocabulary.
    """

    vocab_files_names = {  # noqa: RUF012 (the library's own way)
        "source_vocabulary": "source_vocabulary.json",
        "target_vocabulary": "target_vocabulary.json",
    }

    def __init__(
        self,
        source_vocabulary: str | Sequence[str],
        target_vocabulary: str | Sequence[str],
        add_source_eos: bool = True,
        pad_token: str = "<pad>_",
        eos_token: str = "<EOS>_",
        **kwargs: Any,
    ):
        # the base class wants a token for unknown pieces, which never occur here, and none for the start
        kwargs |= {"unk_token": pad_token, "bos_token": None}
        super().__init__(
            source_segmenter=None,
            source_vocabulary=source_vocabulary,
            target_segmenter=None,
            target_vocabulary=target_vocabulary,
            add_source_eos=add_source_eos,
            pad_token=pad_token,
            eos_token=eos_token,
            **kwargs,
        )
        self._alphabets = {name: set("".join(side.vocabulary)) for name, side in self._sides.items()}
        self._longest = {name: max(map(len, side.vocabulary)) for name, side in self._sides.items()}
        for name, side in self._sides.items():
            if missing := sorted(_ESCAPING - side.ids.keys()):
                raise ValueError(f"The {name} vocabulary lacks {' '.join(missing)}, which escapes are written with.")

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [piece for word in split_words(text) for piece in self._cut(self._escape(word))]

    def _escape(self, word: str) -> str:
        """Spell a word with the characters of the current side's pieces, and end it."""
        alphabet = self._alphabets[self._side_name]
        word = word.replace("\\", "\\\\").replace(_END, "\\u")
        return "".join(c if c in alphabet and c != "\n" else f"\\{ord(c)};" for c in word) + _END

    def _cut(self, spelled: str) -> list[str]:
        """The longest piece again and again."""
        ids, longest = self._side.ids, self._longest[self._side_name]
        pieces = []
        start = 0
        while start < len(spelled):
            for end in range(min(start + longest, len(spelled)), start, -1):
                if spelled[start:end] in ids:
                    pieces.append(spelled[start:end])
                    start = end
                    break
            else:  # a character that has no piece of its own; tensor2tensor stops with an error here
                spelled = f"{spelled[:start]}\\{ord(spelled[start])};{spelled[start + 1 :]}"
        return pieces

    def _join(self, pieces: list[str]) -> str:
        words = [_ESCAPE.sub(_unescape, word) for word in "".join(pieces).split(_END)]
        return join_words([word for word in words if word])


def split_words(text: str) -> list[str]:
    """Runs of letters and digits and runs of all else, without the single spaces between two of the former."""
    words = ["".join(run) for _, run in groupby(text, key=_is_alphanumeric)]
    return [word for index, word in enumerate(words) if word != " " or index in (0, len(words) - 1)]


def join_words(words: Sequence[str]) -> str:
    """The inverse of `split_words`."""
    text = ""
    for before, word in zip(["", *words], words):
        is_gap = before and _is_alphanumeric(before[0]) and _is_alphanumeric(word[0])
        text += f" {word}" if is_gap else word
    return text


def _is_alphanumeric(character: str) -> bool:
    return unicodedata.category(character)[0] in "LN"


def _unescape(match: re.Match) -> str:
    if match[1] is None:
        return "_" if match[0] == "\\u" else "\\"
    try:
        return chr(int(match[1]))
    except (ValueError, OverflowError):
        return _NO_CHARACTER


__all__ = ["RelPosSubwordTextTokenizer"]
