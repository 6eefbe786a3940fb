"""Trains in the other toolkits anew, compares with what they answer, and uses an export as Argos Translate does.

    python -m pytest -m peer tests/conversion/test_peers.py

Only when asked for: it installs the toolkits, each in an environment of its own, and trains for ten minutes. RELPOS_PEERS
names a folder that keeps the environments between runs; otherwise they are made in a temporary one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from relpos import RelPosForConditionalGeneration
from relpos.conversion import convert, export
from relpos.training.corpus import bundled_splits

HERE = Path(__file__).parent
# Arguments of `pip install`, one call after the other. What the toolkits ask for is old, large or not needed by what runs
# here, so most of them are installed without it.
ENVIRONMENTS = {
    "onmt": [
        "torch==2.13.0 numpy configargparse pyyaml six sacrebleu sentencepiece ctranslate2 rapidfuzz subword-nmt pyonmttok "
        "fasttext-wheel waitress flask tensorboard pyahocorasick spacy setuptools",
        "--no-deps OpenNMT-py==3.5.1",
    ],
    "tf": [
        "OpenNMT-tf==2.32.0 tensorflow-cpu>=2.12,<2.14 sentencepiece subword-nmt scipy<1.12",
        "--no-deps tensor2tensor==1.15.7 tensorflow-probability==0.21.0 decorator cloudpickle dm-tree tf-slim "
        "mesh-tensorflow",
    ],
    "argos": [
        "ctranslate2 sentencepiece packaging sacremoses setuptools",
        "--no-deps argostranslate==1.11.0",
    ],
}
# Argos Translate cuts text into sentences by models that it downloads; here the text is one.
TRANSLATE_WITH_ARGOS = """
import sys, types
for name in ("stanza", "minisbd", "spacy"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["minisbd"].SBDetect = None
sys.modules["minisbd"].models = types.SimpleNamespace()
from argostranslate import package, sbd, translate
class Whole(sbd.ISentenceBoundaryDetectionModel):
    def __init__(self, pkg): self.pkg = pkg
    def split_sentences(self, text): return [text]
translate.MiniSBDSentencizer = translate.StanzaSentencizer = translate.SpacySentencizerSmall = Whole
package.install_from_path(sys.argv[1])
print(translate.translate(sys.argv[2], "en", "de"))
"""

pytestmark = [pytest.mark.peer, pytest.mark.slow]


@pytest.fixture(scope="module")
def python_of(tmp_path_factory):
    """A function: the Python of an environment, which is made if it is not there."""
    kept = os.environ.get("RELPOS_PEERS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("peers")

    def python(name):
        executable = folder / name / "bin" / "python"
        if not executable.is_file():
            subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
            for packages in ENVIRONMENTS[name]:
                subprocess.run([executable, "-m", "pip", "install", "--quiet", *packages.split()], check=True)
        return executable

    return python


@pytest.fixture(scope="module")
def corpus_files(tmp_path_factory):
    """The bundled corpus as plain files, such as train.en."""
    folder = tmp_path_factory.mktemp("data")
    for part, pairs in bundled_splits().items():
        for language in ("en", "de"):
            lines = [pair[language] + "\n" for pair in pairs["translation"]]
            (folder / f"{part}.{language}").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def make_fixtures(python_of, corpus_files, tmp_path):
    """A function: the folder that a script fills in an environment."""

    def make(script, environment):
        subprocess.run([python_of(environment), HERE / script, corpus_files, tmp_path / "made"], check=True)
        return tmp_path / "made"

    return make


@pytest.fixture
def check(compare_with_answers, tmp_path):
    """A function: compare the conversion of a model with the answers in a folder."""

    def compare(source, answers, **options):
        out = convert(source, tmp_path / "converted" / answers.name, **options)
        model, tokenizer = RelPosForConditionalGeneration.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        compare_with_answers(model, tokenizer, answers).check_answers()

    return compare


def test_opennmt_py(make_fixtures, check):
    made = make_fixtures("make_fixtures_opennmt_py.py", "onmt")
    for name in ("shared_sentencepiece", "separate_bpe"):
        check(made / name / "model.pt", made / name, toolkit="opennmt-py")


def test_opennmt_tf(make_fixtures, check):
    made = make_fixtures("make_fixtures_opennmt_tf.py", "tf")
    for name, subwords in (("shared_sentencepiece", []), ("separate_bpe", ["codes.en", "codes.de"])):
        paths = [made / name / file for file in subwords]
        check(made / name / "run", made / name, toolkit="opennmt-tf", config=made / name / "config.yml", subwords=paths)


def test_tensor2tensor(make_fixtures, check):
    made = make_fixtures("make_fixtures_tensor2tensor.py", "tf")
    for name, vocabularies in (("shared", []), ("separate", ["vocab.en", "vocab.de"])):
        paths = [made / name / file for file in vocabularies]
        check(made / name, made / name, toolkit="tensor2tensor", vocabularies=paths)


def test_argos_translate_translates_with_an_export(converted, load_converted, python_of, tmp_path):
    options = {"toolkit": "argos", "quantization": "float32"}
    package = export(converted("shared_sentencepiece"), tmp_path / "en_de.argosmodel", **options)
    command = [python_of("argos"), "-c", TRANSLATE_WITH_ARGOS, package, "Save the file."]
    settings = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"), str(tmp_path))
    settings["ARGOS_COMPUTE_TYPE"] = "float32"  # by default it quantises what it loads
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings})
    assert result.returncode == 0, result.stderr
    model, tokenizer = load_converted("shared_sentencepiece")
    batch = tokenizer("Save the file.", return_tensors="pt")
    output = model.generate(**batch, num_beams=4, length_penalty=0.2, max_new_tokens=256)
    assert result.stdout.strip() == tokenizer.decode(output[0], skip_special_tokens=True)
