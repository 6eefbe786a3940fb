"""Reads the weights of TensorFlow checkpoints (version 2 of the format) without TensorFlow.

A checkpoint `PREFIX` is the table `PREFIX.index`, which says for every tensor its type, shape and place, and the data files
`PREFIX.data-00000-of-00001` and so on. The table is one of LevelDB (blocks of sorted keys with shared prefixes, and a
footer), its values are protocol buffers of `tensorflow/core/protobuf/tensor_bundle.proto`, and all is guarded by CRC-32C.
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .files import ConversionError

_MAGIC = 0xDB4775248B80FB57
_FOOTER_SIZE = 48
_BLOCK_TRAILER = struct.Struct("<BI")  # how the block is compressed, and its masked checksum
_UNCOMPRESSED = 0
_LITTLE_ENDIAN = 0
# By TensorFlow's enumeration (types.proto); the types that weights can have.
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}


@dataclass(frozen=True)
class _Entry:
    """What the table says of a tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    is_sliced: bool


class TensorFlowCheckpoint(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name, read when they are asked for. Strings, such as the graph of objects that
    TensorFlow 2 adds, are left out.

    Args:
        prefix: Path of the checkpoint without `.index`.

    Raises:
        ConversionError: A file is missing, cut off, damaged, or of another format. Reading a tensor may raise it too.
    """

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self._index = prefix.with_name(prefix.name + ".index")
        records = dict(_read_table(self._index))
        try:
            header = dict(_fields(records.pop(b"")))
            self._shards = header.get(1, 0)
            if header.get(2, _LITTLE_ENDIAN) != _LITTLE_ENDIAN:
                raise ConversionError(
                    f"The checkpoint {prefix} was written on a big-endian machine; it must be saved anew."
                )
            # a key that begins with zero is that of a slice, whose tensor has an entry of its own
            entries = {key.decode(): _parse_entry(value) for key, value in records.items() if key[0]}
        except (KeyError, IndexError, UnicodeDecodeError, struct.error) as error:
            raise ConversionError(f"The table {self._index} is damaged, or not that of a checkpoint.") from error
        self._entries = {name: entry for name, entry in entries.items() if entry.dtype in _DTYPES}

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        if entry.is_sliced:
            raise ConversionError(f"The weight {name} of {self.prefix} is saved in slices, which must be joined first.")
        dtype = _DTYPES[entry.dtype]
        if entry.size != math.prod(entry.shape) * dtype.itemsize:
            raise ConversionError(
                f"The table {self._index} is damaged: {name} does not fill its shape {list(entry.shape)}."
            )
        data = self._read(name, entry)
        if not len(data):
            return torch.empty(entry.shape, dtype=dtype)
        return torch.from_numpy(data).view(dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the table alone."""
        return self._entries[name].shape

    def _read(self, name: str, entry: _Entry) -> np.ndarray:
        path = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self._shards:05d}")
        try:
            data = np.fromfile(path, dtype=np.uint8, count=entry.size, offset=entry.offset)
        except OSError as error:
            raise ConversionError(f"The data file {path} cannot be read: {error.strerror or error}.") from error
        if len(data) < entry.size:
            raise ConversionError(f"The data file {path} is cut off: it ends within {name}.")
        if mask_checksum(crc32c(data)) != entry.checksum:
            raise ConversionError(f"The data file {path} is damaged: {name} does not match its checksum.")
        return data


