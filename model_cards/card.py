"""Writes the card of a saved model: README.md with the metadata that the Hub reads.

What a card says beyond the configuration are facts, which different commands know: training its settings, evaluation the
scores, a push the name. They are kept beside the card in card.json, so that each adds its own and the card is rendered
anew from all of them. A card that somebody edited is never written over.
"""

import hashlib
import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

from relpos import conversion
from relpos.configuration import preset

from .inspection import count_parameters, describe_positions

CARD = "README.md"
FACTS_FILE = "card.json"
PICTURE = "positions.png"
"""What the heads learned about distance; shown where the folder has it."""

TEMPLATE = Path(__file__).with_name("card_template.md")
# What a card can say beyond what the saved folder knows. None of it is needed, and none of it is made up.
FACTS = {
    "name": "the model's name; the folder's name where it is not given",
    "source_language": "ISO 639 code of the source language, or a list of them",
    "target_language": "ISO 639 code of the target language, or a list of them",
    "corpus": "name of the training corpus, with its source",
    "corpus_license": "licence of the training corpus",
    "dataset": "name of the training corpus on the Hub, where it is there",
    "pairs": "sentence pairs trained on",
    "steps": "optimizer steps",
    "training": "settings of the training, label to value",
    "test_corpus": "name of the corpus that the scores were taken on",
    "results": "scores, as relpos.training.evaluation.evaluate_model returns them",
    "license": "licence of the model, an identifier that the Hub knows",
    "base_model": "the model that this one was fine-tuned from",
    "origin": "the model of another toolkit that this one was converted from",
    "notes": "sentences on how settings of that toolkit were translated",
    "limits": "sentences on what the model cannot do",
}


class CardError(ValueError):
    """A card that cannot be written; the message is one sentence for the user."""


def write_card(folder: Path, facts: dict[str, Any]) -> Path:
    """Add facts to those that the folder keeps, and write README.md of the saved model from all of them.

    Args:
        folder: a saved RelPos model.
        facts: what the configuration does not know, see FACTS; what is missing or None stays as it was, and what nobody
            has said is left out of the card.

    Returns:
        The path of README.md, which is written whole or not at all. Where it was edited by hand it stays as it is, and
        only card.json takes the facts.

    Raises:
        CardError: the folder holds no model, card.json is damaged, or a fact has a name that cards do not know.
    """
    folder = Path(folder)
    facts = {**read_facts(folder), **_check_facts(facts)}
    content = render_card(folder, facts).content.rstrip() + "\n"
    rendered = not is_edited(folder)
    record = {"facts": facts}
    record["rendered"] = _digest(content.encode()) if rendered else _read_record(folder).get("rendered")
    if rendered:
        _write(folder / CARD, content)
    _write(folder / FACTS_FILE, json.dumps(record, ensure_ascii=False, indent=2) + "\n")
    return folder / CARD


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts that `write_card` kept in the folder; none where it has no card.json."""
    return _read_record(folder).get("facts", {})


def is_edited(folder: Path) -> bool:
    """Whether README.md is there and is not what `write_card` wrote last."""
    card = Path(folder) / CARD
    return card.is_file() and _digest(card.read_bytes()) != _read_record(folder).get("rendered")


def missing_facts(folder: Path) -> list[str]:
    """What a reader would look for and the card leaves out, with how to add it."""
    facts, config = read_facts(folder), AutoConfig.from_pretrained(folder)
    missing = []
    if "license" not in facts:
        missing.append("the licence (--license, such as apache-2.0)")
    if not facts.get("results"):
        missing.append("scores (relpos evaluate --card)")
    if not (facts.get("source_language") or getattr(config, "source_language", None)):
        missing.append(f"languages (source_language and target_language in {FACTS_FILE})")
    return missing


def render_card(folder: Path, facts: dict[str, Any]) -> ModelCard:
    """The card of a saved folder, not yet written; see `write_card`."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CardError(f"The folder {folder} holds no config.json, so there is no model to write a card for.")
    config = AutoConfig.from_pretrained(folder)
    languages = {side: getattr(config, side, None) for side in ("source_language", "target_language")}
    facts = {"name": folder.resolve().name, **languages, **_check_facts(facts)}
    return _render(
        config,
        facts,
        generation=_generation_settings(folder),
        own_tokenizer=any(folder.glob("tokenization_*.py")),
        picture=PICTURE if (folder / PICTURE).is_file() else None,
    )


