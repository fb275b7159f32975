"""kill -9 of a training job: the next command ends with the uncut run's curve and weights."""

import pytest
import torch
from processes import call, changed, kill_at_random, spread
from safetensors.torch import load_file
from tiny import STEPS
from victims import command, save_states, train_until_killed

from mol.store.record import load_record
from mol.train.checkpoint import STATE, WEIGHTS, load_state


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_a_killed_job_resumes_to_the_uncut_curve(place, uncut, tmp_path, percent):
    step = STEPS * percent // 100
    killed = call(tmp_path, train_until_killed, place.train(), step)
    assert killed.code == -9
    assert not (place.run / "record.json").exists() and not (place.run / "curve.parquet").exists()
    saved = load_state(place.run, place.spec.run_id)
    assert (saved["step"] if saved else 0) == step // 3 * 3, "the last checkpoint before it"
    done = call(tmp_path, command, place.train())
    assert done.code == 0, done.err
    curve = place.curve()
    assert curve == uncut.curve
    points = [(row["name"], row["step"]) for row in curve]
    assert len(points) == len(set(points)), "one value a step"
    ours, theirs = (load_file(run / WEIGHTS) for run in (place.run, uncut.run))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
    ours, theirs = (load_record(run / "record.json") for run in (place.run, uncut.run))
    timed = ("train_steps_per_s", "train_tokens_per_s", "train_wall_s", "peak_memory")
    figures = [[m for m in r.metrics if m.name not in timed] for r in (ours, theirs)]
    assert figures[0] == figures[1]
    assert sorted(path.name for path in place.run.iterdir()) == sorted(
        path.name for path in uncut.run.iterdir()
    )


def test_a_checkpoint_is_whole_whenever_its_writer_is_killed(tmp_path):
    size, seen = 1 << 19, []

    def check():
        state = load_state(tmp_path / "run", "r")
        if state is not None:
            assert (state["model"] == state["step"]).all() and len(state["model"]) == size
            seen.append(state["step"])

    run = tmp_path / "run"
    kill_at_random(
        tmp_path,
        save_states,
        run,
        size,
        begun=changed(run / STATE),
        moments=spread(0, 0.05, 12),
        check=check,
    )
    assert seen, "at least one was written"
    assert (tmp_path / "run" / STATE).exists()
