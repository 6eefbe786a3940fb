"""Train or fine-tune a translation model: `relpos train RECIPE [--field value ...]`.

    python -m relpos.training.run_translation quickstart --output_dir out/quickstart
    python -m relpos.training.run_translation --model base --train_corpus corpus.tsv.gz --output_dir out/mine

A recipe is a YAML file of fields, or the name of one that comes with the package; the command line overrides it. Fields
are those of `ModelArguments`, `DataArguments`, `TranslationTrainingArguments` (which are Transformers' own and a few
more) and of `RelPosConfig`.
"""

import difflib
import json
import os
import shutil
import sys
from argparse import SUPPRESS
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import transformers
import yaml
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import relpos
from relpos.configuration import preset, presets, recipe, recipes
from relpos.model_cards.card import write_card

from .allocator import keep_freed_memory
from .batching import sequence_lengths
from .corpus import (
    BUNDLED,
    BUNDLED_LANGUAGES,
    BUNDLED_LICENSE,
    BUNDLED_SOURCE,
    CorpusError,
    bundled_splits,
    drop_empty_pairs,
    read_corpus,
)
from .loading import ModelError, check_folder
from .metric import compute_metrics_with
from .subwords import load_sentencepiece, train_tokenizer
from .trainer import TranslationTrainer, TranslationTrainingArguments, save_model, set_generation_defaults

RECIPE_FILE = "recipe.yaml"
"""Every field that was given is written into the model's folder under this name, as a recipe that repeats the run."""

