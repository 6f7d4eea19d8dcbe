"""What strangers put into names, configs and manifests stays text: on terminals, in the card, in paths. No code of theirs runs.

Pages in a browser are in `reports/test_browser.py`.
"""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

import acemerge
import model_zoo
from acemerge.calibration.models import load_model, model_config
from acemerge.calibration.texts import read_texts
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.errors import AcemergeError, InputError
from acemerge.output.manifest import MANIFEST
from command import Command
from small_models import base_tensors, fine_tuned, write_model, write_models

TERMINAL = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b1m\r\u202egnp.exe\u2066"
FORGED = "\nacemerge: error: forged\rforged\x0bforged\u2028forged\x85forged"
HTML = "<script>window.ran = 1</script><img src=http://127.0.0.1:9/x onerror=ran()>"
MARKDOWN = "![x](http://127.0.0.1:9/x) [y](javascript:ran()) `` ` ``` *b* # | <b>"


def is_inert(text: str) -> bool:
    return all(each.isprintable() or each == "\n" for each in text)


# --- terminals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """With heads, and tasks of its own."""
    models = write_models(tmp_path)
    for index, expert in enumerate(models.experts):
        save_file(fine_tuned(base_tensors(), index) | {"classifier.weight": torch.ones(2, 8)}, expert / "model.safetensors")
    acemerge.merge(models.base, models.experts, tmp_path / "merged", method="emr", quiet=True)
    return tmp_path / "merged"


