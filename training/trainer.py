"""Seq2SeqTrainer with batches cut by tokens, the paper's optimizer settings, and saves that are whole or absent."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, ProgressCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput, rotate_checkpoints

from .batching import TokenBatchSampler, sequence_lengths
from .checkpoints import flush_to_disk, whole_checkpoints
from .streaming import StreamedBatches

_STAGING = ".saving"
_RUN_STATE = "run_state.json"


class SavingError(ValueError):
    """A checkpoint that could not be written; the message is one sentence for the user."""


@dataclass
class TranslationTrainingArguments(Seq2SeqTrainingArguments):
    """Transformers' arguments with the paper's settings as defaults, and a budget of tokens instead of a batch size.

    Adam's betas and epsilon, the inverse square root schedule with 4,000 steps of warm-up and label smoothing are from
    Shaw et al. 2018, section 4.1 (after Vaswani et al. 2017, sections 5.3 and 5.4).
    """

    max_tokens: int = field(
        default=4096, metadata={"help": "Tokens of a batch per side and device, with padding; replaces the batch size."}
    )
    tokens_per_step: int | None = field(
        default=None,
        metadata={
            "help": "max_tokens of all the batches of one update together: as many batches are accumulated as the number "
            "of devices needs; replaces gradient_accumulation_steps."
        },
    )
    average_last: int = field(
        default=1, metadata={"help": "Checkpoints whose weights are averaged into the final model; 1: the last state."}
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop after so many evaluations without a new best, and keep the model of the best; this sets "
            "load_best_model_at_end. The best is that of metric_for_best_model, BLEU by default."
        },
    )
    sort_window: int = field(
        default=100_000, metadata={"help": "Pairs that are sorted by length together; more of them need less padding."}
    )
    learning_rate: float = field(default=7e-4, metadata={"help": "The peak, reached after warmup_steps."})
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=4000, metadata={"help": "Steps of linear warm-up; below 1: a share of all."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Beta2 of Adam."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Epsilon of Adam."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Norm that gradients are clipped to; 0: not clipped."})
    label_smoothing_factor: float = field(default=0.1, metadata={"help": "Label smoothing."})
    predict_with_generate: bool = field(default=True, metadata={"help": "Evaluate by translating."})
    generation_num_beams: int | None = field(default=1, metadata={"help": "Beams in evaluations during training."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Pairs of a batch in evaluation."})
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "Go on with the count of early stopping after a restart."}
    )
    logging_steps: float = field(default=100, metadata={"help": "Steps between two lines of the log."})

    def __post_init__(self) -> None:
        if str(self.fsdp).lower() == "true":  # as recipes and the command line write it; Trainer takes it for an option
            self.fsdp = True
        if self.early_stopping_patience is not None:
            self._check_early_stopping()
            self.load_best_model_at_end = True
        if self.load_best_model_at_end and self.metric_for_best_model is None and self.predict_with_generate:
            self.metric_for_best_model = "bleu"
        if not torch.accelerator.is_available():
            self.use_cpu = True  # without, the processes of torchrun would not know of one another, and bf16 be refused
        super().__post_init__()
        if self.tokens_per_step is not None:
            self._accumulate_to(self.tokens_per_step)

    def _check_early_stopping(self) -> None:
        patience = self.early_stopping_patience
        if patience < 1:
            raise ValueError(f"early_stopping_patience must be at least 1, not {patience}.")
        if self.eval_strategy == "no":
            raise ValueError(f"early_stopping_patience={patience} needs evaluations: set eval_strategy and eval_steps.")

    def _accumulate_to(self, tokens_per_step: int) -> None:
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"tokens_per_step={tokens_per_step} decides gradient_accumulation_steps, which must not be given as well."
            )
        at_once = self.max_tokens * self.world_size
        if tokens_per_step < 1 or tokens_per_step % at_once:
            raise ValueError(
                f"tokens_per_step must be a multiple of max_tokens={self.max_tokens} on {self.world_size} "
                f"device{'s' * (self.world_size > 1)}, that is of {at_once}, not {tokens_per_step}."
            )
        self.gradient_accumulation_steps = tokens_per_step // at_once


class TranslationTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer, but for batches by tokens, a quiet progress bar, and saves that are whole or absent.

    The training set needs the columns `input_ids` and `labels`; it can be a stream, see StreamedBatches. Saved
    configurations have `use_cache` on, which Trainer turns off in the model that it trains.

    Args:
        args, kwargs: As for Seq2SeqTrainer.
        copies: How often each training pair comes in an epoch, as TokenBatchSampler takes it; once by default.
    """

    args: TranslationTrainingArguments

    def __init__(self, *args: Any, copies: Sequence[float] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copies = copies
        if self.args.label_smoothing_factor and self.compute_loss_func is None:
            self.compute_loss_func = partial(smoothed_loss, smoothing=self.args.label_smoothing_factor)
        self._tokens_since, self._since = 0, None
        self._evaluated = torch.zeros(2, device=self.args.device)  # the sum of the losses of labels, and their number
        self._redirected_to: str | None = None
        self._resumed_from: str | None = None
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)
        self.add_callback(TrainingLog())
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))
        self.add_callback(_LossOfCheckpoint(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Trainer's own, but for a checkpoint of the last step, after which Trainer would take one step more.

        Args:
            resume_from_checkpoint: The folder of a checkpoint; True for the last whole one in `output_dir`.
            kwargs: As for Trainer.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = next(map(str, reversed(whole_checkpoints(self.args.output_dir))), None)
            if resume_from_checkpoint is None:
                raise ValueError(f"output_dir={self.args.output_dir} holds no whole checkpoint to go on from.")
        if resume_from_checkpoint and not self.is_fsdp_enabled:
            state = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME))
            if self._is_finished(state):
                self.state = state
                if self.args.load_best_model_at_end and state.best_model_checkpoint:
                    self._load_best_model()
                else:
                    self._load_from_checkpoint(resume_from_checkpoint)
                return TrainOutput(state.global_step, 0.0, {})
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _is_finished(self, state: TrainerState) -> bool:
        control = state.stateful_callbacks.get("TrainerControl", {}).get("args", {})
        stopped_early = control.get("should_training_stop", False) and state.global_step < state.max_steps
        return stopped_early or state.global_step >= (
            self.args.max_steps if self.args.max_steps > 0 else state.max_steps
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, torch.Tensor | int | None]:
        """Trainer's own: the batches of one update; counts the tokens that they train on."""
        if self._since is None or self.state.global_step == self._globalstep_last_logged:  # the first of an entry
            self._tokens_since, self._since = 0, time.perf_counter()
        batches, tokens = super().get_batch_samples(*args, **kwargs)
        if tokens is not None:
            self._tokens_since += tokens  # perhaps on the device, which is not waited for
        return batches, tokens

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's own; adds the target tokens that all devices together train on per second, without padding, to each
        entry with a loss. The time of evaluations does not count."""
        if "loss" in logs and (tokens := float(self._tokens_since)):
            logs["tokens_per_second"] = round(tokens / (time.perf_counter() - self._since), 1)
        if self._since is not None:
            self._since += logs.get("eval_runtime", 0.0)
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Trainer's own, but for the loss, which is the mean over all labels, as in training. Trainer's is a mean of the
        batches' means, which is another one for each batch size."""
        self._evaluated.zero_()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss, count = self.accelerator.reduce(self._evaluated).tolist()
        if count:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / count
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> tuple:
        """Trainer's own: the loss, predictions and labels of a batch; adds up the loss of its labels and their number."""
        if "labels" not in inputs:
            return super().prediction_step(model, inputs, *args, **kwargs)
        labels = inputs["labels"].clone()
        labels[self._pairs_of_last_batch(len(labels)) :] = -100
        loss, *outputs = super().prediction_step(model, {**inputs, "labels": labels}, *args, **kwargs)
        if count := int(labels.ne(-100).sum()):  # the mean of none is no number
            self._evaluated += torch.tensor([float(loss) * count, count], device=self._evaluated.device)
        return loss, *outputs

    def _pairs_of_last_batch(self, pairs: int) -> int:
        """How many pairs of this process's batch are no repeats, with which accelerate fills up the last batches of all
        processes; Trainer itself drops those of the predictions only once it has gathered them."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return pairs
        return max(state.remainder - self.args.process_index * pairs, 0)

    def get_train_dataloader(self) -> DataLoader:
        """Batches of `max_tokens` tokens per side, a share of them on each process."""
        if self.train_dataset is None:
            raise ValueError("train_dataset must be given to train on, not None.")
        if isinstance(self.train_dataset, datasets.IterableDataset):
            return DataLoader(self._streamed_batches(), batch_size=None, collate_fn=self.data_collator)
        loader = DataLoader(
            self._remove_unused_columns(self.train_dataset, description="training"),
            batch_sampler=self.batch_sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        # Batches of a sampler differ in their number of pairs, so accelerate cannot make them even. Nor need it: the
        # sampler itself makes their number a multiple of the number of processes. Evaluation needs it, since a process
        # that has no batch left would miss what all of them do together.
        wanted, self.accelerator.even_batches = self.accelerator.even_batches, False
        try:
            return self.accelerator.prepare(loader)
        finally:
            self.accelerator.even_batches = wanted

    @cached_property
    def batch_sampler(self) -> TokenBatchSampler:
        """The sampler of the training set, with the same plan on every process.

        The plan depends on the batches of an update, not on the number of processes that they are computed by, so that
        one process and eight go through the same updates.
        """
        batches_per_step = self.args.world_size * self.args.gradient_accumulation_steps
        enough = len(self.train_dataset) >= batches_per_step
        sampler = TokenBatchSampler(
            sequence_lengths(self.train_dataset, "input_ids"),
            sequence_lengths(self.train_dataset, "labels"),
            max_tokens=self.args.max_tokens,
            window=self.args.sort_window,
            seed=self._order_seed,
            multiple_of=batches_per_step if enough else self.args.world_size,
            copies=self._copies,
        )
        self.add_callback(_EpochOfSampler(sampler))
        return sampler

    def _streamed_batches(self) -> StreamedBatches:
        return StreamedBatches(
            self.train_dataset,
            max_tokens=self.args.max_tokens,
            window=self.args.sort_window,
            seed=self._order_seed,
            process=self.args.process_index,
            processes=self.args.world_size,
        )

    @property
    def _order_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _get_output_dir(self, trial: Any) -> str:
        return self._redirected_to or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside its place and move it there once it is whole.

        Trainer writes file by file into the final folder, so that a run that dies meanwhile leaves half a checkpoint,
        which it would resume from.

        Raises:
            SavingError: A file cannot be written, on a full disk say; the checkpoints before stay as they are.
        """
        run_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staging = run_dir / _STAGING
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self._redirected_to = str(staging)
        try:
            super()._save_checkpoint(model, trial)
            self._save_run_state(staging / name)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save has only the last for a full disk
            shutil.rmtree(staging, ignore_errors=True)
            last = next((folder.name for folder in reversed(whole_checkpoints(run_dir))), "none")
            raise SavingError(
                f"The checkpoint of step {self.state.global_step} could not be written to {run_dir} ({_reason(error)}); the "
                f"last whole one is {last}, and the same command goes on from it."
            ) from error
        finally:
            self._redirected_to = None
        self.accelerator.wait_for_everyone()
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.state.best_global_step and (best.name == name or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staging / name / TRAINER_STATE_NAME))
            flush_to_disk(staging / name)
            shutil.rmtree(run_dir / name, ignore_errors=True)
            os.replace(staging / name, run_dir / name)
            staging.rmdir()
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )
        self.accelerator.wait_for_everyone()

    def _save_run_state(self, checkpoint: Path) -> None:
        """Keep the losses that the log is yet to say, so that its next line is the same after a restart, and what the
        batches were."""
        loss = nested_gather(self._tr_loss, self.args.parallel_mode).mean().item()
        if self.args.should_save:
            streamed = isinstance(self.train_dataset, datasets.IterableDataset)
            batches = None if streamed else self.batch_sampler.fingerprint
            state = {"loss": loss, "since_step": self._globalstep_last_logged, "batches": batches}
            (checkpoint / _RUN_STATE).write_text(json.dumps(state))

    @staticmethod
    def batches_of(checkpoint: str | Path) -> str | None:
        """The fingerprint of the batch sampler of a checkpoint's run; None where the checkpoint does not say."""
        file = Path(checkpoint, _RUN_STATE)
        return json.loads(file.read_text())["batches"] if file.is_file() else None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Trainer takes every weight that shares its memory with another for a missing one, since files hold it once
        for name in getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", ()):
            if name in load_result.missing_keys:
                load_result.missing_keys.remove(name)
        super()._issue_warnings_after_load(load_result)

    def load_weights(self, folder: str | Path) -> None:
        """Replace the weights of the model, on every process, by those of a saved folder."""
        self._load_from_checkpoint(str(folder))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._resumed_from = checkpoint

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with _cache_in_config(self.accelerator.unwrap_model(self.model)):
            super()._save(output_dir, state_dict)


