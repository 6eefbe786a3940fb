"""What all tests share: few threads, since pytest runs several processes, and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("relpos", deadline=None, derandomize=True)
settings.load_profile("relpos")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
