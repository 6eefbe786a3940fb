"""A Hub of their own for the tests of this folder."""

import importlib.util
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

_spec = importlib.util.spec_from_file_location("loopback_hub", Path(__file__).with_name("loopback_hub.py"))
loopback_hub = sys.modules["loopback_hub"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(loopback_hub)


@pytest.fixture
def hub():
    """A Hub on the loopback address, with the users anna and ben and their tokens."""
    with loopback_hub.loopback_hub(hf_of_anna="anna", hf_of_ben="ben") as running:
        yield running


@pytest.fixture
def client(hub, monkeypatch):
    """A function that makes the real client of this Hub for a token; it waits for nothing between its retries."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # else that of an earlier test, with its address
    return lambda token="hf_of_anna": HfApi(endpoint=hub.url, token=token)
