"""What the benchmarks compute around their runs; the runs themselves take minutes and a quiet machine."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer

from benchmarks import run as runner
from benchmarks import scaling, step, variants, workload
from benchmarks.run import expected, failures, fallen, jobs, ratios, read_recorded, table
from jaxprorl import config as config_module
from jaxprorl.data.prompts import Item, build_prompt
from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.errors import UserError
from jaxprorl.models import hf
from jaxprorl.models.compute import Compute
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.sizes import with_micro_batch_rows

PEERS = {"trl": "", "tunix": "", "torch": "", "vllm": ""}


def result(system: str, seconds: float, memory: int = 100, batch: int | None = None) -> dict:
    speed = {"step_s": seconds, "completion_tokens_per_s": 16384 / seconds}
    if batch:
        speed = {"batch": batch, "generation_s": seconds, "completion_tokens_per_s": batch * 128 / seconds}
    return {"system": system, "dtype": "float32", "peak_memory_bytes": memory, **speed}


def test_ratios_above_one_mean_that_we_are_ahead() -> None:
    results = [
        result("jaxprorl", 5.0, 200), result("trl", 15.0, 300), result("jaxprorl", 2.0, batch=128), result("vllm", 1.0, batch=128),
        result("jaxprorl", 0.5, batch=16), result("vllm", 1.0, batch=16),
    ]  # fmt: skip
    assert ratios(results) == {
        "float32.trl.step": 3.0, "float32.trl.memory": 1.5, "float32.vllm.generation_128": 0.5, "float32.vllm.generation_16": 2.0,
    }  # fmt: skip
    assert [line.split()[:2] for line in table(results).splitlines()[1:3]] == [["jaxprorl", "float32"], ["trl", "float32"]]


def test_a_ratio_falls_when_it_is_below_the_recorded_one_by_more_than_the_margin() -> None:
    recorded = {"a": 2.0, "b": 2.0, "c": 2.0, "not measured now": 9.0}
    (line,) = fallen({"a": 1.5, "b": 1.49, "c": 5.0, "new": 0.1}, recorded, margin=0.25)
    assert line == "b: 1.49, recorded 2.00, at least 1.50 is right"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 0.0, -2.0])
def test_a_ratio_that_is_no_finite_number_above_zero_never_passes(odd: float) -> None:
    assert len(fallen({"a": odd}, {"a": 2.0})) == len(fallen({"a": 2.0}, {"a": odd})) == 1
    assert failures({"a": odd, "b": 2.0}, {"a": 2.0, "b": 2.0}, set()) == [f"a: {odd}, a finite number above 0 is right"]
    assert failures({"new": odd, "b": 2.0}, {"b": 2.0}, set()) == [f"new: {odd}, a finite number above 0 is right"]


def test_seconds_or_memory_of_zero_give_no_ratio() -> None:
    found = ratios([result("jaxprorl", 5.0, 0), result("trl", math.nan, 300)])
    assert list(found) == ["float32.trl.step", "float32.trl.memory"] and all(map(math.isnan, found.values()))


def test_a_check_expects_the_recorded_ratios_of_given_peers_and_dtypes() -> None:
    recorded = dict.fromkeys(
        ("float32.trl.step", "bfloat16.trl.step", "float32.transformers.generation_128", "float32.trl2.step", "odd"), 2.0
    )
    assert expected(recorded, PEERS, ["float32", "bfloat16"]) == set()
    assert expected(recorded, PEERS | {"trl": "py"}, ["float32"]) == {"float32.trl.step"}
    assert expected(recorded, PEERS | {"torch": "py"}, ["float32"]) == {"float32.transformers.generation_128"}
    assert failures({"a": 2.0}, {"a": 2.0, "b": 2.0}, {"a"}) == []
    assert failures({"a": 2.0}, {"a": 2.0, "b": 2.0}, {"a", "b"}) == ["b: not measured, though its peer was given; recorded 2.00"]
    assert failures({"a": 2.0}, {"b": 2.0}, set()) == failures({}, {}, set()) == ["nothing was compared"]


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: list[str], trl: dict | None = None) -> int:
    """`run.main` on float32 with TRL's result as given, in place of real runs; without one, no run may start."""

    def instead(command: list[str]) -> dict:
        assert trl is not None, f"started {command}"
        return result("jaxprorl", 5.0, 200) | {"overrides": {}} if Path(command[1]).name == "step.py" else trl

    monkeypatch.setattr(runner, "RECORDED", folder / "recorded.json")
    monkeypatch.setattr(runner, "run", instead)
    return runner.main([*arguments, "--dtypes", "float32", "--output", str(folder / "peers.json")])


