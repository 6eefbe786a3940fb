"""Trains two tiny models in OpenNMT-tf and records its answers; runs in an environment that has OpenNMT-tf, not RelPos.

    python make_fixtures_opennmt_tf.py DATA OUT

DATA holds train.en, train.de, test.en and test.de (the bundled corpus, as test_peers.py writes it). OUT gets a folder
per model with the run's folder, its configuration, the subword models, vocabularies and answers.json. Each training takes
about a minute of an idle core. The environment: what ENVIRONMENTS in that test names.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import opennmt
import tensorflow as tf
import yaml

STEPS = 800
SENTENCES = 50
LONGEST = 40  # tokens; the answers stay small
LONGEST_OUTPUT = 100
SPECIAL_TOKENS = ["<blank>", "<s>", "</s>"]
MODELS = {
    # one vocabulary, one embedding table, pre-norm, SentencePiece pieces, an end token on the source; weights alone
    "shared_sentencepiece": """import opennmt

model = lambda: opennmt.models.Transformer(
    num_layers=2,
    num_units=64,
    num_heads=4,
    ffn_inner_dim=128,
    attention_dropout=0.0,
    ffn_dropout=0.0,
    position_encoder_class=None,
    share_embeddings=opennmt.models.EmbeddingsSharingLevel.ALL,
    maximum_relative_position=6,
)
""",
    # two vocabularies, three tables, post-norm, no biases, GELU, subword-nmt BPE; as it was left, with Adam's moments
    "separate_bpe": """import opennmt


class PostNorm(opennmt.models.Transformer):
    def __init__(self):
        super().__init__(
            num_layers=(1, 2),
            num_units=32,
            num_heads=4,
            ffn_inner_dim=64,
            ffn_activation=opennmt.layers.gelu,
            mha_bias=False,
            position_encoder_class=None,
            maximum_relative_position=4,
            pre_norm=False,
            output_layer_bias=False,
        )


