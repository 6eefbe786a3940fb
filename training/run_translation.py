"""Train or fine-tune a translation model: `relpos train RECIPE [--field value ...]`.

    python -m relpos.training.run_translation quickstart --output_dir out/quickstart
    python -m relpos.training.run_translation --model base --train_corpus corpus.tsv.gz --output_dir out/mine
    torchrun --nproc-per-node 8 -m relpos.training.run_translation wmt14-en-de-base --output_dir out/base

A recipe is a YAML file of fields, or the name of one that comes with the package; the command line overrides it. See
`relpos.training.recipe`. A run that was stopped goes on when the same command is given again.
"""

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import transformers
import yaml
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from huggingface_hub import HfApi
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from relpos.configuration import preset, presets
from relpos.model_cards import publishing
from relpos.model_cards.card import write_card
from relpos.pipeline_relpos import language_tags

from .allocator import keep_freed_memory
from .averaging import AveragingError, average_checkpoints
from .batching import sequence_lengths
from .checkpoints import whole_checkpoints
from .corpus import BUNDLED, BUNDLED_LICENSE, BUNDLED_SOURCE, CorpusError, parse_corpora
from .evaluation import score_translations
from .loading import ModelError
from .metric import BLEU, CHRF, compute_metrics_with, decode_padded
from .preparation import Corpora, TokenizedSets, load_run_tokenizer, make_tokenizer, read_corpora, tokenize_corpora
from .recipe import RECIPE_FILE, RecipeError, Run, parse_arguments
from .trainer import (
    SavingError,
    TranslationTrainer,
    TranslationTrainingArguments,
    save_model,
    save_tokenizer,
    saving,
    set_generation_defaults,
)

# Where in its folder an earlier run waits until the new one is known to be possible, and where it goes then.
_REPLACED, _REMOVED = ".replaced", ".removed"
# In place of a checkpoint to go on from.
_FINISHED = "the finished model"
# What a run has left, beside its recipe, that was stopped before its first checkpoint.
_BEGINNINGS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", ".saving")


def main(argv: list[str] | None = None) -> Path:
    """Train as a recipe and the command line say; see the module's first lines.

    Returns:
        The model's folder.

    Raises:
        RecipeError: A field is unknown or has an impossible value, or `output_dir` is taken.
        CorpusError: A corpus cannot be read.
        ModelError: The model to fine-tune cannot be opened.
        AveragingError, SavingError: Something cannot be written, on a full disk say.
        PublishError: `push_to_hub` is set, and the Hub does not take the model; found before the training where it can.
    """
    run = parse_arguments(sys.argv[1:] if argv is None else argv)
    push = _prepare_push(run.training)
    output_dir = train(run)
    push(output_dir)
    return output_dir


def _prepare_push(args: TranslationTrainingArguments) -> Callable[[Path], None]:
    """What to do at the end with the model's folder: push it, where `push_to_hub` says so and the Hub lets us.

    Trainer's own way is turned off: it uploads all of `output_dir`, with checkpoints, arguments and paths in them.
    """
    wanted, args.push_to_hub = args.push_to_hub and args.should_save, False
    if not wanted:
        return lambda folder: None
    if not args.hub_model_id:
        raise RecipeError("push_to_hub needs hub_model_id, the name of the model on the Hub: user/name.")
    options = {"private": bool(args.hub_private_repo), "api": HfApi(token=args.hub_token)}
    publishing.check_access(args.hub_model_id, **options)
    return lambda folder: print(publishing.publish(folder, args.hub_model_id, **options))


