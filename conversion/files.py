"""Reading small files, and writing whole ones or none, with errors of one sentence."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ConversionError(ValueError):
    """A model that cannot be converted; the message is one sentence for the user."""


def read_text(path: Path, kind: str) -> str:
    """Read a file of UTF-8.

    Args:
        path: The file.
        kind: What the file is, for the message.

    Raises:
        ConversionError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConversionError(f"The {kind} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConversionError(f"The {kind} {path} is not UTF-8 ({error.reason}).") from error


def read_lines(path: Path, kind: str) -> list[str]:
    """The lines of a file as toolkits write them: only a line feed, or one after a carriage return, ends a line.

    Raises:
        ConversionError: The file cannot be read, or is not UTF-8.
    """
    return [line.removesuffix("\r") for line in read_text(path, kind).removesuffix("\n").split("\n")]


def read_json(path: Path, kind: str) -> Any:
    """The value of a JSON file.

    Raises:
        ConversionError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path, kind))
    except json.JSONDecodeError as error:
        raise ConversionError(f"The {kind} {path} is not JSON, or it is cut off: {error}.") from error


@contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary folder near `out` that becomes `out` where the block ends well, and vanishes where it does not.

    Raises:
        ConversionError: `out` is there already and `force` is not given, or is no saved model.
    """
    out = out.resolve()  # a link to a folder stays one
    check_target(out, force=force)
    # an empty folder may be a mount point or the current one, so it stays as it is and is filled
    fill = out.is_dir() and not any(out.iterdir())
    place = _nearest_folder(out / "model" if fill else out)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=place))
    try:
        folder.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        yield folder
        (_fill if fill else _replace)(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_file(out: Path, *, force: bool = False) -> Iterator[Path]:
    """The same for a single file; raises ConversionError where `out` is there and `force` is not given, or is a folder."""
    if out.is_dir() or (out.exists() and not force):
        hint = "is a folder; name a file" if out.is_dir() else "exists; pass --force to replace it"
        raise ConversionError(f"The output {out} {hint}.")
    partial = _nearest_folder(out) / f".{out.name}.{os.getpid()}.partial"
    try:
        yield partial
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def check_target(out: Path, *, force: bool) -> None:
    """Raise ConversionError where `out` is taken: a file, a folder without `force`, or one that is no saved model."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise ConversionError(f"The output {out} is a file; name a folder.")
    if not force:
        raise ConversionError(f"The output {out} exists; pass --force to replace it.")
    if not (out / "config.json").is_file():
        raise ConversionError(f"The output {out} is not a saved model, so --force does not replace it.")
    if os.path.ismount(out) or Path.cwd().is_relative_to(out.resolve()):
        raise ConversionError(
            f"The output {out} is a mount point or holds the current folder, so --force does not replace it; name a "
            "folder in it."
        )


def check_apart(source: Path, out: Path) -> None:
    """Raise ConversionError where replacing `out` would take the source with it, or a part of the source."""
    taken = out.is_file() or (out.is_dir() and any(out.iterdir()))
    ours, theirs = out.resolve(), source.resolve()
    if taken and (theirs.is_relative_to(ours) or ours.is_relative_to(theirs)):
        raise ConversionError(f"The output {out} would replace {source} or a part of it; name another output.")


def _nearest_folder(out: Path) -> Path:
    """The folder that `out` comes into, or the nearest one above it that is there already.

    Raises:
        ConversionError: Nothing can be written there.
    """
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConversionError(f"The output {out} cannot be written: {folder} is read-only, or it is no folder.")
    return folder


def _fill(folder: Path, out: Path) -> None:
    """Move what `folder` holds into `out`; the configuration comes last, without which a folder is no model."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(out / path.name)


def _replace(folder: Path, out: Path) -> None:
    """Move `folder` to `out`; what was there is removed once the new one stands."""
    old = folder.with_suffix(".old")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rename(old)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
