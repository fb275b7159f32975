"""The readme's commands are the ones that exist."""

import re

from mol.cli import COMMANDS
from mol.plan.hashes import ROOT

README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)


def test_two_commands_set_up_everything_and_ci_runs_the_second():
    run, test = (block.strip() for block in BLOCKS[:2])
    for command in (run, test):
        assert "\n" not in command
        assert command.startswith(
            "python3.11 -m venv .venv && .venv/bin/pip install -c constraints"
        )
    assert run.endswith("snakemake --cores all paper_tables")
    assert test in (ROOT / ".ci/run").read_text("utf-8")


def test_every_mol_command_named_in_the_documents_exists():
    documents = [ROOT / "README.md", ROOT / "results/README.md", *(ROOT / "docs").glob("*.md")]
    for document in documents:
        text = document.read_text("utf-8")
        named = re.findall(r"`(?:\.venv/bin/)?mol ([a-z-]+)", text)
        named += re.findall(r"^mol ([a-z-]+)", text, re.MULTILINE)
        assert set(named) <= COMMANDS.keys(), document


def test_every_linked_file_exists():
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), (document, target)


def test_pinned_torch_is_the_one_the_readme_is_about():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
