"""Trains two tiny models in OpenNMT-py and records its answers; runs in an environment that has OpenNMT-py, not RelPos.

    python make_fixtures_opennmt_py.py DATA OUT

DATA holds train.en, train.de, test.en and test.de (the bundled corpus, as test_peers.py writes it). OUT gets a
folder per model with the checkpoint, the subword models and answers.json. Each training takes about a minute. The
environment: OpenNMT-py==3.5.1 without its dependencies, torch==2.13.0, and what ENVIRONMENTS in that test names.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import yaml

STEPS = 800
SENTENCES = 50
LONGEST = 40  # tokens; the answers stay small
COMMON = {
    "share_vocab": False,
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "layers": 2,
    "hidden_size": 64,
    "word_vec_size": 64,
    "transformer_ff": 128,
    "heads": 4,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "position_encoding": False,
    "max_relative_positions": 6,
    "optim": "adam",
    "adam_beta2": 0.998,
    "learning_rate": 0.08,
    "decay_method": "rsqrt",
    "warmup_steps": 300,
    "normalization": "tokens",
    "batch_type": "tokens",
    "batch_size": 700,
    "bucket_size": 8192,
    "num_workers": 0,
    "train_steps": STEPS,
    "save_checkpoint_steps": STEPS,
    "valid_steps": 100000,
    "report_every": 100,
    "param_init": 0,
    "param_init_glorot": True,
    "seed": 1,
    "world_size": 1,
    "gpu_ranks": [],
}
MODELS = {
    # one vocabulary, one embedding table, SentencePiece pieces, biases in the attention
    "shared_sentencepiece": {
        "transforms": ["sentencepiece"],
        "share_vocab": True,
        "share_embeddings": True,
        "share_decoder_embeddings": True,
        "add_qkvbias": True,
    },
    # two vocabularies, three tables, subword-nmt BPE, other activation and epsilon
    "separate_bpe": {
        "transforms": ["bpe"],
        "pos_ffn_activation_fn": "gelu",
        "norm_eps": 1e-5,
        "enc_layers": 1,
        "dec_layers": 2,
        "layers": -1,
    },
}


def main() -> None:
    data, out = (Path(argument).resolve() for argument in sys.argv[1:])
    torch.serialization.add_safe_globals([argparse.Namespace])
    for name, options in MODELS.items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        subwords = train_subwords(data, folder, options["transforms"][0])
        checkpoint = folder / "model.pt"
        if not checkpoint.is_file():
            train(data, folder, {**COMMON, **options, **subwords})
        (folder / "answers.json").write_text(json.dumps(answers(checkpoint, data, subwords)), encoding="utf-8")


def train_subwords(data: Path, folder: Path, kind: str) -> dict:
    """Subword models of both sides; the options that name them."""
    if kind == "sentencepiece":
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            input=[str(data / "train.en"), str(data / "train.de")],
            model_prefix=str(folder / "subwords"),
            vocab_size=800,
            minloglevel=2,
        )
        path = str(folder / "subwords.model")
        return {"src_subword_model": path, "tgt_subword_model": path}
    paths = {}
    for side, language in (("src", "en"), ("tgt", "de")):
        path = folder / f"codes.{language}"
        command = ["subword-nmt", "learn-bpe", "-s", "500", "-i", data / f"train.{language}", "-o", path]
        subprocess.run([Path(sys.executable).parent / command[0], *command[1:]], check=True, stderr=subprocess.DEVNULL)
        paths[f"{side}_subword_model"] = str(path)
    return paths


def train(data: Path, folder: Path, options: dict) -> None:
    """Build the vocabularies, train, and keep the checkpoint without the moments of Adam, which are two thirds of it."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    options = {**options, "save_data": str(work), "save_model": str(work / "model"), "overwrite": True}
    options |= {"src_vocab": str(work / "src.vocab"), "tgt_vocab": str(work / "tgt.vocab")}
    corpus = {"path_src": str(data / "train.en"), "path_tgt": str(data / "train.de")}
    options["data"] = {"corpus": {**corpus, "transforms": options["transforms"]}}
    config = work / "config.yaml"
    config.write_text(yaml.safe_dump(options), encoding="utf-8")
    tools = Path(sys.executable).parent
    subprocess.run([tools / "onmt_build_vocab", "-config", config, "-n_sample", "-1"], check=True)
    subprocess.run([tools / "onmt_train", "-config", config], check=True)
    checkpoint = torch.load(work / f"model_step_{STEPS}.pt", weights_only=True)
    checkpoint["optim"]["optimizer"]["state"] = {}
    forget_paths(checkpoint["opt"])
    torch.save(checkpoint, folder / "model.pt")


