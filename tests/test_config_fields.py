"""No dead knobs: every field is read, every field that is read exists. And the other habits that a reader of sources can check."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs.base import get_config

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxprorl"
OURS = sorted(path for folder in ("jaxprorl", "configs", "launch", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

# Validation is no use of a field.
NOT_READERS = {PACKAGE / "config.py"}
# Fields that are read by a computed name: (file, the expression in it) -> the fields that it reads.
COMPUTED = {
    ("jaxprorl/data/splits.py", 'data[f"{name}_per_task"]'): ["data.train_per_task", "data.validation_per_task", "data.held_out_per_task"],
    ("jaxprorl/data/splits.py", 'data[f"{name}_seed"]'): ["data.train_seed", "data.validation_seed", "data.held_out_seed"],
}
HOLDERS = {"training"}  # objects whose `config` is the run's config; beside them `self`, where a method takes a ConfigDict
CHOOSERS = {"as_begun", "checked", "with_arguments", "with_cpu_devices", "with_micro_batch_rows"}  # take a config and give one
METHODS = {"to_dict", "items", "keys", "unlocked", "copy_and_resolve_references"}  # of ConfigDict

FieldPath = tuple[str, ...]


@dataclass(frozen=True)
class Use:
    """`config.a.b` in a source: its path, whether it is read (not assigned), and the line."""

    path: FieldPath
    is_read: bool
    line: int


class Uses(ast.NodeVisitor):
    """Collects uses of a run's config: of parameters annotated `ConfigDict`, of `self._config` and the like, and of their aliases."""

    def __init__(self) -> None:
        self.found: list[Use] = []
        self._names: dict[str, FieldPath] = {}  # what a local name stands for
        self._is_holder = False  # whether `self` holds the run's config, not one of its own

    def resolve(self, node: ast.AST) -> FieldPath | None:
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr in ("config", "_config") and isinstance(node.value, ast.Name):
                holder = node.value.id
                if holder in HOLDERS or (holder == "self" and self._is_holder):
                    return ()
            base = self.resolve(node.value)
            return None if base is None or node.attr in METHODS else (*base, node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            base = self.resolve(node.value)
            return None if base is None else (*base, node.slice.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy_and_resolve_references":
            return self.resolve(node.func.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHOOSERS:
            return self.resolve(node.args[0])
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        annotations = [child.annotation for child in ast.walk(node) if isinstance(child, ast.arg)]
        self._is_holder = any(isinstance(annotation, ast.Name) and annotation.id == "ConfigDict" for annotation in annotations)
        self.generic_visit(node)
        self._is_holder = False

    def _function(self, node: ast.FunctionDef | ast.Lambda) -> None:
        outer = self._names
        self._names = dict(outer)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self._names.pop(argument.arg, None)
            if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "ConfigDict":
                self._names[argument.arg] = ()
        self.generic_visit(node)
        self._names = outer

    visit_FunctionDef = _function
    visit_Lambda = _function

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for left, right in pairs:
                if isinstance(left, ast.Name):
                    path = self.resolve(right)
                    self._names.pop(left.id, None)
                    if path is not None:
                        self._names[left.id] = path

    def _chain(self, node: ast.Attribute | ast.Subscript) -> None:
        path = self.resolve(node)
        if path is None:
            self.generic_visit(node)
        elif path:
            self.found.append(Use(path, isinstance(node.ctx, ast.Load), node.lineno))

    visit_Attribute = _chain
    visit_Subscript = _chain


def uses(source: str) -> list[Use]:
    visitor = Uses()
    visitor.visit(ast.parse(source))
    return visitor.found


def leaves(config: ConfigDict, prefix: FieldPath = ()) -> Iterator[FieldPath]:
    """Paths of all fields. What experiments fill counts as one field."""
    for name, value in config.items():
        if isinstance(value, ConfigDict) and (*prefix, name) not in (("data", "tasks"), ("filtering", "rules")):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name)


def unread(config: ConfigDict, sources: dict[str, str]) -> list[str]:
    """Fields that none of the sources reads."""
    read = {use.path[: len(leaf)] for source in sources.values() for use in uses(source) if use.is_read for leaf in leaves(config)}
    for (file, expression), fields in COMPUTED.items():
        if expression in sources.get(file, ""):
            read |= {tuple(field.split(".")) for field in fields}
    return [".".join(leaf) for leaf in leaves(config) if leaf not in read]


def unknown(config: ConfigDict, sources: dict[str, str]) -> list[str]:
    """Uses of fields that do not exist, as `file:line config.a.b`. What follows a field belongs to its value."""
    known = set(leaves(config))
    groups = {leaf[:depth] for leaf in known for depth in range(len(leaf))}
    wrong = []
    for file, source in sources.items():
        for use in uses(source):
            if use.path not in groups and not any(use.path[:depth] in known for depth in range(1, len(use.path) + 1)):
                wrong.append(f"{file}:{use.line} config.{'.'.join(use.path)}")
    return wrong


def package_sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path not in NOT_READERS}


def test_every_field_is_read() -> None:
    assert unread(get_config(), package_sources()) == []


def test_every_field_that_is_used_exists() -> None:
    assert unknown(get_config(), package_sources()) == []


def test_a_field_that_nothing_reads_is_found() -> None:
    config = get_config()
    config.rollout.made_up = 1
    config.also_made_up = 1
    assert set(unread(config, package_sources())) == {"also_made_up", "rollout.made_up"}


def test_a_computed_name_counts_only_while_it_is_there() -> None:
    sources = package_sources()
    sources["jaxprorl/data/splits.py"] = sources["jaxprorl/data/splits.py"].replace('data[f"{name}_seed"]', "0")
    assert set(unread(get_config(), sources)) >= {"data.train_seed", "data.held_out_seed"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("config.rollout.slots", {"rollout.slots"}),
        ("r = config.rollout; r.slots", {"rollout", "rollout.slots"}),
        ("r, b = config.rollout, config.batch; b.prompts", {"rollout", "batch", "batch.prompts"}),
        ("r = config.rollout; r = other(); r.slots", {"rollout"}),
        ("copy = config.copy_and_resolve_references(); copy.seed", {"seed"}),
        ("(lambda config: config.slots)(1)", set()),
        ("(lambda x: config.seed)(1)", {"seed"}),
        ("config['model']['path']", {"model.path"}),
        ("config.model.path.upper()", {"model.path.upper"}),
        ("config.rollout.slots = 3", set()),
        ("config.data.to_dict()", {"data"}),
        ("self._config.seed + training.config.steps + folder.config.name", {"steps"}),
    ],
)
def test_the_reader_of_sources_follows(body: str, expected: set[str]) -> None:
    found = uses(f"def f(config: ConfigDict, other):\n    {body}\n")
    assert {".".join(use.path) for use in found if use.is_read} == expected


