"""A run that was stopped goes on when the same command is given again, as if it had not been."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from relpos.training.corpus import CorpusError
from relpos.training.recipe import RecipeError
from relpos.training.run_translation import main
from relpos.training.trainer import SavingError, TranslationTrainer

FIELDS = {
    "model": "tiny",
    "dropout": 0.2,  # so that the random state counts
    "vocab_size": 420,
    "max_tokens": 150,
    "gradient_accumulation_steps": 2,
    "max_steps": 24,
    "save_steps": 5,
    "save_total_limit": 2,
    "logging_steps": 3,  # not in step with the checkpoints
    "warmup_steps": 4,
    "use_cpu": "true",
}


@pytest.fixture(scope="module")
def corpus(letters, tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "corpus.tsv"
    file.write_text(letters(90))
    return file


def arguments(corpus, folder, **fields):
    given = {**FIELDS, "train_corpus": corpus, "output_dir": folder, **fields}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def result(folder):
    """The loss curve, each number as it was logged, and the weights."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    curve = {entry["step"]: (entry["loss"], entry["learning_rate"]) for entry in history if "loss" in entry}
    return curve, (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    folder = main(arguments(corpus, tmp_path_factory.mktemp("runs") / "uninterrupted"))
    curve, weights = result(folder)
    assert list(curve) == [3, 6, 9, 12, 15, 18, 21, 24]
    return curve, weights


def start_and_kill(command, when):
    """Run a command and kill it, without a chance to tidy up, as soon as `when` says so."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not when():
        time.sleep(0.002)
    process.kill()
    stderr = process.communicate()[1].decode()
    assert process.returncode == -signal.SIGKILL, f"the run ended by itself: {stderr[-2000:]}"


@pytest.mark.slow
def test_killed_between_and_while_saving_the_curve_goes_on(corpus, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "relpos.training.run_translation", *arguments(corpus, folder)]
    start_and_kill(command, lambda: (folder / "checkpoint-5").is_dir())
    saved = {path.name for path in folder.glob("checkpoint-*")}
    assert saved
    assert not (folder / "config.json").exists()
    start_and_kill(command, lambda: any(folder.glob(".saving/checkpoint-*")))
    assert any(folder.glob(".saving/checkpoint-*"))
    assert {path.name for path in folder.glob("checkpoint-*")} == saved
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"going on from +{folder}/checkpoint-\d+", done.stdout)
    assert "missing keys" not in done.stderr
    curve, weights = result(folder)
    assert curve == uninterrupted[0]
    assert weights == uninterrupted[1]
    assert not (folder / ".saving").exists()


@pytest.mark.parametrize("step", [5, 20, 24])
def test_stopped_anywhere_the_rest_is_the_same(corpus, uninterrupted, tmp_path, monkeypatch, stopped_at, step):
    """Step 24 is the last: its checkpoint is there, and the model is not written yet."""
    folder = tmp_path / "run"
    with stopped_at(step):
        main(arguments(corpus, folder))
    steps = []
    monkeypatch.setattr(TranslationTrainer, "training_step", count_calls(TranslationTrainer.training_step, steps))
    main(arguments(corpus, folder))
    assert len(steps) == 2 * (24 - step)
    assert result(folder) == uninterrupted


def count_calls(function, calls):
    def counted(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return counted


@pytest.fixture
def stopped(corpus, tmp_path, monkeypatch):
    """A run that its disk stopped at step 15."""
    save = TranslationTrainer._save_optimizer_and_scheduler

    def full_disk(self, folder):
        if self.state.global_step == 15:
            raise OSError(28, "No space left on device")
        save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(TranslationTrainer, "_save_optimizer_and_scheduler", full_disk)
        with pytest.raises(
            SavingError, match=r"step 15 .*No space left on device.* checkpoint-10, and the same command"
        ):
            main(arguments(corpus, tmp_path / "run"))
    return tmp_path / "run"


def test_half_a_checkpoint_is_never_taken_for_a_whole_one(corpus, stopped, uninterrupted):
    half = stopped / "checkpoint-15"
    shutil.copytree(stopped / "checkpoint-10", half)
    state = json.loads((half / "trainer_state.json").read_text())
    (half / "trainer_state.json").write_text(json.dumps({**state, "global_step": 15}))
    weights = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    main(arguments(corpus, stopped))
    assert result(stopped) == uninterrupted


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(corpus):
    with pytest.raises(RecipeError, match=r"output_dir=.*corpus.*/model cannot be written: Not a directory"):
        main(arguments(corpus, corpus / "model"))


def test_another_recipe_is_refused_with_the_field_that_differs(corpus, stopped, tmp_path):
    before = sorted(path.name for path in stopped.rglob("*"))
    with pytest.raises(
        RecipeError, match=r"another recipe, in which dropout is 0\.2; here it is 0\.3\. .* --overwrite"
    ):
        main(arguments(corpus, stopped, dropout=0.3))
    with pytest.raises(RecipeError, match="in which seed is not given; here it is 5"):
        main(arguments(corpus, stopped, seed=5))
    given = arguments(corpus, stopped)
    at = given.index("--dropout")
    with pytest.raises(RecipeError, match=r"in which dropout is 0\.2; here it is not given"):
        main(given[:at] + given[at + 2 :])
    changed = tmp_path / "changed.tsv"
    shutil.copy(corpus, changed)
    with pytest.raises(RecipeError, match="in which train_corpus is"):
        main(arguments(changed, stopped))
    assert sorted(path.name for path in stopped.rglob("*")) == before


def test_a_corpus_that_has_changed_is_refused(tmp_path, corpus, stopped_at):
    own, folder = tmp_path / "own.tsv", tmp_path / "run"
    shutil.copy(corpus, own)
    with stopped_at(5):
        main(arguments(own, folder))
    own.write_text(own.read_text() + "a b c\tA B C\n")
    with pytest.raises(RecipeError, match=r"has changed since .*checkpoint-5 was saved"):
        main(arguments(own, folder))


def test_a_finished_run_is_left_alone_and_overwrite_starts_anew(corpus, uninterrupted, stopped, capsys, monkeypatch):
    main(arguments(corpus, stopped))
    written = (stopped / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    main(arguments(corpus, stopped, dataloader_num_workers=0))
    assert "holds the finished model" in capsys.readouterr().out
    assert (stopped / "model.safetensors").stat().st_mtime_ns == written
    steps = []
    monkeypatch.setattr(TranslationTrainer, "training_step", count_calls(TranslationTrainer.training_step, steps))
    main([*arguments(corpus, stopped), "--overwrite"])
    assert len(steps) == 48
    assert result(stopped) == uninterrupted


def test_a_run_that_never_saved_gives_way_to_another_recipe(corpus, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TranslationTrainer, "training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            main(arguments(corpus, folder))
    assert (folder / "recipe.yaml").is_file()
    main(arguments(corpus, folder, vocab_size=410, max_steps=1))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] <= 410


def test_a_run_that_never_saved_makes_its_vocabulary_anew(corpus, letters, tmp_path, monkeypatch):
    """The corpus has changed under the same name: nothing says so but its text."""
    own, folder = tmp_path / "own.tsv", tmp_path / "run"
    shutil.copy(corpus, own)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TranslationTrainer, "training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            main(arguments(own, folder))
    before = (folder / "tokenizer.json").read_text()
    own.write_text("")
    with pytest.raises(CorpusError, match="is empty"):
        main(arguments(own, folder))
    assert (folder / "tokenizer.json").read_text() == before, "a command that fails removes nothing"
    own.write_text("".join(f"ω {n} ω ψ\tΩ {n} Ω Ψ\n" for n in range(90)))
    main(arguments(own, folder, max_steps=1))
    assert (folder / "tokenizer.json").read_text() != before


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_overwrite_loses_nothing_where_the_new_run_cannot_be(corpus, stopped, tmp_path, monkeypatch):
    before = contents(stopped)
    link = tmp_path / "link"
    link.symlink_to(stopped)
    for folder in (stopped, link):
        with pytest.raises(CorpusError):
            main([*arguments(tmp_path / "typo.tsv", folder), "--overwrite"])
        assert contents(stopped) == before
    # killed in between: the next start finds it
    aside = stopped / ".replaced"
    aside.mkdir()
    for path in [path for path in stopped.iterdir() if path != aside]:
        path.rename(aside / path.name)
    with pytest.raises(RecipeError, match="another recipe"):
        main(arguments(corpus, stopped, dropout=0.3))
    assert contents(stopped) == before
    main([*arguments(corpus, link), "--overwrite", "--max_steps", "1"])
    assert link.is_symlink()
    assert json.loads((stopped / "trainer_state.json").read_text())["global_step"] == 1
    assert not list(stopped.glob(".re*"))
    assert not list(stopped.glob("checkpoint-5"))


def test_what_a_run_reads_is_not_overwritten(corpus, stopped):
    own, recipe = stopped / "own.tsv", stopped / "mine.yaml"
    shutil.copy(corpus, own)
    odd = stopped / "part=1"
    odd.mkdir()
    shutil.copy(corpus, odd / "own.tsv")
    recipe.write_text("model: tiny\n")
    before = contents(stopped)
    for field, given in {
        "train_corpus": arguments(f"en-de={own}", stopped),
        "validation_corpus": [*arguments(corpus, stopped), "--validation_corpus", str(odd / "own.tsv")],
        "model": arguments(corpus, stopped, model=stopped / "checkpoint-10"),
        "tokenizer": arguments(corpus, stopped, tokenizer=stopped / "tokenizer.json"),
        "recipe": [str(recipe), *arguments(corpus, stopped)],
    }.items():
        with pytest.raises(RecipeError, match=f"{field}=.* lies in output_dir=.* choose another"):
            main([*given, "--overwrite"])
        assert contents(stopped) == before


def test_a_recipe_in_the_output_folder_stays_as_it_is(corpus, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    fields = {**FIELDS, "train_corpus": str(corpus), "max_steps": 1, "save_strategy": "'no'"}
    text = "# mine\n" + "".join(f"{name}: {value}\n" for name, value in fields.items())
    recipe.write_text(text)
    for more in ([], ["--seed", "3"]):
        with pytest.raises(RecipeError, match=r"recipe\.yaml lies in output_dir=.* choose another output_dir"):
            main([str(recipe), "--output_dir", str(tmp_path), *more])
        assert recipe.read_text() == text
    with pytest.raises(RecipeError, match=r"recipe\.yaml lies in output_dir="):
        main(arguments(corpus, tmp_path))
    assert recipe.read_text() == text
    again = main([str(recipe), "--output_dir", str(tmp_path / "out")])
    (again / "config.json").unlink()  # as if it had been stopped before its first checkpoint
    main([str(again / "recipe.yaml"), "--output_dir", str(again)])
    assert (again / "config.json").is_file()
    recipe.write_bytes(b"- a list\n")
    with pytest.raises(RecipeError, match="is no recipe of an earlier run"):
        main(arguments(corpus, tmp_path))


def test_ctrl_c_says_what_goes_on(corpus, stopped_at, tmp_path, capsys, monkeypatch):
    with stopped_at(5):
        main(arguments(corpus, tmp_path / "run"))
    assert "the same command goes on from " in capsys.readouterr().err
    with stopped_at(10):
        main(arguments(corpus, tmp_path / "run"))
    assert f"goes on from {tmp_path / 'run' / 'checkpoint-10'}." in capsys.readouterr().err
    with stopped_at(5):
        main([*arguments(corpus, tmp_path / "run"), "--overwrite"])
    assert "the same command without --overwrite goes on from " in capsys.readouterr().err


@pytest.mark.parametrize("stop_at", [6, 12])
def test_early_stopping_counts_on(corpus, tmp_path, stopped_at, stop_at):
    """With a rate of zero nothing improves: the first of the evaluations is the best, and three more end the run."""
    options = {"learning_rate": 0, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "save_total_limit": 9}
    options |= {"early_stopping_patience": 3, "metric_for_best_model": "eval_loss", "validation_corpus": corpus}
    options |= {"generation_max_length": 5, "predict_with_generate": "false"}
    with stopped_at(stop_at):
        main(arguments(corpus, tmp_path / "run", **options))
    folder = main(arguments(corpus, tmp_path / "run", **options))
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 12


def test_the_last_checkpoints_are_averaged(corpus, tmp_path, capsys):
    from safetensors.torch import load_file

    options = {"average_last": 3, "save_total_limit": 4, "save_steps": 2, "max_steps": 8}
    folder = main(arguments(corpus, tmp_path / "run", **options))
    parts = [load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (4, 6, 8)]
    averaged = load_file(folder / "model.safetensors")
    for name, weight in averaged.items():
        mean = sum(part[name].double() for part in parts) / 3
        assert (weight == mean.float()).all(), name
    assert not (folder / ".averaged").exists()
    assert "the mean of the last 3 checkpoints" in (folder / "README.md").read_text()
    capsys.readouterr()
    main(arguments(corpus, tmp_path / "few", **{**options, "max_steps": 4}))
    assert "There were only 2 of the average_last=3 checkpoints to average." in capsys.readouterr().out
