"""Records what tensor2tensor computes; runs in an environment that has tensor2tensor and TensorFlow, not RelPos.

    python make_fixtures_tensor2tensor.py DATA OUT

DATA holds train.en, train.de, test.en and test.de (the bundled corpus, as test_peers.py writes it). OUT gets:

- attention.json: its attention functions on random numbers;
- a folder per model: the training's hparams.json and checkpoint, the vocabularies, answers.json (ids, teacher-forced
  log-probabilities, greedy and beam outputs) and texts.json (ids of all sorts of text);
- types: a TensorFlow checkpoint with a tensor of every type, in two data files, and values.json.

The environment: what ENVIRONMENTS in that test names. It is not all that tensor2tensor asks for, so the packages of its
other models, which import everything, are left alone.
"""

import importlib.util
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
_models = types.ModuleType("tensor2tensor.models")
_models.__path__ = [str(Path(importlib.util.find_spec("tensor2tensor").origin).parent / "models")]
sys.modules[_models.__name__] = _models

from tensor2tensor.data_generators import problem_hparams, text_encoder, tokenizer  # noqa: E402
from tensor2tensor.layers import common_attention  # noqa: E402
from tensor2tensor.models import transformer  # noqa: E402
from tensor2tensor.utils import beam_search  # noqa: E402

STEPS = 800
SENTENCES = 50
LONGEST = 40  # tokens; the answers stay small
LONGEST_OUTPUT = 100
TRAINED_ON = 4000  # pairs
MIN_COUNT = 150  # of a piece
MODELS = {
    # one vocabulary, one table in four shards, pre-norm; with the moments of Adam
    "shared": {"hidden_size": 32, "filter_size": 64, "num_hidden_layers": 2, "symbol_modality_num_shards": 4},
    # two vocabularies, three tables, post-norm, no target space
    "separate": {
        "hidden_size": 16,
        "filter_size": 32,
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "shared_embedding_and_softmax_weights": False,
        "symbol_modality_num_shards": 1,
        "layer_preprocess_sequence": "none",
        "layer_postprocess_sequence": "dan",
        "use_target_space_embedding": False,
        "max_relative_position": 3,
    },
}
TEXTS = [
    "",
    " ",
    "  two  spaces  ",
    "snake_case and back\\slash and \\u and \\95;",
    "Zażółć gęślą jaźń – 日本語, emoji 🙂 and a tab\there",
    "line\nbreak\u2028and another",
    "3.14 % of ½ is not Ⅳ²",
    "e\u0301 combining, \u200bzero width, \ufeff",
    "<pad> <EOS> <pad>_ _",
    "x" * 300,
]


def main() -> None:
    data, out = (Path(argument).resolve() for argument in sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    write(out / "attention.json", attention_answers())
    write_types(out / "types")
    for name, options in MODELS.items():
        with tf.Graph().as_default():
            make_model(data, out / name, options)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def attention_answers() -> list[dict]:
    """Inputs and outputs of `dot_product_attention_relative`, whose queries come scaled, and of its inner product."""
    cases = {
        "all see all": {"queries": 7, "keys": 7, "k": 3, "bias": None},
        "causal": {"queries": 9, "keys": 9, "k": 2, "bias": "causal"},
        "longer than the text": {"queries": 4, "keys": 4, "k": 20, "bias": None},
        "one step with a cache": {"queries": 1, "keys": 8, "k": 3, "bias": None},
    }
    random = np.random.RandomState(0)
    answers = [attention_answer(name, random, **case) for name, case in cases.items()]
    x, y, z = random.randn(2, 3, 5, 4), random.randn(2, 3, 5, 4), random.randn(5, 5, 4)
    with tf.Graph().as_default(), tf.Session() as session:
        arrays = [tf.constant(array, tf.float32) for array in (x, y, z)]
        inner = session.run(common_attention._relative_attention_inner(*arrays, True))
    return [*answers, {"name": "inner", "x": x.tolist(), "y": y.tolist(), "z": z.tolist(), "output": inner.tolist()}]


def attention_answer(
    name: str, random: np.random.RandomState, queries: int, keys: int, k: int, bias: str | None
) -> dict:
    batch, heads, depth = 2, 3, 4
    query = random.randn(batch, heads, queries, depth)
    key, value = (random.randn(batch, heads, keys, depth) for _ in range(2))
    tables = [random.randn(2 * k + 1, depth) for _ in range(2)]
    with tf.Graph().as_default(), tf.Session() as session:
        output = common_attention.dot_product_attention_relative(
            *(tf.constant(array, tf.float32) for array in (query, key, value)),
            common_attention.attention_bias_lower_triangle(keys) if bias else None,
            k,
            make_image_summary=False,
            cache=queries == 1,
        )
        for variable in tf.global_variables():
            variable.load(tables["relative_positions_values" in variable.name], session)
        output = session.run(output)
    arrays = {"query": query, "key": key, "value": value, "key_table": tables[0], "value_table": tables[1]}
    answer = {"name": name, "causal": bias is not None, "output": output.tolist()}
    return answer | {array_name: array.tolist() for array_name, array in arrays.items()}


def write_types(folder: Path) -> None:
    """A checkpoint of two data files that are read as one, with a string and a tensor in slices as well."""
    folder.mkdir(exist_ok=True)
    numbers = [[0, 1, 2], [3, 5, 8]]
    kinds = ["float32", "float64", "int32", "uint8", "int16", "int8", "int64", "bool", "bfloat16", "float16"]
    tensors = {kind: tf.cast(tf.constant(numbers), kind) for kind in kinds}
    tensors |= {"scalar": tf.constant(2.5), "empty": tf.zeros([0, 3]), "text": tf.constant("words")}
    prefix = str(folder / "types")
    parts = [f"{prefix}.part{index}" for index in range(2)]
    names = [list(tensors)[index::2] for index in range(2)]
    sliced = tf.constant([[1.0, 2.0]])
    saves = [
        tf.raw_ops.SaveV2(
            prefix=part,
            tensor_names=[*own, *(["sliced"] if index == 0 else [])],
            shape_and_slices=[*[""] * len(own), *(["2 2 0,1:-"] if index == 0 else [])],
            tensors=[tensors[name] for name in own] + ([sliced] if index == 0 else []),
        )
        for index, (part, own) in enumerate(zip(parts, names))
    ]
    with tf.control_dependencies(saves):
        merge = tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix)
    with tf.Session() as session:
        session.run(merge)
        values = session.run({name: tf.cast(tensors[name], tf.float64) for name in [*kinds, "scalar", "empty"]})
    write(folder / "values.json", {name: value.tolist() for name, value in values.items()})