def train(run: Run) -> Path:
    """Train a model and write its folder: weights, tokenizer, generation settings, card, and the recipe.

    Where the folder holds a stopped run of the same recipe, that run goes on from its last whole checkpoint: with the
    same batches, optimizer and random numbers. Where it holds the finished model of the same recipe, nothing is done.

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
    with args.main_process_first(local=False, desc="preparing the folder"):
        if args.should_save:
            prepare_folder(run)
    checkpoint = _where_to_go_on(args)
    if checkpoint == _FINISHED:
        if args.should_save:
            print(f"{output_dir} holds the finished model of this recipe already.")
        return output_dir
    try:
        trainer, corpora = make_trainer(run, checkpoint)
    except BaseException:
        if args.should_save:
            _put_back(output_dir)
        raise
    if checkpoint and not args.resume_from_checkpoint:
        _check_same_batches(checkpoint, trainer)
    if args.should_save:
        _remove_replaced(output_dir)
        with saving("The recipe", output_dir):
            if not checkpoint:
                _remove_beginnings(output_dir)
            _write_beginnings(run, trainer.processing_class)
        _announce(trainer, corpora.dropped, checkpoint)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        if args.should_save:
            _say_where_it_stands(run)
        raise
    averaged = _average(trainer) if args.average_last > 1 else 1
    scores, results = _validate(trainer) if trainer.eval_dataset else ({}, [])
    with saving("The model", output_dir):
        trainer.save_state()
        _write_model(trainer, output_dir)
        if args.should_save and trainer.model.config.model_type == "relpos":
            write_card(output_dir, {**_facts(run, trainer, corpora, averaged), **_card_scores(run, results)})
    if args.should_save:
        _report(output_dir, scores, trainer.eval_dataset, args)
    trainer.accelerator.wait_for_everyone()
    return output_dir


def _where_to_go_on(args: TranslationTrainingArguments) -> str | None:
    """The checkpoint that this run goes on from, None for a new one, or `_FINISHED`.

    Raises:
        RecipeError: The checkpoint that is asked for is none, or the processes do not see the same ones.
    """
    output_dir, found = Path(args.output_dir), args.resume_from_checkpoint
    if found and not Path(found, TRAINER_STATE_NAME).is_file():
        raise RecipeError(
            f"resume_from_checkpoint={found} is no folder of a checkpoint; name one, or leave the field out to go on from "
            "the last one in output_dir."
        )
    if not found and (output_dir / "config.json").is_file():
        found = _FINISHED
    found = found or next(map(str, reversed(whole_checkpoints(output_dir))), None)
    if args.world_size > 1 and len({name and Path(name).name for name in gather_object([found])}) > 1:
        raise RecipeError(
            f"output_dir={output_dir} does not hold the same on all machines: put it on a disk that they share, or start "
            "with an empty one on each."
        )
    return found


def prepare_folder(run: Run) -> None:
    """Leave in `output_dir` nothing but what this run may go on from; an earlier run that is to be overwritten is set
    aside.

    Raises:
        RecipeError: The folder cannot be written, or holds something else, and it is not asked to be overwritten, or is
            no run's, or holds what this run reads.
    """
    output_dir = Path(run.training.output_dir)
    _make_writable(output_dir)
    _put_back(output_dir)  # of a start that was killed
    if run.training.resume_from_checkpoint or not any(output_dir.iterdir()):
        return
    has_model = (output_dir / "config.json").is_file() or any(output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/config.json"))
    recipe_file = output_dir / RECIPE_FILE
    if run.data.overwrite:
        if not has_model and not recipe_file.is_file():
            raise RecipeError(
                f"output_dir={output_dir} holds no model of an earlier run, so --overwrite does not remove it."
            )
        _refuse_to_replace_inputs(run)
        aside = output_dir / _REPLACED
        aside.mkdir()
        for path in [path for path in output_dir.iterdir() if path != aside]:
            path.rename(aside / path.name)
    elif not recipe_file.is_file():
        raise RecipeError(f"output_dir={output_dir} is not empty; choose another folder or give --overwrite.")
    else:
        _keep_if_same(run, recipe_file, has_model=has_model)


def _make_writable(folder: Path) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"output_dir={folder} is a file.")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(f"output_dir={folder} cannot be written: {error.strerror}.") from error


def _refuse_to_replace_inputs(run: Run) -> None:
    """A model is not trained in its own place, and corpora and recipes of the user are no leftovers of a run."""
    output_dir = Path(run.training.output_dir).resolve()
    for field, name in _inputs(run):
        path = Path(name).resolve()
        # of a pair of files, the name is where both begin
        exists = path.parent.is_dir() and any(file.name.startswith(path.name) for file in path.parent.iterdir())
        if exists and path.is_relative_to(output_dir):
            raise RecipeError(
                f"{field}={name} lies in output_dir={run.training.output_dir}, which --overwrite would remove; choose "
                "another output_dir."
            )


def _inputs(run: Run) -> Iterator[tuple[str, str]]:
    """What a run reads, by the field that names it."""
    if run.model.model not in presets():
        yield "model", run.model.model
    if run.model.tokenizer:
        yield "tokenizer", run.model.tokenizer
    if run.recipe_file:
        yield "recipe", str(run.recipe_file)
    for field in ("train_corpus", "validation_corpus"):
        for _, source in parse_corpora(getattr(run.data, field) or [], languages=run.languages):
            for name in [source] if isinstance(source, str) else source:
                yield field, name


def _put_back(output_dir: Path) -> None:
    """Undo that an earlier run was set aside, and finish the removal of one that was to be removed."""
    shutil.rmtree(output_dir / _REMOVED, ignore_errors=True)
    aside = output_dir / _REPLACED
    if aside.is_dir():
        for path in [*aside.iterdir()]:
            path.rename(output_dir / path.name)
        aside.rmdir()


def _remove_replaced(output_dir: Path) -> None:
    """Remove the earlier run that was set aside; renamed first, so that no half of it is put back."""
    if (output_dir / _REPLACED).is_dir():
        (output_dir / _REPLACED).rename(output_dir / _REMOVED)
        shutil.rmtree(output_dir / _REMOVED)


def _say_where_it_stands(run: Run) -> None:
    """After Ctrl-C."""
    again = {"--overwrite": run.data.overwrite, "--resume_from_checkpoint": run.training.resume_from_checkpoint}
    without = " and ".join(option for option, given in again.items() if given)
    last = next(map(str, reversed(whole_checkpoints(run.training.output_dir))), None)
    command = f"the same command without {without}" if without else "the same command"
    stands = f"{command} goes on from {last}" if last else "there is no checkpoint yet to go on from"
    print(f"\nThe training was stopped; {stands}.", file=sys.stderr)


def _read_earlier_recipe(recipe_file: Path) -> dict[str, Any]:
    try:
        earlier = yaml.safe_load(recipe_file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError):
        earlier = None
    if not isinstance(earlier, dict):
        raise RecipeError(
            f"{recipe_file} is no recipe of an earlier run; choose another output_dir, or remove the file."
        )
    return earlier


def _keep_if_same(run: Run, recipe_file: Path, *, has_model: bool) -> None:
    output_dir, earlier = recipe_file.parent, _read_earlier_recipe(recipe_file)
    different = [name for name in {**earlier, **run.repeatable} if earlier.get(name) != run.repeatable.get(name)]
    if different and has_model:
        field = different[0]
        there, here = (fields.get(field, "not given") for fields in (earlier, run.repeatable))
        raise RecipeError(
            f"output_dir={output_dir} is not empty: it holds a run of another recipe, in which {field} is {there}; here it "
            f"is {here}. Choose another folder, or give --overwrite to start anew."
        )
    given = run.recipe_file and run.recipe_file.resolve() == recipe_file.resolve()
    started = has_model or (output_dir / "tokenizer_config.json").is_file()
    if (given or different) and not started:
        raise RecipeError(
            f"The recipe {recipe_file} lies in output_dir={output_dir}, where the run writes its own under that name; "
            "choose another output_dir."
        )


def make_trainer(run: Run, checkpoint: str | None = None) -> tuple[TranslationTrainer, Corpora]:
    """Everything that a run is trained with, and the pairs that it is trained on.

    Args:
        run: What is trained.
        checkpoint: What the run goes on from.
    """
    args = run.training
    args.remove_unused_columns = True  # the references, which are no input of the model
    with saving("The prepared corpora", Path(datasets.config.HF_DATASETS_CACHE)):
        with args.main_process_first(desc="reading the corpora"):  # which the others find in the cache
            corpora = read_corpora(run.data)
        set_seed(args.seed)
        tokenizer = _shared_tokenizer(run, corpora, checkpoint)
        with args.main_process_first(desc="preparing the data"):
            sets = tokenize_corpora(corpora, tokenizer, run.data)
    model = make_model(run, tokenizer, corpora)
    if not run.data.streaming:
        _record_longest_source(model.config, sets.train)
    trainer = TranslationTrainer(
        model=model,
        args=args,
        train_dataset=sets.train,
        copies=sets.copies,
        eval_dataset=sets.validation,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics_with(tokenizer, _references(sets)) if args.predict_with_generate else None,
    )
    return trainer, corpora


def _references(sets: TokenizedSets) -> list[str]:
    return [] if sets.validation is None else list(sets.validation["reference"])


def _shared_tokenizer(run: Run, corpora: Corpora, checkpoint: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of the run that goes on, or a new one: the first process's for all, on whichever machine they are,
    since two trainings of a vocabulary may differ.

    One that was made before the first checkpoint is made again: the corpora or the model to fine-tune may have changed.
    """
    tokenizer = None
    if run.training.process_index == 0:
        tokenizer = load_run_tokenizer(Path(run.training.output_dir)) if checkpoint else None
        tokenizer = tokenizer or make_tokenizer(run.model, run.data, corpora)
    if run.training.world_size == 1:
        return tokenizer
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), {}
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
            files = {file.name: file.read_bytes() for file in folder.iterdir()}
        (files,) = broadcast_object_list([files])
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return load_run_tokenizer(folder)


