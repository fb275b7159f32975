# Everything from text to tables: `snakemake --cores all paper_tables`.
# One experiment: `snakemake --cores all E06`. Configuration: config/config.yaml.

from pathlib import Path

from mol.base import UserError
from mol.plan.build import read_config

# Read here first: Snakemake expands aliases without end, takes the last of two equal keys and can
# be told to execute what stands in the file.
try:
    read_config(Path("config/config.yaml"))
except UserError as error:
    raise WorkflowError(str(error))


configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/runs.smk"
include: "rules/report.smk"


# Of an included file no rule is the default, whatever it says of itself.
rule all:
    input:
        rules.paper_tables.input,
