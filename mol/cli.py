"""`mol`: one subcommand a module, imported only when it is called."""

import argparse
import importlib
import io
import os
import re
import sys

# name -> (module with configure(parser) and run(args), one-line help)
COMMANDS = {
    "plan": ("mol.plan.command", "list the runs of a scale and their cost"),
    "status": ("mol.plan.status", "which runs are complete, which are missing"),
    "counts": ("mol.model.command", "computed against printed parameter counts"),
    "check-paper": ("mol.paper.command", "recompute the paper's derived numbers from its own"),
    "audit": ("mol.report.audit_command", "reported against reproduced, with verdicts"),
    "data": ("mol.data.command", "prepare a corpus: text, tokenizer, token shards"),
    "train": ("mol.train.command", "train and evaluate one run of the plan"),
    "eval": ("mol.evaluate.command", "perplexity of a trained run"),
    "zeroshot": ("mol.evaluate.zero_shot_command", "score a trained run with lm-eval"),
    "bench": ("mol.bench.command", "run one benchmark of the plan"),
    "export": ("mol.export.command", "a trained run in the form transformers loads"),
    "store": ("mol.store.command", "build, verify, export or query the database"),
    "report": ("mol.report.command", "tables, figures and the HTML page"),
    "track": ("mol.store.track_command", "mirror the records into MLflow"),
    "selfcheck": ("mol.ops.command", "fast paths against plain references"),
}

# torch's words for want of memory: on a CPU, on a GPU, and of a tensor that no machine holds.
NO_MEMORY = re.compile("allocate memory|out of memory|size calculation overflowed")
REBUILD = "run `mol store build`"


class Parser(argparse.ArgumentParser):
    """Refuses wrong arguments in one line, as every other wrong input is refused."""

    def error(self, message: str):
        from mol.base import visible

        self.exit(2, f"{self.prog}: {visible(message)}; see {self.prog} --help\n")

    def parse_known_args(self, args=None, namespace=None):
        """The command itself says which of its options was meant, not `mol`, which knows none."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from mol.known import nearest

            near = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near and f'; {near}'}")
        return found, unknown


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code, 2 for bad input with one line on stderr, 130
    where it is interrupted, be it while libraries are still being loaded."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in argv if not word.startswith("-")), None)
    name = f"mol {chosen}" if chosen in COMMANDS else "mol"
    try:
        _make_printable()
        return _guarded(argv, chosen, name)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on", file=sys.stderr)
        return 130


def _guarded(argv: list[str], chosen: str | None, name: str) -> int:
    import pydantic

    from mol.base import UserError, one_line, reason_of, visible

    try:
        return _run(argv, chosen)
    except pydantic.ValidationError as error:
        message = str(one_line(error, error.title))
    except UserError as error:
        message = str(error)
    except BrokenPipeError:  # `mol plan | head`: the reader has enough
        _give_up_output()
        return 0
    except OSError as error:
        message = f"{error.filename or 'output'}: {reason_of(error)}"
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
            raise
        message = "out of memory; choose smaller sizes or a larger machine"
    except ModuleNotFoundError as error:
        if (error.name or "mol").partition(".")[0] == "mol":
            raise
        message = f"package {error.name} is not installed; README.md says how to install all"
    except Exception as error:
        if not type(error).__module__.endswith("duckdb"):  # which is not imported here
            raise
        message = (
            f"the database is damaged or of an older code ({reason_of(error)[:300]}); {REBUILD}"
        )
    print(f"{name}: {visible(message)}", file=sys.stderr)
    return 2


def _run(argv: list[str], chosen: str | None) -> int:
    from mol.base import UserError

    parser = Parser(prog="mol", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            importlib.import_module(module).configure(sub)
    if "" in argv or any("\0" in word for word in argv):
        raise UserError("an argument is empty or holds the character NUL; correct it")
    try:
        args = parser.parse_args(argv)
        return importlib.import_module(COMMANDS[args.command][0]).run(args) or 0
    finally:
        _flush()


def _make_printable() -> None:
    """Names of files need not be text, nor terminals UTF-8; and output may be closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it lasts as long as we do
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Say here, not at exit, that the output could not be written."""
    from mol.base import UserError, reason_of

    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _give_up_output()
        raise UserError(f"standard output: cannot be written ({reason_of(error)})") from None


def _give_up_output() -> None:
    """Nothing is left to be flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
