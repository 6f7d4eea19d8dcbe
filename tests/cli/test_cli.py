import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from acemerge.cli.tables import name_cells, new_console, new_table
from acemerge.execute import shard
from acemerge.methods import all_methods
from child import command, fork, in_child, wait
from command import Command
from small_models import Models, base_tensors, fine_tuned, write_model, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys; sys.argv = ['acemerge', '--help']\n"
        "from acemerge.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "acemerge merge BASE EXPERT" in result.stdout
    assert result.stdout.splitlines()[-1] == "False"


def test_merge_then_the_same_bytes_from_its_own_recipe(run: Command, models: Models, tmp_path: Path) -> None:
    code, out, err = run("merge", *models.arguments, "-o", tmp_path / "out", "-m", "ace", "-s", "epsilon=1e-3")
    assert code == 0, err
    assert "2 merged, 3 averaged, 0 kept, 1 copied" in out
    assert "6/6 tensors" in err
    recipe = yaml.safe_load((tmp_path / "out/acemerge.yaml").read_text())
    assert recipe["options"]["epsilon"] == 1e-3
    assert str(tmp_path) not in (tmp_path / "out/acemerge.yaml").read_text()
    again = tmp_path / "acemerge.yaml"  # beside the models, whose names it uses
    again.write_text((tmp_path / "out/acemerge.yaml").read_text())
    assert run("merge", again, "-o", tmp_path / "again")[0] == 0
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_recipe_rules_and_flags_over_a_file(run: Command, models: Models, tmp_path: Path) -> None:
    recipe = {
        "base": "base",
        "experts": ["expert-0", {"model": "expert-1", "name": "second"}],
        "method": "ace",
        "options": {"epsilon": 0.5},
        "tensors": [{"match": "layers.1.*", "do": "keep"}, {"match": "embed.*", "method": "average", "options": {"alpha": 2}}],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = run("plan", tmp_path / "recipe.yaml", "-s", "tau=0.1", "--json")
    assert code == 0, err
    plan = json.loads(out)
    fates = {tensor["name"]: tensor for tensor in plan["tensors"]}
    assert plan["options"]["epsilon"] == 0.5
    assert plan["options"]["tau"] == 0.1
    assert fates["layers.1.weight"]["action"] == "kept"
    assert fates["embed.weight"]["method"] == "average"
    assert fates["embed.weight"]["options"] == {"alpha": 2.0}
    assert fates["layers.0.weight"]["experts"] == {"expert-0": "layers.0.weight", "second": "layers.0.weight"}


def test_plan_reads_no_tensor_data(run: Command, models: Models) -> None:
    weights = models.experts[0] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-400:] = b"\xff" * 400  # NaNs: a plan that looked would notice
    weights.write_bytes(content)
    code, out, _ = run("plan", *models.arguments)
    assert code == 0
    assert "reads" in out
    assert "peak memory" in out
    assert "GFLOP" in out
    assert "of all weights: " in out


def test_plan_shows_like_layers_together(run: Command, tmp_path: Path) -> None:
    base = {f"h.{i}.{name}.weight": torch.zeros(4, 4) for i in range(3) for name in ("attn.c_proj", "other")}
    write_model(tmp_path / "base", base, {"model_type": "gpt2"})
    experts = [write_model(tmp_path / f"e{i}", fine_tuned(base, i), {"model_type": "gpt2"}) for i in range(2)]
    rules = [{"match": "h.2.other.*", "method": "ties"}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"base": "base", "experts": ["e0", "e1"], "tensors": rules}))
    _, out, _ = run("plan", tmp_path / "recipe.yaml")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.startswith(("h.", " h."))}
    assert lines == {
        "h.{0..2}.attn.c_proj.weight": "3 x 4x4 float32 merged by ace_auto, stored [in, out], merged as [out, in]",
        "h.{0..1}.other.weight": "2 x 4x4 float32 merged by ace_auto",
        "h.2.other.weight": "4x4 float32 merged rule 'h.2.other.*': by ties",
    }
    _, out, _ = run("plan", tmp_path / "base", *experts, "-v")
    assert all(name in out for name in base)


