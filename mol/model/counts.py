"""Parameter counts of any configuration, and the rows the paper prints, computed again.

Every count is of the model itself, built on the meta device: no formula stands beside the code.
"""

import functools
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Literal

import pydantic
import torch
from pydantic import Field, model_validator
from torch import nn

from mol.base import Frozen, UserError, checked, one_line, read_toml
from mol.model.config import Layer, ModelConfig, SplitLayer
from mol.model.split_stage import SplitStage
from mol.model.transformer import LanguageModel
from mol.plan.experiments import PAPER, load_experiments

ActiveRule = Literal["with_delta_extras", "without_delta_extras"]
ACTIVE = "active_"  # + ActiveRule: a rule of counts.toml
Rule = Literal[
    "total", "active_with_delta_extras", "active_without_delta_extras", "extra", "projection_share"
]
_UNITS = {"": 1, "M": 10**6, "B": 10**9, "%": Decimal("0.01")}


class PrintedCount(Frozen):
    """One row of counts.toml: a printed string, and the model and rule that should give it."""

    place: str  # table or section
    condition: str | None = None  # a slug of conditions.toml ...
    label: str | None = None  # ... or a label and a configuration
    config: ModelConfig | None = None
    rule: Rule = "total"
    printed: str | None = Field(None, pattern=r"^~?\d+(\.\d+)?[MB%]?$")
    how: Literal["derived", "found", "guessed"] = "derived"
    note: str | None = None

    @model_validator(mode="after")
    def _check(self):
        if (self.condition is None) == (self.config is None):
            raise ValueError("give exactly one of condition and config")
        if (self.label is None) != (self.config is None):
            raise ValueError("label and config come together")
        return self


class _PrintedCounts(Frozen):
    rows: tuple[PrintedCount, ...]


@functools.cache
def _built(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


def total_parameters(config: ModelConfig) -> int:
    """Weights of the model, the tied embedding once."""
    return sum(p.numel() for p in _built(config).parameters())


def active_parameters(config: ModelConfig, rule: ActiveRule = "with_delta_extras") -> int:
    """Weights a token uses: all, less the share of the routed ones that top-k leaves out (of rank-1
    mixtures the pairs, of MoE layers the experts, of split stages the blocks).

    The paper prints two kinds: `without_delta_extras` counts a routed DeltaNet block as the softmax
    block of its width (0.61B, 119M, 98M), `with_delta_extras` as it is (77M, 95M).
    """
    if rule == "without_delta_extras":
        config = _without_delta(config)
    return total_parameters(config) - sum(map(_inactive, _built(config).layers))


def _inactive(layer: nn.Module) -> int:
    inactive = layer.inactive_parameters()
    if isinstance(layer, SplitStage) and layer.config.rank1 is not None:
        # The stage counts its idle blocks; the active ones hold idle pairs besides.
        active = layer.config.top_k / layer.config.n_routed
        inactive += round(layer.routed.rank1.inactive_parameters() * active)
        if layer.shared is not None:
            inactive += layer.shared.rank1.inactive_parameters()
    return inactive


def _without_delta(config: ModelConfig) -> ModelConfig:
    def as_softmax(layer: Layer | None) -> Layer | None:
        if isinstance(layer, SplitLayer):
            return layer.model_copy(update={"attention": "softmax"})
        return layer

    layers = {"layer": as_softmax(config.layer), "anchor": as_softmax(config.anchor)}
    return config.model_copy(update=layers)


def gate_parameters(config: ModelConfig) -> int:
    """Weights of the squeeze-and-excitation gates (Appendix C)."""
    named = _built(config).named_parameters()
    return sum(p.numel() for name, p in named if ".gate." in name)


def projection_share(config: ModelConfig) -> float:
    """Share of W_down and W_up among the weights of the thin blocks (2.3), in 0..1.
    Raises ValueError unless every layer is a split stage without a router."""
    splits = [layer for layer in config.layers() if isinstance(layer, SplitLayer)]
    if len(splits) < config.n_layers or any(layer.router != "none" for layer in splits):
        raise ValueError("projection_share needs split layers with router = none throughout")
    projections = sum(2 * config.d_model * s.d_thin * s.n_blocks for s in splits)
    return projections / sum(p.numel() for p in _built(config).layers.parameters())


def compute(config: ModelConfig, rule: Rule) -> int | float:
    """The count of `config` under a rule of counts.toml."""
    if rule == "extra":
        return gate_parameters(config)
    if rule == "projection_share":
        return projection_share(config)
    if rule == "total":
        return total_parameters(config)
    return active_parameters(config, rule.removeprefix(ACTIVE))


def matches(computed: int | float, printed: str) -> bool:
    """Whether `computed`, rounded half up to the printed precision, is the printed string."""
    number, unit = re.fullmatch(r"~?([\d.]+)([MB%]?)", printed).groups()
    precision = Decimal(1).scaleb(Decimal(number).as_tuple().exponent)
    return (Decimal(computed) / _UNITS[unit]).quantize(precision, ROUND_HALF_UP) == Decimal(number)


def paper_rows(path: Path = PAPER / "counts.toml") -> list[dict]:
    """Every row of counts.toml, computed. Raises UserError naming the file and the key."""
    try:
        printed = _PrintedCounts(**read_toml(path))
    except pydantic.ValidationError as error:
        raise one_line(error, str(path)) from None
    paper = load_experiments(path.parent)
    rows = []
    for row in printed.rows:
        if row.condition is not None and row.condition not in paper.conditions:
            raise UserError(f"{path}: {row.place}: unknown condition {row.condition!r}")
        config = row.config or paper.model(row.condition)
        computed = compute(config, row.rule)
        rows.append(
            row.model_dump(include={"place", "rule", "printed", "how", "note"})
            | {
                "configuration": row.condition or row.label,
                "computed": computed,
                "match": matches(computed, row.printed) if row.printed else None,
            }
        )
    return rows


def config_rows(path: Path) -> list[dict]:
    """Total and active counts of one model whose configuration is the TOML file at `path`."""
    config = checked(ModelConfig, read_toml(path), path)
    rules: tuple[Rule, ...] = ("total", "active_with_delta_extras", "active_without_delta_extras")
    return [
        {
            "place": None,
            "configuration": path.name,
            "rule": rule,
            "computed": compute(config, rule),
            "printed": None,
            "match": None,
            "how": None,
            "note": None,
        }
        for rule in rules
    ]
