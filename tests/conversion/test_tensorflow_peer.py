"""Makes the fixtures of OpenNMT-tf and tensor2tensor anew, in an environment of their own, and compares again.

Runs when asked for (`-m peer`): installing takes minutes and half a gigabyte, the two trainings about five minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from relpos import RelPosForConditionalGeneration
from relpos.conversion import convert

HERE = Path(__file__).parent
PEER_PACKAGES = [
    ["OpenNMT-tf==2.32.0", "tensorflow-cpu>=2.12,<2.14", "sentencepiece", "subword-nmt", "scipy<1.12"],
    # what it asks for besides is old, large or not needed by its Transformer
    ["--no-deps", "tensor2tensor==1.15.7", "tensorflow-probability==0.21.0", "decorator", "cloudpickle", "dm-tree"],
    ["--no-deps", "tf-slim", "mesh-tensorflow"],
]

pytestmark = [pytest.mark.peer, pytest.mark.slow]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Python with TensorFlow, OpenNMT-tf and tensor2tensor; the environment that RELPOS_TENSORFLOW_PEER names, or a new one."""
    if named := os.environ.get("RELPOS_TENSORFLOW_PEER"):
        return Path(named, "bin", "python")
    folder = tmp_path_factory.mktemp("peer")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for packages in PEER_PACKAGES:
        subprocess.run([folder / "bin" / "pip", "install", "-q", *packages], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The bundled corpus as plain files."""
    from relpos.training import corpus

    folder = tmp_path_factory.mktemp("data")
    for part, pairs in corpus.bundled_splits().items():
        for language in ("en", "de"):
            lines = [pair[language] for pair in pairs["translation"]]
            (folder / f"{part}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make(python, script, data, out):
    subprocess.run([python, HERE / script, data, out], check=True)
    return out


def check(comparison):
    assert comparison.log_probs < 1e-4
    assert comparison.rescored_per_token < 1e-4
    assert comparison.greedy_differs == []
    assert comparison.greedy_text_differs == []


def load(source, out, **options):
    folder = convert(source, out, **options)
    return RelPosForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_opennmt_tf(python, data, tmp_path, compare_with_answers):
    for folder in sorted(make(python, "make_fixtures_opennmt_tf.py", data, tmp_path / "made").iterdir()):
        options = {"toolkit": "opennmt-tf", "config": folder / "config.yml"}
        if (folder / "codes.en").is_file():
            options["subwords"] = [folder / "codes.en", folder / "codes.de"]
        check(compare_with_answers(*load(folder / "run", tmp_path / folder.name, **options), folder))


def test_tensor2tensor(python, data, tmp_path, compare_with_answers):
    made = make(python, "make_fixtures_tensor2tensor.py", data, tmp_path / "made")
    for name, vocabularies in (("shared", []), ("separate", ["vocab.en", "vocab.de"])):
        folder = made / name
        paths = [folder / vocabulary for vocabulary in vocabularies]
        model_and_tokenizer = load(folder, tmp_path / name, toolkit="tensor2tensor", vocabularies=paths)
        check(compare_with_answers(*model_and_tokenizer, folder))
