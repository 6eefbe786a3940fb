"""Puts a saved model on the Hub: `relpos push`.

What is pushed is a copy of the folder without what is of this machine alone, made in `stage`; the folder itself is only
read. Everything goes up in one commit, so that a page never shows half a model.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PureWindowsPath
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, SpaceCardData
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from rich.table import Table

from .card import CARD, FACTS_FILE, PICTURE, write_card

PAGE = Path(__file__).with_name("page.py")
TAG = "relpos"
"""Tag of the cards of models and pages that this command pushes, by which it knows them again."""

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_VOCABULARIES = ("tokenizer.json", "*vocab*", "*segmenter.json", "merges.txt", "*.model")
_TEXTS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "*_relpos.py", CARD, FACTS_FILE, "evaluation*.json", "recipe.yaml"),
    *("LICENSE*", "NOTICE*"),
)
_PUBLISHED = (*_WEIGHTS, *_VOCABULARIES, *_TEXTS, PICTURE)

# What must never leave the machine: tokens, and paths that begin where people and programs keep their files.
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
_LOCAL_PATH = re.compile(
    r"(?<![\w./:~-])(?:/(?:home|root|Users|tmp|var|mnt|media|data|scratch|work|srv|opt|nfs)/[\w.@-]+|~/[\w.@-]+"
    r"|[A-Za-z]:\\{1,2}Users\\{1,2}\w+)[^\s\"'`)<>]*"
)


class PublishError(ValueError):
    """A model that cannot be published; the message is one sentence for the user."""


@dataclass(frozen=True)
class Staged:
    """What would be pushed.

    Attributes:
        folder: a temporary folder with exactly these files.
        files: size in bytes by name.
        left_out: what else the model's folder holds.
    """

    folder: Path
    files: dict[str, int]
    left_out: list[str]


def stage(model: Path, folder: Path, *, name: str | None = None, facts: Mapping[str, Any] | None = None) -> Staged:
    """Collect in an empty folder what belongs on the Hub: the files of a model that loads and explains itself.

    References to the repository that a model came from are taken out of its configuration, and folders of this machine
    out of its recipe. Optimizer states, training arguments, checkpoints and all else that is not known stay away.

    Args:
        model: a saved RelPos folder, which is only read.
        folder: where to put copies; weights are linked.
        name: the name on the Hub, which the card shows unless it was edited by hand.
        facts: more for the card.

    Raises:
        PublishError: `model` is no RelPos model, or one of its texts names a token or a path of this machine.
    """
    model = Path(model)
    _check_model(model)
    left_out = []
    for path in sorted(model.iterdir()):
        if not path.is_file() or not _matches(path.name, _PUBLISHED):
            left_out.append(path.name + "/" * path.is_dir())
        elif _matches(path.name, _WEIGHTS):
            (folder / path.name).symlink_to(path.resolve())
        else:
            copyfile(path, folder / path.name)
    _clean(folder)
    if name:
        write_card(folder, {**(facts or {}), "name": name})
    for path in folder.iterdir():
        if _matches(path.name, _TEXTS):
            _refuse_leaks(path)
    return Staged(folder, {path.name: path.stat().st_size for path in sorted(folder.iterdir())}, left_out)


def stage_space(folder: Path, *, name: str, license: str | None = None) -> Staged:
    """Collect in an empty folder the files of a Space: the page of `relpos demo`, for the model `name` on the Hub."""
    try:
        gradio = version("gradio")
    except PackageNotFoundError:
        raise PublishError("A Space needs gradio, whose version it names: run `pip install 'relpos[demo]'`.") from None
    copyfile(PAGE, folder / "app.py")
    (folder / "requirements.txt").write_text("torch>=2.6\ntransformers>=5.24,<6\n", encoding="utf-8")
    title = name.partition("/")[2]
    # the page reads from here which model it shows
    data = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=gradio,
        app_file="app.py",
        license=license,
        models=[name],
        tags=[TAG],
    )
    text = f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nTranslate with `{name}`, and see what its heads attend to.\n"
    (folder / CARD).write_text(text, encoding="utf-8")
    return Staged(folder, {path.name: path.stat().st_size for path in sorted(folder.iterdir())}, [])


def push(staged: Staged, name: str, *, private: bool = False, space: bool = False, api: HfApi | None = None) -> str:
    """Upload everything in one commit to a repository, which is made where it does not exist.

    A repository that holds a RelPos model, or a page of one, gets a new version: unchanged files are not sent again, and
    files of the old version that the new one lacks are removed, but for those that are no part of a model.

    Args:
        staged: what `stage` collected.
        name: user/name.
        private: make a new repository private; one that exists must be private already.
        space: the repository is a Space.
        api: the client to talk to the Hub with.

    Returns:
        The address of the page.

    Raises:
        PublishError: no token, no rights, no network, the name is taken by something else, or the upload broke off; the
            message says how to go on.
    """
    api = api or HfApi()
    kind = "space" if space else "model"
    check_name(name)
    with _explained(name, api.endpoint, begun=False):
        api.whoami()
        present = _find(api, name, kind)
        if present is None:
            url = str(api.create_repo(name, private=private, repo_type=kind, space_sdk="gradio" if space else None))
        else:
            _check_present(present, name, kind, private=private)
            url = f"{api.endpoint}/{'spaces/' * space}{name}"
    old = [file.rfilename for file in present.siblings or []] if present else []
    stale = [file for file in old if _matches(file, _PUBLISHED) and file not in staged.files]
    operations = [CommitOperationDelete(file) for file in stale]
    operations += [CommitOperationAdd(file, staged.folder / file) for file in staged.files]
    with _explained(name, api.endpoint, begun=True):
        api.create_commit(
            name,
            operations,
            commit_message=f"Upload {name.partition('/')[2]} with relpos",
            repo_type=kind,
            parent_commit=present.sha if present else None,
        )
    return url


def publish(
    model: Path,
    name: str,
    *,
    private: bool = False,
    facts: Mapping[str, Any] | None = None,
    api: HfApi | None = None,
) -> str:
    """Stage a saved model and push it; see `stage` and `push`."""
    with TemporaryDirectory() as folder:
        return push(stage(model, Path(folder), name=name, facts=facts), name, private=private, api=api)


def staged_table(staged: Staged, *, title: str) -> Table:
    """The files with their sizes for a terminal, and what is left out."""
    table = Table(title=title, title_justify="left", show_header=False, show_edge=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for file, size in staged.files.items():
        table.add_row(file, f"{size:,} bytes")
    for file in staged.left_out:
        table.add_row(file, "left out", style="dim")
    table.add_section()
    table.add_row(f"{len(staged.files)} files", f"{sum(staged.files.values()):,} bytes")
    return table


def check_name(name: str) -> None:
    """Raise PublishError for a text that is no user/name."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise PublishError(f"The name {name!r} cannot be a model's on the Hub: {_first_line(error)}") from error
    if name.count("/") != 1:
        raise PublishError(f"The name {name!r} must be that of a model on the Hub: user/name or organization/name.")