TRL = ["--trl", sys.executable]
KEPT = {"float32.trl.step": 3.0, "float32.trl.memory": 1.5}


@pytest.mark.parametrize(
    ("trl", "kept", "status", "said"),
    [
        (result("trl", 15.0, 300), KEPT, 0, []),
        (result("trl", 15.0, 300), KEPT | {"float32.vllm.generation_16": 2.0, "bfloat16.trl.step": 2.0}, 0,
         ["not compared: bfloat16.trl.step, float32.vllm.generation_16"]),
        (result("trl", 15.0, 300), {"float32.trl.step": 3.0}, 0, ["not recorded: float32.trl.memory"]),
        (result("trl", 15.0, 300), KEPT | {"float32.trl.sampling": 2.0}, 1,
         ["float32.trl.sampling: not measured, though its peer was given; recorded 2.00"]),
        (result("trl", 5.0, 300), KEPT, 1, ["float32.trl.step: 1.00, recorded 3.00, at least 2.25 is right"]),
        (result("trl", math.nan, 300), KEPT, 1, ["float32.trl.step: nan, a finite number above 0 is right"]),
    ],
)  # fmt: skip
def test_a_check_says_what_it_compared(
    trl: dict, kept: dict, status: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "recorded.json").write_text(json.dumps(kept))
    assert run_main(monkeypatch, tmp_path, ["--check", *TRL], trl) == status
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[lines.index("") + 3 :] if line] == said  # after the table and the two ratios


@pytest.mark.parametrize("arguments", [[], TRL])
def test_a_check_that_would_compare_nothing_starts_no_run(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recorded.json").write_text('{"float32.vllm.generation_16": 2.0}')
    with pytest.raises(SystemExit, match=r"--check: nothing to compare, .*recorded.json has no ratio of the peers and dtypes"):
        run_main(monkeypatch, tmp_path, ["--check", *arguments])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"), ("", "not JSON"), ("{", "not JSON"), ("[1.0]", "a list"), ("2.0", "a float"), ("{}", "an empty object"),
        ('{"a": 1.0, "b": NaN}', "b = nan"), ('{"a": Infinity}', "a = inf"), ('{"a": 0}', "a = 0"), ('{"a": -1.5}', "a = -1.5"),
        ('{"a": "2.0"}', "a = '2.0'"), ('{"a": true}', "a = True"), ('{"a": null}', "a = None"),
    ],
)  # fmt: skip
def test_a_file_of_ratios_that_is_none_is_refused_in_one_line_before_any_run(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "recorded.json").write_text(text)
    with pytest.raises(SystemExit) as refused:
        run_main(monkeypatch, tmp_path, ["--check", *TRL])
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'recorded.json'}: {said}") and "\n" not in message
    assert message.endswith("an object of ratios, finite numbers above 0, is right; --record makes it")


def test_the_recorded_ratios_are_sound() -> None:
    assert len(read_recorded(runner.RECORDED)) == 14


def test_nothing_is_recorded_unless_every_ratio_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "recorded.json"
    file.write_text("as it was")
    with pytest.raises(SystemExit, match=r"--record: no ratio without a peer, .*recorded.json stays as it is"):
        run_main(monkeypatch, tmp_path, ["--record"])
    assert run_main(monkeypatch, tmp_path, ["--record", *TRL], result("trl", math.nan, 300)) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("float32.trl.step: nan, a finite number above 0 is right; ")
    assert file.read_text() == "as it was"
    assert run_main(monkeypatch, tmp_path, ["--record", *TRL], result("trl", 15.0, 300)) == 0
    assert json.loads(file.read_text()) == KEPT


def test_a_peer_without_its_interpreter_is_refused_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        run_main(monkeypatch, tmp_path, ["--trl", str(tmp_path / "python")])
    assert f"--trl {tmp_path / 'python'}: no such program" in capsys.readouterr().err