def make_model(run: Run, tokenizer: PreTrainedTokenizerBase, corpora: Corpora) -> PreTrainedModel:
    """A new model of a preset's shape, or a saved one; `run.overrides` are set on top."""
    name, size = run.model.model, len(tokenizer)
    try:
        if name in presets():
            special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
            special |= {"decoder_start_token_id": tokenizer.pad_token_id}
            sizes = {"vocab_size": size, "decoder_vocab_size": size}
            model = AutoModelForSeq2SeqLM.from_config(preset(name, **{**sizes, **special, **run.overrides}))
            set_generation_defaults(model)
        else:
            _check_same_vocabulary(run, tokenizer)
            model = _load(name, run.overrides)
            if model.get_input_embeddings().num_embeddings < size:  # tags of new languages
                model.resize_token_embeddings(size)
    except (ValueError, OSError) as error:
        raise RecipeError(" ".join(str(error).split())) from error
    for side, names in _languages(corpora, tokenizer).items():
        setattr(model.config, side, names if isinstance(names, str) else None)
    return model


def _load(name: str, overrides: dict[str, Any]) -> PreTrainedModel:
    try:
        return AutoModelForSeq2SeqLM.from_pretrained(name, **overrides)
    except RuntimeError as error:  # whose message points to a report that the library has printed
        if "ignore_mismatched_sizes" not in str(error):
            raise
        fields = ", ".join(overrides) or "its configuration"
        raise RecipeError(f"model={name} has weights of another shape than {fields} would give it.") from error


