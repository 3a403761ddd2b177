"""The benchmark's means, table and bookkeeping, on made-up figures; one real run is marked slow."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import benchmark
from experiments.benchmark import (
    Config,
    command_of,
    days,
    run_search,
    run_seeds,
    share_engine,
)
from experiments.benchmark_table import (
    best_of,
    beyond_noise,
    geometric_mean,
    plot,
    summary,
    table,
)
from experiments.side_by_side import Entry, RuntimeEntry, SideBySide, rest_and_wake

ROOT = Path(__file__).resolve().parents[2]


def entry(speedup: float, low: float, high: float) -> Entry:
    return Entry(0.01 / speedup, speedup, low, high, "jit, weights closed over", 1e-6, 1e-5)


NET = SideBySide(
    network="bert",
    jits={"jit, weights as arguments": 0.02, "jit, weights closed over": 0.01},
    noise=(0.98, 1.03),
    entries={"local": entry(1.25, 1.2, 1.3), "taso": entry(2.0, 1.9, 2.1)},
    ratios={"local/taso": (1.6, 1.5, 1.7), "onnxruntime/taso": (0.5, 0.45, 0.55)},
    runtimes={"onnxruntime": RuntimeEntry(0.0025, 1e-6)},
)
ODD = replace(
    NET,
    network="vit",
    entries={"local": entry(0.8, 0.7, 0.9), "taso": entry(0.5, 0.4, 0.6)},
    ratios={"local/taso": (1.02, 1.01, 1.03)},
    runtimes={"onnxruntime": RuntimeEntry(None, None, "ImportError: no onnxruntime")},
)
REPORT = {
    "predicted_ms_before": 12.0,
    "baseline_ms": 10.0,
    "predicted_ms_after": 5.0,
    "optimized_ms": 5.0,
    "peak_bytes": 2**30,
}


def test_means_are_geometric_and_of_complete_groups_only() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    figures = summary([NET, ODD], {})
    assert figures["means"] == {
        "all": {"local": pytest.approx(1.0), "taso": pytest.approx(1.0)}
    }  # some of the seven and of the twelve networks are missing


def test_one_search_beats_another_where_its_interval_is_beyond_the_noise() -> None:
    assert beyond_noise(NET, "local", "taso")
    assert not beyond_noise(ODD, "local", "taso")  # 1.01 is within the noise of 1.03
    assert not beyond_noise(NET, "random", "taso")  # random was not timed
    assert summary([NET, ODD], {})["taso_beats_local"] == ["bert"]


def test_networks_slower_than_jit_are_reported() -> None:
    assert summary([NET, ODD], {})["slower_than_jit"] == ["vit"]


def test_runtimes_are_compared_with_the_best_result() -> None:
    assert best_of(NET) == "taso"
    figures = summary([NET, ODD], {})
    assert figures["runtime_over_best"] == {"onnxruntime": {"bert": 0.5}}


def test_the_cost_model_error_is_the_median_over_originals_and_results() -> None:
    figures = summary([NET], {"bert": {"taso": REPORT}})
    assert figures["model_error_median"] == pytest.approx(0.1)  # the median of 0.2 and 0
    assert figures["peak_bytes"] == 2**30


def test_the_table_has_a_row_per_network_and_names_missing_runtimes() -> None:
    lines = table([NET, ODD], summary([NET, ODD], {})).splitlines()
    assert lines[2] == (
        "| bert | 10.0 | 0.980-1.030 | 1.25 (1.20-1.30) | 2.00 (1.90-2.10) | 2.50 | 0.50 |"
    )
    assert lines[4] == "| geometric mean, all |  |  | 1.00 | 1.00 |  | 0.50 |"
    assert "slower than the strongest jit: 1 (vit)" in lines
    assert "ahead of ONNX Runtime: none" in lines
    assert "no ONNX Runtime for vit: ImportError: no onnxruntime" in lines


def test_every_runtime_has_two_columns() -> None:
    both = replace(
        NET,
        ratios={**NET.ratios, "openvino/taso": (1.25, 1.2, 1.3)},
        runtimes={**NET.runtimes, "openvino": RuntimeEntry(0.00625, 1e-6)},
    )
    lines = table([both], summary([both], {})).splitlines()
    assert lines[0].endswith("| local | taso | ONNX Runtime, ms | / best | OpenVINO, ms | / best |")
    assert lines[2].endswith("| 2.00 (1.90-2.10) | 2.50 | 0.50 | 6.25 | 1.25 |")
    assert lines[3] == "| geometric mean, all |  |  | 1.25 | 2.00 |  | 0.50 |  | 1.25 |"
    assert "ahead of OpenVINO: 1 (bert)" in lines


def test_a_tolerance_is_compared_with_the_strict_result() -> None:
    rough = replace(entry(3.0, 2.9, 3.1), error=4e-3)
    both = replace(
        NET,
        entries={**NET.entries, "taso@1e-2": rough},
        ratios={**NET.ratios, "taso/taso@1e-2": (1.5, 1.4, 1.6)},
    )
    figures = summary([both, ODD], {})
    assert figures["within_over_strict"] == {"taso@1e-2": {"bert": 1.5}}
    assert best_of(both) == best_of(both, "openvino") == "taso"
    line = "taso@1e-2 over strict: 1.50 on average; bert 1.50 (error 4.0e-03)"
    assert line in table([both, ODD], figures).splitlines()


def test_a_runtime_in_narrower_types_is_compared_with_the_result_within_the_tolerance() -> None:
    name = "openvino-bf16"
    both = replace(
        NET,
        entries={**NET.entries, "taso@1e-2": entry(3.0, 2.9, 3.1)},
        ratios={
            **NET.ratios,
            f"{name}/taso": (1.1, 1.0, 1.2),
            f"{name}/taso@1e-2": (1.5, 1.4, 1.6),
        },
        runtimes={name: RuntimeEntry(0.005, 3e-3)},
    )
    lines = table([both], summary([both], {})).splitlines()
    assert lines[2].endswith("| 5.00 | 1.50 |")
    assert "ahead of OpenVINO in bfloat16: 1 (bert)" in lines
    assert "errors of OpenVINO in bfloat16: bert 3.0e-03" in lines


def test_a_tolerance_adds_a_run_of_each_search(tmp_path: Path) -> None:
    both = replace(config(tmp_path), tolerance="1e-2")
    assert both.entrants == ("taso", "taso@1e-2")
    assert "--tolerance=1e-2" in command_of(both, "bert", "taso@1e-2", tmp_path)
    assert "--search=taso" in command_of(both, "bert", "taso@1e-2", tmp_path)
    assert "--tolerance=1e-2" not in command_of(both, "bert", "taso", tmp_path)


def test_a_comparison_is_read_back_from_json() -> None:
    assert SideBySide.from_dict(json.loads(json.dumps(NET.as_dict()))) == NET


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    plot([NET, ODD], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def config(tmp_path: Path, **given: tuple[str, ...]) -> Config:
    networks, searches = given.get("networks", ("bert",)), given.get("searches", ("taso",))
    return Config(networks, searches, 30.0, 1.0, 0, ("onnxruntime",), tmp_path)


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--networks: there is no bart .known: bert, vit, "):
        config(tmp_path, networks=("bart",))
    with pytest.raises(ValueError, match="--searches: there is no tasso .known: "):
        config(tmp_path, searches=("tasso",))
    with pytest.raises(ValueError, match="--runtimes: there is no tvm .known: onnxruntime, "):
        replace(config(tmp_path), runtimes=("tvm",))


def test_a_policy_is_compared_by_its_rollouts_alone(tmp_path: Path) -> None:
    assert "--alone" in command_of(config(tmp_path), "bert", "xrlflow", tmp_path)
    assert "--alone" not in command_of(config(tmp_path), "bert", "taso", tmp_path)


def test_every_search_has_the_same_limit_of_measurements(tmp_path: Path) -> None:
    bounded = replace(config(tmp_path), budget_measurements=16)
    for search in ("taso", "xrlflow"):
        assert "--budget_measurements=16" in command_of(bounded, "bert", search, tmp_path)
    assert "--budget_measurements=16" in bounded.command()


def test_searches_share_the_compiled_engine_and_no_timings(tmp_path: Path) -> None:
    engine = tmp_path / "compiled"
    for name in ("taso", "xrlflow"):
        share_engine(tmp_path / name, engine)
    (tmp_path / "taso" / "compiled" / "step").write_text("machine code")
    (tmp_path / "taso" / "timings").write_text("1 ms")
    assert (tmp_path / "xrlflow" / "compiled" / "step").read_text() == "machine code"
    assert [p.name for p in (tmp_path / "xrlflow").iterdir()] == ["compiled"]
    share_engine(tmp_path / "taso", engine)  # a search that failed is run again
    assert [p.name for p in (tmp_path / "taso").iterdir()] == ["compiled"]
    assert (engine / "step").is_file()


def test_a_finished_search_is_not_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "bert" / "taso"
    folder.mkdir(parents=True)
    made_by = command_of(config(tmp_path), "bert", "taso", Path())[1:]  # in any folder
    kept = {"made_by": made_by, "ended": "2026-01-01", "status": 0, "peak_bytes": 7}
    (folder / "run.json").write_text(json.dumps(kept))
    assert run_search(config(tmp_path), "bert", "taso") == kept


def test_the_table_gives_the_days_on_which_searches_ended() -> None:
    first, last = {"ended": "2026-01-01T09:30:00"}, {"ended": "2026-01-03T01:00:00"}
    assert days({"bert": {"taso": first}, "vit": {"taso": first}}) == "2026-01-01"
    assert days({"bert": {"local": last, "taso": first}}) == "2026-01-01 to 2026-01-03"


def test_after_a_pause_an_untimed_call_of_the_runtime_wakes_the_cores() -> None:
    calls: list[str] = []
    rest_and_wake(lambda: calls.append("rest"), lambda: calls.append("call"))
    assert calls == ["rest", "call"]


def test_seeds_have_separate_folders_and_a_joint_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def made_up(config: Config) -> tuple[list[SideBySide], int]:
        asked.append((config.seed, config.out.name))
        return [NET], 0

    monkeypatch.setattr(benchmark, "run_seed", made_up)
    assert run_seeds(config(tmp_path, searches=("local", "taso")), 2) == 0
    assert asked == [(0, "seed_0"), (1, "seed_1")]
    values = json.loads((tmp_path / "over_seeds.json").read_text())
    assert values["command"].endswith("--seeds=2")
    assert values["networks"]["bert"]["verdict"]["text"] == "ahead"


@pytest.mark.slow
def test_a_benchmark_of_one_network_with_both_runtimes_end_to_end(tmp_path: Path) -> None:
    words = ["--networks=squeezenet", "--searches=local", "--budget_seconds=30"]
    words += ["--compare_seconds=2", f"--out={tmp_path}"]
    command = [sys.executable, "-m", "experiments.benchmark", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "benchmark.json").read_text())
    (network,) = values["networks"]
    for runtime in ("onnxruntime", "openvino"):
        of_runtime = network["runtimes"][runtime]
        assert of_runtime["seconds"] > 0 and of_runtime["error"] < 1e-4
    assert network["entries"]["local"]["error"] <= network["entries"]["local"]["tolerance"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout  # nothing is run or timed again
