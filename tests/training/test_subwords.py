import io
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from relpos.training.subwords import load_sentencepiece, train_tokenizer

TEXTS = [f"Wählen Sie Extras – Makros – Makro {word} aufzeichnen." for word in ["eins", "zwei", "drei", "vier", "fünf"]]
TEXTS += [
    f"Choose Tools - Macros - Record the {word} macro." for word in ["first", "second", "third", "fourth", "fifth"]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS * 3, vocab_size=450).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@given(st.text(max_size=60) | st.text(alphabet=" \u2581\ue58101<>xA</s>pad\t\n", max_size=30))
@example("")
@example("  leading, double  and trailing ")
@example('Er sagte: "Öl , Käse" !')
@example("tab\there\r\nand\u2028there")
@example("🙂 e\u0301 \u0301x")
@example("\u2581 \ue5811 \ue581\ue5810")
@example("<pad></s><unk> <0x41> </s>")
def test_decoding_gives_back_the_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids[-1] == tokenizer.eos_token_id
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id} & set(ids[:-1])


def test_special_ids_suit_the_model(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.convert_ids_to_tokens([3, 258]) == ["<0x00>", "<0xFF>"]
    assert tokenizer.bos_token is None


def test_source_and_target_end_in_eos_and_pad_right(tokenizer):
    batch = tokenizer(["Choose", "Choose Tools - Macros"], text_target=["Wählen Sie", "Extras"], padding=True)
    for side in ("input_ids", "labels"):
        rows = batch[side]
        assert len(rows[0]) == len(rows[1])
        for row in rows:
            real = [token for token in row if token != tokenizer.pad_token_id]
            assert row[: len(real)] == real
            assert real[-1] == tokenizer.eos_token_id
    assert batch["attention_mask"] == [[int(token != 0) for token in row] for row in batch["input_ids"]]


def test_frequent_words_are_pieces_wherever_they_stand(tokenizer):
    assert tokenizer.tokenize("Makro Makro")[0] == tokenizer.tokenize("Makro Makro")[-1] == "\u2581Makro"
    assert len(tokenizer.tokenize("日本")) == 1 + 6


def test_it_loads_without_this_package(folder):
    code = (
        "import sys; from transformers import AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})\n"
        "assert tokenizer.decode(tokenizer(' a  \u2581 ö </s>').input_ids, skip_special_tokens=True) == ' a  \u2581 ö </s>'\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'relpos']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rare_characters_are_left_to_the_bytes():
    tokenizer = train_tokenizer(["abc abd abe"] * 5000 + ["x 語"], vocab_size=400)
    assert "語" not in tokenizer.get_vocab()
    assert tokenizer.decode(tokenizer("語")["input_ids"], skip_special_tokens=True) == "語"


def test_training_twice_gives_the_same_vocabulary():
    first, second = (train_tokenizer(TEXTS * 3, vocab_size=450).get_vocab() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("texts", "size", "message"), [([], 400, "texts"), (["", ""], 400, "texts"), (["ab"], 300, "300")]
)
def test_impossible_vocabularies(texts, size, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, vocab_size=size)


def sentencepiece_model(**options):
    sentencepiece = pytest.importorskip("sentencepiece")
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 10), model_writer=writer, minloglevel=2, hard_vocab_limit=False, **options
    )
    return sentencepiece.SentencePieceProcessor(model_proto=writer.getvalue()), writer.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 90},
        {"model_type": "bpe", "vocab_size": 120},
        {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True},
        {"model_type": "unigram", "vocab_size": 90, "pad_id": 3, "user_defined_symbols": "@@"},
        {
            "model_type": "unigram",
            "vocab_size": 400,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
        },
    ],
)
def test_a_sentencepiece_model_keeps_its_ids(tmp_path, options):
    processor, content = sentencepiece_model(**options)
    (tmp_path / "m.model").write_bytes(content)
    tokenizer = load_sentencepiece(tmp_path / "m.model")
    tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    texts = [*TEXTS, "", " ", "  Makros   sind  gut ", "Ｆullwidth ﬁ", "unbekannt: ß語"]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids[:-1] == processor.encode(text), text
        assert ids[-1] == tokenizer.eos_token_id == processor.eos_id()
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == processor.decode(ids[:-1]).replace(
            " ⁇ ", ""
        ).strip() or (processor.unk_id() in ids)
    assert tokenizer.pad_token_id == (3 if "pad_id" in options else processor.vocab_size())
    assert tokenizer("a", padding="max_length", max_length=9)["input_ids"][-1] == tokenizer.pad_token_id


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treat_whitespace_as_suffix": True}, "ends of words .treat_whitespace_as_suffix., which is not supported"),
        ({"user_defined_symbols": "｟num｠"}, "the user-defined symbol '｟num｠', which its normalisation changes"),
        ({"user_defined_symbols": ["\n"]}, r"the user-defined symbol '\\n', which its normalisation changes"),
        (
            {"user_defined_symbols": ["a b"], "normalization_rule_name": "identity"},
            "the user-defined symbol 'a b', which its normalisation changes",
        ),
    ],
)
def test_sentencepiece_models_that_cut_text_otherwise(tmp_path, model_type, options, message):
    _, content = sentencepiece_model(model_type=model_type, vocab_size=120, **options)
    (tmp_path / "m.model").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_sentencepiece(tmp_path / "m.model")


def test_spaces_as_a_symbol(tmp_path):
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    options["user_defined_symbols"] = ["\u2581\u2581", "\n", "\u2581Makro"]
    processor, content = sentencepiece_model(model_type="bpe", vocab_size=120, **options)
    (tmp_path / "bpe.model").write_bytes(content)
    tokenizer = load_sentencepiece(tmp_path / "bpe.model")
    for text in ("Makro   eins\n", "  Makro", " \n \n"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == processor.encode(text)
    _, content = sentencepiece_model(model_type="unigram", vocab_size=90, **options)
    (tmp_path / "unigram.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"user-defined symbol '\u2581\u2581', .* holds several spaces"):
        load_sentencepiece(tmp_path / "unigram.model")


def test_what_is_no_sentencepiece_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        load_sentencepiece(tmp_path / "missing.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="bad"):
        load_sentencepiece(tmp_path / "bad.model")
    _, content = sentencepiece_model(model_type="char", vocab_size=50)
    (tmp_path / "char.model").write_bytes(content)
    with pytest.raises(ValueError, match="unigram or bpe"):
        load_sentencepiece(tmp_path / "char.model")