def rewrite(merged: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((merged / MANIFEST).read_text())
    change(manifest)
    (merged / MANIFEST).write_text(json.dumps(manifest))


def everywhere(value: Any, text: str) -> Any:
    """The same tree, with a text behind every one of its texts but hashes, which have a form."""
    if isinstance(value, dict):
        return {everywhere(key, text): everywhere(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [everywhere(each, text) for each in value]
    return value + text if isinstance(value, str) and ":" not in value else value


FIELDS = ("base", "experts", "family", "method", "orientation", "notes", "cautions", "versions", "totals", "heads", "unused")


def poison(manifest: dict[str, Any], text: str) -> None:
    for field in FIELDS:
        manifest[field] = everywhere(manifest.get(field, []), text)
    manifest["notes"] = manifest["cautions"] = [text]
    manifest["options"] = {f"x{text}": text}
    manifest["inputs"] = {text: {f"{text}/{text}": text}}
    manifest["files"][text] = "blake3:" + "0" * 64
    for tensor in manifest["tensors"]:
        tensor |= {"name": tensor["name"] + text, "reason": text, "branch": text, "warnings": [text], "own fact": text}


@pytest.mark.parametrize("verb", ["verify", "report", "task"])
def test_terminals_are_shown_text(run: Command, merged: Path, tmp_path: Path, verb: str) -> None:
    rewrite(merged, lambda manifest: poison(manifest, TERMINAL))
    (merged / "extra\x1b[2J.txt").touch()
    further = {"verify": [], "report": ["-o", tmp_path / "r.html"], "task": [f"x{TERMINAL}", "-o", tmp_path / "t"]}[verb]
    _, out, err = run(verb, merged, *further)
    assert out + err
    assert is_inert(out + err)


@pytest.mark.parametrize("verb", ["verify", "report", "task"])
def test_a_name_in_a_manifest_begins_no_line(run: Command, merged: Path, tmp_path: Path, verb: str) -> None:
    rewrite(merged, lambda manifest: poison(manifest, FORGED))
    (merged / f"extra{FORGED}.txt").touch()
    further = {"verify": [], "report": ["-o", tmp_path / "r.html"], "task": [f"x{FORGED}", "-o", tmp_path / "t"]}[verb]
    _, out, err = run(verb, merged, *further)
    assert "forged" in out + err, "the name is not shown, so this tells nothing"
    assert not forged_lines(out + err)


@pytest.mark.parametrize("verb", ["plan", "plan -v", "merge", "diagnose"])
def test_a_name_of_a_folder_or_a_tensor_begins_no_line(run: Command, tmp_path: Path, verb: str) -> None:
    named = tmp_path / f"expert{FORGED}"
    for seed, folder in enumerate((tmp_path / "base", named)):
        write_model(folder, fine_tuned(base_tensors(), seed))
    further = {"merge": ["-o", tmp_path / f"out{FORGED}", "-v"], "diagnose": ["-o", tmp_path / "page.html", "--quick"]}
    code, out, err = run(*verb.split(), tmp_path / "base", named, *further.get(verb, []))
    assert code in (0, 3), err
    assert not forged_lines(out + err)
    save_file({f"x{FORGED}": torch.ones(2)}, named / "model.safetensors", metadata={"format": "pt"})
    code, out, err = run(*verb.split(), tmp_path / "base", named, *further.get(verb, []))
    assert code == 2
    assert "forged" in err
    assert not forged_lines(out + err)


def forged_lines(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith(("forged", "acemerge: error: forged"))]


def test_messages_name_files_as_text(run: Command, tmp_path: Path) -> None:
    models = write_models(tmp_path, experts=1)
    strange = models.experts[0] / "model\x1b[2J\x07.safetensors"
    (models.experts[0] / "model.safetensors").rename(strange)
    strange.write_bytes(b"damaged")
    code, out, err = run("merge", *models.arguments, "-o", tmp_path / "out")
    assert code == 2
    assert "model\\x1b[2J\\x07.safetensors" in err
    assert is_inert(out + err)


def test_names_are_no_markup_and_no_emoji(run: Command, tmp_path: Path) -> None:
    odd = "a:bomb:[bold red]x[/].weight"
    for name in ("base", "one"):
        write_model(tmp_path / name, {odd: torch.ones(4, 4)})
    code, out, _ = run("plan", tmp_path / "base", tmp_path / "one", "-v")
    assert code == 0
    assert odd in out


# --- the card ----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Of a rendered card."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def rendered(card: str) -> list[tuple[str, dict[str, str | None]]]:
    """Its tags, by a renderer that lets HTML through, as the hub's does before it cleans it."""
    return Tags(MarkdownIt("commonmark", {"html": True}).enable("table").render(card.split("\n---\n", 1)[1])).found


def card_of(root: Path, base: str, expert: str, file: str) -> str:
    """Of a merge of two folders with these names, whose weights are in a file of this one."""
    for folder, tensors in ((base, base_tensors()), (expert, fine_tuned(base_tensors(), 1))):
        write_model(root / folder, tensors)
        (root / folder / "model.safetensors").rename(root / folder / file)
        (root / folder / "README.md").write_text("---\nlicense: mit\ntags: [x]\n---\n" + HTML)
    acemerge.merge(root / base, [root / expert], root / "out", method="average", quiet=True)
    return (root / "out/README.md").read_text()


NASTY = [
    HTML.replace("/", "⧸"),
    MARKDOWN.replace("/", "⧸"),
    "a\n---\nlicense: evil\n---\n",
    "x\n```\n<b>",
    f"y{TERMINAL}",
    "- 'q': {z}",
]


@pytest.mark.parametrize("name", NASTY)
def test_cards_hold_names_as_text(tmp_path: Path, name: str) -> None:
    plain = card_of(tmp_path / "plain", "base", "expert", "weights.safetensors")
    file = name.replace("\n", " ") + ".safetensors"
    card = card_of(tmp_path / "nasty", f"{name}-base", f"{name}-expert", file)
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == yaml.safe_load(plain.split("---\n")[1])
    assert rendered(card) == rendered(plain), "other tags than those of a card with plain names"
    assert is_inert(card)


def test_a_hub_id_in_front_matter_is_a_text(tmp_path: Path) -> None:
    """The folder may only look like the hub's cache."""
    for index, name in enumerate(("models--a--b\nlicense: evil", "models--x--<img src=x>")):
        write_model(tmp_path / name / "snapshots" / "abc", fine_tuned(base_tensors(), index))
    base, expert = sorted(tmp_path.glob("*/snapshots/abc"))
    acemerge.merge(base, [expert], tmp_path / "out", method="average", quiet=True)
    card = (tmp_path / "out/README.md").read_text()
    front = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert front["base_model"] == ["a/b\nlicense: evil", "x/<img src=x>"]
    assert "license" not in front
    assert {tag for tag, _ in rendered(card)} <= {
        "h1",
        "h2",
        "p",
        "ul",
        "li",
        "code",
        "pre",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }


def test_recipes_are_read_back_as_they_were_meant(tmp_path: Path) -> None:
    """What a stranger calls a folder or a tensor cannot add a line to the recipe beside the output."""
    name = "x: {a: b}\nmethod: ties # "
    write_model(tmp_path / name, fine_tuned(base_tensors(), 1))
    write_model(tmp_path / "base", base_tensors())
    acemerge.merge(tmp_path / "base", [tmp_path / name], tmp_path / "out", method="average", quiet=True)
    recipe = yaml.safe_load((tmp_path / "out/acemerge.yaml").read_text())
    assert recipe["method"] == "average"
    assert recipe["experts"][0]["model"] == name


# --- paths -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "id_rsa").write_text("key")
    return folder


def refused(merged: Path, expert: str, output: Path) -> str:
    with pytest.raises(InputError) as caught:
        acemerge.export_expert(merged, expert, output)
    assert not list(output.parent.glob(f"{output.name}*"))
    return str(caught.value)


@pytest.mark.parametrize("name", ["../secret", "..", "../../secret", "a/../../secret"])
def test_an_expert_s_name_leads_nowhere(merged: Path, secret: Path, tmp_path: Path, name: str) -> None:
    rewrite(merged, lambda manifest: manifest.update(experts=[name]))
    assert "cannot be an expert's name" in refused(merged, name, tmp_path / "task")
    with pytest.raises(InputError, match="cannot be an expert's name"):
        acemerge.load_expert_head(merged, name)


@pytest.mark.parametrize("place", ["heads", "heads/expert-0", "heads/expert-0/notes.txt", "tasks", "tasks/expert-0", "shared"])
def test_links_in_an_output_lead_nowhere(merged: Path, secret: Path, tmp_path: Path, place: str) -> None:
    path = merged / place
    if path.is_dir():
        shutil.copytree(path, secret / "copy")
        shutil.rmtree(path)
        path.symlink_to(secret / "copy")
    else:
        path.symlink_to(secret / "id_rsa")
    assert "a link that leaves the model's folder" in refused(merged, "expert-0", tmp_path / "task")


@pytest.mark.parametrize("name", ["../secret/id_rsa", "linked/id_rsa"])
def test_verify_reads_nothing_outside(merged: Path, secret: Path, name: str) -> None:
    (merged / "linked").symlink_to(secret)
    rewrite(merged, lambda manifest: manifest["files"].update({name: "blake3:" + "0" * 64}))
    assert f"{name}: named in {MANIFEST}, but outside the folder" in acemerge.verify(merged).problems


def test_overwriting_an_output_deletes_nothing_outside(merged: Path, secret: Path, tmp_path: Path) -> None:
    rewrite(merged, lambda manifest: manifest["files"].update({"../secret/id_rsa": "blake3:" + "0" * 64}))
    (merged / "heads/expert-0/linked").symlink_to(secret)
    rewrite(merged, lambda manifest: manifest["files"].update({"heads/expert-0/linked": "blake3:" + "0" * 64}))
    models = [tmp_path / "expert-0", tmp_path / "expert-1"]
    acemerge.merge(tmp_path / "base", models, merged, overwrite=True, quiet=True)
    assert (secret / "id_rsa").read_text() == "key"


# --- code --------------------------------------------------------------------------------------------------------------

SOURCES = Path(acemerge.__file__).parent


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", node


def test_every_class_that_a_folder_can_choose_is_told_to_run_no_code() -> None:
    """A class that is named in our source runs none: `auto_map` in a config is for the Auto classes."""
    seen = 0
    for where, call in calls("from_pretrained"):
        assert isinstance(call.func, ast.Attribute)
        chosen = call.func.value
        own_class = isinstance(chosen, ast.Name) and chosen.id[0].isupper() and not chosen.id.startswith("Auto")
        trusts = {keyword.arg: keyword.value for keyword in call.keywords}.get("trust_remote_code")
        assert own_class or (isinstance(trusts, ast.Constant) and trusts.value is False), where
        seen += not own_class
    assert seen >= 9


def test_nothing_in_the_sources_trusts_remote_code_or_unpickles_a_stranger_s_file() -> None:
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        assert "trust_remote_code=True" not in text, path
        assert '"trust_remote_code": True' not in text, path
        assert "allow_pickle=True" not in text, path
    loads = [(where, {each.arg: each.value for each in call.keywords}) for where, call in calls("load") if is_torch(call)]
    assert len(loads) >= 2
    for where, keywords in loads:
        assert isinstance(keywords.get("weights_only"), ast.Constant), where


def is_torch(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"


@dataclass(frozen=True)
class Trap:
    """A model whose folder would run code; what it would leave behind."""

    folder: Path
    mark: Path


AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel", "AutoModelForSequenceClassification": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTokenizer", None],
}  # fmt: skip


@pytest.fixture(params=["bert", "evil"])
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Trap:
    """Code for its config, model, tokenizer and for generating; and a user who answers yes to whatever a library asks.

    Of a kind of model that transformers has itself, it asks nothing; of another it does.
    """
    folder, mark = model_zoo.bert(tmp_path / "models").experts["red"], tmp_path / "ran"
    lines = f"open({str(mark)!r}, 'w').close()\nfrom transformers import BertConfig, BertModel, BertTokenizerFast\n"
    classes = {"EvilConfig": "BertConfig", "EvilModel": "BertModel", "EvilTokenizer": "BertTokenizerFast"}
    code = lines + "".join(f"class {name}({parent}): pass\n" for name, parent in classes.items())
    for name in ("evil.py", "custom_generate/generate.py", "__init__.py", "setup.py", "sitecustomize.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": AUTO_MAP, "model_type": request.param}))
    tokenizer = {"auto_map": {"AutoTokenizer": AUTO_MAP["AutoTokenizer"]}, "tokenizer_class": "EvilTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.chdir(folder)
    return Trap(folder, mark)


def attempt(work: Callable[[], object]) -> None:
    with suppress(AcemergeError):
        work()


def test_code_in_a_model_s_folder_is_not_run(trap: Trap, tmp_path: Path) -> None:
    expert = open_checkpoint(trap.folder, "red")
    (tmp_path / "red.jsonl").write_text('{"text": "hello"}\n')
    attempt(lambda: model_config(expert))
    attempt(lambda: load_model(expert))
    attempt(lambda: read_texts(tmp_path / "red.jsonl", expert, expert))
    others = [folder for folder in trap.folder.parent.iterdir() if folder != trap.folder]
    base = next(folder for folder in others if "base" in folder.name)
    acemerge.merge(base, [trap.folder, *(folder for folder in others if folder != base)], tmp_path / "out", quiet=True)
    attempt(lambda: acemerge.load_expert_head(tmp_path / "out", "red"))
    attempt(lambda: acemerge.export_expert(tmp_path / "out", "red", tmp_path / "task"))
    attempt(lambda: acemerge.diagnose(base, [trap.folder]))
    assert not trap.mark.exists()


def test_the_trap_would_spring(trap: Trap) -> None:
    """Or the test above would show nothing."""
    transformers.AutoConfig.from_pretrained(trap.folder, trust_remote_code=True)
    assert trap.mark.exists()


@pytest.mark.parametrize(
    "named", ["pipeline", "AutoModel", "Trainer", "utils", "PreTrainedModel.from_pretrained", 7, "BertConfig"]
)
def test_a_config_names_a_model_or_nothing(tmp_path: Path, named: object) -> None:
    """It is looked up in transformers, where there is more than models."""
    models = model_zoo.bert(tmp_path / "models")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", quiet=True)
    config = tmp_path / "out/heads/red/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [named]}))
    with pytest.raises(InputError, match=r"config\.json"):
        acemerge.load_expert_head(tmp_path / "out", "red")


def test_a_config_with_a_value_of_another_kind_is_told(tmp_path: Path) -> None:
    models = model_zoo.bert(tmp_path / "models")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", quiet=True)
    for folder in (tmp_path / "out/heads/red", models.experts["red"]):
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"hidden_size": "x"}))
    with pytest.raises(InputError, match=r"does not understand its config\.json.*hidden_size"):
        acemerge.load_expert_head(tmp_path / "out", "red")
    with pytest.raises(InputError, match=r"does not understand its config\.json.*hidden_size"):
        model_config(open_checkpoint(models.experts["red"], "red"))


@pytest.mark.parametrize("nested", [False, True])
def test_attention_of_the_hub_is_not_fetched(tmp_path: Path, nested: bool) -> None:
    """transformers takes OWNER/NAME for a kernel: code that it downloads and runs."""
    models = model_zoo.bert(tmp_path / "models")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", quiet=True)
    asked: dict[str, Any] = {"attn_implementation": "someone/kernel"}
    for path in (tmp_path / "out/heads/red/config.json", models.experts["red"] / "config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | ({"text_config": asked} if nested else asked)))
    with pytest.raises(InputError, match="asks for code of the hub, attn_implementation = 'someone/kernel'"):
        acemerge.load_expert_head(tmp_path / "out", "red")
    with pytest.raises(InputError, match="asks for code of the hub"):
        load_model(open_checkpoint(models.experts["red"], "red"))


def test_the_card_of_a_task_s_model_is_nobody_s(merged: Path, tmp_path: Path) -> None:
    """Its files are the merge's and the expert's own, and nothing else that lies there."""
    acemerge.export_expert(merged, "expert-0", tmp_path / "task")
    assert load_file(tmp_path / "task/model.safetensors").keys() >= {"classifier.weight"}