def render_preset_card(name: str) -> ModelCard:
    """The card of a preset: a model that nobody has trained yet."""
    return _render(preset(name), {"name": name}, preset=name)


def _render(config: Any, facts: dict[str, Any], **context: Any) -> ModelCard:
    facts = _check_facts(facts)
    with torch.device("meta"):
        parameters = count_parameters(AutoModelForSeq2SeqLM.from_config(config))
    return ModelCard.from_template(
        _metadata(facts),
        template_path=str(TEMPLATE),
        config=config,
        parameters=parameters,
        positions=describe_positions(config),
        limits=_limits(config, facts),
        exportable=config.model_type == "relpos" and not conversion.obstacles(config, toolkit="ctranslate2"),
        facts=facts,
        **context,
    )


def _read_record(folder: Path) -> dict[str, Any]:
    path = Path(folder) / FACTS_FILE
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {**record, "facts": _check_facts(record["facts"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CardError(f"The facts of the card in {path} cannot be read: {error}") from error


def _write(path: Path, content: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that are given; refuses names that no card would show."""
    for name in facts:
        if name not in FACTS:
            nearest = get_close_matches(name, FACTS, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"a card knows {', '.join(FACTS)}."
            raise CardError(f"The fact {name!r} has no place in a card; {hint}")
    return {name: value for name, value in facts.items() if value is not None}


def _metadata(facts: dict[str, Any]) -> ModelCardData:
    sides = (facts.get(side, []) for side in ("source_language", "target_language"))
    languages = [code for side in sides for code in ([side] if isinstance(side, str) else side)]
    results = _metadata_scores(facts)
    return ModelCardData(
        language=languages or None,
        license=facts.get("license"),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["translation", "relpos", "relative-position-representations"],
        # a folder's name leads nowhere on the Hub
        base_model=base_model if "/" in (base_model := facts.get("base_model", "")) else None,
        datasets=facts.get("dataset"),
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=facts["name"],
        eval_results=results or None,
    )


def _metadata_scores(facts: dict[str, Any]) -> list[EvalResult]:
    """The scores of the largest beam, which are the best that the model is known to do."""
    if not facts.get("results"):
        return []
    corpus = facts.get("test_corpus") or facts.get("corpus") or "held-out sentences"
    result = max(facts["results"], key=lambda result: result["beams"])
    return [
        EvalResult(
            task_type="translation",
            task_name="Translation",
            dataset_type=facts.get("dataset") or corpus,
            dataset_name=corpus,
            metric_type=score["metric"].lower().removesuffix("2"),
            metric_name=f"{score['metric']}, beam {result['beams']}",
            metric_value=round(score["score"], 2),
            metric_args={
                "signature": score["signature"],
                "beams": result["beams"],
                "confidence_interval_95": [
                    round(score["score"] - score["confidence"], 2),
                    round(score["score"] + score["confidence"], 2),
                ],
            },
        )
        for score in result["scores"]
    ]


def _limits(config: Any, facts: dict[str, Any]) -> list[str]:
    """What is known to be out of reach: what training left unseen, and the limits that are given."""
    limits = []
    if trained_on := getattr(config, "longest_training_source", None):
        limits.append(
            f"The longest source in training had {trained_on:,} tokens. Longer ones are translated whole, but how well "
            "was not measured."
        )
    if getattr(config, "absolute_position", None) == "learned":
        limits.append(f"Sources and translations of more than {config.max_position_embeddings:,} tokens are refused.")
    for result in facts.get("results", []):
        if result.get("cut_off"):
            limits.append(
                f"With a beam of {result['beams']}, {result['cut_off']:,} of {result['pairs']:,} translations of the test "
                "were cut off at the limit on new tokens."
            )
    given = facts.get("limits", [])
    return limits + ([given] if isinstance(given, str) else list(given))


def _generation_settings(folder: Path) -> dict[str, Any]:
    """How the folder translates where nobody says otherwise, without the settings that are not set."""
    if not (folder / "generation_config.json").is_file():
        return {}
    saved = GenerationConfig.from_pretrained(folder)
    names = ("num_beams", "length_penalty", "max_length", "max_new_tokens")
    return {name: value for name in names if (value := getattr(saved, name, None)) is not None}
