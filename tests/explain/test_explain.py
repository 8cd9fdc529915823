"""`perilune explain`: the numbers are right, come from the model at hand, and reach every output form."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import perilune
from perilune.cli import explain as verb
from perilune.config.presets import tiny
from perilune.errors import CheckpointError, RequestError
from perilune.explain import attnres, curriculum, kda, latent_moe, mla, muon, qk_clip, quantile_balancing, situ, vision
from perilune.explain.catalogue import ALIASES, MECHANISMS, explain
from perilune.explain.explanation import excerpt
from perilune.explain.subject import Subject, subject
from perilune.model import Transformer, init_weights
from perilune.report.interactive import figure
from perilune.report.terminal import text

MODULES = (attnres, curriculum, kda, latent_moe, mla, muon, qk_clip, quantile_balancing, situ, vision)


@pytest.fixture(scope="module")
def explained():
    return {name: explain(name) for name in MECHANISMS}


@pytest.fixture
def awake() -> Subject:
    """The seeded model with random AttnRes queries, so that depth weights are not even."""
    found = subject(seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            if name.endswith("query"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return found


def test_every_module_is_in_the_catalogue(explained):
    assert {module.__name__.rsplit(".", 1)[1] for module in MODULES} == set(MECHANISMS)
    assert set(ALIASES.values()) <= set(MECHANISMS)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_explanation_is_complete_and_drawable(explained, name):
    found = explained[name]
    assert found.name == name
    assert found.formula and found.unusual and found.findings and found.charts
    json.dumps(found.numbers, allow_nan=False)
    for chart in found.charts:
        assert chart.caption.endswith(".")
        json.dumps(figure(chart), allow_nan=False)
        assert max(map(len, text(chart, width=80).splitlines())) <= 80


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_excerpt_is_the_code_that_runs(explained, name):
    found = excerpt(explained[name].reference)
    path = Path(perilune.__file__).parents[1] / found.file
    lines = path.read_text().splitlines()
    function = inspect.unwrap(explained[name].reference)
    assert f"def {function.__name__}" in "\n".join(lines[found.line - 1 : found.line + 3])
    assert '"""' not in found.code
    assert len(found.code.splitlines()) <= 25


def test_kda_delta_rule_replaces_where_a_sum_adds():
    delta, added = kda.overwrite(erase=True), kda.overwrite(erase=False)
    assert delta["old"] == pytest.approx([1, 0, 0], abs=1e-12)
    assert delta["new"] == pytest.approx([0, 1, 0.25], abs=1e-12)
    assert added["old"] == pytest.approx([1, 1, 0.25], abs=1e-12)
    assert added["new"] == pytest.approx([0, 1, 0.25], abs=1e-12)


def test_kda_energy_is_that_of_the_states_of_a_whole_prefill(awake):
    energy = kda.state_energy(awake)
    state = awake.model.new_state(1)
    with torch.no_grad():
        awake.model(awake.ids_BT, state)
    for layer, values in energy.items():
        assert len(values) == awake.ids_BT.shape[1]
        assert values[-1] == pytest.approx(float(state.layers[layer].memory_BHVK.square().mean()), rel=1e-3)


def test_attnres_weights_sum_to_one_and_follow_the_queries(awake):
    numbers = attnres.explain(awake).numbers
    for row in numbers["weights"]:
        assert sum(value for value in row if value is not None) == pytest.approx(1.0, abs=1e-6)
    assert numbers["output_entropy_nats"] < numbers["even_entropy_nats"] - 0.01
    per_token = attnres.output_weights(awake)
    assert per_token.mean(axis=0) == pytest.approx(
        [value for value in numbers["weights"][-1] if value is not None], abs=1e-6
    )


def test_attnres_of_a_plain_residual_is_refused():
    model = init_weights(Transformer(replace(tiny(), residual="plain", vocab_size=288)), 0).eval()
    with pytest.raises(RequestError, match="plain residual.*--model.residual block"):
        attnres.explain(replace(subject(), model=model))


def test_latent_moe_routes_every_token_to_k_experts_with_weights_of_sum_one(awake):
    layers = latent_moe.explain(awake).numbers["layers"]
    assert len(layers) == len(awake.model.moe_layers())
    moe = awake.cfg.moe
    for layer in layers.values():
        assert np.shape(layer["index"]) == (awake.ids_BT.shape[1], moe.experts_per_token)
        assert np.sum(layer["weight"], axis=1) == pytest.approx(1.0, abs=1e-5)
        loads = np.bincount(np.ravel(layer["index"]), minlength=moe.num_experts)
        assert layer["max_over_mean"] == pytest.approx(loads.max() / loads.mean())


def test_situ_is_bounded_and_equals_swiglu_near_zero(explained):
    numbers = explained["situ"].numbers
    assert numbers["bound"] == 100.0
    assert numbers["largest_output"] <= 100.0
    assert numbers["difference_near_zero"] < 2e-3
    assert numbers["slope_at_10"] > 1.0


