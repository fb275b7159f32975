"""From the paper's experiments to the list of runs at a scale."""