# What says where and how this run was, not what was trained.
_OF_THIS_RUN = ("output_dir", "overwrite", "resume_from_checkpoint")


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
    """What it is trained on. Corpora are named as `relpos.training.corpus.read_corpus` takes them."""

    train_corpus: list[str] = field(
        default_factory=lambda: [BUNDLED], metadata={"help": "Training corpus: one path or name, or two plain files."}
    )
    validation_corpus: list[str] | None = field(
        default=None, metadata={"help": "Validation corpus; the bundled corpus brings its own."}
    )
    source_lang: str = field(default="en", metadata={"help": "Source language, as the corpus names it."})
    target_lang: str = field(default="de", metadata={"help": "Target language, as the corpus names it."})
    max_length: int = field(
        default=1024, metadata={"help": "Training pairs with more tokens on a side are left out and counted."}
    )
    subword_sentences: int = field(
        default=1_000_000, metadata={"help": "Pairs at most, evenly spaced, that the vocabulary is trained on."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    overwrite: bool = field(
        default=False, metadata={"help": "Remove what an earlier run left in output_dir. Without, it must be empty."}
    )


def main(argv: list[str] | None = None) -> Path:
    """Train as a recipe and the command line say; see the module's first lines.

    Returns:
        The model's folder.

    Raises:
        RecipeError: A field is unknown or has an impossible value, or `output_dir` is taken.
        CorpusError: A corpus cannot be read.
        ModelError: The model to fine-tune cannot be opened.
    """
    return train(parse_arguments(sys.argv[1:] if argv is None else argv))


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

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target."""
        return self.data.source_lang, self.data.target_lang


def parse_arguments(argv: list[str]) -> Run:
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
    if argv and not argv[0].startswith("-"):
        argv = _recipe_as_arguments(argv[0], parser.names()) + argv[1:]
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
    run = Run(*groups, overrides=overrides, given=_given(argv))
    _check(run)
    return run


def train(run: Run) -> Path:
    """Train a model and write its folder: weights, tokenizer, generation settings, card, and the recipe.

    Returns:
        The model's folder, `output_dir`.
    """
    args = run.training
    output_dir = Path(args.output_dir)
    keep_freed_memory()
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_progress_bar()  # of every save; training has its own
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with args.main_process_first(desc="preparing the folder"):
        if args.should_save and not args.resume_from_checkpoint:
            _clear(output_dir, overwrite=run.data.overwrite)
    pairs = read_corpora(run.data)
    set_seed(args.seed)
    with args.main_process_first(desc="preparing the data"):
        tokenizer = make_tokenizer(run.model, run.data, pairs["train"])
        sets = {name: tokenize(corpus, tokenizer, run.data) for name, corpus in pairs.items()}
    model = make_model(run, tokenizer)
    train_set = within(sets["train"], run.data.max_length)
    _record_longest_source(model.config, train_set)
    validation_set = sorted_by_length(sets["validation"]) if "validation" in sets else None
    trainer = TranslationTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=validation_set,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics_with(tokenizer),
    )
    if trainer.is_world_process_zero():
        _announce(trainer, left_out=len(sets["train"]) - len(train_set))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    scores = trainer.evaluate() if validation_set else {}
    if trainer.is_world_process_zero():
        _write_folder(output_dir, run, trainer, tokenizer)
        _report(output_dir, scores, validation_set, args)
    return output_dir


def read_corpora(data: DataArguments) -> dict[str, Dataset]:
    """The pairs of "train", those with text on both sides, and of "validation", where there are any to validate on."""
    languages = (data.source_lang, data.target_lang)
    if data.train_corpus == [BUNDLED] and set(languages) == set(BUNDLED_LANGUAGES):
        corpora = dict(bundled_splits())
        del corpora["test"]
    else:
        corpora = {"train": read_corpus(data.train_corpus, languages=languages)}
    if data.validation_corpus:
        corpora["validation"] = read_corpus(data.validation_corpus, languages=languages, split="validation")
    corpora["train"] = drop_empty_pairs(corpora["train"])
    if not len(corpora["train"]):
        raise RecipeError(f"train_corpus={' '.join(data.train_corpus)} has no pair with text on both sides.")
    return corpora


def make_tokenizer(model: ModelArguments, data: DataArguments, pairs: Dataset) -> PreTrainedTokenizerBase:
    """The tokenizer that is named, that of the saved model, or one whose vocabulary is trained on the pairs."""
    named = model.tokenizer or (None if model.model in presets() else model.model)
    if named is None:
        step = -(-len(pairs) // data.subword_sentences)
        sample = pairs.select(range(0, len(pairs), step))["translation"][:]
        texts = [pair[language] for pair in sample for language in (data.source_lang, data.target_lang)]
        try:
            return train_tokenizer(texts, vocab_size=model.vocab_size)
        except ValueError as error:
            raise RecipeError(str(error)) from error
    try:
        if named.endswith(".model"):
            return load_sentencepiece(named)
        return AutoTokenizer.from_pretrained(named)
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(f"tokenizer={named} cannot be read: {' '.join(str(error).split())}") from error


def make_model(run: Run, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A new model of a preset's shape, or a saved one; `run.overrides` are set on top."""
    name = run.model.model
    try:
        if name not in presets():
            model = AutoModelForSeq2SeqLM.from_pretrained(name, **run.overrides)
            model.config.source_language, model.config.target_language = run.languages
            return model
        size, pad = len(tokenizer), tokenizer.pad_token_id
        from_tokenizer = {"vocab_size": size, "decoder_vocab_size": size, "pad_token_id": pad}
        from_tokenizer |= {"eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": pad}
        config = preset(name, **{**from_tokenizer, **run.overrides})
    except (ValueError, OSError) as error:
        raise RecipeError(" ".join(str(error).split())) from error
    config.source_language, config.target_language = run.languages
    model = AutoModelForSeq2SeqLM.from_config(config)
    set_generation_defaults(model)
    return model


def tokenize(pairs: Dataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> Dataset:
    """Rows of `input_ids` and `labels`, both ending in the end-of-sentence token."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        sources, targets = (
            [p[language] for p in batch["translation"]] for language in (data.source_lang, data.target_lang)
        )
        encoded = tokenizer(sources, text_target=targets)
        return {name: encoded[name] for name in ("input_ids", "labels")}

    return pairs.map(encode, batched=True, remove_columns=pairs.column_names, num_proc=data.preprocessing_num_workers)


def within(dataset: Dataset, max_length: int) -> Dataset:
    """The rows with at most `max_length` tokens on each side."""
    longest = np.maximum(sequence_lengths(dataset, "input_ids"), sequence_lengths(dataset, "labels"))
    if longest.min() > max_length:
        raise RecipeError(
            f"max_length={max_length} leaves no pair to train on; the shortest has {longest.min()} tokens."
        )
    return dataset if longest.max() <= max_length else dataset.select(np.flatnonzero(longest <= max_length))


def _record_longest_source(config: PreTrainedConfig, dataset: Dataset) -> None:
    """Keep in the saved model how long the sources were that it has seen: nothing else stops a model without a ceiling,
    so `relpos translate` names the lines that are longer. A fine-tuned model keeps the greater length."""
    longest = int(sequence_lengths(dataset, "input_ids").max())
    config.longest_training_source = max(longest, getattr(config, "longest_training_source", None) or 0)


def sorted_by_length(dataset: Dataset) -> Dataset:
    """The rows in order of their sources' length, longest first, so that evaluation pads and waits least."""
    return dataset.select(np.argsort(-sequence_lengths(dataset, "input_ids"), kind="stable"))


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise RecipeError(f"{message[0].upper()}{message[1:]}.")

    def names(self) -> list[str]:
        """Names of all fields, as a recipe writes them."""
        return [
            option[2:] for option in self._option_string_actions if option.startswith("--") and "-" not in option[2:]
        ]


def _config_fields() -> list[str]:
    """Fields of RelPosConfig that a recipe can set: its own, but for those that the tokenizer or Trainer decides."""
    own = set(relpos.RelPosConfig.__annotations__)
    decided = {"vocab_size", "decoder_vocab_size", "use_cache", "is_encoder_decoder"}
    return sorted(own - decided - {name for name in own if name.endswith("_token_id")})


def _recipe_as_arguments(name: str, known: list[str]) -> list[str]:
    """The fields of a recipe, written as on the command line."""
    path = Path(name)
    if not path.is_file():
        if name not in recipes():
            raise RecipeError(f"There is no recipe {name}: neither a file nor one of {', '.join(recipes())}.")
        path = recipe(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"The recipe {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"The recipe {path} must be a list of fields, such as `max_steps: 1000`.")
    arguments = []
    for key, value in content.items():
        if key not in known:
            raise RecipeError(f"The recipe {path}: {_unknown(str(key), known)}")
        if value is not None or key in _config_fields():
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{key}", *(part if isinstance(part, str) else json.dumps(part) for part in values)]
    return arguments


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "see relpos train --help."
    return f"There is no field {name}; {hint}"


def _given(argv: list[str]) -> dict[str, Any]:
    """The fields on a command line with their values, the last one of each."""
    given: dict[str, list] = {}
    for argument in argv:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            current = given[name.replace("-", "_")] = [_value(value)] if equals else []
        else:
            current.append(_value(argument))
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
    for name, value in {
        "max_length": data.max_length,
        "subword_sentences": data.subword_sentences,
        "max_tokens": args.max_tokens,
        "sort_window": args.sort_window,
    }.items():
        if value < 1:
            raise RecipeError(f"{name} must be at least 1, not {value}.")
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise RecipeError(f"max_steps must be at least 1, or num_train_epochs above 0, not {args.max_steps}.")
    if not 0 <= args.label_smoothing_factor < 1:
        raise RecipeError(f"label_smoothing_factor must be at least 0 and below 1, not {args.label_smoothing_factor}.")
    if run.model.model not in presets():
        if not Path(run.model.model).exists() and "/" not in run.model.model:
            raise RecipeError(
                f"There is no model {run.model.model}: neither a folder nor one of {', '.join(presets())}."
            )
        check_folder(run.model.model)


def _clear(output_dir: Path, *, overwrite: bool) -> None:
    """Make sure that the folder is empty: remove an earlier run where that is asked for, and refuse anything else."""
    if output_dir.exists() and not output_dir.is_dir():
        raise RecipeError(f"output_dir={output_dir} is a file.")
    if not output_dir.is_dir() or not any(output_dir.iterdir()):
        return
    if not overwrite:
        raise RecipeError(f"output_dir={output_dir} is not empty; choose another folder or give --overwrite.")
    if not any(output_dir.glob("config.json")) and not any(output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/config.json")):
        raise RecipeError(
            f"output_dir={output_dir} holds no model of an earlier run, so --overwrite does not remove it."
        )
    shutil.rmtree(output_dir)


def _announce(trainer: TranslationTrainer, *, left_out: int) -> None:
    args, sampler = trainer.args, trainer.batch_sampler
    steps_per_epoch = max(len(sampler) // (args.world_size * args.gradient_accumulation_steps), 1)
    steps = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * steps_per_epoch)
    rows = {
        "training pairs": f"{len(trainer.train_dataset):,}" + (f" ({left_out:,} too long)" if left_out else ""),
        "validation pairs": f"{len(trainer.eval_dataset):,}" if trainer.eval_dataset else "none",
        "vocabulary": f"{len(trainer.processing_class):,} subwords",
        "model": f"{trainer.model.num_parameters() / 1e6:.2f} million parameters",
        "batches": f"up to {args.max_tokens:,} tokens per side, {len(sampler):,} per epoch, padding {{:.0%}} of the "
        "sources and {:.0%} of the targets".format(*sampler.padding),
        "training": f"{steps:,} steps, {steps / steps_per_epoch:.1f} epochs, on {args.device}",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False, width=120).print(table)


def _report(output_dir: Path, scores: dict, validation_set: Dataset | None, args: TranslationTrainingArguments) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if scores:
        beams = args.generation_num_beams
        console.print(
            f"Validation, {len(validation_set):,} pairs, {'greedy' if beams == 1 else f'{beams} beams'}: "
            f"BLEU {scores['eval_bleu']:.1f}, chrF {scores['eval_chrf']:.1f}, "
            f"loss {scores['eval_loss']:.3f}"
        )
    console.print(f"The model is in {output_dir}.")


def _write_folder(output_dir: Path, run: Run, trainer: TranslationTrainer, tokenizer: PreTrainedTokenizerBase) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    save_model(model, tokenizer, output_dir)
    repeatable = {name: value for name, value in run.given.items() if name not in _OF_THIS_RUN}
    partial = output_dir / f"{RECIPE_FILE}.partial"
    partial.write_text(yaml.safe_dump(repeatable, allow_unicode=True, sort_keys=False), encoding="utf-8")
    os.replace(partial, output_dir / RECIPE_FILE)
    if model.config.model_type == "relpos":
        write_card(output_dir, _facts(run, trainer))


def _facts(run: Run, trainer: TranslationTrainer) -> dict[str, Any]:
    args = run.training
    bundled = run.data.train_corpus == [BUNDLED]
    return {
        "source_language": run.data.source_lang,
        "target_language": run.data.target_lang,
        "base_model": None if run.model.model in presets() else Path(run.model.model).name,
        "corpus": BUNDLED_SOURCE if bundled else ", ".join(Path(name).name for name in run.data.train_corpus),
        "corpus_license": BUNDLED_LICENSE if bundled else None,
        "pairs": len(trainer.train_dataset),
        "steps": trainer.state.global_step,
        "training": {
            "batch": f"up to {args.max_tokens * args.gradient_accumulation_steps * args.world_size:,} tokens per side",
            "optimizer": f"{args.optim.value}, betas {args.adam_beta1} and {args.adam_beta2}, epsilon {args.adam_epsilon}",
            "learning rate": f"{args.learning_rate} at its peak, {args.lr_scheduler_type.value}, "
            f"{args.warmup_steps:g} warm-up steps",
            "label smoothing": args.label_smoothing_factor,
        },
    }


if __name__ == "__main__":
    try:
        main()
    except (RecipeError, CorpusError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
