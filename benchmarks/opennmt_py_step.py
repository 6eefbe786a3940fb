"""The training step of OpenNMT-py, for `training.py --opennmt-py PYTHON`; PYTHON is an interpreter that has OpenNMT-py 3.5.1.

    PYTHON benchmarks/opennmt_py_step.py SIZE BATCH LENGTH

Writes a line when it is ready, and runs one step, of the parts that OpenNMT-py's own Trainer runs, for each line it reads.
"""

import json
import os
import sys

import torch
from onmt.constants import ModelTask
from onmt.inputters.inputter import dict_to_vocabs
from onmt.model_builder import build_model
from onmt.opts import train_opts
from onmt.utils.loss import LossCompute
from onmt.utils.optimizers import Optimizer
from onmt.utils.parse import ArgumentParser

SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]


def options_of(size: dict) -> object:
    """Its options for a Transformer with the sizes of models.py, and all else as there: pre-norm, tied tables, dropout 0.1."""
    parser = ArgumentParser()
    train_opts(parser)
    flags = {
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_layers": size["layers"],
        "dec_layers": size["layers"],
        "hidden_size": size["d_model"],
        "word_vec_size": size["d_model"],
        "heads": size["heads"],
        "transformer_ff": size["ffn"],
        "max_relative_positions": size["k"],
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "optim": "adam",
        "learning_rate": 1e-4,
        "max_grad_norm": 0,
        "param_init": 0,
        "save_model": os.devnull,
        "data": "{}",
    }
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    switches = ["--share_embeddings", "--share_decoder_embeddings", "--param_init_glorot"]
    options = parser.parse_args(["--src_vocab", os.devnull, *arguments, *switches])
    ArgumentParser.update_model_opts(options)
    options.model_task = ModelTask.SEQ2SEQ
    return options


def main() -> None:
    size, batch, length = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    options = options_of(size)
    tokens = SPECIALS + [f"t{number}" for number in range(size["vocabulary"] - len(SPECIALS))]
    vocabularies = dict_to_vocabs({"src": tokens, "tgt": tokens, "data_task": "seq2seq", "decoder_start_token": "<s>"})
    model = build_model(options, options, vocabularies, None, -1).train()
    loss_of = LossCompute.from_opts(options, model, vocabularies["tgt"])
    optimizer = Optimizer.from_opt(model, options)

    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(4, size["vocabulary"], (batch, length), generator=generator) for _ in range(2))
    start = torch.full((batch, 1), tokens.index("<s>"))
    padding = tokens.index("<blank>")
    source[: batch // 4, length // 2 :] = padding
    target[: batch // 4, length // 2 :] = padding
    lengths = source.ne(padding).sum(1)
    data = {"src": source[..., None], "srclen": lengths, "tgt": torch.cat([start, target], 1)[..., None]}
    data |= {"tgtlen": lengths + 1}
    torch.ones(2**25 - 2**12, dtype=torch.uint8)  # the allocator as `measure.settle_allocator` leaves it
    print(f"ready, {sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    for _ in sys.stdin:
        optimizer.zero_grad(set_to_none=True)
        output, attentions = model(data["src"], data["tgt"], data["srclen"])
        loss, _ = loss_of(data, output, attentions)
        optimizer.backward(loss / lengths.sum())
        optimizer.step()
        print("done", flush=True)


if __name__ == "__main__":
    main()