def test_plan_says_what_becomes_of_what_a_preset_leaves_alone(run: Command, tmp_path: Path) -> None:
    """By the default method it is averaged, as the table says; by ACE it stays."""
    shapes = {"model.layers.0.self_attn.q_proj.weight": (4, 4), "lm_head.weight": (6, 4)}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    base = write_model(tmp_path / "base", weights)
    expert = write_model(tmp_path / "expert", {name: value + 1 for name, value in weights.items()})
    _, out, _ = run("plan", base, expert, "--preset", "llm")
    assert "norms average; embed_tokens and lm_head average too; orientation" in out
    assert "1 merged, 1 averaged, 0 kept" in out
    _, out, _ = run("plan", base, expert, "--preset", "llm", "-m", "ace")
    assert "norms average; embed_tokens and lm_head stay at the base; orientation" in out
    assert "1 merged, 0 averaged, 1 kept" in out


def test_merge_json(run: Command, models: Models, tmp_path: Path) -> None:
    code, out, err = run("merge", *models.arguments, "-o", tmp_path / "out", "-m", "ace", "--json")
    assert code == 0
    assert err == ""
    result = json.loads(out)
    merged = [tensor for tensor in result["tensors"] if tensor["action"] == "merged"]
    assert {tensor["branch"] for tensor in merged} == {"homogeneous"}
    assert all(tensor["norm_ratio"] > 0 for tensor in merged)
    assert result["totals"]["merged"] == 2


def test_verbose_and_quiet(run: Command, models: Models, tmp_path: Path) -> None:
    _, out, _ = run("merge", *models.arguments, "-o", tmp_path / "a", "-v")
    assert "overlap" in out
    code, out, err = run("merge", *models.arguments, "-o", tmp_path / "b", "-q", "--threads", "1")
    assert (code, out, err) == (0, "", "")


def test_warnings_are_shown_but_do_not_flood(run: Command, tmp_path: Path) -> None:
    base = {f"layers.{i}.weight": torch.eye(8) for i in range(6)}
    write_model(tmp_path / "base", base)
    broken = {name: torch.where(torch.eye(8) > 0, torch.nan, w) for name, w in base.items()}
    experts = [write_model(tmp_path / "e0", fine_tuned(base, 0)), write_model(tmp_path / "e1", broken)]
    for number, flags in enumerate(([], ["-q"], ["--json"])):
        arguments = ("-o", tmp_path / f"out-{number}", "--allow-nonfinite", *flags)
        code, out, err = run("merge", tmp_path / "base", *experts, *arguments)
        assert (code, "warning: " in out) == (0, False)
        assert err.count("warning: tensor 'layers.") == 3
        assert "and 3 more warnings, in acemerge_manifest.json" in err


def test_sharded_output(run: Command, models: Models, tmp_path: Path) -> None:
    run("merge", *models.arguments, "-o", tmp_path / "one")
    code, _, _ = run("merge", *models.arguments, "-o", tmp_path / "many", "--shard-size", "1kB")
    assert code == 0
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    one = load_file(tmp_path / "one/model.safetensors")
    many = {k: v for shard in set(index["weight_map"].values()) for k, v in load_file(tmp_path / "many" / shard).items()}
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(one[name].equal(many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(w.numel() * w.element_size() for w in one.values())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-m", "acee"], "there is no method 'acee': did you mean 'ace'?\n"),  # the other fifty are not listed
        (["-m", "ace", "-s", "epsilonn=1"], "method 'ace' has no option 'epsilonn': did you mean 'epsilon'?"),
        (
            ["-s", "epsilon=1"],
            "method 'ace_auto' has no option 'epsilon': ace, ram, ram_plus have it (-m ace). Known: alpha, power, reach, ridge",
        ),
        (["--weights", "1,2"], "method 'ace_auto' has no option 'weights': linear, ties, "),  # the plainest first
        (["-m", "ace", "-s", "epsilon=-1"], "epsilon=-1 is not allowed: it must be a number > 0 or 'paper'"),
        (["-m", "ace", "-s", "k_frac=2"], "k_frac=2 is not allowed: it must be a number >= 0 and <= 1"),
        (["-m", "ace", "-s", "refine=perhaps"], "refine='perhaps' is not allowed: it must be true or false"),
        (["-s", "epsilon"], "write it as KEY=VALUE"),
        (["-m", "ace", "-s", "epsilon=true"], "epsilon=True is not allowed"),
        (["-s", "alpha=1;30"], "alpha='1;30' is not allowed: it must be a number"),
        (["-m", "ace", "-s", "epsilon=[1"], "epsilon='[1' is not allowed"),
        (["-m", "linear", "-s", "weights=0.7"], "are 1 numbers for 3 experts"),
        (["--device", "meta"], "--device meta: not available here"),
        (["-s", "orientation=stored"], "use --orientation"),
        (["--orientation", "sideways"], "--orientation: "),
        (["--dtype", "int4"], "--dtype: "),
        (["--as", "adaptor"], "--as: "),
        (["--shard-size", "huge"], "--shard-size: write a size as 5GB"),
        (["--preset", "berd"], "did you mean 'bert'?"),
        (["--device", "toaster"], "--device toaster: not available here"),
    ],
)
def test_bad_arguments_are_explained(run: Command, models: Models, tmp_path: Path, arguments: list[str], complaint: str) -> None:
    code, _, err = run("merge", *models.arguments, "-o", tmp_path / "out", *arguments)
    assert code == 2
    assert complaint in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("out*"))


