"""A tokenizer with a source and a target side, for models of toolkits that keep the two apart.

Such models may have two vocabularies, or end only the target with `</s>`; an ordinary fast tokenizer can do neither.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizer

_SIDES = ("source", "target")


@dataclass(frozen=True)
class _Side:
    """One language's half: text to pieces by `segmenter`, pieces to ids by their place in `vocabulary`."""

    segmenter: Tokenizer | None
    vocabulary: list[str]
    ids: dict[str, int]


class RelPosTokenizer(PreTrainedTokenizer):
    """Tokenizes sources by one subword model and vocabulary, and targets (`text_target=`) by another.

    Decoding takes ids for those of a target, unless `use_source_tokenizer=True`. A piece that the vocabulary lacks is
    `unk_token`, and text that spells a special token is text (`split_special_tokens`).

    Args:
        source_segmenter, target_segmenter (`str` or `tokenizers.Tokenizer`): Cut text into pieces and put pieces
            together again; a tokenizers file or object, whose own ids and special tokens are not used. None where a
            subclass does this by itself.
        source_vocabulary, target_vocabulary (`str` or `list[str]`): Pieces in the order of their ids; a JSON file or the
            list itself.
        add_source_eos (`bool`): End sources with `eos_token`.
        add_target_eos (`bool`): End targets with `eos_token`.
        add_source_bos (`bool`): Begin sources with `bos_token`.
        unk_token, pad_token, eos_token, bos_token (`str`): Special tokens; those that both vocabularies have must have
            the same ids there, and both must have all but `bos_token`.

    Raises:
        ValueError: A special token is missing or has two ids, or a vocabulary holds a piece twice.
    """

    vocab_files_names = {  # noqa: RUF012 (the library's own way)
        f"{side}_{part}": f"{side}_{part}.json" for side in _SIDES for part in ("segmenter", "vocabulary")
    }
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    _auto_class = "AutoTokenizer"

    def __init__(
        self,
        source_segmenter: str | Tokenizer | None,
        source_vocabulary: str | Sequence[str],
        target_segmenter: str | Tokenizer | None,
        target_vocabulary: str | Sequence[str],
        add_source_eos: bool = False,
        add_target_eos: bool = True,
        add_source_bos: bool = False,
        unk_token: str = "<unk>",
        pad_token: str = "<blank>",
        eos_token: str = "</s>",
        bos_token: str | None = "<s>",
        **kwargs: Any,
    ):
        self._sides = {
            "source": _read_side("source", source_segmenter, source_vocabulary),
            "target": _read_side("target", target_segmenter, target_vocabulary),
        }
        self._of_thread = threading.local()
        self.add_source_eos = add_source_eos
        self.add_target_eos = add_target_eos
        self.add_source_bos = add_source_bos
        if not add_source_bos and any(str(bos_token) not in side.ids for side in self._sides.values()):
            bos_token = None  # the decoder's business alone
        # strings: a loaded folder hands over tokens with settings that do not concern this class
        self._reserved = {str(token) for token in (unk_token, pad_token, eos_token, bos_token) if token is not None}
        self._check_special_tokens()
        super().__init__(
            add_source_eos=add_source_eos,
            add_target_eos=add_target_eos,
            add_source_bos=add_source_bos,
            unk_token=unk_token,
            pad_token=pad_token,
            eos_token=eos_token,
            bos_token=bos_token,
            **{
                "padding_side": "right",
                "clean_up_tokenization_spaces": False,
                "split_special_tokens": True,
                **kwargs,
            },
        )

    def _check_special_tokens(self) -> None:
        source, target = (self._sides[name].ids for name in _SIDES)
        for token in sorted(self._reserved):
            here, there = source.get(token), target.get(token)
            if None not in (here, there) and here != there:
                raise ValueError(
                    f"The special token {token!r} has the id {here} in the source and {there} in the target."
                )
            if None in (here, there):
                raise ValueError(f"The special token {token!r} must be in both vocabularies.")

    def _add_tokens(self, new_tokens: list, special_tokens: bool = False) -> int:
        vocabularies = [self._sides[name].ids for name in _SIDES]
        for token in map(str, new_tokens):
            if not all(token in ids for ids in vocabularies):
                raise ValueError(f"The token {token!r} is not in both vocabularies, to which nothing can be added.")
        return super()._add_tokens(new_tokens, special_tokens=special_tokens)

    @property
    def vocab_size(self) -> int:
        """Size of the source vocabulary; `target_vocab_size` is the target's."""
        return len(self._sides["source"].vocabulary)

    @property
    def target_vocab_size(self) -> int:
        return len(self._sides["target"].vocabulary)

    def get_vocab(self) -> dict[str, int]:
        """Piece to id of the source, with the tokens that were added."""
        return self._sides["source"].ids | self._added_tokens_encoder

    def get_target_vocab(self) -> dict[str, int]:
        """Piece to id of the target, with the tokens that were added."""
        return self._sides["target"].ids | self._added_tokens_encoder

    def get_segmenter(self, side: str) -> Tokenizer | None:
        """The subword model of a side, "source" or "target"."""
        return self._sides[side].segmenter

    def get_vocabulary(self, side: str) -> list[str]:
        """The pieces of a side, "source" or "target", in the order of their ids."""
        return list(self._sides[side].vocabulary)

    @property
    def _side_name(self) -> str:
        """The current side of this thread: in a server, one may encode a source while another decodes a target."""
        return getattr(self._of_thread, "side", "source")

    @property
    def _side(self) -> _Side:
        return self._sides[self._side_name]

    def _switch_to_input_mode(self) -> None:
        self._of_thread.side = "source"

    def _switch_to_target_mode(self) -> None:
        self._of_thread.side = "target"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_of_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of_thread=threading.local())

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        pieces = self._side.segmenter.encode(text, add_special_tokens=False).tokens
        if not pieces and not any(self._ends()):
            return [str(self.unk_token)]  # no model can read nothing; OpenNMT-py does the same
        return [str(self.unk_token) if piece in self._reserved else piece for piece in pieces]

    def _convert_token_to_id(self, token: str) -> int:
        return self._side.ids.get(token, self._side.ids[str(self.unk_token)])

    def _convert_id_to_token(self, index: int) -> str:
        vocabulary = self._side.vocabulary
        return vocabulary[index] if 0 <= index < len(vocabulary) else str(self.unk_token)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Add what the current side's sequences begin and end with; the two of a pair are simply joined."""
        bos, eos = self._ends()
        return [self.bos_token_id] * bos + token_ids_0 + (token_ids_1 or []) + [self.eos_token_id] * eos

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """1 at tokens that `build_inputs_with_special_tokens` adds, 0 at others."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        bos, eos = self._ends()
        return [1] * bos + [0] * (len(token_ids_0) + len(token_ids_1 or [])) + [1] * eos

    def _ends(self) -> tuple[bool, bool]:
        """Whether sequences of the current side begin with `bos_token`, and whether they end with `eos_token`."""
        if self._side_name == "source":
            return self.add_source_bos, self.add_source_eos
        return False, self.add_target_eos

    def _decode(self, token_ids: int | list[int], use_source_tokenizer: bool = False, **kwargs: Any) -> str:
        before = self._side_name
        self._of_thread.side = "source" if use_source_tokenizer else "target"
        try:
            return super()._decode(token_ids, **kwargs)
        finally:
            self._of_thread.side = before

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Put pieces of the current side together; special tokens stand apart from text, between spaces."""
        parts, run = [], []
        for token in tokens:
            if token in self._added_tokens_encoder:
                parts += [self._join(run), token]
                run = []
            else:
                run.append(token)
        parts.append(self._join(run))
        return " ".join(part for part in parts if part)

    def _join(self, pieces: list[str]) -> str:
        if not pieces:
            return ""
        decoder = self._side.segmenter.decoder
        return decoder.decode(pieces) if decoder is not None else " ".join(pieces)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the segmenters and vocabularies of both sides; returns their paths."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        paths = {name: Path(save_directory, prefix + file) for name, file in self.vocab_files_names.items()}
        for name, side in self._sides.items():
            if side.segmenter is not None:
                side.segmenter.save(str(paths[f"{name}_segmenter"]))
            text = json.dumps(side.vocabulary, ensure_ascii=False, indent=0)
            paths[f"{name}_vocabulary"].write_text(text + "\n", encoding="utf-8")
        return tuple(str(path) for path in paths.values())


def _read_side(name: str, segmenter: str | Tokenizer | None, vocabulary: str | Sequence[str]) -> _Side:
    if segmenter is not None and not isinstance(segmenter, Tokenizer):
        segmenter = Tokenizer.from_file(str(segmenter))
    if isinstance(vocabulary, (str, Path)):
        vocabulary = json.loads(Path(vocabulary).read_text(encoding="utf-8"))
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    if len(ids) < len(vocabulary):
        twice = next(piece for index, piece in enumerate(vocabulary) if ids[piece] != index)
        raise ValueError(f"The {name} vocabulary holds {twice!r} twice.")
    return _Side(segmenter=segmenter, vocabulary=list(vocabulary), ids=ids)


__all__ = ["RelPosTokenizer"]
