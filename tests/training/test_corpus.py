import gzip
import hashlib
import json
import random
import re
import resource

import datasets
import pytest

from relpos.training.corpus import (
    BUNDLED,
    CorpusError,
    bundled_splits,
    hold_out,
    parse_corpora,
    read_corpus,
    twin_key,
)

LANGUAGES = ("en", "de")
DIGESTS = {"validation": "21961f0b38fdfe42", "test": "6d6f8837b7aa721f"}
PAIRS = [("A house.", "Ein Haus."), ("", "leer"), ("a\u2028b\x85c", "ä  ö"), ("tail", "")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def splits():
    return bundled_splits()


def pairs_of(corpus, languages=LANGUAGES):
    return [tuple(pair[language] for language in languages) for pair in corpus["translation"][:]]


def write_all_forms(folder):
    """The same pairs in every form that is read, by the argument that reads it."""
    table = "".join(f"{source}\t{target}\n" for source, target in PAIRS)
    rows = [{"translation": dict(zip(LANGUAGES, pair))} for pair in PAIRS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "c.tsv").write_text(table, encoding="utf-8", newline="")
    (folder / "extra.tsv").write_text(table.replace("\n", "\tmore\n"), encoding="utf-8", newline="")
    (folder / "windows.tsv").write_bytes(b"\xef\xbb\xbf" + table.replace("\n", "\r\n").encode())
    (folder / "z.tsv.gz").write_bytes(gzip.compress(table.encode()))
    (folder / "c.json").write_text(lines, encoding="utf-8")
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for side, language in enumerate(LANGUAGES):
        text = "\n".join(pair[side] for pair in PAIRS) + "\n"
        (folder / f"plain.{language}").write_text(text, encoding="utf-8", newline="")
        (folder / f"zipped.{language}.gz").write_bytes(gzip.compress(text.encode()))
    names = ["c.tsv", "extra.tsv", "windows.tsv", "z.tsv.gz", "c.json", "z.jsonl.gz", "plain", "zipped"]
    return [str(folder / name) for name in names] + [[folder / "plain.en", folder / "plain.de"]]


def test_every_form_gives_the_same_pairs_line_for_line(tmp_path):
    for source in write_all_forms(tmp_path):
        assert pairs_of(read_corpus(source, languages=LANGUAGES)) == PAIRS, source


def test_a_file_without_a_last_line_feed_is_whole(tmp_path):
    (tmp_path / "c.tsv").write_text("a\tb\nc\td", encoding="utf-8")
    assert pairs_of(read_corpus(tmp_path / "c.tsv", languages=LANGUAGES)) == [("a", "b"), ("c", "d")]


def test_a_changed_file_is_read_anew(tmp_path):
    file = tmp_path / "c.tsv"
    for text in ("old", "new"):
        file.write_text(f"{text}\tx\n")
        assert pairs_of(read_corpus(file, languages=LANGUAGES)) == [(text, "x")]


def test_a_dataset_folder_with_either_kind_of_columns(tmp_path):
    rows = {"translation": [{"de": target, "en": source, "fr": "?"} for source, target in PAIRS]}
    columns = {"en": [source for source, _ in PAIRS], "de": [target for _, target in PAIRS]}
    for name, content in (("rows", rows), ("columns", columns)):
        (tmp_path / name).mkdir()
        datasets.Dataset.from_dict(content).to_parquet(tmp_path / name / "train.parquet")
        corpus = read_corpus(str(tmp_path / name), languages=LANGUAGES)
        assert pairs_of(corpus) == PAIRS
        assert corpus.features["translation"].languages == list(LANGUAGES)


def test_the_bundled_corpus_keeps_its_languages_apart():
    forth, back = (read_corpus(BUNDLED, languages=languages) for languages in (LANGUAGES, LANGUAGES[::-1]))
    assert len(forth) == 42_798
    assert forth[0] == back[0] == {"translation": {"en": "What is Access2Base?", "de": "Was ist Access2Base?"}}
    with pytest.raises(CorpusError, match="fr"):
        read_corpus(BUNDLED, languages=("en", "fr"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.tsv", b"a\tb\nno tab\n", r"c\.tsv, line 2: .*no tab"),
        ("c.tsv", b"a\tb\n\nc\td\n", r"c\.tsv, line 2: "),
        ("c.tsv", b"", r"c\.tsv is empty"),
        ("c.tsv.gz", gzip.compress(b"", mtime=0), r"c\.tsv\.gz is empty"),
        ("c.tsv", b"a\tb\nc\t\xff\n", r"c\.tsv, line 2: not UTF-8"),
        ("c.tsv.gz", gzip.compress(random.Random(0).randbytes(9999).hex().encode())[:2000], "truncated gzip"),
        ("c.tsv.gz", b"a\tb\n", "damaged or truncated gzip"),
        ("c.jsonl", b'{"translation": {"en": "a", "de": "b"}}\n{"translation": \n', r"c\.jsonl, line 2: expected"),
        (
            "c.jsonl",
            b'{"translation": {"en": "a", "de": "\\ud800 x"}}\n',
            r'c\.jsonl, line 1: "\\ud800" is half of a surr',
        ),
        ("c.jsonl", b'{"translation": {"en": "a", "fr": "b"}}\n', "line 1: .*de"),
        ("c.jsonl", b'{"translation": {"en": "a", "de": null}}\n', "line 1: "),
        ("c.jsonl", b'[{"translation": {"en": "a", "de": "b"}}]\n', "line 1: "),
        ("c.jsonl", b"[" * 100_000 + b"\n", "line 1: "),
        ("c.txt", b"a\n", "ending"),
    ],
)
def test_damage_is_named_in_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read_corpus(tmp_path / name, languages=LANGUAGES)
    assert "\n" not in str(caught.value)


@pytest.fixture
def _full_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.usefixtures("_full_disk")
def test_what_the_disk_does_not_hold_is_an_error_of_the_system(tmp_path):
    """Of which training says in one sentence what could not be written."""
    (tmp_path / "c.tsv").write_text("a\tb\n" * 2000)  # which take more room once they are prepared
    with pytest.raises(OSError, match="File too large"):
        read_corpus(tmp_path / "c.tsv", languages=LANGUAGES)


def test_unequal_line_counts_are_both_named(tmp_path):
    (tmp_path / "c.en").write_text("a\nb\nc\n")
    (tmp_path / "c.de").write_text("a\nb\n")
    with pytest.raises(CorpusError, match=r"c\.en has 3 lines but .*c\.de has 2"):
        read_corpus(tmp_path / "c", languages=LANGUAGES)
    with pytest.raises(CorpusError, match=r"2 lines but .* 3"):
        read_corpus([tmp_path / "c.de", tmp_path / "c.en"], languages=LANGUAGES)


@pytest.mark.parametrize("source", ["missing.tsv", ["missing.en", "missing.de"], "missing", ["a", "b", "c"]])
def test_missing_corpora(tmp_path, monkeypatch, source):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError) as caught:
        read_corpus(source, languages=LANGUAGES)
    assert "\n" not in str(caught.value)


