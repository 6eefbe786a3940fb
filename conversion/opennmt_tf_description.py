"""Reads OpenNMT-tf's `model_description.py`, the Python file that builds a model, without running it."""

import ast
from pathlib import Path

from .files import ConversionError, read_text

# What the arguments of `opennmt.models.Transformer` are where a description does not give them, as far as they cannot be
# told from the weights.
_DEFAULTS = {
    "source_inputter": "None",
    "target_inputter": "None",
    "dropout": "0.1",
    "attention_dropout": "0.1",
    "ffn_dropout": "0.1",
    "ffn_activation": "tf.nn.relu",
    "position_encoder_class": "SinusoidalPositionEncoder",
}
_RELATIVE = {"position_encoder_class": "None", "maximum_relative_position": "20"}
_CATALOG = {
    "Transformer": {},
    "TransformerBase": {},
    "TransformerBaseSharedEmbeddings": {},
    "TransformerBig": {},
    "TransformerBigSharedEmbeddings": {},
    "TransformerRelative": _RELATIVE,
    "TransformerBaseRelative": _RELATIVE,
    "TransformerBigRelative": _RELATIVE,
}
"""The models that OpenNMT-tf knows by name, with what they set of these arguments."""


def read_description(path: Path) -> dict[str, str]:
    """The arguments of the Transformer that a `model_description.py` builds, as they are written; the file is not run.

    It may call `opennmt.models.Transformer`, subclass it and call `super().__init__`, or name a model of the catalog.
    Whatever else it does may change the model, so anything but that and imports is refused.

    Returns:
        The arguments of `_DEFAULTS`, and any others that are given.

    Raises:
        ConversionError: There is no such file, or it builds no Transformer, several, or one by statements or arguments
            that cannot be told by reading.
    """
    text = read_text(path, "description of the model")
    try:
        statements = _acting(ast.parse(text).body)
    except (SyntaxError, ValueError) as error:
        raise ConversionError(f"The file {path} is not a Python file, or it is cut off.") from error
    classes = {node.name: _super_call(node, path) for node in statements if isinstance(node, ast.ClassDef)}
    models = [_built(node, path) for node in statements if not isinstance(node, ast.ClassDef)]
    calls = [given for model in models if (given := _arguments(model, classes)) is not None]
    if len(models) != 1 or len(calls) != 1 or len(classes) > 1:
        raise ConversionError(f"The file {path} must build one Transformer of OpenNMT-tf, as `model`.")
    arguments = _DEFAULTS | calls[0]
    if "?" in arguments:
        raise ConversionError(f"The arguments of the Transformer in {path} cannot be told without running it.")
    return arguments


def _acting(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Statements without imports, docstrings and `pass`."""
    return [
        node
        for node in statements
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def _built(node: ast.stmt, path: Path) -> ast.expr | None:
    """What a statement makes the model: the value of `model`, or what a lambda or a function of that name returns."""
    if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["model"]:
        return node.value.body if isinstance(node.value, ast.Lambda) else node.value
    if not isinstance(node, ast.FunctionDef) or node.name != "model" or node.decorator_list:
        raise _unreadable(node, path)
    for statement in _acting(node.body):
        if not isinstance(statement, ast.Return):
            raise _unreadable(statement, path)
        return statement.value
    return None


def _super_call(node: ast.ClassDef, path: Path) -> ast.Call | None:
    """The call of `super().__init__`, which must be all that a class adds to Transformer but its training's settings."""
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    if bases != ["Transformer"] or node.keywords or node.decorator_list:
        raise _unreadable(node, path)
    call = None
    for member in _acting(node.body):
        name = member.name if isinstance(member, ast.FunctionDef) and not member.decorator_list else None
        if name not in ("__init__", "auto_config"):
            raise _unreadable(member, path)
        for statement in _acting(member.body) if name == "__init__" else ():
            if (
                call
                or not ast.unparse(statement).startswith("super().__init__(")
                or not isinstance(statement, ast.Expr)
            ):
                raise _unreadable(statement, path)
            call = statement.value
    return call


def _unreadable(node: ast.stmt, path: Path) -> ConversionError:
    return ConversionError(
        f"Line {node.lineno} of {path} may change the model in a way that cannot be told without running it; only imports "
        "and one Transformer with its arguments are read."
    )


def _arguments(model: ast.expr | None, classes: dict[str, ast.Call | None]) -> dict[str, str] | None:
    """The arguments that the description's own class, or the model itself, gives to a Transformer; None for no such.

    Those that are not spelled out are "?".
    """
    named = model.func if isinstance(model, ast.Call) else model
    if isinstance(named, ast.Name) and named.id in classes:
        given = isinstance(model, ast.Call) and (model.args or model.keywords)
        call = classes[named.id]
        return {"?": ""} if given else None if call is None else _given(call)
    return _model_call(model) if isinstance(model, ast.Call) else None


def _model_call(node: ast.Call) -> dict[str, str] | None:
    """The arguments that a call gives to a Transformer of the toolkit; None for other calls."""
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "get_model_from_catalog" and node.args and isinstance(node.args[0], ast.Constant):
        return _CATALOG.get(node.args[0].value)
    if name in _CATALOG and name != "Transformer":
        return _CATALOG[name]
    return _given(node) if name == "Transformer" else None


def _given(call: ast.Call) -> dict[str, str]:
    arguments = {keyword.arg or "?": ast.unparse(keyword.value) for keyword in call.keywords}
    return arguments | dict(zip(("source_inputter", "target_inputter", "?"), map(ast.unparse, call.args)))
