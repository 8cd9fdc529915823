"""bootstrap.py without installing anything: messages, the stamp, what is passed on, and that it needs no package."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (ROOT / "bootstrap.py").read_text()


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """The module, pointed at an empty project folder."""
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", ROOT / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    monkeypatch.setattr(module, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(module, "PYTHON", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(module, "STAMP", str(tmp_path / ".venv" / "perilune-bootstrap.json"))
    return module


@pytest.fixture
def installed(bootstrap):
    """A project whose set-up finished with [serve,report]: the interpreter is a link to this one."""
    folder = Path(bootstrap.VENV, "bin")
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    bootstrap.write_stamp({"serve", "report"}, "2.13.0")
    return bootstrap


@pytest.fixture
def no_processes(bootstrap, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"started a process: {arguments}")

    for name in ("run", "call", "Popen"):
        monkeypatch.setattr(bootstrap.subprocess, name, refuse)


def program(folder: Path, name: str, body: str) -> Path:
    """An executable Python script `name` in `folder`."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- it runs on any machine


def test_it_imports_only_the_standard_library():
    for node in ast.walk(ast.parse(SOURCE)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names, name


def test_an_old_python_can_parse_it_far_enough_to_print_the_message():
    ast.parse(SOURCE, feature_version=(3, 7))


@pytest.mark.parametrize(
    "version, words",
    [((3, 10), "too old: perilune needs 3.11"), ((3, 15), "too new: torch 2.13.0 has wheels up to Python 3.14")],
)
def test_an_unsupported_python_is_told_what_to_use(bootstrap, monkeypatch, version, words):
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: "/bin/" + name if name == "python3.12" else None)
    with pytest.raises(SystemExit, match=words) as stopped:
        bootstrap.check_machine(version)
    assert "python3.12 bootstrap.py" in str(stopped.value)


def test_a_new_python_with_its_own_torch_is_welcome(bootstrap):
    bootstrap.check_machine((3, 15), system_torch="2.16.0")


def test_an_intel_mac_is_told_that_torch_has_no_build(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    monkeypatch.setattr(bootstrap.platform, "machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match="Intel Macs"):
        bootstrap.check_machine((3, 12))


def test_missing_ensurepip_names_the_system_package(bootstrap, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match=rf"apt-get install python3\.{sys.version_info[1]}-venv"):
        bootstrap.make_venv(see_system=False)


# ---- the stamp


def test_a_second_call_starts_no_process(installed, no_processes):
    installed.set_up(["serve", "report"])
    installed.set_up([])


def test_a_missing_extra_is_noticed(installed, no_processes):
    with pytest.raises(AssertionError, match="started a process"):
        installed.set_up(["dev"])


@pytest.mark.parametrize(
    ("torch", "extras"), [("2.13.0+cpu", {"dev", "interpreter"}), ("2.13.0", {"dev"}), ("2.11.0+cu130", {"dev"})]
)
def test_the_tests_own_triton_stays_off_a_torch_that_brings_one(bootstrap, monkeypatch, torch, extras):
    installed = []
    monkeypatch.setattr(bootstrap, "torch_version", lambda python: torch)
    monkeypatch.setattr(bootstrap, "make_venv", lambda see_system: None)
    monkeypatch.setattr(bootstrap, "install_package", installed.append)
    monkeypatch.setattr(bootstrap, "write_stamp", lambda names, torch: None)
    bootstrap.set_up(["dev"])
    assert installed == [extras]


@pytest.mark.parametrize("change", ["root", "requirements", "torn", "no python"])
def test_a_stamp_that_does_not_describe_this_folder_counts_for_nothing(installed, change):
    stamp = Path(installed.STAMP)
    assert installed.read_stamp()["extras"] == ["report", "serve"]
    if change == "torn":
        stamp.write_text(stamp.read_text()[:20])
    elif change == "no python":
        Path(installed.PYTHON).unlink()
    else:
        stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {change: "other"}))
    assert installed.read_stamp() == {}


def test_lint_settings_do_not_ask_for_a_new_set_up_but_dependencies_do(installed):
    project = Path(installed.ROOT, "pyproject.toml")
    before = installed.requirements_digest()
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 100"))
    assert installed.requirements_digest() == before
    project.write_text(project.read_text().replace('"numpy>=1.26"', '"numpy>=2.0"'))
    assert installed.requirements_digest() != before


def test_every_extra_that_a_verb_installs_is_declared(bootstrap):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name for extras in bootstrap.EXTRAS.values() for name in extras} <= set(declared)


# ---- torch first, and how large it is