def smoothed_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None, *, smoothing: float
) -> torch.Tensor:
    """Cross-entropy with smoothed labels: what Trainer's own label smoother computes, in fewer passes over the logits.

    Args:
        outputs: The model's, with `logits`, [batch, targets, vocabulary].
        labels: [batch, targets], -100 where nothing is to be learned.
        num_items_in_batch: The number of labels that count in all batches of one update; this batch's by default.
        smoothing: Share of the probability that is spread over the whole vocabulary.
    """
    logits = outputs["logits"].flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.flatten().to(logits.device)
    count = labels.ne(-100).sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    total = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    return total / count.to(logits.device).clamp(min=1)


class TrainingLog(ProgressCallback):
    """A progress bar where there is a terminal, and one readable line per entry of the log."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self.training_bar = _bar(args, state.max_steps, "training")
            self.training_bar.update(state.global_step)
        self.current_step = self.first_step = state.global_step
        self.started = time.monotonic()

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs) -> None:
        if state.is_world_process_zero:
            if self.prediction_bar is None:
                self.prediction_bar = _bar(args, len(eval_dataloader), "translating", leave=False)
            self.prediction_bar.update(1)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            tqdm.write(
                f"step {state.global_step:>6,}/{state.max_steps:,}   loss {logs['loss']:.3f}   "
                f"learning rate {logs['learning_rate']:.2e}   epoch {logs.get('epoch', 0):.2f}   "
                f"{logs.get('tokens_per_second', 0):,.0f} tokens/s   {self._time_left(state)} left"
            )
        elif state.is_world_process_zero and logs and "eval_bleu" in logs and self.training_bar is not None:
            tqdm.write(
                f"step {state.global_step:>6,}/{state.max_steps:,}   validation loss {logs['eval_loss']:.3f}   "
                f"BLEU {logs['eval_bleu']:.1f}   chrF {logs['eval_chrf']:.1f}"
            )

    def _time_left(self, state: TrainerState) -> timedelta:
        """At the speed since this process began to train, evaluations and saves included."""
        per_step = (time.monotonic() - self.started) / max(state.global_step - self.first_step, 1)
        return timedelta(seconds=round(per_step * (state.max_steps - state.global_step)))


def _bar(args: TranslationTrainingArguments, total: int, description: str, *, leave: bool = True) -> tqdm:
    # None: where standard error is a terminal
    disable = True if args.disable_tqdm else None
    return tqdm(total=total, desc=description, dynamic_ncols=True, disable=disable, leave=leave)


class _EpochOfSampler(TrainerCallback):
    """Tells the sampler its epoch. Trainer does so itself, but does not find it when several processes resume."""

    def __init__(self, sampler: TokenBatchSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


class _LossOfCheckpoint(TrainerCallback):
    """Goes on with the mean of losses that the log was in the middle of, which Trainer begins anew."""

    def __init__(self, trainer: TranslationTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        checkpoint, self.trainer._resumed_from = self.trainer._resumed_from, None
        file = Path(checkpoint or "", _RUN_STATE)
        if checkpoint and file.is_file():
            saved = json.loads(file.read_text())
            self.trainer._tr_loss += saved["loss"]
            self.trainer._globalstep_last_logged = saved["since_step"]


def set_generation_defaults(model: PreTrainedModel, *, max_length: int = 512) -> None:
    """Give a model the generation settings that it is saved with.

    Beam 4 and length penalty 0.6 as in the paper, but its penalty divides a hypothesis's score by ((5 + n) / 6)^0.6
    (Wu et al. 2016), where Transformers divides by n^0.6, which favours long ones a little more.

    Args:
        model: An encoder-decoder model.
        max_length: Tokens of a translation at most; Transformers' own default of 20 cuts sentences off.
    """
    config = model.config
    model.generation_config = GenerationConfig(
        max_length=max_length,
        num_beams=4,
        length_penalty=0.6,
        use_cache=True,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )


def save_model(
    model: PreTrainedModel, tokenizer: Any, folder: Path, *, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Save a model and its tokenizer into a folder so that it is seen whole or not at all.

    The files are written to a folder within and then moved, config.json last: without it nothing opens the model.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        folder: Where to; files of an earlier model there are replaced.
        weights: The state dict to write where the model itself holds only a part of it.
    """
    with _staged(folder, last="config.json") as staging:
        with _cache_in_config(model):
            model.save_pretrained(staging, state_dict=weights)
        tokenizer.save_pretrained(staging)
        (folder / "config.json").unlink(missing_ok=True)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer into a folder so that tokenizer_config.json is there only once all of it is."""
    with _staged(folder, last="tokenizer_config.json") as staging:
        tokenizer.save_pretrained(staging)


@contextmanager
def saving(what: str, folder: Path) -> Iterator[None]:
    """Say in one sentence that something could not be written into a folder, on a full disk say.

    Raises:
        SavingError: In place of the system's error.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SavingError(
            f"{what} could not be written to {folder} ({_reason(error)}); make room, and give the same command again."
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


@contextmanager
def _staged(folder: Path, *, last: str) -> Iterator[Path]:
    """A folder within, whose files are moved out when they are all written, the one called `last` after the others."""
    staging = folder / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    yield staging
    flush_to_disk(staging)
    for file in sorted(staging.iterdir(), key=lambda file: file.name == last):
        os.replace(file, folder / file.name)
    staging.rmdir()


@contextmanager
def _cache_in_config(model: PreTrainedModel) -> Iterator[None]:
    during_training = model.config.use_cache
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = during_training
