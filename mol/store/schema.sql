-- One row a run, whole folders only; times are UTC.
CREATE TABLE runs (
    run_id VARCHAR PRIMARY KEY,
    kind VARCHAR NOT NULL,            -- train | zeroshot | bench
    scale VARCHAR NOT NULL,           -- smoke | proxy | paper
    condition VARCHAR NOT NULL,       -- a condition of the paper, or a benchmark's name
    seed BIGINT NOT NULL,
    status VARCHAR NOT NULL,          -- complete | not run
    reason VARCHAR,
    started TIMESTAMP NOT NULL,
    finished TIMESTAMP NOT NULL,
    wall_s DOUBLE NOT NULL,
    device VARCHAR NOT NULL,
    hardware VARCHAR NOT NULL,
    hardware_count BIGINT NOT NULL,
    threads BIGINT NOT NULL,
    memory_gib DOUBLE NOT NULL,
    git_commit VARCHAR,
    dirty BOOLEAN,
    code_sha256 VARCHAR NOT NULL,
    command VARCHAR NOT NULL,
    spec JSON NOT NULL,
    versions JSON NOT NULL,
    data JSON NOT NULL,
    notes JSON NOT NULL,
    source VARCHAR NOT NULL           -- the record's place below results/
);

CREATE TABLE metrics (
    run_id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    value DOUBLE NOT NULL,
    unit VARCHAR NOT NULL,
    n BIGINT,
    stderr DOUBLE,
    low DOUBLE,
    high DOUBLE,
    tokenizer VARCHAR,
    pad VARCHAR,
    layout VARCHAR,
    context BIGINT,
    stride BIGINT,
    split VARCHAR,
    labels JSON NOT NULL
);

CREATE TABLE curves (
    run_id VARCHAR NOT NULL,
    step BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    name VARCHAR NOT NULL,
    value DOUBLE NOT NULL
);

-- Zero-shot scores by item, where a run kept them: claims that compare two models pair them.
CREATE TABLE items (
    run_id VARCHAR NOT NULL,
    task VARCHAR NOT NULL,
    subtask VARCHAR NOT NULL,         -- a subject of MMLU, else the task
    doc_id BIGINT NOT NULL,
    doc_hash VARCHAR NOT NULL,        -- of the item's content
    acc DOUBLE,
    acc_norm DOUBLE
);

-- One checkpoint scored under every protocol (`mol eval --protocols --save`), where that was
-- asked for. Rows with unlike protocols are never compared with one another.
CREATE TABLE protocols (
    run_id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,            -- nll | ppl | ppl_word | bits_per_byte
    value DOUBLE,                     -- NULL: not scored, `note` says why
    unit VARCHAR,
    n BIGINT,                         -- tokens, words or bytes scored, each once
    stderr DOUBLE,
    tokenizer VARCHAR,
    pad VARCHAR,                      -- masked | pad_counted | none
    layout VARCHAR,                   -- chunked | stream | documents
    context BIGINT,
    stride BIGINT,
    split VARCHAR,
    eos VARCHAR,                      -- as_prepared | masked
    text VARCHAR,                     -- prepared | raw
    note VARCHAR NOT NULL
);

-- Two scored models on one task, paired over its items: value of `condition` less `other`.
CREATE TABLE comparisons (
    scale VARCHAR NOT NULL,
    task VARCHAR NOT NULL,
    metric VARCHAR NOT NULL,          -- acc | acc_norm
    condition VARCHAR NOT NULL,
    other VARCHAR NOT NULL,
    seed BIGINT NOT NULL,
    value DOUBLE,                     -- NULL: not compared, `note` says why
    stderr DOUBLE,
    low DOUBLE,                       -- 95 % interval
    high DOUBLE,
    p DOUBLE,                         -- of no difference; NULL: not paired
    n BIGINT,                         -- items
    note VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    other_run VARCHAR NOT NULL
);

-- Training runs of a condition of the paper that are not as planned, and in what: a reader's
-- variants. They and what was scored with them judge no cell and no claim.
CREATE TABLE variants (
    run_id VARCHAR NOT NULL,
    key VARCHAR NOT NULL,             -- place in the specification
    planned JSON,                     -- NULL: not there
    value JSON
);

-- What one setting does: pairs of figures that differ in it alone, of two runs of one seed and
-- machine, or of one checkpoint by two protocols (key protocol.<part>).
CREATE TABLE effects (
    key VARCHAR NOT NULL,             -- as in the ledger of settings
    scale VARCHAR NOT NULL,
    condition VARCHAR NOT NULL,
    seed BIGINT NOT NULL,
    hardware VARCHAR NOT NULL,
    hardware_count BIGINT NOT NULL,
    used JSON,                        -- the planned value
    other JSON,
    effect DOUBLE NOT NULL,           -- loss with `other` less loss with `used`
    unit VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    other_run VARCHAR NOT NULL,       -- run_id itself where one checkpoint was scored twice
    note VARCHAR NOT NULL
);

-- Records and curves that were left out, and the way out.
CREATE TABLE refused (file VARCHAR NOT NULL, reason VARCHAR NOT NULL);