def find_checkpoint(source: Path) -> Path:
    """The prefix of a checkpoint that is named by itself, by one of its files, or by its folder.

    Of a folder it is the one that TensorFlow's file `checkpoint` calls the latest, or the only one.

    Raises:
        ConversionError: There is none, or there are several and no word which one counts.
    """
    if not source.is_dir():
        prefix = source.with_name(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", source.name))
        if not prefix.with_name(prefix.name + ".index").is_file():
            raise ConversionError(f"There is no checkpoint {source}: the file {prefix.name}.index is missing.")
        return prefix
    found = sorted(path.with_suffix("") for path in source.glob("*.index"))
    latest = _latest(source / "checkpoint")
    if latest in found:
        return latest
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConversionError(f"The folder {source} holds no checkpoint (a file that ends in .index).")
    names = ", ".join(path.name for path in found)
    raise ConversionError(f"The folder {source} holds the checkpoints {names}; name the one to convert.")


def plain_weight(path: str, tensor: torch.Tensor, parameters: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """A variable as PyTorch has it: dots for slashes, and kernels as [output, input].

    Args:
        path: The variable's name without what all names have in common.
        tensor: Its value.
        parameters: The toolkit's names of weights and biases, and PyTorch's.

    Returns:
        The one name with the one value.
    """
    module, _, parameter = path.replace("/", ".").rpartition(".")
    is_kernel = parameter == "kernel" and tensor.dim() == 2
    return {f"{module}.{parameters.get(parameter, parameter)}": tensor.t() if is_kernel else tensor}


def _latest(state: Path) -> Path | None:
    """The checkpoint that a `checkpoint` file points to, beside that file, wherever it once was."""
    if not state.is_file():
        return None
    match = re.search(
        r'^model_checkpoint_path: "(.*)"', state.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    return state.with_name(re.split(r"[/\\]", match[1])[-1]) if match else None


def _read_table(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a LevelDB table in order.

    Raises:
        ConversionError: The file is missing, no such table, cut off, damaged or compressed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConversionError(f"The table {path} cannot be read: {error.strerror}.") from error
    footer = data[-_FOOTER_SIZE:]
    if len(footer) < _FOOTER_SIZE or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ConversionError(f"The table {path} is cut off, or it is not the index of a TensorFlow checkpoint.")
    try:
        offset, size, position = _handle(footer, 0)
        _block(data, offset, size, path)  # of filters, which checkpoints do not use: only its checksum counts
        offset, size, _ = _handle(footer, position)
        for _, handle in _entries(_block(data, offset, size, path)):
            offset, size, _ = _handle(handle, 0)
            yield from _entries(_block(data, offset, size, path))
    except (IndexError, struct.error) as error:
        raise ConversionError(f"The table {path} is damaged.") from error


def _handle(data: bytes, position: int) -> tuple[int, int, int]:
    """Offset and size of a block, and the position behind its handle."""
    offset, position = _varint(data, position)
    size, position = _varint(data, position)
    return offset, size, position


def _block(data: bytes, offset: int, size: int, path: Path) -> bytes:
    """The contents of a block, whose checksum covers them and the byte that follows."""
    compression, checksum = _BLOCK_TRAILER.unpack_from(data, offset + size)
    if mask_checksum(crc32c(data[offset : offset + size + 1])) != checksum:
        raise ConversionError(f"The table {path} is damaged: a block of it does not match its checksum.")
    if compression != _UNCOMPRESSED:
        raise ConversionError(f"The table {path} is compressed, which TensorFlow's own checkpoints never are.")
    return data[offset : offset + size]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block. A key is written as what it shares with the one before, in number, and the rest."""
    [restarts] = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (restarts + 1)
    position, key = 0, b""
    while position < end:
        shared, position = _varint(block, position)
        rest, position = _varint(block, position)
        length, position = _varint(block, position)
        key = key[:shared] + block[position : position + rest]
        position += rest
        yield key, block[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the position behind it."""
    number, shift = 0, 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of the fields of a protocol buffer."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(message, position)
        elif kind == 2:
            length, position = _varint(message, position)
            value, position = message[position : position + length], position + length
        else:
            layout = {1: "<Q", 5: "<I"}.get(kind, "")
            value = struct.unpack_from(layout or "<I", message if layout else b"", position)[0]
            position += struct.calcsize(layout)
        yield tag >> 3, value


def _parse_entry(message: bytes) -> _Entry:
    """A `BundleEntryProto`; fields that are zero are not written."""
    values = list(_fields(message))
    single = dict(values)
    dimensions = [value for number, value in _fields(single.get(2, b"")) if number == 2]
    return _Entry(
        dtype=single.get(1, 0),
        shape=tuple(dict(_fields(dimension)).get(1, 0) for dimension in dimensions),
        shard=single.get(3, 0),
        offset=single.get(4, 0),
        size=single.get(5, 0),
        checksum=single.get(6, 0),
        is_sliced=any(number == 7 for number, _ in values),
    )


def _checksum_table() -> np.ndarray:
    """What each value of a byte does to a CRC-32C (reversed polynomial 0x82F63B78)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    return table


_CHECKSUM_TABLE = _checksum_table()


def crc32c(data: bytes | np.ndarray) -> int:
    """CRC-32C (Castagnoli) of bytes.

    Cut into as many lanes as they have bytes, which advance side by side in NumPy; since a CRC is linear, the lanes are
    then chained by what a lane's length of zero bytes does to the checksum of the lane before.
    """
    data = np.frombuffer(data, dtype=np.uint8)
    length = math.isqrt(len(data))
    lanes = len(data) // length if length else 0
    head = len(data) - lanes * length
    state = _advance(np.array([0xFFFFFFFF], dtype=np.uint32), data[:head, None])
    if lanes:
        states = np.zeros(lanes, dtype=np.uint32)
        states[0] = state[0]
        columns = np.ascontiguousarray(data[head:].reshape(lanes, length).T)  # ten times faster than strided ones
        states = _advance(states, columns)
        state = _chain(states, length)
    return int(state[0]) ^ 0xFFFFFFFF


def _advance(state: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """States [lanes] after bytes [steps, lanes]."""
    for column in columns:
        state = _CHECKSUM_TABLE[(state ^ column) & 0xFF] ^ (state >> 8)
    return state


def _chain(states: np.ndarray, length: int) -> np.ndarray:
    """The checksum [1] of lanes one after the other, from each lane's own [lanes]."""
    places = np.arange(256, dtype=np.uint32) << np.array([0, 8, 16, 24], dtype=np.uint32)[:, None]
    # what `length` zero bytes make of every byte at each of the four places of a state
    shifted = _advance(places.ravel(), np.zeros((length, 1), dtype=np.uint8)).reshape(4, 256).tolist()
    total, *others = states.tolist()
    for state in others:
        total = (
            shifted[0][total & 0xFF]
            ^ shifted[1][total >> 8 & 0xFF]
            ^ shifted[2][total >> 16 & 0xFF]
            ^ shifted[3][total >> 24]
            ^ state
        )
    return np.array([total], dtype=np.uint32)


def mask_checksum(checksum: int) -> int:
    """A CRC as LevelDB and TensorFlow store it, so that one over bytes that hold CRCs is none of a special kind."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


__all__ = ["TensorFlowCheckpoint", "crc32c", "find_checkpoint", "mask_checksum", "plain_weight"]
