"""Rings in plain memory, and writers that die where they are told to."""

from jaxprorl.rollout.ring import RingWriter, format_ring, segment_bytes


def new_ring(capacity_bytes: int) -> memoryview:
    buffer = memoryview(bytearray(segment_bytes(capacity_bytes)))
    format_ring(buffer)
    return buffer


class DyingWriter(RingWriter):
    """Dies once `budget` bytes of a record are stored: 0 = before the first, all = before it is committed, None = never."""

    class DiedError(Exception):
        pass

    budget: int | None = None

    def _copy(self, position: int, source: bytes) -> None:
        stored = len(source) if self.budget is None else min(self.budget, len(source))
        super()._copy(position, source[:stored])
        if self.budget is not None:
            self.budget -= stored
            if self.budget == 0:
                raise self.DiedError
