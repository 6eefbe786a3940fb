"""Recipes: the fields of a training run, read from a YAML file and the command line.

Fields are those of `ModelArguments`, `DataArguments`, `TranslationTrainingArguments` (which are Transformers' own and a
few more) and of `RelPosConfig`. A recipe can start from another one, `extends: NAME`, and leave fields to the command
line, `FIELD: ???`.
"""

import difflib
import json
import math
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import relpos
from relpos.configuration import preset, presets, recipe, recipes

from .corpus import BUNDLED
from .loading import check_folder
from .trainer import TranslationTrainingArguments

RECIPE_FILE = "recipe.yaml"
"""Every field that was given is written into the run's folder under this name, as a recipe that repeats the run."""

_MISSING = "???"

# What says where, by what machine and how closely watched a run was, not what was trained.
_OF_THIS_RUN = {
    "output_dir",
    "overwrite",
    "resume_from_checkpoint",
    "preprocessing_num_workers",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "disable_tqdm",
    "report_to",
    "run_name",
    "save_total_limit",
    "push_to_hub",
    "hub_model_id",
    "hub_token",
    "hub_private_repo",
}


# Trainer's fields that would be ignored, since batches are cut by tokens.
_WITHOUT_EFFECT = {
    "per_device_train_batch_size": "max_tokens, the tokens of a batch",
    "auto_find_batch_size": "max_tokens, the tokens of a batch, and take less of them where memory runs out",
    "train_sampling_strategy": "sort_window, the pairs that are sorted by length together",
    "dataloader_drop_last": "max_tokens, which is the size of the last batch, too",
}


class RecipeError(ValueError):
    """Fields that no training can start from; the message is one sentence that names the field."""


