import gzip
from pathlib import Path

import datasets
import pytest
import yaml

from relpos.configuration import preset, recipe, recipes
from relpos.training.corpus import parse_corpora, read_corpus
from relpos.training.recipe import RecipeError, parse_arguments

REQUIRED = ["--model", "tiny", "--train_corpus", "corpus.tsv"]
"""What the recipe finetune leaves to the command line."""

PAPER = {
    # dropout, steps, peak rate, checkpoints averaged: Shaw et al. 2018, section 4.1
    "wmt14-en-de-base": (0.1, 100_000, 7.0e-4, 1),
    "wmt14-en-de-big": (0.3, 300_000, 4.9e-4, 20),
    "wmt14-en-fr-base": (0.1, 100_000, 7.0e-4, 1),
    "wmt14-en-fr-big": (0.1, 300_000, 4.9e-4, 20),
}


def parse(name, *arguments, output_dir="out"):
    required = REQUIRED if name == "finetune" else []
    return parse_arguments([name, "--output_dir", str(output_dir), *required, *arguments])


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_parses_and_the_command_line_overrides_it(name):
    run = parse(name, "--max_steps=7", "--learning-rate", "1e-4")
    assert run.training.max_steps == 7
    assert run.training.learning_rate == 1e-4
    assert run.given["max_steps"] == 7
    run = parse(name)
    fields = yaml.safe_load(recipe(name).read_text(encoding="utf-8"))
    for field in ("max_steps", "dropout", "vocab_size", "target_lang"):
        if field in fields:
            parsed = {**vars(run.training), **vars(run.data), **vars(run.model), **run.overrides}
            assert parsed[field] == run.given[field] == fields[field]


@pytest.mark.parametrize("positions", ["", "-sinusoidal"])
@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers(name, positions):
    run = parse(name + positions)
    model, data, args = run.model, run.data, run.training
    dropout, steps, rate, averaged = PAPER[name]
    assert run.overrides == {"dropout": dropout}
    assert model.model == name.split("-")[-1] + positions
    assert model.vocab_size == 32_768
    assert (data.source_lang, data.target_lang) == ("en", name.split("-")[2])
    assert all(data.target_lang in corpus or "fixed" in corpus for corpus in data.train_corpus)
    assert (args.max_tokens, args.tokens_per_step) == (4_096, 8 * 4_096)
    assert args.gradient_accumulation_steps == 8 // args.world_size
    assert args.max_steps == steps
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay) == (0.9, 0.98, 1e-9, 0)
    assert (args.lr_scheduler_type, args.warmup_steps, args.max_grad_norm) == ("inverse_sqrt", 4000, 0)
    d_model = preset(model.model).d_model
    assert args.learning_rate == pytest.approx(d_model**-0.5 * 4000**-0.5, rel=1e-4)
    assert float(f"{args.learning_rate:.1e}") == rate
    assert args.label_smoothing_factor == 0.1
    assert args.average_last == averaged
    assert args.save_total_limit >= averaged
    config = preset(model.model, **run.overrides)
    assert (config.max_relative_position is None) == bool(positions)


WMT14 = {
    # what the archives of statmt.org/wmt14 unpack to, as tensor2tensor and fairseq find it there
    "de": """training/europarl-v7.de-en.de training/europarl-v7.de-en.en commoncrawl.de-en.de commoncrawl.de-en.en
        training/news-commentary-v9.de-en.de training/news-commentary-v9.de-en.en""",
    "fr": """training/europarl-v7.fr-en.fr training/europarl-v7.fr-en.en commoncrawl.fr-en.fr commoncrawl.fr-en.en
        un/undoc.2000.fr-en.fr un/undoc.2000.fr-en.en training/news-commentary-v9.fr-en.fr
        training/news-commentary-v9.fr-en.en giga-fren.release2.fixed.fr.gz giga-fren.release2.fixed.en.gz""",
}


