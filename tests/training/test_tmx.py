import gzip
import re
import tracemalloc

import pytest

from relpos.training.tmx import TMXError, read_tmx

HEAD = '<?xml version="1.0" encoding="{}"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4"><header/><body>\n'
TAIL = "</body></tmx>\n"


def unit(**segments):
    variants = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in segments.items())
    return f'<tu tuid="x"><note>not a segment</note>{variants}</tu>\n'


def read(path, text, *, encoding="utf-8", languages=("en", "de")):
    path.write_bytes((HEAD.format(encoding) + text + TAIL).encode(encoding))
    return list(read_tmx(str(path), languages))


def test_units_come_in_order_and_only_those_with_both_languages(tmp_path):
    text = unit(en="One &amp; two", de="Eins &amp; zwei") + unit(en="only") + unit(de="Drei", fr="Trois", en="Three")
    assert read(tmp_path / "c.tmx", text) == [("One & two", "Eins & zwei"), ("Three", "Drei")]
    assert read(tmp_path / "c.tmx", text, languages=("fr", "en")) == [("Trois", "Three")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1"])
def test_encodings(tmp_path, encoding):
    assert read(tmp_path / "c.tmx", unit(en="a", de="größer"), encoding=encoding) == [("a", "größer")]


def test_code_is_left_out_and_white_space_is_one_space(tmp_path):
    text = unit(
        en='Press <bpt i="1">&lt;b&gt;</bpt>the <hi>red</hi><ept i="1">&lt;/b&gt;</ept>\n   key<ph>&#xA0;<sub>x</sub></ph>.',
        de="\n Rot \u2028 \n",
    )
    assert read(tmp_path / "c.tmx", text) == [("Press the red key.", "Rot")]


def test_regions_and_the_older_attribute(tmp_path):
    text = unit(**{"en-US": "colour?", "EN": "color", "de_AT": "Farbe", "den": "?"})
    assert read(tmp_path / "c.tmx", text) == [("color", "Farbe")]
    assert read(tmp_path / "c.tmx", text.replace("xml:lang", "lang")) == [("color", "Farbe")]


@pytest.mark.parametrize("languages", [("en_US", "de_DE"), ("en-us", "DE-de"), ("en", "de")])
@pytest.mark.parametrize("codes", [("en-US", "de-DE"), ("EN_us", "de_de")])
def test_a_region_follows_a_hyphen_or_an_underscore_in_any_case(tmp_path, languages, codes):
    text = unit(**dict(zip(codes, ("color", "Farbe"))))
    assert read(tmp_path / "c.tmx", text, languages=languages) == [("color", "Farbe")]


def test_another_region_is_another_language(tmp_path):
    with pytest.raises(TMXError, match="no unit in both en_US and de; its languages are de, en, en-gb"):
        read(tmp_path / "c.tmx", unit(**{"en-GB": "colour", "en": "?", "de": "Farbe"}), languages=("en_US", "de"))


@pytest.mark.parametrize("prefix", ["", "t:"])
def test_elements_can_be_in_a_namespace(tmp_path, prefix):
    declared = f'<tmx xmlns{prefix and ":t"}="http://www.lisa.org/tmx14" version="1.4"><body>'
    body = unit(en="Press <ph>&lt;b&gt;</ph>it", de="Drück es") + "</body></tmx>"
    elements = re.sub("(</?)(?=[a-z])", rf"\1{prefix}", declared + body)
    (tmp_path / "c.tmx").write_text(elements, encoding="utf-8")
    assert list(read_tmx(str(tmp_path / "c.tmx"), ("en", "de"))) == [("Press it", "Drück es")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: not well-formed XML .no element found"),
        (b"en\tde\n", "line 1: not well-formed"),
        ((HEAD.format("utf-8") + unit(en="a", de="b")).encode(), "line 5: not well-formed XML .no element"),
        ((HEAD.format("utf-8") + unit(en="a & b") + TAIL).encode(), "line 4: not well-formed"),
        ((HEAD.format("utf-8") + unit(en="a", fr="b") + TAIL).encode(), "no unit in both en and de.*en, fr"),
        ((HEAD.format("utf-8") + TAIL).encode(), "its languages are none"),
        ((HEAD.format("utf-8") + unit(en="a", de="&nbsp;") + TAIL).encode(), "line 4: uses the entity nbsp"),
    ],
)
def test_damage_is_named(tmp_path, content, message):
    (tmp_path / "c.tmx").write_bytes(content)
    with pytest.raises(TMXError, match=message):
        list(read_tmx(str(tmp_path / "c.tmx"), ("en", "de")))


def test_a_truncated_gzip_file_is_named(tmp_path):
    text = HEAD.format("utf-8") + unit(en="a", de="b") * 50 + TAIL
    (tmp_path / "c.tmx.gz").write_bytes(gzip.compress(text.encode())[:-20])
    with pytest.raises(TMXError, match="truncated gzip"):
        list(read_tmx(str(tmp_path / "c.tmx.gz"), ("en", "de")))


@pytest.mark.parametrize(
    "entity",
    [
        '<!ENTITY b "&a;&a;">',
        '<!ENTITY b SYSTEM "file:///etc/hostname">',
        '<!ENTITY % b SYSTEM "file:///etc/hostname">',
    ],
)
def test_entities_are_refused_before_they_expand(tmp_path, entity):
    bomb = '<?xml version="1.0"?>\n<!DOCTYPE tmx [<!ENTITY a "aaaa">\n' + entity + "]>"
    (tmp_path / "c.tmx").write_text(bomb + "<tmx><body>" + unit(en="&b;", de="&b;") + TAIL)
    with pytest.raises(TMXError, match=r"line \d: declares the entity"):
        list(read_tmx(str(tmp_path / "c.tmx"), ("en", "de")))


def test_memory_does_not_grow_with_the_file(tmp_path):
    file = tmp_path / "c.tmx"
    peaks = []
    for units in (1_000, 8_000):
        file.write_text(HEAD.format("utf-8") + unit(en="a word" * 20, de="ein Wort" * 20) * units + TAIL)
        tracemalloc.start()
        assert sum(1 for _ in read_tmx(str(file), ("en", "de"))) == units
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