def forget_paths(options: argparse.Namespace) -> None:
    """Leave the names of files, but not where they were on the machine that trained."""
    for name, value in vars(options).items():
        if isinstance(value, str) and value.startswith("/"):
            setattr(options, name, Path(value).name)
    for corpus in options.data.values():
        for name, value in corpus.items():
            if isinstance(value, str) and value.startswith("/"):
                corpus[name] = Path(value).name


def answers(checkpoint: Path, data: Path, subwords: dict) -> dict:
    """What OpenNMT-py says on real sentences: tokens, ids, teacher-forced log-probabilities, greedy and beam outputs."""
    from onmt.inference_engine import InferenceEnginePY  # noqa: F401 (registers the transforms)
    from onmt.transforms import get_transforms_cls, make_transforms
    from onmt.translate.translator import build_translator

    translators = {
        beams: build_translator(translate_options(checkpoint, beams), report_score=False) for beams in (1, 4)
    }
    translator = translators[1]
    model, vocabs = translator.model, translator.vocabs
    options = torch.load(checkpoint, weights_only=True)["opt"]
    for name, value in subwords.items():
        setattr(options, name, value)
    kind = options.transforms[0]
    transform = make_transforms(options, get_transforms_cls([kind]), vocabs)[kind]
    sentences = []
    for source, target in read_pairs(data):
        example = transform.apply({"src": source.split(" "), "tgt": target.split(" ")})
        if max(len(example["src"]), len(example["tgt"])) > LONGEST:
            continue
        source_ids = vocabs["src"](example["src"])
        target_ids = vocabs["tgt"]([vocabs["decoder_start_token"], *example["tgt"], "</s>"])
        sentences.append(
            {
                "source": source,
                "target": target,
                "source_tokens": example["src"],
                "source_ids": source_ids,
                "target_ids": target_ids,
                "log_probs": teacher_forced(model, source_ids, target_ids),
                **{f"beam_{beams}": search(translators[beams], transform, source_ids) for beams in translators},
            }
        )
        if len(sentences) == SENTENCES:
            break
    return {"toolkit": "OpenNMT-py 3.5.1", "sentences": sentences}


def read_pairs(data: Path):
    lines = [(data / f"test.{language}").read_text(encoding="utf-8").split("\n") for language in ("en", "de")]
    return [(source, target) for source, target in zip(*lines) if source and target][::7]


def translate_options(checkpoint: Path, beams: int) -> argparse.Namespace:
    from onmt import opts
    from onmt.utils.parse import ArgumentParser

    parser = ArgumentParser()
    opts.translate_opts(parser)
    arguments = ["-model", str(checkpoint), "-src", "none", "-beam_size", str(beams), "-n_best", str(beams)]
    options = parser.parse_args([*arguments, "-length_penalty", "none", "-max_length", "100", "-max_length_ratio", "0"])
    ArgumentParser.validate_translate_opts(options)
    return options


@torch.no_grad()
def teacher_forced(model, source_ids: list[int], target_ids: list[int]) -> list[float]:
    """Log-probability of every target token given the ones before it."""
    source = torch.tensor(source_ids)[None, :, None]
    target = torch.tensor(target_ids)[None, :, None]
    hidden, _ = model(source, target, torch.tensor([len(source_ids)]))
    log_probs = model.generator(hidden[0]).log_softmax(-1)
    return log_probs.gather(1, target[0, 1:]).squeeze(1).tolist()


def search(translator, transform, source_ids: list[int]) -> list[dict]:
    """Hypotheses of the search, best first: ids without the start token, sum of log-probabilities, text."""
    batch = {
        "src": torch.tensor(source_ids)[None, :, None],
        "srclen": torch.tensor([len(source_ids)]),
        "ind_in_bucket": torch.tensor([0]),
    }
    result = translator.translate_batch(batch, attn_debug=False)
    eos, tokens = translator._tgt_eos_idx, translator.vocabs["tgt"].ids_to_tokens
    hypotheses = []
    for ids, score in zip(result["predictions"][0], result["scores"][0], strict=True):
        ids = ids.tolist()
        ids = ids[: ids.index(eos) + 1] if eos in ids else ids
        pieces = [tokens[i] for i in ids if i != eos]
        hypotheses.append({"ids": ids, "score": float(score), "text": transform.apply_reverse(pieces)})
    return hypotheses


if __name__ == "__main__":
    main()
