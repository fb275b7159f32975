"""Which experiments of a paper a run belongs to."""

from mol.plan.experiments import Paper
from mol.plan.spec import RunSpec


def experiments_of(spec: RunSpec, paper: Paper) -> list[str]:
    """Experiments that list the run's condition, with a seed that they use or one that the paper
    does not use at all (a reader's own). Zero-shot runs belong to those with tasks."""
    found = []
    for name, experiment in paper.experiments.items():
        if spec.kind == "bench":
            member = spec.condition in experiment.benches
        else:
            seeds = paper.seeds if spec.condition in experiment.three_seeds else paper.seeds[:1]
            member = (
                spec.condition in experiment.at(spec.scale)
                and (spec.kind == "train" or bool(experiment.zero_shot))
                and (spec.seed in seeds or spec.seed not in paper.seeds)
            )
        if member:
            found.append(name)
    return found
