"""line_files.py: windows of lines from files and pipes, bad bytes, and outputs that are whole or absent."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos.training.line_files import LineFileError, LineSource, open_input, open_output


@settings(max_examples=50)
@given(
    lines=st.lists(st.text().filter(lambda text: not {"\n", "\r"} & set(text)), max_size=10),
    size=st.integers(1, 4),
    ending=st.sampled_from(["\n", "\r\n"]),
    last_ends=st.booleans(),
)
def test_file_comes_back_line_by_line(tmp_path_factory, lines, size, ending, last_ends):
    lines = [line.removeprefix("\ufeff") if number == 0 else line for number, line in enumerate(lines)]
    if lines and not lines[-1]:
        last_ends = True  # an empty last line is there only by its ending
    path = tmp_path_factory.mktemp("lines") / "in.txt"
    path.write_bytes((ending.join(lines) + ending * (last_ends and bool(lines))).encode())
    with open_input(path) as source:
        windows = list(source.windows(size))
        assert source.count == len(lines)
    assert [line for window in windows for line in window] == lines
    assert all(len(window) == size for window in windows[:-1])


def test_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    with open_input(path) as source:
        assert list(source.windows(5)) == [["one", "two"]]


def test_bad_line_of_a_file_is_found_before_any_is_handed_out(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\n\xff\n")
    with pytest.raises(LineFileError, match=r"Line 2 of .*in\.txt is not UTF-8"), open_input(path):
        pytest.fail("the file was opened")


def _take(windows, count):
    """The next lines, however a slow machine cuts them into windows."""
    lines = []
    while len(lines) < count:
        lines += next(windows)
    return lines


def test_pipe_hands_out_what_is_there_and_stops_at_a_bad_line():
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as pipe:
        windows = LineSource(stream=stream, name="a pipe", count=None).windows(100)
        pipe.write(b"one\ntwo\n")
        assert _take(windows, 2) == ["one", "two"]  # the writer has not closed: an answer comes all the same
        pipe.write(b"three\n\xff\nfive\n")
        pipe.close()
        assert _take(windows, 1) == ["three"]
        with pytest.raises(LineFileError, match="Line 4 of a pipe is not UTF-8"):
            next(windows)


def test_pipe_is_not_read_far_ahead_of_the_work():
    reading, writing = os.pipe()
    lines, written = 3000, []

    def write():
        with open(writing, "wb", buffering=0) as pipe:
            for _ in range(lines):
                written.append(pipe.write(b"x" * 999 + b"\n"))

    with open(reading, "rb") as stream:
        windows = LineSource(stream=stream, name="a pipe", count=None).windows(3)
        writer = threading.Thread(target=write)
        writer.start()
        taken = len(_take(windows, 100))
        assert len(written) < 1000
        assert taken + sum(map(len, windows)) == lines
        writer.join()


def test_output_is_whole_or_absent(tmp_path):
    path, warnings = tmp_path / "out.txt", []
    with open_output(path, warn=warnings.append) as target:
        target.write(b"one\n")
        assert not path.exists()
    assert path.read_bytes() == b"one\n"
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]
    assert not warnings


def test_interrupted_output_keeps_its_lines_under_the_temporary_name(tmp_path):
    path, warnings = tmp_path / "out.txt", []

    def write_and_stop():
        with open_output(path, warn=warnings.append) as target:
            target.write(b"one\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert not path.exists()
    assert (tmp_path / "out.txt.partial").read_bytes() == b"one\n"
    assert warnings == [f"the lines that were finished are in {tmp_path / 'out.txt.partial'}"]


def test_interrupted_output_without_lines_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_output(tmp_path / "out.txt", warn=pytest.fail):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_be_used(tmp_path):
    with pytest.raises(LineFileError, match="cannot be read: No such file"), open_input(tmp_path / "none"):
        pytest.fail("opened")
    with pytest.raises(LineFileError, match="cannot be read: Is a directory"), open_input(tmp_path):
        pytest.fail("opened")
    with pytest.raises(LineFileError, match="is a folder"), open_output(tmp_path, warn=pytest.fail):
        pytest.fail("opened")
    with pytest.raises(LineFileError, match="cannot be written"), open_output(tmp_path / "no/out", warn=pytest.fail):
        pytest.fail("opened")


def test_the_output_is_not_the_input(tmp_path):
    text, link = tmp_path / "text", tmp_path / "link"
    text.write_text("a\n")
    link.symlink_to(text)
    for name in (text, link):
        with pytest.raises(LineFileError, match="is the input"), open_output(name, warn=pytest.fail, source=text):
            pytest.fail("opened")
    with open_output(tmp_path / "other", warn=pytest.fail, source=text) as stream:
        stream.write(b"b\n")
    assert text.read_text() == "a\n"
