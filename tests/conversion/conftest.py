"""What the tests of conversions share: peers' recorded answers, and the comparison of a model with them.

`answers.json` holds, for real sentences: `source`, `target`, `source_ids`, `target_ids` (with start and end token),
`log_probs` (teacher-forced, one per target token), and `beam_1` and `beam_4`, the peer's hypotheses without length penalty,
each with `ids`, `score` (sum of log-probabilities) and `text`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

FIXTURES = Path(__file__).parent / "fixtures"


@dataclass
class Comparison:
    """Largest differences from a peer over all sentences, and the outputs that differ."""

    log_probs: float = 0.0
    rescored_per_token: float = 0.0
    greedy_differs: list = field(default_factory=list)
    greedy_text_differs: list = field(default_factory=list)
    beam_differs: list = field(default_factory=list)

    def check_answers(self):
        """What must hold of every toolkit: log-probabilities, greedy outputs and their text, scores of its hypotheses."""
        assert self.log_probs < 1e-4
        assert self.greedy_differs == []
        assert self.greedy_text_differs == []
        assert self.rescored_per_token < 1e-4

    def check_beams(self):
        """What must hold where both search alike but for their end: outputs differ only where ours scores better."""
        for ids, score, peer in self.beam_differs:
            assert score >= peer["score"] - 1e-4, (ids, peer)
        assert len(self.beam_differs) <= 5


@pytest.fixture(scope="session")
def compare_with_answers():
    """Compare a converted model with a peer's answers: (model, tokenizer, folder with answers.json) -> Comparison."""
    return compare


@torch.inference_mode()
def compare(model, tokenizer, folder):
    result = Comparison()
    sentences = json.loads((folder / "answers.json").read_text(encoding="utf-8"))["sentences"]
    greedy, beam = (search(model, tokenizer, sentences, beams=beams) for beams in (1, 4))
    for sentence, greedy_ids, best_ids in zip(sentences, greedy, beam, strict=True):
        batch = tokenizer(sentence["source"], text_target=sentence["target"], return_tensors="pt")
        labels = batch.pop("labels")
        assert batch["input_ids"][0].tolist() == sentence["source_ids"]
        assert labels[0].tolist() == sentence["target_ids"][1:]
        difference = token_log_probs(model, batch, labels) - torch.tensor(sentence["log_probs"])
        result.log_probs = max(result.log_probs, difference.abs().max().item())
        for hypothesis in sentence["beam_4"]:
            score = token_log_probs(model, batch, torch.tensor([hypothesis["ids"]])).sum().item()
            per_token = abs(score - hypothesis["score"]) / len(hypothesis["ids"])
            result.rescored_per_token = max(result.rescored_per_token, per_token)
        peer, text = sentence["beam_1"][0], tokenizer.decode(greedy_ids, skip_special_tokens=True)
        if greedy_ids != peer["ids"]:
            result.greedy_differs.append((greedy_ids, peer["ids"]))
        if text != peer["text"]:
            result.greedy_text_differs.append((text, peer["text"]))
        if best_ids != sentence["beam_4"][0]["ids"]:
            score = token_log_probs(model, batch, torch.tensor([best_ids])).sum().item()
            result.beam_differs.append((best_ids, score, sentence["beam_4"][0]))
    return result


def token_log_probs(model, batch, labels):
    """[targets]: log-probability of every label given the ones before it."""
    return model(**batch, labels=labels).logits.log_softmax(-1).gather(2, labels[..., None])[0, :, 0]


def search(model, tokenizer, sentences, *, beams):
    """The best hypothesis of every sentence, with the end token where it has one, without the start token."""
    batch = tokenizer([sentence["source"] for sentence in sentences], padding=True, return_tensors="pt")
    options = {"length_penalty": 0.0, "early_stopping": False} if beams > 1 else {"length_penalty": None}
    outputs = model.generate(**batch, num_beams=beams, do_sample=False, max_new_tokens=100, **options)
    rows = outputs[:, 1:].tolist()
    ends = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.fixture(scope="session")
def opennmt_py_fixtures():
    """The folder with one folder per tiny model that was trained in OpenNMT-py."""
    return FIXTURES / "opennmt_py"


@pytest.fixture(scope="session")
def converted(tmp_path_factory, opennmt_py_fixtures):
    """A function: the folder of an OpenNMT-py model's conversion, done once."""
    from relpos.conversion import convert

    folders = {}

    def folder(name):
        if name not in folders:
            out = tmp_path_factory.mktemp("converted") / name
            folders[name] = convert(
                opennmt_py_fixtures / name / "model.pt", out, toolkit="opennmt-py", languages=("en", "de")
            )
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def load_converted(converted):
    """A function: model and tokenizer of an OpenNMT-py model's conversion."""
    from transformers import AutoTokenizer

    from relpos import RelPosForConditionalGeneration

    def load(name):
        folder = converted(name)
        return RelPosForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    return load
