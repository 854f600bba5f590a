"""From arguments to a composed configuration, and what is refused on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages import cli
from stages.artifacts.errors import ConfigError
from stages.config import RunConfig
from stages.overrides import GROUPS, check_composed, nearest_key, schema_keys

CONF = cli.config_folder()
#: what an option cannot be composed without
NEEDS = {
    ("optimizer", "torch"): ["optimizer.name=torch.optim.Adafactor"],
    ("data", "tokens"): ["data.path=tokens.npy"],
    ("model", "hf"): ["model.path=folder"],
    ("model", "module"): ["model.target=package.Class"],
}


def options() -> list[tuple[str, str]]:
    return [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def compose(*arguments: str) -> RunConfig:
    return cli.compose(["model=mlp", "budget=1GB", *arguments])


def refusal(*arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(*arguments)
    return caught.value


@pytest.mark.parametrize(("group", "option"), [pair for pair in options() if pair[0] != "sweep"])
def test_every_option_of_every_group_composes_in_both_spellings(group: str, option: str) -> None:
    needs = NEEDS.get((group, option), [])
    base = [] if group in ("model", "experiment") else ["model=mlp"]
    base += [] if group == "experiment" else ["budget=1GB"]
    plain = cli.compose([*base, f"{group}={option}", *needs])
    assert plain == cli.compose([*base, f"+{group}={option}", *needs])
    if group in ("data", "optimizer", "solver", "device") and option != "torch":
        assert getattr(plain, group).name == option


def test_defaults_are_those_of_the_schema() -> None:
    config, schema = compose(), RunConfig()
    for name in ("precision", "steps", "seed", "store", "tiers", "trace", "export", "eval", "runtime"):
        assert getattr(config, name) == getattr(schema, name), name


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("budgte", "budget"),
        ("data.batchsize", "data.batch_size"),
        ("batch_size", "data.batch_size"),
        ("optmizer.lr", "optimizer.lr"),
        ("tiers.hostbudget", "tiers.host_budget"),
        ("modle", "model"),
    ],
)
def test_a_mistyped_key_is_refused_with_the_nearest(prefix: str, key: str, nearest: str) -> None:
    error = refusal(f"{prefix}{key}=8")
    assert f"did you mean {nearest}?" in str(error)
    assert (error.key, error.expected) == (key, nearest)


def test_a_key_like_no_other_is_refused_with_those_of_its_section() -> None:
    assert "optimizer.lr" in refusal("optimizer.learning_speed_of_it=1").expected


def test_a_key_that_a_file_brings_in_is_refused() -> None:
    check_composed({"data": {"batch_size": 4}, "model": {"arguments": {"any": {"thing": 1}}}})
    with pytest.raises(ConfigError, match=r"did you mean data\.batch_size\?"):
        check_composed({"data": {"batchsize": 4}})


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("steps=many", "steps"),
        ("steps=3.7", "steps"),
        ("steps=null", "steps"),
        ("steps=0", "steps"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("trace.dynamic=perhaps", "trace.dynamic"),
        ("precision=fp8", "precision"),
        ("tiers.disk_budget=8Gb", "tiers.disk_budget"),
        ("solver=gredy_sync", "solver"),
        ("model.source=web", "model.source"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_naming_its_key(argument: str, key: str) -> None:
    error = refusal(argument)
    assert error.key == key
    assert key in str(error)


def test_a_new_argument_of_the_model_needs_a_plus_so_that_a_mistyped_one_is_seen() -> None:
    existing = next(iter(compose().model.arguments))
    error = refusal(f"model.arguments.{existing}s=1")
    assert f"did you mean model.arguments.{existing}?" in str(error)
    assert compose("+model.arguments.brand_new=1").model.arguments["brand_new"] == 1


def test_missing_model_lists_the_models() -> None:
    with pytest.raises(ConfigError) as caught:
        cli.compose(["budget=1GB"])
    assert caught.value.key == "model"
    assert "gpt2" in str(caught.value)
    assert "mlp" in str(caught.value)


def test_missing_budget_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match="budget=8GB"):
        cli.compose(["model=mlp"])


def test_text_values_need_no_quotes_of_hydra() -> None:
    assert compose("export.final=runs/lr=3/a (b)").export.final == "runs/lr=3/a (b)"


def test_deleting_a_key_is_refused() -> None:
    assert refusal("~budget").key == "budget"


def test_a_word_without_equals_is_refused() -> None:
    assert "KEY=VALUE" in str(refusal("gpt2"))


@pytest.mark.parametrize("option", [option for group, option in options() if group == "sweep"])
def test_a_sweep_whose_key_is_also_set_is_refused(option: str) -> None:
    from omegaconf import OmegaConf

    content = OmegaConf.load(CONF / "sweep" / f"{option}.yaml")
    params = OmegaConf.select(content, "hydra.sweeper.params") or content
    for key, values in params.items():
        with pytest.raises(ConfigError, match="remove one"):
            cli.check_arguments([f"sweep={option}", f"{key}={values.split(',')[0]}"])


def test_a_bad_value_anywhere_in_a_sweep_is_refused_before_any_job() -> None:
    with pytest.raises(ConfigError, match="2XB"):
        cli.check_arguments(["-m", "model=mlp", "budget=1GB,2XB"])


def test_nearest_key_prefers_the_same_section() -> None:
    assert nearest_key("data.sequence_len", schema_keys()) == "data.seq_len"


ECHO = """
import sys
from stages.cli import main
show = "import json,sys; c=json.load(open(sys.argv[1])); print('JOB', c['budget'], c['model']['name'])"
main(lambda file, folder: [sys.executable, "-c", show, str(file)], sys.argv[1:])
"""


#: the same, with jobs that end as a refusal does
REFUSING = ECHO.replace("['name'])", "['name']); sys.exit(2)")


def run_cli(folder: Path, *arguments: str, script: str = ECHO) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    environment.pop("HYDRA_FULL_ERROR", None)
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_job_is_handed_over_and_its_configuration_left_in_the_run_folder(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "+model=mlp", "budget=1GB", "hydra.run.dir=out")
    assert (done.returncode, done.stdout) == (0, "JOB 1GB mlp\n"), done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["budget"] == "1GB"


@pytest.mark.parametrize(
    "arguments",
    [["-m", "model=mlp", "budget=1GB,2GB"], ["+model=mlp", "budget=1GB,2GB", "--multirun"]],
)
def test_a_sweep_runs_one_job_per_value(tmp_path: Path, arguments: list[str]) -> None:
    done = run_cli(tmp_path, *arguments)
    assert [line for line in done.stdout.splitlines() if "JOB" in line] == ["JOB 1GB mlp", "JOB 2GB mlp"], (
        done.stderr
    )


def test_a_sweep_with_a_refused_job_runs_the_others_and_ends_with_its_code(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "-m", "model=mlp", "budget=1GB,2GB", script=REFUSING)
    assert done.stdout.count("JOB") == 2, done.stderr
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_sweep_file_runs_its_jobs(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "+model=mlp", "+sweep=solver", "budget=1GB")
    assert done.stdout.count("JOB") > 2, done.stderr


def test_the_budget_sweep_is_one_job_over_all_budgets(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "+model=mlp", "+sweep=budget")
    assert [line for line in done.stdout.splitlines() if "JOB" in line] == ["JOB curve mlp"], done.stderr


def test_a_refusal_is_one_message_exit_2_and_error_json_without_a_stack_trace(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "model=mlp", "budget=8Gb", "hydra.run.dir=out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: budget=8Gb")
    assert "Traceback" not in done.stderr
    record = json.loads((tmp_path / "out" / "error.json").read_text())
    assert record["kind"] == "config"
    assert (record["key"], record["found"], record["least_feasible_bytes"]) == ("budget", "8Gb", None)
    assert record["message"] in done.stderr


def test_help_shows_three_commands_without_a_model(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("python -m stages.") == 3
