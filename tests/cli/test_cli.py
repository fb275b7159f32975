"""The command line: lazy imports, one line for wrong input, exit codes."""

import subprocess
import sys

import pytest

from mol.cli import COMMANDS, main

WRONG = [
    [],
    ["no-such-command"],
    ["plan", "--scale", "huge"],
    ["plan", "--config", "absent.yaml"],
    ["train"],
    ["train", "--run", "absent"],
    ["train", "--run", "ct-moe", "--spec", "both.json"],
    ["train", "--spec", "absent.json"],
    ["train", "--run", "ct-moe", "--threads", "0"],
    ["train", "--run", "bench-prefill"],
    ["eval", "--run", "ct-moe", "--context", "5"],
    ["status", "--config", "absent.yaml"],
    ["audit", "--db", "absent.duckdb"],
    ["store", "query", "--db", "absent.duckdb", "SELECT 1"],
    ["check-paper", "--paper", "absent"],
    ["counts", "--config", "absent.toml"],
    ["bench", "--run", "absent"],
    ["data", "--spec", "absent.json", "--out", "x"],
]


@pytest.mark.parametrize("argv", WRONG, ids=" ".join)
def test_wrong_input_is_one_line_and_exit_code_two(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.strip() and captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    assert not list(tmp_path.rglob("*")), "a refused command must leave nothing behind"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert name in capsys.readouterr().out


def test_planning_and_auditing_need_no_torch():
    code = (
        "import sys, mol.plan.command, mol.plan.status, mol.paper.command,"
        " mol.report.audit_command, mol.store.command; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("words", ["plan --json", "counts"])  # by print, and by rich
def test_a_reader_that_leaves_early_is_no_error(words):
    call = f"{sys.executable} -m mol {words} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", call], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == "" and done.returncode == 0


def test_output_that_cannot_be_written_is_told():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m mol plan > /dev/full"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr == "mol plan: output: No space left on device\n"


def test_closed_output_is_no_error():
    call = f"{sys.executable} -m mol plan >&- 2>&-"
    assert subprocess.run(["bash", "-c", call]).returncode == 0


@pytest.mark.parametrize(
    "raised, code, line",
    [
        (KeyboardInterrupt(), 130, "mol plan: interrupted; the same command goes on\n"),
        (ModuleNotFoundError(name="torch"), 2, "mol plan: package torch is not installed; "),
    ],
    ids=["interrupted", "not installed"],
)
def test_faults_while_libraries_are_loaded(monkeypatch, capsys, raised, code, line):
    def load(module):
        raise raised

    monkeypatch.setattr("importlib.import_module", load)
    assert main(["plan"]) == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1
