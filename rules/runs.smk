# Training, zero-shot and benchmark runs: each leaves a folder with a record.

RUN = f"results/runs/{SCALE}/{{run_id}}"


rule train:
    input:
        spec=f"results/specs/{SCALE}/{{run_id}}.json",
        meta=lambda wildcards: (
            f"results/data/{SCALE}/{SPECS[wildcards.run_id].data.folder}/meta.json"
        ),
        code=HASHES["train"],
    output:
        f"{RUN}/config.json",
        f"{RUN}/curve.parquet",
        f"{RUN}/model.safetensors",
        f"{RUN}/record.json",
    wildcard_constraints:
        run_id=one_of(run_ids("train")),
    threads: lambda wildcards: max(1, gpus(wildcards))  # one for each process
    resources:
        gpu=train_gpus,
        nodes=1,  # of a cluster
    params:
        gpus=train_gpus,
        mol=trainer,
    shell:
        "{ON_GPUS} {params.gpus} {params.mol} train --spec {input.spec} --threads 1 --quiet"


rule zero_shot:
    input:
        spec=f"results/specs/{SCALE}/{{run_id}}.json",
        model=lambda wildcards: records(SPECS[wildcards.run_id].train_run),
        item_set="results/data/zero_shot/items.json",
        code=HASHES["zeroshot"],
    output:
        f"{RUN}/config.json",
        f"{RUN}/record.json",
        f"{RUN}/samples.parquet",
    wildcard_constraints:
        run_id=one_of(run_ids("zeroshot")),
    threads: 1
    resources:
        gpu=gpus,
    params:
        gpus=gpus,
    shell:
        "{ON_GPUS} {params.gpus} {MOL} zeroshot run --spec {input.spec} --threads {threads}"


rule bench:
    input:
        spec=f"results/specs/{SCALE}/{{run_id}}.json",
        code=HASHES["bench"],
    output:
        f"{RUN}/config.json",
        f"{RUN}/record.json",
    wildcard_constraints:
        run_id=one_of(run_ids("bench")),
    threads: 1
    resources:
        gpu=gpus,
    params:
        gpus=gpus,
    shell:
        "{ON_GPUS} {params.gpus} {MOL} bench --spec {input.spec} --threads {threads}"
