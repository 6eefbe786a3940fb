"""The package as people get it: a built wheel and an editable install in fresh environments, and old Transformers.

The fresh environments see this environment's packages by a .pth file, so that nothing large is installed twice. Python
does not follow .pth files from there, so an editable install of relpos in this environment is out of their sight.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLD_TRANSFORMERS = "5.23.0"
NOT_SOURCE = ("*.egg-info", "__pycache__", ".*", "build", "dist", "out")


def _run(*command, **options):
    """Run a command that must succeed; its standard output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A copy of the checkout: a build leaves files behind, and finds those of an earlier one."""
    return shutil.copytree(
        ROOT, tmp_path_factory.mktemp("source") / "checkout", ignore=shutil.ignore_patterns(*NOT_SOURCE)
    )


@pytest.fixture(scope="session")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def _environment(folder, wheel=None):
    """A fresh virtual environment with a wheel in it; the path of its Python."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    if wheel:
        install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", wheel)
        _run(sys.executable, "-m", "pip", "--python", python, *install)
    # Only now: pip must not see the packages of this environment, least of all relpos.
    site_packages = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site_packages) / "outer.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) + "\n"
    )
    return python


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    return _environment(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="session")
def editable(source, tmp_path_factory):
    """The environment after `pip install -e`, which builds this very wheel and installs it."""
    folder = tmp_path_factory.mktemp("editable-wheel")
    build = f"from setuptools.build_meta import build_editable; build_editable({str(folder)!r})"
    _run(sys.executable, "-c", build, cwd=source)
    (built,) = folder.glob("*.whl")
    return _environment(tmp_path_factory.mktemp("editable"), built)


def test_wheel_holds_the_package_and_its_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"relpos"}
    for file in [*ROOT.glob("configuration/*.json"), *ROOT.glob("configuration/recipes/*.yaml")]:
        assert f"relpos/{file.relative_to(ROOT)}" in names
    for file in ROOT.glob("modeling_relpos/*.py"):
        assert f"relpos/{file.name}" in names
    assert any(name.startswith("relpos/configuration/recipes/") for name in names)
    assert "relpos/model_cards/card_template.md" in names
    assert "relpos/training/corpora/libreoffice-help.en-de.tsv.gz" in names
    assert {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert not [name for name in names if "test" in name or "benchmark" in name]


PROBE = """
import importlib.util, json, sys
import relpos
from relpos.configuration import preset, presets, recipe, recipes
from relpos.model_cards import card
from importlib import resources
from transformers import AutoConfig, AutoModelForSeq2SeqLM
print(json.dumps({
    "file": relpos.__file__,
    "presets": [preset(name).model_type for name in presets()],
    "recipes": [recipe(name).stat().st_size > 0 for name in recipes()],
    "template": card.TEMPLATE.is_file(),
    "corpora": [file.name for file in (resources.files("relpos.training") / "corpora").iterdir()],
    "known": AutoConfig.for_model("relpos").model_type,
    "parameters": AutoModelForSeq2SeqLM.from_config(preset("tiny")).num_parameters(),
    "top level": [name for name in ("training", "conversion", "configuration", "model_cards", "modeling_relpos")
                  if importlib.util.find_spec(name)],
}), flush=True)
from relpos.cli import main
sys.argv = ["relpos", "inspect", "minimal"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_package_and_command_work_from_any_folder(kind, request, source, tmp_path):
    python = request.getfixturevalue(kind)
    assert "relpos 0." in _run(python.with_name("relpos"), "--version", cwd=tmp_path)
    shown = _run(python, "-c", PROBE, cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path / "cache")})
    assert "clipped at k = 2" in shown
    found = json.loads(next(line for line in shown.splitlines() if line.startswith("{")))
    home = source if kind == "editable" else python.parents[1]
    assert Path(found["file"]).is_relative_to(home)
    assert "libreoffice-help.en-de.tsv.gz" in found["corpora"]
    assert set(found["presets"]) == {"relpos"}
    assert found["recipes"]
    assert all(found["recipes"])
    assert found["template"]
    assert found["known"] == "relpos"
    assert found["parameters"] > 0
    assert found["top level"] == []


@pytest.fixture(scope="session")
def old_transformers():
    """A folder with a Transformers that is too old, kept from one run to the next."""
    folder = ROOT / ".cache" / f"transformers-{OLD_TRANSFORMERS}"
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", partial)
        requirement = f"transformers=={OLD_TRANSFORMERS}"
        done = subprocess.run([sys.executable, "-m", "pip", *map(str, install), requirement], capture_output=True)
        if done.returncode:
            shutil.rmtree(partial, ignore_errors=True)
            pytest.skip(f"DID NOT RUN: pip could not get {requirement}: {done.stderr.decode().strip()[-300:]}")
        try:
            partial.rename(folder)
        except OSError:  # another process of this run was faster
            shutil.rmtree(partial)
    return folder


def _fails_on(old, python, *command, cwd):
    environment = {**os.environ, "PYTHONPATH": str(old), "HF_HOME": str(cwd / "cache")}
    done = subprocess.run([python, *command], capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)
    assert done.returncode != 0, done.stdout
    return done.stderr


SENTENCE = f"RelPos needs transformers 5.24 or newer and found {OLD_TRANSFORMERS}: run `pip install --upgrade "


@pytest.mark.slow
def test_old_transformers_stop_the_import(old_transformers, installed, tmp_path):
    shown = _fails_on(old_transformers, installed, "-c", "import relpos", cwd=tmp_path)
    assert shown.splitlines()[-1].startswith(f"ImportError: {SENTENCE}")


@pytest.mark.slow
def test_old_transformers_stop_the_command_with_the_sentence_alone(old_transformers, installed, tmp_path):
    shown = _fails_on(old_transformers, installed, installed.with_name("relpos"), "inspect", "tiny", cwd=tmp_path)
    assert shown.startswith(f"relpos: {SENTENCE}")
    assert len(shown.splitlines()) == 1


@pytest.mark.slow
def test_old_transformers_stop_code_from_the_hub(old_transformers, learned_model, tmp_path_factory, tmp_path):
    python = _environment(tmp_path_factory.mktemp("without"))
    loaders = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")
    program = f"""
import importlib.util, transformers
assert importlib.util.find_spec("relpos") is None
assert transformers.__version__ == {OLD_TRANSFORMERS!r}
for loader in {loaders!r}:
    try:
        getattr(transformers, loader).from_pretrained({str(learned_model)!r}, trust_remote_code=True)
    except ImportError as error:
        print(loader, error)
"""
    environment = {**os.environ, "PYTHONPATH": str(old_transformers), "HF_HOME": str(tmp_path / "cache")}
    shown = _run(python, "-c", program, cwd=tmp_path, env=environment).splitlines()
    assert [line.partition(" ")[0] for line in shown] == list(loaders)
    assert all(SENTENCE in line for line in shown)
