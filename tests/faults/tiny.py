"""A model that trains in a second, and its place in a results folder."""

import shutil

import pyarrow.parquet as pq

from mol.plan.select import corpus_folder, run_folder

STEPS = 20


class Place:
    """A results folder with the tiny run's corpus; `train` is the command line for it."""

    def __init__(self, folder, uncut):
        self.results, self.spec = folder, uncut.spec
        self.run = run_folder(folder, uncut.spec)
        corpus = corpus_folder(folder, "smoke", uncut.spec.data.folder)
        shutil.copytree(uncut.corpus, corpus)
        self.spec_file = folder / "spec.json"
        self.spec_file.write_text(uncut.spec.model_dump_json())

    def train(self, *more):
        options = ["--spec", str(self.spec_file), "--results", str(self.results), "--quiet"]
        return ["train", *options, "--threads", "1", "--checkpoint-every", "3", *more]

    def curve(self):
        return pq.read_table(self.run / "curve.parquet").to_pylist()