def test_a_translation_memory_is_a_corpus(tmp_path):
    unit = '<tu><tuv xml:lang="EN-gb"><seg>A {}.</seg></tuv><tuv xml:lang="de"><seg>Ein {}.</seg></tuv></tu>'
    body = "".join(unit.format(word, word) for word in ("b", "&lt;c&gt;"))
    text = f'<?xml version="1.0"?><tmx version="1.4"><header/><body>{body}</body></tmx>'
    (tmp_path / "c.tmx.gz").write_bytes(gzip.compress(text.encode()))
    corpus = read_corpus(tmp_path / "c.tmx.gz", languages=LANGUAGES)
    assert pairs_of(corpus) == [("A b.", "Ein b."), ("A <c>.", "Ein <c>.")]
    (tmp_path / "c.tmx").write_text(text.replace("</body>", ""))
    with pytest.raises(CorpusError, match=r"c\.tmx, line 1: not well-formed"):
        read_corpus(tmp_path / "c.tmx", languages=LANGUAGES)


def sgm(documents, kind="src"):
    """An SGM file in the layout of WMT's, of the segments of each document by their ids."""
    body = ""
    for name, segments in documents.items():
        lines = "".join(f'<seg id="{number}">{text}</seg>\n' for number, text in segments.items())
        body += f'<doc sysid="ref" docid="{name}" genre="news" origlang="de">\n<p>\n{lines}</p>\n</doc>\n'
    return f'<{kind}set setid="newstest2014" srclang="any">\n{body}</{kind}set>\n'


