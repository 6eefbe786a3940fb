"""tokenized.py: Moses's tokens, split compounds, and the BLEU that multi-bleu.perl counts, written out here."""

import builtins
import math
from collections import Counter

import pytest

from relpos.training import evaluation, tokenized

REFERENCES = [
    "Das Rich-Text-Format ist ein E-Mail-Format, z.B. für Briefe.",
    "Er sagte: „Der Preis (5,50 €) ist zu hoch!“",
    "Die Ost-West-Beziehungen blieben gut – trotz allem.",
]
HYPOTHESES = [
    "Das Rich-Text Format ist ein E-Mail-Format, z.B. für die Briefe.",
    "Er sagte: „Der Preis (5,50 €) ist hoch!“",
    "Die Ost-West-Beziehungen sind trotz allem gut geblieben.",
]


@pytest.mark.parametrize(
    ("text", "language", "tokens"),
    [
        ("rich-text format", "de", "rich ##AT##-##AT## text format"),
        ("Die E-Mail, z.B. von mir.", "de", "Die E ##AT##-##AT## Mail , z.B. von mir ."),
        ("Preis: 5,50 Euro - billig!", "de", "Preis : 5,50 Euro - billig !"),
        ("rich-text format", "fr", "rich-text format"),
        ("l'arc-en-ciel", "fr", "l &apos; arc-en-ciel"),
        ("", "de", ""),
    ],
)
def test_tokens(text, language, tokens):
    assert tokenized.split_for_bleu([text], language=language) == [tokens.replace("l &apos;", "l&apos;")]


def multi_bleu(hypotheses, references):
    """BLEU of Papineni et al. 2002 without smoothing: the geometric mean of four clipped precisions, and brevity."""
    pairs = [(hypothesis.split(), reference.split()) for hypothesis, reference in zip(hypotheses, references)]
    grams = lambda tokens, n: Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))
    logarithms = []
    for n in range(1, 5):
        matches = sum((grams(hypothesis, n) & grams(reference, n)).total() for hypothesis, reference in pairs)
        logarithms.append(math.log(matches / sum(grams(hypothesis, n).total() for hypothesis, _ in pairs)))
    shorter = sum(len(reference) for _, reference in pairs) / sum(len(hypothesis) for hypothesis, _ in pairs)
    return 100 * math.exp(sum(logarithms) / 4 + min(0, 1 - shorter))


def test_the_score_is_multi_bleus_of_split_tokens():
    *plain, score = evaluation.score_translations(HYPOTHESES, REFERENCES, tokenized="de")
    assert plain == evaluation.score_translations(HYPOTHESES, REFERENCES)
    sides = [tokenized.split_for_bleu(side, language="de") for side in (HYPOTHESES, REFERENCES)]
    assert score["score"] == pytest.approx(multi_bleu(*sides), abs=1e-3)
    assert score["score"] != pytest.approx(plain[0]["score"], abs=1)
    assert score["metric"] == "tokenized BLEU"
    assert "tok:moses-de-split-compounds|smooth:none" in score["signature"]


def test_a_missing_tokenizer_is_named_before_the_work(monkeypatch):
    imported = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "sacremoses":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(tokenized.TokenizerMissingError, match=r"pip install 'relpos\[moses\]'"):
        tokenized.check_installed()
