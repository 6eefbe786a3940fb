"""curves.py and pictures.py: what is read of a run, and that the pictures show it."""

import json
import shutil

import pytest

from relpos.model_cards.figures import PlotError
from relpos.training import curves, pictures

pytest.importorskip("matplotlib")

HISTORY = [
    {"step": 10, "loss": 5.0, "learning_rate": 1e-3},
    {"step": 20, "loss": 4.0, "learning_rate": 2e-3},
    {"step": 20, "eval_loss": 4.2, "eval_bleu": 3.0},
    {"step": 30, "loss": 3.5, "learning_rate": 1e-3},
    {"step": 30, "eval_loss": 3.9, "eval_bleu": 7.5},
    {"step": 30, "eval_loss": 3.8, "eval_bleu": 8.5},
    {"step": 30, "train_runtime": 3.0},
]


def write_state(folder, step, history):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))


def drawn_lines(monkeypatch):
    """Collects the lines of the figure that is saved, panel by panel."""
    found = {}
    save = curves.save_figure

    def keep(figure, path):
        for panel in figure.axes:
            found[panel.get_ylabel()] = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
        return save(figure, path)

    monkeypatch.setattr(curves, "save_figure", keep)
    return found


def test_curves_show_the_log(tmp_path, monkeypatch):
    lines = drawn_lines(monkeypatch)
    path = curves.plot_history(HISTORY, tmp_path / "curves.png", title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert lines["loss, nats per token"] == {
        "training": [[10, 5.0], [20, 4.0], [30, 3.5]],
        "validation": [[20, 4.2], [30, 3.8]],  # of two at one step the later
    }
    (bleu,) = lines["BLEU, validation"].values()
    assert bleu == [[20, 3.0], [30, 8.5]]


def test_a_run_without_evaluations_has_one_panel(tmp_path, monkeypatch):
    lines = drawn_lines(monkeypatch)
    curves.plot_history(HISTORY[:2], tmp_path / "curves.svg", title="a run")
    assert list(lines) == ["loss, nats per token"]
    assert list(lines["loss, nats per token"]) == ["training"]
    with pytest.raises(PlotError, match="no losses yet"):
        curves.plot_history([], tmp_path / "curves.png", title="a run")


def test_the_latest_log_of_a_run_is_read(tmp_path):
    assert curves.read_history(tmp_path) == []
    write_state(tmp_path / "checkpoint-9", 9, HISTORY[:1])
    write_state(tmp_path / "checkpoint-20", 20, HISTORY[:3])
    assert curves.read_history(tmp_path) == HISTORY[:3]
    write_state(tmp_path, 30, HISTORY)
    assert curves.read_history(tmp_path) == HISTORY
    (tmp_path / "trainer_state.json").write_text('{"global_step"')
    with pytest.raises(PlotError, match=r"trainer_state.json is damaged"):
        curves.read_history(tmp_path)


def test_the_model_of_a_run_is_its_own_or_the_newest_checkpoint(tmp_path):
    assert curves.newest_model(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-20", "checkpoint-100"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9" / "config.json").touch()
    (tmp_path / "checkpoint-20" / "config.json").touch()
    assert curves.newest_model(tmp_path) == tmp_path / "checkpoint-20"
    (tmp_path / "config.json").touch()
    assert curves.newest_model(tmp_path) == tmp_path


def test_a_run_with_a_model_gets_both_pictures(learned_model, tmp_path):
    run = shutil.copytree(learned_model, tmp_path / "run")
    write_state(run, 30, HISTORY)
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("Yes\tJa\nSave the file.\tSpeichern Sie die Datei.\n")
    drawn = list(pictures.draw(str(run), corpus=[str(corpus)]))
    assert drawn == [run / "curves.png", run / "positions.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    other = tmp_path / "pictures"
    other.mkdir()
    (run / "trainer_state.json").unlink()
    assert list(pictures.draw(str(run), other, corpus=[str(corpus)])) == [other / "positions.png"]


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(PlotError, match="nothing to draw"):
        list(pictures.draw(str(tmp_path)))
    with pytest.raises(PlotError, match="cannot be written"):
        list(pictures.draw(str(tmp_path), tmp_path / "none"))