def write_sgm(folder, source, reference):
    files = [folder / "t-deen-src.en.sgm", folder / "t-deen-ref.de.sgm"]
    for file, text in zip(files, (source, reference)):
        file.write_text(text, encoding="utf-8", newline="")
    return files


@pytest.mark.parametrize("streaming", [False, True])
def test_two_sgm_files_are_a_corpus(tmp_path, streaming):
    source = {"bbc/1": {1: "A &amp; B &lt;c&gt; &#8211; &amp;quot; AT&T", 2: ""}, "faz": {1: " one\n two\u2028"}}
    reference = {"bbc/1": {1: "Ä\u0085", 2: "leer"}, "faz": {1: "<hl>eins</hl>"}}
    # The case of tags, the order of attributes and their quotes are free in SGML.
    source, reference = sgm(source).replace("seg", "SEG"), sgm(reference, "ref").replace('docid="faz"', "docid='faz'")
    files = write_sgm(tmp_path, source, reference)
    corpus = read_corpus(files, languages=LANGUAGES, streaming=streaming)
    pairs = [tuple(row["translation"][language] for language in LANGUAGES) for row in corpus]
    assert pairs == [("A & B <c> – &quot; AT&T", "Ä"), ("", "leer"), ("one two", "<hl>eins</hl>")]
    for file in files:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert list(read_corpus([f"{file}.gz" for file in files], languages=LANGUAGES)) == list(corpus)


SGM = {"a": {1: "A house.", 2: "Yes."}, "b": {1: "No."}}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        (
            {"a": {1: "x", 2: "x"}},
            "has 3 segments and .* has 2, .* number 3 is segment 1 of document b in one and none in",
        ),
        (
            {"a": {1: "x", 2: "x"}, "c": {1: "x"}},
            "3 .* 3, .* number 3 is segment 1 of document b .* 1 of document c in",
        ),
        (
            {"a": {1: "x", 3: "x"}, "b": {1: "x"}},
            "3 .* 3, .* number 2 is segment 2 of document a .* 3 of document a in",
        ),
        (
            {"b": {1: "x"}, "a": {1: "x", 2: "x"}},
            "3 .* 3, .* number 1 is segment 1 of document a .* 1 of document b in",
        ),
    ],
)
def test_sgm_files_of_other_segments_are_refused_with_both_counts(tmp_path, reference, found):
    files = write_sgm(tmp_path, sgm(SGM), sgm(reference, "ref"))
    with pytest.raises(CorpusError, match=found) as caught:
        read_corpus(files, languages=LANGUAGES)
    assert all(str(file) in str(caught.value) for file in files)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cut", "rest", "message"),
    [
        ("</seg>", "", r"ref\.de\.sgm is damaged or truncated: it opens 1 <refset> but closes 0"),
        ("</doc>", "</refset>", r"ref\.de\.sgm is damaged or truncated: it opens 2 <doc> but closes 1"),
        ("</seg>", "</doc></refset>", r"ref\.de\.sgm is damaged or truncated: it opens 3 <seg> but closes 2"),
        ("<refset", "<refset></refset>", r"ref\.de\.sgm has no segment"),
        ("<refset", "", r"ref\.de\.sgm has no segment"),
    ],
)
def test_damaged_sgm_files(tmp_path, cut, rest, message):
    files = write_sgm(tmp_path, sgm(SGM), sgm(SGM, "ref").rpartition(cut)[0] + rest)
    with pytest.raises(CorpusError, match=message) as caught:
        read_corpus(files, languages=LANGUAGES)
    assert "\n" not in str(caught.value)


