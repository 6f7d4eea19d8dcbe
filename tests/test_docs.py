"""The docs say what the code does: a page per method with its options as they are, examples that run, links that lead on."""

import re
from pathlib import Path
from typing import Any

import pytest

from acemerge.checkpoints.families import FAMILIES
from acemerge.methods import Method, all_methods, registry
from acemerge.recipe.recipe import Recipe
from scripts import load_script

ROOT = Path(__file__).parents[1]
METHODS = all_methods()
every_method = pytest.mark.parametrize("method", METHODS, ids=[m.name for m in METHODS])
OUR_FILES = [
    f"/{p.relative_to(ROOT)}" for folder in ("src", "tests", "benchmarks", "demos") for p in (ROOT / folder).rglob("*.py")
]
OF_THE_READER = ("NAME.py", "train.py", "score.py", "again.py", "your_score.py")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(method: Method) -> str:
    return (ROOT / "docs" / "methods" / f"{method.name}.md").read_text(encoding="utf-8")


@every_method
def test_a_methods_page_lists_its_options_as_they_are(method: Method) -> None:
    for option in method.describe_options():
        row = next((line for line in page(method).splitlines() if line.startswith(f"| `{option.name}` |")), "")
        cells = [cell.strip().strip("`'\"") for cell in row.split("|")]
        assert str(option.default) in cells, f"{method.name}: {option.name} is {option.default} by default"
        assert option.allowed.replace("|", "") in row.replace("`", ""), f"{method.name}: {option.name} allows {option.allowed}"


@every_method
def test_a_methods_page_has_an_example_that_runs(method: Method) -> None:
    examples = re.findall(r"```python\n(.*?)```", page(method), re.DOTALL)
    assert examples
    for example in examples:
        scope: dict[str, Any] = {}
        exec(example, scope)
    assert f"-m {method.name}" in page(method) or method.name == "ace_auto"


def test_the_method_that_the_docs_add_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.md", "methods/writing.md"))
    scope: dict[str, Any] = {}
    try:
        for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(example, scope)
    finally:
        assert registry._registered.pop("median")
    assert "inputs_are_untouched: " in capsys.readouterr().out


def test_the_pictures_show_what_was_measured_and_what_is_checked() -> None:
    pictures = load_script("benchmarks/pictures.py")
    for name, draw in pictures.DRAWINGS.items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == draw(), "python benchmarks/pictures.py"


@every_method
def test_the_readme_links_every_method(method: Method) -> None:
    assert f"[{method.name}](docs/methods/{method.name}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@every_method
def test_the_list_of_pages_has_every_method_under_its_kind(method: Method) -> None:
    text = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{method.kind}` |"))
    assert f"[{method.name}]({method.name}.md)" in row


@pytest.mark.parametrize("path", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_files_that_are_named_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = {found for found in re.findall(r"`([\w/.]+\.py)`", text) if Path(found).name not in OF_THE_READER}
    assert not {name for name in named if not any(known.endswith(f"/{name}") for known in OUR_FILES)}


def test_every_preset_and_recipe_field_is_documented() -> None:
    families = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert all(f"`{family.name}`" in families for family in FAMILIES)
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert all(re.search(rf"^{name}:|`{name}`", recipes, re.MULTILINE) for name in Recipe.model_fields)
