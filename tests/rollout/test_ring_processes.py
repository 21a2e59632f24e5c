"""Two real processes: different interpreters, and writers that are killed at random moments."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxprorl.errors import RingFullError
from jaxprorl.rollout import ring
from jaxprorl.rollout.records import SCHEMA, Finished, Ready, Record, Request, Stop, Swap, Swapped, decode, encode
from jaxprorl.rollout.ring import RingReader, RingWriter, State, format_ring, status
from jaxprorl.rollout.segments import SHARED_MEMORY, Segment, create
from jaxprorl.rollout.weights_segment import SCHEMA as WEIGHTS_SCHEMA
from jaxprorl.rollout.weights_segment import WeightWriter, lay_out, segment_bytes
from tests.rollout.ring_peer import digest, payload

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / "tests/rollout/ring_peer.py"
DEADLINE_S = 60.0


def peer(*arguments: object, python: Path | str = sys.executable) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([python, PEER, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True)


def ring_segment(run_folder: Path, role: str, capacity_bytes: int) -> Segment:
    segment = create(SHARED_MEMORY, run_folder, role, 0, ring.segment_bytes(capacity_bytes))
    format_ring(segment.buffer)
    return segment


def next_record(reader: RingReader) -> Record:
    data = reader.read(DEADLINE_S)
    assert data is not None
    return decode(data)


@pytest.mark.slow
def test_two_interpreters_with_different_numpys_understand_each_other(run_folder: Path, reference_python: Path) -> None:
    specs = lay_out([("embed", (33, 17), "bfloat16"), ("norm", (17,), "float32")])
    noise = np.random.RandomState(0)
    with (
        ring_segment(run_folder, "commands", 10_000) as commands,
        ring_segment(run_folder, "completions", 10_000) as completions,
        create(SHARED_MEMORY, run_folder, "weights", 0, segment_bytes(specs)) as weights,
    ):
        writer, reader, tensors = RingWriter(commands.buffer), RingReader(completions.buffer), WeightWriter(weights.buffer, specs)
        with peer("answer", commands.path, completions.path, weights.path, python=reference_python) as worker:
            ready = next_record(reader)
            assert isinstance(ready, Ready)
            assert (ready.ring_schema, ready.weights_schema) == (ring.SCHEMA, WEIGHTS_SCHEMA)
            theirs = dict(line.split("=", 1) for line in ready.versions.splitlines())
            assert theirs["records"] == str(SCHEMA) and theirs["foreign"] == "[]"
            # Compatibility is only tested if the two differ: numpy always, Python wherever the trainer's is 3.12 or newer.
            assert theirs["numpy"] != np.__version__ and theirs["python"].startswith("3.11.")

            for segment in (commands, completions, weights):  # the other side has attached: no name is needed any more
                segment.unlink()
            for version in (1, 2, 3):
                arrays = [noise.standard_normal(s.shape).astype(ml_dtypes.bfloat16 if s.dtype == "bfloat16" else s.dtype) for s in specs]
                tensors.begin(version)
                for spec, array in zip(specs, arrays, strict=True):
                    tensors.put(spec.name, array)
                tensors.finish()
                writer.write(encode(Swap(version)), DEADLINE_S)
                swapped = next_record(reader)
                assert isinstance(swapped, Swapped) and swapped.version == version and swapped.seconds > 0
                assert swapped.loaded_bytes == sum(array.nbytes for array in arrays)
                weights_digest = digest([(spec.name, spec.dtype, array) for spec, array in zip(specs, arrays, strict=True)])

                prompts = [noise.randint(0, 150_000, noise.randint(1, 600)).astype(np.int32) for _ in range(150)]
                answered = 0
                for number, ids in enumerate(prompts):
                    request = Request(number, version, 10 * number, 3, ids, 1.2, 0, 1.0, -number, 600, np.array([7], np.int32))
                    while True:
                        try:
                            writer.write(encode(request), 0.01)
                            break
                        except RingFullError:  # both rings are full: this side must read
                            answered += check_answer(next_record(reader), prompts, version, weights_digest)
                while answered < len(prompts):
                    answered += check_answer(next_record(reader), prompts, version, weights_digest)
                assert answered == len(prompts)
            assert status(completions.buffer).state is State.READY
            writer.write(encode(Stop()), DEADLINE_S)
            assert worker.wait(DEADLINE_S) == 0
        assert reader.read() is None and status(completions.buffer).state is State.CLOSED
        assert status(completions.buffer).records_read == 1 + 3 * (150 + 1)


def check_answer(record: Record, prompts: list[np.ndarray], attempt: int, weights_digest: int) -> int:
    assert isinstance(record, Finished) and record.attempt == attempt
    completion = record.completion()
    assert (completion.prompt_id, completion.sample) == (10 * record.request, 3)
    ids = prompts[record.request]
    np.testing.assert_array_equal(completion.token_ids, ids[::-1])
    np.testing.assert_array_equal(completion.logprobs, (-0.5 * ids[::-1]).astype(np.float32))
    assert completion.version_spans == ((weights_digest, 0, len(ids)),)
    return 1


def soak(run_folder: Path, kills: int, seed: int) -> tuple[int, int]:
    """Kills `kills` writers at random moments and checks each ring; returns how many died inside a record, and the records read."""
    moments, torn, records = random.Random(seed), 0, 0
    for kill in range(kills):
        acknowledged = run_folder / f"acknowledged_{kill}"
        with ring_segment(run_folder, "completions", moments.choice([20_100, 50_000, 1_000_000])) as segment:
            reader, delivered = RingReader(segment.buffer), []
            with peer("pour", segment.path, acknowledged) as writer:
                if moments.random() < 0.9:  # else it may die before its first record, even before it has attached
                    delivered.append(reader.read(DEADLINE_S))
                deadline = time.monotonic() + moments.uniform(0.0, 0.05)
                while time.monotonic() < deadline:
                    delivered.append(reader.read(0.001))
                writer.send_signal(signal.SIGKILL)
                assert writer.wait() == -signal.SIGKILL
            delivered = [data for data in delivered if data is not None]
            assert not status(segment.buffer).writer_alive
            while (data := reader.read()) is not None:
                delivered.append(data)
            # Everything that was acknowledged, at most one record more (killed between commit and acknowledgement), each once, in order.
            count = acknowledged.stat().st_size if acknowledged.exists() else 0
            assert count <= len(delivered) <= count + 1
            assert all(data == payload(number) for number, data in enumerate(delivered))
            torn += status(segment.buffer).unfinished_bytes > 0
            records += len(delivered)
    return torn, records


@pytest.mark.slow
def test_of_killed_writers_every_committed_record_is_delivered_once_and_nothing_else(run_folder: Path) -> None:
    soak(run_folder, kills=25, seed=0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_killed_writers(run_folder: Path) -> None:
    torn, records = soak(run_folder, kills=500, seed=1)
    assert torn > 0, f"none of 500 writers died inside a record ({records} records): the soak proves less than it should"


@pytest.mark.slow
def test_a_killed_reader_is_noticed(run_folder: Path) -> None:
    with ring_segment(run_folder, "commands", 64) as segment:
        writer = RingWriter(segment.buffer)
        with peer("take", segment.path) as reader:
            writer.write(b"one", 0.0)
            assert reader.stdout and reader.stdout.readline() == "taken\n"
            assert status(segment.buffer).reader_alive
            reader.send_signal(signal.SIGKILL)
            reader.wait()
        writer.write(b"two", 0.0)
        writer.write(b"three", 0.0)
        assert not status(segment.buffer).reader_alive
        with pytest.raises(RingFullError, match=rf"process {reader.pid} \(not running\) has read 1 of 3 records"):
            writer.write(b"four", 0.0)
