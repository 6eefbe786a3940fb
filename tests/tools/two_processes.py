"""Run by torchrun in two processes: a training step in which each process has half of the batch, by DDP and by FSDP.

Argument: a folder with a saved model and `inputs.pt`; process 0 writes `ddp.pt` and `fsdp.pt`, the gradients, there.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSeq2SeqLM

import relpos  # noqa: F401 (registers the model)


def shard(model: torch.nn.Module) -> torch.nn.Module:
    for stack in (model.model.encoder, model.model.decoder):
        for layer in stack.layers:
            fully_shard(layer)
    return fully_shard(model)


def step(how: str, folder: Path) -> None:
    """DDP as it is by default, which fails on a parameter without a gradient; FSDP with each layer sharded."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model").train()
    wrapped = DistributedDataParallel(model) if how == "ddp" else shard(model)
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    items = inputs["labels"].ne(-100).sum()
    part = {name: value.chunk(size)[rank] for name, value in inputs.items()}
    for _ in range(2):  # DDP notices an unused parameter when the next step begins
        model.zero_grad()
        # both wrappers average over the processes, so that each counts its part of the sum `size` times
        (size * wrapped(**part, num_items_in_batch=items).loss).backward()
    gradients = {
        name: p.grad.full_tensor() if how == "fsdp" else p.grad.clone() for name, p in model.named_parameters()
    }
    if rank == 0:
        torch.save(gradients, folder / f"{how}.pt")


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for how in ("ddp", "fsdp"):
        step(how, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
