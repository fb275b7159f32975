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


def test_a_reader_that_leaves_early_is_no_error():
    call = f"{sys.executable} -m mol plan --json | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", call], capture_output=True, text=True)
    assert done.stdout == "[\n" and done.stderr == "" and done.returncode == 0
