"""The reader of TensorFlow's checkpoints, on files that TensorFlow wrote."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relpos.conversion.files import ConversionError
from relpos.conversion.tensorflow_checkpoint import TensorFlowCheckpoint, crc32c, find_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def types():
    """A checkpoint of two data files, with a tensor of every type; made by make_fixtures_tensor2tensor.py."""
    return FIXTURES / "tensor2tensor" / "types"


@pytest.fixture
def copy(types, tmp_path):
    shutil.copytree(types, tmp_path, dirs_exist_ok=True)
    return tmp_path


def read_all(checkpoint):
    return {name: checkpoint[name] for name in checkpoint if name != "sliced"}


class TestReading:
    def test_every_type(self, types):
        checkpoint = TensorFlowCheckpoint(types / "types")
        values = json.loads((types / "values.json").read_text(encoding="utf-8"))
        assert values.keys() | {"sliced"} == set(checkpoint)
        for name, value in values.items():
            tensor = checkpoint[name]
            assert tensor.dtype == (torch.float32 if name in ("scalar", "empty") else getattr(torch, name))
            assert list(tensor.shape) == list(checkpoint.shape(name))
            assert tensor.double().tolist() == value

    def test_strings_are_left_out(self, types):
        assert "text" not in TensorFlowCheckpoint(types / "types")
        with pytest.raises(KeyError):
            TensorFlowCheckpoint(types / "types")["text"]

    def test_slices_are_refused(self, types):
        with pytest.raises(ConversionError, match=r"sliced .* is saved in slices"):
            TensorFlowCheckpoint(types / "types")["sliced"]

    def test_a_table_of_several_blocks(self):
        folder = FIXTURES / "opennmt_tf" / "separate_bpe" / "run"
        assert (folder / "ckpt-800.index").stat().st_size > 2 * 4096  # the size of a block
        checkpoint = TensorFlowCheckpoint(folder / "ckpt-800")
        name = "model/decoder/layers/{}/self_attention/layer/relative_position_keys/.ATTRIBUTES/VARIABLE_VALUE"
        first, second = (checkpoint[name.format(layer)] for layer in (0, 1))
        assert first.shape == second.shape == (9, 8)
        assert not torch.equal(first, second)


class TestFaults:
    def test_every_byte_of_the_table_counts(self, copy):
        path = copy / "types.index"
        content = path.read_bytes()
        covered = 0
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            try:
                TensorFlowCheckpoint(copy / "types")
            except ConversionError:
                covered += 1
        assert covered >= len(content) - 40  # the footer is filled up with zeros, which do not matter

    @pytest.mark.parametrize("kept", [0, 1, 47, 48, -1, -9])
    def test_a_table_that_is_cut_off(self, copy, kept):
        path = copy / "types.index"
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(ConversionError, match=r"types\.index is (cut off|damaged)"):
            TensorFlowCheckpoint(copy / "types")

    def test_a_missing_data_file(self, copy):
        (copy / "types.data-00001-of-00002").unlink()
        checkpoint = TensorFlowCheckpoint(copy / "types")
        with pytest.raises(ConversionError, match=r"types\.data-00001-of-00002 cannot be read: No such file"):
            read_all(checkpoint)

    def test_a_data_file_that_is_cut_off(self, copy):
        path = copy / "types.data-00000-of-00002"
        path.write_bytes(path.read_bytes()[:5])
        checkpoint = TensorFlowCheckpoint(copy / "types")
        with pytest.raises(ConversionError, match="data-00000-of-00002 is cut off: it ends within"):
            read_all(checkpoint)

    def test_a_damaged_data_file(self, copy):
        path = copy / "types.data-00000-of-00002"
        content = bytearray(path.read_bytes())
        content[3] ^= 1
        path.write_bytes(content)
        checkpoint = TensorFlowCheckpoint(copy / "types")
        with pytest.raises(ConversionError, match=r"data-00000-of-00002 is damaged: .* does not match its checksum"):
            read_all(checkpoint)


class TestFinding:
    def checkpoints(self, folder, *steps):
        for step in steps:
            (folder / f"ckpt-{step}.index").touch()

    def test_by_prefix_and_by_file(self, tmp_path):
        self.checkpoints(tmp_path, 1)
        for name in ("ckpt-1", "ckpt-1.index", "ckpt-1.meta", "ckpt-1.data-00000-of-00001"):
            assert find_checkpoint(tmp_path / name) == tmp_path / "ckpt-1"

    def test_the_latest_of_a_folder_wherever_it_was(self, tmp_path):
        self.checkpoints(tmp_path, 1, 20, 3)
        (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/ckpt-20"\nall_model...: "ckpt-3"\n')
        assert find_checkpoint(tmp_path) == tmp_path / "ckpt-20"

    def test_the_only_one_of_a_folder(self, tmp_path):
        self.checkpoints(tmp_path, 7)
        (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-9"\n')
        assert find_checkpoint(tmp_path) == tmp_path / "ckpt-7"

    def test_none_several_and_missing(self, tmp_path):
        with pytest.raises(ConversionError, match="holds no checkpoint"):
            find_checkpoint(tmp_path)
        self.checkpoints(tmp_path, 1, 2)
        with pytest.raises(ConversionError, match="holds the checkpoints ckpt-1, ckpt-2; name the one"):
            find_checkpoint(tmp_path)
        with pytest.raises(ConversionError, match=r"the file ckpt-3\.index is missing"):
            find_checkpoint(tmp_path / "ckpt-3")


class TestChecksum:
    @pytest.mark.parametrize(
        ("data", "checksum"),
        [  # RFC 3720, appendix B.4
            (bytes(32), 0x8A9136AA),
            (b"\xff" * 32, 0x62A8AB43),
            (bytes(range(32)), 0x46DD794E),
            (bytes(range(31, -1, -1)), 0x113FDB5C),
            (b"", 0),
        ],
    )
    def test_known_values(self, data, checksum):
        assert crc32c(data) == checksum

    @given(st.binary(max_size=2000))
    def test_against_the_division_bit_by_bit(self, data):
        assert crc32c(data) == crc32c(np.frombuffer(data, dtype=np.uint8)) == divide(data)


def divide(data):
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum ^= byte
        for _ in range(8):
            checksum = checksum >> 1 ^ (0x82F63B78 if checksum & 1 else 0)
    return checksum ^ 0xFFFFFFFF
