"""Parallel corpora as `datasets`: reading them, and the split of the bundled one.

Every reader returns rows of the shape that Transformers' own translation script uses,
`{"translation": {"en": ..., "de": ...}}`, and keeps every pair, empty ones too, so that line n of a file is row n - 1.
Lines end at a line feed and nowhere else: Unicode's other line separators are text. Damaged input is refused with the
file and the line, never skipped.
"""

import gzip
import html
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from itertools import zip_longest
from pathlib import Path

import datasets
from datasets import Dataset, DatasetDict, Features, IterableDataset, Translation

from .tmx import TMXError, read_tmx

BUNDLED = "libreoffice-help"
"""Name under which the bundled English-German corpus is read instead of a file."""
BUNDLED_LANGUAGES = ("en", "de")
BUNDLED_SOURCE = "LibreOffice help, English and German (https://www.libreoffice.org)"
BUNDLED_LICENSE = "MPL-2.0"

# The bundled corpus keeps the order of the documents, so sentences that stand together come from the same page. The
# held-out pairs are whole runs of neighbours, taken from this many places so that they cover the corpus.
_SECTIONS = 10
_TEST_SIZE = 1000
_VALIDATION_SIZE = 500
# A block is this much larger than what is wanted from it, to leave enough pairs once the near-twins are dropped.
_SPARE = 1.5


_ONE_FILE = (".tsv", ".json", ".jsonl", ".tmx")
_SGM = ".sgm"
# SGM is SGML, of which WMT's files use these elements, and more around the segments, with attributes in any order.
_SGM_ELEMENTS = ("srcset", "refset", "doc", "seg")
_SGM_SEGMENT = re.compile(r"<doc\b(?P<doc>[^>]*)>|<seg\b(?P<seg>[^>]*)>(?P<text>.*?)</seg\b", re.IGNORECASE | re.DOTALL)
_SGM_ID = re.compile(r"""\b(?:doc)?id\s*=\s*["']([^"']*)""", re.IGNORECASE)
# With its semicolon: a bare & is an ampersand, as in AT&T.
_SGM_ENTITY = re.compile(r"&#?\w+;")
_WITH_LANGUAGES = re.compile(r"([A-Za-z]\w*)-([A-Za-z]\w*)=(.+)")
_WITH_HYPHENS = re.compile(r"[A-Za-z]\w*(-\w+){2,}=.+")


class CorpusError(ValueError):
    """A corpus that cannot be read as it stands; the message is one sentence that names the file and the line."""


def parse_corpora(
    names: Sequence[str], *, languages: tuple[str, str]
) -> list[tuple[tuple[str, str], str | tuple[str, str]]]:
    """Corpora as a recipe names them, each with its languages and what `read_corpus` takes.

    Args:
        names: A corpus each; before its name it can have its own pair of languages, as in `en-fr=corpus.tsv`, where a
            region follows an underscore, `en-pt_BR=corpus.tmx`. Or the two files of one corpus, plain text or SGM, source
            first.
        languages: Source and target language of those that do not say.

    Raises:
        CorpusError: The two languages of a corpus are the same, a hyphen leaves open where the second one starts, or of two
            files one has the ending of the other's language.
    """
    if len(names) == 2 and all(_is_one_side(name, languages) for name in names):
        _check_order(names, languages)
        return [(languages, tuple(names))]
    corpora = []
    for name in names:
        match = _WITH_LANGUAGES.fullmatch(name)
        if _WITH_HYPHENS.fullmatch(name) and not Path(name).exists():
            raise CorpusError(f"{name} names a region by a hyphen; use an underscore, as in en_US-de_DE=FILE.")
        corpora.append(((match[1], match[2]), match[3]) if match else (languages, name))
        _check_languages(corpora[-1][0])
    return corpora


def _is_one_side(name: str, languages: tuple[str, str]) -> bool:
    suffix = _suffix(Path(name))
    return suffix not in _ONE_FILE and (suffix == _SGM or suffix[1:] in languages or Path(name).is_file())


def _check_order(names: Sequence[str], languages: tuple[str, str]) -> None:
    """Refuse files that would be read as the other side, which nobody would notice but by the scores."""
    for name, language in zip(names, languages):
        path = Path(name.removesuffix(".gz").removesuffix(_SGM))
        if path.suffix[1:] in languages and path.suffix[1:] != language:
            source, target = languages
            raise CorpusError(
                f"{name} stands where the file in {language} belongs: name the one in {source} first, the one in {target} second."
            )


