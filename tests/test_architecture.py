"""The rules that hold the parts together: who imports whom, torch APIs that 2.11 lacks, names, start-up without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "perilune"
# torch 2.13 has these, 2.11 does not (both checked in the wheels); our floor is 2.11.
NEWER_THAN_TORCH_211 = {"dp_mesh_dims", "set_symm_mem_for_comm"}
TORCH_FREE = {"errors", "config", "rundir", "shapes", "plan"}
VAGUE_NAMES = {"utils.py", "helpers.py", "common.py", "base.py", "misc.py"}


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks; the tree may hold unfinished work beside them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so which files belong to it is not known")
    listing = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def contracts() -> dict[str, dict]:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["name"]: contract for contract in tool["contracts"]}


def parts_of_the_package() -> set[str]:
    """Top-level modules of perilune: `config`, `ops`, `errors` …"""
    names = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {path.stem for path in PACKAGE.glob("*.py")}
    return names - {"__init__", "__main__"}


def test_import_contracts_hold():
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_part_that_must_stay_free_of_torch_is_under_that_contract():
    contract = next(c for name, c in contracts().items() if name.startswith("No torch"))
    listed = {module.removeprefix("perilune.") for module in contract["source_modules"]}
    assert listed == TORCH_FREE & parts_of_the_package(), "add the new part to the contract in pyproject.toml"


def test_every_part_has_a_layer():
    layers = next(c for c in contracts().values() if c["type"] == "layers")["layers"]
    named = set(re.findall(r"\w+", " ".join(layers)))
    assert parts_of_the_package() <= named, f"no layer for {sorted(parts_of_the_package() - named)}"


def newer_torch_uses(source: str) -> list[str]:
    """Names in `source` that torch 2.11 does not have: as an attribute, a keyword argument or an import."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = {
            ast.Attribute: lambda n: [n.attr],
            ast.keyword: lambda n: [n.arg],
            ast.ImportFrom: lambda n: [alias.name for alias in n.names],
        }.get(type(node), lambda n: [])(node)
        found += [f"line {getattr(node, 'lineno', '?')}: {name}" for name in names if name in NEWER_THAN_TORCH_211]
    return found


def test_no_torch_api_newer_than_the_floor():
    for path in tracked("*.py"):
        assert not newer_torch_uses(path.read_text()), path


@pytest.mark.parametrize(
    "source",
    [
        "fully_shard(m, dp_mesh_dims=('a',))",
        "group.set_symm_mem_for_comm(x)",
        "from torch.x import set_symm_mem_for_comm",
    ],
)
def test_the_floor_check_sees_each_form(source):
    assert newer_torch_uses(source)


def import_without(missing: set[str], modules: list[str]) -> str:
    """Import `modules` in a fresh interpreter in which `missing` cannot be imported; returns what went wrong, or ""."""
    code = (
        f"import sys, importlib; sys.modules.update(dict.fromkeys({sorted(missing)!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def modules_of(part: str) -> list[str]:
    """Dotted names of every tracked module in a part of the package."""
    paths = tracked(f"perilune/{part}.py", f"perilune/{part}/*.py")
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths]
    return [name.removesuffix(".__init__") for name in names]


def test_config_shapes_and_run_folders_work_where_torch_is_not_installed():
    modules = [name for part in sorted(TORCH_FREE) for name in modules_of(part)]
    assert import_without({"torch", "transformers"}, modules) == ""


def test_everything_below_the_leaves_imports_without_the_libraries_of_the_leaves():
    parts = parts_of_the_package() - {"cli", "report", "bench", "explain", "http"}
    modules = [name for part in sorted(parts) for name in modules_of(part)]
    modules = [
        name
        for name in modules
        if not name.startswith(("perilune.serve.api", "perilune.sandbox.api", "perilune.config.parse"))
    ]
    # Files of Triton kernels are imported once `select` has chosen them; `triton` in their path says what they need. So are
    # the files that launch KDA's, which stand between its Triton and its CUDA kernels.
    names = ("autograd", "backward", "fold", "form_backward", "forms", "forward", "states")
    launchers = {f"perilune.ops.kda.gpu.{name}" for name in names}
    modules = [name for name in modules if "triton" not in name and name not in launchers]
    libraries = {
        "starlette",
        "uvicorn",
        "msgspec",
        "tyro",
        "rich",
        "plotly",
        "matplotlib",
        "jinja2",
        "pyarrow",
        "PIL",
        "triton",
    }
    assert import_without(libraries, modules) == ""


def test_the_import_check_sees_a_missing_library():
    assert "json" in import_without({"json"}, ["perilune.rundir"])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_and_version_do_not_import_torch(arguments):
    code = (
        "import sys; from perilune.cli.main import main; status = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'plotly', 'tyro', 'rich'} & set(sys.modules); assert not heavy, heavy; print('light')"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("light\n"), done.stderr


def test_python_dash_m_runs_the_same_program():
    done = subprocess.run([sys.executable, "-m", "perilune", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"perilune \d+\.\d+\.\d+\n", done.stdout), done.stdout + done.stderr


def test_file_names_say_what_is_inside():
    vague = [str(path.relative_to(ROOT)) for path in tracked("*.py") if path.name in VAGUE_NAMES]
    assert not vague, f"name these files by their concept: {vague}"


def test_test_files_have_unique_names():
    counts = Counter(path.name for path in tracked("tests/*.py") if path.name != "conftest.py")
    twice = [name for name, number in counts.items() if number > 1]
    assert not twice, f"pytest imports test files by name; these appear twice: {twice}"


def test_no_file_names_a_path_of_one_machine():
    folders = "|".join(["work", "farm", "root", "home/[a-z]+"])
    pattern = re.compile(rf"(?<![\w.}}\]])/({folders})/[A-Za-z0-9._-]+")
    for path in tracked():
        if path.suffix in (".png", ".npz", ".safetensors", ".parquet"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()[:160]}"


def test_no_tracked_file_is_large():
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in tracked() if p.stat().st_size > 500_000}
    assert not large, f"over 500 kB; build it by script instead: {large}"