CREATE TABLE experiments (
    experiment VARCHAR PRIMARY KEY,
    title VARCHAR NOT NULL,
    paper VARCHAR NOT NULL,
    note VARCHAR
);

CREATE TABLE conditions (
    condition VARCHAR PRIMARY KEY,
    label VARCHAR NOT NULL,
    recipe VARCHAR NOT NULL,
    corpus VARCHAR NOT NULL,
    model JSON NOT NULL
);

CREATE TABLE experiment_conditions (
    experiment VARCHAR NOT NULL,
    condition VARCHAR NOT NULL,       -- or a benchmark's name
    kind VARCHAR NOT NULL,            -- train | zeroshot | bench
    seeds JSON NOT NULL
);

CREATE TABLE run_experiments (run_id VARCHAR NOT NULL, experiment VARCHAR NOT NULL);

-- The paper's numbers, in the order in which it prints them.
CREATE TABLE cells (
    cell_id VARCHAR PRIMARY KEY,
    position BIGINT NOT NULL,
    "table" VARCHAR NOT NULL,
    "row" VARCHAR NOT NULL,
    "column" VARCHAR NOT NULL,
    printed VARCHAR NOT NULL,
    spread VARCHAR NOT NULL,
    unit VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,            -- setting | count | derived | measured
    n_seeds BIGINT,
    place VARCHAR NOT NULL,
    experiment VARCHAR NOT NULL,
    condition VARCHAR NOT NULL,
    seeds JSON NOT NULL,
    metric VARCHAR NOT NULL,
    labels JSON NOT NULL,
    op VARCHAR NOT NULL,              -- '' | diff | ratio | percent | crossover
    versus VARCHAR NOT NULL,
    hardware VARCHAR NOT NULL,
    note VARCHAR NOT NULL
);

-- Reported against reproduced. A measured cell has one row at the paper's scale, judged or not
-- run; counts agree or are contradicted; every other row is a figure that stands beside.
CREATE TABLE verdicts (
    cell_id VARCHAR NOT NULL,
    scale VARCHAR NOT NULL,
    verdict VARCHAR,                  -- NULL: a derived cell, which runs do not judge
    reproduced DOUBLE,                -- in the cell's unit
    difference DOUBLE,                -- reproduced less printed, in the cell's unit
    difference_nats DOUBLE,           -- log ratio, where the rule uses it
    half_width DOUBLE,                -- 95 %, in nats, or in the cell's unit for differences
    parts JSON,                       -- of half_width: rounding, grid, seeds, evaluation, timing
    n_runs BIGINT NOT NULL,
    runs JSON,
    hardware VARCHAR,
    data VARCHAR,
    cost_gpu_hours DOUBLE,            -- of a cell that was not run; NULL: unknown
    note VARCHAR,
    PRIMARY KEY (cell_id, scale)
);

-- The paper against itself: derived numbers recomputed from its other printed numbers.
CREATE TABLE checks (
    check_id VARCHAR PRIMARY KEY,
    cell_id VARCHAR,                  -- the derived cell, where it is one
    kind VARCHAR NOT NULL,            -- check | flag
    verdict VARCHAR NOT NULL,
    place VARCHAR NOT NULL,
    printed VARCHAR NOT NULL,
    what VARCHAR NOT NULL,
    expr VARCHAR NOT NULL,
    inputs JSON NOT NULL,
    value DOUBLE,
    low DOUBLE,
    high DOUBLE,
    reading VARCHAR NOT NULL
);

-- Training and zero-shot runs of the plan without a complete record, at proxy and paper scale once
-- a run of that scale is there.
CREATE TABLE not_run (
    scale VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,            -- train | zeroshot
    condition VARCHAR NOT NULL,
    seed BIGINT NOT NULL,
    experiments JSON NOT NULL,
    gpu_hours DOUBLE,                 -- NULL: no speed was measured
    gpu VARCHAR,
    measured_by VARCHAR               -- run whose speed it is
);

-- The paper's claims at each scale that has runs for them; scales never mix.
CREATE TABLE claim_results (
    claim_id VARCHAR NOT NULL,
    scale VARCHAR NOT NULL,
    experiment VARCHAR NOT NULL,
    place VARCHAR NOT NULL,
    text VARCHAR NOT NULL,
    type VARCHAR NOT NULL,
    expected VARCHAR NOT NULL,
    cell_id VARCHAR,                  -- the printed effect, where one is printed
    outcome VARCHAR NOT NULL,         -- holds | does not hold | undecided | not run
    effect DOUBLE,
    low DOUBLE,                       -- 95 % interval; NULL: unbounded
    high DOUBLE,
    unit VARCHAR,                     -- nat | log ratio | fraction | % of steps | ...
    n BIGINT NOT NULL,                -- seeds, or pairs of seeds
    hardware VARCHAR,
    runs JSON,
    needs VARCHAR,                    -- what would decide a claim that was not run
    note VARCHAR,
    PRIMARY KEY (claim_id, scale)
);