def _check_same_vocabulary(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse to train a saved model on ids that mean other tokens; tokens that were added at the end may be new."""
    name, named = run.model.model, run.model.tokenizer
    if not named or named == name:
        return
    try:
        own, ids = AutoTokenizer.from_pretrained(name).get_vocab(), tokenizer.get_vocab()
    except (OSError, ValueError):  # a model alone, to which the user has the tokenizer
        return
    if any(ids.get(token) != index for token, index in own.items()):
        raise RecipeError(
            f"tokenizer={named} has another vocabulary than model={name}, whose embeddings are of its own; leave the field "
            "out to fine-tune with the model's."
        )


def _languages(corpora: Corpora, tokenizer: PreTrainedTokenizerBase) -> dict[str, str | list[str]]:
    """The source and the target language, or a list of those that there are; a fine-tuned model keeps its tags."""
    sources, targets = (sorted(set(side)) for side in zip(*corpora.train))
    sides = {"source_language": sources, "target_language": [*language_tags(tokenizer)] or targets}
    return {side: names[0] if len(names) == 1 else names for side, names in sides.items()}


def _record_longest_source(config: PreTrainedConfig, dataset: Dataset) -> None:
    """Keep in the saved model how long the sources were that it has seen: nothing else stops a model without a ceiling,
    so `relpos translate` names the lines that are longer. A fine-tuned model keeps the greater length."""
    longest = int(sequence_lengths(dataset, "input_ids").max())
    config.longest_training_source = max(longest, getattr(config, "longest_training_source", None) or 0)


def _check_same_batches(checkpoint: str, trainer: TranslationTrainer) -> None:
    """Refuse to go on with other batches: the rest of an epoch would be of another order than what was trained."""
    saved = trainer.batches_of(checkpoint)  # None: a stream, or another program's
    if saved is not None and saved != trainer.batch_sampler.fingerprint:
        raise RecipeError(
            f"train_corpus, or the number of devices, has changed since {checkpoint} was saved, so that its run cannot "
            "go on exactly; give --overwrite to start anew, or go on all the same with --resume_from_checkpoint "
            f"{checkpoint}."
        )


def _remove_beginnings(output_dir: Path) -> None:
    """The new tokenizer may have fewer files than the one that is there."""
    for path in (output_dir / name for name in _BEGINNINGS):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _write_beginnings(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """What the same command finds when it is given again: the recipe, and the tokenizer."""
    output_dir = Path(run.training.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    partial = output_dir / f"{RECIPE_FILE}.partial"
    partial.write_text(yaml.safe_dump(run.repeatable, allow_unicode=True, sort_keys=False), encoding="utf-8")
    os.replace(partial, output_dir / RECIPE_FILE)
    save_tokenizer(tokenizer, output_dir)


def _average(trainer: TranslationTrainer) -> int:
    """Load the mean of the last checkpoints into the model; returns how many there were."""
    args = trainer.args
    checkpoints = whole_checkpoints(args.output_dir)[-args.average_last :]
    if len(checkpoints) > 1:
        averaged = Path(args.output_dir, ".averaged")
        if args.should_save:
            average_checkpoints(checkpoints, averaged, force=True)
        trainer.accelerator.wait_for_everyone()
        trainer.load_weights(averaged)
        trainer.accelerator.wait_for_everyone()
        if args.should_save:
            shutil.rmtree(averaged)
    if args.should_save and len(checkpoints) < args.average_last:
        print(f"There were only {len(checkpoints)} of the average_last={args.average_last} checkpoints to average.")
    return len(checkpoints)


def _validate(trainer: TranslationTrainer) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Translate the validation set with the final model: Trainer's metrics, and the scores for its card."""
    if not trainer.args.predict_with_generate:
        return trainer.evaluate(), []
    predicted = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")
    trainer.log(predicted.metrics)
    if not trainer.is_world_process_zero():  # the translations are the same on all
        return predicted.metrics, []
    references = list(trainer.eval_dataset["reference"])
    # where several processes share the set, its first rows come again at the end
    sides = decode_padded(trainer.processing_class, predicted.predictions[: len(references)]), references
    # TER takes long on what a model that is not done repeats without end
    scores = score_translations(*sides, metrics=(BLEU, CHRF))
    beams = trainer.args.generation_num_beams or trainer.model.generation_config.num_beams or 1
    return predicted.metrics, [{"beams": beams, "pairs": len(sides[0]), "scores": scores}]


def _card_scores(run: Run, results: list[dict[str, Any]]) -> dict[str, Any]:
    if not results:
        return {}
    named = " and ".join(Path(name).name for name in run.data.validation_corpus or ())
    return {"test_corpus": named or "the validation part of the bundled corpus", "results": results}


def _write_model(trainer: TranslationTrainer, output_dir: Path) -> None:
    """Save the final model; every process has to call this, since each may hold a part of the weights."""
    weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    if trainer.args.should_save:
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        save_model(model, trainer.processing_class, output_dir, weights=weights)


def _announce(trainer: TranslationTrainer, dropped: Counter, checkpoint: str | None) -> None:
    args = trainer.args
    rows = {
        "training pairs": "a stream",
        "left out": ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count),
        "validation pairs": f"{len(trainer.eval_dataset):,}" if trainer.eval_dataset else "none",
        "vocabulary": f"{len(trainer.processing_class):,} subwords",
        "model": f"{trainer.model.num_parameters() / 1e6:.2f} million parameters",
        "batches": f"up to {args.max_tokens:,} tokens per side",
        "training": f"{args.max_steps:,} steps, on {_devices(args)}",
        "going on from": checkpoint,
    }
    if isinstance(trainer.train_dataset, Dataset):
        sampler = trainer.batch_sampler
        steps_per_epoch = max(len(sampler) // (args.world_size * args.gradient_accumulation_steps), 1)
        steps = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * steps_per_epoch)
        rows |= {
            "training pairs": f"{len(trainer.train_dataset):,}",
            "batches": f"{rows['batches']}, {len(sampler):,} per epoch, padding {{:.0%}} of the sources and {{:.0%}} of "
            "the targets".format(*sampler.padding),
            "training": f"{steps:,} steps, {steps / steps_per_epoch:.1f} epochs, on {_devices(args)}",
        }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    Console(highlight=False, width=120).print(table)