def test_quantile_is_even_after_one_step_and_the_wrong_sign_drives_loads_apart(explained):
    ratios = explained["quantile_balancing"].numbers["max_over_mean"]
    assert ratios["quantile"][0] == ratios["none"][0] > 3
    assert ratios["quantile"][1] < 1.4
    assert abs(ratios["quantile"][-1] - ratios["quantile_exact"][-1]) < 0.1
    assert ratios["sign"][-1] > 2
    assert ratios[quantile_balancing.WRONG][-1] > ratios["none"][-1]
    example = explained["quantile_balancing"].numbers["example"]
    assert example == {"before": [4, 3, 1, 0], "after": [2, 2, 2, 2]}


def test_muon_moves_all_heads_alike_only_when_cut_along_them(explained):
    numbers = explained["muon"].numbers
    per_head, whole = np.array(numbers["update_rms_per_head"]), np.array(numbers["update_rms_whole"])
    assert per_head.max() / per_head.min() < 1.1
    assert whole[0] > 5 * whole[1:].max()
    real = numbers["model"]
    assert max(real["gradient_rms"]) / min(real["gradient_rms"]) > max(real["update_rms"]) / min(real["update_rms"])


def test_qk_clip_lands_on_the_bound_and_leaves_values_alone(explained):
    numbers = explained["qk_clip"].numbers
    assert max(numbers["before"]) > numbers["tau"] >= max(numbers["after"]) * (1 - 1e-6)
    assert max(numbers["after"]) == pytest.approx(numbers["tau"], rel=1e-5)
    assert numbers["value_change"] < 1e-12
    untouched = [i for i, value in enumerate(numbers["before"]) if value <= numbers["tau"]]
    assert untouched
    assert all(numbers["before"][i] == pytest.approx(numbers["after"][i], rel=1e-9) for i in untouched)


def test_mla_order_of_the_history_counts_only_with_positions(explained):
    numbers = explained["mla"].numbers
    assert numbers["permutation_change"] < 1e-12 < 1e-5 < numbers["permutation_change_with_rotation"]
    assert numbers["op_difference"] < 1e-12
    assert numbers["absorbed_difference"] < 1e-12
    assert numbers["k3_cache_bytes_per_token"] == 27_648
    assert numbers["k3_state_bytes"] == 449_372_160


def test_vision_numbers_follow_from_the_tower(explained):
    numbers = explained["vision"].numbers
    assert numbers["tokens_by_size"]["4000 x 3000"] == 15444
    assert numbers["image_rows"] == numbers["clip_rows"] == vision.ROWS * vision.COLUMNS // 4
    assert numbers["time_code_difference"] < 1e-6 and numbers["packed_difference"] < 1e-5
    assert numbers["background_change"] > 0.01 and numbers["eps_change"] > 1e-4
    assert 0.2 < numbers["other_frame_share"] < 0.8
    assert numbers["rotation_far"] < numbers["rotation_at_origin"] == 1.0
    assert explain("moonvit", seed=1).numbers["background_change"] != numbers["background_change"]


def test_vision_of_a_trained_run_is_that_of_its_own_tower():
    run = replace(subject(), trained=True, label="the run r")
    with pytest.raises(RequestError, match="the run r has no vision tower"):
        vision.explain(run)
    small = replace(vision.TOWER, patch_size=4, position_grid=6)
    model = init_weights(Transformer(replace(run.cfg, vision=small)), 0).eval()
    assert vision.with_tower(replace(run, model=model))[1] == small
    assert vision.explain(replace(run, model=model)).numbers["image_rows"] == 12


def test_curriculum_packed_documents_are_computed_as_if_alone(explained):
    numbers = explained["curriculum"].numbers
    assert numbers["difference_with_borders"] < 1e-4
    assert numbers["difference_without_borders"] > 0.01
    assert sum(numbers["steps_by_window"].values()) == curriculum.STEPS


def test_numbers_come_from_the_model_and_the_text_at_hand():
    first, second = (explain("kda", seed=seed).numbers["half_life_median"] for seed in (0, 1))
    assert first != second
    short, longer = (explain("moe", text=given).numbers["layers"]["1"]["index"] for given in ("ab", "abc"))
    assert (len(short), len(longer)) == (2, 3)


def test_what_cannot_be_explained_is_refused_with_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="unknown mechanism 'kdaa'; did you mean 'kda'.*curriculum"):
        explain("kdaa")
    with pytest.raises(RequestError, match="2 to 512"):
        explain("kda", text="x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no run in"):
        explain("kda", run="absent")


def test_verb_lists_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert verb.run([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in MECHANISMS)
    assert verb.run(["qb"]) == 0
    shown = capsys.readouterr().out
    assert "perilune/ops/moe/quantile.py:" in shown
    assert "def _next" in shown
    assert max(map(len, shown.splitlines())) <= 90
    pytest.importorskip("plotly", reason="the extra `report` is not installed")
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    assert verb.run(["situ", "--png", str(tmp_path / "p.png"), "--html", str(tmp_path / "p.html"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mechanism"] == "situ"
    assert {Path(path).name for path in told["written"]} == {"p.png", "p-2.png", "p.html"}
    assert all(Path(path).stat().st_size > 5000 for path in told["written"])
    assert told["reference"]["line"] > 0
