"""publishing.py: what is pushed and what stays, and every fault between here and the Hub, with the real client."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi

from relpos import RelPosForConditionalGeneration, cli
from relpos.configuration import preset
from relpos.model_cards import self_contained, write_card
from relpos.model_cards.publishing import PublishError, find_leaks, push, stage, stage_space
from relpos.training import run_translation
from relpos.training.recipe import RecipeError

RELPOS = Path(sysconfig.get_path("scripts")) / "relpos"
COMMIT = "POST .*/commit/"
UPLOAD = "PUT /storage/"


@pytest.fixture(scope="module")
def model(tmp_path_factory, learned_model):
    """A folder as training leaves it, with much beside the model."""
    folder = shutil.copytree(learned_model, tmp_path_factory.mktemp("publishing") / "small")
    write_card(folder, {"corpus": "eight sentences", "license": "mit"})
    recipe = {"model": "base", "train_corpus": ["/home/anna/data/corpus.tsv", "bundled"], "tokenizer": "~/words.model"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", ".env", "notes.txt", "weights.bin.partial"):
        (folder / name).write_text("hf_" + "x" * 30)
    (folder / "checkpoint-5").mkdir()
    return folder


@pytest.fixture
def staged(model, tmp_path):
    return stage(model, _new(tmp_path / "staged"), name="anna/small")


def _new(folder):
    folder.mkdir()
    return folder


class TestStaging:
    def test_only_what_belongs_on_the_hub_is_taken(self, staged, model):
        code = {path.name for path in model.glob("*_relpos.py")}
        model_files = {"config.json", "generation_config.json", "model.safetensors"}
        tokenizer = {"tokenizer.json", "tokenizer_config.json"}
        assert set(staged.files) == {*code, *model_files, *tokenizer, "README.md", "card.json", "recipe.yaml"}
        assert staged.files == {path.name: path.stat().st_size for path in staged.folder.iterdir()}
        assert staged.left_out == [
            *(".env", "checkpoint-5/", "notes.txt", "optimizer.pt", "trainer_state.json", "training_args.bin"),
            "weights.bin.partial",
        ]

    def test_paths_of_this_machine_are_taken_out_of_the_recipe(self, staged, model):
        recipe = yaml.safe_load((staged.folder / "recipe.yaml").read_text())
        assert recipe == {"model": "base", "train_corpus": ["corpus.tsv", "bundled"], "tokenizer": "words.model"}
        assert "/home/anna" in (model / "recipe.yaml").read_text()  # the folder itself is only read

    def test_the_card_shows_the_name_on_the_hub(self, staged, model):
        card = (staged.folder / "README.md").read_text()
        assert 'model="anna/small"' in card
        assert "eight sentences" in card
        assert 'model="small"' in (model / "README.md").read_text()

    def test_an_edited_card_is_pushed_as_it_is(self, model, tmp_path):
        edited = shutil.copytree(model, tmp_path / "edited")
        (edited / "README.md").write_text("# Mine\n")
        staged = stage(edited, _new(tmp_path / "staged"), name="anna/small", facts={"license": "mit"})
        assert (staged.folder / "README.md").read_text() == "# Mine\n"

    def test_references_to_another_repository_are_taken_out(self, model, tmp_path):
        theirs = shutil.copytree(model, tmp_path / "theirs")
        for name in ("config.json", "tokenizer_config.json"):
            content = json.loads((theirs / name).read_text())
            content["_name_or_path"] = "/home/ben/model"
            content["auto_map"] = {
                "AutoConfig": "ben/big--configuration_relpos.RelPosConfig",
                "AutoModel": ["b/c--x.Y"],
            }
            (theirs / name).write_text(json.dumps(content))
        staged = stage(theirs, _new(tmp_path / "staged"))
        for name in ("config.json", "tokenizer_config.json"):
            content = json.loads((staged.folder / name).read_text())
            assert content["auto_map"] == {"AutoConfig": "configuration_relpos.RelPosConfig", "AutoModel": ["x.Y"]}
            assert "_name_or_path" not in content

    @pytest.mark.parametrize(
        ("file", "content", "leak"),
        [
            ("README.md", "Trained on\n/home/anna/corpus.tsv\n", "line 2: /home/anna/corpus.tsv"),
            ("evaluation.json", '{"corpus": "/mnt/data/x.tsv"}', "line 1: /mnt/data/x.tsv"),
            ("modeling_relpos.py", "TOKEN = 'hf_" + "a" * 34 + "'", "line 1: an access token"),
        ],
    )
    def test_what_is_of_this_machine_alone_is_refused(self, model, tmp_path, file, content, leak):
        folder = shutil.copytree(model, tmp_path / "leaking")
        (folder / file).write_text(content)
        with pytest.raises(PublishError, match=f"{file} would publish .*{leak}"):
            stage(folder, _new(tmp_path / "staged"))

    @pytest.mark.parametrize(
        "text",
        [
            "see https://example.org/home/page and docs/home/x, 1e-3/data, a/tmp/b",
            "half of /, or /dev; and/or",
            "hf_hub_download(x) and hf_config",
        ],
    )
    def test_ordinary_text_is_no_leak(self, text):
        assert find_leaks(text) == []

    @pytest.mark.parametrize(
        "text", ["/Users/anna/x", "in (/tmp/run)", r"C:\Users\anna\x", r'"C:\\Users\\anna"', "~/models/x", '"/root/x"']
    )
    def test_local_paths_are_found(self, text):
        assert len(find_leaks(text)) == 1

    def test_what_is_no_relpos_model_is_refused(self, tmp_path, model):
        marian = _new(tmp_path / "marian")
        (marian / "config.json").write_text('{"model_type": "marian"}')
        for folder, message in {
            tmp_path / "absent": "is no folder",
            model / "config.json": "is no folder",
            _new(tmp_path / "empty"): "holds no config",
            marian: "of type 'marian'",
        }.items():
            with pytest.raises(PublishError, match=message):
                stage(folder, tmp_path)
        (marian / "config.json").write_text("{")
        with pytest.raises(PublishError, match="is not JSON"):
            stage(marian, tmp_path)


class TestPush:
    def test_one_commit_of_all_files(self, hub, client, staged):
        assert push(staged, "anna/small", api=client()) == f"{hub.url}/anna/small"
        repository = hub.repositories["model", "anna/small"]
        assert len(repository.commits) == 2  # the Hub's own and this one
        assert not repository.private
        pushed = dict(repository.files)
        del pushed[".gitattributes"]
        assert pushed == {name: (staged.folder / name).read_bytes() for name in staged.files}

    def test_the_same_again_makes_no_commit_and_sends_no_weights(self, hub, client, staged):
        push(staged, "anna/small", api=client())
        push(staged, "anna/small", api=client())
        assert hub.count(COMMIT) == 1
        assert hub.count(UPLOAD) == 1

    def test_a_new_version_removes_what_it_lacks_and_nothing_else(self, hub, client, staged):
        push(staged, "anna/small", api=client())
        repository = hub.repositories["model", "anna/small"]
        repository.commit({**repository.files, "model-00001-of-00002.safetensors": b"", "photo.jpg": b""}, "by hand")
        (staged.folder / "generation_config.json").write_text("{}")
        push(staged, "anna/small", api=client())
        assert set(repository.files) == {*staged.files, ".gitattributes", "photo.jpg"}
        assert repository.files["generation_config.json"] == b"{}"
        assert len(repository.commits) == 4

    def test_private(self, hub, client, staged):
        push(staged, "anna/small", private=True, api=client())
        assert hub.repositories["model", "anna/small"].private
        push(staged, "anna/small", private=True, api=client())
        push(staged, "anna/small", api=client())  # stays private
        assert hub.repositories["model", "anna/small"].private

    def test_a_public_repository_is_not_taken_for_a_private_one(self, hub, client, staged):
        push(staged, "anna/small", api=client())
        with pytest.raises(PublishError, match="is there already and public"):
            push(staged, "anna/small", private=True, api=client())

    def test_a_name_taken_by_something_else(self, hub, client, staged):
        client().create_repo("anna/small")
        repository = hub.repositories["model", "anna/small"]
        repository.commit({"config.json": b'{"model_type": "bert"}'}, "a BERT")
        with pytest.raises(PublishError, match="anna/small is taken by a model that is no RelPos model"):
            push(staged, "anna/small", api=client())
        assert len(repository.commits) == 2

    def test_an_empty_repository_is_filled(self, hub, client, staged):
        client().create_repo("anna/small", private=True)
        push(staged, "anna/small", api=client())
        assert "model.safetensors" in hub.repositories["model", "anna/small"].files

    def test_the_name_of_somebody_else(self, hub, client, staged):
        with pytest.raises(PublishError, match=r"token may not write to ben/small: .* ben must be you"):
            push(staged, "ben/small", api=client())
        push(staged, "ben/small", api=client("hf_of_ben"))
        with pytest.raises(PublishError, match="token may not write to ben/small"):
            push(staged, "ben/small", api=client())

    @pytest.mark.parametrize("name", ["small", "anna/small/er", "anna/", "/small", "anna/sm all", "anna/a--b", ""])
    def test_names_that_cannot_be(self, hub, client, staged, name):
        with pytest.raises(PublishError, match="The name "):
            push(staged, name, api=client())
        assert hub.requests == []

    def test_space(self, hub, client, tmp_path):
        page = stage_space(_new(tmp_path / "page"), name="anna/small")
        assert push(page, "anna/small", space=True, api=client()) == f"{hub.url}/spaces/anna/small"
        space = hub.repositories["space", "anna/small"]
        assert space.sdk == "gradio"
        assert set(space.files) == {"app.py", "README.md", "requirements.txt", ".gitattributes"}
        assert space.info()["cardData"]["models"] == ["anna/small"]
        push(page, "anna/small", space=True, api=client())
        assert len(space.commits) == 2


class TestFaults:
    """One sentence each, the local folder whole, and the same command again ends well."""

    @pytest.fixture(autouse=True)
    def _unharmed(self, staged):
        before = {path.name: path.read_bytes() for path in staged.folder.iterdir()}
        yield
        assert {path.name: path.read_bytes() for path in staged.folder.iterdir()} == before

    def fails(self, staged, api, message):
        with pytest.raises(PublishError, match=message) as raised:
            push(staged, "anna/small", api=api)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def test_no_token(self, hub, client, staged, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
        self.fails(staged, client(token=None), "no access token: run `hf auth login`")
        assert hub.requests == []

    def test_a_token_that_is_not_known(self, hub, client, staged):
        self.fails(staged, client("hf_of_nobody"), r"does not know the access token .*; nothing was pushed")
        assert not hub.repositories

    def test_no_network(self, client, staged):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            api = HfApi(endpoint=f"http://127.0.0.1:{unused.getsockname()[1]}", token="hf_of_anna")
            client()  # not offline
            self.fails(staged, api, "cannot be reached .*; nothing was pushed")

    def test_offline(self, hub, staged):
        self.fails(staged, HfApi(endpoint=hub.url, token="hf_of_anna"), "HF_HUB_OFFLINE is set")

    @pytest.mark.parametrize(
        ("status", "message"),
        [
            (401, "does not know the access token"),
            (403, "may not write to anna/small"),
            (409, "Somebody else changed anna/small"),
            (412, "Somebody else changed anna/small"),
            (429, "takes no more requests from you for now"),
            (500, "The Hub answered 500"),
            (503, "The Hub answered 503"),
            (None, "cannot be reached"),
        ],
    )
    def test_the_commit_fails(self, hub, client, staged, status, message):
        hub.fail(COMMIT, status)
        said = self.fails(staged, client(), message)
        assert said.endswith("Run the same command again; what has arrived is not sent twice.")
        repository = hub.repositories["model", "anna/small"]
        assert set(repository.files) == {".gitattributes"}  # nothing of half a model shows
        push(staged, "anna/small", api=client())
        assert set(repository.files) == {*staged.files, ".gitattributes"}
        assert hub.count(UPLOAD) == 1  # the weights were there already

    @pytest.mark.parametrize("status", [None, 500, 503])
    def test_an_upload_that_breaks_off_once_is_not_noticed(self, hub, client, staged, status):
        hub.fail(UPLOAD, status)
        push(staged, "anna/small", api=client())
        assert hub.count(UPLOAD) == 2
        assert "model.safetensors" in hub.repositories["model", "anna/small"].files

    @pytest.mark.parametrize("status", [None, 403, 500])
    def test_an_upload_that_breaks_off_for_good(self, hub, client, staged, status):
        hub.fail(UPLOAD, status, times=99)
        said = self.fails(staged, client(), "anna/small")
        assert said.endswith("Run the same command again; what has arrived is not sent twice.")
        assert hub.count(COMMIT) == 0
        hub.faults.clear()
        push(staged, "anna/small", api=client())
        assert "model.safetensors" in hub.repositories["model", "anna/small"].files

    def test_somebody_pushes_at_the_same_time(self, hub, client, staged, monkeypatch):
        push(staged, "anna/small", api=client())
        repository = hub.repositories["model", "anna/small"]
        (staged.folder / "recipe.yaml").write_text(before := (staged.folder / "recipe.yaml").read_text() + "seed: 1\n")
        create_commit = HfApi.create_commit

        def later(*arguments, **options):
            repository.commit({**repository.files, "theirs.txt": b""}, "theirs")
            return create_commit(*arguments, **options)

        with monkeypatch.context() as context:
            context.setattr(HfApi, "create_commit", later)
            self.fails(staged, client(), "Somebody else changed anna/small at the same time")
        assert repository.messages[-1] == "theirs"
        push(staged, "anna/small", api=client())
        assert repository.files["recipe.yaml"].decode() == before
        (staged.folder / "recipe.yaml").write_text(before.removesuffix("seed: 1\n"))

    def test_metadata_that_the_hub_refuses(self, hub, client, model, tmp_path):
        edited = shutil.copytree(model, tmp_path / "edited")
        (edited / "README.md").write_text("---\nlicense: [\n---\n# Mine\n")
        staged = stage(edited, _new(tmp_path / "other"), name="anna/small")
        self.fails(staged, client(), "Invalid metadata in README")


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["relpos"] = None  # as if it had never been installed
import json
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
name, again, sentences = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
translate = pipeline("translation", model=name, trust_remote_code=True)
answers = [answer["translation_text"] for answer in translate(sentences)]
model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model.save_pretrained(again)
tokenizer.save_pretrained(again)
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_from_a_folder_to_a_page_to_somebody_elses_machine(hub, client, model, learned_pairs, tmp_path):
    """`relpos push`, then processes without the package, all of them talking HTTP."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_of_anna", "HF_HUB_DISABLE_XET": "1"}
    del environment["HF_HUB_OFFLINE"]
    folder = shutil.copytree(model, tmp_path / "small")
    command = [RELPOS, "push", folder, "anna/small", "--private", "--license", "apache-2.0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the card does not say: scores" in done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.url}/anna/small"
    assert "✓" in done.stdout
    first = hub.repositories["model", "anna/small"]
    assert b"license: apache-2.0" in first.files["README.md"]
    assert json.loads((folder / "card.json").read_text())["facts"]["license"] == "apache-2.0"

    sentences = [source for source, _ in learned_pairs]
    again = _load_elsewhere(
        "anna/small", sentences, [target for _, target in learned_pairs], environment, tmp_path / "1"
    )
    staged = stage(again, _new(tmp_path / "staged"), name="anna/other")
    assert not [file for file in staged.files if b"anna/small" in (staged.folder / file).read_bytes()]
    push(staged, "anna/other", api=client())
    del hub.repositories["model", "anna/small"]
    assert first.private
    _load_elsewhere("anna/other", sentences, [target for _, target in learned_pairs], environment, tmp_path / "2")


