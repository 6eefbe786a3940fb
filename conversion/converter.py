"""The shape of every conversion into RelPos: read, list what cannot be expressed, rename by a table, write whole or not
at all.

A toolkit is a subclass of `Converter` in a module of its own, `<toolkit>_format.py`. Opening the source fills the object;
`convert_model` then asks for its obstacles, and only where there are none for configuration, weights and tokenizer.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from relpos import RelPosConfig, RelPosForConditionalGeneration
from relpos.model_cards import write_card

from .files import ConversionError, new_folder

KeyTable = Mapping[str, str | tuple[str, ...] | None]
"""Foreign name to own name, of one weight or of a module with all its weights (`.weight`, `.bias`); `*` stands for the
number of a layer. A tuple names the equal parts that fused weights are split into along their first axis, and None what
RelPos computes or does not need."""


@dataclass(frozen=True)
class Decoding:
    """How the source decodes, in the terms of Transformers' `GenerationConfig`.

    Attributes:
        settings: Fields of `GenerationConfig`, such as `num_beams` and `length_penalty`.
        notes: Sentences for the model card on what was translated how, and on what could not be.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Converter(ABC):
    """A foreign model, opened. Subclasses read their files in `__init__`, whose keyword-only arguments are the options
    that they take (`convert_model` refuses others), and raise `ConversionError` for what is missing or damaged."""

    toolkit: ClassVar[str]
    """The toolkit's name as its users write it."""

    def __init__(self, source: Path):
        self.source = source

    @abstractmethod
    def obstacles(self) -> list[str]:
        """Every option of the model that RelPos cannot express, as "name=value" with the reason; empty if none."""

    @abstractmethod
    def config(self) -> RelPosConfig:
        """The configuration, with the special tokens of `tokenizer`."""

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """Tensors under RelPos's names. Tied ones may be there or not; the dtype does not matter."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A tokenizer that gives the ids which the model was trained on, `</s>` at the end where the model saw one."""

    def decoding(self) -> Decoding:
        """How the source decodes, as far as its files say."""
        return Decoding()

    def facts(self) -> dict[str, Any]:
        """What the source says of itself, for the model card (see `relpos.model_cards`): languages, steps, ..."""
        return {}


def convert_model(
    converter: Converter, out: Path, *, force: bool = False, facts: Mapping[str, Any] | None = None
) -> Path:
    """Write a foreign model as a RelPos folder: config, weights, tokenizer, generation config and a card.

    Args:
        converter: The opened source.
        out: The folder to write, which appears whole or not at all.
        force: Replace `out` where it is a saved model.
        facts: More for the model card, which wins over what the source says.

    Returns:
        `out`.

    Raises:
        ConversionError: `out` is taken, the model has options that RelPos cannot express (all are named), or its
            weights do not fit its options.
    """
    refuse(converter.obstacles(), f"The {converter.toolkit} model {converter.source}")
    config, tokenizer = _config_and_tokenizer(converter)
    decoding = converter.decoding()
    facts = {"name": out.resolve().name, **card_facts(converter, decoding), **(facts or {})}
    model = build_model(config, converter.weights())
    for side in ("source_language", "target_language"):
        if facts.get(side):
            setattr(model.config, side, facts[side])
    model.generation_config = GenerationConfig.from_model_config(config)
    model.generation_config.update(**decoding.settings)
    with new_folder(out, force=force) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_card(folder, facts)
    return out


def _config_and_tokenizer(converter: Converter) -> tuple[RelPosConfig, PreTrainedTokenizerBase]:
    """Both, which belong together; raises ConversionError for options and vocabularies that no model can have."""
    try:
        config, tokenizer = converter.config(), converter.tokenizer()
    except ConversionError:
        raise
    except KeyError as error:
        raise ConversionError(f"The {converter.toolkit} model {converter.source} has no {error.args[0]}.") from error
    except (ValueError, StrictDataclassError) as error:
        raise ConversionError(f"The {converter.toolkit} model {converter.source} is inconsistent: {error}") from error
    check_vocabulary(config, tokenizer)
    return config, tokenizer


def card_facts(converter: Converter, decoding: Decoding) -> dict[str, Any]:
    """Where the model came from, for its card."""
    facts = converter.facts()
    notes = [*decoding.notes, *facts.get("notes", ())]
    return {**facts, "origin": f"{converter.toolkit}, `{converter.source.name}`", "notes": notes}


def refuse(obstacles: Sequence[str], subject: str) -> None:
    """Raise ConversionError that names all obstacles, where there are any."""
    if obstacles:
        raise ConversionError(f"{subject} cannot be expressed: {'; '.join(obstacles)}.")


def rename(weights: Mapping[str, torch.Tensor], table: KeyTable) -> dict[str, torch.Tensor]:
    """Give foreign weights their own names.

    Args:
        weights: Foreign name to tensor; names are modules joined by dots.
        table: See `KeyTable`. The entry of a weight goes before that of its module, and earlier entries before later.

    Returns:
        Own name to tensor; fused weights are split.

    Raises:
        ConversionError: The table has no place for a weight, or a fused weight does not divide.
    """
    renamed: dict[str, torch.Tensor] = {}
    unknown = []
    for name, tensor in weights.items():
        found = own_names(name, table)
        if found is None:
            unknown.append(name)
        elif found:
            renamed |= _split(tensor, found, name)
    refuse([f"RelPos has no place for the weight {name}" for name in unknown], "The model")
    return renamed


