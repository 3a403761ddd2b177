"""Costs come from the record of a GPU, wherever that is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from experiments.lab.fragments import regions
from experiments.predicted import about_fit
from experiments.recorded import NoRecordError, fit_of, operators_of, recorded
from xrl_jax.cost.programs import base_options
from xrl_jax.cost.regions import region_job
from xrl_jax.measure.base import Job
from xrl_jax.measure.gpu.compiler import COMPILER_FOLDER
from xrl_jax.measure.gpu.fit import Fit
from xrl_jax.measure.gpu.predictor import Predictor
from xrl_jax.measure.timing import Timing
from xrl_jax.runtime.target_platform import making_for

SHAPE = {"image_size": 64}


def line(key: str, seconds: float, date: str = "2026-01-01") -> dict[str, object]:
    timing = Timing(seconds, seconds, seconds, repeats=7).as_dict()
    return {"key": key, "versions": "v", "date": date, "values": {"timing": timing, "target": {}}}


def write(folder: Path, *lines: dict[str, object]) -> None:
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (folder / "nvidia-h200.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def test_operators_are_read_by_their_last_timing(tmp_path: Path) -> None:
    write(
        tmp_path,
        line("fragment/bert/dot/plain/k1", 2.0, "2026-01-02"),
        line("fragment/bert/dot/plain/k1", 1.0),
        line("fragment/loop/add/plain/k2", 3.0),
        {"key": "fragment/vit/dot/plain/k3", "versions": "v", "date": "2026", "error": "refused"},
        {"key": "network/bert", "versions": "v", "date": "2026", "values": {}},
    )
    found = operators_of("h200", tmp_path)
    assert {k: t.seconds for k, t in found.timings.items()} == {"k1": 2.0, "k2": 3.0}
    assert list(found.networks) == ["bert"]


def test_without_a_record_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoRecordError, match="gpu_lab` on one, or add --predicted"):
        operators_of("h200", tmp_path)


def test_the_fit_is_reported_by_kind() -> None:
    fit = Fit({"conv": 1.5, "loop": 0.5}, {"conv": 0.04}, {"conv": 12})
    assert "conv 12 (x 1.50, error 4 %)" in about_fit("h200", fit)


@pytest.mark.skipif(not COMPILER_FOLDER.is_dir(), reason="JAX's plugin for CUDA is not installed")
def test_searches_run_under_the_costs_of_a_record(tmp_path: Path) -> None:
    with making_for("gpu"):
        known = regions(["squeezenet"], "gpu", shape=SHAPE)
        convs = [k for k, (_, r) in known.items() if r.node.op == "conv" and not r.node.lowering]
        jobs = {k: region_job(known[k][1], base_options("gpu")) for k in convs[:4]}
        with Predictor("h200") as predictor:
            predicted = dict(zip(jobs, predictor.submit(list(jobs.values())), strict=True))
        # A GPU on which convolutions take half as long again; three of four were measured.
        write(
            tmp_path,
            *(
                line(f"fragment/squeezenet/conv/plain/{k}", 1.5 * predicted[k].seconds)
                for k in convs[:3]
            ),
        )
        fit = fit_of(operators_of("h200", tmp_path), "h200", tmp_path, SHAPE)
        assert (fit.counts, fit.factors["conv"]) == ({"conv": 3}, pytest.approx(1.5))
        with recorded("h200", tmp_path, records=tmp_path, shape=SHAPE) as (measurer, _):
            first, *_, last = measurer.submit(list(jobs.values()))
            unknown = Job("unknown", jobs[convs[3]].artifact, slope=(8, 24))
            (again,) = measurer.submit([unknown])
    assert first.seconds == 1.5 * predicted[convs[0]].seconds
    assert predicted[convs[3]].seconds < last.seconds < 1.5 * predicted[convs[3]].seconds
    assert again.ok
