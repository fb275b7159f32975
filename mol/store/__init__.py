"""Records of runs, and the DuckDB database that is built from them."""
