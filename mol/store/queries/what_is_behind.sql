-- The runs behind the cells of Table 2: code, text, machine and how long they took.
SELECT cell_id, verdicts.scale, run_id, git_commit, dirty, runs.data->>'$.source' AS text,
       runs.hardware, round(wall_s, 1) AS seconds, command
FROM verdicts
JOIN cells USING (cell_id)
JOIN runs ON list_contains(verdicts.runs::VARCHAR[], run_id)
WHERE "table" = '2'
ORDER BY position, verdicts.scale, run_id
