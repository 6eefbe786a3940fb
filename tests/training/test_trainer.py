import json
import os
import resource
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother

import relpos.training.trainer as trainer_module
from relpos.configuration import preset
from relpos.training.metric import compute_metrics_with
from relpos.training.subwords import train_tokenizer
from relpos.training.trainer import (
    SavingError,
    TranslationTrainer,
    TranslationTrainingArguments,
    save_model,
    set_generation_defaults,
    smoothed_loss,
)

NOUNS = [("house", "Haus"), ("file", "Blatt"), ("window", "Fenster"), ("table", "Pult"), ("book", "Buch")]
VERBS = [("Open", "Öffne"), ("Close", "Schließe"), ("Take", "Nimm"), ("See", "Sieh"), ("Paint", "Male")]
PAIRS = [(f"{en} the {noun}.", f"{de} das {wort}!") for en, de in VERBS for noun, wort in NOUNS]
PAIRS += [(f"{en} the {noun} now and then.", f"{de} ab und zu das {wort}!") for en, de in VERBS for noun, wort in NOUNS]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair], vocab_size=420)


def rows(tokenizer, pairs=PAIRS):
    encoded = tokenizer([source for source, _ in pairs], text_target=[target for _, target in pairs])
    return Dataset.from_dict({name: encoded[name] for name in ("input_ids", "labels")})


def model_of(tokenizer, **fields):
    torch.manual_seed(0)
    size = len(tokenizer)
    model = AutoModelForSeq2SeqLM.from_config(preset("tiny", vocab_size=size, decoder_vocab_size=size, **fields))
    set_generation_defaults(model, max_length=40)
    return model