def _load_elsewhere(name, sources, targets, environment, home):
    """Translate with a model of the Hub in a process without the package and an empty cache; the folder it saves."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, name, str(home / "again"), json.dumps(sources)],
        env={**environment, "HF_HOME": str(home)},
        cwd=_new(home),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == targets
    return home / "again"


def _call(monkeypatch, *arguments):
    """Run the command in this process, where PyTorch is loaded already; the exit code."""
    monkeypatch.setattr(sys, "argv", ["relpos", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    return exited.value.code


def test_a_dry_run_lists_files_and_asks_the_hub_nothing(model, monkeypatch, capsys):
    assert _call(monkeypatch, "push", model, "anna/small", "--dry-run", "--space") == 0  # this process is offline
    shown = capsys.readouterr()
    size = (model / "model.safetensors").stat().st_size
    assert re.search(rf"model\.safetensors +│ +{size:,} bytes", shown.out)
    assert re.search(r"optimizer\.pt +│ +left out", shown.out)
    assert re.search(r"app\.py +│", shown.out)
    assert "the card does not say: scores" in shown.err


def test_without_a_token_nothing_is_begun(client, model, monkeypatch, capsys):
    client()
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    monkeypatch.setattr(self_contained, "check_folder", lambda folder: pytest.fail("the folder was checked first"))
    assert _call(monkeypatch, "push", model, "anna/small") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("relpos: There is no access token: run `hf auth login`")


def test_a_model_that_does_not_work_is_not_pushed(hub, client, model, tmp_path, monkeypatch, capsys):
    client()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: "hf_of_anna")
    monkeypatch.setattr(self_contained, "_use_without_relpos", lambda folder: [])  # what is missing is found before
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "attention_relpos.py").unlink()
    assert _call(monkeypatch, "push", broken, "anna/small") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "does not work by itself" in said
    assert "attention_relpos.py" in said
    assert not hub.repositories


def test_push_of_the_library_itself(hub, client, monkeypatch):
    """`model.push_to_hub` of Transformers writes a folder that works, too: code and auto_map are in it."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    client()
    RelPosForConditionalGeneration(preset("tiny")).push_to_hub("anna/plain", token="hf_of_anna")
    files = hub.repositories["model", "anna/plain"].files
    assert {"config.json", "model.safetensors", "modeling_relpos.py", "attention_relpos.py"} <= set(files)


