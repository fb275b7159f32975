# Everything from text to tables: `snakemake --cores all paper_tables`.
# One experiment: `snakemake --cores all E06`. Configuration: config/config.yaml.


configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/runs.smk"
include: "rules/report.smk"


# Of an included file no rule is the default, whatever it says of itself.
rule all:
    input:
        rules.paper_tables.input,
