"""The tokenizer with two sides: as an object, saved and loaded, and where the package is not installed."""

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from relpos import RelPosTokenizer

SOURCE = ["<unk>", "<blank>", "<s>", "</s>", "▁the", "▁cat", "s"]
TARGET = ["<unk>", "<blank>", "<s>", "</s>", "▁die", "▁Katze", "n", "▁da"]


def segmenter(pieces):
    """Unigram over the given pieces and single characters, which the vocabularies do not have."""
    alphabet = [(character, -9.0) for character in "▁abcdefghijklmnopqrstuvwxyzK<>/" if character not in pieces]
    model = models.Unigram(
        [("<unk>", -99.0), *((piece, -1.0) for piece in pieces if piece[0] != "<"), *alphabet], unk_id=0
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def make(**options):
    return RelPosTokenizer(segmenter(SOURCE), SOURCE, segmenter(TARGET), TARGET, **options)


@pytest.fixture
def tokenizer():
    return make()


def test_each_side_has_its_ids_and_its_end(tokenizer):
    batch = tokenizer("the cats", text_target="die Katzen")
    assert batch["input_ids"] == [4, 5, 6]
    assert batch["labels"] == [4, 5, 6, 3]
    assert tokenizer("the", add_special_tokens=False)["input_ids"] == [4]
    assert tokenizer(text_target="die", add_special_tokens=False)["input_ids"] == [4]
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.target_vocab_size) == (7, 7, 8)


def test_the_ends_can_be_chosen():
    tokenizer = make(add_source_bos=True, add_source_eos=True, add_target_eos=False)
    assert tokenizer("the cat")["input_ids"] == [2, 4, 5, 3]
    assert tokenizer(text_target="da")["input_ids"] == [7]
    mask = tokenizer("the cat", return_special_tokens_mask=True)["special_tokens_mask"]
    assert mask == [1, 0, 0, 1]


def test_decoding_is_of_targets_unless_told_otherwise(tokenizer):
    assert tokenizer.decode([4, 5, 6]) == "die Katzen"
    assert tokenizer.decode([4, 5, 6], use_source_tokenizer=True) == "the cats"
    assert tokenizer.batch_decode([[2, 4, 5, 6, 3, 1], [7]], skip_special_tokens=True) == ["die Katzen", "da"]
    assert tokenizer.decode([2, 4, 3]) == "<s> die </s>"
    assert tokenizer.decode([]) == ""
    assert tokenizer("the")["input_ids"] == [4]  # decoding leaves the side as it was


def test_what_the_vocabulary_lacks_is_unknown(tokenizer):
    assert tokenizer("the dog")["input_ids"] == [4, 0, 0, 0, 0]  # pieces of the segmenter, none in the vocabulary
    assert tokenizer.decode([4, 99]) == "die <unk>"


def test_text_that_spells_a_special_token_is_text(tokenizer):
    ids = tokenizer("the </s> cat <blank>")["input_ids"]
    assert 3 not in ids
    assert 1 not in ids


def test_nothing_at_all_is_one_unknown_token(tokenizer):
    assert tokenizer("")["input_ids"] == [0]
    assert tokenizer(text_target="")["input_ids"] == [3]
    assert make(add_source_eos=True)("")["input_ids"] == [3]


def test_padding_and_truncation(tokenizer):
    batch = tokenizer(["the", "the cats"], text_target=["da", "die Katze"], padding=True)
    assert batch["input_ids"] == [[4, 1, 1], [4, 5, 6]]
    assert batch["attention_mask"] == [[1, 0, 0], [1, 1, 1]]
    assert tokenizer("the cats", truncation=True, max_length=2)["input_ids"] == [4, 5]
    assert tokenizer(text_target="die Katzen", truncation=True, max_length=3)["input_ids"] == [4, 5, 3]


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "first")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert isinstance(loaded, RelPosTokenizer)  # the package's own, without trust in the copy
    loaded.save_pretrained(tmp_path / "second")
    for name in RelPosTokenizer.vocab_files_names.values():
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for other in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert other("the cats", text_target="die Katze da") == tokenizer("the cats", text_target="die Katze da")
        assert other.decode([4, 5, 6]) == "die Katzen"


def test_settings_are_saved(tmp_path):
    make(add_source_eos=True, add_target_eos=False).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("the", text_target="da") == {"input_ids": [4, 3], "attention_mask": [1, 1], "labels": [7]}


def test_without_the_package_its_code_comes_with_the_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    script = (
        "import sys; sys.modules['relpos'] = None\n"
        "from transformers import AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)\n"
        "print(tokenizer('the cats', text_target='die Katze da')['labels'], tokenizer.decode([4, 5, 6]))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[4, 5, 7, 3] die Katzen", result.stderr


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (["<unk>", "<blank>", "</s>"], ["<unk>", "</s>", "<blank>"], "'</s>' has the id 2 in the source and 1"),
        (["<unk>", "<blank>"], TARGET, "'</s>' must be in both"),
        (SOURCE, [*TARGET, "▁da"], "target vocabulary holds '▁da' twice"),
    ],
)
def test_vocabularies_that_do_not_fit_are_refused(source, target, message):
    with pytest.raises(ValueError, match=message):
        RelPosTokenizer(segmenter(SOURCE), source, segmenter(TARGET), target, bos_token=None)


def test_a_start_token_of_the_decoder_alone_is_no_matter_of_the_tokenizer():
    source = [token for token in SOURCE if token != "<s>"]
    target = [token for token in TARGET if token != "<s>"]
    tokenizer = RelPosTokenizer(segmenter(SOURCE), source, segmenter(TARGET), [*target, "<s>"])
    assert tokenizer.bos_token is None
    with pytest.raises(ValueError, match="'<s>' must be in both"):
        RelPosTokenizer(segmenter(SOURCE), source, segmenter(TARGET), [*target, "<s>"], add_source_bos=True)


def test_threads_do_not_change_each_others_side(tokenizer):
    """As in a server whose threads share one pipeline."""

    def run(number):
        wrong = 0
        for _ in range(300):
            wrong += tokenizer("the cats")["input_ids"] != [4, 5, 6]
            wrong += tokenizer(text_target="die Katzen")["input_ids"] != [4, 5, 6, 3]
            wrong += tokenizer.decode([4, 5, 6]) != "die Katzen"
        return wrong

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(run, range(4))) == [0] * 4
    finally:
        sys.setswitchinterval(interval)


def test_nothing_can_be_added_to_two_vocabularies(tokenizer):
    with pytest.raises(ValueError, match="'<new>' is not in both vocabularies"):
        tokenizer.add_tokens(["<new>"])
