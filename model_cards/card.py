"""Writes the card of a saved model: README.md with the metadata that the Hub reads."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

from .inspection import count_parameters, describe_positions

TEMPLATE = Path(__file__).with_name("card_template.md")
# What a card can say beyond what the saved folder knows. None of it is needed, and none of it is made up.
FACTS = {
    "name": "the model's name; the folder's name where it is not given",
    "source_language": "ISO 639 code of the source language",
    "target_language": "ISO 639 code of the target language",
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
    """Write README.md of a saved model from its configuration and the facts that are given.

    Args:
        folder: a saved RelPos model.
        facts: what the folder does not know, see FACTS; whatever is missing or None is left out of the card.

    Returns:
        The path of README.md, which is written whole or not at all.

    Raises:
        CardError: the folder holds no model, or a fact has a name that cards do not know.
    """
    folder = Path(folder)
    card = render_card(folder, facts)
    path = folder / "README.md"
    partial = folder / "README.md.partial"
    partial.write_text(card.content.rstrip() + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def render_card(folder: Path, facts: dict[str, Any]) -> ModelCard:
    """The card of `write_card`, not yet written."""
    facts = _check_facts(facts)
    if not (folder / "config.json").is_file():
        raise CardError(f"The folder {folder} holds no config.json, so there is no model to write a card for.")
    config = AutoConfig.from_pretrained(folder)
    facts.setdefault("name", folder.resolve().name)
    with torch.device("meta"):
        parameters = count_parameters(AutoModelForSeq2SeqLM.from_config(config))
    return ModelCard.from_template(
        _metadata(facts),
        template_path=str(TEMPLATE),
        config=config,
        generation=_generation_settings(folder),
        own_tokenizer=(folder / "tokenization_relpos.py").is_file(),
        parameters=parameters,
        positions=describe_positions(config),
        limits=_limits(config, facts),
        facts=facts,
    )


def _check_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that are given; refuses names that no card would show."""
    for name in facts:
        if name not in FACTS:
            nearest = get_close_matches(name, FACTS, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"a card knows {', '.join(FACTS)}."
            raise CardError(f"The fact {name!r} has no place in a card; {hint}")
    return {name: value for name, value in facts.items() if value is not None}


def _metadata(facts: dict[str, Any]) -> ModelCardData:
    languages = [facts[side] for side in ("source_language", "target_language") if side in facts]
    results = _metadata_scores(facts)
    return ModelCardData(
        language=languages or None,
        license=facts.get("license"),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["translation", "relpos", "relative-position-representations"],
        base_model=facts.get("base_model"),
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
            metric_name=f"{score['metric']} (beam {result['beams']}; {score['signature']})",
            metric_value=round(score["score"], 2),
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
    given = facts.get("limits", [])
    return limits + ([given] if isinstance(given, str) else list(given))


def _generation_settings(folder: Path) -> dict[str, Any]:
    """How the folder translates where nobody says otherwise, without the settings that are not set."""
    if not (folder / "generation_config.json").is_file():
        return {}
    saved = GenerationConfig.from_pretrained(folder)
    names = ("num_beams", "length_penalty", "max_length", "max_new_tokens")
    return {name: value for name in names if (value := getattr(saved, name, None)) is not None}
