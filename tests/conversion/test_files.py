import os
from pathlib import Path

import pytest

from relpos.conversion.files import ConversionError, check_apart, new_file, new_folder, read_json, read_lines, read_text


class TestReading:
    def test_only_line_feeds_end_a_line(self, tmp_path):
        (tmp_path / "lines").write_bytes("a\u2028b\r\n\x0bc\n\nd".encode())
        assert read_lines(tmp_path / "lines", "vocabulary") == ["a\u2028b", "\x0bc", "", "d"]

    def test_what_cannot_be_read_is_one_sentence(self, tmp_path):
        (tmp_path / "file").write_bytes(b"\xff")
        for path, message in (
            ("file", "is not UTF-8"),
            ("none", "cannot be read: No such file"),
            ("", "Is a directory"),
        ):
            with pytest.raises(ConversionError, match=rf"^The vocabulary .*{path} .*{message}.*\.$"):
                read_text(tmp_path / path, "vocabulary")
        (tmp_path / "file").write_bytes(b'{"a": ')
        with pytest.raises(ConversionError, match=r"The options .*file is not JSON, or it is cut off"):
            read_json(tmp_path / "file", "options")


class TestWholeOrAbsent:
    def test_a_folder_appears_at_the_end(self, tmp_path):
        out = tmp_path / "deep" / "out"
        with new_folder(out) as folder:
            (folder / "config.json").write_text("{}")
            assert not out.exists()
        assert [path.name for path in out.iterdir()] == ["config.json"]
        assert [path.name for path in out.parent.iterdir()] == ["out"]

    def test_a_failure_leaves_nothing(self, tmp_path):
        with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "deep" / "out") as folder:
            (folder / str(1 / 0)).touch()
        assert list(tmp_path.iterdir()) == []

    def test_force_replaces_a_model_and_keeps_it_if_the_work_fails(self, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text("old")
        (out / "other").write_text("old")
        with pytest.raises(ConversionError, match="exists; pass --force"), new_folder(out):
            pass
        with pytest.raises(RuntimeError), new_folder(out, force=True):
            raise RuntimeError
        assert (out / "config.json").read_text() == "old"
        with new_folder(out, force=True) as folder:
            (folder / "config.json").write_text("new")
        assert [path.name for path in out.iterdir()] == ["config.json"]
        assert (out / "config.json").read_text() == "new"
        assert list(tmp_path.iterdir()) == [out]

    def test_force_does_not_replace_what_is_no_model(self, tmp_path):
        (tmp_path / "letters").mkdir()
        (tmp_path / "letters" / "mum.txt").touch()
        (tmp_path / "file").touch()
        with pytest.raises(ConversionError, match="not a saved model"), new_folder(tmp_path / "letters", force=True):
            pass
        with (
            pytest.raises(ConversionError, match="is a file; name a folder"),
            new_folder(tmp_path / "file", force=True),
        ):
            pass

    def test_no_place_to_write(self, tmp_path):
        (tmp_path / "file").touch()
        for new in (new_folder, new_file):
            with (
                pytest.raises(ConversionError, match=r"out cannot be written: .*file is read-only, or it is no folder"),
                new(tmp_path / "file" / "out"),
            ):
                pass

    def test_an_empty_folder_is_free(self, tmp_path):
        (tmp_path / "out").mkdir()
        with new_folder(tmp_path / "out") as folder:
            (folder / "x").touch()
        assert (tmp_path / "out" / "x").exists()

    def test_the_current_folder_is_filled_and_stays(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with new_folder(Path()) as folder:
            (folder / "config.json").touch()
            (folder / "x").touch()
        assert sorted(os.listdir()) == ["config.json", "x"]
        with pytest.raises(ConversionError, match="holds the current folder, so --force does not replace it"):
            new_folder(Path(), force=True).__enter__()

    def test_a_mount_point_is_filled_and_not_replaced(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path)
        parent = tmp_path.parent.stat().st_mtime_ns
        with new_folder(tmp_path) as folder:
            (folder / "config.json").touch()
        assert tmp_path.parent.stat().st_mtime_ns == parent  # nothing beside it, which is another file system
        with pytest.raises(ConversionError, match="is a mount point"):
            new_folder(tmp_path, force=True).__enter__()

    def test_a_failure_leaves_an_empty_folder(self, tmp_path):
        with pytest.raises(ZeroDivisionError), new_folder(tmp_path) as folder:
            (folder / str(1 / 0)).touch()
        assert list(tmp_path.iterdir()) == []

    def test_a_link_stays(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "link").symlink_to("out")
        for content in ("old", "new"):
            with new_folder(tmp_path / "link", force=True) as folder:
                (folder / "config.json").write_text(content)
            assert (tmp_path / "link").is_symlink()
            assert (tmp_path / "out" / "config.json").read_text() == content
        assert len(list(tmp_path.iterdir())) == 2

    def test_the_source_is_not_replaced(self, tmp_path):
        source = tmp_path / "source"
        (source / "part").mkdir(parents=True)
        (source / "part" / "config.json").touch()
        (tmp_path / "link").symlink_to(source)
        for out in (source, tmp_path, source / "part", tmp_path / "link"):
            with pytest.raises(ConversionError, match=r"would replace .*source or a part of it; name another output"):
                check_apart(source, out)
        for out in (source / "new", tmp_path / "sour", tmp_path / "none"):
            check_apart(source, out)

    def test_files_too(self, tmp_path):
        out = tmp_path / "deep" / "out.zip"
        with pytest.raises(TypeError), new_file(out) as partial:
            partial.open("w").writelines(["half", 1])
        assert list(tmp_path.iterdir()) == []
        with new_file(out) as partial:
            partial.write_text("whole")
        assert out.read_text() == "whole"
        with pytest.raises(ConversionError, match="exists; pass --force"), new_file(out):
            pass
        with pytest.raises(ConversionError, match="is a folder; name a file"), new_file(tmp_path, force=True):
            pass
