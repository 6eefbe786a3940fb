"""self_contained.py: a whole folder passes, and each thing that a folder can lack is found by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from relpos.model_cards import publishing, self_contained, write_card
from relpos.model_cards.self_contained import CheckError, check_folder, raise_problems

OLDER = Path(__file__).parent / "fixtures" / "older"


@pytest.fixture
def folder(learned_model, tmp_path):
    folder = shutil.copytree(learned_model, tmp_path / "small")
    write_card(folder, {})
    return folder


def problems(findings):
    return {finding.what: finding.problem for finding in findings if finding.problem}


@pytest.mark.slow
def test_a_folder_of_an_older_version_works_with_its_code_and_with_ours():
    """`make_fixture_older.py` wrote it with the code of a commit before attention was more than one file."""
    assert not (OLDER / "near_far_relpos.py").is_file()
    before = {path.name: path.read_bytes() for path in OLDER.iterdir()}
    findings = check_folder(OLDER)
    assert problems(findings) == {"files": "missing: a card (README.md)"}
    assert len(findings) == 10
    assert {path.name: path.read_bytes() for path in OLDER.iterdir()} == before
    answers = json.loads((OLDER / "answers.json").read_text())
    model = AutoModelForSeq2SeqLM.from_pretrained(OLDER).eval()
    source, target = torch.tensor(answers["source"]), torch.tensor(answers["target"])
    with torch.inference_mode():
        assert model.generate(source, num_beams=2, max_new_tokens=8).tolist() == answers["generated"]
        logits = model(input_ids=source, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, torch.tensor(answers["logits"]), atol=1e-5, rtol=0)


def test_every_missing_file_is_named(folder, monkeypatch):
    monkeypatch.setattr(self_contained, "_use_without_relpos", lambda folder: [])
    for file, name in {
        "model.safetensors": "weights as safetensors",
        "generation_config.json": "generation_config.json",
        "README.md": "a card (README.md)",
    }.items():
        (folder / file).rename(folder / "elsewhere")
        assert problems(check_folder(folder)) == {"files": f"missing: {name}"}
        (folder / "elsewhere").rename(folder / file)
    for file in ("configuration_relpos.py", "attention_relpos.py", "skewed_relpos.py", "pipeline_relpos.py"):
        (folder / file).rename(folder / "elsewhere")
        assert problems(check_folder(folder)) == {"code": f"missing: {file}"}
        (folder / "elsewhere").rename(folder / file)
    assert problems(check_folder(folder)) == {}


@pytest.mark.parametrize(
    ("auto_map", "problem"),
    [
        (None, "names no code"),
        ({"AutoConfig": "anna/small--configuration_relpos.RelPosConfig"}, "code of another repository"),
    ],
)
def test_references_that_lead_elsewhere(folder, monkeypatch, auto_map, problem):
    monkeypatch.setattr(self_contained, "_use_without_relpos", lambda folder: [])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map, "custom_pipelines": None}))
    assert problem in problems(check_folder(folder))["code"]


@pytest.mark.slow
def test_what_fails_without_the_package_is_named(folder):
    """Weights of another model, and a pipeline that reaches for the package."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "encoder_layers": 2}))
    pipeline = folder / "pipeline_relpos.py"
    constructor = "        super().__init__(*args, **kwargs)\n"
    assert constructor in pipeline.read_text()
    pipeline.write_text(pipeline.read_text().replace(constructor, "        import relpos\n" + constructor))
    findings = check_folder(folder)
    found = problems(findings)
    assert "missing keys: model.encoder.layers.1" in found.pop(
        "without relpos: AutoModelForSeq2SeqLM, every weight in its place"
    )
    assert "import of relpos halted" in found.pop('without relpos: pipeline("translation")')
    found.pop("with relpos: the same translation", None)  # what random weights answer
    assert found == {}
    with pytest.raises(CheckError, match=r"The model small does not work by itself: \d of 10 checks failed, the first"):
        raise_problems(findings, name="small")


def test_a_process_that_dies_is_a_problem(folder, monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit('no memory left')\n")
    monkeypatch.setattr(self_contained, "PROGRAM", program)
    assert "no memory left" in problems(check_folder(folder))["without relpos: all steps"]


def test_what_is_staged_for_a_push_passes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(self_contained, "_use_without_relpos", lambda folder: [])
    (tmp_path / "staged").mkdir()
    staged = publishing.stage(folder, tmp_path / "staged", name="anna/small")
    assert problems(check_folder(staged.folder)) == {}