class TestTraining:
    """`--push_to_hub true` of `relpos train`."""

    TINY = (
        *("--model", "tiny", "--vocab_size", "420", "--max_tokens", "200", "--use_cpu", "true", "--max_steps", "2"),
        *("--d_model", "16", "--save_steps", "1", "--push_to_hub", "true"),
    )

    @pytest.fixture
    def arguments(self, tmp_path, hub, client, monkeypatch):
        client()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        corpus = tmp_path / "corpus.tsv"
        corpus.write_text("".join(f"The {n} house.\tDas {n} Haus.\n" for n in range(40)), encoding="utf-8")
        return [*self.TINY, "--train_corpus", str(corpus), "--output_dir", str(tmp_path / "out")]

    def test_the_model_is_pushed_at_the_end(self, hub, arguments, tmp_path):
        target = ["--hub_model_id", "anna/houses", "--hub_token", "hf_of_anna", "--hub_private_repo", "true"]
        run_translation.main([*arguments, *target])
        assert list((tmp_path / "out").glob("checkpoint-*"))
        repository = hub.repositories["model", "anna/houses"]
        assert repository.private
        assert len(repository.commits) == 2
        assert {"model.safetensors", "README.md", "tokenizer.json", "modeling_relpos.py"} <= set(repository.files)
        for name, content in repository.files.items():
            assert "/" not in name
            assert not name.endswith((".bin", ".pt"))
            assert b"hf_of_anna" not in content
            assert str(tmp_path).encode() not in content

    @pytest.mark.parametrize(
        ("target", "error", "message"),
        [
            (["--hub_token", "hf_of_anna"], RecipeError, "push_to_hub needs hub_model_id"),
            (["--hub_model_id", "houses", "--hub_token", "hf_of_anna"], PublishError, "must be that of a model"),
            (
                ["--hub_model_id", "anna/houses", "--hub_token", "hf_of_nobody"],
                PublishError,
                "does not know the access",
            ),
        ],
    )
    def test_what_cannot_be_pushed_is_refused_before_the_training(self, arguments, target, error, message, tmp_path):
        with pytest.raises(error, match=message):
            run_translation.main([*arguments, *target])
        assert not (tmp_path / "out").exists()
