"""What the tests of training share: a corpus that is learned in no time, and a way to stop a run."""

import random
from contextlib import contextmanager

import pytest

from relpos.training.trainer import TranslationTrainer


@pytest.fixture(scope="session")
def letters():
    """A function: the text of a TSV corpus of so many pairs, letters and the same in capitals."""

    def text(pairs):
        draw = random.Random(0)
        lines = [" ".join(draw.choices("abcdefgh", k=draw.randint(3, 9))) for _ in range(pairs)]
        return "".join(f"{line}\t{line.upper()}\n" for line in lines)

    return text


@pytest.fixture
def stopped_at(monkeypatch):
    """A context manager: the training in it is stopped, as by Ctrl-C, once it has saved the checkpoint of a step."""
    save = TranslationTrainer._save_checkpoint

    @contextmanager
    def stopped(step):
        def save_and_stop(self, model, trial):
            save(self, model, trial)
            if self.state.global_step == step:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TranslationTrainer, "_save_checkpoint", save_and_stop)
            with pytest.raises(KeyboardInterrupt):
                yield

    return stopped
