"""The `relpos` command: through real processes where pipes, terminals or signals matter, and otherwise in this one."""

import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from relpos import cli
from relpos.training import evaluation, loading, pictures

RELPOS = Path(sysconfig.get_path("scripts")) / "relpos"


def run(*arguments, input=b"", **options):
    """Run the installed command; its output as text, with what it exits with."""
    done = subprocess.run([RELPOS, *map(str, arguments)], input=input, capture_output=True, timeout=300, **options)
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def call(monkeypatch, *arguments):
    """Run the command in this process, where PyTorch is loaded already; the exit code."""
    monkeypatch.setattr(sys, "argv", ["relpos", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    return exited.value.code


@pytest.mark.parametrize(
    "verb", [[], ["train"], ["evaluate"], ["translate"], ["inspect"], ["score"], ["plot"], ["push"], ["demo"]]
)
def test_help_loads_no_pytorch(verb):
    # sys.argv is set before anything is imported, as it is for the installed script.
    program = f"""
import sys
sys.argv = ["/some/where/relpos", *{verb!r}, "--help"]
from relpos.cli import main
try:
    main()
except SystemExit as exited:
    assert not exited.code, exited.code
loaded = {{"torch", "transformers", "datasets", "sacrebleu"}} & set(sys.modules)
sys.exit(f"loaded {{loaded}}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage: relpos" in done.stdout


def test_a_full_disk_is_one_sentence(learned_model):
    """On standard output, which `> FILE` makes of any command."""
    with open("/dev/full", "wb") as full:
        command = [RELPOS, "translate", str(learned_model), "--max-new-tokens", "2"]
        done = subprocess.run(command, input=b"a\n" * 3, stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == 2
    assert done.stderr.decode().endswith("relpos: There is no room for the output: No space left on device.\n")


def test_help_and_version_answer_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown, version = run("--help"), run("--version")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU seconds of both, about 0.8; loading PyTorch and Transformers takes five.
    assert after.ru_utime - before.ru_utime < 3
    assert shown.returncode == version.returncode == 0
    assert all(verb in shown.stdout for verb in ("train", "evaluate", "translate", "inspect"))
    assert "relpos " in version.stdout
    assert "transformers 5." in version.stdout


def test_translate_a_pipe_line_by_line(learned_model, learned_pairs):
    answers = dict(learned_pairs)
    lines = ["Yes", "", "Open the window.", " \t ", "The table is empty.", "Save the file. " * 30, "Save the file."]
    done = run("translate", learned_model, "--batch-size", 2, input="\r\n".join(lines).encode())
    assert done.returncode == 0
    found = done.stdout.split("\n")
    assert len(found) == len(lines) + 1
    assert found.pop() == ""
    del found[5], lines[5]  # what this model makes of a line that is thirty times too long is not known
    assert found == [answers.get(line, "") for line in lines]
    warnings = done.stderr.splitlines()
    assert warnings[0].startswith("relpos: line 6 has ")
    assert "more than any source seen in training" in warnings[0]
    assert all("line 6" in warning for warning in warnings)


def test_translate_answers_a_waiting_program_and_stops_at_ctrl_c(learned_model):
    command = [RELPOS, "translate", learned_model]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # a suite that runs in the background of a shell ignores Ctrl-C, and so would its children
    listening = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, preexec_fn=listening, **pipes)
    try:
        for source, target in (("Yes", "Ja"), ("Open the file.", "Öffnen Sie die Datei.")):
            process.stdin.write(source.encode() + b"\n")
            process.stdin.flush()
            assert process.stdout.readline().decode() == target + "\n"
        process.send_signal(signal.SIGINT)  # while it waits for the next line
        assert process.wait(timeout=120) == 130
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()


def test_translate_files_with_a_progress_bar(learned_model, learned_pairs, tmp_path):
    source, target = tmp_path / "in.en", tmp_path / "out.de"
    source.write_text("".join(f"{english}\n" for english, _ in learned_pairs * 10))
    shown, terminal = pty.openpty()
    arguments = ["--input", source, "--output", target, "--beams", 2, "--batch-size", 16]
    with os.fdopen(shown, "rb", buffering=0) as screen:
        done = subprocess.run(
            [RELPOS, "translate", learned_model, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=terminal,
            timeout=300,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(terminal)
        seen = screen.read(100_000).decode(errors="replace")
    assert done.returncode == 0
    assert done.stdout == b""
    assert target.read_text() == "".join(f"{german}\n" for _, german in learned_pairs * 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.en", "out.de"]
    assert "80/80" in seen


def test_translate_into_a_pipe_that_closes(learned_model, tmp_path):
    source = tmp_path / "in.en"
    source.write_text("Yes\n" * 20_000)
    with source.open("rb") as lines:
        process = subprocess.Popen(
            [RELPOS, "translate", learned_model], stdin=lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    assert process.stdout.readline() == b"Ja\n"
    process.stdout.close()
    assert process.wait(timeout=120) not in (0, 2)
    assert process.stderr.read() == b""
    process.stderr.close()


def test_bad_bytes_in_a_pipe_end_it_after_the_good_lines_and_without_a_traceback(learned_model):
    done = run("translate", learned_model, input=b"Yes\nYes\n\xff\nYes\n")
    assert done.returncode == 2
    assert done.stdout == "Ja\nJa\n"
    assert done.stderr.startswith("relpos: Line 3 of standard input is not UTF-8")
    assert len(done.stderr.splitlines()) == 1


def test_bad_bytes_in_a_file_end_it_before_any_work(monkeypatch, capsys, learned_model, tmp_path):
    source = tmp_path / "in.en"
    source.write_bytes(b"Yes\n\xff\n")
    monkeypatch.setattr(loading, "load_model", lambda name: pytest.fail("the model was loaded"))
    assert call(monkeypatch, "translate", learned_model, "--input", source, "--output", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(f"relpos: Line 2 of {source} is not UTF-8")
    assert not (tmp_path / "out").exists()


def test_evaluate_prints_and_writes_scores(monkeypatch, capsys, learned_model, learned_pairs, tmp_path):
    corpus, scores = tmp_path / "corpus.tsv", tmp_path / "scores.json"
    corpus.write_text("".join(f"{source}\t{target}\n" for source, target in learned_pairs))
    assert call(monkeypatch, "evaluate", learned_model, "--corpus", corpus, "--beams", "1,2", "--json", scores) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = [line for line in shown if line.startswith("│")]
    assert len(rows) == 4  # two beam sizes, and two buckets of lengths
    assert all("100.0 ± 0.0" in row for row in rows)
    assert all("0.0 ± 0.0" in row for row in rows[:2])
    for metric in ("BLEU", "chrF2", "TER"):
        assert any(line.startswith(f"{metric}: nrefs:1|bs:1000|seed:") for line in shown)
    written = json.loads(scores.read_text())
    assert [result["beams"] for result in written["results"]] == [1, 2]
    assert written["languages"] == ["en", "de"]
    assert {score["metric"] for score in written["results"][0]["scores"]} == {"BLEU", "chrF2", "TER"}


def test_evaluate_compares_models(monkeypatch, capsys, learned_model, learned_pairs, tmp_path):
    """The second model is the first with a damaged decoder."""
    other = shutil.copytree(learned_model, tmp_path / "worse")
    weights = load_file(other / "model.safetensors")
    worse = {name: tensor * 0.7 if "decoder" in name else tensor for name, tensor in weights.items()}
    save_file(worse, other / "model.safetensors", metadata={"format": "pt"})
    corpus, scores, picture = tmp_path / "corpus.tsv", tmp_path / "scores.json", tmp_path / "lengths.png"
    corpus.write_text("".join(f"{source}\t{target}\n" for source, target in learned_pairs))
    arguments = ["--corpus", corpus, "--beams", "1", "--json", scores, "--plot", picture, "--tokenized", "--card"]
    good = shutil.copytree(learned_model, tmp_path / "good")  # which gets a card too
    assert call(monkeypatch, "evaluate", good, other, *arguments) == 0
    shown = capsys.readouterr().out
    assert "Difference from" in shown
    assert "tokenized BLEU" in shown
    assert "BLEU by words of the source" in shown
    written = json.loads(scores.read_text())
    (comparison,) = written["comparisons"]
    assert comparison["systems"][0]["metrics"][0]["difference"] < 0
    assert [len(result["scores"]) for result in written["results"]] == [4, 4]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Scores" in (other / "README.md").read_text()


def test_score_a_corpus(monkeypatch, capsys, learned_model, learned_pairs, tmp_path):
    corpus, scores = tmp_path / "corpus.tsv", tmp_path / "scores.tsv"
    corpus.write_text("".join(f"{source}\t{target}\n" for source, target in learned_pairs) + "Yes\tNein\n")
    assert call(monkeypatch, "score", learned_model, "--corpus", corpus, "--output", scores) == 0
    assert capsys.readouterr() == ("", "")
    rows = [[float(column) for column in line.split("\t")] for line in scores.read_text().splitlines()]
    assert len(rows) == len(learned_pairs) + 1
    assert rows[-1][0] < min(row[0] for row in rows[:-1])


def test_plot_a_model(monkeypatch, capsys, learned_model, learned_pairs, tmp_path):
    pytest.importorskip("matplotlib")
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("".join(f"{source}\t{target}\n" for source, target in learned_pairs))
    assert call(monkeypatch, "plot", learned_model, "--output", tmp_path, "--corpus", corpus) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'positions.png'}\n"
    assert (tmp_path / "positions.png").is_file()


def test_inspect_a_folder(monkeypatch, capsys, learned_model):
    assert call(monkeypatch, "inspect", learned_model) == 0
    shown = capsys.readouterr().out
    assert "clipped at k = 4" in shown
    assert "en to de" in shown
    assert "F32" in shown
    tables = [line for line in shown.splitlines() if "self_attn.relative_" in line]
    assert len(tables) == 4
    assert all("[9, 16]" in line and set(line) & set("▁▂▃▄▅▆▇█") for line in tables)


def test_inspect_a_preset(monkeypatch, capsys):
    assert call(monkeypatch, "inspect", "minimal") == 0
    shown = capsys.readouterr().out
    assert "clipped at k = 2" in shown
    assert "relative_keys" in shown
    assert "relative_values" not in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["translat"], "No such command 'translat'. Did you mean 'translate'"),
        (["translate", "model", "--beam", "2"], "No such option: --beam"),
        (["translate"], "Missing argument 'MODEL'"),
        (["translate", "model", "--beams", "0"], "Invalid value for '--beams'"),
        (["translate", "/none/model", "--input", "/none/in"], "The input /none/in cannot be read"),
        (["translate", "/none/model", "--input", os.devnull], "The model folder /none/model does not exist."),
        (["evaluate", "/none/model", "--beams", "x"], "beams is 'x'"),
        (["evaluate", "/none/model", "--json", "/none/scores"], "The file /none/scores cannot be written"),
        (["evaluate", "/none/model"], "The model folder /none/model does not exist."),
        (["evaluate", "/none/model", "--plot", "x.gif"], "The picture x.gif must end in .png"),
        (["score", "/none/model"], "The model folder /none/model does not exist."),
        (["plot", "/none/model"], "The model folder /none/model does not exist."),
        (["inspect", "/none/model"], "The model folder /none/model does not exist."),
        (["inspect", "./none"], "The model folder ./none does not exist."),
        (["train", "no-such-recipe"], "no-such-recipe"),
        (["train", "--output_dirr", "x"], "output_dir"),
    ],
)
def test_mistakes_end_with_one_sentence(monkeypatch, capsys, arguments, sentence):
    assert call(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("relpos: ")
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("verb", ["evaluate", "score", "plot"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [("", "is empty"), ("Yes\tJa\nno tab\n", "line 2"), (None, "There is no file")],
)
def test_corpora_that_cannot_be_scored(monkeypatch, capsys, learned_model, tmp_path, verb, content, sentence):
    corpus = tmp_path / "corpus.tsv"
    if content is not None:
        corpus.write_text(content)
    for module in (loading, evaluation, pictures):
        monkeypatch.setattr(module, "load_model", lambda name: pytest.fail("the model was loaded"))
    assert call(monkeypatch, verb, learned_model, "--corpus", corpus) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("verb", ["evaluate", "score", "translate", "plot"])
def test_a_folder_that_is_no_model(monkeypatch, capsys, tmp_path, verb):
    options = ["--input", os.devnull] if verb == "translate" else []
    assert call(monkeypatch, verb, tmp_path, *options) == 2
    shown = capsys.readouterr().err
    assert "is not a saved model" in shown or "no model with relative positions" in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("verb", ["evaluate", "score", "plot"])
def test_help_names_every_kind_of_corpus(monkeypatch, capsys, verb):
    monkeypatch.setenv("COLUMNS", "400")
    assert call(monkeypatch, verb, "--help") == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in ("TSV", "JSON lines", "TMX", "dataset", "two files", "en-fr=NAME"))


def test_the_readme_says_what_lists_the_fields_of_a_recipe():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"`((?:relpos|python) [^`]*--help)`", readme)
    assert commands
    for command in commands:
        program, *arguments = command.split()
        program = sys.executable if program == "python" else RELPOS
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0
        assert all(field in done.stdout for field in ("--learning_rate", "--train_corpus", "--vocab_size")), command


def test_sides_of_unequal_length(monkeypatch, capsys, learned_model, tmp_path):
    english, german = tmp_path / "text.en", tmp_path / "text.de"
    english.write_text("Yes\nYes\n")
    german.write_text("Ja\n")
    assert call(monkeypatch, "evaluate", learned_model, "--corpus", english, "--corpus", german) == 2
    shown = capsys.readouterr().err
    assert "2 lines" in shown
    assert len(shown.splitlines()) == 1


def test_error_of_another_package_is_a_bug_and_keeps_its_traceback(monkeypatch):
    def fail(name):
        raise ValueError("some bug")

    monkeypatch.setattr(loading, "find_config", fail)
    monkeypatch.setattr(sys, "argv", ["relpos", "inspect", "tiny"])
    with pytest.raises(ValueError, match="some bug"):
        cli.main()


def test_train_passes_everything_on_in_its_order(monkeypatch):
    from relpos.training import run_translation

    given = []
    monkeypatch.setattr(run_translation, "main", given.extend)
    arguments = ["quickstart", "--max_steps", "5", "--overwrite", "--train_corpus", "a.en", "a.de", "--learning_rate=1"]
    assert call(monkeypatch, "train", *arguments) == 0
    assert given == arguments
