# Corpora, tokenizers and token shards; the items of the zero-shot tasks.

from shlex import quote


rule corpus:
    input:
        spec=lambda wildcards: CORPORA[wildcards.corpus],
        text=lambda wildcards: local_text(wildcards.corpus),
        code=HASHES["data"],
    output:
        meta=f"results/data/{SCALE}/{{corpus}}/meta.json",
    wildcard_constraints:
        corpus=one_of(CORPORA),
    threads: 1
    shell:
        "{MOL} data --spec {input.spec} --out results/data/{SCALE}/{wildcards.corpus}"


rule zero_shot_items:
    input:
        code=HASHES["zeroshot"],
    output:
        "results/data/zero_shot/items.json",
    params:
        truthfulqa=f"--truthfulqa {quote(CONFIG.truthfulqa)}" if CONFIG.truthfulqa else "",
    shell:
        "{MOL} zeroshot prepare --out results/data/zero_shot {params.truthfulqa}"
