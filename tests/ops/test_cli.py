"""The commands, run in this process against a scripted service; what they print is what a user sees."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ops.cli.config import documented_defaults
from ops.launch.state import ServiceState
from pdserve.core.config import PdserveConfig, descriptions
from pdserve.version import VERSION
from tests.command_line import PDSERVE
from tests.pdserve.scripted_service import ScriptedService
from tests.pdserve.test_client import ISSUE_KEYS, free_target
from tests.random_models import save_random_model
from tests.runtime.test_dtypes import AVX2, ZEN4


def test_generate_streams_then_explains(service: ScriptedService, pdserve: Any, tmp_path: Path) -> None:
    png = tmp_path / "w.png"
    ran = pdserve(
        *("generate", "hello", "--target", service.target, "--max-tokens", "3", "--stop", "A", "--stop", "B"),
        *("--mode", "pd", "--top-k", "5", "--top-p", "0.5", "--temperature", "0.5", "--png", str(png)),
    )
    assert ran.code == 0, ran.err
    assert len(ran.out.split()) == 3  # stdout is no terminal, so it has the text alone
    assert "ttft_decode" in ran.err
    assert "= expected" in ran.err
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"saved {png}" in ran.err
    sampling = service.servicer.requests[0].sampling
    assert list(sampling.stop) == ["A", "B"]
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (5, 0.5, 0.5)


def test_generate_takes_all_sampling_options_and_shows_logprobs(service: ScriptedService, pdserve: Any) -> None:
    ran = pdserve(
        *("generate", "hello", "--target", service.target, "--max-tokens", "2", "--min-p", "0.5", "--logprobs", "2"),
        *("--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"),
        *("--logit-bias", "7=-100", "--logit-bias", "8=2.5", "--salt", "tenant"),
    )
    assert ran.code == 0, ran.err
    assert "prefix cache: nothing found" in ran.err
    sampling = service.servicer.requests[0].sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.logprobs) == (0.5, 1.5, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert dict(sampling.logit_bias) == {7: -100.0, 8: 2.5}
    for shown in ("logprob", "-0.500", "60.7%", '"t1" 13.5%'):
        assert shown in ran.err
    plain = pdserve("generate", "hello", "--target", service.target, "--logprobs", "0", "--json").json
    assert [request.salt for request in service.servicer.requests] == ["tenant", ""]
    assert plain["prefill_cached_tokens"] == 0
    assert plain["logprobs"][0] == {"token_id": plain["token_ids"][0], "logprob": -0.5, "top": []}


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_prompts_from_stdin_and_files(
    service: ScriptedService, pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("from a file ü")
    rest = ("--target", service.target, "--max-tokens", "2", "--text-only")
    typed(monkeypatch, b"from stdin")
    assert pdserve("generate", *rest).code == 0
    typed(monkeypatch, b"from stdin")
    assert pdserve("generate", "-", *rest).code == 0
    ran = pdserve("generate", "--file", str(tmp_path / "prompt.txt"), *rest)
    assert (ran.code, ran.err, len(ran.out.split())) == (0, "", 2)
    assert [request.text for request in service.servicer.requests] == ["from stdin", "from stdin", "from a file ü"]
    typed(monkeypatch, b"\xff")
    assert pdserve("generate", *rest).err == "error: prompt: stdin is not UTF-8 (invalid start byte)\n"
    ran = pdserve("generate", "text", "--token-ids", "1", *rest)
    assert (ran.code, ran.err) == (2, "error: prompt: give one of text, --file and --token-ids\n")


def test_targets_as_users_write_them(service: ScriptedService, pdserve: Any) -> None:
    for target in (service.target, f"http://{service.target}/", f" {service.target}"):
        assert pdserve("status", "--target", target, "--json").json["ready"]
    ran = pdserve("status", "--target", "http://host:1/path")
    assert (ran.code, ran.err) == (2, "error: target: 'http://host:1/path' is not host:port\n")


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("top", "--count", "1"),
        ("generate", "hello"),
        ("bench", "--requests", "2", "--input-len", "20", "--output-len", "3"),
    ],
)
def test_clients_find_a_service_by_its_port(service: ScriptedService, pdserve: Any, command: tuple[str, ...]) -> None:
    ran = pdserve(*command, "--port", service.target.rpartition(":")[2])
    assert ran.code == 0, ran.err
    assert command[0] not in ("status", "top") or f"ready at {service.target} " in ran.out


@pytest.mark.parametrize(
    "command", ["status", "top", "generate", "chat", "demo", "bench", "down", "scale", "logs", "experiment prefix"]
)
def test_all_commands_of_a_service_have_the_same_option(pdserve: Any, command: str) -> None:
    assert re.search(r"--target,--port|--port,--target", pdserve(*command.split(), "--help").out)


@pytest.mark.parametrize("command", [("down",), ("scale", "--prefill", "2"), ("logs",)])
def test_commands_of_this_host_obey_the_environment_and_refuse_another_host(
    pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ServiceState(os.getpid(), psutil.Process().create_time(), 50051, "", target="localhost:50051").claim()
    for target, message in (("50061", "no service was started on this host with port 50061"),
                            ("https://head:50051", "head:50051 is on another host")):  # fmt: skip
        monkeypatch.setenv("PDSERVE_TARGET", target)
        ran = pdserve(*command)
        assert (ran.code, message in ran.err) == (1, True), ran.err


def test_the_version_and_short_help(pdserve: Any) -> None:
    assert pdserve("--version").out == f"pdserve {VERSION}\n"
    assert "Usage" in pdserve("-h").out
    assert "Usage" in pdserve("status", "-h").out


@pytest.mark.parametrize(
    ("command", "panels"),
    [
        (("bench",), ("Load", "Data", "Connection")),
        (("generate",), ("Sampling", "Connection")),
        (("demo",), ("Connection",)),
        (("experiment", "added-ttft"), ("Connection", "Data", "Settings and repetition", "Load")),
        (("compare",), ()),
        (("token", "new"), ()),
    ],
)
def test_help_wraps_once_and_has_panels(
    pdserve: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], panels: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = pdserve(*command, "--help").out
    assert [title for title in panels if f"╭─ {title} ─" in shown] == list(panels)
    lines = [line.strip() for line in shown[: shown.index("╭─")].splitlines()]
    pairs = [(line, after.split()[0]) for line, after in itertools.pairwise(lines) if line and after]
    early = [line for line, word in pairs if len(line) + len(word) < 76]
    assert not early, "lines that end before the terminal's width does"


def test_the_options_of_up_fit_a_screen_and_set_reaches_every_key(
    pdserve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(pdserve("up", "--help").out.strip().splitlines()) < 26
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for pair, message in (
        ("engine.max_model_len=4096", "error: engine.max_model_len: 4096 exceeds the model's context of 2048 tokens"),
        ("engine.blocks=1", "error: engine.blocks: unknown key"),
        ("engine", "error: --set: 'engine' is not KEY=VALUE"),
    ):
        ran = pdserve("up", "--set", pair, "--port", "0")
        assert (ran.code, ran.err.splitlines()[-1][: len(message)]) == (2, message)


def test_list_keeps_model_and_state_on_a_narrow_terminal(
    pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("ops.cli.options._PIPE_WIDTH", 80)
    ServiceState(
        os.getpid(), psutil.Process().create_time(), 50051, "", ray_folder="/tmp/r", target="localhost:50051",
        model="/models/Meta-Llama-3.1-8B-Instruct", workers="2P2D", phase="stopping", ray_address="127.0.0.1:36421",
        since_s=1.8e9,
    ).claim()  # fmt: skip
    shown = pdserve("list").out
    assert max(map(len, shown.splitlines())) <= 80
    for kept in ("localhost:50051", "/models/Meta-Llama-3.1-8B-Instruct", "stopping", "2P2D"):
        assert kept in shown


def test_where_nothing_answers_the_services_of_this_user_are_named(
    pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    target = free_target()
    assert "Your services" not in pdserve("generate", "--target", target, "x").err
    ServiceState(os.getpid(), psutil.Process().create_time(), 50961, "", target="localhost:50961").claim()
    ran = pdserve("generate", "--target", target, "x")
    assert ran.err.rstrip().endswith("Your services on this host: --target localhost:50961")


def test_top_shows_a_look_below_the_other_in_a_pipe(service: ScriptedService, pdserve: Any) -> None:
    ran = pdserve("top", "--target", service.target, "--count", "2")
    assert ran.code == 0, ran.err
    assert ran.out.count("tokens to do") == 2
    assert ran.out.count("ready at") == 2


def test_a_service_that_ends_is_told_without_a_line_of_grpcs_log() -> None:
    with ScriptedService() as service:
        command = [*PDSERVE, "top", "--target", service.target]
        top = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert top.stdout is not None
        assert "ready at" in top.stdout.readline()
    _, err = top.communicate(timeout=60)
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err


def test_tables_fit_narrow_terminals(service: ScriptedService, pdserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (60, 80, 120):
        monkeypatch.setattr("ops.cli.options._PIPE_WIDTH", width)
        for command in (("status",), ("top", "--count", "1")):
            lines = pdserve(*command, "--target", service.target).out.splitlines()
            assert max(map(len, lines)) <= width
            assert not any("…" in line for line in lines)
            assert any(line.startswith("worker") and "state" in line for line in lines)


def test_generate_json_is_one_line_and_nothing_else(service: ScriptedService, pdserve: Any) -> None:
    ran = pdserve("generate", "--token-ids", "1, 2,3", "--target", service.target, "--json", "--ignore-eos")
    assert ran.code == 0, ran.err
    assert ran.out.count("\n") == 1
    assert list(ran.json) == ISSUE_KEYS
    assert list(service.servicer.requests[0].token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "x", "--temperature", "-1"], 2, "error: temperature: "),
        (["generate", "x", "--logit-bias", "a=1"], 2, "error: logit_bias: "),
        (["generate"], 2, "error: prompt: "),
        (["generate", "--token-ids", "1,b"], 2, "error: token_ids: "),
        (["generate", "x", "--mode", "up"], 2, "error: mode: "),
        (["generate", "fail UNAVAILABLE no decode worker is ready"], 1, "no decode worker is ready"),
        (["generate", "fail RESOURCE_EXHAUSTED the queue is full", "--json"], 1, "error: the queue is full"),
        (["generate", "hang", "--timeout", "0.2"], 1, "deadline"),
    ],
)
def test_mistakes_are_one_line(
    service: ScriptedService, pdserve: Any, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], code: int, message: str,
) -> None:  # fmt: skip
    typed(monkeypatch, b"")
    ran = pdserve(*arguments, "--target", service.target)
    assert ran.code == code
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    assert ran.out.strip() in ("", "a")


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        (["generate", "x"], "w.xyz", "must end in one of .jpg, .pdf, .png"),
        (["generate", "x"], "file/w.png", "cannot be written: "),
        (["demo"], "folder.png", "cannot be written: Is a directory"),
    ],
)
def test_a_picture_that_cannot_be_saved_is_refused_at_once(
    service: ScriptedService, pdserve: Any, tmp_path: Path, command: list[str], name: str, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    ran = pdserve(*command, "--target", service.target, "--png", str(tmp_path / name))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith("error: --png: ")
    assert message in ran.err
    assert not service.servicer.requests


def test_checking_a_picture_changes_nothing(service: ScriptedService, pdserve: Any, tmp_path: Path) -> None:
    old, new = tmp_path / "old.png", tmp_path / "sub" / "new.png"
    old.write_bytes(b"as it was")
    for path in (old, new):
        ran = pdserve("generate", "fail UNAVAILABLE no", "--target", service.target, "--png", str(path))
        assert ran.code == 1
    assert old.read_bytes() == b"as it was"
    assert not new.exists()


def test_a_full_disk_is_one_line(service: ScriptedService, pdserve: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.png"
    path.symlink_to("/dev/full")
    ran = pdserve("generate", "hello", "--target", service.target, "--png", str(path))
    assert ran.code == 1
    assert "ttft_decode" in ran.err  # what was asked for is shown all the same
    assert ran.err.endswith(f"\nerror: the picture '{path}' cannot be written: No space left on device\n")
    with open("/dev/full", "w") as full:
        config = subprocess.run([*PDSERVE, "config"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert config.returncode == 1
    assert config.stderr == "error: the output: No space left on device\n"


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([*PDSERVE, "model-info", "tiny"], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "? vocabulary 4096" in ran.stdout


def test_no_service_and_unknown_options(pdserve: Any) -> None:
    for command in (["generate", "x"], ["status"], ["bench"], ["demo"]):
        target = free_target()
        ran = pdserve(*command, "--target", target)
        assert ran.code == 1
        assert ran.err.startswith(f"error: nothing answers at {target} (Connection refused): start the service")
    assert pdserve("generate", "x", "--nope").code == 2
    assert pdserve("nonsense").code == 2


def test_status(service: ScriptedService, pdserve: Any) -> None:
    ran = pdserve("status", "--target", service.target)
    assert ran.code == 0
    assert "prefill-0" in ran.out
    assert "64/64" in ran.out
    assert "37" in ran.out
    assert "75 %" in ran.out
    assert "guesses right" in ran.out
    assert "25 %" in ran.out
    assert "scripted (float32 from bfloat16, context 2048)" in ran.out
    assert "note: decode-0: core 3 is shared [with another]" in ran.out
    assert "hand-off within a host: 1 ms + 0.4 ms/MB (from 20 requests)" in " ".join(ran.out.split())
    plain = pdserve("status", "--target", service.target, "--json").json
    assert plain["ready"] is True
    assert plain["notes"] == ["decode-0: core 3 is shared [with another]"]
    assert [worker["worker_id"] for worker in plain["workers"]] == ["prefill-0", "decode-0"]
    (figures,) = {
        (w["prompt_tokens_looked_up"], w["prompt_tokens_cached"], w["cached_blocks"]) for w in plain["workers"]
    }
    assert figures == (200, 150, 37)


def test_config_reads_back_as_the_defaults(pdserve: Any) -> None:
    ran = pdserve("config")
    assert ran.out == documented_defaults()
    data = yaml.safe_load(ran.out)
    assert PdserveConfig.parse(data) == PdserveConfig()
    assert list(data) == list(PdserveConfig.model_fields)
    for name, section in PdserveConfig():
        assert list(data[name]) == list(type(section).model_fields)
        assert all(f"# {text}" in ran.out for text in descriptions(type(section)).values())


def plant_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path, cpuinfo: str) -> None:
    """Have this host's CPU be another."""
    (folder / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr("runtime.dtypes.CPUINFO", folder / "cpuinfo")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)