def test_unknown_recipe_field(run: Command, models: Models, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("base: base\nexperts: [expert-0]\nmetod: ace\n")
    code, _, err = run("merge", tmp_path / "recipe.yaml", "-o", tmp_path / "out")
    assert code == 2
    assert "there is no field 'metod': did you mean 'method'?" in err


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        ("base: base\nexperts: [expert-0]\noptions: epsilon\n", "options: write them as a mapping"),
        ("base: base\nexperts: [expert-0]\ntensors: [{mtach: '*'}]\n", "did you mean 'match'?"),
        ("base: base\nexperts: [{model: expert-0, name: ..}]\n", "experts.0.name"),
        ("base: base\nexperts: [{model: expert-0, name: a}, {model: expert-1, name: a}]\n", "two experts have the same name"),
        ("base: base\nexperts: []\n", "give at least one expert"),
        ("", "a recipe is a mapping"),
    ],
)
def test_bad_recipes_are_explained(run: Command, models: Models, tmp_path: Path, recipe: str, complaint: str) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe)
    code, _, err = run("merge", tmp_path / "recipe.yaml", "-o", tmp_path / "out")
    assert code == 2
    assert complaint in err
    assert "Traceback" not in err


def test_a_rule_with_options_only_leaves_the_fate_to_the_preset(run: Command, models: Models, tmp_path: Path) -> None:
    rule = "tensors: [{match: '*', options: {epsilon: 0.5}}]"
    (tmp_path / "recipe.yaml").write_text(f"base: base\nexperts: [expert-0]\nmethod: ace\npreset: bert\n{rule}\n")
    plan = json.loads(run("plan", tmp_path / "recipe.yaml", "--json")[1])
    fates = {tensor["name"]: tensor for tensor in plan["tensors"]}
    assert fates["layers.0.bias"]["action"] == "kept"
    assert fates["layers.0.weight"]["options"]["epsilon"] == 0.5


def test_one_model_is_not_enough(run: Command, models: Models, tmp_path: Path) -> None:
    code, _, err = run("merge", models.base, "-o", tmp_path / "out")
    assert code == 2
    assert "give a base and at least one expert" in err


def test_a_reader_that_leaves_early_is_no_failure(models: Models) -> None:
    command = f"{sys.executable} -m acemerge plan {' '.join(models.arguments)} --json | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_standard_streams_that_are_all_closed(models: Models, tmp_path: Path) -> None:
    command = f"{sys.executable} -m acemerge merge {' '.join(models.arguments)} -o {tmp_path / 'out'} <&- >&- 2>&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize("closed", [["stderr"], ["stdout", "stderr"]])
def test_some_standard_streams_that_are_closed(models: Models, tmp_path: Path, closed: list[str]) -> None:
    def work() -> None:
        for name in closed:  # as Python finds them when it starts
            os.close(getattr(sys, name).fileno())
            setattr(sys, name, None)
        command("merge", *models.arguments, "-o", tmp_path / "out")

    assert in_child(work).code == 0
    assert load_file(tmp_path / "out/model.safetensors")