def make_model(data: Path, folder: Path, options: dict) -> None:
    folder.mkdir(exist_ok=True)
    pairs = read_pairs(data, "train")[:TRAINED_ON]
    encoders = build_vocabularies(folder, pairs, shared=options.get("shared_embedding_and_softmax_weights", True))
    hparams = make_hparams(options, [encoder.vocab_size for encoder in encoders])
    features = {
        "inputs": tf.placeholder(tf.int32, [None, None, 1, 1]),
        "targets": tf.placeholder(tf.int32, [None, None, 1, 1]),
        "target_space_id": tf.constant(0, tf.int32),
    }
    with tf.Session() as session:
        train(session, hparams, features, [encode(encoders, pair) for pair in pairs], folder)
        write(
            folder / "answers.json",
            {"toolkit": "tensor2tensor 1.15.7", "sentences": answers(session, hparams, features, encoders, data)},
        )
    texts = [{"text": text, "sides": [side_ids(encoder, text) for encoder in encoders]} for text in TEXTS]
    write(folder / "texts.json", texts)


def build_vocabularies(folder: Path, pairs: list, *, shared: bool) -> list:
    sides = [[text for pair in pairs for text in pair]] if shared else [list(side) for side in zip(*pairs)]
    encoders = []
    for texts, name in zip(sides, ["subwords"] if shared else ["en", "de"]):
        counts = Counter(word for text in texts for word in tokenizer.encode(text))
        encoder = text_encoder.SubwordTextEncoder()
        encoder.build_from_token_counts(
            counts, MIN_COUNT, num_iterations=2, reserved_tokens=["<pad>", "<EOS>"], max_subtoken_length=12
        )
        encoder.store_to_file(str(folder / f"vocab.{name}"))
        encoders.append(text_encoder.SubwordTextEncoder(str(folder / f"vocab.{name}")))
    return encoders * 2 if shared else encoders


def make_hparams(options: dict, vocab_sizes: list[int]):
    hparams = transformer.transformer_relative_tiny()
    hparams.override_from_dict({"max_relative_position": 5, "num_heads": 4, **options})
    hparams.problem_hparams = problem_hparams.test_problem_hparams(*vocab_sizes, hparams)
    hparams.problem_hparams.stop_at_eos = 1  # as text problems have it
    return hparams


def encode(encoders: list, pair: tuple[str, str]) -> list[list[int]]:
    return [[*encoder.encode(text), text_encoder.EOS_ID] for encoder, text in zip(encoders, pair)]


def side_ids(encoder, text: str) -> dict:
    ids = encoder.encode(text)
    return {"ids": ids, "decoded": encoder.decode(ids)}


