-- Every measured perplexity with our figure beside it, its distance in nats and what is behind it.
SELECT place, "row", printed, scale, round(reproduced, 2) AS ours,
       round(difference_nats, 4) AS nats, round(half_width, 4) AS half_width,
       verdict, n_runs, data, verdicts.hardware
FROM verdicts JOIN cells USING (cell_id)
WHERE kind = 'measured' AND unit = 'ppl/token' AND reproduced IS NOT NULL
ORDER BY position, scale