@pytest.mark.parametrize("positions", ["", "-sinusoidal"])
@pytest.mark.parametrize("name", PAPER)
def test_the_corpora_are_named_as_the_archives_unpack_them(name, positions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = parse(name + positions).data
    languages = (data.source_lang, data.target_lang)
    validation = [f"dev/newstest2013.{language}" for language in languages]
    training = WMT14[data.target_lang].split()
    for file in map(Path, [*validation, *training]):
        file.parent.mkdir(exist_ok=True)
        with (gzip.open if file.suffix == ".gz" else open)(file, "wt") as opened:
            opened.write(f"{file.name.removesuffix('.gz')}\n")
    found = []
    for _, corpus in parse_corpora([*data.validation_corpus, *data.train_corpus], languages=languages):
        [row] = read_corpus(corpus, languages=languages)
        found += row["translation"].values()
    assert sorted(found) == sorted(Path(file.removesuffix(".gz")).name for file in [*validation, *training])


def test_the_quickstart_is_small():
    run = parse("quickstart")
    assert run.overrides["d_model"] == 128
    assert run.training.max_steps < 5_000


def test_recipes_extend_one_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: quickstart\nmax_steps: 3\n")
    (tmp_path / "yours.yaml").write_text("extends: mine.yaml\nd_model: 64\n")
    run, base = parse("yours.yaml"), parse("quickstart")
    assert (run.training.max_steps, run.overrides["d_model"]) == (3, 64)
    assert run.training.learning_rate == base.training.learning_rate
    (tmp_path / "mine.yaml").write_text("extends: yours.yaml\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml extends itself"):
        parse("mine.yaml")
    (tmp_path / "mine.yaml").write_text("extends: quickstrat\n")
    with pytest.raises(RecipeError, match="no recipe quickstrat"):
        parse("mine.yaml")


def test_what_a_recipe_leaves_open_must_be_given():
    with pytest.raises(RecipeError, match=r"model must be given: .* --model"):
        parse_arguments(["finetune", "--output_dir", "out"])
    with pytest.raises(RecipeError, match="train_corpus must be given"):
        parse_arguments(["finetune", "--output_dir", "out", "--model=tiny"])
    assert parse("finetune").data.train_corpus == ["corpus.tsv"]
    with pytest.raises(RecipeError, match="output_dir"):
        parse_arguments(["quickstart"])
    with pytest.raises(RecipeError, match="quickstrat"):
        parse_arguments(["quickstrat", "--output_dir", "x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tokens_per_step", "5000"],
            "tokens_per_step must be a multiple of max_tokens=4096 on 1 device, .* not 5000",
        ),
        (["--tokens_per_step", "8192", "--gradient_accumulation_steps", "2"], "gradient_accumulation_steps"),
        (["--average_last", "3", "--save_total_limit", "2"], "save_total_limit must be at least average_last=3"),
        (["--average_last", "3", "--save_strategy", "no"], "save_strategy is no"),
        (["--average_last", "0"], "average_last must be at least 1"),
        (["--sampling_temperature", "0.5"], "sampling_temperature must be at least 1"),
        (["--fp16", "true", "--use_cpu", "true"], "fp16 needs an accelerator"),
        (["--average_last", "3", "--fsdp", "true"], "average_last does not go with fsdp"),
        (["--max_ratio", "0.9"], "max_ratio must be at least 1"),
        (["--eval_strategy", "epoch", "--train_corpus", "a.tsv"], "validation_corpus must be given"),
    ],
)
def test_fields_that_contradict_one_another(arguments, message):
    with pytest.raises(RecipeError, match=message) as caught:
        parse_arguments(["--output_dir", "out", *arguments])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", "-1", "at least 0, not -1.0"),
        ("learning_rate", "nan", "at least 0, not nan"),
        ("warmup_steps", "nan", "at least 0"),
        ("weight_decay", "-1", "at least 0"),
        ("max_grad_norm", "-1", "at least 0"),
        ("dataloader_num_workers", "-1", "at least 0"),
        ("preprocessing_num_workers", "-1", "at least 0"),
        ("adam_beta1", "2", "at least 0 and below 1"),
        ("adam_beta2", "1", "at least 0 and below 1"),
        ("adam_epsilon", "0", "above 0"),
        ("label_smoothing_factor", "nan", "at least 0 and below 1"),
        ("seed", "-1", r"at least 0 and below 2\^32"),
        ("data_seed", "4294967296", r"at least 0 and below 2\^32"),
        ("max_ratio", "nan", "at least 1"),
        ("gradient_accumulation_steps", "0", "at least 1"),
        ("per_device_eval_batch_size", "0", "at least 1"),
        ("generation_num_beams", "0", "at least 1"),
        ("generation_max_length", "1", "at least 2"),
        ("metric_for_best_model", "blue", "one of loss, bleu, chrf"),
        ("report_to", "foo", "none, all or some of .*tensorboard"),
    ],
)
def test_impossible_values(field, value, message):
    with pytest.raises(RecipeError, match=f"^{field} must be {message}"):
        parse_arguments(["--output_dir", "out", f"--{field}={value}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_train_epochs", "nan"], "num_train_epochs above 0, not -1 and nan"),
        (
            ["--lr_scheduler_type", "cosine_with_min_lr"],
            "lr_scheduler_kwargs do not fit .*=cosine_with_min_lr: .*min_lr",
        ),
        (["--lr_scheduler_kwargs", '{"powr": 2}'], "lr_scheduler_kwargs do not fit .*=inverse_sqrt: .*powr"),
        (["--no_predict_with_generate", "--metric_for_best_model", "bleu"], "must be one of loss, not bleu"),
        (["--init_std=-1.0"], "init_std. is -1.0 and must be at least 0"),
        (["--init_std", "wide"], "init_std.* expected float"),
        (["--average_last", "3", "--save_only_model", "true"], "average_last=3 needs whole checkpoints"),
        (["--per_device_train_batch_size", "8"], "per_device_train_batch_size has no effect, .*; use max_tokens"),
        (
            ["--train_sampling_strategy", "group_by_length"],
            "train_sampling_strategy has no effect, .*; use sort_window",
        ),
        (["--auto_find_batch_size", "true"], "auto_find_batch_size has no effect, .*; use max_tokens"),
        (["--dataloader_drop_last", "true"], "dataloader_drop_last has no effect"),
    ],
)
def test_what_training_could_not_do_is_refused_before(arguments, message):
    with pytest.raises(RecipeError, match=message) as caught:
        parse_arguments(["--output_dir", "out", *arguments])
    assert "\n" not in str(caught.value)


