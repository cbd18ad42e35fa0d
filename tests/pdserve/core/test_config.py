"""The configuration file: defaults, overrides, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pdserve.core.config import EngineConfig, PdserveConfig, RolePolicies, descriptions
from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role

SECTIONS = ["model", "cluster", "worker", "engine", "transfer", "router", "gateway", "scaling", "logging"]


def write(folder: Path, text: str) -> Path:
    path = folder / "pdserve.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- what is right ---------------------------------------------------------------------------------------------------


def test_nothing_at_all_gives_the_defaults(tmp_path: Path) -> None:
    assert PdserveConfig.load(None) == PdserveConfig.parse({}) == PdserveConfig.load(write(tmp_path, ""))
    config = PdserveConfig.load(None)
    assert (config.model.path, config.cluster.prefill, config.cluster.decode) == ("tiny", 1, 1)
    assert (config.gateway.port, config.engine.block_size) == (50_051, None)


def test_clients_are_told_settings_that_latencies_depend_on_and_no_places() -> None:
    config = PdserveConfig.load(
        None,
        {
            "engine.offload_folder": "/kv",
            "engine.chunk_tokens": 64,
            "transfer.interface": "eth1",
            "gateway.tokens": "t",
        },
    )
    told = config.public_settings
    assert (told["engine.chunk_tokens"], told["transfer.overlap"], told["router.policy"]) == (64, "layer", "kv_aware")
    assert {key.partition(".")[0] for key in told} == {"engine", "transfer", "router"}
    places = {
        f"{name}.{key}"
        for name in ("engine", "transfer", "router")
        for key, field in type(getattr(config, name)).model_fields.items()
        if "Path" in str(field.annotation) or key == "interface"
    }
    assert places == {"engine.offload_folder", "transfer.interface"}
    assert not places & told.keys()
    assert PdserveConfig.load(None, told) == PdserveConfig.load(None, {"engine.chunk_tokens": 64})


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_with_all_keys_commented_out_means_its_defaults(tmp_path: Path, section: str) -> None:
    path = write(tmp_path, f"{section}:\n  # nothing\n")
    assert PdserveConfig.load(path) == PdserveConfig()
    assert PdserveConfig.load(path, {"engine.num_blocks": 3}).engine.num_blocks == 3


def test_overrides_win_over_the_file_and_none_is_no_override(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {num_blocks: 17, block_size: 8}\n")
    config = PdserveConfig.load(
        path, {"engine.num_blocks": 4, "engine.block_size": None, "router.policy": "round_robin"}
    )
    assert (config.engine.num_blocks, config.engine.block_size) == (4, 8)
    assert config.router.policy == "round_robin"


@pytest.mark.parametrize(
    ("text", "value"), [("off", "off"), ("'off'", "off"), ("64", 64), ("'64'", 64), ("null", None), ("false", "off")]
)
def test_chunk_tokens_is_a_number_or_off_even_though_yaml_takes_that_for_a_boolean(
    tmp_path: Path, text: str, value: int | str | None
) -> None:
    config = PdserveConfig.load(write(tmp_path, f"engine: {{chunk_tokens: {text}}}\n"))
    assert config.engine.chunk_tokens == value
    assert PdserveConfig.parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("policy", "prefill", "decode"),
    [
        ("random", "random", "random"),
        ({"prefill": "round_robin", "decode": "power_of_two"}, "round_robin", "power_of_two"),
        ({"prefill": "slo"}, "slo", "kv_aware"),
    ],
)
def test_a_policy_is_for_both_roles_or_for_each(policy: object, prefill: str, decode: str) -> None:
    config = PdserveConfig.parse({"router": {"policy": policy, "slo": {"ttft_ms": 100}}})
    assert [config.router.policy_of(role) for role in Role] == [prefill, decode]
    assert PdserveConfig.parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("fastest", r"Input should be one of round_robin, random, .* \(got 'fastest'\)"),
        ("least_outstanding_tokens", "; least_outstanding_tokens is now least_tokens"),
        ({"prefill": "fastest"}, r"Input should be one of round_robin, random, "),
        ({"prefil": "random"}, "prefil is no role; give policies for prefill and decode"),
        (None, r"Input should be one of round_robin, random, "),
    ],
)
def test_other_policies_are_refused(policy: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^router\.policy: .*{why}"):
        PdserveConfig.parse({"router": {"policy": policy}})


@pytest.mark.parametrize(
    ("router", "why"),
    [
        ({"policy": "slo"}, "policy slo for prefill needs ttft_ms"),
        ({"policy": {"decode": "slo"}, "slo": {"ttft_ms": 100}}, "policy slo for decode needs itl_ms"),
        ({"slo": {"ttft_ms": 0}}, "greater than 0"),
    ],
)
def test_policy_slo_needs_its_objectives(router: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^router\.slo.*{why}"):
        PdserveConfig.parse({"router": router})


@pytest.mark.parametrize("text", ["0", "-3", "on", "1.5", "never", "[1]"])
def test_other_chunk_tokens_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine\.chunk_tokens: Input should be off or a whole number of at least 1"
    ):
        PdserveConfig.load(write(tmp_path, f"engine: {{chunk_tokens: {text}}}\n"))


def test_every_field_is_documented() -> None:
    def walk(section: type[BaseModel]) -> None:
        assert section.__doc__
        if section is not RolePolicies:  # a value
            assert all(descriptions(section).values())
            assert list(descriptions(section)) == list(section.model_fields)
        for info in section.model_fields.values():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                walk(info.annotation)

    assert list(PdserveConfig.model_fields) == SECTIONS
    walk(PdserveConfig)


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_is_named_with_its_section_and_the_known_ones(section: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PdserveConfig.parse({section: {"bogus": 1}})
    known = type(getattr(PdserveConfig(), section)).model_fields
    assert str(caught.value) == f"{section}.bogus: unknown key; known here: {', '.join(sorted(known))}"


def test_an_unknown_section_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        PdserveConfig.parse({"enigne": {}})
    assert str(caught.value) == f"enigne: unknown key; known here: {', '.join(sorted(SECTIONS))}"


@pytest.mark.parametrize(
    ("dotted", "value", "allowed"),
    [
        ("model.dtype", "float8", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("cluster.prefill", -1, "greater than or equal to 0"),
        ("engine.block_size", 0, "greater than or equal to 1"),
        ("engine.num_blocks", "many", "valid integer"),
        ("transfer.transport", "pigeon", "auto, shm"),
        ("transfer.lease_s", 0, "greater than 0"),
        ("transfer.lease_s", float("nan"), "86400"),
        ("gateway.port", 65_536, "less than or equal to 65535"),
        ("gateway.default_timeout_s", float("inf"), "86400"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(dotted: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PdserveConfig.load(None, {dotted: value})
    message = str(caught.value)
    assert message.startswith(f"{dotted}: ")
    assert allowed in message
    assert message.endswith(f"(got {value!r})")


@pytest.mark.parametrize("value", [3, "x", [1]])
def test_a_section_must_be_a_mapping(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^engine: "):
        PdserveConfig.parse({"engine": value})


def test_an_override_into_something_that_is_no_section_names_the_whole_key(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {num_blocks: 3}\n")
    with pytest.raises(ConfigError, match=r"^engine\.num_blocks: must be a mapping, not 3$"):
        PdserveConfig.load(path, {"engine.num_blocks.x": 1})
    with pytest.raises(ConfigError, match=r"^engine\.bogus: unknown key"):
        PdserveConfig.load(path, {"engine.bogus": 1})


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "!!python/object/apply:os.getcwd []", "a: \x01"])
def test_broken_yaml_names_the_file(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        PdserveConfig.load(path)
    assert str(caught.value).startswith(f"{path}: not valid YAML: ")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        PdserveConfig.load(path)


@pytest.mark.parametrize(("text", "what"), [("[1, 2]", "list"), ("3", "int"), ("just words", "str")])
def test_a_file_that_is_no_mapping_says_what_it_is(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"must be a mapping of sections, not a {what}$"):
        PdserveConfig.load(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        PdserveConfig.load(tmp_path / "nowhere.yaml")


def test_engine_defaults_hold_no_surprise() -> None:
    engine = EngineConfig()
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (None, 64)
    budgets = {(device, role): engine.token_budget(device, role) for device in ("cpu", "cuda:1") for role in Role}
    assert budgets == {
        ("cpu", Role.PREFILL): 512,
        ("cpu", Role.DECODE): 512,
        ("cuda:1", Role.PREFILL): 8192,
        ("cuda:1", Role.DECODE): 2048,
    }
    assert EngineConfig(max_num_batched_tokens=100).token_budget("cuda", Role.PREFILL) == 100


# --- the scaling controller ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "draft_model"), [(False, ""), ("off", ""), ("ngram", ""), ("org/name", "org/name"), ("tiny", "tiny")]
)
def test_speculation_names_a_draft_model_or_none(value: object, draft_model: str) -> None:
    """YAML takes a bare off for a boolean."""
    assert PdserveConfig.parse({"engine": {"speculation": value}}).engine.draft_model == draft_model


def test_speculation_by_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.speculation: String should have at least 1 character"):
        PdserveConfig.parse({"engine": {"speculation": ""}})


OBJECTIVES = {"ttft_ms": 500, "itl_ms": 50}


def test_the_controller_takes_the_objectives_of_the_router() -> None:
    assert PdserveConfig.parse({"scaling": {"controller": False}}).scaling.controller == "off"
    config = PdserveConfig.parse({"scaling": {"controller": "roles", "ttft_ms": 300}, "router": {"slo": OBJECTIVES}})
    assert (config.objectives.ttft_ms, config.objectives.itl_ms) == (300, 50)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"scaling": {"controller": "roles"}}, "scaling.controller roles needs ttft_ms, an objective; set "),
        ({"scaling": {"controller": "roles", "ttft_ms": 1}}, "roles needs itl_ms, an objective"),
        ({"scaling": {"controller": "workers", **OBJECTIVES}}, "controller workers needs max_workers"),
        ({"scaling": {"min_decode": 3, "max_decode": 2}}, "scaling: min_decode is more than max_decode"),
        ({"scaling": {"min_decode": 3, "max_workers": 3}}, "min_prefill and min_decode are together more than max"),
        ({"scaling": {"interval_s": 20}}, "interval_s is more than a third of hold_s"),
        ({"scaling": {"controller": "roles", **OBJECTIVES}, "cluster": {"decode": 0}}, "needs workers of both roles"),
        (
            {"scaling": {"controller": "roles", **OBJECTIVES}, "cluster": {"prefill_resources": {"p": 1}}},
            "needs equal cluster.prefill_resources and cluster.decode_resources",
        ),
        ({"scaling": {"controller": "always"}}, "scaling.controller: Input should be 'off', 'roles' or 'workers'"),
    ],
)
def test_a_controller_that_could_not_work_is_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PdserveConfig.parse(sections)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 400, "not the whole configuration"


def test_workers_on_gpus_may_take_longer_to_start() -> None:
    """Kernels may have to be compiled."""
    usual = PdserveConfig().cluster
    assert (usual.start_limit_s("cpu"), usual.start_limit_s("cuda:1"), usual.start_limit_s("auto")) == (180, 900, 900)
    assert PdserveConfig.parse({"cluster": {"start_timeout_s": 30}}).cluster.start_limit_s("cuda") == 30
