"""The paper's models and the training recipes, as files.

Presets are configurations (`base.json` and its siblings); recipes are the YAML files under `recipes/`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relpos import RelPosConfig

_FOLDER = Path(__file__).parent


def presets() -> list[str]:
    """Names of the presets."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def recipes() -> list[str]:
    """Names of the recipes."""
    return sorted(path.stem for path in (_FOLDER / "recipes").glob("*.yaml"))


def preset(name: str, **overrides: Any) -> "RelPosConfig":
    """A preset as a configuration.

    Args:
        name: One of `presets()`.
        overrides: Fields of `RelPosConfig` to set differently, such as `vocab_size`.

    Raises:
        ValueError: Unknown name, or a combination of fields that no model can have.
    """
    import json

    from relpos import RelPosConfig

    path = _find(name, _FOLDER / f"{name}.json", "preset", presets())
    fields = json.loads(path.read_text(encoding="utf-8"))
    return RelPosConfig(**{**fields, **overrides})


def recipe(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ValueError: Unknown name.
    """
    return _find(name, _FOLDER / "recipes" / f"{name}.yaml", "recipe", recipes())


def _find(name: str, path: Path, kind: str, known: list[str]) -> Path:
    if name not in known:
        raise ValueError(f"There is no {kind} {name!r}; there are {', '.join(known)}.")
    return path


__all__ = ["preset", "presets", "recipe", "recipes"]