def printing(line: dict, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({json.dumps(line)!r}); sys.exit({status})"]


def test_a_run_that_fails_after_its_result_does_not_count() -> None:
    own = result("jaxprorl", 5.0)
    assert runner.run(printing(own)) == own
    with pytest.raises(SystemExit, match=r"sys\.exit\(3\): status 3, after its result, which does not count"):
        runner.run(printing(own, 3))
    with pytest.raises(SystemExit, match="status 0, no result"):
        runner.run([sys.executable, "-c", ""])


def test_the_comparison_takes_no_result_of_other_work() -> None:
    unchanged = result("jaxprorl", 5.0) | {"overrides": {}}
    assert runner.run_unchanged(printing(unchanged)) == unchanged
    assert runner.run_unchanged(printing(result("trl", 5.0))) == result("trl", 5.0)
    changed = unchanged | {"overrides": {"algorithm.kl_coefficient": 0.0}}
    with pytest.raises(SystemExit, match=r'not the workload, fields are overridden: \{"algorithm\.kl_coefficient": 0\.0\}'):
        runner.run_unchanged(printing(changed))
    assert runner.run(printing(changed)) == changed  # scaling.py is made of such runs


def test_peers_without_an_interpreter_are_left_out() -> None:
    assert [Path(command[1]).name for command in jobs(PEERS, ["float32"])] == ["step.py"]
    names = [Path(command[1]).name for command in jobs(PEERS | {"tunix": "py", "vllm": "py"}, ["float32", "bfloat16"])]
    assert names.count("run_tunix.py") == 1  # it has no bfloat16
    assert (names.count("step.py"), names.count("generation.py"), names.count("run_vllm.py")) == (2, 6, 6)
    sampling = [command[1:4] for command in jobs(PEERS | {"torch": "py"}, ["float32"])[1:]]
    assert [(Path(script).name, *size) for script, *size in sampling] == [
        ("generation.py", "--batch", "128"), ("run_transformers.py", "--batch", "128"),
    ]  # fmt: skip


def test_prompts_are_different_and_of_the_length_that_is_promised(tmp_path: Path) -> None:
    workload.write_tokenizer(tmp_path)
    tokenizer, texts = load_tokenizer(tmp_path), workload.prompts(600)
    assert len(set(texts)) == 600
    for text in (texts[0], texts[-1]):
        prompt = build_prompt(tokenizer, Item("", "", ({"role": "user", "content": text},), "", ""), 0)
        assert prompt.token_ids.shape == (workload.WORK["prompt_tokens"],)
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (workload.PAD_ID, (workload.STOP_ID,))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() <= workload.WORK["model"]["vocab_size"]


@pytest.mark.parametrize(("text", "expected"), [("", 0.0), ("aaaa", 0.25), ("abcd", 1.0), ("abab", 0.5)])
def test_the_reward_by_hand(text: str, expected: float) -> None:
    assert workload.score(text, None) == expected


def test_the_model_folder_is_one_and_has_the_workloads_size(tmp_path: Path) -> None:
    shape = step.model_shape(step.get_config())
    step.write_model(tmp_path, shape)
    assert hf.read_config(tmp_path) == shape
    hf.check_tensors(tmp_path, shape)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    layer = 3 * 256 * 1024 + 2 * 256 * 256 + 2 * 256 * 128 + 512 + 2 * 256  # MLP; q and o; k and v; their biases; norms
    assert sum(value.size for value in tensors.values()) == 512 * 256 + 4 * layer + 256
    assert np.std(tensors["model.embed_tokens.weight"]) == pytest.approx(0.02, rel=0.01)


def test_work_other_than_the_workload_is_refused() -> None:
    workload.require("tokens", (16, 192), (16, 192))
    with pytest.raises(SystemExit, match=r"not the workload: tokens 191, 192 wanted"):
        workload.require("tokens", 191, 192)


def test_the_axes_of_the_scaling_curves_meet() -> None:
    """The point that two axes share is the same run: it is measured once."""
    points = [tuple(scaling.overrides(fields)) for axis in scaling.POINTS.values() for fields in axis.values()]
    assert len(points) == 12 and len(set(points)) == 10


@pytest.mark.parametrize(("axis", "value"), [(axis, value) for axis, values in scaling.POINTS.items() for value in values])
def test_every_point_of_the_scaling_curves_is_a_valid_config(axis: str, value: int, tmp_path: Path) -> None:
    config = config_module.load([f"--config={step.__file__}", *scaling.overrides(scaling.POINTS[axis][value])], step.SCHEMA)
    config.model.path, config.data.source = str(tmp_path), f"jsonl:{tmp_path / 'questions.jsonl'}"
    step.write_questions(tmp_path / "questions.jsonl", config.batch.prompts)
    config_module.validate(config, step.SCHEMA)
    tokens = step.step_tokens(config)
    assert tokens == {"batch": 128 * value, "length": 16384, "vocabulary": 32 * 128}[axis]
    rows = config.batch.prompts * config.rollout.samples_per_prompt
    chosen = with_micro_batch_rows(config, Compute(mesh=make_mesh("dp")))
    assert rows % chosen.batch.micro_batch_rows == 0 == rows - config.rollout.slots


def run_scaling(monkeypatch: pytest.MonkeyPatch, folder: Path, axes: list[str], failing: set[str]) -> int:
    """`scaling.main` with made-up results; points with one of the overrides `failing` end without."""

    def instead(command: list[str]) -> dict:
        if failing & set(command):
            raise SystemExit("status -9, no result")
        return result("jaxprorl", 5.0) | {"phases_s": {"generation": 1.0, "log_probs": 1.0, "update": 3.0}}

    monkeypatch.setattr(scaling, "run", instead)
    return scaling.main(["--axes", *axes, "--output", str(folder)])


def test_points_that_fail_are_named_and_make_scaling_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run_scaling(monkeypatch, tmp_path, ["batch", "length"], set()) == 0
    assert "failed" not in capsys.readouterr().out
    whole = json.loads((tmp_path / "scaling.json").read_text())
    assert run_scaling(monkeypatch, tmp_path, ["batch"], {"--config.batch.prompts=64"}) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: batch 512"
    kept = json.loads((tmp_path / "scaling.json").read_text())
    assert kept == {"batch": whole["batch"][:-1], "length": whole["length"]}
    assert run_scaling(monkeypatch, tmp_path, ["length"], {"--config.steps=3"}) == 1  # an override of every point
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("failed: length 128, length 512, length 2048, length 4096, all of length (")
    assert last.endswith("length.svg keep what an earlier run measured)")
    assert json.loads((tmp_path / "scaling.json").read_text()) == kept


def test_random_groups_of_a_variant_fill_the_workload() -> None:
    config = step.get_config()
    groups, again = (variants.random_groups(config) for _ in range(2))
    assert [len(group.completions) for group in groups] == [8] * 16
    for group, other in zip(groups, again, strict=True):
        assert len(group.prompt.token_ids) == 64 and {len(c.token_ids) for c in group.completions} == {128}
        assert len({score.value for score in group.scores}) == 8
        np.testing.assert_array_equal(group.prompt.token_ids, other.prompt.token_ids)
        assert max(int(c.token_ids.max()) for c in group.completions) < workload.PAD_ID


def test_a_variants_ratio_is_that_of_the_same_round() -> None:
    assert variants.compared([2.0, 8.0, 3.0], [1.0, 8.0, 2.0]) == "3.000 s (1.50)"


@pytest.mark.slow
def test_variants_are_compared_and_profiled() -> None:
    small = ["batch.prompts=2", "batch.refill_prompts=2", "rollout.slots=16", "workload.model.num_hidden_layers=2"]
    command = [sys.executable, variants.__file__, "--rounds", "1", "--profile", *(f"--config.{change}" for change in small)]
    command += ["--vary", "as it is:", "--vary", "scanned:unroll_max_layers=1,batch.micro_batch_rows=2"]
    refused = subprocess.run([*command, "--vary", "odd:batch.micro_batch_rows=1"], capture_output=True, text=True, check=False)
    if os.cpu_count() != 1:
        assert refused.returncode == 1 and refused.stderr.splitlines()[-1].startswith("error: batch.micro_batch_rows = 1: must divide by")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    lines = done.stdout.splitlines()
    assert lines[0].startswith("as it is: 1 x 8 x 321 tokens, naive") and lines[1].startswith("scanned: 4 x 2 x 321 tokens, naive")
    assert re.fullmatch(r"as it is: log-probs \d\.\d{3} s \(1\.00\), update \d\.\d{3} s \(1\.00\)", lines[2])
    for line, name in zip(lines[4:6], ("log-probs", "update"), strict=True):
        total_s, *parts = map(float, re.findall(r" (\d+\.\d+)", line))
        assert line.startswith(f"as it is, seconds of {name} per device: ")
        assert 0.8 * total_s < sum(parts) <= total_s + 0.01 and parts == sorted(parts, reverse=True)


@pytest.mark.parametrize(("field", "value"), [("model.path", "m"), ("data.source", "jsonl:q.jsonl"), ("runs_dir", "r")])
def test_fields_that_the_benchmark_fills_in_itself_are_refused(field: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{field} = '{value}': the benchmark makes its own; leave the field out"):
        step.prepare(tmp_path, [f"--config.{field}={value}"])


def test_overrides_are_what_differs_but_for_what_the_benchmark_makes(tmp_path: Path) -> None:
    default, cwd = step.get_config(), Path.cwd()
    try:
        assert step.overrides(step.prepare(tmp_path, ["--config.model.dtype=bfloat16"]), default) == {}
        fields = ["algorithm.kl_coefficient=0", "workload.model.num_hidden_layers=1", "batch.micro_batch_rows=8", f"seed={default.seed}"]
        changed = step.overrides(step.prepare(tmp_path, [f"--config.{field}" for field in fields]), default)
    finally:
        os.chdir(cwd)
    assert changed == {"algorithm.kl_coefficient": 0.0, "workload.model.num_hidden_layers": 1, "batch.micro_batch_rows": 8}
    assert json.loads(json.dumps(changed)) == changed


@pytest.mark.parametrize(("steps", "warm"), [(2, 2), (2, 3), (1, 1), (3, -1)])
def test_steps_must_be_left_after_warm_up(steps: int, warm: int) -> None:
    config = step.get_config()
    step.check_warmup(config)
    config.steps, config.workload.warmup_steps = steps, warm
    with pytest.raises(UserError, match=rf"workload\.warmup_steps = {warm}: must be 0 or more and less than steps = {steps}"):
        step.check_warmup(config)


@pytest.mark.slow
def test_a_result_names_the_fields_that_were_overridden() -> None:
    small = ["workload.model.num_hidden_layers=1", "batch.prompts=2", "batch.refill_prompts=2", "algorithm.kl_coefficient=0.0"]
    more = ["rollout.slots=16", "steps=2", "workload.warmup_steps=1"]
    wanted = {name: json.loads(value) for name, value in (field.split("=") for field in small + more)}
    assert runner.run([sys.executable, step.__file__, *(f"--config.{field}" for field in small + more)])["overrides"] == wanted
    generation = [sys.executable, str(Path(step.__file__).with_name("generation.py")), "--batch", "16", f"--config.{small[0]}"]
    assert runner.run(generation)["overrides"] == {"workload.model.num_hidden_layers": 1}  # not the slots: they are --batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("step.py", ["--config.steps=2", "--config.workload.warmup_steps=2"], "error: workload.warmup_steps = 2: must be 0 or more"),
        ("step.py", ["--config.runs_dir=r"], "error: runs_dir = 'r': "),
        ("generation.py", ["--config.rollout.slots=0"], "error: rollout.slots = 0: "),
        ("generation.py", ["--batch", "12"], "generation.py: error: --batch 12: must be a multiple of 8"),
        ("checkpoints.py", ["--config=configs/quickstart.py", "--config.mesh.cpu_devices=-1"], "error: mesh.cpu_devices = -1: "),
    ],
)
def test_bad_input_is_one_line(script: str, arguments: list[str], said: str) -> None:
    command = [sys.executable, str(Path(step.__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=step.ROOT)
    assert done.returncode != 0 and done.stderr.splitlines()[-1].startswith(said) and "Traceback" not in done.stderr
