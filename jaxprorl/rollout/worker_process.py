"""A rollout worker seen from the trainer: its process, its two rings, and what it has to say."""

import dataclasses
import json
import os
import subprocess
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from jaxprorl.errors import EngineError, RingFullError, SharedMemoryError
from jaxprorl.rollout import ring, segments
from jaxprorl.rollout.records import Record, Stop, decode, encode
from jaxprorl.rollout.ring import RingReader, RingWriter
from jaxprorl.rollout.worker import Settings

# Read by torch and vLLM when they are imported.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a hub is never asked
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # at each swap it would warn of a tied head, which has nothing of its own to load
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the worker's own process, which steps it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins threads to the first cores
}
# The package is loaded from its folder alone: the trainer's other packages, beside it when it is installed, must not be found.
BOOTSTRAP = """
import importlib.util, sys
package, argument = sys.argv[1:]
spec = importlib.util.spec_from_file_location("jaxprorl", f"{package}/__init__.py", submodule_search_locations=[package])
sys.modules["jaxprorl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["jaxprorl"])
from jaxprorl.rollout.worker import main
main(argument)
"""
LOG_TAIL_CHARS = 1500
STOP_WITHIN_S = 5.0


@dataclass(frozen=True)
class Launch:
    """How a worker process is started.

    Attributes:
        python: interpreter of vLLM's environment.
        number: of the worker, from 0.
        segments_folder: from `segments.choose_folder`.
        run_folder: the segments are named after it, the worker's log is in its `workers`.
        ring_bytes: capacity of each ring.
        threads: of the worker.
        devices: its CUDA_VISIBLE_DEVICES; empty = as the trainer's.
        cache_folder: where vLLM keeps what it compiles.
        settings: the worker's own; parent, rings are filled in here.
    """

    python: str
    number: int
    segments_folder: Path
    run_folder: Path
    ring_bytes: int
    threads: int
    devices: str
    cache_folder: Path
    settings: Settings


def ring_segment_bytes(ring_bytes: int) -> int:
    """Shared memory of one worker's rings."""
    return 2 * ring.segment_bytes(ring_bytes)


class WorkerProcess:
    """A process that has been started; whether it lives is for the caller to ask.

    Raises:
        SharedMemoryError: its rings cannot be reserved.
        EngineError: the process cannot be started.
    """

    def __init__(self, launch: Launch):
        self._launch = launch
        self._outbox: deque[bytes] = deque()
        self._log = launch.run_folder / "workers" / f"worker_{launch.number}.log"
        with ExitStack() as made:
            commands, results = self._segment("commands", made), self._segment("results", made)
            self._segments = commands, results
            self._commands, self._results = RingWriter(commands.buffer), RingReader(results.buffer)
            for end in (self._commands, self._results):
                made.callback(end.close)
            self._results_buffer = results.buffer
            rings = str(commands.path), str(results.path)
            self._process = self._start(dataclasses.replace(launch.settings, parent_pid=os.getpid(), commands=rings[0], results=rings[1]))
            self._resources = made.pop_all()

    def _segment(self, role: str, made: ExitStack) -> segments.Segment:
        launch = self._launch
        size_bytes = ring.segment_bytes(launch.ring_bytes)
        segment = made.enter_context(segments.create(launch.segments_folder, launch.run_folder, role, launch.number, size_bytes))
        ring.format_ring(segment.buffer)
        return segment

    def _start(self, settings: Settings) -> subprocess.Popen[bytes]:
        launch = self._launch
        try:
            self._log.parent.mkdir(exist_ok=True)
            self._log_start = self._log.stat().st_size if self._log.exists() else 0
            with self._log.open("ab") as log:
                return subprocess.Popen(
                    [launch.python, "-c", BOOTSTRAP, str(Path(__file__).parents[1]), json.dumps(dataclasses.asdict(settings))],
                    env=environment(launch), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    process_group=0,  # Ctrl-C in the terminal is the trainer's alone
                )  # fmt: skip
        except OSError as error:
            place = f"rollout worker {launch.number}, rollout.vllm.python = {launch.python!r}"
            raise EngineError(f"{place}, cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, record: Record) -> None:
        """Puts a command behind those that the ring had no room for yet; `exchange` moves them on."""
        self._outbox.append(encode(record))

    def exchange(self) -> list[Record]:
        """Writes what the ring has room for, and reads everything that has come. Waits for nothing.

        Raises:
            SharedMemoryError: a damaged or foreign record, or a command larger than the ring.
        """
        while self._outbox:
            try:
                self._commands.write(self._outbox[0], 0.0)
            except RingFullError:
                break
            self._outbox.popleft()
        records = []
        while (data := self._results.read()) is not None:
            records.append(decode(data))
        return records

    def unsent(self) -> bool:
        """Whether commands still wait for room in the ring."""
        return bool(self._outbox)

    def attached(self) -> None:
        """The worker has mapped its rings: their names go, so that nothing is left whatever happens to either side."""
        for segment in self._segments:
            segment.unlink()

    def exit_code(self) -> int | None:
        """Negative for a signal; None while the process lives."""
        return self._process.poll()

    def beat_age_s(self) -> float:
        """Seconds since the worker last showed that it makes progress."""
        return self._results.beat_age_s()

    def ring_story(self) -> str:
        """How its results stand: what the worker said of itself, and what of a record it left behind unfinished."""
        seen = ring.status(self._results_buffer)
        return f"its ring is {seen.state.name.lower()}, {seen.records_written} results written, {seen.unfinished_bytes} bytes unfinished"

    def log_tail(self) -> str:
        """The last lines that this process wrote to its log."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        return f"{self._log} ends with:\n{text[-LOG_TAIL_CHARS:]}"

    def stop(self) -> None:
        """Ends the process in order if it listens, by force if not, and removes its rings."""
        try:
            if self.exit_code() is None:
                self._outbox.clear()
                self.send(Stop())
                with suppress(subprocess.TimeoutExpired, SharedMemoryError):
                    self.exchange()
                    self._process.wait(STOP_WITHIN_S)
        finally:
            self.close()

    def kill(self) -> None:
        """Ends the process at once. What it had committed can still be read."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kills the process and removes its rings; a second time it does nothing."""
        self.kill()
        self._resources.close()


def environment(launch: Launch) -> dict[str, str]:
    """The worker's environment variables: the trainer's, without what would change another Python, and what torch and vLLM need."""
    threads = str(launch.threads)
    ours = ENVIRONMENT | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "VLLM_CACHE_ROOT": str(launch.cache_folder.resolve())}
    if launch.settings.eager:
        ours["TORCHDYNAMO_DISABLE"] = "1"  # else a helper of the sampler is compiled at the first request
    if launch.devices:
        ours["CUDA_VISIBLE_DEVICES"] = launch.devices
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | ours