def test_the_size_is_the_sum_of_what_pip_plans_to_fetch(bootstrap, monkeypatch, tmp_path):
    wheels = [tmp_path / "a b.whl", tmp_path / "c.whl"]
    wheels[0].write_bytes(bytes(700))
    wheels[1].write_bytes(bytes(42))
    plan = {"install": [{"download_info": {"url": wheel.as_uri()}} for wheel in wheels]}
    body = f"import sys; open(sys.argv[sys.argv.index('--report') + 1], 'w').write({json.dumps(plan)!r})"
    planner = program(tmp_path, "planner", body)
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: [str(planner), *arguments])
    assert bootstrap.download_size("torch==2.13.0") == (742, 2)


def test_an_index_that_does_not_tell_is_answered_with_the_usual_sizes(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: [str(program(tmp_path, "broken", "raise SystemExit(1)"))])
    assert bootstrap.download_size("torch==2.13.0") == (None, 0)
    assert "GB" in bootstrap.expected_size()


@pytest.mark.parametrize("uv_works", [True, False])
def test_uv_fetches_the_cpu_build_where_it_can_and_pip_otherwise(bootstrap, monkeypatch, tmp_path, uv_works):
    log = tmp_path / "log"
    body = "import sys; open({!r}, 'a').write(' '.join([{!r}] + sys.argv[1:]) + '\\n'); raise SystemExit({})"
    program(tmp_path, "uv", body.format(str(log), "uv", 0 if uv_works else 2))
    pip = program(tmp_path, "pip", body.format(str(log), "pip", 0))
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: [str(pip), "install", *arguments])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bootstrap, "download_size", lambda requirement: (None, 0))
    bootstrap.install_torch()
    calls = log.read_text().splitlines()
    assert calls[0].startswith("uv pip install") and "--torch-backend=cpu torch==2.13.0" in calls[0]
    assert len(calls) == (1 if uv_works else 2)
    assert uv_works or calls[1].endswith("torch==2.13.0")


def test_a_failed_step_stops_with_the_command_and_the_way_out(bootstrap):
    with pytest.raises(SystemExit, match="could not do it .exit 3 .*python3 -m perilune"):
        bootstrap.run([sys.executable, "-c", "raise SystemExit(3)"], "could not do it")


# ---- verbs


def test_demo_becomes_the_program_with_the_remaining_arguments(installed, monkeypatch):
    became = []
    monkeypatch.setattr(installed.os, "execv", lambda path, arguments: became.append((path, arguments)))
    monkeypatch.setattr(installed, "test", lambda arguments: 0)
    installed.main(["demo", "--json", "-x"])
    path = os.path.join(installed.VENV, "bin", "perilune")
    assert became[0] == (path, [path, "demo", "--json", "-x"])


@pytest.mark.parametrize(("rest", "extras"), [([], ["serve", "report"]), (["--vision"], ["serve", "report", "vision"])])
def test_a_demo_installs_what_it_draws_with(bootstrap, monkeypatch, rest, extras):
    wanted = []
    monkeypatch.setattr(bootstrap.os, "execv", lambda path, arguments: None)
    monkeypatch.setattr(bootstrap, "set_up", wanted.append)
    monkeypatch.setattr(bootstrap, "soak", lambda arguments: 0)
    bootstrap.main(["demo", *rest])
    assert wanted == [extras]


def test_one_failing_linter_fails_the_test_run_and_is_named(installed, monkeypatch, capsys):
    monkeypatch.setattr(installed.subprocess, "call", lambda command, **options: int("lint-imports" in command[0]))
    assert installed.test([]) == 1
    assert "failed: import-linter\n" in capsys.readouterr().err


def test_arguments_narrow_the_run_to_pytest(installed, monkeypatch):
    commands = []
    monkeypatch.setattr(installed.subprocess, "call", lambda command, **options: commands.append(command) or 0)
    assert installed.test(["-k", "kda"]) == 0
    assert len(commands) == 1 and commands[0][-2:] == ["-k", "kda"] and "pytest" in commands[0]


def test_soak_chooses_by_name(installed, monkeypatch):
    commands = []
    monkeypatch.setattr(installed.subprocess, "call", lambda command, **options: commands.append(command) or 0)
    installed.soak(["kill", "-x"])
    assert commands[0][-3:] == ["-k", "kill", "-x"] and "--soak" in commands[0]
    installed.soak([])
    assert commands[1][-2:] == ["-m", "soak"]


def test_setup_takes_known_extras_only(bootstrap):
    assert bootstrap.parse_extras(["--extras", "serve,report"]) == ["serve", "report"]
    assert bootstrap.parse_extras(["--extras=data"]) == ["data"]
    with pytest.raises(SystemExit, match="setup takes only --extras"):
        bootstrap.parse_extras(["serve"])
    with pytest.raises(SystemExit, match="unknown extra 'reprot'; allowed: serve, report"):
        bootstrap.known_extras(["reprot"])


def test_an_unknown_verb_lists_the_verbs():
    done = subprocess.run([sys.executable, ROOT / "bootstrap.py", "dmeo"], capture_output=True, text=True)
    assert done.returncode == 2 and "allowed: demo, test, soak, setup" in done.stderr
