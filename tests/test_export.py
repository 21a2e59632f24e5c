import dataclasses
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
from factories import random_params, summary_of, tiny_config, tiny_model
from ml_collections import ConfigDict
from model_folders import edit_json, shardings
from safetensors.numpy import load_file
from saved_states import HOST, flip_a_bit, largest_file, new_state

from jaxprorl.checkpoint import Checkpoints
from jaxprorl.config import to_json
from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.errors import CheckpointError, ModelError
from jaxprorl.export import StoredParams, export, model_card, write_model
from jaxprorl.models import hf
from jaxprorl.models.hf.config import config_json
from jaxprorl.models.qwen2 import Params, declarations, parameter_count
from jaxprorl.run_folder import RunFolder
from jaxprorl.sharding.mesh import make_mesh
from jaxprorl.state import RunState
from jaxprorl.warmstart.tokenizer import build_tokenizer

MODEL = tiny_model(vocab_size=320)
CONFIG = tiny_config(run_name="small", checkpoint__keep=3, model__path="models/R1-Distill")
SCORES = {
    "before": summary_of({"sums": [1, 0, 0, 0], "words": [0, 0, 0, 0]}),
    "after": summary_of({"sums": [1, 1, 1, 0], "words": [1, 0, 0, 0]}),
}
SCRIPT = str(tiny_run.ROOT / "launch/export_hf.py")


