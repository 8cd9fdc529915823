"""TOML and flags: round trips, precedence, and mistakes that are named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.config import TrainConfig
from perilune.config.parse import from_dict, load_toml, merge, parse_flags, to_dict, to_toml
from perilune.config.presets import TRAINABLE, training
from perilune.errors import ConfigError


@pytest.mark.parametrize("name", TRAINABLE)
def test_toml_round_trip_is_identity(name, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(training(name)))
    assert from_dict(TrainConfig, load_toml(path)) == training(name)


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("steps = 7\nseed = 5\n[model.kda]\nnum_heads = 4\n")
    merged = from_dict(TrainConfig, merge(to_dict(training("tiny")), load_toml(path)))
    got = parse_flags(
        TrainConfig, ["--steps", "9", "--model.residual", "plain", "--data.path", "a", "b"], merged, prog="t"
    )
    assert (got.steps, got.seed, got.model.kda.num_heads, got.model.residual) == (9, 5, 4, "plain")
    assert got.data.path == ("a", "b") and got.model.kda.head_dim == training("tiny").model.kda.head_dim


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stepz", "4"], "perhaps you meant --steps"),
        (["--model.kda.num-hads", "4"], "--model.kda.num-heads"),
        (["--steps", "many"], "--steps"),
        (["--model.moe.experts-per-token", "99"], "must be below"),
    ],
)
def test_wrong_flags(args, message):
    with pytest.raises(ConfigError, match=message):
        parse_flags(TrainConfig, args, training("tiny"), prog="perilune train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stps = 3", "perhaps you meant steps"),
        ("[model]\nhiden_size = 3", "perhaps you meant model.hidden_size"),
        ("steps = 'x'", "must be of type int"),
        ("steps = true", "must be of type int"),
        ("stages = 3", "must be a list"),
        ("model = 3", "must be a table"),
        ("optim = 'none'", "must be a table|must not be empty"),
        ("steps = [", "not valid TOML"),
    ],
)
def test_wrong_files(text, message, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_dict(TrainConfig, merge(to_dict(training("tiny")), load_toml(path)))


def test_missing_file_and_missing_keys(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="missing settings: model"):
        from_dict(TrainConfig, {"steps": 3})


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True), st.text(min_size=1, max_size=20), st.booleans())
def test_values_survive_the_round_trip(steps, momentum, path, byte):
    base = to_dict(training("tiny"))
    change = {
        "steps": steps,
        "optim": {"momentum": momentum},
        "data": {"path": [path], "tokenizer": "byte" if byte else "bpe"},
    }
    cfg = from_dict(TrainConfig, merge(base, change))
    import tomllib

    again = tomllib.loads(to_toml(cfg))
    assert again["steps"] == steps and again["optim"]["momentum"] == momentum and again["data"]["path"] == [path]


def test_the_word_none_is_a_value_where_the_setting_is_a_word(tmp_path):
    base = to_dict(training("tiny"))
    cfg = from_dict(
        TrainConfig, merge(base, {"model": {"moe": {"balancer": "none"}, "kda": {"gate_lower_bound": None}}})
    )
    path = tmp_path / "c.toml"
    path.write_text(to_toml(cfg))
    again = from_dict(TrainConfig, load_toml(path))
    assert again == cfg and again.model.moe.balancer == "none" and again.model.kda.gate_lower_bound is None
