"""A ring against a model of it: a queue that loses nothing, whatever order its sides act, fail and die in."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxprorl.errors import RingFullError, SharedMemoryError
from jaxprorl.rollout import ring
from jaxprorl.rollout.ring import RingReader, State, record_bytes, status
from tests.factories import PROPERTY
from tests.rollout.rings import DyingWriter, new_ring


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "VISIBLE_WITHIN_S", 0.003)


class RingMachine(RuleBasedStateMachine):
    """The model: payloads committed and not read, and whether the writer lives."""

    @initialize(capacity=st.integers(24, 200))
    def start(self, capacity: int) -> None:
        self.buffer = new_ring(capacity)
        self.capacity = status(self.buffer).capacity_bytes
        self.writer, self.reader = DyingWriter(self.buffer), RingReader(self.buffer)
        self.queue: deque[bytes] = deque()
        self.written = self.read_count = self.unfinished = 0
        self.state, self.alive = State.STARTING, True

    def payload(self, size: int) -> bytes:
        return bytes((self.written * 7 + i) % 251 + 1 for i in range(size))  # no zeros: stale memory would show

    def used(self) -> int:
        return sum(record_bytes(len(payload)) for payload in self.queue)

    @precondition(lambda self: self.alive)
    @rule(size=st.integers(0, 120))
    def write(self, size: int) -> None:
        payload = self.payload(size)
        if record_bytes(size) > self.capacity:
            with pytest.raises(SharedMemoryError, match="enlarge the ring"):
                self.writer.write(payload, 0.0)
        elif self.used() + record_bytes(size) > self.capacity:
            with pytest.raises(RingFullError):
                self.writer.write(payload, 0.0)
        else:
            self.writer.write(payload, 0.0)
            self.queue.append(payload)
            self.written += 1
            self.unfinished = 0

    @rule()
    def read(self) -> None:
        assert self.reader.read() == (self.queue[0] if self.queue else None)
        if self.queue:
            self.queue.popleft()
            self.read_count += 1

    @precondition(lambda self: self.alive and self.used() + record_bytes(8) <= self.capacity)
    @rule(share=st.floats(0, 1), size=st.integers(0, 120), dies=st.booleans())
    def stop_in_the_middle(self, share: float, size: int, dies: bool) -> None:
        size = min(size, self.capacity - self.used() - record_bytes(0))
        self.writer.budget = round(share * (24 + size))
        with pytest.raises(DyingWriter.DiedError):
            self.writer.write(self.payload(size), 0.0)
        self.unfinished = record_bytes(size)
        self.writer.budget, self.alive = None, not dies

    @precondition(lambda self: self.alive)
    @rule(state=st.sampled_from(State))
    def say(self, state: State) -> None:
        self.writer.set_state(state)
        self.state = state

    @precondition(lambda self: self.alive)
    @rule()
    def close(self) -> None:
        self.writer.close()
        self.alive = False
        if self.state is not State.FAILED:
            self.state = State.CLOSED

    @precondition(lambda self: not self.alive and not self.queue)
    @rule(capacity=st.integers(24, 200))
    def replace_the_writer(self, capacity: int) -> None:
        assert self.reader.read() is None
        self.start(capacity)

    @invariant()
    def the_header_tells_the_truth(self) -> None:
        seen = status(self.buffer)
        assert (seen.records_written, seen.records_read) == (self.written, self.read_count)
        assert (seen.waiting_bytes, seen.unfinished_bytes, seen.state) == (self.used(), self.unfinished, self.state)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(PROPERTY, max_examples=60, stateful_step_count=50)
