"""Files and streams of one sentence per line: read in windows, checked before the work, written whole."""

import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import BinaryIO

# A pipe whose next line is this late is answered: a program on its other end may be waiting for that.
PIPE_PAUSE_SECONDS = 0.05

_PAUSE = object()


class LineFileError(ValueError):
    """A file that cannot be read or written line by line; the message is one sentence for the user."""


@dataclass(frozen=True)
class LineSource:
    """Lines to read.

    Attributes:
        stream: bytes of UTF-8; lines end in LF or CRLF, the last one with or without.
        name: what to call the source in an error.
        count: number of lines of a file, every one of which was found to be UTF-8; None for a pipe or a terminal.
    """

    stream: BinaryIO
    name: str
    count: int | None

    def windows(self, size: int) -> Iterator[list[str]]:
        """Yield the lines in lists of at most `size`, so that a source of any length needs little memory.

        A file fills every list. A pipe is read by what it has: a list ends where the next line is late.

        Raises:
            LineFileError: a line is not UTF-8; every line before it has been yielded by then.
        """
        window: list[str] = []
        numbered = enumerate(self.stream, start=1)
        try:
            for item in numbered if self.count is not None else _read_ahead(numbered, size):
                if item is not _PAUSE:
                    window.append(decode_line(*item, name=self.name))
                if window and (item is _PAUSE or len(window) == size):
                    yield window
                    window = []
        except LineFileError:
            if window:
                yield window
            raise
        if window:
            yield window


@contextmanager
def open_input(path: Path | None) -> Iterator[LineSource]:
    """Open a file, or standard input for None. A file is read through once, so that a bad line costs no work.

    Raises:
        LineFileError: the file cannot be read, or a line of it is not UTF-8.
    """
    name = "standard input" if path is None else str(path)
    try:
        # Not sys.stdin: the interpreter locks that at exit, where the thread that reads ahead may still hold it.
        stream = open(0, "rb", closefd=False) if path is None else path.open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise LineFileError(f"The input {name} cannot be read: {error.strerror}.") from error
    is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    try:
        yield LineSource(stream=stream, name=name, count=_check_lines(stream, name) if is_file else None)
    finally:
        if is_file:  # a thread may be waiting in a pipe, and closing would wait for it
            stream.close()


@contextmanager
def open_output(path: Path | None, *, warn: Callable[[str], None], source: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file under a temporary name that becomes `path` at the end, or standard output for None.

    Where the work ends early, the lines that are done stay under the temporary name, and `warn` is told so.

    Args:
        source: the file that is read, which must be another one.

    Raises:
        LineFileError: the file cannot be written.
    """
    if path is None:
        yield sys.stdout.buffer
        return
    if path.is_dir():
        raise LineFileError(f"The output {path} is a folder; it must be a file.")
    if source is not None and path.exists() and path.samefile(source):
        raise LineFileError(f"The output {path} is the input; it must be another file.")
    partial = path.with_name(path.name + ".partial")
    try:
        stream = partial.open("wb")
    except OSError as error:
        raise LineFileError(f"The output {path} cannot be written: {error.strerror}.") from error
    try:
        with stream:
            yield stream
    except BaseException:
        if partial.stat().st_size:
            warn(f"the lines that were finished are in {partial}")
        else:
            partial.unlink()
        raise
    os.replace(partial, path)


def decode_line(number: int, line: bytes, *, name: str) -> str:
    """Text of a line without its ending; raises LineFileError with the line's number where it is not UTF-8."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise LineFileError(
            f"Line {number} of {name} is not UTF-8 ({error.reason}); convert the input to UTF-8 first."
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _check_lines(stream: BinaryIO, name: str) -> int:
    """Number of lines from here to the end, each decoded once; the stream is put back where it was."""
    start = stream.tell()
    count = 0
    for count, line in enumerate(stream, start=1):
        decode_line(count, line, name=name)
    stream.seek(start)
    return count


def _read_ahead(numbered: Iterator[tuple[int, bytes]], size: int) -> Iterator[tuple[int, bytes] | object]:
    """The lines of a pipe, and _PAUSE whenever the next one is late; a thread of its own waits for them."""
    end = object()
    queue: Queue[tuple[int, bytes] | object] = Queue(maxsize=size)

    def read() -> None:
        try:
            for item in numbered:
                queue.put(item)
            queue.put(end)
        except OSError as error:  # raised again where the lines are used
            queue.put(error)

    threading.Thread(target=read, daemon=True, name="read-ahead").start()
    while True:
        try:
            item = queue.get(timeout=PIPE_PAUSE_SECONDS)
        except Empty:
            yield _PAUSE
            item = queue.get()
        if item is end:
            return
        if isinstance(item, OSError):
            raise item
        yield item
