"""card.py: metadata that the Hub's own class reads back, what is known said, and nothing made up."""

import re
import shutil

import pytest
from huggingface_hub import ModelCard

from relpos.model_cards import CardError, write_card
from relpos.training.evaluation import score_translations

FACTS = {
    "name": "user/en-de-small",
    "source_language": "en",
    "target_language": "de",
    "corpus": "LibreOffice help",
    "corpus_license": "MPL-2.0",
    "pairs": 41298,
    "steps": 2000,
    "training": {"batch": "1,500 tokens per side", "learning rate": 0.003},
    "test_corpus": "the test part",
    "license": "apache-2.0",
    "base_model": "user/parent",
    "limits": ["It knows software manuals only."],
}


@pytest.fixture
def folder(learned_model, tmp_path):
    return shutil.copytree(learned_model, tmp_path / "small")


@pytest.fixture(scope="module")
def results():
    hypotheses, references = ["The cat sat on the mat.", "A dog ran"], ["The cat sat on the mat.", "The dog ran."]
    scores = score_translations(hypotheses, references)
    return [{"beams": beams, "pairs": 1000, "scores": scores} for beams in (1, 4)]


def test_metadata_is_what_the_hub_reads(folder, results):
    path = write_card(folder, {**FACTS, "results": results})
    assert path == folder / "README.md"
    data = ModelCard.load(path).data
    assert data.language == ["en", "de"]
    assert data.license == "apache-2.0"
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "translation"
    assert data.base_model == "user/parent"
    assert data.datasets is None  # the corpus is not on the Hub
    found = {result.metric_type: result for result in data.eval_results}
    assert set(found) == {"bleu", "chrf", "ter"}
    bleu = results[1]["scores"][0]
    assert found["bleu"].metric_value == round(bleu["score"], 2)
    assert found["bleu"].dataset_name == "the test part"
    assert "beam 4" in found["bleu"].metric_name
    assert bleu["signature"] in found["bleu"].metric_name


def test_text_says_what_is_known(folder, results):
    text = ModelCard.load(write_card(folder, {**FACTS, "results": results})).text
    for known in (
        "# user/en-de-small",
        "from `en` to `de`",
        "`user/parent`",
        "clipped at k = 4",
        "keys (scores) and the values (outputs)",
        "shared by the heads",
        "LibreOffice help (MPL-2.0)",
        "41,298",
        "2,000",
        "- batch: 1,500 tokens per side",
        "1803.02155",
        'model="user/en-de-small", trust_remote_code=True',
        "software manuals only",
        "longest source in training had 15 tokens",
        results[0]["scores"][0]["signature"],
    ):
        assert known in text, known
    bleu = results[0]["scores"][0]
    assert f"| 4 | {bleu['score']:.2f} ± {bleu['confidence']:.2f} |" in text
    _assert_tidy(text)


def test_missing_facts_are_left_out(folder):
    card = ModelCard.load(write_card(folder, {}))
    assert card.text.lstrip().startswith("# small\n")
    for heading in ("## Training", "## Scores", "## Licence"):
        assert heading not in card.text
    for word in ("None", "undefined", "unknown"):
        assert word not in card.content
    assert card.data.language is None
    assert card.data.license is None
    assert card.data.eval_results is None
    _assert_tidy(card.text)


def test_none_is_a_missing_fact(folder):
    assert write_card(folder, dict.fromkeys(FACTS)).read_text() == write_card(folder, {}).read_text()


def test_code_in_the_card_runs(learned_model, folder, monkeypatch, capsys):
    """The card's own examples, on the folder that it describes."""
    text = write_card(folder, {"name": str(folder)}).read_text()
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example.replace("A sentence to translate.", "Yes"), "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["Ja", "['Ja']"]


def test_fact_without_a_place_is_refused(folder):
    with pytest.raises(CardError, match=r"'target_lang' has no place in a card; did you mean target_language\?"):
        write_card(folder, {"target_lang": "de"})
    assert not (folder / "README.md").exists()


def test_folder_without_a_model(tmp_path):
    with pytest.raises(CardError, match=r"holds no config\.json"):
        write_card(tmp_path, {})


def test_a_failure_keeps_the_card_that_is_there(folder):
    (folder / "README.md").write_text("mine")
    with pytest.raises(CardError):
        write_card(folder, {"stepz": 3})
    assert (folder / "README.md").read_text() == "mine"
    assert not list(folder.glob("*.partial"))


def _assert_tidy(text):
    assert "\n\n\n" not in text
    assert not re.search(r"[{}]{2}|{%", text.replace("}\n", ""))
    assert text.endswith("```\n")