def _devices(args: TranslationTrainingArguments) -> str:
    processes, batches = args.world_size, args.gradient_accumulation_steps
    return f"{processes} x " * (processes > 1) + str(args.device) + f", {batches} batches a step" * (batches > 1)


def _report(output_dir: Path, scores: dict, validation_set: Dataset | None, args: TranslationTrainingArguments) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if scores:
        found = f"loss {scores['eval_loss']:.3f}"
        if args.predict_with_generate:
            search = "greedy" if args.generation_num_beams == 1 else f"{args.generation_num_beams} beams"
            found = f"{search}: BLEU {scores['eval_bleu']:.1f}, chrF {scores['eval_chrf']:.1f}, {found}"
        console.print(f"Validation, {len(validation_set):,} pairs, {found}")
    console.print(f"The model is in {output_dir}.")


def _facts(run: Run, trainer: TranslationTrainer, corpora: Corpora, averaged: int) -> dict[str, Any]:
    args = run.training
    bundled = run.data.train_corpus == [BUNDLED]
    parent = Path(run.model.model).name if Path(run.model.model).exists() else run.model.model  # user/name on the Hub
    return {
        **_languages(corpora, trainer.processing_class),
        "base_model": None if run.model.model in presets() else parent,
        "corpus": BUNDLED_SOURCE if bundled else ", ".join(Path(name).name for name in run.data.train_corpus),
        "corpus_license": BUNDLED_LICENSE if bundled else None,
        "pairs": len(trainer.train_dataset) if isinstance(trainer.train_dataset, Dataset) else None,
        "steps": trainer.state.global_step,
        "training": {
            "batch": f"up to {args.max_tokens * args.gradient_accumulation_steps * args.world_size:,} tokens per side",
            "optimizer": f"{args.optim.value}, betas {args.adam_beta1} and {args.adam_beta2}, epsilon {args.adam_epsilon}",
            "learning rate": f"{args.learning_rate} at its peak, {args.lr_scheduler_type.value}, "
            f"{args.warmup_steps:g} warm-up steps",
            "label smoothing": args.label_smoothing_factor,
            **_vocabulary(run, trainer.processing_class),
            **({"weights": f"the mean of the last {averaged} checkpoints"} if averaged > 1 else {}),
        },
    }


def _vocabulary(run: Run, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What kind of vocabulary was trained, where one was."""
    if run.model.tokenizer or run.model.model not in presets():
        return {}
    return {"vocabulary": f"{len(tokenizer):,} subwords of a Unigram model with a byte fallback, shared by both sides"}


if __name__ == "__main__":
    try:
        main()
    except (RecipeError, CorpusError, ModelError, AveragingError, SavingError, publishing.PublishError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