model = PostNorm
""",
}


def main() -> None:
    data, out = (Path(argument).resolve() for argument in sys.argv[1:])
    for name, description in MODELS.items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)  # all paths of the configuration are relative to it
        if not Path("run").is_dir():
            Path("model.py").write_text(description, encoding="utf-8")
            train(data, prepare(data, name))
        config = yaml.safe_load(Path("config.yml").read_text(encoding="utf-8"))
        Path("answers.json").write_text(json.dumps(answers(data, config)), encoding="utf-8")
        shutil.rmtree("work", ignore_errors=True)


def prepare(data: Path, name: str) -> dict:
    """Subword models, vocabularies and text; returns the part of the configuration that names them, which is written."""
    work = Path("work")
    work.mkdir(exist_ok=True)
    sections = prepare_sentencepiece(data) if name == "shared_sentencepiece" else prepare_bpe(data, work)
    config = {"model_dir": "run", "data": sections, "params": {"beam_width": 4, "length_penalty": 0.2}}
    Path("config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return config


def prepare_sentencepiece(data: Path) -> dict:
    import sentencepiece

    files = [str(data / "train.en"), str(data / "train.de")]
    sentencepiece.SentencePieceTrainer.train(input=files, model_prefix="subwords", vocab_size=800, minloglevel=2)
    vocabulary = opennmt.data.Vocab(special_tokens=SPECIAL_TOKENS)
    vocabulary.load("subwords.vocab", file_format="sentencepiece")
    vocabulary.serialize("shared.vocab")
    Path("subwords.vocab").unlink()
    tokenization = {"type": "OpenNMTTokenizer", "params": {"mode": "none", "sp_model_path": "subwords.model"}}
    return {
        "source_vocabulary": "shared.vocab",
        "target_vocabulary": "shared.vocab",
        "source_tokenization": tokenization,
        "target_tokenization": tokenization,
        "source_sequence_controls": {"end": True},
    }


def prepare_bpe(data: Path, work: Path) -> dict:
    """Text that is cut into pieces before it comes to OpenNMT-tf, which then splits it at spaces."""
    for language in ("en", "de"):
        codes = Path(f"codes.{language}")
        run_bpe("learn-bpe", "-s", "400", "-i", data / f"train.{language}", "-o", codes)
        run_bpe("apply-bpe", "-c", codes, "-i", data / f"train.{language}", "-o", work / f"train.{language}")
        vocabulary = opennmt.data.Vocab(special_tokens=SPECIAL_TOKENS)
        vocabulary.add_from_text(str(work / f"train.{language}"))
        vocabulary.prune(min_frequency=5).serialize(f"vocab.{language}")
    return {"source_vocabulary": "vocab.en", "target_vocabulary": "vocab.de"}


def run_bpe(*arguments: str | Path) -> None:
    command = [Path(sys.executable).parent / "subword-nmt", *arguments]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def train(data: Path, config: dict) -> None:
    """Train, and keep the last checkpoint; the shared model's is saved anew without the moments of Adam."""
    cut = "source_tokenization" not in config["data"]
    text = Path("work") if cut else data
    full = {
        **config,
        "model_dir": "work/run",
        "data": {
            **config["data"],
            "train_features_file": str(text / "train.en"),
            "train_labels_file": str(text / "train.de"),
        },
        "params": {
            "optimizer": "Adam",
            "optimizer_params": {"beta_1": 0.9, "beta_2": 0.998},
            "learning_rate": 1.0,
            "decay_type": "NoamDecay",
            "decay_params": {"model_dim": 64, "warmup_steps": 300},
            "label_smoothing": 0.1,
        },
        "train": {
            "batch_size": 1000,
            "batch_type": "tokens",
            "effective_batch_size": None,
            "sample_buffer_size": 10000,
            "length_bucket_width": 2,
            "max_step": STEPS,
            "save_checkpoints_steps": STEPS,
            "average_last_checkpoints": 0,
            "maximum_features_length": 60,
            "maximum_labels_length": 60,
        },
    }
    tf.random.set_seed(1)
    model = opennmt.load_model("work", model_file="model.py", serialize_model=False)
    opennmt.Runner(model, full, auto_config=True, seed=1).train(num_devices=1)
    source = Path("work/run")
    if cut:
        Path("run").mkdir()
        for path in [source / "checkpoint", *source.glob(f"ckpt-{STEPS}.*")]:
            shutil.copy(path, "run")
    else:
        model = load(config, source)
        opennmt.utils.checkpoint.Checkpoint(model, model_dir="run").save(STEPS)
    forget_paths(Path("run/checkpoint"))
    Path("model.py").rename("run/model_description.py")


def forget_paths(state: Path) -> None:
    """Leave the names of the checkpoints, and no word of where and when they were made."""
    lines = [line for line in state.read_text(encoding="utf-8").splitlines() if "timestamp" not in line]
    state.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(config: dict, folder: Path) -> "opennmt.models.Model":
    description = folder / "model_description.py"
    model = opennmt.load_model(
        "work", model_file=str(description if description.is_file() else "model.py"), serialize_model=False
    )
    model.initialize(config["data"], params={})
    model.create_variables()
    opennmt.utils.checkpoint.Checkpoint(model, model_dir=str(folder)).restore(weights_only=True)
    return model


