-- How do the numbers of each table stand? Measured cells by runs, counts from the configurations.
SELECT "table", kind, verdict, count(*) AS cells
FROM verdicts JOIN cells USING (cell_id)
WHERE scale = 'paper' AND verdict IS NOT NULL
GROUP BY "table", kind, verdict
ORDER BY length("table"), "table", kind, verdict