def train(session, hparams, features: dict, pairs: list, folder: Path) -> None:
    """A few hundred updates of Adam, and a checkpoint with all variables, as tensor2tensor's trainer leaves it."""
    tf.set_random_seed(1)
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        _, losses = build(hparams, tf.estimator.ModeKeys.TRAIN)(dict(features))
    step = tf.train.get_or_create_global_step()
    update = tf.train.AdamOptimizer(3e-3).minimize(sum(losses.values()), global_step=step)
    session.run(tf.global_variables_initializer())
    pairs = [pair for pair in pairs if max(map(len, pair)) <= LONGEST]
    random = np.random.RandomState(1)
    for _ in range(STEPS):
        batch = [pairs[index] for index in random.randint(len(pairs), size=32)]
        session.run(update, {features[name]: pad(side) for name, side in zip(("inputs", "targets"), zip(*batch))})
    tf.train.Saver().save(session, str(folder / "model.ckpt"), global_step=step, write_meta_graph=False)
    state = folder / "checkpoint"
    state.write_text(f'model_checkpoint_path: "model.ckpt-{STEPS}"\n', encoding="utf-8")
    write_hparams(folder, hparams)


def write_hparams(folder: Path, hparams) -> None:
    """As tensor2tensor's trainer writes them, without what is no plain value."""
    plain = {name: value for name, value in hparams.values().items() if name not in ("modality", "problem_hparams")}
    (folder / "hparams.json").write_text(json.dumps(plain, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def pad(sequences) -> np.ndarray:
    longest = max(map(len, sequences))
    return np.array([[*ids, *[0] * (longest - len(ids))] for ids in sequences])[:, :, None, None]


def build(hparams, mode):
    """A model under the names that it has in a graph of its own."""
    return transformer.Transformer(hparams, mode, hparams.problem_hparams, _scope="transformer", _reuse=tf.AUTO_REUSE)


def build_search(hparams, features: dict, room: tf.Tensor, beams: int) -> dict:
    """Ids and sums of log-probabilities of the best hypotheses of a search without length penalty; one beam is greedy."""
    model = build(hparams, tf.estimator.ModeKeys.PREDICT)
    sources = {name: features[name] for name in ("inputs", "target_space_id")}
    found = model.infer(sources, decode_length=room, beam_size=beams, top_beams=beams, alpha=0.0)
    if beams > 1:
        return {"outputs": found["outputs"][0], "scores": found["scores"][0]}
    ids = found["outputs"][:, :, 0, 0]
    log_probs = tf.nn.log_softmax(found["logits"][:, :, 0, 0])
    return {"outputs": ids, "scores": tf.reduce_sum(tf.gather(log_probs, ids, batch_dims=2), axis=1)}


def answers(session, hparams, features: dict, encoders: list, data: Path) -> list[dict]:
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        logits, _ = build(hparams, tf.estimator.ModeKeys.EVAL)(dict(features))
        log_probs = tf.nn.log_softmax(logits[0, :, 0, 0])
        room = tf.placeholder(tf.int32, [])  # beyond the length of the source
        searches = {f"beam_{beams}": build_search(hparams, features, room, beams) for beams in (1, 4)}
    sentences = []
    for pair in read_pairs(data, "test")[::7]:
        source, target = encode(encoders, pair)
        if max(len(source), len(target)) > LONGEST:
            continue
        feed = {features["inputs"]: pad([source]), features["targets"]: pad([target])}
        found = session.run({"log_probs": log_probs, **searches}, {**feed, room: LONGEST_OUTPUT - len(source)})
        sentences.append(
            {
                "source": pair[0],
                "target": pair[1],
                "source_ids": source,
                "target_ids": [0, *target],
                "log_probs": found["log_probs"][range(len(target)), target].tolist(),
                **{name: hypotheses(**found[name], encoder=encoders[1]) for name in searches},
            }
        )
        if len(sentences) == SENTENCES:
            break
    return sentences


def hypotheses(outputs: np.ndarray, scores: np.ndarray, encoder) -> list[dict]:
    """Hypotheses of a search, best first: ids with the end token, sum of log-probabilities, text. Where fewer have ended
    than there are beams, tensor2tensor fills up with others whose score stands for minus infinity; they are left out."""
    result = []
    for ids, score in zip(outputs.tolist(), scores.tolist()):
        if score <= -beam_search.INF:
            continue
        ids = ids[: ids.index(text_encoder.EOS_ID) + 1] if text_encoder.EOS_ID in ids else ids
        text = encoder.decode([i for i in ids if i != text_encoder.EOS_ID])
        result.append({"ids": ids, "score": score, "text": text})
    return result


def read_pairs(data: Path, part: str) -> list[tuple[str, str]]:
    lines = [(data / f"{part}.{language}").read_text(encoding="utf-8").split("\n") for language in ("en", "de")]
    return [(source, target) for source, target in zip(*lines) if source and target]


if __name__ == "__main__":
    main()
