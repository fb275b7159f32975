"""The claims are well formed, and the paper's own cells bear them out, but for what is known."""

import itertools

import pytest

from mol.base import UserError
from mol.paper.claims import Claim, load_claims
from mol.paper.reported import load_paper

# MoL's 23.07 % on MMLU is below the range that chance allows.
AGAINST_ITS_OWN_CELLS = {"zeroshot-mmlu-chance"}

GOOD = {
    "id": "a-beats-b",
    "place": "Table 1",
    "text": "a beats b",
    "type": "difference",
    "experiment": "E05",
    "metric": "ppl",
    "sides": ["mol-top3", "ct-moe"],
    "expected": "<0",
    "seeds": "single",
}


def write(folder, *claims):
    lines = []
    for claim in claims:
        lines.append("[[claim]]")
        for key, value in claim.items():
            text = str(value).replace("'", '"') if isinstance(value, list) else f'"{value}"'
            lines.append(f"{key} = {text}")
    (folder / "claims.toml").write_text("\n".join(lines) + "\n")
    return load_paper().model_copy(update={"folder": folder})


def test_a_side_in_words_is_a_condition(tmp_path):
    (claim,) = load_claims(write(tmp_path, GOOD))
    assert [side.condition for side in claim.sides] == ["mol-top3", "ct-moe"]
    assert claim.target.prints(-2.98) and not claim.target.prints(0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "hunch"}, "type"),
        ({"metric": "vibes"}, "not a metric"),
        ({"sides": ["mol-top3"]}, "takes 2 sides"),
        ({"sides": ["mol-top3", "mol-top9"]}, "'mol-top9' is not in E05"),
        ({"experiment": "E99"}, "'E99' is not in experiments.toml"),
        ({"cell": "t99.none"}, "not in reported.csv"),
        ({"expected": "better"}, "not a printed number"),
        ({"expected": "2.98"}, "neither a bound nor a range"),
        ({"type": "ordering"}, "increasing or decreasing"),
        ({"type": "crossover"}, "along goes with crossover"),
        ({"along": "length"}, "along goes with crossover"),
        ({"versus": ["ct-moe"]}, "versus goes with monotone"),
        ({"id": "A"}, "match pattern"),
        ({"seeds": "some"}, "seeds"),
    ],
)
def test_a_malformed_claim_is_named(tmp_path, change, message):
    paper = write(tmp_path, GOOD | change)
    with pytest.raises(UserError, match=message) as caught:
        load_claims(paper)
    assert "claims.toml: claim" in str(caught.value) and "\n" not in str(caught.value)


def test_a_repeated_claim_is_named(tmp_path):
    with pytest.raises(UserError, match="a-beats-b: occurs twice"):
        load_claims(write(tmp_path, GOOD, GOOD))


@pytest.fixture(scope="module")
def claims():
    return load_claims(load_paper())


def test_there_are_claims_of_every_type_and_experiment(claims):
    assert len(claims) >= 40
    assert {c.type for c in claims} == set(Claim.model_fields["type"].annotation.__args__)
    assert {c.experiment for c in claims} == set(load_paper().experiments)


def printed_values(cells, claim, side):
    """The paper's values for a side, by hardware, of the cells that are like it."""
    labels = {**claim.labels, **side.labels}
    found = {}
    for cell in cells:
        same = cell.condition == side.condition and cell.metric == claim.metric and not cell.op
        if same and labels.items() <= cell.labels.items():
            number = cell.number.value / cell.per_metric_unit
            best = found.get(cell.hardware)
            if best is None or (cell.n_seeds or 1) > best[0]:
                found[cell.hardware] = ((cell.n_seeds or 1), number)
    return {hardware: number for hardware, (_, number) in found.items()}


def holds(claim, values, versus):
    if claim.type in ("ordering", "monotone"):
        steps = [x - y for x, y in zip(values, versus, strict=True)] if versus else values
        pairs = itertools.pairwise(steps)
        return all((b > a) == (claim.expected == "increasing") for a, b in pairs)
    if claim.type == "threshold":
        effect = values[0]
    elif claim.type == "ratio":
        effect = values[0] / values[1]
    else:
        effect = values[0] - values[1]
    return claim.target.meets(effect, effect)


def test_the_papers_own_cells_bear_the_claims_out(claims):
    cells = load_paper().cells
    judged, wrong = 0, set()
    for claim in claims:
        if claim.type == "crossover":
            continue
        sides = [printed_values(cells, claim, side) for side in (*claim.sides, *claim.versus)]
        for hardware in set.intersection(*(set(side) for side in sides)):
            numbers = [side[hardware] for side in sides]
            n = len(claim.sides)
            judged += 1
            if not holds(claim, numbers[:n], numbers[n:]):
                wrong.add(claim.id)
    assert judged >= 60
    assert wrong == AGAINST_ITS_OWN_CELLS