def test_model_info_counts_in_what_the_device_computes(
    pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_cpu(monkeypatch, tmp_path, AVX2)
    ran = pdserve("model-info", "dummy:8b", "--device", "cpu")
    assert "32.1 GB in float32 (stored in bfloat16)" in ran.out
    assert "auto converts the bfloat16 weights to float32: bfloat16 is emulated on this host (a CPU without" in ran.out
    named = pdserve("model-info", "dummy:8b", "--device", "cpu", "--dtype", "bfloat16", "--json").json
    assert (named["dtype"], named["checkpoint_dtype"]) == ("bfloat16", "bfloat16")
    assert "model.dtype: bfloat16 is emulated on" in named["notes"][0]
    plant_cpu(monkeypatch, tmp_path, ZEN4)
    native = pdserve("model-info", "dummy:8b", "--device", "cpu", "--json").json
    assert (native["dtype"], native["notes"]) == ("bfloat16", [])
    assert pdserve("model-info", "tiny", "--device", "tpu").err.startswith("error: device: 'tpu' is none of")


def test_model_info_notes_what_a_folder_lacks(pdserve: Any, tmp_path: Path) -> None:
    folder = save_random_model(tmp_path, "gqa")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    shown = pdserve("model-info", str(folder)).out
    assert f"note: {folder} has no tokenizer.json: prompts must be token ids" in shown
    assert "note: no eos_token_id: outputs end by their length alone, and JSON and regex are refused" in shown
    assert "note: no chat template: chats are refused" in shown
    notes = json.loads(pdserve("model-info", "tiny", "--json").out)["notes"]
    assert not [note for note in notes if "model.dtype: auto converts" not in note]  # as CPUs without bfloat16 do


def test_model_info(pdserve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_cpu(monkeypatch, tmp_path, ZEN4)
    ran = pdserve("model-info", "dummy:8b", "--device", "cpu", "--memory", "24")
    assert ran.code == 0, ran.err
    for word in (
        "8,030,261,248",
        "16.1 GB in bfloat16",
        "MHA",
        "GQA-4",
        "MQA",
        "latent 512 + rope key 64",
        "window",
        "Φ",
    ):
        assert word in ran.out
    plain = pdserve("model-info", "dummy:135m", "--json", "--dtype", "float32").json
    assert plain["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert plain["kv_bytes_context_windowed"] == plain["window"] * plain["kv_bytes_per_token"]
    assert plain["window"] == plain["context"] // 4
    assert [fit["memory_bytes"] for fit in plain["fits"]] == [16e9, 24e9, 80e9]
    split = pdserve("model-info", "dummy:8b", "--dtype", "bfloat16", "--memory", "24", "--tensor-parallel", "4")
    assert "the model over 4 devices" in split.out
    ranks = pdserve("model-info", "dummy:8b", "--dtype", "bfloat16", "--tensor-parallel", "4", "--json").json["ranks"]
    assert [(rank["heads"], rank["kv_heads"], rank["kv_bytes_per_token"]) for rank in ranks] == [(8, 2, 2**15)] * 4
    refused = pdserve("model-info", "dummy:8b", "--tensor-parallel", "64")
    assert refused.err.startswith("error: engine.tensor_parallel: 64 devices are more than the 32 heads")
    missing = pdserve("model-info", "/no/such/folder")
    assert missing.code == 1
    assert missing.err.startswith("error: /no/such/folder: no such folder")
    assert pdserve("model-info", "dummy:8b", "--dtype", "int3").err.startswith("error: dtype: ")


def test_model_info_names_peculiarities_of_a_family(pdserve: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 1,
    }
    config.write_text(json.dumps(shape))
    ran = pdserve("model-info", f"dummy:{config}")
    assert ran.code == 0, ran.err
    text = " ".join(ran.out.split())
    assert "biases queries, keys, values · attention output" in text
    assert "norms queries and keys, per head" in text
    assert "window 32 tokens in 3 of 4 layers; the KV pool keeps all tokens" in text
    facts = pdserve("model-info", f"dummy:{config}", "--json").json
    per_token = facts["kv_bytes_per_token"]
    assert (facts["kv_bytes_context"], per_token) == (1024 * per_token, 4 * 2 * 2 * 128 * 4)
    assert facts["kv_bytes_context_windowed"] == (3 * 32 + 1024) * per_token // 4
    plain = pdserve("model-info", "dummy:135m").out
    assert not [word for word in ("biases", "norms", "the KV pool keeps") if word in plain]


def test_model_info_of_a_model_that_is_not_served(pdserve: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4, "torch_dtype": "float32"}
    config.write_text(json.dumps(gpt2))
    for name in (str(tmp_path), str(config), f"dummy:{config}"):
        ran = pdserve("model-info", name, "--memory", "0.001", "--context", "100")
        assert ran.code == 0, ran.err
        text = " ".join(ran.out.split())
        assert "GPT2LMHeadModel" in text
        assert "not served" in text
        assert "1.5 kB a token; 153.6 kB for a context of 100" in text
        assert "too small for weights; 14 such devices would hold the weights and one request" in text
    facts = pdserve("model-info", str(config), "--json", "--memory", "1").json
    assert (facts["served"], facts["exact"], facts["kv_bytes_per_token"]) == (False, True, 3 * 2 * 64 * 4)
    assert facts["fits"][0]["requests"] == (10**9 - facts["weight_bytes"]) // facts["kv_bytes_context"]
    config.write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    failed = pdserve("model-info", str(config))
    assert (failed.code, "'hidden_size' must be a positive whole number" in failed.err) == (1, True)


def test_model_info_needs_the_config_alone(pdserve: Any, tmp_path: Path) -> None:
    """Also of a served model, here one with experts and a scale of its own."""
    config = tmp_path / "config.json"
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32_768,
        "torch_dtype": "bfloat16",
    }
    config.write_text(json.dumps(mixtral))
    ran = pdserve("model-info", str(tmp_path), "--dtype", "bfloat16")
    assert ran.code == 0, ran.err
    text = " ".join(ran.out.split())
    assert "parameters 46,702,792,704, of them 12,879,925,248 per token" in text
    assert "experts 2 of 8 per token" in text
    assert "in 80.0 GB: too small for weights and activations; 2 such devices" in text
    fp8 = {"quant_method": "fbgemm_fp8"}
    config.write_text(json.dumps(mixtral | {"quantization_config": fp8}))
    text = " ".join(pdserve("model-info", str(tmp_path), "--dtype", "bfloat16").out.split())
    assert "weights 93.4 GB in bfloat16, 47.0 GB on GPUs that multiply FP8" in text


def test_start_up_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ops.cli.main import main\n"
        "try: main(['config'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'ray', 'grpc', 'matplotlib', 'transformers', 'numpy')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "[]"
