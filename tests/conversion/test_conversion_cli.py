"""The verbs convert, export and translate --engine, run in this process."""

import io
from pathlib import Path

import pytest

from relpos import cli

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def run(monkeypatch, capsys):
    """A function: the exit code, output and errors of a command line."""

    def run_command(*arguments):
        monkeypatch.setattr("sys.argv", ["relpos", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return exit_info.value.code, *capsys.readouterr()

    return run_command


def test_in_and_out_and_translated_by_the_engine(run, opennmt_py_fixtures, tmp_path, monkeypatch):
    checkpoint = opennmt_py_fixtures / "shared_sentencepiece" / "model.pt"
    converted, exported = tmp_path / "converted", tmp_path / "exported"
    assert run("convert", checkpoint, converted, "--from", "opennmt-py", "--languages", "en,de")[0] == 0
    assert run("export", converted, exported, "--to", "ctranslate2", "--quantization", "float32")[0] == 0
    (tmp_path / "input").write_text("Save the file.\n\nOpen the window.\n")
    outputs = []
    for options in ((exported, "--engine", "ctranslate2"), (converted,)):
        output = tmp_path / f"output{len(outputs)}"
        code, _, errors = run("translate", *options, "--input", tmp_path / "input", "--output", output, "--beams", "2")
        assert code == 0, errors
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 3
    assert run("export", converted, tmp_path / "p.argosmodel", "--to", "argos")[0] == 0
    assert run("convert", tmp_path / "p.argosmodel", tmp_path / "back", "--from", "argos")[0] == 0


def test_opennmt_tf_by_its_configuration_or_its_files(run, tmp_path):
    folder = FIXTURES / "opennmt_tf" / "separate_bpe"
    subwords = ("--subwords", folder / "codes.en", "--subwords", folder / "codes.de")
    ways = {
        "configuration": ("--config", folder / "config.yml"),
        "files": ("--vocabularies", folder / "vocab.en", "--vocabularies", folder / "vocab.de"),
    }
    for name, options in ways.items():
        code, _, errors = run("convert", folder / "run", tmp_path / name, "--from", "opennmt-tf", *subwords, *options)
        assert code == 0, errors
    assert_same_model(*(tmp_path / name for name in ways))


def test_tensor2tensor_by_the_vocabulary_that_is_found_or_named(run, tmp_path):
    folder = FIXTURES / "tensor2tensor" / "shared"
    ways = {"found": (), "named": ("--vocabularies", folder / "vocab.subwords")}
    for name, options in ways.items():
        code, _, errors = run("convert", folder, tmp_path / name, "--from", "tensor2tensor", *options)
        assert code == 0, errors
    assert_same_model(*(tmp_path / name for name in ways))


def assert_same_model(first, second):
    """Two folders hold the same bytes, apart from what they say of themselves."""
    names = {path.name for path in first.iterdir()}
    assert names == {path.name for path in second.iterdir()}
    for name in names - {"README.md", "card.json", "generation_config.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "no", "out", "--from", "opennmt-tf"), "There is no checkpoint no: the file no.index is missing."),
        (
            ("convert", "no", "out", "--from", "tensor2tensor"),
            "There is no checkpoint no: the file no.index is missing.",
        ),
        (("convert", "no", "out", "--from", "ctranslate2"), "The file no/model.bin cannot be read: No such file"),
        (("convert", "no.pt", "out", "--from", "opennmt-py"), "There is no OpenNMT-py model no.pt."),
        (
            ("convert", "no.pt", "out", "--from", "marian"),
            "There is no toolkit 'marian' to convert from; there are argos,",
        ),
        (("convert", "no", "out", "--from", "argos", "--allow-pickle"), "--allow-pickle has no meaning for argos."),
        (("convert", "no", "out", "--from", "argos", "--languages", "en"), "--languages takes two codes"),
        (("export", "no", "out", "--to", "marian"), "There is no toolkit 'marian' to export to"),
        (
            ("export", "./no", "out", "--to", "argos"),
            "The model no is neither a folder nor the name of a model on the Hub",
        ),
        (("translate", "no", "--engine", "ctranslate2"), "The model no holds no model.bin"),
        (("translate", "no", "--engine", "marian"), "There is no toolkit 'marian' to translate with"),
    ],
)
def test_faults_are_one_sentence_and_exit_code_2(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, output, errors = run(*arguments)
    assert code == 2
    assert output == ""
    assert message in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
