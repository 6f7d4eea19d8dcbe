"""The benchmarks of speed run, at sizes that CI can afford, and say what they found."""

import gc
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge import merge_task_vectors
from scripts import load_script

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process's memory")
TINY = "--layers 1 --hidden 64 --inner 128 --vocabulary 100 --experts 2".split()


@pytest.fixture(autouse=True)
def _nothing_to_collect() -> None:
    """Scripts collect garbage before each measurement: a second each time in a process that has loaded transformers."""
    gc.freeze()


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path, **instead: Any) -> None:
    """A script's `main`, with some of its parts replaced by cheaper ones."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    script = load_script(f"benchmarks/{name}.py")
    for part, cheaper in instead.items():
        monkeypatch.setattr(script, part, cheaper)
    script.main()


def test_without_mergekit_the_comparison_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MERGEKIT", raising=False)
    run("end_to_end", monkeypatch)
    assert "skipped: no mergekit" in capsys.readouterr().out


@linux
def test_a_large_merge_is_measured_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "results" / "large.json"
    run("large", monkeypatch, *TINY, "--method", "task_arithmetic", "--folder", tmp_path, "--json", result)
    found = json.loads(result.read_text())
    assert found["peak_bytes"] > 10e6  # Python and torch alone take more
    assert found["seconds"] > 0
    assert found["input_bytes"] == 3 * 2 * sum(p.numel() for p in tensors_of(TINY).values())
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]


@linux
def test_bandwidth_is_measured_against_cp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = load_script("benchmarks/bandwidth.py").merge

    def merge(models: Sequence[Path], output: Path, method: str, threads: int) -> float:
        """Of two merges the one from the hub's cache in a process of its own, as all are when it counts."""
        if "hub" in models[0].parts:
            return float(measured(models, output, method, threads))
        acemerge.merge(models[0], models[1:], output, method=method, threads=threads)
        return 1.0

    arguments: list[str | Path] = [*TINY, "--repeats", "1", "--threads", "1", "--folder", tmp_path, "--json", tmp_path / "b.json"]
    run("bandwidth", monkeypatch, *arguments, METHODS=("average",), merge=merge)
    rows = {row["command"]: row for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert rows["cp"]["of_cp"] == 1
    assert rows["cp"]["bytes_moved"] == 6 / 4 * rows["average"]["bytes_moved"]
    assert rows["average, hub cache"]["seconds"][0] > 0
    assert "| average |" in capsys.readouterr().out


def tensors_of(arguments: list[str]) -> dict[str, torch.Tensor]:
    llamas = load_script("benchmarks/llamas.py")
    sizes = {name.removeprefix("--"): int(value) for name, value in zip(arguments[::2], arguments[1::2], strict=True)}
    return {name: torch.empty(shape, device="meta") for name, shape in llamas.Llama(**sizes).tensors()}


def test_experts_differ_from_the_base_and_from_each_other(tmp_path: Path) -> None:
    llamas = load_script("benchmarks/llamas.py")
    llamas.write_models(llamas.Llama(1, 64, 128, 100, 2), tmp_path)
    base, one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "expert-1", "expert-2"))
    assert list(base) == list(one) == list(other)
    for name, weight in base.items():
        changes = torch.stack([(expert[name].float() - weight.float()).flatten() for expert in (one, other)])
        assert changes.std(1) == pytest.approx([0.003, 0.004], rel=0.5)
        assert abs(float(torch.corrcoef(changes)[0, 1])) < 0.5


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_the_published_ace_is_the_same_merge(heterogeneous: bool) -> None:
    experts = load_script("benchmarks/layers.py").make_experts(4, (24, 16)).double()
    published = load_script("benchmarks/published.py").published_ace(experts, heterogeneous)
    ours = merge_task_vectors(experts, method="ace", epsilon=1e-5, tau=0.0 if heterogeneous else 1e9)
    torch.testing.assert_close(published, ours, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("method", "options"), [("tsv_m", {}), ("iso_cts", {}), ("wudi", {"steps": 20})])
def test_the_other_published_methods_are_the_same_merges(method: str, options: dict[str, Any]) -> None:
    experts = load_script("benchmarks/layers.py").make_experts(3, (24, 16)).double()
    published = getattr(load_script("benchmarks/published.py"), f"published_{method}")(experts, **options)
    torch.testing.assert_close(published, merge_task_vectors(experts, method=method, **options), rtol=1e-6, atol=1e-9)