def params_at(step: int) -> Params:
    """What the checkpoint of this step holds."""
    return {name: value + np.float32(step) for name, value in random_params(MODEL).items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint after each; step 3 was measured. Tests only read it."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "small")
    tokenizer = build_tokenizer([], folder.base_model)
    hf.write_folder(folder.base_model, MODEL, random_params(MODEL), folder.base_model, tokenizer.stop_ids, tokenizer.pad_id)
    (folder.base_model / "model.safetensors").unlink()
    folder.config.write_text(to_json(CONFIG))
    state = new_state(MODEL, make_mesh("fsdp"), "fsdp")
    with Checkpoints(folder.checkpoints, CONFIG) as checkpoints:
        for step in (1, 2, 3):
            places = shardings(MODEL, "fsdp")
            params = {name: jax.device_put(value, places[name]) for name, value in params_at(step).items()}
            run = RunState(step=step, resets=step // 2, completion_tokens=1000 * step)
            checkpoints.save(dataclasses.replace(state, params=params), dataclasses.replace(HOST, run=run))
    folder.summary.write_text(json.dumps({"steps": 3, **SCORES}))
    return folder.path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("step", "expected"), [(None, 3), (2, 2)])
def test_a_checkpoint_becomes_a_model_folder(finished: Path, step: int | None, expected: int, dtype: str, tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert export(finished, step, output, dtype, shard_bytes=20_000).step == expected  # type: ignore[arg-type]
    assert hf.read_config(output) == MODEL
    for name, value in hf.read_params(output, MODEL, shardings(MODEL)).items():
        np.testing.assert_array_equal(value, params_at(expected)[name].astype(dtype).astype("f4"), err_msg=name)
    assert json.loads((output / "config.json").read_text())["torch_dtype"] == dtype
    tokenizer, base = load_tokenizer(output), load_tokenizer(finished / "base_model")
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.chat_template) == (base.stop_ids, base.pad_id, base.chat_template)
    copied = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"}
    names = {path.name for path in output.iterdir()}
    assert {name for name in names if not name.endswith(".safetensors")} == copied | {
        "README.md", "config.json", "model.safetensors.index.json",
    }  # fmt: skip
    assert len(names) > 10
    assert f"# small, step {expected}\n" in (output / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("given", [{"top_p": 0.9, "eos_token_id": None}, {}, None])
def test_a_generation_config_without_a_stop_token_gets_the_runs(given: dict[str, Any] | None, run: Path, tmp_path: Path) -> None:
    path = run / "base_model/generation_config.json"
    path.unlink()
    if given is not None:
        path.write_text(json.dumps(given))
    edit_json(run / "base_model/tokenizer_config.json", eos_token="<|im_end|>")
    export(run, 1, tmp_path / "model", "float32")
    written = tmp_path / "model/generation_config.json"
    stop_ids = list(load_tokenizer(run / "base_model").stop_ids)
    if given is None:
        assert not written.exists()  # transformers makes one from config.json
        assert json.loads((tmp_path / "model/config.json").read_text())["eos_token_id"] == stop_ids
    else:
        assert json.loads(written.read_text()) == given | {"eos_token_id": stop_ids}


def test_the_end_of_training_writes_what_an_export_of_its_last_step_writes(finished: Path, tmp_path: Path) -> None:
    folder, state = RunFolder(finished), RunState(step=3, resets=1, completion_tokens=3000)
    write_model(tmp_path / "end", folder, CONFIG, MODEL, params_at(3), load_tokenizer(folder.base_model), state, SCORES)
    export(finished, None, tmp_path / "export", "float32")
    assert tiny_run.files(tmp_path / "end") == tiny_run.files(tmp_path / "export")


def test_damaged_checkpoints_are_passed_over_unless_asked_for(run: Path, tmp_path: Path) -> None:
    flip_a_bit(largest_file(run / "checkpoints", 3))
    done = export(run, None, tmp_path / "model", "float32")
    assert done.step == 2
    assert len(done.damaged) == 1
    assert "step 3 is damaged" in done.damaged[0]
    assert "Not measured for this step." in (tmp_path / "model/README.md").read_text()
    with pytest.raises(CheckpointError, match=r"--step 3: .*sha256 differs"):
        export(run, 3, tmp_path / "other", "float32")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("step", [0, 4])
def test_a_step_without_a_checkpoint_is_refused_and_the_others_named(finished: Path, step: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"--step {step}: .*\(checkpoints: 1, 2, 3\)"):
        export(finished, step, tmp_path / "model", "float32")


def test_a_folder_that_is_no_run_or_has_saved_nothing_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no run there"):
        export(tmp_path / "nowhere", None, tmp_path / "model", "float32")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        export(run, None, tmp_path / "model", "float32")


def test_nothing_is_overwritten(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    export(finished, None, output, "float32")  # an empty folder is fine
    before = tiny_run.files(output)
    for taken in (output, output / "config.json", finished):
        with pytest.raises(ModelError, match="is there already and not empty"):
            export(finished, 1, taken, "float32")
    assert tiny_run.files(output) == before


def test_a_name_that_no_file_system_takes_is_refused_before_anything_is_written(finished: Path, tmp_path: Path) -> None:
    for name in ("o" * 300, f"{'o' * 300}/model"):
        with pytest.raises(ModelError, match=r"^--output .* cannot be written: File name too long; "):
            export(finished, 1, tmp_path / name, "float32")
    with pytest.raises(CheckpointError, match="no run there"):
        export(Path("r" * 300), 1, tmp_path / "model", "float32")
    assert list(tmp_path.iterdir()) == []


def test_a_diverged_policy_is_not_exported(run: Path, tmp_path: Path) -> None:
    state = new_state(MODEL, make_mesh("dp"))
    up = np.asarray(state.params["up_kernel"]).copy()
    up[1, 2, 3] = np.inf
    diverged = dataclasses.replace(state, params=state.params | {"up_kernel": jax.device_put(up)})
    with Checkpoints(run / "checkpoints", CONFIG) as checkpoints:
        checkpoints.save(diverged, dataclasses.replace(HOST, run=RunState(step=4)))
    with pytest.raises(CheckpointError, match=r"step 4 .* up_kernel holds values that are not finite"):
        export(run, None, tmp_path / "model", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_card_tells_base_steps_resets_scores_and_config() -> None:
    card = model_card(CONFIG, 354_432, RunState(step=1200, resets=3, completion_tokens=5_000_000), SCORES, "bfloat16")
    for line in (
        "# small, step 1200",
        "| base model | `models/R1-Distill` |",
        "| RL steps | 1,200 |",
        "| resets of reference and optimizer | 3 |",
        "| sampled tokens | 5,000,000 |",
        "| parameters | 354,432 |",
        "| tensors | bfloat16 |",
        # Wilson intervals of 1 and 3 of 4, 0 and 1 of 4, 1 and 4 of 8
        "| sums | 4 | 25.0% [4.6%, 69.9%] | 75.0% [30.1%, 95.4%] |",
        "| words | 4 | 0.0% [0.0%, 49.0%] | 25.0% [4.6%, 69.9%] |",
        "| all | 8 | 12.5% [2.2%, 47.1%] | 50.0% [21.5%, 78.5%] |",
        f"rollout.temperature = {CONFIG.rollout.temperature}",
        'model.path = "models/R1-Distill"',
    ):
        assert line in card.splitlines(), line
    assert "Not measured" not in card
    fields = re.findall(r"^([a-z_.]+) = ", card, re.MULTILINE)
    assert not {name for name in fields if name.startswith(("cache_dir", "runs_dir", "checkpoint.", "monitoring."))}, "not of the result"
    of_warm_start = {name for name in fields if name.startswith(("warmstart.", "model."))}
    assert of_warm_start == {
        f"model.{name}" for name in ("path", "dtype", "reference_dtype", "attention", "attention_chunk_tokens", "remat")
    }
    own = ConfigDict(json.loads(to_json(CONFIG)))
    own.model.path = ""
    for line in (f"model.hidden_size = {CONFIG.model.hidden_size}", f"warmstart.rows = {CONFIG.warmstart.rows}"):
        assert line in model_card(own, 1, RunState(), {}, "float32").splitlines()
    assert "| base model | the run's own warm-start model |" in model_card(own, 1, RunState(), {}, "float32")
    assert "Not measured for this step." in model_card(own, 1, RunState(), {}, "float32")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """launch/export_hf.py in this process: (status, stdout, stderr)."""

    def start(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(SCRIPT, run_name="__main__")
        return int(end.value.code or 0), *capsys.readouterr()

    return start


def test_the_command_exports_and_tells_of_bad_input_in_one_line(
    command: Callable[..., tuple[int, str, str]], run: Path, tmp_path: Path
) -> None:
    flip_a_bit(largest_file(run / "checkpoints", 3))
    output = str(tmp_path / "model")
    arguments = ("--run", str(run), "--output", output, "--dtype", "bfloat16", "--shard-size-gb", "0.00002")
    status, out, err = command(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith("WARNING: checkpoint step 3 is damaged")
    assert out.endswith(f"{output}: {run}, step 2, bfloat16\n")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3
    assert {str(value.dtype) for file in files for value in load_file(file).values()} == {"bfloat16"}
    assert max(sum(value.nbytes for value in load_file(file).values()) for file in files) <= 20_480  # the embedding alone is above 20,000

    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert err == f"error: --output {output} is there already and not empty; give another folder, or remove it\n"
    for size in ("0.0", "nan", "inf"):
        status, _, err = command("--run", str(run), "--output", str(tmp_path / "other"), "--shard-size-gb", size)
        assert status == 2
        assert f"--shard-size-gb {size}: must be a positive number" in err


def test_the_target_may_be_a_link_but_not_the_current_folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    export(finished, 1, tmp_path / "link", "float32")
    assert (tmp_path / "link").is_symlink()
    assert hf.read_config(tmp_path / "disk") == MODEL
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for output in (Path(), tmp_path / "here"):
        with pytest.raises(ModelError, match="is the folder you are in"):
            export(finished, 1, output, "float32")


MEASURE = """
    import json, re, sys, threading, time
    from pathlib import Path
    import jax
    from jaxprorl.export import export

    def anonymous_bytes():
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    jax.block_until_ready(jax.device_put(0.0))
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch():
        global peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    export(Path(sys.argv[1]), None, Path(sys.argv[2]), "bfloat16", 100_000_000)
    done.set(); watcher.join()
    print(json.dumps(peak - before))
    """


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells of anonymous memory in /proc")
def test_exporting_takes_the_memory_of_a_parameter_not_of_the_model(finished: Path, tmp_path: Path) -> None:
    """The largest one twice, while Orbax decodes it. malloc is told to keep nothing that was freed, so that what counts is in use."""
    c = tiny_model(
        vocab_size=32768, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, head_dim=64, num_attention_heads=12,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished / "base_model", folder.base_model)
    (folder.base_model / "config.json").write_text(json.dumps(config_json(c, "float32", (1,), 0, None)))
    folder.config.write_text(to_json(CONFIG))
    places = shardings(c)
    params = {name: jax.device_put(np.full(d.shape, 0.5, "f4"), places[name]) for name, d in declarations(c).items()}
    state = dataclasses.replace(new_state(tiny_model(), make_mesh("dp")), params=params, reference=(), opt_state=())
    with Checkpoints(folder.checkpoints, CONFIG) as checkpoints:
        checkpoints.save(state, HOST)
    largest = max(value.nbytes for value in params.values())
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(folder.path), str(tmp_path / "model")]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=environment, capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    assert largest == 4 * 12 * 768 * 3072
    assert peak < 2 * largest + (64 << 20) < 4 * parameter_count(c) / 2, peak  # the rest: Orbax's modules and threads, tensors of one layer


# launch/export_hf.py, with a stop before and after it writes the tensors. Arguments before its own: a folder, and for both stops the
# name of the file that is made in that folder, and of the one that is waited for.
WITH_STOPS = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, "launch")
    import export_hf
    from jaxprorl.models.hf import writer

    meeting, *names = Path(sys.argv[1]), *sys.argv[2:6]
    del sys.argv[1:6]
    write = writer._write_tensors

    def stop(made, awaited):
        (meeting / made).touch()
        while not (meeting / awaited).exists():
            time.sleep(0.001)

    def write_with_stops(*arguments):
        stop(*names[:2])
        write(*arguments)
        stop(*names[2:])

    writer._write_tensors = write_with_stops
    sys.exit(export_hf.main())
    """


def exporting(run: Path, output: Path, *program: str) -> subprocess.Popen[str]:
    """launch/export_hf.py, or another program with its arguments, in a process of its own."""
    command = [sys.executable, *(program or (SCRIPT,)), "--run", str(run), "--output", str(output)]
    return subprocess.Popen(command, cwd=tiny_run.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["missing", "empty"])
def test_of_four_exports_to_one_folder_one_wins_and_the_others_say_so(place: str, finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    if place == "empty":
        output.mkdir()
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    program = ("-c", textwrap.dedent(WITH_STOPS), str(meeting))
    exports = [exporting(finished, output, *program, f"begun_{i}", f"begun_{i}", f"written_{i}", "go on") for i in range(4)]
    while len(list(meeting.glob("written_*"))) < 4:
        assert all(process.poll() is None for process in exports)
        time.sleep(0.01)
    (meeting / "go on").touch()
    said = [process.communicate(timeout=240) for process in exports]
    assert sorted(process.returncode for process in exports) == [0, 2, 2, 2], said
    for process, (out, err) in zip(exports, said, strict=True):
        if process.returncode == 0:
            assert (out, err) == (f"{output}: {finished}, step 3, float32\n", "")
        else:
            assert err.startswith("error: ") and err.count("\n") == 1 and str(output) in err, err
    export(finished, None, tmp_path / "alone", "float32")
    assert tiny_run.files(output) == tiny_run.files(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "meeting", "model"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["missing", "empty"])
def test_an_export_that_begins_while_another_ends_takes_nothing_from_it(place: str, finished: Path, tmp_path: Path) -> None:
    output, meeting = tmp_path / "model", tmp_path / "meeting"
    meeting.mkdir()
    if place == "empty":
        output.mkdir()
    program = ("-c", textwrap.dedent(WITH_STOPS), str(meeting))
    first = exporting(finished, output, *program, "1 begun", "1 begun", "1 written", "2 begun")
    while not (meeting / "1 written").exists():
        assert first.poll() is None
        time.sleep(0.01)
    second = exporting(finished, output, *program, "2 begun", "1 ended", "2 written", "2 written")
    assert (first.wait(240), first.communicate()) == (0, (f"{output}: {finished}, step 3, float32\n", ""))
    (meeting / "1 ended").touch()
    out, err = second.communicate(timeout=240)
    assert (second.returncode, out) == (2, "")
    assert err.startswith(f"error: {output} cannot be written: it holds README.md, chat_template.jinja, config.json and 5 more")
    export(finished, None, tmp_path / "alone", "float32")
    assert tiny_run.files(output) == tiny_run.files(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_an_export_that_is_killed_leaves_nothing_that_looks_finished(kills: int, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    export(finished, None, tmp_path / "alone/model", "float32")
    output = tmp_path / "model"
    for number in range(kills):
        process = exporting(finished, output)
        while process.poll() is None and not list(tmp_path.glob("model.*.writing/*")):
            time.sleep(0.001)
        time.sleep(0.005 * number)
        process.kill()
        process.communicate()
        if output.exists():  # it came to its end before
            assert tiny_run.files(output) == tiny_run.files(tmp_path / "alone/model")
            shutil.rmtree(output)
    export(finished, None, output, "float32")
    assert tiny_run.files(output) == tiny_run.files(tmp_path / "alone/model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "model"], "what the killed ones left is gone"


@pytest.mark.parametrize("name", ["model.writing", ".model.tmp", "model.old-1"])
def test_a_users_folder_beside_the_target_survives_an_export(name: str, finished: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("mine")
    export(finished, None, tmp_path / "model", "float32")
    assert tiny_run.files(tmp_path / name) == {"thesis.tex": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model", name])


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors"])
@pytest.mark.parametrize("place", ["missing", "empty"])
def test_a_file_put_into_the_target_during_an_export_survives(
    place: str, name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model"
    if place == "empty":
        output.mkdir()
    read = StoredParams.__getitem__

    def put_and_read(params: StoredParams, parameter: str) -> jax.Array:
        output.mkdir(exist_ok=True)
        (output / name).write_text("mine")
        return read(params, parameter)

    monkeypatch.setattr(StoredParams, "__getitem__", put_and_read)
    message = f"{re.escape(str(output))} cannot be written: it holds {re.escape(name)}, which somebody else put there; nothing of it"
    with pytest.raises(ModelError, match=message):
        export(finished, None, output, "float32")
    assert tiny_run.files(output) == {name: b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "what was written of the model is gone"


def test_an_empty_mount_point_is_exported_to(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", output], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        (output / "lost+found").mkdir()  # as the root of a new disk has it
        export(finished, None, output, "float32")
        assert hf.read_config(output) == MODEL
        assert output.stat().st_dev != tmp_path.stat().st_dev
        assert not [path.name for path in output.iterdir() if "writing" in path.name]
    finally:
        subprocess.run(["umount", output], check=True)
    assert list(output.iterdir()) == [], "nothing went to the file system around it"


def test_a_disk_too_small_for_the_model_is_refused_where_the_model_goes(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", output], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(ModelError, match=r"cannot be written: it needs"):
            export(finished, None, output, "float32")
        assert list(output.iterdir()) == []
    finally:
        subprocess.run(["umount", output], check=True)
