"""Proves that a saved folder works for people who do not have this package: `relpos check`."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_import_files

from .card import CARD

PROGRAM = Path(__file__).with_name("without_relpos.py")
SENTENCE = "Save the file."
TIMEOUT = 1800  # seconds; a large model on a slow machine


class CheckError(ValueError):
    """A folder that does not work by itself; the message is one sentence for the user."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried; `problem` says what is missing, and is None where it works."""

    what: str
    problem: str | None = None


def check_folder(folder: Path) -> list[Finding]:
    """Look for the files that a folder needs, and use it in a process in which `relpos` cannot be imported.

    Args:
        folder: a saved RelPos model.

    Returns:
        A finding for everything that was tried, in a fixed order. Nothing is fetched from any network meanwhile, and
        the folder is only read.
    """
    folder = Path(folder).resolve()
    findings = [Finding("files", _missing_files(folder)), Finding("code", _missing_code(folder))]
    steps = _use_without_relpos(folder)
    findings += [Finding(f"without relpos: {step['step']}", step["problem"]) for step in steps]
    answers = {step["step"]: step["answer"] for step in steps}
    if answers.get("generate") is not None:
        findings.append(Finding("with relpos: the same translation", _differs(folder, answers["generate"])))
    return findings


def findings_table(findings: list[Finding], *, title: str) -> Table:
    """The findings for a terminal."""
    table = Table(title=title, title_justify="left", show_header=False, show_edge=False, pad_edge=False)
    for finding in findings:
        table.add_row("✗" if finding.problem else "✓", finding.what, finding.problem or "")
    return table


def raise_problems(findings: list[Finding], *, name: str) -> None:
    """Raise CheckError where there is a problem."""
    problems = [finding for finding in findings if finding.problem]
    if problems:
        raise CheckError(
            f"The model {name} does not work by itself: {len(problems)} of {len(findings)} checks failed, the first of "
            f"them {problems[0].what} ({problems[0].problem.rstrip('.')})."
        )


def _missing_files(folder: Path) -> str | None:
    wanted = {
        "config.json": ["config.json"],
        "weights as safetensors": ["*.safetensors"],
        "a tokenizer": ["tokenizer.json", "tokenizer_config.json"],
        "generation_config.json": ["generation_config.json"],
        f"a card ({CARD})": [CARD],
    }
    missing = [what for what, patterns in wanted.items() if not any(any(folder.glob(pattern)) for pattern in patterns)]
    return f"missing: {', '.join(missing)}" if missing else None


def _missing_code(folder: Path) -> str | None:
    """Which file the configurations name, or one of these imports, that is not there."""
    references = []
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            references += _class_references([content.get("auto_map"), content.get("custom_pipelines")])
    if stale := [reference for reference in references if "--" in reference]:
        return f"{stale[0]} is the code of another repository"
    if not references:
        return "config.json names no code (auto_map), so that only people with relpos can load the model"
    for module in sorted({reference.rpartition(".")[0] for reference in references}):
        try:
            needed = [folder / f"{module}.py", *get_relative_import_files(folder / f"{module}.py")]
        except FileNotFoundError as error:
            needed = [error.filename]
        if missing := [Path(file).name for file in needed if not Path(file).is_file()]:
            return f"missing: {missing[0]}"
    return None


def _class_references(value: Any) -> list[str]:
    """All "module.Class" within auto_map and custom_pipelines."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() if key != "pt" for found in _class_references(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in _class_references(inner)]
    return [value] if isinstance(value, str) else []


def _use_without_relpos(folder: Path) -> list[dict[str, Any]]:
    """The steps of without_relpos.py with their outcome, the last one a problem if the process broke off."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{scratch}/modules"}
        # the program's text and not its file: Python would look for modules in the file's folder
        command = [sys.executable, "-c", PROGRAM.read_text(encoding="utf-8"), str(folder), f"{scratch}/again", SENTENCE]
        try:
            done = subprocess.run(
                command, env=environment, cwd=scratch, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return [{"step": "all steps", "problem": f"took more than {TIMEOUT} seconds", "answer": None}]
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        steps.append({"step": "all steps", "problem": f"the process broke off: {reason}", "answer": None})
    return steps


@torch.inference_mode()
def _differs(folder: Path, answer: str) -> str | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    except (OSError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    tokens = model.generate(**tokenizer([SENTENCE], return_tensors="pt"))
    own = tokenizer.batch_decode(tokens, skip_special_tokens=True)[0]
    return None if own == answer else f"{own!r} with relpos and {answer!r} without"


__all__ = ["CheckError", "Finding", "check_folder", "findings_table", "raise_problems"]
