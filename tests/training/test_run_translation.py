import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, EvalPrediction, GenerationConfig

from relpos.configuration import preset
from relpos.modeling_relpos import RelPosAttention
from relpos.training import run_translation
from relpos.training.corpus import CorpusError
from relpos.training.loading import ModelError
from relpos.training.recipe import parse_arguments
from relpos.training.run_translation import RecipeError, main, make_trainer
from relpos.training.show_translations import main as show_main
from relpos.training.trainer import SavingError

TINY = ["--model", "tiny", "--vocab_size", "420", "--max_tokens", "200", "--use_cpu", "true", "--save_strategy", "no"]
TINY += ["--warmup_steps", "2", "--generation_max_length", "20"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Forty pairs, and one without a source."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.tsv"
    file.write_text("".join(f"The {n} house.\tDas {n} Haus.\n" for n in range(40)) + "\tleer\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A folder as `relpos train` leaves it, after two steps."""
    arguments = ["--train_corpus", str(corpus), "--validation_corpus", str(corpus), "--max_steps", "2"]
    folder = tmp_path_factory.mktemp("trained") / "model"
    return main([*TINY, *arguments, "--output_dir", str(folder), "--d_model", "16"])


def test_the_folder_is_complete(trained):
    config = json.loads((trained / "config.json").read_text())
    assert (config["d_model"], config["use_cache"]) == (16, True)
    assert (config["source_language"], config["target_language"]) == ("en", "de")
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert config["vocab_size"] == config["decoder_vocab_size"] == len(tokenizer)
    assert config["longest_training_source"] >= 5
    assert GenerationConfig.from_pretrained(trained).num_beams == 4
    assert (trained / "README.md").read_text(encoding="utf-8").startswith("---")
    model = AutoModelForSeq2SeqLM.from_pretrained(trained)
    ids = model.generate(**tokenizer("The 3 house.", return_tensors="pt"), max_length=5)
    assert ids[0, 0] == tokenizer.pad_token_id


def test_the_recipe_in_the_folder_repeats_the_run(trained, tmp_path):
    written = yaml.safe_load((trained / "recipe.yaml").read_text(encoding="utf-8"))
    assert written["d_model"] == 16
    assert "output_dir" not in written
    again = main([str(trained / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    weights = [(folder / "model.safetensors").read_bytes() for folder in (trained, again)]
    assert weights[0] == weights[1]


def test_fine_tuning_goes_on_from_a_folder(trained, corpus, tmp_path):
    folder = main(
        [
            "finetune",
            "--model",
            str(trained),
            "--train_corpus",
            str(corpus),
            "--output_dir",
            str(tmp_path / "tuned"),
            "--max_steps",
            "1",
            "--learning_rate",
            "0",
            "--dropout",
            "0.1",
            "--use_cpu",
            "true",
        ]
    )
    assert json.loads((folder / "config.json").read_text())["dropout"] == 0.1
    assert (folder / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(trained).get_vocab()


def test_fine_tuning_with_another_vocabulary_or_shape_is_refused(trained, corpus, tmp_path):
    other = tmp_path / "other.tsv"
    other.write_text("".join(f"{n} ψ ω\t{n} Ψ Ω\n" for n in range(40)), encoding="utf-8")
    another = main([*TINY, "--train_corpus", str(other), "--max_steps", "1", "--output_dir", str(tmp_path / "another")])
    tune = ["finetune", "--model", str(trained), "--train_corpus", str(corpus), "--use_cpu", "true", "--max_steps", "1"]
    with pytest.raises(RecipeError, match="has another vocabulary than model="):
        main([*tune, "--output_dir", str(tmp_path / "tuned"), "--tokenizer", str(another)])
    with pytest.raises(RecipeError, match="weights of another shape"):
        main([*tune, "--output_dir", str(tmp_path / "tuned"), "--d_model", "32"])
    main([*tune, "--output_dir", str(tmp_path / "tuned"), "--tokenizer", str(trained)])


def test_validation_is_scored_on_the_corpus_as_it_is(corpus, tmp_path):
    """The references are its text, in the order of the rows, which are sorted."""
    held_out = tmp_path / "held-out.tsv"
    held_out.write_text("".join(f"The {n} house.\tDas {n} 家.\n" for n in range(30)), encoding="utf-8")
    run = parse_arguments(
        [
            *TINY,
            "--train_corpus",
            str(corpus),
            "--validation_corpus",
            str(held_out),
            "--output_dir",
            str(tmp_path / "run"),
            "--remove_unused_columns",
            "false",
        ]
    )
    trainer, _ = make_trainer(run)
    references = trainer.eval_dataset["reference"]
    assert sorted(references) == sorted(f"Das {n} 家." for n in range(30))
    sources = trainer.processing_class.batch_decode(list(trainer.eval_dataset["input_ids"]), skip_special_tokens=True)
    assert [source.split()[1] for source in sources] == [reference.split()[1] for reference in references]
    right = trainer.processing_class(list(references))["input_ids"]
    width = max(map(len, right))
    ids = np.array([row + [-100] * (width - len(row)) for row in right])
    found = trainer.compute_metrics(EvalPrediction(predictions=ids, label_ids=np.full_like(ids, -100)))
    assert found["bleu"] == pytest.approx(100), "the labels are not looked at"
    assert "eval_bleu" in trainer.evaluate()


@pytest.mark.slow
def test_a_recipe_of_the_paper_trains_at_a_small_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    archives = {  # what they unpack to
        "training/europarl-v7.de-en": 30,
        "commoncrawl.de-en": 5,
        "training/news-commentary-v9.de-en": 5,
        "dev/newstest2013": 3,
    }
    for name, count in archives.items():
        for language, text in (("en", "The {} house.\n"), ("de", "Das {} Haus.\n")):
            file = tmp_path / f"{name}.{language}"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(map(text.format, range(count))), encoding="utf-8")
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {"vocab_size": 420, "max_tokens": 50, "tokens_per_step": 400, "generation_max_length": 10}
    steps = {"max_steps": 3, "save_steps": 1, "eval_steps": 2, "logging_steps": 1}
    fields = [f"--{name}={value}" for name, value in {**sizes, **steps}.items()]
    folder = main(["wmt14-en-de-big", "--output_dir=out", "--use_cpu=true", *fields])
    config = json.loads((folder / "config.json").read_text())
    assert (config["max_relative_position"], config["dropout"], config["d_model"]) == (8, 0.3, 32)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    warm_up = [entry["learning_rate"] for entry in history if "loss" in entry]
    assert warm_up == pytest.approx([4.9411e-4 * step / 4000 for step in range(3)])
    assert next(entry["step"] for entry in history if "eval_bleu" in entry) == 2
    weights = [load_file(path / "model.safetensors") for path in [folder, *sorted(folder.glob("checkpoint-*"))]]
    assert len(weights) == 1 + 3
    name = "model.encoder.layers.0.fc1.weight"
    torch.testing.assert_close(weights[0][name], sum(part[name] for part in weights[1:]) / 3)
    assert not torch.equal(weights[1][name], weights[3][name])


def test_translations_are_shown_side_by_side(trained, capsys):
    show_main([str(trained), "-n", "2"])
    output = capsys.readouterr().out
    for text in ("source", "reference", "translation", "RelPosForConditionalGeneration"):
        assert text in output
    with pytest.raises(SystemExit) as caught:
        show_main(["missing/folder/model"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rat", "1"], "learning_rat; did you mean learning_rate"),
        (["--d_modle", "1"], "d_model"),
        (["--max_steps", "many"], "max_steps"),
        (["--max_tokens", "0"], "max_tokens must be at least 1"),
        (["--max_length", "0"], "max_length must be at least 1"),
        (["--max_steps", "0"], "max_steps"),
        (["--label_smoothing_factor", "1.5"], "label_smoothing_factor"),
        (["--target_lang", "en"], "target_lang"),
        (["--lr_scheduler_type", "steps"], "steps"),
        (["--d_model", "15"], "d_model"),
        (["--vocab_size", "100"], "vocab_size must be at least"),
        (["--tokenizer", "missing/folder"], "tokenizer=missing/folder"),
        (["--tokenizer", "missing.model"], "missing.model"),
        (["--resume_from_checkpoint", "true"], "resume_from_checkpoint=true is no folder of a checkpoint"),
    ],
)
def test_impossible_fields_are_named_in_one_sentence(corpus, tmp_path, arguments, message):
    with pytest.raises(RecipeError, match=message) as caught:
        main([*TINY, "--train_corpus", str(corpus), "--output_dir", str(tmp_path / "out"), *arguments])
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob("*.json"))


def test_what_is_left_out_and_the_padding_are_said(corpus, tmp_path, capsys):
    lines = corpus.read_text(encoding="utf-8")
    file = tmp_path / "corpus.tsv"
    file.write_text(lines + lines.splitlines()[7] + "\n" + "house " * 99 + "\tHaus\n", encoding="utf-8")
    fields = ["--train_corpus", str(file), "--max_length", "60", "--output_dir", str(tmp_path / "out")]
    main([*TINY, *fields, "--max_steps", "1", "--drop_duplicates", "true"])
    said = {line[:18].strip(): line[18:].strip() for line in capsys.readouterr().out.splitlines()}
    assert said["training pairs"] == "40"
    assert set(said["left out"].split(", ")) == {"1 an empty side", "1 duplicate", "1 too long"}
    assert re.search(r"padding \d+% of the sources and \d+% of the targets", said["batches"])


def test_pairs_of_a_small_corpus_come_more_often_where_the_temperature_says_so(tmp_path):
    for name, size in (("large", 32), ("small", 4)):
        lines = (f"The {n} house.\tDas {n} Haus {name}.\n" for n in range(size))
        (tmp_path / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    corpora = [f"en-de={tmp_path / 'large.tsv'}", f"en-nl={tmp_path / 'small.tsv'}"]
    times = {}
    for temperature in ("1", "2"):
        fields = [
            "--train_corpus",
            *corpora,
            "--sampling_temperature",
            temperature,
            "--output_dir",
            str(tmp_path / "out"),
        ]
        trainer, _ = make_trainer(parse_arguments([*TINY, *fields]))
        rows = Counter(row for batch in trainer.batch_sampler for row in batch)
        times[temperature] = sum(rows[row] for row in range(32)), sum(rows[row] for row in range(32, 36))
    assert times["1"] == (32, 4)
    large, small = times["2"]
    assert large == 32
    assert small / large == pytest.approx((4 / 32) ** 0.5, abs=0.05)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tokenize_corpora", "The prepared corpora could not be written"),
        ("_write_beginnings", "The recipe could not be written"),
        ("write_card", "The model could not be written"),
    ],
)
def test_a_full_disk_is_one_sentence(corpus, tmp_path, monkeypatch, name, what):
    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_translation, name, full_disk)
    with pytest.raises(
        SavingError, match=rf"^{what} to .*\(\[Errno 28\] No space left on device\); make room, and give"
    ):
        main([*TINY, "--max_steps", "1", "--train_corpus", str(corpus), "--output_dir", str(tmp_path / "out")])


def test_what_is_missing_is_named(corpus, tmp_path):
    with pytest.raises(CorpusError, match="missing"):
        main([*TINY, "--train_corpus", str(tmp_path / "missing.tsv"), "--output_dir", str(tmp_path / "out")])
    with pytest.raises((RecipeError, ModelError), match="missing"):
        main(["--model", str(tmp_path / "missing"), "--output_dir", str(tmp_path / "out")])
    (tmp_path / "blank.tsv").write_text("a\t\n \tb\n")
    with pytest.raises(RecipeError, match="text on both sides"):
        main([*TINY, "--train_corpus", str(tmp_path / "blank.tsv"), "--output_dir", str(tmp_path / "out")])
    both = ["--train_corpus", str(corpus), "--validation_corpus", str(tmp_path / "blank.tsv")]
    with pytest.raises(
        RecipeError, match=r"validation_corpus=.*blank\.tsv has no pair of en-de with text on both sides"
    ):
        main([*TINY, *both, "--output_dir", str(tmp_path / "out")])


def test_nothing_is_overwritten_unasked_and_no_stranger_ever(trained, corpus, tmp_path):
    before = {file.name: file.stat().st_mtime_ns for file in trained.iterdir()}
    arguments = [*TINY, "--train_corpus", str(corpus), "--max_steps", "1", "--output_dir"]
    with pytest.raises(RecipeError, match="not empty"):
        main([*arguments, str(trained)])
    assert {file.name: file.stat().st_mtime_ns for file in trained.iterdir()} == before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    with pytest.raises(RecipeError, match="no model"):
        main([*arguments, str(tmp_path / "home"), "--overwrite"])
    assert (tmp_path / "home" / "letters.txt").read_text() == "dear"
    with pytest.raises(RecipeError, match="file"):
        main([*arguments, str(corpus), "--overwrite"])
    old = tmp_path / "old"
    (old / "checkpoint-5").mkdir(parents=True)
    (old / "config.json").write_text("{}")
    main([*arguments, str(old), "--overwrite"])
    assert not (old / "checkpoint-5").exists()
    AutoModelForSeq2SeqLM.from_pretrained(old)


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def train_losses(corpus, tmp_path_factory):
    """Trains for three steps with further fields, and gives the loss of each step."""
    root = tmp_path_factory.mktemp("precision")
    fields = ["--train_corpus", str(corpus), "--max_steps", "3", "--logging_steps", "1", "--learning_rate", "1e-3"]
    runs = iter(range(99))

    def run(*further):
        return losses(main([*TINY, *fields, *further, "--output_dir", str(root / str(next(runs)))]))

    return run


@pytest.fixture(scope="module")
def plain_losses(train_losses):
    found = train_losses()
    assert len(found) == 3
    assert found[2] < found[0]
    return found


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        (["--optim", "adamw_torch"], 1e-5),  # the default is the fused one
        (["--activation_checkpointing", "true"], 1e-5),
        (["--bf16", "true"], 2e-2),
    ],
)
def test_speed_and_size_leave_the_losses(train_losses, plain_losses, monkeypatch, fields, tolerance):
    passes = []
    forward = RelPosAttention.forward

    def counted(*args, **kwargs):
        passes.append(torch.is_autocast_enabled("cpu"))
        return forward(*args, **kwargs)

    monkeypatch.setattr(RelPosAttention, "forward", counted)
    assert train_losses(*fields) == pytest.approx(plain_losses, rel=tolerance)
    config = preset("tiny")
    once = 3 * (config.encoder_layers + 2 * config.decoder_layers)
    assert len(passes) == once or "--activation_checkpointing" in fields
    assert (len(passes) > once) == ("--activation_checkpointing" in fields), "layers are computed again in the backward"
    assert all(passes) == ("--bf16" in fields)
