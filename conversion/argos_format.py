"""Packages of Argos Translate and LibreTranslate, in and out.

A package is a zip of one folder: a CTranslate2 model, the SentencePiece model of both its sides, and metadata.json.
"""

import json
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from relpos import RelPosTokenizer

from .converter import Decoding
from .ctranslate2_format import CTranslate2Converter, load_relpos, write_ctranslate2
from .files import ConversionError, new_file, read_json
from .segmenters import segmenter_of
from .sentencepiece_writer import write_sentencepiece

_ARGOS_VERSION = "1.9"
"""The release of Argos Translate whose layout this is."""
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([_-][A-Za-z0-9]{2,8})*")


class ArgosConverter(CTranslate2Converter):
    """An Argos package, the `.argosmodel` file.

    Args:
        source: The package.
    """

    toolkit: ClassVar[str] = "Argos Translate"

    def __init__(self, source: Path):
        self._unpacked = tempfile.TemporaryDirectory(prefix="relpos-argos-")  # goes with this object
        folder = Path(self._unpacked.name)
        root = _unpack(source, folder)
        self._metadata = _read_metadata(root)
        super().__init__(root / "model", subwords=[root / "sentencepiece.model"])
        self.source = source

    def obstacles(self) -> list[str]:
        found = super().obstacles()
        if prefix := self._metadata.get("target_prefix"):
            found.append(f"target_prefix={prefix!r} (every translation would have to begin with it)")
        if (kind := self._metadata.get("type", "translate")) != "translate":
            found.append(f"type={kind!r} (the package does not translate)")
        return found

    def decoding(self) -> Decoding:
        return Decoding(
            {"num_beams": 4, "length_penalty": 0.2},
            (
                "Argos Translate decodes with 4 beams and CTranslate2's length penalty 0.2, which means the same here (a "
                "hypothesis's log-probability divided by its length to that power).",
                "Argos Translate cuts its input into sentences; this model expects sentences.",
            ),
        )

    def facts(self) -> dict[str, Any]:
        codes = {"source_language": self._metadata.get("from_code"), "target_language": self._metadata.get("to_code")}
        return {name: code for name, code in codes.items() if code}


def export_argos(
    model: Path,
    out: Path,
    *,
    languages: Sequence[str] = (),
    quantization: str = "int8",
    package_version: str = "1.0",
    force: bool = False,
) -> Path:
    """Write a RelPos model as a package for Argos Translate and LibreTranslate.

    Args:
        model: A saved RelPos folder with a Unigram vocabulary.
        out: The `.argosmodel` file to write, which appears whole or not at all.
        languages: ISO 639 codes of source and target; by default those that the model's configuration names.
        quantization: How CTranslate2 keeps the weights.
        package_version: The version of this package, by which Argos Translate tells newer ones.
        force: Replace `out`.

    Returns:
        `out`.

    Raises:
        ConversionError: A language is missing, source and target are cut by different subword models or none that can be
            written as a SentencePiece model, or whatever `export_ctranslate2` refuses.
    """
    with new_file(out, force=force) as partial, tempfile.TemporaryDirectory(prefix="relpos-argos-") as work:
        loaded, tokenizer = load_relpos(model)
        source, target = _languages(languages, loaded.config)
        name = f"translate-{source}_{target}-{package_version.replace('.', '_')}"
        folder = Path(work) / name
        folder.mkdir()
        write_sentencepiece(_shared_segmenter(tokenizer), folder / "sentencepiece.model")
        (folder / "model").mkdir()
        write_ctranslate2(loaded, tokenizer, folder / "model", quantization=quantization)
        metadata = {
            "package_version": package_version,
            "argos_version": _ARGOS_VERSION,
            "from_code": source,
            "from_name": source,
            "to_code": target,
            "to_name": target,
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        card = model / "README.md"
        if card.is_file():
            shutil.copy(card, folder / "README.md")
        _pack(folder, partial)
    return out


def _unpack(package: Path, folder: Path) -> Path:
    """Extract what is needed of a package into `folder`; returns the package's own folder in it.

    Raises:
        ConversionError: It is no zip, it is damaged, a member would land outside the folder, or something is missing.
    """
    if not package.is_file():
        raise ConversionError(f"There is no Argos package {package}.")
    try:
        with zipfile.ZipFile(package) as archive:
            for member in archive.infolist():
                _check_member(package, member)
            roots = {PurePosixPath(name).parts[0] for name in archive.namelist() if PurePosixPath(name).parts}
            root = next((name for name in sorted(roots) if f"{name}/metadata.json" in archive.namelist()), None)
            if root is None:
                raise ConversionError(f"The package {package} holds no folder with a metadata.json.")
            wanted = [f"{root}/metadata.json", f"{root}/sentencepiece.model"]
            if wanted[1] not in archive.namelist():
                raise ConversionError(f"The package {package} holds no sentencepiece.model; others are not read.")
            wanted += [name for name in archive.namelist() if name.startswith(f"{root}/model/")]
            archive.extractall(folder, wanted)
            return folder / root
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted
        raise ConversionError(f"The package {package} is not a zip file, or it is damaged: {error}.") from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise ConversionError(f"The package {package} is damaged: a file in it has the name of a folder.") from error


def _check_member(package: Path, member: zipfile.ZipInfo) -> None:
    """Refuse what would be written outside the folder or would be no plain file there."""
    name = member.filename.replace("\\", "/")
    path = PurePosixPath(name)
    is_link = stat.S_ISLNK(member.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or ":" in name or is_link:
        raise ConversionError(
            f"The package {package} is not safe to unpack: {member.filename!r} leads out of its folder."
        )


def _read_metadata(root: Path) -> dict[str, Any]:
    metadata = read_json(root / "metadata.json", "package description")
    if not isinstance(metadata, dict):
        raise ConversionError(f"The package description {root / 'metadata.json'} must hold an object.")
    return metadata


def _languages(given: Sequence[str], config: Any) -> tuple[str, str]:
    codes = list(given) or [getattr(config, f"{side}_language", None) for side in ("source", "target")]
    if len(codes) != 2 or not all(isinstance(code, str) and _LANGUAGE.fullmatch(code) for code in codes):
        named = ",".join(str(code) for code in codes if code) or "none"
        raise ConversionError(
            f"An Argos package needs the codes of two languages, as in --languages en,de, and the ones known are: {named}."
        )
    return codes[0], codes[1]


def _shared_segmenter(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The subword model of source and target; raises ConversionError where they have two."""
    if not isinstance(tokenizer, RelPosTokenizer):
        return segmenter_of(tokenizer)
    source, target = tokenizer.get_segmenter("source"), tokenizer.get_segmenter("target")
    if source is None or target is None:
        raise ConversionError(
            "An Argos package needs a SentencePiece model, and the subwords of this tokenizer are none."
        )
    if source.to_str() != target.to_str():
        raise ConversionError("An Argos package has one subword model, and this model has one for each side.")
    return source


def _pack(folder: Path, archive_path: Path) -> None:
    """Zip a folder under its own name, with the same bytes for the same content."""
    with zipfile.ZipFile(archive_path, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                member = zipfile.ZipInfo(
                    path.relative_to(folder.parent).as_posix(), datetime(2000, 1, 1).timetuple()[:6]
                )
                member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(member, path.read_bytes())