@linux
def test_methods_are_measured_against_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = load_script("benchmarks/methods_speed.py")._peak_of_route
    watched: list[str] = []

    def peak(model: str, route: str, threads: int) -> int:
        """One of the routes in a process of its own, as all are when it counts."""
        watched.append(route)
        return int(measured(model, route, threads)) if route == "wudi 2 published" else 1

    arguments = ["--model", "small", "--threads", "1", "--json", str(tmp_path / "m.json")]
    run("methods_speed", monkeypatch, *arguments, _peak_of_route=peak)
    costs = json.loads((tmp_path / "m.json").read_text())["costs"]
    assert {cost["method"] for cost in costs} == {"ace", "tsv_m", "iso_cts", "wudi 300 steps", "wudi 1000 steps"}
    assert {cost["who"] for cost in costs} == {"ours", "published"}
    assert {"ace ours", "wudi 2 published"} < set(watched)


def test_ace_is_measured_against_the_published_procedure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--models", "small", "--threads", "1", "--repeats", "1", "--json", str(tmp_path / "a.json")]
    small_products = partial(load_script("benchmarks/layers.py").gemm_rate, size=256)
    run("ace_speed", monkeypatch, *arguments, gemm_rate=small_products)
    timings = json.loads((tmp_path / "a.json").read_text())["timings"]
    assert len(timings) == 4 * 2  # matrices, branches
    assert all(timing["published_error"] < 1e-3 for timing in timings)


@pytest.mark.parametrize("side", ["homogeneous", "heterogeneous", "both"])
def test_a_sweep_is_measured_against_merges(side: str) -> None:
    benchmark = load_script("benchmarks/sweep.py")
    case = benchmark.Case(3, 16, 24, side)
    assert len(set(case.grid(0.4))) == 45
    assert float(benchmark.measure(case, repeats=1).split()[-1]) <= 1e-9


def test_files_that_two_versions_write_differently_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_bytes = load_script("benchmarks/same_bytes.py")
    versions = [same_bytes.Version(tmp_path, tmp_path / name) for name in ("before", "after")]
    for step, version in enumerate(versions):
        out = version.folder / "a_case" / "out"
        out.mkdir(parents=True)
        save_file({"kept": torch.zeros(3), "moved": torch.full((2, 2), 1.0 + step)}, out / "model.safetensors")
        (out / "card.md").write_text(f"the same\nversion {step}\n")
        (out / "config.json").write_text("{}")
        (version.folder / "failures.json").write_text(json.dumps({"a case": ["exit code 1"]} if step else {}))
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"name": "a case", "folder": "a_case", "commands": [{}], "same": []}]))
    rows, found = same_bytes.compare(cases, *versions)
    assert rows == [("a case", 1, 3, 3)]
    assert found == [
        "a case: after: exit code 1",
        "a case: out/card.md: line 2: 'version 0', 'version 1'",
        "a case: out/model.safetensors: 1 of 2 tensors, most 'moved', by 1",
    ]
    monkeypatch.setattr(same_bytes, "EXPECTED", {"a_case/out/card.md": "the card tells the version"})
    assert same_bytes.compare(cases, *versions)[0] == [("a case", 1, 3, 2)]


@linux
def test_extraction_is_measured_against_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of mergekit, a script that calls acemerge by mergekit's flags."""
    tool = tmp_path / "stand-in"
    call = 'acemerge.extract(a["--base-model"], a["--model"], a["--out-path"], rank=int(a["--max-rank"]))'
    tool.write_text(f"#!{sys.executable}\nimport sys, acemerge\na = dict(zip(sys.argv[1:-1], sys.argv[2:]))\n{call}\n")
    tool.chmod(0o755)
    result = tmp_path / "extract.json"
    shapes: list[str | Path] = ["--rank", "4", "--repeats", "1", "--threads", "1", "--folder", tmp_path, "--json", result]
    run("extract", monkeypatch, *TINY, "--experts", "1", "--mergekit", tool, *shapes)
    found = json.loads(result.read_text())
    assert found["acemerge"]["matrices"] == found["mergekit"]["matrices"] == 7
    assert 0 < found["mergekit"]["relative_error"] < found["acemerge"]["relative_error"] < 1  # ours is rounded to bfloat16


@pytest.mark.parametrize(("model_type", "preset"), [("roc_bert", "bert"), ("hunyuan_v1_moe", "llm"), ("florence2", "vlm")])
def test_the_smallest_model_of_a_family_is_merged_and_loaded(model_type: str, preset: str) -> None:
    script = load_script("benchmarks/families.py")
    found = script.attempt(model_type, script.kinds()[model_type])
    assert (found.problem, found.preset, found.vocabulary_merged) == ("", preset, ())
