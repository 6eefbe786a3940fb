"""Writes a Unigram vocabulary as a SentencePiece model, for toolkits that read nothing else."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .files import ConversionError

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_UNIGRAM = 1
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# Scores this low mark pieces that no text may match (relpos.training.subwords).
_RESERVED_SCORE = -1e4

# Steps of a normaliser as `tokenizers` writes them, and the field of SentencePiece's normaliser that says the same.
# None: of no effect there, or on no text but one that spells U+2581, which SentencePiece takes for a space.
_STEPS = {
    ("Replace", r"\A +| +\z", ""): "remove_extra_whitespaces",
    ("Replace", " {2,}", " "): "remove_extra_whitespaces",
    ("Replace", " ", _SPACE): None,  # all SentencePiece models of this writer escape spaces
    ("Replace", rf"\A{_SPACE}", _SPACE * 2): None,
    ("Replace", "\ue581", "\ue5810"): None,
    ("Replace", _SPACE, "\ue5811"): None,
    ("Prepend", _SPACE, ""): "add_dummy_prefix",
}


def write_sentencepiece(segmenter: Tokenizer, path: Path) -> None:
    """Write the vocabulary and normalisation of a Unigram segmenter as a SentencePiece model.

    The model cuts text into the same pieces. Text that spells U+2581 is the exception: SentencePiece reads a space.

    Raises:
        ConversionError: The segmenter is not of type Unigram, or normalises text in a way that SentencePiece cannot.
    """
    try:
        from transformers.convert_slow_tokenizer import import_protobuf

        messages = import_protobuf()
    except ImportError as error:
        raise ConversionError(
            "Writing a SentencePiece model needs protobuf: pip install 'relpos[sentencepiece]'."
        ) from error
    state = json.loads(segmenter.to_str())
    if state["model"]["type"] != "Unigram":
        raise ConversionError(
            f"A SentencePiece model is written from a Unigram vocabulary, and this one is of type {state['model']['type']}."
        )
    model = messages.ModelProto()
    _write_pieces(model, state["model"])
    _write_normalizer(model.normalizer_spec, state)
    path.write_bytes(model.SerializeToString())


def _write_pieces(model: Any, unigram: dict[str, Any]) -> None:
    spec = model.trainer_spec
    spec.model_type = _UNIGRAM
    spec.vocab_size = len(unigram["vocab"])
    spec.byte_fallback = unigram["byte_fallback"]
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = unigram["unk_id"], -1, -1, -1
    for index, (text, score) in enumerate(unigram["vocab"]):
        piece = model.pieces.add()
        piece.piece, piece.score, piece.type = text, score, _NORMAL
        if index == unigram["unk_id"]:
            spec.unk_piece, piece.type = text, _UNKNOWN
        elif unigram["byte_fallback"] and _BYTE_PIECE.fullmatch(text):
            piece.type = _BYTE
        elif score <= _RESERVED_SCORE:
            piece.type = _CONTROL
        for kind, names in (("bos", ("<s>",)), ("eos", ("</s>",)), ("pad", ("<pad>", "<blank>"))):
            if piece.type == _CONTROL and text in names:
                setattr(spec, f"{kind}_id", index)
                setattr(spec, f"{kind}_piece", text)


def _write_normalizer(spec: Any, state: dict[str, Any]) -> None:
    spec.name = "relpos"
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    spec.escape_whitespaces = True
    for step in _flatten(state["normalizer"], "normalizers"):
        if step["type"] == "Precompiled":
            spec.precompiled_charsmap = base64.b64decode(step["precompiled_charsmap"])
            continue
        pattern = step.get("prepend") or next(iter(step.get("pattern", {"": ""}).values()))
        key = step["type"], pattern, step.get("content", "")
        if key not in _STEPS:
            raise ConversionError(f"SentencePiece has nothing like the normaliser {step} of this vocabulary.")
        if _STEPS[key]:
            setattr(spec, _STEPS[key], True)
    for step in _flatten(state["pre_tokenizer"], "pretokenizers"):
        if step["type"] != "Metaspace" or step["replacement"] != _SPACE:
            raise ConversionError(f"SentencePiece has nothing like the pre-tokenizer {step} of this vocabulary.")
        spec.add_dummy_prefix = spec.add_dummy_prefix or step["prepend_scheme"] != "never"


def _flatten(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the one that there is."""
    if step is None:
        return []
    return [part for member in step[members] for part in _flatten(member, members)] if members in step else [step]
