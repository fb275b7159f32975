# The database and everything rendered from it.

from mol.base import read_toml
from mol.plan.experiments import PAPER

TABLES = [
    f"paper_tables/table{number:02}.{end}"
    for number in range(1, 15)
    for end in ("md", "csv", "tex")
]

# Read here without the drawing code: importing matplotlib would slow every call.
FIGURES = [
    f"figures/{figure['id']}_{SCALE}.{end}"
    for figure in read_toml(PAPER / "figures.toml")["figures"]
    for end in ("svg", "png")
]


# Scored on demand, `snakemake protocols`: not a part of paper_tables. A matrix that is there
# follows its run, since one of other weights would be refused.
FIRST_SEED = load_experiments().seeds[0]
MATRICES = [
    f"results/runs/{SCALE}/{run_id}/protocols.json"
    for run_id in dict.fromkeys(run_ids("train", "E05") + run_ids("train", "E06"))
    if SPECS[run_id].seed == FIRST_SEED
]


rule protocol_matrix:
    input:
        spec=f"results/specs/{SCALE}/{{run_id}}.json",
        record=f"{RUN}/record.json",
        code=HASHES["protocols"],
    output:
        f"{RUN}/protocols.json",
    wildcard_constraints:
        run_id=one_of(run_ids("train")),
    threads: 1
    resources:
        gpu=gpus,
    params:
        gpus=gpus,
    shell:
        "{ON_GPUS} {params.gpus} {MOL} eval --spec {input.spec} --protocols --save > /dev/null"


rule protocols:
    input:
        MATRICES,


rule database:
    input:
        wanted(),
        lambda wildcards: [matrix for matrix in MATRICES if Path(matrix).is_file()],
        code=HASHES["store"],
    output:
        "results/mol.duckdb",
    shell:
        "{MOL} store build"


rule report:
    input:
        "results/mol.duckdb",
        code=HASHES["report"],
    output:
        TABLES,
        FIGURES,
        "paper_tables/index.html",
    shell:
        "{MOL} report"


rule tracking:
    input:
        wanted(),
    output:
        touch("results/.tracked"),
    shell:
        "{MOL} track"


rule paper_tables:
    input:
        wanted(),  # named here too, so that a run deleted by hand comes back
        "paper_tables/index.html",
        TABLES,
        FIGURES,
        "results/.tracked" if CONFIG.tracking else [],


for name in EXPERIMENTS:

    rule:
        name:
            name
        input:
            wanted(name),