def own_names(foreign: str, table: KeyTable) -> list[str] | None:
    """The names of a foreign weight here: several for a fused one, none if it is not needed, None if it is unknown."""
    module, _, parameter = foreign.rpartition(".")
    found = _look_up(foreign, table, ending="")
    return _look_up(module, table, ending=f".{parameter}") if found is None else found


def build_model(config: RelPosConfig, weights: Mapping[str, torch.Tensor]) -> RelPosForConditionalGeneration:
    """A model with exactly these weights, in float32; nothing is left at random.

    Raises:
        ConversionError: A weight is missing, is not the configuration's, has another shape, or should be tied to one
            that it differs from.
    """
    with torch.device("meta"):
        model = RelPosForConditionalGeneration(config)
    weights = dict(weights)
    for name, shared in model.all_tied_weights_keys.items():
        if name in weights and not torch.equal(weights[name], weights.setdefault(shared, weights[name])):
            raise ConversionError(f"The weights do not fit the model's options: {name} should be the same as {shared}.")
        weights.pop(name, None)
    _check_shapes(weights, model)
    state = {name: tensor.detach().to(torch.float32, copy=True).contiguous() for name, tensor in weights.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = torch.float32
    return model.eval()


def _check_shapes(weights: Mapping[str, torch.Tensor], model: RelPosForConditionalGeneration) -> None:
    """Refuse weights that are not the model's own, tied ones aside, in number and shape."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in model.all_tied_weights_keys:
        del expected[name]
    problems = [f"{name} is missing" for name in expected if name not in weights]
    problems += [f"{name} is not part of the model" for name in weights if name not in expected]
    problems += [
        f"{name} has the shape {list(weights[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in weights and list(weights[name].shape) != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ConversionError(f"The weights do not fit the model's options: {'; '.join(problems[:3])}{more}.")


def check_vocabulary(config: RelPosConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConversionError where the tokenizer has ids that the embeddings do not have."""
    sides = {"source": (len(tokenizer), config.vocab_size)}
    sides["target"] = (getattr(tokenizer, "target_vocab_size", len(tokenizer)), config.decoder_vocab_size)
    for side, (tokens, embedded) in sides.items():
        if tokens > embedded:
            raise ConversionError(
                f"The tokenizer has {tokens} {side} tokens and the model embeds {embedded}: they do not belong together."
            )


def both_sides(option: str, paths: Sequence[Path]) -> tuple[Path, Path] | None:
    """The files of source and target from an option that takes both, or the one of both; None where it was not given.

    Raises:
        ConversionError: There are more than two.
    """
    if len(paths) > 2:
        raise ConversionError(
            f"--{option} takes one file, or one of the source and one of the target, not {len(paths)}."
        )
    return (Path(paths[0]), Path(paths[-1])) if paths else None


def require_weights(weights: Mapping[str, torch.Tensor], names: Iterable[str], complaint: str) -> None:
    """Raise ConversionError, which begins with `complaint`, where a weight is missing."""
    for name in names:
        if name not in weights:
            raise ConversionError(f"{complaint}: it has no weight {name}.")


def count_layers(weights: Iterable[str], prefix: str) -> int:
    """How many layers weights have whose names go on with a number, from 0, after a prefix.

    Raises:
        ConversionError: A number is missing, or is not written as a number is.
    """
    parts = {name[len(prefix) :].partition(".")[0] for name in weights if name.startswith(prefix)}
    numbers = {part for part in parts if part.isdecimal()}
    expected = {str(number) for number in range(len(numbers))}
    if numbers != expected:
        raise ConversionError(
            f"The weights {prefix}* must be numbered from 0 to {len(numbers) - 1}, and {min(expected - numbers)} is missing."
        )
    return len(numbers)


def _look_up(name: str, table: KeyTable, *, ending: str) -> list[str] | None:
    for foreign, own in table.items():
        match = re.fullmatch(re.escape(foreign).replace(r"\*", r"(\d+)"), name)
        if match and own is None:
            return []
        if match:
            return [_fill(part, match) + ending for part in ([own] if isinstance(own, str) else own)]
    return None


def _fill(own: str, match: re.Match) -> str:
    """Put the layer numbers of a match in the place of the stars."""
    for number in match.groups():
        own = own.replace("*", number, 1)
    return own


def _split(tensor: torch.Tensor, names: list[str], foreign: str) -> dict[str, torch.Tensor]:
    if len(names) == 1:
        return {names[0]: tensor}
    if tensor.shape[0] % len(names):
        raise ConversionError(
            f"The weight {foreign} of shape {list(tensor.shape)} does not divide into {len(names)} equal parts."
        )
    return dict(zip(names, tensor.chunk(len(names)), strict=True))
