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

    Returns:
        The arguments of `_DEFAULTS`, and any others that are given.

    Raises:
        ConversionError: There is no such file, or it builds no Transformer, several, or one by arguments that cannot be
            told by reading.
    """
    text = read_text(path, "description of the model")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConversionError(f"The file {path} is not a Python file, or it is cut off.") from error
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        members = {getattr(part, "name", None) for part in node.body if not isinstance(part, ast.Expr | ast.Pass)}
        if members - {"__init__", "auto_config"}:
            raise ConversionError(
                f"The class {node.name} in {path} has members of its own, which may compute otherwise."
            )
    calls = [call for node in ast.walk(tree) if (call := _model_call(node)) is not None]
    if len(calls) != 1:
        raise ConversionError(
            f"The file {path} must build one Transformer of OpenNMT-tf; found {len(calls) or 'none'}."
        )
    arguments = _DEFAULTS | calls[0]
    if "?" in arguments:
        raise ConversionError(f"The arguments of the Transformer in {path} cannot be told without running it.")
    return arguments


def _model_call(node: ast.AST) -> dict[str, str] | None:
    """The arguments that a call gives to a Transformer, "?" for those that are not spelled out; None for other nodes."""
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "get_model_from_catalog" and node.args and isinstance(node.args[0], ast.Constant):
        return _CATALOG.get(node.args[0].value)
    if name in _CATALOG and name != "Transformer":
        return _CATALOG[name]
    if name != "Transformer" and ast.unparse(node.func) != "super().__init__":
        return None
    arguments = {keyword.arg or "?": ast.unparse(keyword.value) for keyword in node.keywords}
    return arguments | dict(zip(("source_inputter", "target_inputter", "?"), map(ast.unparse, node.args)))
