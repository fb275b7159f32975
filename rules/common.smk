# The plan, and the files that decide what reruns.

import re
import sys
from pathlib import Path

from mol.base import UserError
from mol.plan.build import plan, read_config
from mol.plan.experiments import load_experiments
from mol.plan.hashes import GROUPS, source_hash, write_changed

try:
    CONFIG = read_config(config)
    PLAN = plan(CONFIG.scale, CONFIG)
except UserError as error:
    raise WorkflowError(str(error))

# Jobs share the cores between them: one thread each, whatever a math library would take.
shell.prefix("export OMP_NUM_THREADS=1; ")
MOL = f"{sys.executable} -m mol"
# Before a command that takes GPUs: waits for so many free ones and shows it no others.
ON_GPUS = f"{sys.executable} -m mol.gpus"
SCALE = CONFIG.scale


class ByName(dict):
    """What is planned, by name; rules match names of other plans too, which are refused here."""

    def __missing__(self, name):
        raise WorkflowError(f"{name}: not planned; `mol plan --scale {SCALE}` lists what is")


SPECS = ByName((planned.run_id, planned.spec) for planned in PLAN)
GPUS = ByName((planned.run_id, planned.gpus) for planned in PLAN)
EXPERIMENTS = load_experiments().experiments


def run_ids(kind, experiment=None):
    """Planned runs of a kind, of one experiment or of all."""
    return [
        planned.run_id
        for planned in PLAN
        if planned.spec.kind == kind and experiment in (None, *planned.experiments)
    ]


def records(*run_ids):
    return [f"results/runs/{SCALE}/{run_id}/record.json" for run_id in run_ids]


def gpus(wildcards):
    """How many GPUs a run takes, by the plan."""
    return GPUS[wildcards.run_id]


def train_gpus(wildcards):
    """How many GPUs train a run. What cannot be is refused here, before a corpus is prepared in
    vain; snakemake would cut the number down to its limit, which profiles/gpu sets."""
    run_id, wanted = wildcards.run_id, gpus(wildcards)
    limit = getattr(workflow.global_resources.get("gpu"), "value", None)
    if limit is not None and wanted > limit:
        raise WorkflowError(
            f"{run_id}: trains on {wanted} GPUs, {limit} are here; "
            "use a machine that has them, or set gpus_per_run in config/config.yaml"
        )
    optim = SPECS[run_id].optim
    if wanted > (sequences := optim.batch_size // optim.accumulate):
        raise WorkflowError(
            f"{run_id}: {wanted} GPUs for batches of {sequences} sequences; "
            "lower gpus_per_run in config/config.yaml"
        )
    return wanted


def trainer(wildcards):
    """`mol` as one process, or as one a GPU."""
    count = gpus(wildcards)
    several = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {count}"
    return f"{several} -m mol" if count > 1 else MOL


def wanted(experiment=None):
    """Records of every run that an experiment, or the whole suite, needs."""
    kinds = ("train", "zeroshot", "bench")
    return records(*(run_id for kind in kinds for run_id in run_ids(kind, experiment)))


def one_of(names):
    """A wildcard constraint that matches these, with any seed and any hash: snakemake copies it
    into every path of every job, so it must not grow with the runs. No names: matches nothing."""
    stems = dict.fromkeys(re.sub(r"(-s\d+)?-\w+$", "", name) for name in names)
    return rf"(?:{'|'.join(map(re.escape, stems))})(?:-s\d+)?-\w+" if stems else "(?!)"


# A specification or a group of sources is a file that is rewritten only when it changes, so its
# modification time is what a rule can depend on.
RESULTS = (
    "results/runs/*/*/record.json",
    "results/data/*/*/meta.json",
    "results/mol.duckdb",
    "paper_tables/index.html",
)
LATEST = max((p.stat().st_mtime for name in RESULTS for p in Path().glob(name)), default=0.0)


def kept(folder, ending, contents):
    """Key -> file <key><ending> in `folder`, of this content."""
    try:
        write_changed(Path(folder), {key + ending: text for key, text in contents.items()}, LATEST)
    except UserError as error:
        raise WorkflowError(str(error))
    return ByName((key, f"{folder}/{key}{ending}") for key in contents)


def as_json(specs):
    return {name: spec.model_dump_json(indent=1) + "\n" for name, spec in specs.items()}


HASHES = kept("results/hashes", ".sha256", {group: source_hash(group) + "\n" for group in GROUPS})
kept(f"results/specs/{SCALE}", ".json", as_json(SPECS))
DATA = {spec.data.folder: spec.data for spec in SPECS.values() if spec.kind == "train"}
CORPORA = kept(f"results/specs/{SCALE}/data", ".json", as_json(DATA))


def local_text(corpus):
    """A corpus's own files, whose change prepares it anew. `mol data` names a missing one."""
    source = DATA[corpus].source
    files = (source.train, source.validation, source.test) if source.kind == "file" else ()
    return [name for name in files if name and Path(name).exists()]