def test_the_reader_of_sources_knows_which_objects_hold_the_config() -> None:
    source = """
class Engine:
    def __init__(self, config: ConfigDict):
        self._config = config
    def seed(self):
        return self._config.seed

class Model:
    def __init__(self, config: Qwen2Config):
        self.config = config
    def size(self):
        return self.config.hidden_size
"""
    assert {use.path for use in uses(source)} == {("seed",)}


def test_a_use_of_an_unknown_field_is_found() -> None:
    source = {"x.py": "def f(config: ConfigDict):\n    config.rollout.slotz\n    config.run_name.upper()\n    config.batch.x = 1\n"}
    assert unknown(get_config(), source) == ["x.py:2 config.rollout.slotz", "x.py:4 config.batch.x"]


def test_every_field_has_a_comment() -> None:
    bare = [
        line.strip()
        for file in ("configs/base.py", "configs/ablations/base.py")
        for line in (ROOT / file).read_text().splitlines()
        if re.match(r"\s+c\.[\w.]+ = (?!ConfigDict\(\)$)", line) and "  # " not in line
    ]
    assert not bare, "say unit, why and source"


def test_nothing_reads_a_field_with_a_default() -> None:
    found = [str(path.relative_to(ROOT)) for path in OURS if re.search(r"\bconfig\.([\w.]+\.)?get\(", strip_foreign(path))]
    assert found == []


def strip_foreign(path: Path) -> str:
    """The source, without files whose `config` is a Hugging Face JSON."""
    return "" if path == PACKAGE / "data/tokenizer.py" else path.read_text()


def test_files_are_named_by_what_they_hold() -> None:
    assert [str(path) for path in OURS if path.stem in ("utils", "util", "helpers", "misc", "common")] == []


def test_files_stay_readable() -> None:
    assert {str(path.relative_to(ROOT)): lines for path in OURS if (lines := len(path.read_text().splitlines())) > 420} == {}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    "room",
    ["rollout", "rewards", "data", "evaluation", "algorithms", "monitoring", "models", "sharding", "resets", "warmstart", "ablations"],
)
def test_rooms_do_not_import_the_loop(room: str) -> None:
    wrong = {
        path.name: names
        for path in sorted((PACKAGE / room).glob("*.py"))
        if (names := imports(path) & {"jaxprorl.train", "jaxprorl.start"})
    }
    assert wrong == {}


def test_nothing_in_the_package_imports_the_loop() -> None:
    assert [path.name for path in sorted(PACKAGE.rglob("*.py")) if "jaxprorl.train" in imports(path)] == []


def test_algorithms_import_nothing_of_ours_but_one_another() -> None:
    for path in sorted((PACKAGE / "algorithms").glob("*.py")):
        ours = {name for name in imports(path) if name.split(".")[0] in ("jaxprorl", "configs")}
        assert not {name for name in ours if not name.startswith("jaxprorl.algorithms.")}, path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("room", ["data", "rewards"])
def test_host_rooms_start_without_jax(room: str) -> None:
    """Graders and data readers are started in processes of their own, which must be quick and hold no device."""
    modules = [f"jaxprorl.{room}.{path.stem}" for path in sorted((PACKAGE / room).glob("*.py")) if path.stem != "__init__"]
    program = (
        f"import sys, {', '.join(modules)}, jaxprorl.types\n"
        "print([name for name in sys.modules if name in ('jax', 'flax', 'optax', 'reasoning_gym', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