NOT_PRINTED = "out was written and is whole, but standard output did not take the summary: No space left"


def test_a_summary_that_cannot_be_printed_says_so(models: Models, tmp_path: Path) -> None:
    command = f"{sys.executable} -m acemerge merge {' '.join(models.arguments)} -o {tmp_path / 'out'} > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert NOT_PRINTED in result.stderr
    assert load_file(tmp_path / "out/model.safetensors")


def test_json_that_cannot_be_printed_says_so(models: Models, tmp_path: Path) -> None:
    def work() -> None:
        command("merge", *models.arguments, "-o", tmp_path / "out", "--json")

    with Path("/dev/full").open("w") as full, (tmp_path / "err").open("w") as err:
        assert wait(fork(work, full.fileno(), err.fileno())) == 1
    assert NOT_PRINTED in (tmp_path / "err").read_text()
    assert load_file(tmp_path / "out/model.safetensors")


def test_inputs_that_are_nearly_a_model(run: Command, models: Models, tmp_path: Path) -> None:
    pointer = tmp_path / "cloned"
    pointer.mkdir()
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (tmp_path / "peft/math").mkdir(parents=True)
    (tmp_path / "peft/math/adapter_config.json").write_text("{}")
    for expert, complaint in ((pointer, "a git-lfs pointer"), (tmp_path / "peft", f"give {tmp_path / 'peft/math'}")):
        code, _, err = run("plan", models.base, expert)
        assert code == 2
        assert complaint in err


def test_several_files_without_an_index_are_named_even_above_adapters(run: Command, models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "several"
    (folder / "math").mkdir(parents=True)
    (folder / "math/adapter_config.json").write_text("{}")
    for name in ("one.safetensors", "two.safetensors"):
        (folder / name).write_bytes((models.base / "model.safetensors").read_bytes())
    code, _, err = run("plan", models.base, folder)
    assert code == 2
    assert "found one.safetensors, two.safetensors" in err


def test_debug_shows_the_traceback_and_keeps_the_exit_code(run: Command, models: Models, tmp_path: Path) -> None:
    command = ["merge", *models.arguments, "-o", tmp_path / "out", "-m", "nope"]
    for arguments in ([*command, "--debug"], ["--debug", *command]):
        code, _, err = run(*arguments)
        assert code == 2
        assert "Traceback" in err


def test_a_larger_vocabulary_is_noted(run: Command, models: Models, tmp_path: Path) -> None:
    larger = base_tensors() | {"embed_tokens.weight": torch.zeros(25, 8)}
    write_model(tmp_path / "larger", larger)
    write_model(tmp_path / "smaller", base_tensors() | {"embed_tokens.weight": torch.zeros(20, 8)})
    _, out, _ = run("plan", tmp_path / "smaller", tmp_path / "larger", "--preset", "llm")
    assert "'embed_tokens.weight' is [25, 8] in expert 'larger', [20, 8] in the base" in out


def test_interrupting_says_how_to_go_on(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_arguments: object) -> None:
        print("merging", flush=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            time.sleep(0.05)  # a signal that comes just before a long sleep would wait for its end

    def work() -> None:
        os.close(reader)
        command("merge", *models.arguments, "-o", tmp_path / "out")

    monkeypatch.setattr(shard, "merge_tensor_at_points", slow)
    reader, writer = os.pipe()
    with (tmp_path / "err").open("w") as err:
        process = fork(work, writer, err.fileno())
    os.close(writer)
    with os.fdopen(reader) as out:
        assert out.readline() == "merging\n"
        os.kill(process, signal.SIGINT)
        assert wait(process) == 130
    assert "repeat the command to go on" in (tmp_path / "err").read_text()
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-m", "ties", "-m", "ace"], "-m ties, -m ace: a merge has one method; give -m once"),
        (["-s", "epsilon=1", "-s", "epsilon=2"], "-s epsilon: is given twice; give it once"),
    ],
)
def test_what_is_given_twice_is_refused(run: Command, models: Models, tmp_path: Path, flags: list[str], says: str) -> None:
    code, _, err = run("merge", *models.arguments, "-o", tmp_path / "out", *flags)
    assert code == 2
    assert says in err
    assert not (tmp_path / "out").exists()


