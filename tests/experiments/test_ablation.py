"""The ladder of settings from X-RLflow's to those of xrl_jax."""

from __future__ import annotations

from experiments.ablation import ladder
from experiments.train_flags import PRESETS


def test_the_ladder_leads_from_the_preset_paper_to_the_preset_ours() -> None:
    rungs, paper, ours = ladder(), PRESETS["paper"], PRESETS["ours"]
    assert (rungs[0].settings, rungs[0].envs) == (paper.settings, paper.envs)
    assert (rungs[-1].settings, rungs[-1].envs) == (ours.settings, ours.envs)


def test_every_rung_keeps_the_changes_of_earlier_ones() -> None:
    rungs = {rung.name: rung for rung in ladder()}
    assert list(rungs) == [
        "paper",
        "+ reward",
        "+ network",
        "+ optimisation",
        "+ environments",
        "+ records",
        "+ macro-actions",
        "+ prior scale",
    ]
    assert [r.settings.bonus for r in rungs.values()] == [0.1, *[0.0] * 7]
    encoders = [r.settings.network.encoder for r in rungs.values()]
    assert encoders == ["candidates"] * 2 + ["touched"] * 6
    assert [r.settings.gamma for r in rungs.values()] == [0.99] * 3 + [0.95] * 5
    assert [r.envs for r in rungs.values()] == [8] * 4 + [32] * 4
    assert [r.settings.network.prior_scale for r in rungs.values()] == [0.0] * 7 + [2.0]
    macro_actions = [r.settings.network.macro_actions for r in rungs.values()]
    assert macro_actions[2:] == [False] * 4 + [True] * 2
    assert [r.settings.records for r in rungs.values()] == [False] * 5 + [True] * 3
