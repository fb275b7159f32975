-- Where does MoL overtake the dense model on Cosmopedia? Below 0, MoL is ahead.
SELECT scale, seed, a.step, round(a.value - b.value, 4) AS gap_nat
FROM curves a
JOIN runs mol ON a.run_id = mol.run_id AND mol.condition = 'cosmo-mol-top3'
JOIN runs dense USING (scale, seed)
JOIN curves b ON b.run_id = dense.run_id AND dense.condition = 'cosmo-dense-softmax'
             AND a.step = b.step AND a.name = b.name
WHERE a.name = 'validation_nll'
ORDER BY ALL
