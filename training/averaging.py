"""Averages the weights of checkpoints: `relpos average CHECKPOINTS -o OUT`.

Weights are read and written tensor by tensor, so that memory holds two tensors, however large the models and however
many there are.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .loading import check_folder, read_shapes, weight_files

# What a checkpoint holds that is not part of the averaged model: its weights, the state of its training, its own card.
_NOT_COPIED = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "trainer_state.json",
    "run_state.json",
    "recipe.yaml",
    "README.md",
    "card.json",
    "*.png",
    ".*",
)
# Fields of a configuration that say nothing about what the weights mean.
_INCIDENTAL = {"_name_or_path", "transformers_version", "longest_training_source"}


class AveragingError(ValueError):
    """Checkpoints that have no average; the message is one sentence for the user."""


def average_checkpoints(checkpoints: Sequence[str | Path], out: str | Path, *, force: bool = False) -> Path:
    """Write a model whose every weight is the mean of that weight in the checkpoints (Vaswani et al. 2017, section 6.1).

    The sum is taken in float64 and rounded once, to the checkpoints' own type. Everything but the weights (the
    configuration, the tokenizer, the model's code) is the last checkpoint's.

    Args:
        checkpoints: Saved folders of one model, two or more.
        out: The folder to write, which is there whole or not at all.
        force: Replace a model that `out` holds.

    Returns:
        The folder.

    Raises:
        AveragingError: Fewer than two checkpoints, one named twice, different configurations, tokenizers, names, shapes
            or types of weights, or `out` is taken or cannot be written.
        ModelError: A checkpoint is missing, incomplete or cut off.
    """
    folders, out = [Path(folder) for folder in checkpoints], Path(out)
    _check_out(out, folders, force=force)
    _check_alike(folders)
    staging = out.with_name(out.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        for file in folders[-1].iterdir():
            if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in _NOT_COPIED):
                shutil.copyfile(file, staging / file.name)
        with ExitStack() as stack:
            parts = [_open_weights(folder, stack) for folder in folders]
            for name in weight_files(folders[-1]):
                _write_average(folders[-1] / name, staging / name, parts)
        if force:
            shutil.rmtree(out, ignore_errors=True)
        os.replace(staging, out)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise AveragingError(
            f"The average could not be written to {out} ({reason}); the checkpoints are untouched."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _check_out(out: Path, folders: list[Path], *, force: bool) -> None:
    if len(folders) < 2:
        raise AveragingError(f"An average needs two checkpoints or more, not {len(folders)}.")
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        if resolved.count(folder) > 1:
            raise AveragingError(f"The checkpoint {folder.name} is named twice.")
    if out.resolve() in resolved:
        raise AveragingError(f"The output {out} is one of the checkpoints.")
    if not out.exists():
        return
    if not force:
        raise AveragingError(f"The output {out} exists; give --force to replace it.")
    if not (out / "config.json").is_file():
        raise AveragingError(f"The output {out} holds no model, so --force does not replace it.")


def _check_alike(folders: list[Path]) -> None:
    """Raise AveragingError, or ModelError, unless the checkpoints are whole and differ in nothing but numbers."""
    first, *others = folders
    for folder in folders:
        if not folder.is_dir():
            raise AveragingError(f"There is no checkpoint folder {folder}.")
        check_folder(str(folder))
    config, shapes = _config(first), _shapes(first)
    for other in others:
        if _tokenizer(first) != _tokenizer(other):
            raise AveragingError(
                f"{first} and {other} have different tokenizers, so that their embeddings have no average."
            )
        their_config, their_shapes = _config(other), _shapes(other)
        for field in sorted(config.keys() | their_config.keys()):
            if config.get(field) != their_config.get(field):
                raise AveragingError(
                    f"{first} and {other} are different models: {field} is {config.get(field)!r} in one and "
                    f"{their_config.get(field)!r} in the other."
                )
        for name in sorted(shapes.keys() | their_shapes.keys()):
            ours, theirs = shapes.get(name, "missing"), their_shapes.get(name, "missing")
            if ours != theirs:
                raise AveragingError(
                    f"{first} and {other} are different models: the weight {name} is {_described(ours)} in one and "
                    f"{_described(theirs)} in the other."
                )


def _tokenizer(folder: Path) -> Any:
    """What the folder's tokenizer makes of texts; None where it has none."""
    file = folder / "tokenizer.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in config.items() if name not in _INCIDENTAL}


def _shapes(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and type of every weight, whichever file it is in."""
    return {name: kind for file in weight_files(folder) for name, kind in read_shapes(folder / file).items()}


def _described(kind: tuple[list[int], str] | str) -> str:
    return kind if isinstance(kind, str) else f"{kind[1]} of {kind[0]}"


def _open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file that each weight of a checkpoint is in; `stack` closes them."""
    file_of = {}
    for name in weight_files(folder):
        file = stack.enter_context(safe_open(folder / name, framework="pt"))
        file_of |= dict.fromkeys(file.keys(), file)
    return file_of


def _write_average(template: Path, out: Path, parts: list[dict[str, Any]]) -> None:
    """Write a file of the same header as `template`, whose weights are the means of those in `parts`.

    A safetensors file is the length of its header in eight bytes, the header (JSON: type, shape and place of each
    tensor) and the tensors, one after the other. The library writes a file from tensors that are all in memory.
    """
    with template.open("rb") as file:
        length = file.read(8)
        header = file.read(struct.unpack("<Q", length)[0])
    places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
    with out.open("wb") as file:
        file.write(length + header)
        for name in sorted(places, key=lambda name: places[name]):
            mean = _mean(name, (part[name].get_tensor(name) for part in parts), count=len(parts))
            file.write(mean.reshape(-1).view(torch.uint8).numpy())
        os.fsync(file.fileno())


def _mean(name: str, tensors: Iterator[torch.Tensor], *, count: int) -> torch.Tensor:
    first = next(tensors)
    if not first.is_floating_point():
        if not all(torch.equal(first, other) for other in tensors):
            raise AveragingError(f"The weight {name} holds whole numbers that differ, which have no average.")
        return first
    total = first.to(torch.float64, copy=True)
    for tensor in tensors:
        total += tensor
    return (total / count).to(first.dtype)
