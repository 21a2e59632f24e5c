"""The other process of the tests, in any interpreter that has numpy: `python ring_peer.py pour|answer|take PATH...`."""

import itertools
import os
import platform
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from jaxprorl.rollout import ring
from jaxprorl.rollout.records import SCHEMA, Finished, Ready, Request, Stop, Swap, Swapped, decode, encode
from jaxprorl.rollout.ring import RingReader, RingWriter, State
from jaxprorl.rollout.segments import attach
from jaxprorl.rollout.weights_segment import SCHEMA as WEIGHTS_SCHEMA
from jaxprorl.rollout.weights_segment import WeightReader

DEADLINE_S = 60.0


def payload(number: int) -> bytes:
    """Record `number` of `pour`: every size from 0 to 20 kB, and no two alike."""
    return number.to_bytes(4, "little") * (number * 7919 % 5000)


def digest(tensors: list[tuple[str, str, np.ndarray]]) -> int:
    """Of names, types, shapes and bits."""
    value = 0
    for name, dtype, array in tensors:
        value = zlib.crc32(array.tobytes(), zlib.crc32(f"{name} {dtype} {array.shape}".encode(), value))
    return value


def pour(path: str, acknowledged: str) -> None:
    """Writes records without end; after each one is committed, a byte goes to the file `acknowledged`, which a kill does not undo."""
    file = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    writer = RingWriter(attach(Path(path)).buffer)
    for number in itertools.count():
        writer.write(payload(number), DEADLINE_S)
        os.write(file, b".")


def answer(commands: str, completions: str, weights: str) -> None:
    """A worker without an engine: its response is the prompt backwards, log-probs are minus half the ids.

    In place of a version the span holds a digest of the weights that were read last.
    """
    reader, writer = RingReader(attach(Path(commands)).buffer), RingWriter(attach(Path(completions)).buffer)
    tensors = WeightReader(attach(Path(weights)).buffer)
    foreign = sorted({"jax", "flax", "torch", "ml_collections"} & sys.modules.keys())
    versions = f"python={platform.python_version()}\nnumpy={np.__version__}\nrecords={SCHEMA}\nforeign={foreign}"
    writer.write(encode(Ready(ring.SCHEMA, WEIGHTS_SCHEMA, versions)), DEADLINE_S)
    writer.set_state(State.READY)
    held = 0
    while True:
        data = reader.read(DEADLINE_S)
        assert data is not None, "no command came"
        command = decode(data)
        if isinstance(command, Request):
            ids = command.token_ids[::-1].copy()
            logprobs = (-0.5 * ids).astype(np.float32)
            spans = np.array([[held, 0, len(ids)]], np.int64)
            record = Finished(command.request, command.attempt, command.prompt_id, command.sample, ids, logprobs, "stop", spans)
            writer.write(encode(record), DEADLINE_S)
        elif isinstance(command, Swap):
            began = time.perf_counter()
            with tensors.version(command.version) as found:
                held = digest([(tensor.name, tensor.dtype, tensor.array) for tensor in found])
                size = sum(tensor.array.nbytes for tensor in found)
            writer.write(encode(Swapped(command.version, time.perf_counter() - began, size)), DEADLINE_S)
        elif isinstance(command, Stop):
            writer.close()
            return


def take(path: str) -> None:
    """Reads one record, then sleeps."""
    reader = RingReader(attach(Path(path)).buffer)
    assert reader.read(DEADLINE_S) is not None
    print("taken", flush=True)
    time.sleep(DEADLINE_S)


if __name__ == "__main__":
    {"pour": pour, "answer": answer, "take": take}[sys.argv[1]](*sys.argv[2:])