def trainer_of(folder, model, tokenizer, dataset=None, **arguments):
    defaults = {"max_tokens": 100, "max_steps": 4, "warmup_steps": 0, "lr_scheduler_type": "constant", "seed": 3}
    defaults |= {"learning_rate": 1e-3, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TranslationTrainingArguments(output_dir=str(folder), **{**defaults, **arguments})
    return TranslationTrainer(
        model=model,
        args=args,
        train_dataset=rows(tokenizer) if dataset is None else dataset,
        eval_dataset=rows(tokenizer),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics_with(tokenizer),
    )


def test_the_papers_settings_are_the_defaults(tmp_path):
    args = TranslationTrainingArguments(output_dir=str(tmp_path))
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert args.lr_scheduler_type == "inverse_sqrt"
    assert args.warmup_steps == 4000
    assert args.label_smoothing_factor == 0.1
    assert args.weight_decay == args.max_grad_norm == 0
    assert args.learning_rate == pytest.approx(512**-0.5 * 4000**-0.5, rel=0.01)


def test_a_machine_without_accelerator_trains_on_its_cpu(tmp_path, monkeypatch):
    """Which accelerate must be told, or each process of torchrun takes itself for the only one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    args = TranslationTrainingArguments(output_dir=str(tmp_path), bf16=True)
    assert args.use_cpu
    assert args.device.type == "cpu"
    assert not args.dataloader_pin_memory


def test_training_batches_keep_the_budget_and_build_no_cache(tmp_path, tokenizer):
    model = model_of(tokenizer)
    seen = []
    model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((kwargs["input_ids"].shape, kwargs["labels"].shape, output)),
        with_kwargs=True,
    )
    trainer = trainer_of(tmp_path, model, tokenizer, label_smoothing_factor=0.0)
    trainer.train()
    assert len(seen) == 4
    for source, target, output in seen:
        assert max(source.numel(), target.numel()) <= 100
        assert source[0] > 1
        assert getattr(output, "cache", None) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_gives_the_same_update(tmp_path, tokenizer, smoothing):
    """One update from 1 x 8 pairs and from 4 x 2, whose lengths differ, so that a mean of means would be another."""
    pairs = [(f"{source} " * length, target * length) for length, (source, target) in enumerate(PAIRS[:8], 1)]
    dataset = rows(tokenizer, pairs)
    updated = []
    for batches in ([range(8)], [[0, 1], [2, 3], [4, 5], [6, 7]]):
        model = model_of(tokenizer).double()
        trainer = trainer_of(
            tmp_path,
            model,
            tokenizer,
            dataset,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            label_smoothing_factor=smoothing,
            gradient_accumulation_steps=len(batches),
        )
        trainer.batch_sampler = [list(batch) for batch in batches]
        trainer.train()
        updated.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    start = torch.cat([parameter.detach().flatten() for parameter in model_of(tokenizer).double().parameters()])
    assert (updated[0] - start).abs().max() > 1e-3
    torch.testing.assert_close(updated[0], updated[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)])
def test_the_smoothed_loss_is_trainers_own(count):
    logits = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (3, 5))
    labels[:, 3:] = -100
    losses = [
        smoothed_loss({"logits": logits}, labels, count, smoothing=0.1),
        LabelSmoother(epsilon=0.1)({"logits": logits}, labels, num_items_in_batch=count),
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in losses))


def test_the_smoothed_loss_of_nothing_to_learn_is_zero():
    logits = torch.randn(1, 2, 11, requires_grad=True)
    loss = smoothed_loss({"logits": logits}, torch.full((1, 2), -100), smoothing=0.1)
    assert loss == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("generate", [False, True])
@torch.no_grad()
def test_the_validation_loss_is_the_mean_over_all_tokens(tmp_path, tokenizer, smoothing, generate):
    model = model_of(tokenizer, init_std=0.3).eval()  # so that the losses of short and long pairs differ
    options = {"label_smoothing_factor": smoothing, "predict_with_generate": generate, "generation_max_length": 3}
    losses = []
    for size in (1, 7, 64):  # 50 pairs: with a rest and without
        trainer = trainer_of(tmp_path, model, tokenizer, per_device_eval_batch_size=size, **options)
        trainer.compute_metrics = None
        losses.append(trainer.evaluate()["eval_loss"])
    total, count = 0, 0
    for row in rows(tokenizer):
        inputs = {name: torch.tensor([ids]) for name, ids in row.items()}
        log_probs = model(**inputs).logits.log_softmax(-1)[0]
        chosen = log_probs.gather(1, inputs["labels"].T).sum()
        total -= float((1 - smoothing) * chosen + smoothing * log_probs.mean(-1).sum())
        count += inputs["labels"].numel()
    assert losses == pytest.approx([total / count] * 3, rel=1e-5)


def train_to(folder, tokenizer, **arguments):
    torch.manual_seed(0)
    trainer = trainer_of(folder, model_of(tokenizer), tokenizer, max_steps=12, **arguments)
    return trainer


def test_resuming_in_the_middle_of_an_epoch_goes_on_exactly(tmp_path, tokenizer):
    options = {"save_strategy": "steps", "save_steps": 7, "logging_steps": 1, "lr_scheduler_type": "cosine"}
    whole = train_to(tmp_path, tokenizer, **options)
    assert len(whole.batch_sampler) not in (1, 7)
    whole.train()
    resumed = train_to(tmp_path, tokenizer, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    losses = [
        {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        for trainer in (whole, resumed)
    ]
    assert losses[0] == losses[1]
    for left, right in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(left, right)


class FullDisk(TrainerCallback):
    """Lets no file grow beyond `room` bytes from a step on: a write fails as it does on a full disk."""

    def __init__(self, *, at_step, room):
        self.at_step, self.room = at_step, room

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at_step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, resource.RLIM_INFINITY))


@pytest.fixture
def _disk():
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.usefixtures("_disk")
@pytest.mark.parametrize("room", [30_000, 120_000, 200_000])  # the weights have MANY bytes, the optimizer twice as many
def test_checkpoints_are_whole_or_absent(tmp_path, tokenizer, room):
    trainer = train_to(tmp_path, tokenizer, save_strategy="steps", save_steps=4, save_total_limit=2)
    trainer.add_callback(FullDisk(at_step=12, room=room))
    with pytest.raises(
        SavingError, match=r"step 12 could not be .*(\(os error 27\)|too large|write).*; the last whole one is"
    ):
        trainer.train()
    checkpoints = sorted(folder.name for folder in tmp_path.glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-4", "checkpoint-8"]
    for name in checkpoints:
        assert json.loads((tmp_path / name / "trainer_state.json").read_text())["global_step"] == int(name[11:])
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["use_cache"] is True
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = train_to(tmp_path, tokenizer, save_strategy="steps", save_steps=4, save_total_limit=2)
    again.train(resume_from_checkpoint=True)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-8"]


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path, tokenizer):
    trainer = train_to(
        tmp_path,
        tokenizer,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=4,
        eval_steps=4,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first, while losses fall
        learning_rate=3e-3,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-4")


def test_a_saved_model_translates_with_sane_settings(tmp_path, tokenizer):
    trainer = trainer_of(tmp_path / "run", model_of(tokenizer), tokenizer)
    trainer.train()
    set_generation_defaults(trainer.model)
    save_model(trainer.model, tokenizer, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["use_cache"] is True
    assert not list((tmp_path / "saved").glob("*.bin"))
    assert not (tmp_path / "saved" / ".saving").exists()
    generation = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (generation.num_beams, generation.length_penalty, generation.use_cache) == (4, 0.6, True)
    assert generation.max_length == 512
    assert generation.decoder_start_token_id == tokenizer.pad_token_id
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    for saved, trained in zip(model.parameters(), trainer.model.parameters()):
        assert torch.equal(saved, trained)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == tokenizer.get_vocab()


def test_a_save_that_fails_leaves_no_model(tmp_path, tokenizer, monkeypatch):
    moves = []

    def replace(source, target):
        moves.append(os.path.basename(source))
        if len(moves) == 2:
            raise OSError(28, "No space left on device")
        os.rename(source, target)

    monkeypatch.setattr(trainer_module, "os", SimpleNamespace(replace=replace))
    with pytest.raises(OSError, match="No space"):
        save_model(model_of(tokenizer), tokenizer, tmp_path)
    assert "config.json" not in moves
    assert not (tmp_path / "config.json").exists()


def test_a_model_learns_fifty_pairs_by_heart(tmp_path, tokenizer):
    assert len(PAIRS) == len(set(PAIRS)) == 50
    sizes = {f"{side}_{field}": size for side in ("encoder", "decoder") for field, size in SMALL.items()}
    model = model_of(tokenizer, d_model=64, **sizes)
    trainer = trainer_of(
        tmp_path, model, tokenizer, max_steps=200, learning_rate=5e-3, max_tokens=400, lr_scheduler_type="cosine"
    )
    trainer.train()
    scores = trainer.evaluate()
    assert scores["eval_bleu"] > 95
    assert trainer.evaluate(num_beams=4)["eval_bleu"] > 95


SMALL = {"layers": 1, "attention_heads": 4, "ffn_dim": 128}