def answers(data: Path, config: dict) -> dict:
    """What OpenNMT-tf says on real sentences: ids (see `renumber`), teacher-forced log-probabilities, greedy and beam
    outputs."""
    model = load(config, Path("run"))
    cut = None if "source_tokenization" in config["data"] else load_bpe()
    teacher_forced, searches = log_prob_function(model), {beams: search_function(model, beams) for beams in (1, 4)}
    sentences = []
    for pair in read_pairs(data):
        texts = cut(*pair) if cut else pair
        features = batched(model.features_inputter.make_features(tf.constant(texts[0])))
        labels = batched(model.labels_inputter.make_features(tf.constant(texts[1])))
        if max(features["ids"].shape[1], labels["ids"].shape[1]) > LONGEST:
            continue
        target_ids = [int(labels["ids"][0, 0]), *labels["ids_out"][0].numpy().tolist()]
        sentences.append(
            {
                "source": pair[0],
                "target": pair[1],
                "source_ids": renumber(features["ids"][0].numpy().tolist(), model.features_inputter),
                "target_ids": renumber(target_ids, model.labels_inputter),
                "log_probs": teacher_forced(features, labels).numpy().tolist(),
                **{
                    f"beam_{beams}": hypotheses(search(features), model, partial(teacher_forced, features))
                    for beams, search in searches.items()
                },
            }
        )
        if len(sentences) == SENTENCES:
            break
    return {"toolkit": f"OpenNMT-tf {opennmt.__version__}", "sentences": sentences}


def log_prob_function(model):
    @tf.function(reduce_retracing=True)
    def log_probs(features, labels):
        outputs, _ = model(features, labels)
        return tf.gather(tf.nn.log_softmax(outputs["logits"][0]), labels["ids_out"][0], batch_dims=1)

    return log_probs


def search_function(model, beams: int):
    @tf.function(reduce_retracing=True)
    def search(features):
        options = {"length_penalty": 0, "maximum_decoding_length": LONGEST_OUTPUT}
        model.params.update(beam_width=beams, num_hypotheses=beams, **options)
        return model(features)[1]

    return search


def hypotheses(predictions: dict, model, score) -> list[dict]:
    """Hypotheses of a search, best first: ids with the end token, sum of log-probabilities, text.

    The sum is that of the model, teacher-forced. The search reports another where an ended hypothesis changed its place in
    the beam: `dynamic_decode` then gives it the sum of the hypothesis that stood there.
    """
    inputter, found = model.labels_inputter, []
    for tokens, length in zip(predictions["tokens"][0].numpy(), predictions["length"][0].numpy()):
        pieces = tokens[:length].tolist()
        ids = inputter.tokens_to_ids.lookup(tf.constant(pieces, dtype=tf.string)).numpy().tolist()
        ids += [] if length == LONGEST_OUTPUT else [opennmt.END_OF_SENTENCE_ID]
        labels = {"ids": [opennmt.START_OF_SENTENCE_ID, *ids[:-1]], "ids_out": ids, "length": len(ids)}
        log_probs = score(batched({name: tf.constant(value, tf.int64) for name, value in labels.items()}))
        text = re.sub("@@( |$)", "", inputter.tokenizer.detokenize([piece.decode() for piece in pieces]))
        found.append({"ids": renumber(ids, inputter), "score": float(tf.reduce_sum(log_probs)), "text": text})
    return found


def renumber(ids: list[int], inputter) -> list[int]:
    """Ids as RelPos counts: `<unk>`, which is the last one here, comes behind the other special tokens there."""
    unknown, first = inputter.vocabulary_size - 1, len(SPECIAL_TOKENS)
    return [first if i == unknown else i + (i >= first) for i in ids]


def load_bpe():
    from subword_nmt.apply_bpe import BPE

    codes = [Path(f"codes.{language}").read_text(encoding="utf-8") for language in ("en", "de")]
    models = [BPE(io.StringIO(text)) for text in codes]
    return lambda *texts: [bpe.process_line(text) for bpe, text in zip(models, texts)]


def read_pairs(data: Path) -> list[tuple[str, str]]:
    lines = [(data / f"test.{language}").read_text(encoding="utf-8").split("\n") for language in ("en", "de")]
    return [(source, target) for source, target in zip(*lines) if source and target][::7]


def batched(features: dict) -> dict:
    return {name: tf.expand_dims(value, 0) for name, value in features.items()}


if __name__ == "__main__":
    main()
