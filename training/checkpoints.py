"""Checkpoints of a run: which of them are whole."""

import json
import os
import zipfile
from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .loading import ModelError, check_folder, weight_files

logger = logging.get_logger(__name__)

# What FSDP saves instead of the optimizer's file and beside or instead of the model's, in pieces or whole.
_FSDP_PIECES = {"optimizer": "optimizer_0", "model": "pytorch_model_fsdp_0"}
_FSDP_MODEL = "pytorch_model_fsdp.bin"


def whole_checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints in the folder of a run that training can go on from, in the order of their steps.

    One that is cut off, be it by a full disk, a copy that was interrupted or another program, is named in a warning.
    """
    found = []
    for folder in Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if not (step.isdecimal() and folder.is_dir()):
            continue
        damage = find_damage(folder, step=int(step))
        if damage:
            logger.warning(f"The checkpoint {folder} is not whole and is passed over: {damage}")
        else:
            found.append((int(step), folder))
    return [folder for _, folder in sorted(found)]


def find_damage(checkpoint: Path, *, step: int) -> str | None:
    """What keeps training from going on from a checkpoint, in one sentence; None where it is whole.

    Looks at every file that training needs, but not at all of its content: a file that was cut off lacks the end that
    its format has, or is shorter than its header says.
    """
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        if state["global_step"] != step:
            return f"its {TRAINER_STATE_NAME} is of step {state['global_step']}."
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"its {TRAINER_STATE_NAME} cannot be read ({error})."
    random_states = sorted(checkpoint.glob("rng_state*.pth"))
    if not random_states:
        return "it has no random state (rng_state.pth)."
    in_pieces = {part: (checkpoint / name / ".metadata").is_file() for part, name in _FSDP_PIECES.items()}
    files = [checkpoint / SCHEDULER_NAME, *random_states]
    if not in_pieces["optimizer"]:
        files += [file for file in (checkpoint / OPTIMIZER_NAME_BIN,) if file.exists()] or [checkpoint / OPTIMIZER_NAME]
    files += checkpoint.glob(_FSDP_MODEL)
    for file in files:
        if not zipfile.is_zipfile(file):  # which has its directory at the end
            return f"{file.name} is missing or cut off."
    if in_pieces["model"]:
        return None
    try:
        check_folder(str(checkpoint), complete=False)
        missing = [name for name in weight_files(checkpoint) if not (checkpoint / name).is_file()]
    except ModelError as error:
        return str(error)
    return f"{missing[0]} is missing." if missing else None


def flush_to_disk(folder: Path) -> None:
    """Make sure that all files below a folder outlast a crash of the machine, before the folder gets its name."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
