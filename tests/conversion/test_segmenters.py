"""Where words end, as OpenNMT-py (`text.strip().split(" ")`) and OpenNMT-tf (`tf.strings.split`) have it."""

import pytest

from relpos.conversion.segmenters import bpe_codes_segmenter, whitespace_segmenter

SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]
WORDS = [f"a{space}b" for space in SPACES]


@pytest.fixture
def codes(tmp_path):
    (tmp_path / "codes").write_text("#version: 0.2\na b</w>\n", encoding="utf-8")
    return tmp_path / "codes"


@pytest.mark.parametrize("space", SPACES)
def test_words_of_opennmt_py(codes, space):
    words = whitespace_segmenter(["a", "b", *WORDS])
    for text in (f"{space}a a{space}b{space}", f"b\n{space}", f"{space * 2}a"):
        assert words.encode(text).tokens == [word for word in text.strip().split(" ") if word]
    segmenter, _ = bpe_codes_segmenter(codes, ["ab"])
    assert segmenter.encode(f"{space}ab ab{space}").tokens == ["ab</w>", "ab</w>"]


@pytest.mark.parametrize("space", SPACES)
def test_words_of_opennmt_tf(space):
    """TensorFlow splits bytes, so spaces beyond ASCII stay, and so do the control characters that Python takes for spaces."""
    words = whitespace_segmenter(["a", "b", *WORDS, f"b{space}"], ascii_spaces=True)
    expected = ["a", "b", "b"] if space in " \t\n\v\f\r" else [f"a{space}b", f"b{space}"]
    assert words.encode(f" a{space}b  b{space}\n").tokens == expected
