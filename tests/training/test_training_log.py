"""What a training tells while it runs: its log, what reporters are given, time left, and when it stops early."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, TrainerCallback

import relpos.training.trainer as trainer_module
from relpos.configuration import preset
from relpos.training.metric import compute_metrics_with
from relpos.training.subwords import train_tokenizer
from relpos.training.trainer import (
    TrainingLog,
    TranslationTrainer,
    TranslationTrainingArguments,
    set_generation_defaults,
)

PAIRS = [(f"The {number} houses {'and ' * (number % 3)}windows.", f"Die {number} Häuser.") for number in range(30)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair], vocab_size=360)


@pytest.fixture
def make_trainer(tmp_path, tokenizer):
    def make(**arguments):
        size = len(tokenizer)
        model = AutoModelForSeq2SeqLM.from_config(preset("tiny", vocab_size=size, decoder_vocab_size=size, dropout=0.0))
        set_generation_defaults(model, max_length=8)
        encoded = tokenizer([source for source, _ in PAIRS], text_target=[target for _, target in PAIRS])
        rows = Dataset.from_dict({name: encoded[name] for name in ("input_ids", "labels")})
        defaults = {"max_tokens": 150, "max_steps": 4, "warmup_steps": 0, "lr_scheduler_type": "constant", "seed": 3}
        defaults |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        return TranslationTrainer(
            model=model,
            args=TranslationTrainingArguments(output_dir=str(tmp_path), **{**defaults, **arguments}),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            compute_metrics=compute_metrics_with(tokenizer),
        )

    return make


class Reporter(TrainerCallback):
    """What any reporter of Trainer's is given."""

    def __init__(self):
        self.given = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, value in logs.items():
            self.given.setdefault(name, []).append(value)


def test_reporters_are_given_loss_rate_norm_speed_and_bleu(make_trainer):
    trainer, reporter = make_trainer(eval_strategy="steps", eval_steps=2), Reporter()
    trainer.add_callback(reporter)
    trainer.train()
    for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second"):
        assert len(reporter.given[name]) == 4
        assert all(value > 0 for value in reporter.given[name])
    assert len(reporter.given["eval_bleu"]) == 2


def test_tensorboard_shows_them(make_trainer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(eval_strategy="steps", eval_steps=2, report_to="tensorboard").train()
    (events,) = tmp_path.glob("**/events.out.*")
    found = EventAccumulator(str(events)).Reload()
    wanted = {"train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second", "eval/bleu"}
    assert wanted <= set(found.Tags()["scalars"])
    assert [point.step for point in found.Scalars("eval/bleu")] == [2, 4]


def test_the_norm_is_that_of_gradients_that_are_not_clipped(make_trainer):
    """A step of plain gradient descent at rate 1 moves the parameters by the gradient."""
    trainer = make_trainer(max_steps=1, optim="sgd", learning_rate=1.0)
    assert trainer.args.max_grad_norm == 0
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    moved = torch.stack([(new - old).norm() for new, old in zip(trainer.model.parameters(), before)]).norm().item()
    (norm,) = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norm == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_speed_is_target_tokens_without_padding_over_time(make_trainer, monkeypatch, accumulation):
    trainer = make_trainer(num_train_epochs=1, max_steps=-1, gradient_accumulation_steps=accumulation)
    steps = -(-len(trainer.batch_sampler) // accumulation)
    trainer.args.logging_steps = steps
    clock = iter(range(0, 1000, 4))  # four seconds between one look and the next
    clocks = SimpleNamespace(perf_counter=lambda: next(clock), monotonic=time.monotonic)
    monkeypatch.setattr(trainer_module, "time", clocks)
    trainer.train()
    (speed,) = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert speed == pytest.approx(sum(map(len, trainer.train_dataset["labels"])) / 4, abs=0.1)


def test_evaluations_do_not_slow_training_down(make_trainer, monkeypatch):
    trainer = make_trainer()
    trainer.remove_callback(TrainingLog)
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: 20.0))
    trainer._tokens_since, trainer._since = 100, 0.0
    trainer.log({"eval_runtime": 15.0})
    logs = {"loss": 1.0}
    trainer.log(logs)
    assert logs["tokens_per_second"] == 20.0


def test_lines_of_the_log(make_trainer, capfd):
    make_trainer(eval_strategy="steps", eval_steps=4).train()
    lines = capfd.readouterr().out.splitlines()
    for step, line in enumerate(lines[:4], start=1):
        assert re.match(
            rf"step +{step}/4   loss \d+\.\d+   learning rate .*   [\d,]+ tokens/s   \d+:\d\d:\d\d left$", line
        )
    assert re.match(r"step +4/4   validation loss .* BLEU \d+\.\d   chrF", lines[4])


def test_time_left_is_at_the_speed_of_this_process():
    log, state = TrainingLog(), SimpleNamespace(global_step=150, max_steps=450)
    log.first_step, log.started = 100, time.monotonic() - 20
    assert log._time_left(state).total_seconds() == pytest.approx(120, abs=1)


def test_training_stops_where_bleu_no_longer_rises_and_keeps_the_best(make_trainer):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(early_stopping_patience=2, learning_rate=0.0, max_steps=20, **options)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.state.best_global_step == 1
    assert (trainer.args.metric_for_best_model, trainer.args.greater_is_better) == ("bleu", True)
    assert trainer.state.best_metric == trainer.state.log_history[1]["eval_bleu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping_patience": 0, "eval_strategy": "steps"}, "early_stopping_patience must be at least 1, not 0"),
        ({"early_stopping_patience": 3}, "early_stopping_patience=3 needs evaluations: set eval_strategy"),
    ],
)
def test_early_stopping_that_could_not_work(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        TranslationTrainingArguments(output_dir=str(tmp_path), **options)


def test_the_loss_decides_where_nothing_is_translated(tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    args = TranslationTrainingArguments(output_dir=str(tmp_path), predict_with_generate=False, **options)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