def check_access(name: str, *, private: bool = False, api: HfApi | None = None) -> None:
    """Raise PublishError unless `name` can be pushed to, as far as that shows before: for trainings, which push at
    their end."""
    api = api or HfApi()
    check_name(name)
    with _explained(name, api.endpoint, begun=False):
        api.whoami()
        if (present := _find(api, name, "model")) is not None:
            _check_present(present, name, "model", private=private)


def find_leaks(text: str) -> list[str]:
    """Tokens and paths of this machine in a text, as "line 3: /home/..."; tokens are not repeated."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        found += [f"line {number}: {match[0]}" for match in _LOCAL_PATH.finditer(line)]
        found += [f"line {number}: an access token" for _ in _TOKEN.finditer(line)]
    return found


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _check_model(model: Path) -> None:
    if not model.is_dir():
        raise PublishError(f"The model {model} is no folder; a saved model is a folder with a config.json in it.")
    if not (model / "config.json").is_file():
        raise PublishError(f"The folder {model} holds no config.json, so it is not a saved model.")
    kind = _read_json(model / "config.json").get("model_type")
    if kind != "relpos":
        raise PublishError(f"The model {model} is of type {kind!r}; only RelPos models are published.")


def _clean(folder: Path) -> None:
    """Take out of the copies what names another repository or this machine."""
    for name in ("config.json", "tokenizer_config.json"):
        if (path := folder / name).is_file():
            content = _read_json(path)
            content.pop("_name_or_path", None)
            content.pop("name_or_path", None)
            cleaned = _own_code(content)
            path.write_text(json.dumps(cleaned, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if (path := folder / "recipe.yaml").is_file():
        try:
            recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise PublishError(f"The file {path.name} is not YAML: {_first_line(error)}") from error
        path.write_text(yaml.safe_dump(_base_names(recipe), allow_unicode=True, sort_keys=False), encoding="utf-8")


def _own_code(content: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose references "user/name--module.Class" name the module beside it."""

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: own(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [own(inner) for inner in value]
        return value.rpartition("--")[2] if isinstance(value, str) else value

    return {key: own(value) if key in ("auto_map", "custom_pipelines") else value for key, value in content.items()}


def _base_names(value: Any) -> Any:
    """Absolute paths in a recipe by their last part: what a corpus is called says enough to everyone else."""
    if isinstance(value, dict):
        return {key: _base_names(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_base_names(inner) for inner in value]
    if isinstance(value, str) and (value.startswith(("/", "~")) or PureWindowsPath(value).drive):
        return PureWindowsPath(value).name  # which splits at both kinds of slashes
    return value


def _refuse_leaks(path: Path) -> None:
    try:
        leaks = find_leaks(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise PublishError(f"The file {path.name} is not text: {_first_line(error)}") from error
    if leaks:
        raise PublishError(
            f"The file {path.name} would publish what is of this machine alone, {leaks[0]}: take it out."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PublishError(f"The file {path} is not JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise PublishError(f"The file {path} is not a JSON object.")
    return content


def _find(api: HfApi, name: str, kind: str) -> Any | None:
    try:
        return api.repo_info(name, repo_type=kind)
    except RepositoryNotFoundError:
        return None


def _check_present(present: Any, name: str, kind: str, *, private: bool) -> None:
    """Raise PublishError where a repository is somebody else's work, or public against the user's wish."""
    files = {file.rfilename for file in present.siblings or []} - {".gitattributes", CARD}
    if files and TAG not in (present.tags or []):
        raise PublishError(f"The name {name} is taken by a {kind} that is no RelPos {kind}; choose another name.")
    if private and not present.private:
        raise PublishError(
            f"The {kind} {name} is there already and public: make it private in its settings on the Hub, or leave "
            "--private out."
        )


@contextmanager
def _explained(name: str, endpoint: str, *, begun: bool) -> Iterator[None]:
    """Turn what goes wrong between here and the Hub into PublishError.

    Args:
        begun: the repository exists by now and takes the upload up again where it broke off.
    """
    go_on = ". Run the same command again; what has arrived is not sent twice." if begun else "; nothing was pushed."
    try:
        yield
    except PublishError:
        raise
    except LocalTokenNotFoundError as error:
        raise PublishError("There is no access token: run `hf auth login` once, or set HF_TOKEN.") from error
    except OfflineModeIsEnabled as error:
        raise PublishError("HF_HUB_OFFLINE is set, so the Hub cannot be asked; unset it to push.") from error
    except HfHubHTTPError as error:
        raise PublishError(_answer(name, error) + go_on) from error
    except httpx2.TransportError as error:
        raise PublishError(f"The Hub at {endpoint} cannot be reached ({_first_line(error)}){go_on}") from error
    except ValueError as error:  # what the Hub says of a card that was edited by hand
        raise PublishError(" ".join(str(error).split())) from error
    except (RuntimeError, ConnectionError) as error:  # which wrap what went wrong in a thread of the upload
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise PublishError(f"The upload to {name} broke off ({_first_line(cause)}){go_on}") from error


def _answer(name: str, error: HfHubHTTPError) -> str:
    """What an answer of the Hub means for the user, without the end of the sentence."""
    code = error.response.status_code
    meanings = {
        401: "The Hub does not know the access token (any more): run `hf auth login` again, or correct HF_TOKEN",
        403: f"The access token may not write to {name}: it needs the permission to write, and {name.partition('/')[0]} "
        "must be you or an organization of yours",
        409: f"Somebody else changed {name} at the same time",
        412: f"Somebody else changed {name} at the same time",
        429: "The Hub takes no more requests from you for now; wait a few minutes",
    }
    message = error.server_message or _first_line(error)
    return meanings.get(code, f"The Hub answered {code} ({message.strip().rstrip('.')})")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


__all__ = [
    "PublishError",
    "Staged",
    "check_access",
    "check_name",
    "find_leaks",
    "push",
    "stage",
    "stage_space",
    "staged_table",
]
