"""card.py: metadata that the Hub's own class reads back, what is known said, and nothing made up."""

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from relpos.model_cards import CardError, card, write_card
from relpos.model_cards.preset_cards import write_preset_cards
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
    assert found["bleu"].metric_name == "BLEU, beam 4"
    assert found["bleu"].metric_args["signature"] == bleu["signature"]
    low, high = found["bleu"].metric_args["confidence_interval_95"]
    assert low < bleu["score"] < high
    assert high - low == pytest.approx(2 * bleu["confidence"], abs=0.02)


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
    assert f"| 4 | {bleu['score']:.1f} ± {bleu['confidence']:.1f} |" in text
    _assert_tidy(text)


def test_missing_facts_are_left_out(folder):
    card = ModelCard.load(write_card(folder, {}))
    assert card.text.lstrip().startswith("# small\n")
    for heading in ("## Training", "## Scores", "## Licence", "!["):
        assert heading not in card.text
    for word in ("None", "undefined", "unknown"):
        assert word not in card.content
    assert card.data.language == ["en", "de"]  # which the configuration knows
    assert card.data.license is None
    assert card.data.eval_results is None
    _assert_tidy(card.text)


def test_facts_add_up(folder, results):
    """Training, evaluation and a push each say what they know, and None takes nothing back."""
    write_card(folder, {**FACTS, "name": None})
    write_card(folder, {"results": results})
    added = write_card(folder, dict.fromkeys(FACTS) | {"name": FACTS["name"]}).read_text()
    (folder / "card.json").unlink()
    (folder / "README.md").unlink()
    assert write_card(folder, {**FACTS, "results": results}).read_text() == added


def test_a_card_edited_by_hand_stays(folder, results):
    path = write_card(folder, FACTS)
    path.write_text(mine := path.read_text().replace("Width", "Breadth"))
    assert card.is_edited(folder)
    assert write_card(folder, {"results": results}) == path
    assert path.read_text() == mine
    assert card.is_edited(folder)
    assert card.read_facts(folder)["results"] == results  # for the day that the edited card is removed
    path.unlink()
    assert "## Scores" in write_card(folder, {}).read_text()
    assert not card.is_edited(folder)


@pytest.mark.parametrize("content", ["[", "[]", "{}", '{"facts": 3}', '{"facts": {"stepz": 3}}'])
def test_damaged_facts_are_refused(folder, content):
    write_card(folder, FACTS)
    (folder / "card.json").write_text(content)
    with pytest.raises(CardError, match=r"card\.json cannot be read"):
        write_card(folder, {"steps": 1})


def test_a_base_model_that_is_a_folder_is_no_link(folder):
    path = write_card(folder, {"base_model": "quickstart"})
    assert ModelCard.load(path).data.base_model is None
    assert "made from `quickstart`" in path.read_text()


def test_the_picture_of_the_tables_is_shown_where_there_is_one(folder):
    (folder / "positions.png").write_bytes(b"")
    assert "](positions.png)" in write_card(folder, {}).read_text()


def test_what_is_missing_is_named(folder, results):
    assert len(card.missing_facts(folder)) == 2
    write_card(folder, {"license": "mit", "results": results})
    assert card.missing_facts(folder) == []


def test_translations_that_were_cut_off_are_a_limit(folder, results):
    text = write_card(folder, {"results": [{**results[0], "cut_off": 3}]}).read_text()
    assert "With a beam of 1, 3 of 1,000 translations" in text


def test_ctranslate2_is_named_only_where_it_can_serve_the_model(folder):
    assert "relpos export small served --to ctranslate2" in write_card(folder, {}).read_text()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "relative_position_per_head": True}))
    assert "ctranslate2" not in write_card(folder, {}).read_text()


def test_cards_of_the_presets_are_the_ones_that_lie_rendered(tmp_path):
    """`python -m relpos.model_cards.preset_cards model_cards/rendered` renders them anew."""
    rendered = Path(__file__).parents[2] / "model_cards" / "rendered"
    for path in write_preset_cards(tmp_path):
        assert path.read_text() == (rendered / path.name).read_text(), path.name
        _assert_tidy(path.read_text())


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
