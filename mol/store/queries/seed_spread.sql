-- Spread over seeds of the validation loss, for conditions that ran with more than one.
SELECT scale, condition, count(*) AS seeds, round(avg(value), 4) AS mean_nll,
       round(stddev_samp(value), 4) AS sd_nat
FROM metrics JOIN runs USING (run_id)
WHERE name = 'nll' AND split = 'validation' AND pad <> 'pad_counted'
GROUP BY ALL
HAVING count(*) > 1
ORDER BY scale, sd_nat DESC, condition
