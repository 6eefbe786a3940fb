"""Reads TMX, the XML format in which translation memories are exchanged, as a stream."""

import gzip
import re
import zlib
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat

# Elements within a segment whose text is code of the format that the segment was taken from, not language.
_CODE = {"bpt", "ept", "it", "ph", "ut"}
_LANGUAGE = ("http://www.w3.org/XML/1998/namespace lang", "lang")  # the attribute of TMX 1.4, and of older files
_CHUNK = 1 << 16
_SPACE = re.compile(r"\s+")


class TMXError(ValueError):
    """What is wrong with a file, and in which line where that is known."""


def read_tmx(path: str, languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """The pairs of a TMX file, gzipped or not, in its order; units without one of the languages are none of its pairs.

    Runs of white space become one space. Where a unit has no segment in `en`, one in `en-US` is taken. The elements may
    be in a namespace, whichever it is.

    Args:
        path: The file, in any encoding that XML allows. It is read in pieces, whatever its size.
        languages: Source and target language, in any case; `en_US` and `en-US` are the same.

    Raises:
        TMXError: The file is no well-formed XML, is cut off, declares entities (which TMX does not need, and which can
            make a small file expand without end), or has no unit in both languages.
        OSError: The file cannot be read.
    """
    units = _Units(languages)
    found = False
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                units.parser.Parse(chunk, False)
                found |= bool(units.pairs)
                yield from units.pairs
                units.pairs.clear()
            units.parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise TMXError(f"line {error.lineno}: not well-formed XML ({expat.ErrorString(error.code)}).") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TMXError(f"a damaged or truncated gzip file: {error}.") from None
    if not found:
        seen = ", ".join(sorted(units.seen)) or "none"
        raise TMXError(f"no unit in both {languages[0]} and {languages[1]}; its languages are {seen}.")


def _code(language: str) -> str:
    return language.lower().replace("_", "-")


def _without_namespace(name: str) -> str:
    return name.rpartition(" ")[2]


class _Units:
    """Collects the pairs of a document that `parser` is fed."""

    def __init__(self, languages: tuple[str, str]) -> None:
        self.pairs: list[tuple[str, str]] = []
        self.seen: set[str] = set()
        self._languages = [_code(language) for language in languages]
        self._unit: dict[str, str] = {}
        self._language = ""
        self._text: list[str] | None = None  # of the segment that is being read
        self._depth_of_code = 0
        self.parser = expat.ParserCreate(namespace_separator=" ")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.EntityDeclHandler = self._refuse_declaration
        self.parser.SkippedEntityHandler = self._refuse_entity

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        name = _without_namespace(name)
        if name == "tu":
            self._unit = {}
        elif name == "tuv":
            self._language = _code(next((attributes[key] for key in _LANGUAGE if key in attributes), ""))
            self.seen.add(self._language)
        elif name == "seg":
            self._text = []
        elif name in _CODE:
            self._depth_of_code += 1

    def _characters(self, text: str) -> None:
        if self._text is not None and not self._depth_of_code:
            self._text.append(text)

    def _end(self, name: str) -> None:
        name = _without_namespace(name)
        if name == "seg" and self._text is not None:
            self._unit.setdefault(self._language, _SPACE.sub(" ", "".join(self._text)).strip())
            self._text = None
        elif name == "tu":
            pair = [self._segment(language) for language in self._languages]
            if None not in pair:
                self.pairs.append(tuple(pair))
        elif name in _CODE:
            self._depth_of_code -= 1

    def _segment(self, language: str) -> str | None:
        regional = (text for code, text in self._unit.items() if code.split("-")[0] == language)
        return self._unit.get(language, next(regional, None))

    def _refuse_declaration(self, name: str, *_: Any) -> None:
        raise TMXError(f"line {self.parser.CurrentLineNumber}: declares the entity {name}, which a TMX file must not.")

    def _refuse_entity(self, name: str, *_: Any) -> None:
        raise TMXError(f"line {self.parser.CurrentLineNumber}: uses the entity {name}, which XML does not know.")