def test_an_sgm_file_does_not_go_alone_or_with_plain_text(tmp_path):
    files = write_sgm(tmp_path, sgm(SGM), sgm(SGM, "ref"))
    (tmp_path / "plain.de").write_text("x\n" * 3)
    with pytest.raises(CorpusError, match="both be SGM or both plain"):
        read_corpus([files[0], tmp_path / "plain.de"], languages=LANGUAGES)
    with pytest.raises(CorpusError, match="SGM come as two files, source first"):
        read_corpus(files[0], languages=LANGUAGES)
    names = [str(file) for file in files]
    assert parse_corpora(names, languages=LANGUAGES) == [(LANGUAGES, tuple(names))]
    assert parse_corpora(["no.en.sgm", "no.de.sgm.gz"], languages=LANGUAGES) == [
        (LANGUAGES, ("no.en.sgm", "no.de.sgm.gz"))
    ]


def test_a_corpus_with_regions_reads_a_translation_memory_with_hyphens(tmp_path):
    unit = '<tu><tuv xml:lang="en-US"><seg>color</seg></tuv><tuv xml:lang="de-AT"><seg>Farbe</seg></tuv></tu>'
    (tmp_path / "c.tmx").write_text(f'<tmx version="1.4"><body>{unit}</body></tmx>')
    [(languages, name)] = parse_corpora([f"en_US-de_AT={tmp_path / 'c.tmx'}"], languages=LANGUAGES)
    assert languages == ("en_US", "de_AT")
    assert pairs_of(read_corpus(name, languages=languages), languages) == [("color", "Farbe")]


def test_several_corpora_are_told_from_the_two_files_of_one(tmp_path):
    plain = [str(tmp_path / f"c.{language}") for language in LANGUAGES]
    assert parse_corpora(plain, languages=LANGUAGES) == [(LANGUAGES, tuple(plain))]
    (tmp_path / "source.txt").touch()
    mixed = [str(tmp_path / "source.txt"), plain[1]]
    assert parse_corpora(mixed, languages=LANGUAGES) == [(LANGUAGES, tuple(mixed))]
    names = ["europarl-v7.de-en", "news.tsv", "en-pt_BR=c.tsv", "fr-de=user/name"]
    pairs = [LANGUAGES, LANGUAGES, ("en", "pt_BR"), ("fr", "de")]
    assert parse_corpora(names, languages=LANGUAGES) == list(zip(pairs, [*names[:2], "c.tsv", "user/name"]))
    assert len(parse_corpora(["a.tsv", "b.tsv"], languages=LANGUAGES)) == 2
    with pytest.raises(CorpusError, match=r"en-US-de=c.tmx names .* en_US-de_DE=FILE"):
        parse_corpora(["en-US-de=c.tmx"], languages=LANGUAGES)
    with pytest.raises(CorpusError, match="'de', 'de'"):
        parse_corpora(["de-de=c.tsv"], languages=LANGUAGES)


@pytest.mark.parametrize(
    ("names", "wrong", "language"),
    [
        (["p.de", "p.en"], "p.de", "en"),
        (["p.en", "q.en"], "q.en", "de"),
        (["p.de.gz", "q.txt"], "p.de.gz", "en"),
        (["q.txt", "p.en"], "p.en", "de"),
        (["p.de.sgm", "p.en.sgm.gz"], "p.de.sgm", "en"),
    ],
)
def test_files_with_the_ending_of_the_other_language_are_refused(tmp_path, monkeypatch, names, wrong, language):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.txt").touch()
    with pytest.raises(
        CorpusError, match=f"{wrong} stands where the file in {language} belongs: name the one in en first"
    ):
        parse_corpora(names, languages=LANGUAGES)


