"""Reads the files of a CTranslate2 folder, without CTranslate2: `model.bin`, `config.json`, the vocabularies, and the
tokenizer that an export by RelPos has left there."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .files import ConversionError, read_json, read_lines

_DTYPES = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]
"""In the order of CTranslate2's enumeration."""
_PARAMETERS = {"gamma": "weight", "beta": "bias"}
_OLDEST_VERSION, _NEWEST_VERSION = 4, 6


@dataclass(frozen=True)
class Binary:
    """What a `model.bin` holds: the kind of model, and its variables by name, dots for slashes, dequantised."""

    kind: str
    variables: dict[str, torch.Tensor]


def read_binary(path: Path) -> Binary:
    """Read a `model.bin`, laid out as ctranslate2/specs/model_spec.py writes it.

    Raises:
        ConversionError: There is no such file, it is of an unknown version, or it is cut off.
    """
    try:
        with path.open("rb") as file:
            reader = _Reader(file, path)
            binary = reader.read()
            if file.read(1):
                raise ConversionError(f"The file {path} goes on after its end, so it is damaged.")
            return binary
    except OSError as error:
        raise ConversionError(f"The file {path} cannot be read: {error.strerror}.") from error


class _Reader:
    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path

    def read(self) -> Binary:
        version = self._number("I")
        if not _OLDEST_VERSION <= version <= _NEWEST_VERSION:
            raise ConversionError(
                f"The file {self._path} is of version {version}; versions {_OLDEST_VERSION} to {_NEWEST_VERSION} are known."
            )
        kind = self._string()
        self._number("I")  # the revision of the kind
        variables = dict(self._variable() for _ in range(self._number("I")))
        for _ in range(self._number("I")):
            alias, name = self._string(), self._string()
            if name not in variables:
                raise ConversionError(
                    f"The file {self._path} is damaged: {alias} stands for {name}, which is not there."
                )
            variables[alias] = variables[name]
            if f"{name}_scale" in variables:
                variables[f"{alias}_scale"] = variables[f"{name}_scale"]
        plain = {plain_name(name): tensor for name, tensor in _dequantize(variables).items()}
        return Binary(kind=kind, variables=plain)

    def _variable(self) -> tuple[str, torch.Tensor]:
        name = self._string()
        shape = [self._number("I") for _ in range(self._number("B"))]
        kind = self._number("B")
        if kind >= len(_DTYPES):
            raise ConversionError(f"The file {self._path} is damaged: the weight {name} has the unknown type {kind}.")
        data = bytearray(self._bytes(self._number("I")))
        tensor = torch.frombuffer(data, dtype=_DTYPES[kind]) if data else torch.empty(0, dtype=_DTYPES[kind])
        try:
            return name, tensor.reshape(shape)
        except RuntimeError as error:
            raise ConversionError(
                f"The file {self._path} is damaged: {name} does not fill its shape {shape}."
            ) from error

    def _string(self) -> str:
        text = self._bytes(self._number("H"))
        try:
            return text.removesuffix(b"\0").decode()
        except UnicodeDecodeError as error:
            raise ConversionError(f"The file {self._path} is damaged: a name in it is not UTF-8.") from error

    def _number(self, layout: str) -> int:
        return struct.unpack("<" + layout, self._bytes(struct.calcsize(layout)))[0]

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ConversionError(f"The file {self._path} is cut off, or it is no CTranslate2 model.")
        return data


def _dequantize(variables: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Integer weights divided by their scale, of every row (int8) or of all (int16); others as they are."""
    plain = {}
    for name, tensor in variables.items():
        scale = variables.get(f"{name}_scale")
        if scale is not None:
            scale = scale.float()
            plain[name] = tensor.float() / (scale[:, None] if scale.dim() else scale)
        elif tensor.dim() and not tensor.is_floating_point():
            raise ConversionError(f"The weight {name} is quantised in a way that is not known: it has no scale.")
        elif not (name.endswith("_scale") and name.removesuffix("_scale") in variables):
            plain[name] = tensor
    return plain


def plain_name(name: str) -> str:
    """A variable as the key table knows it: modules joined by dots, and weight and bias in LayerNorm too."""
    module, _, parameter = name.replace("/", ".").rpartition(".")
    module = "encoder.embeddings_0" if module == "encoder.embeddings" else module  # as older versions have it
    return f"{module}.{_PARAMETERS.get(parameter, parameter)}".removeprefix(".")


def read_options(folder: Path) -> dict[str, Any]:
    """What `config.json` says, with CTranslate2's defaults; models of version 2 have no such file. An export by RelPos
    also says how long the sources of its training were.

    Raises:
        ConversionError: It is not JSON, or not an object.
    """
    defaults = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "decoder_start_token": "<s>",
        "add_source_bos": False,
        "add_source_eos": False,
        "layer_norm_epsilon": None,
        "longest_training_source": None,
    }
    path = folder / "config.json"
    if not path.is_file():
        return defaults
    options = read_json(path, "file")
    if not isinstance(options, dict):
        raise ConversionError(f"The file {path} must hold an object.")
    return {name: options.get(name, default) for name, default in defaults.items()}


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model; raises ConversionError where its files are missing or damaged."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # damaged files raise KeyError, TypeError, AttributeError and bare Exception, too
        raise ConversionError(
            f"The tokenizer in {folder} cannot be opened: one of its files is missing or damaged; export the model anew."
        ) from error


def read_vocabularies(folder: Path) -> tuple[list[str], list[str]]:
    """Tokens of source and target in the order of their ids; one list for both where the folder has one.

    Raises:
        ConversionError: A vocabulary is missing or damaged.
    """
    shared = _read_vocabulary(folder, "shared")
    if shared is not None:
        return shared, shared
    sides = _read_vocabulary(folder, "source"), _read_vocabulary(folder, "target")
    for side, vocabulary in zip(("source", "target"), sides):
        if vocabulary is None:
            raise ConversionError(f"The folder {folder} holds no {side}_vocabulary.json and no shared_vocabulary.json.")
    return sides


def _read_vocabulary(folder: Path, name: str) -> list[str] | None:
    """A vocabulary of JSON, or of one token a line as before version 3; None if there is none."""
    path = folder / f"{name}_vocabulary.json"
    if path.is_file():
        tokens = read_json(path, "file")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ConversionError(f"The file {path} must hold a list of tokens.")
        return tokens
    path = path.with_suffix(".txt")
    return read_lines(path, "vocabulary") if path.is_file() else None