def test_the_accumulation_reaches_the_tokens_of_a_step():
    run = parse_arguments(["--output_dir", "out", "--max_tokens", "1024", "--tokens_per_step", "8192"])
    assert run.training.gradient_accumulation_steps * run.training.world_size == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_stepps: 3\n", "max_stepps; did you mean max_steps"),
        ("- a\n- b\n", "fields"),
        ("a: [\n", "not YAML"),
        ("", "fields"),
        ("max_steps: [1, 2]\n", "The value 2"),
        ("no_predict_with_generate: true\n", "no_predict_with_generate; did you mean predict_with_generate"),
        ("target_lang: no\n", "target_lang must be text, but YAML reads false; put it in quotes"),
        ("source_lang: 1\n", "source_lang must be text, but YAML reads 1"),
        ("train_corpus: [a.tsv, 2014-01-01]\n", 'train_corpus must be text, but YAML reads "2014-01-01"'),
    ],
)
def test_broken_recipes(tmp_path, content, message):
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(RecipeError, match=message):
        parse(str(tmp_path / "mine.yaml"))


def test_what_the_command_line_gives_as_text_is_saved_as_text(tmp_path):
    run = parse_arguments(
        ["--output_dir", "out", "--target_lang=no", "--train_corpus", "2014", "en-no=b", "--max_steps", "3"]
    )
    assert run.repeatable == {"target_lang": "no", "train_corpus": ["2014", "en-no=b"], "max_steps": 3}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(run.repeatable))
    again = parse_arguments([str(tmp_path / "recipe.yaml"), "--output_dir", "out"])
    assert (again.data.target_lang, again.data.train_corpus) == ("no", ["2014", "en-no=b"])


@pytest.mark.parametrize("argument", ["--no_predict_with_generate", "--no-predict-with-generate"])
def test_a_negated_field_is_saved_as_false(tmp_path, argument):
    (tmp_path / "mine.yaml").write_text("model: tiny\npredict_with_generate: true\n")
    run = parse_arguments([str(tmp_path / "mine.yaml"), "--output_dir", "out", argument])
    assert run.repeatable == {"model": "tiny", "predict_with_generate": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(run.repeatable))
    again = parse_arguments([str(tmp_path / "recipe.yaml"), "--output_dir", "out"])
    assert run.training.predict_with_generate is again.training.predict_with_generate is False
