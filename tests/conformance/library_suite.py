"""Bring the shared test classes of the installed Transformers onto this machine, and import them.

They are in its source distribution and nowhere in the wheel; none of their code is kept in this project. Run as a
script, this downloads the distribution once into `.cache/`; the tests then import what lies there.

The distribution lacks some files that the shared classes import; stubs stand in for them.
"""

import importlib
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

_CACHE = Path(__file__).parents[2] / ".cache" / "conformance"
_PACKAGE = "transformers_suite"

# Whether each field of the base configuration can be set by any model's: values that are not the defaults.
_CONFIG_STUB = """
config_common_kwargs = {
    "architectures": ["SomeModel"],
    "chunk_size_feed_forward": 3,
    "dtype": "float16",
    "id2label": {0: "no", 1: "yes"},
    "label2id": {"no": 0, "yes": 1},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}
"""
_STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": _CONFIG_STUB,
}


def folder() -> Path:
    """Where the suite of the installed version lies, or will lie."""
    return _CACHE / version("transformers")


def is_here() -> bool:
    """Whether the suite has been fetched."""
    return (folder() / _PACKAGE).is_dir()


def load(module: str) -> ModuleType:
    """A module of the suite, such as `test_modeling_common`; it must be here."""
    if str(folder()) not in sys.path:
        sys.path.insert(0, str(folder()))
    return importlib.import_module(f"{_PACKAGE}.{module}")


def fetch() -> None:
    """Download the source distribution and lay its tests out as a package.

    Raises:
        RuntimeError: The package registry does not answer, or has no source distribution of this version.
    """
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as work:
        package = Path(work, "laid-out", _PACKAGE)
        _unpack(_download(Path(work)), package)
        for name, text in _STUBS.items():
            target = package / name
            target.parent.mkdir(exist_ok=True)
            (target.parent / "__init__.py").touch()
            target.write_text(text, encoding="utf-8")
        package.parent.rename(folder())


def _download(into: Path) -> Path:
    wanted = f"transformers=={version('transformers')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--no-deps", "--no-binary", "transformers", "--dest", str(into), wanted]
    result = subprocess.run(command, capture_output=True, text=True)
    archives = list(into.glob("*.tar.gz"))
    if result.returncode or len(archives) != 1:
        last = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise RuntimeError(f"The source distribution of {wanted} could not be downloaded: {last}")
    return archives[0]


def _unpack(archive: Path, package: Path) -> None:
    with tarfile.open(archive) as source:
        top = source.next().name.split("/")[0]
        members = [member for member in source if member.name.startswith(f"{top}/tests/")]
        source.extractall(package.parent, members=members, filter="data")
    (package.parent / top / "tests").rename(package)
    (package.parent / top).rmdir()
    (package / "__init__.py").touch()


if __name__ == "__main__":
    if not is_here():
        try:
            fetch()
        except RuntimeError as error:
            sys.exit(f"{error}\nTransformers' own tests will be skipped: nothing is said about them in this run.")
