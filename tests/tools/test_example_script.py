"""Transformers' own example script for translation, unchanged, fine-tuning a saved RelPos folder.

The script is in the library's repository, and in no package: the test runs where `TRANSFORMERS_CHECKOUT` names a
checkout of it, at a version that goes with the installed library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import pipeline

import relpos

CHECKOUT = os.environ.get("TRANSFORMERS_CHECKOUT")
# What a user adds is `import relpos`. The script loads its metric from the Hub; a test has no network.
LAUNCHER = """
import runpy, sys
import evaluate, relpos
from relpos.training.metric import TranslationScores

class SacreBleu:
    def compute(self, **texts):
        return {"score": TranslationScores().compute(**texts, metrics=("bleu",))["bleu"]}

evaluate.load = lambda name, **_: {"sacrebleu": SacreBleu}[name]()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="TRANSFORMERS_CHECKOUT names no checkout of Transformers' repository")
def test_run_translation_fine_tunes_a_saved_folder(learned_model, learned_pairs, tmp_path):
    script = Path(CHECKOUT, "examples", "pytorch", "translation", "run_translation.py")
    assert script.is_file(), f"{script} is not there"
    pairs = [*learned_pairs, ("Open the table.", "Öffnen Sie die Tabelle.")]
    lines = [json.dumps({"translation": {"en": source, "de": target}}) + "\n" for source, target in pairs]
    (tmp_path / "train.json").write_text("".join(lines * 4), encoding="utf-8")
    options = {
        "model_name_or_path": learned_model,
        "train_file": tmp_path / "train.json",
        "validation_file": tmp_path / "train.json",
        "source_lang": "en",
        "target_lang": "de",
        "output_dir": tmp_path / "tuned",
        "num_train_epochs": 12,
        "per_device_train_batch_size": 12,
        "learning_rate": 3e-3,
        "report_to": "none",
        "save_strategy": "no",
        "max_eval_samples": 9,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    arguments += ["--do_train", "--do_eval", "--predict_with_generate", "--use_cpu"]
    result = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(script), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "DISABLE_TELEMETRY": "YES", "HF_HOME": str(tmp_path / "home")},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    relpos.register()
    translate = pipeline("translation", str(tmp_path / "tuned"))
    assert translate("Open the table.")[0]["translation_text"] == "Öffnen Sie die Tabelle."
    scores = json.loads((tmp_path / "tuned" / "eval_results.json").read_text())
    assert scores["eval_bleu"] > 90
