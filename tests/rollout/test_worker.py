"""The worker's loop around an engine that is none: when it empties its caches, and that it believes no engine that did not."""

import numpy as np
import pytest
from rings import new_ring

from jaxprorl.rollout.records import Go, Request, Swap, encode
from jaxprorl.rollout.ring import RingReader, RingWriter
from jaxprorl.rollout.worker import Settings, Worker

SETTINGS = Settings(1, "", "", "", "", "float32", 64, 4, 32, 10**6, True)


class Engine:
    """Ends no request. Notes what it is asked."""

    def __init__(self, empties: bool = True):
        self.empties, self.calls = empties, list[str]()

    def reset_prefix_cache(self) -> bool:
        self.calls.append("empty")
        return self.empties

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[int]:
        self.calls.append(method)
        return [8]

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    def step(self) -> list[object]:
        return []


def request(number: int) -> Request:
    return Request(number, 0, 1, 0, np.array([5], np.int32), 1.0, 0, 1.0, 0, 4, np.array([3], np.int32))


class Bench(Worker):
    """A worker with a command ring of its own, whose requests begin without vLLM."""

    def __init__(self, engine: Engine):
        ring = new_ring(1 << 12)
        self.commands, self.told = RingWriter(ring), RingReader(ring)
        super().__init__(engine, SETTINGS, RingWriter(new_ring(1 << 12)))

    def _begin(self, request: Request) -> None:
        self._begun[str(request.request)] = request

    def tell(self, *records: Request | Go | Swap) -> None:
        for record in records:
            self.commands.write(encode(record), 0.0)
        self.turn(self.told)


def test_requests_begin_with_an_empty_cache_if_the_worker_has_no_others() -> None:
    engine = Engine()
    worker = Bench(engine)
    worker.tell(request(1), request(2))
    assert engine.calls == []
    worker.tell(Go())
    assert engine.calls == ["empty"]
    worker.tell(request(3), Go())
    assert engine.calls == ["empty"], "vLLM cannot empty what it is using"
    worker._begun.clear()
    worker.tell(request(4), Go())
    assert engine.calls == ["empty", "empty"]


@pytest.mark.parametrize("command", [Go(), Swap(3)])
def test_a_cache_that_was_not_emptied_is_an_error(command: Go | Swap) -> None:
    engine = Engine(empties=False)
    with pytest.raises(RuntimeError, match="vLLM did not empty its prefix cache"):
        Bench(engine).tell(command)
    assert "version 3" not in engine.calls
