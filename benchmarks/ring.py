"""What the rollout ring carries between two processes, and what a version of weights costs.

python benchmarks/ring.py [PYTHON_OF_THE_WRITER]     (default: this one; a worker's is .venv-vllm/bin/python)

`bytes` rows move records as they are; `completions` rows encode, move and decode completions of 8 bytes per token. Each row is the best of
three: other work on the machine only ever takes away.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from jaxprorl.rollout.records import Finished, decode, encode
from jaxprorl.rollout.ring import RingReader, RingWriter, format_ring
from jaxprorl.rollout.ring import segment_bytes as ring_bytes
from jaxprorl.rollout.segments import attach, choose_folder, create
from jaxprorl.rollout.weights_segment import WeightReader, WeightWriter, lay_out, segment_bytes

CAPACITY_BYTES = 8 << 20
DEADLINE_S = 60.0
SIZES = ((1 << 10, 100_000), (64 << 10, 10_000), (1 << 20, 1_000))  # payload bytes, records


def completion(payload_bytes: int) -> Finished:
    """A completion of about that many bytes."""
    tokens = payload_bytes // 8
    spans = np.array([[0, 0, tokens]], np.int64)
    return Finished(0, 0, 0, 0, np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), "stop", spans)


def write(path: str, kind: str, payload_bytes: int, count: int) -> None:
    """The writing process."""
    writer = RingWriter(attach(Path(path)).buffer)
    payload, record = bytes(payload_bytes), completion(payload_bytes)
    for _ in range(count):
        writer.write(encode(record) if kind == "completions" else payload, DEADLINE_S)


def read_s(python: str, kind: str, payload_bytes: int, count: int) -> float:
    """Seconds from the first record to the last."""
    take: Callable[[bytes], object] = decode if kind == "completions" else len
    with tempfile.TemporaryDirectory() as run, create(choose_folder(Path(run), 2 * CAPACITY_BYTES)[0], Path(run), "bench", 0,
                                                     ring_bytes(CAPACITY_BYTES)) as segment:  # fmt: skip
        format_ring(segment.buffer)
        reader = RingReader(segment.buffer)
        with subprocess.Popen([python, __file__, "write", segment.path, kind, str(payload_bytes), str(count)]):
            started_s = 0.0
            for i in range(count):
                data = reader.read(DEADLINE_S)
                assert data is not None
                take(data)
                started_s = started_s if i else time.perf_counter()
            return time.perf_counter() - started_s


def weights_s() -> tuple[float, float, float]:
    """Gigabytes of a version, seconds to fill a buffer with it, and to read every byte of it."""
    specs = lay_out([(f"layer.{i}", (1024, 8192), "bfloat16") for i in range(32)])
    array = np.ones((1024, 8192), np.uint16)
    fill_s, use_s = [], []
    with tempfile.TemporaryDirectory() as run, create(choose_folder(Path(run), segment_bytes(specs))[0], Path(run), "bench", 0,
                                                     segment_bytes(specs)) as segment:  # fmt: skip
        writer, reader = WeightWriter(segment.buffer, specs), WeightReader(segment.buffer)
        for version in range(4):
            started_s = time.perf_counter()
            writer.begin(version)
            for spec in specs:
                writer.put(spec.name, array)
            writer.finish()
            fill_s.append(time.perf_counter() - started_s)
            started_s = time.perf_counter()
            with reader.version(version) as tensors:
                for tensor in tensors:
                    tensor.array.max()
            use_s.append(time.perf_counter() - started_s)
    return sum(spec.size_bytes for spec in specs) / 1e9, min(fill_s), min(use_s)


def main(argv: list[str]) -> None:
    """Prints one line per kind and size of record, and one for the weights."""
    if argv[:1] == ["write"]:
        return write(argv[1], argv[2], int(argv[3]), int(argv[4]))
    python = argv[0] if argv else sys.executable
    for kind in ("bytes", "completions"):
        for payload_bytes, count in SIZES:
            seconds = min(read_s(python, kind, payload_bytes, count) for _ in range(3))
            rate = (count - 1) / seconds
            print(f"{kind} of {payload_bytes >> 10} KiB: {rate:,.0f} records/s, {rate * payload_bytes / 1e6:,.0f} MB/s")
    size, fill_s, use_s = weights_s()
    print(f"weights of {size:.2f} GB: filled in {fill_s:.2f} s, read in {use_s:.2f} s")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