@pytest.mark.parametrize("languages", [("en", "en"), ("en", ""), ("en", "de", "fr")])
def test_languages_must_be_two(languages):
    with pytest.raises(CorpusError, match="languages"):
        read_corpus(BUNDLED, languages=languages)


def test_the_bundled_split_has_its_sizes_and_never_changes(splits):
    assert {name: len(part) for name, part in splits.items()} == {"train": 40_548, "validation": 500, "test": 1_000}
    for name, digest in DIGESTS.items():
        text = "\n".join("\t".join(pair) for pair in pairs_of(splits[name]))
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_no_held_out_source_has_a_near_twin(splits):
    """By the words of the issue, not by the product's own key: lower case, no digits, no punctuation."""
    plain = {
        name: [re.sub(r"[\W\d_]", "", source.lower()) for source, _ in pairs_of(part)] for name, part in splits.items()
    }
    train, validation, test = (plain[name] for name in ("train", "validation", "test"))
    assert all(test)
    assert all(validation)
    assert not set(train) & (set(test) | set(validation))
    assert not set(validation) & set(test)
    assert len(set(test)) == len(test)
    assert len(set(validation)) == len(validation)


def test_held_out_pairs_are_blocks_of_neighbours(splits):
    rows = {pair: row for row, pair in enumerate(pairs_of(read_corpus(BUNDLED, languages=LANGUAGES)))}
    places = [rows[pair] for pair in pairs_of(splits["test"])]
    assert places == sorted(places)
    for block in range(10):
        inside = places[100 * block : 100 * (block + 1)]
        assert inside[-1] - inside[0] < 150
    assert not set(pairs_of(splits["train"])) & set(pairs_of(splits["test"]))


def synthetic(sources):
    features = datasets.Features({"translation": datasets.Translation(languages=list(LANGUAGES))})
    rows = [
        {"translation": {"en": source, "de": f"t {source}" if source != "no target" else " "}} for source in sources
    ]
    return datasets.Dataset.from_list(rows, features=features)


def word(number):
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_twins_empties_and_repeats_are_dropped_from_the_blocks():
    sources = [f"word {word(row)}" for row in range(1000)]
    sources[0] = sources[999].upper() + " 12!"  # a near-twin of train
    sources[1] = "12 - 34"
    sources[3] = sources[2]
    sources[4] = "no target"
    sources[15] = sources[2] + "."  # a near-twin of test, where validation is taken from
    split = hold_out(synthetic(sources), validation=10, test=20, sections=2)
    rows = {name: [source for source, _ in pairs_of(part)] for name, part in split.items()}
    assert rows["test"] == [sources[row] for row in (2, *range(5, 14), *range(500, 510))]
    assert rows["validation"] == [sources[row] for row in (*range(16, 21), *range(515, 520))]
    assert rows["train"] == sources[22:500] + sources[522:]


def test_too_small_or_too_repetitive_corpora_are_refused():
    with pytest.raises(CorpusError, match="too small"):
        hold_out(synthetic([word(row) for row in range(20)]), validation=10, test=10, sections=10)
    with pytest.raises(CorpusError, match="near-twins"):
        hold_out(synthetic(["same"] * 1000), validation=10, test=10, sections=10)
    with pytest.raises(CorpusError, match="multiple"):
        hold_out(synthetic(["same"] * 1000), validation=7, test=10, sections=10)


def test_twin_key():
    assert twin_key("Choose Insert - Row 1.") == twin_key("choose insert – row 22 !") == "chooseinsertrow"
    assert twin_key("12 + 3") == ""
    assert twin_key("Öl") != twin_key("Ol")
