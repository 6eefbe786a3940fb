"""The verbs convert, export and translate --engine, run in this process."""

import io

import pytest

from relpos import cli


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