def read_corpus(
    source: str | Path | Sequence[str | Path],
    *,
    languages: tuple[str, str],
    split: str = "train",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Read a parallel corpus.

    Args:
        source: One of

            - a table, `.tsv` or `.tsv.gz`: source, tab, target; further columns are ignored;
            - JSON lines, `.json`, `.jsonl` or either with `.gz`: `{"translation": {"en": ..., "de": ...}}`;
            - a translation memory, `.tmx` or `.tmx.gz`;
            - two plain text files of equal line counts, source first, as a sequence of two paths, or one path
              without the languages where `path.en` and `path.de` exist (or both with `.gz`);
            - the source and the reference of a WMT test set, `.sgm` or `.sgm.gz`, as a sequence of two paths;
            - the name or folder of a dataset that `datasets.load_dataset` takes, with a column `translation` or one
              column per language;
            - `"libreoffice-help"`, the bundled corpus, whole and in its order.
        languages: Source and target language: keys of the rows, columns of JSON and datasets, endings of plain files.
        split: The split of a dataset that is loaded by name; files have only one.
        streaming: Read while iterating, and write nothing to disk; damage is then found when it is come to.

    Returns:
        Rows `{"translation": {source_language: str, target_language: str}}`, one per line, per unit of a translation
        memory that has both languages, or per segment of SGM, in the order of the file.

    Raises:
        CorpusError: Missing, empty, truncated or undecodable file, unequal line counts or other segments in the other
            file, or a malformed line.
    """
    _check_languages(languages)
    paths = [source] if isinstance(source, str | Path) else list(source)
    if len(paths) not in (1, 2):
        raise CorpusError(f"A corpus is one path or a pair of paths, source and target, not {len(paths)} of them.")
    if len(paths) == 2:
        return _from_lines(_pair_reader(paths), [_existing(path) for path in paths], languages, streaming)
    name = str(paths[0])
    if name == BUNDLED:
        if set(languages) != set(BUNDLED_LANGUAGES):
            raise CorpusError(f"The corpus {BUNDLED} has the languages {BUNDLED_LANGUAGES}, not {tuple(languages)}.")
        with resources.as_file(_bundled_file()) as path:
            return _from_lines(_table_lines, [path], BUNDLED_LANGUAGES, streaming)
    path = Path(name)
    if _suffix(path) == ".tsv":
        return _from_lines(_table_lines, [_existing(path)], languages, streaming)
    if _suffix(path) in (".json", ".jsonl"):
        return _from_lines(_json_lines, [_existing(path)], languages, streaming)
    if _suffix(path) == ".tmx":
        return _from_lines(_tmx_units, [_existing(path)], languages, streaming)
    for ending in ("", ".gz"):
        pair = [Path(f"{name}.{language}{ending}") for language in languages]
        if all(file.is_file() for file in pair):
            return _from_lines(_parallel_lines, pair, languages, streaming)
    if path.is_file():
        raise CorpusError(
            f"{path} is no kind of corpus that is known by its ending: .tsv, .json, .jsonl and .tmx (each also .gz) hold "
            "both languages, plain text and SGM come as two files, source first."
        )
    return _from_dataset(name, languages, split, streaming)


def bundled_splits() -> DatasetDict:
    """The bundled English-German corpus, divided once and for all into train, validation (500) and test (1,000 pairs).

    The split is fixed: it depends on nothing but the file. See `hold_out` for how it is made.
    """
    corpus = read_corpus(BUNDLED, languages=BUNDLED_LANGUAGES)
    return hold_out(corpus, validation=_VALIDATION_SIZE, test=_TEST_SIZE, sections=_SECTIONS)


def hold_out(corpus: Dataset, *, validation: int, test: int, sections: int = 10) -> DatasetDict:
    """Divide a corpus in document order into train, validation and test, without near-twins across them.

    Documentation repeats itself: "Choose Insert - Row 1." and "Choose Insert - Row 2." are two pairs, and a random
    split tests on what was trained. So

    - the corpus is cut into `sections` equal parts, and the first sentences of each part are a block of test
      candidates, the next a block of validation candidates; all other pairs are train;
    - a candidate is dropped if either side is empty, if its source holds no letter, or if its source is a near-twin
      (`twin_key`) of a source in train, of an earlier candidate of the same set, or, for validation, of one in test;
    - of each block the first pairs that remain are kept, up to its share. Candidates that are not kept are in no set.

    Args:
        corpus: Rows as `read_corpus` returns them.
        validation: Pairs in the validation set, a multiple of `sections`.
        test: Pairs in the test set, a multiple of `sections`.
        sections: Places of the corpus that the held-out pairs are taken from.

    Raises:
        CorpusError: The corpus is too small, or repeats itself too much, to give so many pairs.
    """
    sizes = {"test": test, "validation": validation}
    for name, size in sizes.items():
        if size <= 0 or size % sections:
            raise CorpusError(f"{name} must be a positive multiple of sections={sections}, not {size}.")
    blocks = _candidate_blocks(len(corpus), sizes, sections)
    source_language, target_language = corpus.features["translation"].languages
    pairs = corpus["translation"][:]
    keys = [twin_key(pair[source_language]) if pair[target_language].strip() else "" for pair in pairs]
    candidates = {row for ranges in blocks.values() for block in ranges for row in block}
    rows = {"train": [row for row in range(len(corpus)) if row not in candidates]}
    seen = {keys[row] for row in rows["train"]} | {""}
    for name, size in sizes.items():
        rows[name] = []
        for block in blocks[name]:
            rows[name] += _first_unseen(keys, block, size // sections, seen, name=name)
    return DatasetDict({name: corpus.select(rows[name]) for name in ("train", "validation", "test")})


def _candidate_blocks(length: int, sizes: dict[str, int], sections: int) -> dict[str, list[range]]:
    """For each set, one run of rows at the start of each section, larger by `_SPARE` than the pairs wanted of it."""
    blocks = {name: [] for name in sizes}
    for section in range(sections):
        start = length * section // sections
        for name, size in sizes.items():
            stop = start + int(_SPARE * size / sections)
            blocks[name].append(range(start, stop))
            start = stop
    taken = sum(len(block) for ranges in blocks.values() for block in ranges)
    if taken > length / 2:
        raise CorpusError(
            f"A corpus of {length} pairs is too small to hold out {' + '.join(map(str, sizes.values()))} pairs: the "
            f"blocks that they are chosen from take {taken}."
        )
    return blocks


def _first_unseen(keys: list[str], block: range, share: int, seen: set[str], *, name: str) -> list[int]:
    """The first `share` rows of a block whose key is new; adds their keys to `seen`."""
    chosen = []
    for row in block:
        if len(chosen) < share and keys[row] not in seen:
            chosen.append(row)
            seen.add(keys[row])
    if len(chosen) < share:
        raise CorpusError(
            f"Rows {block.start} to {block.stop - 1} of the corpus leave {share - len(chosen)} pairs too few for "
            f"{name} once near-twins are dropped; ask for fewer pairs or another number of sections."
        )
    return chosen


def twin_key(text: str) -> str:
    """What two near-twins have in common: the letters of the text in lower case, without digits, punctuation, spaces."""
    return "".join(filter(str.isalpha, text.lower()))


def _bundled_file():
    return resources.files("relpos.training") / "corpora" / "libreoffice-help.en-de.tsv.gz"


def _check_languages(languages: tuple[str, str]) -> None:
    if len(languages) != 2 or languages[0] == languages[1] or not all(languages):
        raise CorpusError(f"languages must be two different languages, such as ('en', 'de'), not {languages!r}.")


def _pair_reader(paths: Sequence[str | Path]) -> Callable[..., Iterator[dict]]:
    kinds = [_suffix(Path(path)) == _SGM for path in paths]
    if any(kinds) and not all(kinds):
        raise CorpusError(f"{paths[0]} and {paths[1]} must both be SGM or both plain text.")
    return _sgm_pairs if all(kinds) else _parallel_lines


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise CorpusError(f"There is no file {path}.")
    return path


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _from_lines(
    reader: Callable[..., Iterator[dict]], paths: list[Path], languages: tuple[str, str], streaming: bool
) -> Dataset | IterableDataset:
    """Run a reader of lines into an Arrow file on disk, so that a large corpus is never in memory as a whole.

    `datasets` reuses that file when it sees the same arguments again, so the arguments tell the state of the files.
    """
    # A tuple: `datasets` would take a list for shards, and give the reader one file at a time.
    files = tuple((str(path.resolve()), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths)
    features = Features({"translation": Translation(languages=list(languages))})
    arguments = {"features": features, "gen_kwargs": {"files": files, "languages": tuple(languages)}}
    if streaming:
        return IterableDataset.from_generator(reader, **arguments)
    progress_bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        corpus = Dataset.from_generator(reader, **arguments, split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, CorpusError | OSError):  # the latter of the disk that is written to
            raise cause from None
        raise
    finally:
        if not progress_bars:
            datasets.enable_progress_bars()
    return corpus


def _table_lines(files: tuple, languages: tuple[str, str]) -> Iterator[dict]:
    path = files[0][0]
    line = None
    for number, line in enumerate(_lines(path), 1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise CorpusError(f"{path}, line {number}: expected source and target with a tab between, found no tab.")
        yield {"translation": dict(zip(languages, columns[:2]))}
    _refuse_empty(path, line)


def _json_lines(files: tuple, languages: tuple[str, str]) -> Iterator[dict]:
    path = files[0][0]
    line = None
    for number, line in enumerate(_lines(path), 1):
        try:
            pair = json.loads(line)["translation"]
            texts = [pair[language] for language in languages]
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])
            raise CorpusError(f"{path}, line {number}: {half} is half of a surrogate pair, not a character.") from None
        except (ValueError, TypeError, LookupError, RecursionError):
            texts = None
        if texts is None or not all(isinstance(text, str) for text in texts):
            example = json.dumps({"translation": dict.fromkeys(languages, "...")})
            raise CorpusError(f"{path}, line {number}: expected {example}.")
        yield {"translation": dict(zip(languages, texts))}
    _refuse_empty(path, line)


def _parallel_lines(files: tuple, languages: tuple[str, str]) -> Iterator[dict]:
    paths = [path for path, *_ in files]
    readers = [_lines(path) for path in paths]
    line = None
    for line in zip(*readers):
        yield {"translation": dict(zip(languages, line))}
    _refuse_empty(" and ".join(paths), line)
    counts = [sum(1 for _ in _lines(path)) for path in paths]
    if counts[0] != counts[1]:
        raise CorpusError(
            f"{paths[0]} has {counts[0]:,} lines but {paths[1]} has {counts[1]:,}; they must be equal in number."
        )


def _sgm_pairs(files: tuple, languages: tuple[str, str]) -> Iterator[dict]:
    paths = [path for path, *_ in files]
    sides = [_sgm_segments(path) for path in paths]
    for number, ((first, _), (second, _)) in enumerate(zip_longest(*sides, fillvalue=("none", "")), 1):
        if first != second:
            raise CorpusError(
                f"{paths[0]} has {len(sides[0]):,} segments and {paths[1]} has {len(sides[1]):,}, which must be the same ones, "
                f"but number {number:,} is {first} in one and {second} in the other."
            )
    for (_, source), (_, target) in zip(*sides):
        yield {"translation": dict(zip(languages, (source, target)))}


def _sgm_segments(path: str) -> list[tuple[str, str]]:
    """Of each segment of a file, which one of which document it is, and its text with single spaces."""
    content = "\n".join(_lines(path))
    for name in _SGM_ELEMENTS:
        opened, closed = (len(re.findall(rf"<{slash}{name}\b", content, re.IGNORECASE)) for slash in ("", "/"))
        if opened != closed:
            raise CorpusError(f"{path} is damaged or truncated: it opens {opened:,} <{name}> but closes {closed:,}.")
    segments, document = [], ""
    for found in _SGM_SEGMENT.finditer(content):
        if found["doc"] is not None:
            document = _sgm_id(found["doc"])
            continue
        text = _SGM_ENTITY.sub(lambda entity: html.unescape(entity[0]), found["text"])
        segments.append((f"segment {_sgm_id(found['seg'])} of document {document}", " ".join(text.split())))
    if not segments:
        raise CorpusError(f'{path} has no segment, such as <seg id="1">text</seg>.')
    return segments


def _sgm_id(attributes: str) -> str:
    found = _SGM_ID.search(attributes)
    return found[1] if found else "without id"


def _tmx_units(files: tuple, languages: tuple[str, str]) -> Iterator[dict]:
    path = files[0][0]
    try:
        for pair in read_tmx(path, languages):
            yield {"translation": dict(zip(languages, pair))}
    except TMXError as error:
        raise CorpusError(f"{path}, {error}") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}.") from None


def _refuse_empty(path: str, last_line) -> None:
    if last_line is None:
        raise CorpusError(f"{path} is empty.")


def _lines(path: str) -> Iterator[str]:
    """The lines of a text file in UTF-8, gzipped or not, without their line ends and without a byte order mark."""
    number = 0
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                yield text.removeprefix("\ufeff") if number == 1 else text
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}).") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path} is a damaged or truncated gzip file after line {number}: {error}.") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}.") from None


def _from_dataset(name: str, languages: tuple[str, str], split: str, streaming: bool) -> Dataset | IterableDataset:
    try:
        corpus = datasets.load_dataset(name, split=split, streaming=streaming)
        first = next(iter(corpus), None)
    # The loader of a dataset can fail in as many ways as there are loaders; each is a corpus that cannot be read.
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        files = " and ".join(f"{name}.{language}" for language in languages)
        raise CorpusError(
            f"{name} is neither a corpus file, nor a pair of files ({files}), nor a dataset that can be loaded: {reason}."
        ) from error
    if first is None:
        raise CorpusError(f"The split {split!r} of {name} is empty.")
    pair = first.get("translation", first)
    if not isinstance(pair, dict) or not all(isinstance(pair.get(language), str) for language in languages):
        raise CorpusError(
            f"The dataset {name} has columns {', '.join(first)}; expected a column 'translation' with the "
            f"languages {languages[0]!r} and {languages[1]!r}, or a column for each."
        )

    def as_pair(row: dict) -> dict:
        texts = row.get("translation", row)
        return {"translation": {language: texts[language] for language in languages}}

    features = Features({"translation": Translation(languages=list(languages))})
    return corpus.map(as_pair, remove_columns=list(first), features=features)
