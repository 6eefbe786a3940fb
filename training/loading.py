"""Opens a saved model for the `relpos` command: complete, or refused in one sentence that says what is wrong."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

import relpos
from relpos.configuration import preset, presets
from relpos.pipeline_relpos import language_tags

from .allocator import keep_freed_memory

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class ModelError(ValueError):
    """A model that cannot be opened; the message is one sentence for the person who named it."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, with its tokenizer and the name that it was opened by.

    `source_prefix` is put before the tokens of every source: the tag of the target language, see `into_language`.
    """

    model: Any
    tokenizer: Any
    name: str
    source_prefix: tuple[int, ...] = ()

    @property
    def languages(self) -> list[str]:
        """The target languages to choose from, see `into_language`; none where the model has but one."""
        return list(language_tags(self.tokenizer))


def load_model(name: str) -> LoadedModel:
    """Open a sequence-to-sequence model with its tokenizer, on the accelerator where there is one.

    Args:
        name: a saved folder, or a model on the Hub as `user/name`.

    Raises:
        ModelError: nothing is there, a file is missing or cut off, or the weights do not fit the configuration.
    """
    check_folder(name)
    config = load_config(name)
    keep_freed_memory()
    try:
        # What does not fit is let through in silence here, and refused below with its names and sizes.
        with _quiet_library():
            model, info = AutoModelForSeq2SeqLM.from_pretrained(
                name, config=config, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
            )
            tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"The model {name} cannot be opened: {_first_sentence(error)}") from error
    _check_weights_fit(name, info)
    model.to(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu").eval()
    return LoadedModel(model=model, tokenizer=tokenizer, name=name)


def into_language(loaded: LoadedModel, language: str | None) -> LoadedModel:
    """The same model, told to translate into one of its languages.

    Args:
        loaded: the model.
        language: its code; a model of one target language needs none.

    Raises:
        ModelError: the model has several target languages and not this one, or a single one that is another.
    """
    tags = language_tags(loaded.tokenizer)
    if tags and language not in tags:
        what = f"does not translate into {language}" if language else "must be told which language to translate into"
        raise ModelError(f"The model {loaded.name} {what}; it knows {', '.join(tags)}.")
    if tags:
        return replace(loaded, source_prefix=(tags[language],))
    own = getattr(loaded.model.config, "target_language", None)
    if language and language != own:
        raise ModelError(f"The model {loaded.name} has one target language, {own or 'unnamed'}, and not {language}.")
    return loaded


def load_config(name: str) -> Any:
    """Read the configuration of a saved folder or of a model on the Hub; raises ModelError."""
    check_folder(name, complete=False)
    relpos.register()
    try:
        with _quiet_library():
            return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, StrictDataclassError) as error:
        where = "" if Path(name).is_dir() else " and is no folder here either"
        raise ModelError(f"The model {name} cannot be opened{where}: {_first_sentence(error)}") from error


def find_config(name: str) -> tuple[Any, Path | None]:
    """The configuration of a saved folder, a preset or a model on the Hub, in this order, and the folder if it has
    weights; raises ModelError."""
    folder = Path(name)
    if not folder.exists() and name in presets():
        return preset(name), None
    config = load_config(name)
    has_weights = folder.is_dir() and any(folder.glob("*.safetensors"))
    return config, folder if has_weights else None


def check_folder(name: str, *, complete: bool = True) -> None:
    """Raise ModelError unless `name` is a saved folder, or may be the name of a model on the Hub.

    A save that was interrupted leaves files out or cuts them off; the library would name the first file that it
    misses, or start from random weights.

    Args:
        name: what the user typed.
        complete: ask for whole weights and a tokenizer; otherwise only weights that are there must be whole.
    """
    folder = Path(name)
    if not folder.is_dir():
        if folder.exists():
            raise ModelError(f"The model {name} is a file; a saved model is a folder with a config.json in it.")
        if folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2:
            raise ModelError(f"The model folder {name} does not exist.")
        if len(folder.parts) != 2:
            raise ModelError(f"The model {name} is neither a folder nor the name of a model on the Hub (user/name).")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"The folder {name} holds no config.json, so it is not a saved model.")
    files = weight_files(folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing and (complete or len(files) > 1):
        raise ModelError(f"The model {name} is incomplete: {missing[0]} is missing.")
    if complete and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(f"The model {name} is incomplete: its tokenizer ({TOKENIZER_FILES[0]}) is missing.")
    for file in files:
        if (folder / file).is_file():
            read_shapes(folder / file)


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files that a saved folder must have: one, or the shards that its index lists."""
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return [WEIGHTS]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"The file {index} is not an index of weight files: {_first_sentence(error)}") from error


def read_shapes(file: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of every tensor in a safetensors file, from its header alone; raises ModelError."""
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
            return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise ModelError(f"The weight file {file} is cut off or damaged: {_first_sentence(error)}") from error


@contextmanager
def _quiet_library() -> Iterator[None]:
    """No progress bar over the weights, and no reports of what fails, which this module says in one sentence."""
    verbosity, progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if progress_bar:
            logging.enable_progress_bar()


def _check_weights_fit(name: str, info: dict[str, Any]) -> None:
    """Refuse weights that leave a parameter random or were trained with other sizes."""
    if info["mismatched_keys"]:
        key, saved, wanted = sorted(info["mismatched_keys"])[0]
        raise ModelError(
            f"The weights of {name} do not fit its config.json: {key} has the shape {list(saved)} in the weights "
            f"and {list(wanted)} by the configuration."
        )
    if info["missing_keys"]:
        raise ModelError(f"The weights of {name} are incomplete: {sorted(info['missing_keys'])[0]} is missing.")


def _first_sentence(error: Exception) -> str:
    """The first line of a library's message, which may go on with advice over several lines."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."