@dataclass
class ModelArguments:
    """What is trained."""

    model: str = field(
        default="base", metadata={"help": "A preset to start from anew, or the folder of a saved model to fine-tune."}
    )
    vocab_size: int = field(
        default=32768, metadata={"help": "Tokens of the vocabulary to train; special tokens and bytes are among them."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder of a tokenizer, or SentencePiece .model file, instead of training one."}
    )


@dataclass
class DataArguments:
    """What it is trained on. Corpora are named as `relpos.training.corpus.parse_corpora` takes them."""

    train_corpus: list[str] = field(
        default_factory=lambda: [BUNDLED],
        metadata={
            "help": "Training corpora, each a path or name, or SOURCE-TARGET=NAME for another pair of languages; or the "
            "two plain or SGM files of one."
        },
    )
    validation_corpus: list[str] | None = field(
        default=None, metadata={"help": "Validation corpora; the bundled corpus brings its own."}
    )
    source_lang: str = field(default="en", metadata={"help": "Source language, as the corpus names it."})
    target_lang: str = field(default="de", metadata={"help": "Target language, as the corpus names it."})
    sampling_temperature: float = field(
        default=1.0,
        metadata={
            "help": "Pairs of languages are drawn in proportion to (their size)^(1/temperature); above 1, those with "
            "less text are repeated."
        },
    )
    max_length: int = field(
        default=1024, metadata={"help": "Training pairs with more tokens on a side are left out and counted."}
    )
    max_ratio: float | None = field(
        default=None,
        metadata={"help": "Training pairs with so many times more tokens on one side than on the other are left out."},
    )
    drop_duplicates: bool = field(
        default=False, metadata={"help": "Leave out training pairs that were there before, both sides the same."}
    )
    drop_wrong_language: bool = field(
        default=False,
        metadata={
            "help": "Leave out training pairs with a side that is surely in another language than the corpus says; needs "
            "relpos[language]."
        },
    )
    subword_sentences: int = field(
        default=1_000_000, metadata={"help": "Pairs at most, evenly spaced, that the vocabulary is trained on."}
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read the training corpora while training, sort_window pairs at a time, and write nothing to disk; the "
            "vocabulary is trained on the first pairs, those of several languages come in turn, and max_steps ends it."
        },
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    overwrite: bool = field(
        default=False,
        metadata={
            "help": "Remove what an earlier run left in output_dir and start anew. Without, an unfinished run of the "
            "same recipe goes on from its last checkpoint."
        },
    )


@dataclass
class Run:
    """Everything that a training is given."""

    model: ModelArguments
    data: DataArguments
    training: TranslationTrainingArguments
    overrides: dict[str, Any]
    """Fields of `RelPosConfig` that differ from the preset or from the saved model."""
    given: dict[str, Any]
    """All fields that were given, by name."""
    recipe_file: Path | None = None
    """The YAML file that the fields were read from, where it is none of the package's."""

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target, where a corpus does not say otherwise."""
        return self.data.source_lang, self.data.target_lang

    @property
    def repeatable(self) -> dict[str, Any]:
        """The fields that were given and that decide what is trained."""
        return {name: value for name, value in self.given.items() if name not in _OF_THIS_RUN}


def parse_arguments(argv: Sequence[str]) -> Run:
    """Read a recipe, if the first argument is one, and the command line over it.

    Raises:
        RecipeError: Names the field, and the nearest that there is.
    """
    parser = _Parser(
        (ModelArguments, DataArguments, TranslationTrainingArguments),
        prog="relpos train",
        usage="relpos train [RECIPE] [--FIELD VALUE ...]",
        description=f"Recipes: {', '.join(recipes())}, or a YAML file. Presets: {', '.join(presets())}.",
        allow_abbrev=False,
    )
    for name in _config_fields():
        parser.add_argument(f"--{name}", type=yaml.safe_load, default=SUPPRESS, help="Field of RelPosConfig.")
    argv = list(argv)
    recipe_file = None
    if argv and not argv[0].startswith("-"):
        recipe_file = Path(argv[0]) if argv[0] not in recipes() else None
        argv = _as_arguments(_read_recipe(argv[0], parser.names()), overridden=_given(argv[1:])) + argv[1:]
    try:
        *groups, rest = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise RecipeError(" ".join(str(error).split())) from error
    if rest:
        if not rest[0].startswith("--"):
            raise RecipeError(f"The value {rest[0]} belongs to no field, or is one too many for a field of one value.")
        raise RecipeError(_unknown(rest[0].removeprefix("--").partition("=")[0], parser.names()))
    overrides = vars(groups.pop()) if len(groups) > 3 else {}
    run = Run(*groups, overrides=overrides, given=_given(argv), recipe_file=recipe_file)
    _check(run)
    return run


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise RecipeError(f"{message[0].upper()}{message[1:]}.")

    def names(self) -> list[str]:
        """Names of all fields, as a recipe writes them."""
        options = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        return [name for name in options if "-" not in name and not name.startswith("no_")]


def _config_fields() -> list[str]:
    """Fields of RelPosConfig that a recipe can set: its own, but for those that the tokenizer or Trainer decides."""
    own = set(relpos.RelPosConfig.__annotations__)
    decided = {"vocab_size", "decoder_vocab_size", "use_cache", "is_encoder_decoder"}
    return sorted(own - decided - {name for name in own if name.endswith("_token_id")})


def _read_recipe(name: str, known: list[str], *, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The fields of a recipe and, before them, those of the recipe that it extends."""
    path = Path(name)
    if not path.is_file():
        if name not in recipes():
            raise RecipeError(f"There is no recipe {name}: neither a file nor one of {', '.join(recipes())}.")
        path = recipe(name)
    if path in extended_by:
        raise RecipeError(f"The recipe {path} extends itself.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"The recipe {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"The recipe {path} must be a list of fields, such as `max_steps: 1000`.")
    extends = content.pop("extends", None)
    for key in content:
        if key not in known:
            raise RecipeError(f"The recipe {path}: {_unknown(str(key), known)}")
    if extends is None:
        return content
    return {**_read_recipe(str(extends), known, extended_by=(*extended_by, path)), **content}


def _as_arguments(recipe_fields: dict[str, Any], *, overridden: dict[str, Any]) -> list[str]:
    """The fields of a recipe, written as on the command line."""
    arguments = []
    for key, value in recipe_fields.items():
        if key in overridden:
            continue
        if value == _MISSING:
            raise RecipeError(f"{key} must be given: the recipe leaves it to you, as --{key}.")
        if value is not None or key in _config_fields():
            values = value if isinstance(value, list) else [value]
            _check_text(key, values)
            arguments += [f"--{key}", *(part if isinstance(part, str) else json.dumps(part) for part in values)]
    return arguments


def _check_text(name: str, values: list[Any]) -> None:
    for value in values:
        if name in _text_fields() and not isinstance(value, str):
            read = json.dumps(value, default=str)
            raise RecipeError(f"{name} must be text, but YAML reads {read}; put it in quotes.")


def _text_fields() -> set[str]:
    """Fields of ours that are texts or lists of texts, whatever they look like: Norwegian is "no", a folder "2014"."""
    return {
        field.name for group in (ModelArguments, DataArguments) for field in fields(group) if "str" in str(field.type)
    }


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    hint = (
        f"did you mean {nearest[0]}?" if nearest else "python -m relpos.training.run_translation --help lists them all."
    )
    return f"There is no field {name}; {hint}"


def _given(argv: Sequence[str]) -> dict[str, Any]:
    """The fields on a command line with their values, the last one of each."""
    given: dict[str, list] = {}
    current: list = []
    read = _value
    for argument in argv:
        if argument.startswith("--"):
            name, equals, argument = argument[2:].partition("=")
            name = name.replace("-", "_")
            read = str if name in _text_fields() else _value
            negated = name.startswith("no_")  # --no_FIELD, as argparse adds it to each field that is true by default
            current = given[name.removeprefix("no_")] = [False] if negated else []
            if not equals:
                continue
        current.append(read(argument))
    return {name: values[0] if len(values) == 1 else values or True for name, values in given.items()}


def _value(text: str) -> Any:
    """A value of the command line: a number, true, false or null, and text otherwise (YAML would read "no" as false)."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check(run: Run) -> None:
    data, args = run.data, run.training
    if "output_dir" not in run.given:
        raise RecipeError("output_dir must be given: the folder that the model is written to.")
    if data.source_lang == data.target_lang:
        raise RecipeError(f"source_lang and target_lang must differ, but both are {data.source_lang}.")
    for name, use in _WITHOUT_EFFECT.items():
        if name in run.given:
            raise RecipeError(f"{name} has no effect, since batches are cut by tokens; use {use}.")
    _check_numbers(run)
    _check_names(args)
    if args.fp16 and args.device.type == "cpu":
        raise RecipeError("fp16 needs an accelerator; on a CPU, bf16 is the half precision that works.")
    _check_averaging(args)
    if data.streaming:
        _check_streaming(data, args)
    if args.eval_strategy != "no" and data.validation_corpus is None and BUNDLED not in data.train_corpus:
        raise RecipeError(
            f"validation_corpus must be given to evaluate on, since eval_strategy is {args.eval_strategy.value}."
        )
    if run.model.model in presets():
        _check_preset(run.model.model, run.overrides)
    else:
        if not Path(run.model.model).exists() and "/" not in run.model.model:
            raise RecipeError(
                f"There is no model {run.model.model}: neither a folder nor one of {', '.join(presets())}."
            )
        check_folder(run.model.model)


_AT_LEAST_1 = ("at least 1", lambda value: value >= 1)
_AT_LEAST_2 = ("at least 2, with the token that a translation starts from", lambda value: value >= 2)
_AT_LEAST_0 = ("at least 0", lambda value: 0 <= value < math.inf)
_ABOVE_0 = ("above 0", lambda value: 0 < value < math.inf)
_BELOW_1 = ("at least 0 and below 1", lambda value: 0 <= value < 1)
_SEED = ("at least 0 and below 2^32", lambda value: 0 <= value < 2**32)
# What numbers must be; nan is none of it.
_NUMBERS = {
    "max_length": _AT_LEAST_1,
    "subword_sentences": _AT_LEAST_1,
    "sampling_temperature": _AT_LEAST_1,
    "max_ratio": _AT_LEAST_1,
    "preprocessing_num_workers": _AT_LEAST_0,
    "max_tokens": _AT_LEAST_1,
    "sort_window": _AT_LEAST_1,
    "average_last": _AT_LEAST_1,
    "gradient_accumulation_steps": _AT_LEAST_1,
    "per_device_eval_batch_size": _AT_LEAST_1,
    "generation_num_beams": _AT_LEAST_1,
    "generation_max_length": _AT_LEAST_2,
    "dataloader_num_workers": _AT_LEAST_0,
    "learning_rate": _AT_LEAST_0,
    "warmup_steps": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "max_grad_norm": _AT_LEAST_0,
    "adam_beta1": _BELOW_1,
    "adam_beta2": _BELOW_1,
    "adam_epsilon": _ABOVE_0,
    "label_smoothing_factor": _BELOW_1,
    "seed": _SEED,
    "data_seed": _SEED,
}


def _check_numbers(run: Run) -> None:
    values = {**vars(run.data), **vars(run.training)}
    for name, (words, allowed) in _NUMBERS.items():
        if values[name] is not None and not allowed(values[name]):
            raise RecipeError(f"{name} must be {words}, not {values[name]}.")
    steps, epochs = run.training.max_steps, run.training.num_train_epochs
    if steps == 0 or (steps < 0 and not 0 < epochs < math.inf):
        raise RecipeError(f"max_steps must be at least 1, or num_train_epochs above 0, not {steps} and {epochs}.")


def _check_names(args: TranslationTrainingArguments) -> None:
    """Names that Trainer looks up only once the corpora are prepared, or after the first evaluation."""
    metrics = ("loss", *(("bleu", "chrf") if args.predict_with_generate else ()))
    wanted = args.metric_for_best_model
    if wanted is not None and wanted.removeprefix("eval_") not in metrics:
        raise RecipeError(f"metric_for_best_model must be one of {', '.join(metrics)}, not {wanted}.")
    unknown = [name for name in args.report_to if name not in INTEGRATION_TO_CALLBACK]
    if unknown:
        known = ", ".join(INTEGRATION_TO_CALLBACK)
        raise RecipeError(f"report_to must be none, all or some of {known}, not {', '.join(unknown)}.")
    options = {"scheduler_specific_kwargs": args.lr_scheduler_kwargs, "num_warmup_steps": 1, "num_training_steps": 2}
    try:
        get_scheduler(args.lr_scheduler_type, torch.optim.SGD([torch.zeros(1)], lr=1.0), **options)
    except (ValueError, TypeError) as error:
        kind = args.lr_scheduler_type.value
        raise RecipeError(f"lr_scheduler_kwargs do not fit lr_scheduler_type={kind}: {error}.") from error


def _check_streaming(data: DataArguments, args: TranslationTrainingArguments) -> None:
    if args.max_steps <= 0:
        raise RecipeError("streaming needs max_steps, since nobody knows where an epoch of a stream ends.")
    for name, value, default in (
        ("drop_duplicates", data.drop_duplicates, False),
        ("drop_wrong_language", data.drop_wrong_language, False),
        ("sampling_temperature", data.sampling_temperature, 1),
        ("dataloader_num_workers", args.dataloader_num_workers, 0),
    ):
        if value != default:
            raise RecipeError(f"streaming does not go with {name}={value}: it must be {default}.")


def _check_preset(name: str, overrides: dict[str, Any]) -> None:
    try:
        preset(name, **overrides)
    except (ValueError, StrictDataclassError) as error:
        raise RecipeError(" ".join(str(error).split())) from error


def _check_averaging(args: TranslationTrainingArguments) -> None:
    if args.average_last == 1:
        return
    if args.save_strategy == "no":
        raise RecipeError(f"average_last={args.average_last} needs checkpoints, but save_strategy is no.")
    if args.save_only_model:
        raise RecipeError(
            f"average_last={args.average_last} needs whole checkpoints; leave save_only_model out, and set "
            "save_total_limit to keep few of them."
        )
    if args.save_total_limit is not None and args.save_total_limit < args.average_last:
        raise RecipeError(
            f"save_total_limit must be at least average_last={args.average_last}, so that the checkpoints to average "
            f"are kept, not {args.save_total_limit}."
        )
    if args.fsdp:
        raise RecipeError(
            "average_last does not go with fsdp: average the checkpoints afterwards, by `relpos average`."
        )
    if args.load_best_model_at_end:
        raise RecipeError("average_last and load_best_model_at_end are two choices of the final model; give one.")
