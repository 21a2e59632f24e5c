"""TensorBoard files, read back with tensorboardX's own record format and messages."""

import struct

from tensorboardX.proto import event_pb2

from jaxprorl.monitoring.events import EventLog
from jaxprorl.monitoring.metrics import MetricsLog
from jaxprorl.monitoring.tensorboard import TensorBoardMirror, derive


def records(folder):
    """Events of all files, by the record format: length (u64), its CRC (u32), data, CRC (u32)."""
    out = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            out.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return out


def scalars(folder):
    return [
        (event.step, value.tag, round(value.simple_value, 6))
        for event in records(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def logs(folder):
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        metrics.append(1, {"reward.mean": 0.25, "time.step_s": 2.0})
        metrics.append(2, {"reward.mean": 0.5, "time.step_s": 3.0})
    with EventLog(folder / "events.jsonl") as events:
        events.append(2, "swap", policy_version=2)
        events.append(2, "reset", reference=True, optimizer="all", reason="schedule")
    return folder / "metrics.jsonl", folder / "events.jsonl"


def test_derive_writes_scalars_reset_marks_and_step_seconds(tmp_path):
    out = tmp_path / "tb"
    assert derive(*logs(tmp_path), out) == 2
    assert sorted(scalars(out)) == [
        (1, "reward/mean", 0.25),
        (1, "time/step_s", 2.0),
        (2, "events/reset", 1.0),
        (2, "reward/mean", 0.5),
        (2, "time/step_s", 3.0),
    ]
    assert {event.wall_time for event in records(out) if event.summary.value} == {2.0, 5.0}
    texts = {value.tag for event in records(out) for value in event.summary.value if not value.HasField("simple_value")}
    assert texts == {"events/reset/text_summary"}


def test_derive_replaces_its_own_files_only(tmp_path):
    out = tmp_path / "tb"
    paths = logs(tmp_path)
    derive(*paths, out)
    (out / "mine.txt").write_text("kept")
    first = sorted(scalars(out))
    derive(*paths, out)
    assert sorted(scalars(out)) == first
    assert (out / "mine.txt").exists()


def test_derive_without_logs(tmp_path):
    assert derive(tmp_path / "none", tmp_path / "nothing", tmp_path / "tb") == 0


def test_mirror_purges_on_resume(tmp_path):
    with TensorBoardMirror(tmp_path, purge_step=5) as mirror:
        mirror.add_metrics({"step": 5, "kl.k3": 0.125})
    assert scalars(tmp_path) == [(5, "kl/k3", 0.125)]
    started = [event.step for event in records(tmp_path) if event.session_log.status == event_pb2.SessionLog.START]
    assert started == [5]