def test_methods_lists_and_describes(run: Command) -> None:
    _, out, _ = run("methods")
    found = listed(out)
    assert sorted(found) == [method.name for method in all_methods()]
    assert found[0] == "ace"
    assert all(
        title in out for title in ("Closed form", "Spectral", "Entry by entry", "A step around", "Use data", "One model per task")
    )
    _, out, _ = run("methods", "ace")
    assert all(option in out for option in ("epsilon", "tau", "k_frac", "normalise", "prior", "refine", "alpha"))
    assert "kept as the model family's preset says" in out
    assert "other tensors are averaged. Set" in run("methods", "ace_auto")[1]
    _, out, _ = run("methods", "ace", "--json")
    assert json.loads(out)[0]["options"][0]["name"] == "epsilon"


def listed(out: str) -> list[str]:
    return re.findall(r"^  (\w+)  ", out, re.MULTILINE)


def test_methods_of_one_kind_or_use(run: Command) -> None:
    for kind in {method.kind for method in all_methods()}:
        assert sorted(listed(run("methods", "--kind", kind)[1])) == [each.name for each in all_methods() if each.kind == kind]
    assert {"svc", "core_space", "larv"} <= set(listed(run("methods", "--kind", "around")[1]))
    weights, data = (set(listed(run("methods", "--uses", uses)[1])) for uses in ("weights", "data"))
    assert weights | data == {method.name for method in all_methods()}
    assert not weights & data
    assert listed(run("methods", "--uses", "test-rows")[1]) == ["adamerging", "mingle"]
    assert {method["name"] for method in json.loads(run("methods", "--uses", "data", "--json")[1])} == data
    assert run("methods", "--uses", "data", "--kind", "spectral")[1] == "no method of kind spectral uses data\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--kind", "spectra"), "--kind spectra: did you mean 'spectral'?"),
        (("--uses", "test"), "did you mean 'test-rows'?"),
        (("ace", "--kind", "data"), "choose from the list of all methods"),
    ],
)
def test_unknown_kinds_and_uses_are_refused(run: Command, arguments: tuple[str, ...], hint: str) -> None:
    code, _, err = run("methods", *arguments)
    assert code == 2
    assert hint in err


def test_columns_say_how_wide_a_pipe_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert in_child(lambda: print(new_console().width)).out == "200\n"
    monkeypatch.setenv("COLUMNS", "80")
    assert in_child(lambda: print(new_console().width)).out == "80\n"


def test_names_of_tensors_go_on_behind_a_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.{0..2}.post_attention_layernorm.weight"
    why = "kept by the preset, which does not take it for a linear map, as its name says"

    def show() -> None:
        table = new_table("tensor", "shape", "dtype", "fate", "why", right=["shape"])
        console = new_console()
        for cell in name_cells(table, [name, "lm_head.weight"], console.width):
            table.add_row(cell, "3 x 64x32", "float32", "kept", why)
        console.print(table)

    for columns, lines in (("80", ["model.layers.{0..2}.", "post_attention_layernorm.", "weight"]), ("160", [name])):
        monkeypatch.setenv("COLUMNS", columns)
        shown = [words[0] for words in map(str.split, in_child(show).out.splitlines()) if words]
        assert [word for word in shown if word in name] == lines


def test_methods_fit_80_columns_without_cutting_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = in_child(lambda: command("methods"))
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(lines) < 3 * len(all_methods())
    assert max(map(len, lines)) <= 80
    words = {word.rstrip(".:") for method in all_methods() for word in method.summary.split()}
    shown = [word for line in lines if line.startswith(" " * 24) for word in line.split()]
    assert {word.rstrip(".:") for word in shown} <= words


def test_task_command_needs_something_to_put_back(run: Command, models: Models, tmp_path: Path) -> None:
    run("merge", *models.arguments, "-o", tmp_path / "out")
    code, _, err = run("task", tmp_path / "out", "expert-0", "-o", tmp_path / "task")
    assert code == 2
    assert "holds no heads" in err
