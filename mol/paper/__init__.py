"""What the paper says, as data: reported cells, experiments, conditions."""
