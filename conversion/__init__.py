"""Models of other toolkits in, and RelPos models out.

Each toolkit has a module `<toolkit>_format.py`, loaded when it is asked for: none is needed to use another.
"""

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relpos import RelPosConfig
    from relpos.training.loading import LoadedModel

    from .converter import Converter

_SOURCES = {
    "opennmt-py": ("opennmt_py_format", "OpenNMTPyConverter"),
    "opennmt-tf": ("opennmt_tf_format", "OpenNMTTFConverter"),
    "tensor2tensor": ("tensor2tensor_format", "Tensor2TensorConverter"),
    "ctranslate2": ("ctranslate2_format", "CTranslate2Converter"),
    "argos": ("argos_format", "ArgosConverter"),
}
_TARGETS = {
    "ctranslate2": ("ctranslate2_format", "export_ctranslate2"),
    "argos": ("argos_format", "export_argos"),
}
_ENGINES = {"ctranslate2": ("ctranslate2_engine", "load_engine")}


def sources() -> list[str]:
    """Names of the toolkits whose models can be converted."""
    return sorted(_SOURCES)


def targets() -> list[str]:
    """Names of the toolkits that models can be exported to."""
    return sorted(_TARGETS)


def open_source(source: str | Path, *, toolkit: str, **options: Any) -> "Converter":
    """Open a model of another toolkit.

    Args:
        source: The file or folder of the model.
        toolkit: One of `sources()`.
        options: Those of the toolkit's converter; None counts as not given.

    Raises:
        ConversionError: Unknown toolkit, an option that it does not have, or a model that cannot be read.
    """
    return _call(_find(toolkit, _SOURCES, "convert from"), Path(source), toolkit=toolkit, options=options)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    toolkit: str,
    languages: Sequence[str] = (),
    force: bool = False,
    **options: Any,
) -> Path:
    """Convert a model of another toolkit into a folder that Transformers loads.

    Args:
        source: The file or folder of the model.
        out: The folder to write, which appears whole or not at all.
        toolkit: One of `sources()`.
        languages: ISO 639 codes of source and target for the model card; by default what the source says of them.
        force: Replace `out` where it is a saved model.
        options: Those of the toolkit's converter; None counts as not given.

    Returns:
        `out`.

    Raises:
        ConversionError: One sentence on what is missing, damaged or impossible; nothing is written then.
    """
    from .converter import convert_model
    from .files import ConversionError, check_apart, check_target

    if len(languages) not in (0, 2):
        raise ConversionError(f"--languages takes two codes, source and target, as in en,de, and not {len(languages)}.")
    check_apart(Path(source), Path(out))
    check_target(Path(out), force=force)
    facts = dict(zip(("source_language", "target_language"), languages))
    return convert_model(open_source(source, toolkit=toolkit, **options), Path(out), force=force, facts=facts)


def export(model: str | Path, out: str | Path, *, toolkit: str, force: bool = False, **options: Any) -> Path:
    """Write a RelPos model in the format of another toolkit.

    Args:
        model: A saved RelPos folder.
        out: What to write, which appears whole or not at all.
        toolkit: One of `targets()`.
        force: Replace `out`.
        options: Those of the toolkit's export function; None counts as not given.

    Returns:
        `out`.

    Raises:
        ConversionError: One sentence on what is missing, damaged or impossible; nothing is written then.
    """
    from .files import check_apart

    export_function = _find(toolkit, _TARGETS, "export to")
    check_apart(Path(model), Path(out))
    return _call(export_function, Path(model), Path(out), toolkit=toolkit, options={**options, "force": force})


def obstacles(config: "RelPosConfig", *, toolkit: str) -> list[str]:
    """Options of a RelPos model that a toolkit does not have; where there are none, `export` writes it.

    Raises:
        ConversionError: Unknown toolkit.
    """
    _find(toolkit, _TARGETS, "export to")
    # Argos packages hold CTranslate2 models
    return import_module(".ctranslate2_format", __name__).inexpressible(config)


def load_engine(folder: str | Path, *, engine: str) -> "LoadedModel":
    """Open an export for translating with the toolkit's own engine.

    Args:
        folder: What `export` wrote.
        engine: "ctranslate2".

    Raises:
        ConversionError: Unknown engine, one that is not installed, or a folder that is no such export.
    """
    return _find(engine, _ENGINES, "translate with")(folder)


def _find(toolkit: str, table: dict[str, tuple[str, str]], purpose: str) -> Any:
    from .files import ConversionError

    if toolkit not in table:
        raise ConversionError(f"There is no toolkit {toolkit!r} to {purpose}; there are {', '.join(sorted(table))}.")
    module, name = table[toolkit]
    return getattr(import_module(f".{module}", __name__), name)


def _call(function: Any, *arguments: Path, toolkit: str, options: dict[str, Any]) -> Any:
    """Call a toolkit's class or function with the options that were given, and refuse those that it does not have."""
    from .files import ConversionError

    given = {name: value for name, value in options.items() if value not in (None, False, ())}
    parameters = inspect.signature(function).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    for name in given:
        if name not in known:
            raise ConversionError(f"The option --{name.replace('_', '-')} has no meaning for {toolkit}.")
    return function(*arguments, **given)


__all__ = ["convert", "export", "load_engine", "obstacles", "open_source", "sources", "targets"]
