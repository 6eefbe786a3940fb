"""Trains in OpenNMT-py anew and compares; only with `-m peer`, since it installs that toolkit and trains for minutes.

    python -m pytest -m peer tests/conversion/test_opennmt_py_peer.py

RELPOS_PEERS names a folder that keeps the environments between runs; otherwise they are made in a temporary one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from relpos import RelPosForConditionalGeneration
from relpos.conversion import convert, export
from relpos.training.corpus import bundled_splits

# OpenNMT-py asks for an old PyTorch, but runs with this one; so its dependencies are named here.
PEER_PACKAGES = [
    "torch==2.13.0",
    "numpy",
    "configargparse",
    "pyyaml",
    "six",
    "sacrebleu",
    "sentencepiece",
    "ctranslate2",
    "rapidfuzz",
    "subword-nmt",
    "pyonmttok",
    "fasttext-wheel",
    "waitress",
    "flask",
    "tensorboard",
    "pyahocorasick",
    "spacy",
    "setuptools",
]

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    kept = os.environ.get("RELPOS_PEERS")
    return Path(kept) if kept else tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def made_anew(peers, tmp_path_factory):
    """The fixtures as make_fixtures_opennmt_py.py makes them now."""
    environment = peers / "onmt"
    python = environment / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *PEER_PACKAGES], check=True)
        subprocess.run([*install, "--no-deps", "OpenNMT-py==3.5.1"], check=True)
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("made")
    for name, split in bundled_splits().items():
        for language in ("en", "de"):
            lines = [pair[language] + "\n" for pair in split["translation"]]
            (data / f"{name}.{language}").write_text("".join(lines), encoding="utf-8")
    script = Path(__file__).with_name("make_fixtures_opennmt_py.py")
    subprocess.run([python, script, data, out], check=True)
    return out


@pytest.mark.parametrize("name", ["shared_sentencepiece", "separate_bpe"])
def test_it_answers_as_opennmt_py_does(made_anew, compare_with_answers, tmp_path, name):
    folder = convert(made_anew / name / "model.pt", tmp_path / "out", toolkit="opennmt-py")
    model, tokenizer = RelPosForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    comparison = compare_with_answers(model, tokenizer, made_anew / name)
    assert comparison.log_probs < 1e-4
    assert comparison.rescored_per_token < 1e-4
    assert comparison.greedy_differs == []
    assert comparison.greedy_text_differs == []
    for ids, score, peer in comparison.beam_differs:
        assert score >= peer["score"] - 1e-4, (ids, peer)


def test_argos_translate_itself_uses_a_package(converted, peers, tmp_path):
    """In an environment of its own, with a sentence splitter that does not need a download."""
    environment = peers / "argos"
    python = environment / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "ctranslate2", "sentencepiece", "packaging", "sacremoses", "setuptools"], check=True)
        subprocess.run([*install, "--no-deps", "argostranslate==1.11.0"], check=True)
    package = export(converted("shared_sentencepiece"), tmp_path / "en_de.argosmodel", toolkit="argos")
    script = (
        "import sys, types\n"
        "for name in ('stanza', 'minisbd', 'spacy'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['minisbd'].SBDetect = None\n"
        "sys.modules['minisbd'].models = types.SimpleNamespace()\n"
        "from argostranslate import package, sbd, translate\n"
        "class Whole(sbd.ISentenceBoundaryDetectionModel):\n"
        "    def __init__(self, pkg): self.pkg = pkg\n"
        "    def split_sentences(self, text): return [text]\n"
        "translate.MiniSBDSentencizer = translate.StanzaSentencizer = translate.SpacySentencizerSmall = Whole\n"
        f"package.install_from_path({str(package)!r})\n"
        "print(translate.translate('Save the file.', 'en', 'de'))\n"
    )
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run([python, "-c", script], capture_output=True, text=True, env={**os.environ, **home})
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    shutil.rmtree(tmp_path)
