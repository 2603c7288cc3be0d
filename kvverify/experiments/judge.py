"""What a judge of answers is given, what it may reply, and how well two judges agree.

    python -m kvverify.experiments.judge render DIR --out FILE      payloads of the answers stored in DIR
    python -m kvverify.experiments.judge rule DIR NAME --out FILE   verdicts by a rule: exact, or f1 of at least 1/2
    python -m kvverify.experiments.judge agree FIRST SECOND         the agreement of two files of verdicts

The template is data, `judge.json`, after the protocol of RoPERelay's memory questions. A payload says what was asked,
what is right and what was answered, never how: its id is a hash, and payloads are in the order of their ids, so that
neither selector nor plan nor retention shows. No judge model comes with this package: send `system` and `user` of each
line to one, and write its reply as it is to a line {"id": ..., "verdict": "..."}.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from kvverify.entry import run
from kvverify.experiments.relay_answers import read_results
from kvverify.experiments.relay_scoring import exact_match, token_f1

__all__ = ["RULES", "TEMPLATE", "Agreement", "agreement", "app", "judged", "parse_verdict", "read_verdicts", "render"]

TEMPLATE: Mapping[str, Any] = MappingProxyType(
    json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)
RULES: Mapping[str, Callable[[str, str], bool]] = MappingProxyType(
    {"exact": exact_match, "f1": lambda answer, reference: token_f1(answer, reference) >= 0.5}
)
"""Two judges that need no model: the words are those of the reference, or the F1 of the words is at least 1/2."""


@dataclass(frozen=True)
class Agreement:
    """How often two judges called the same answers right and wrong."""

    both_right: int
    first_only: int
    second_only: int
    both_wrong: int

    @property
    def count(self) -> int:
        """Answers that both have judged."""
        return self.both_right + self.first_only + self.second_only + self.both_wrong

    @property
    def observed(self) -> float:
        """Share of the answers with one verdict: (a + d) / n."""
        return (self.both_right + self.both_wrong) / self.count

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa (observed - chance) / (1 - chance); None where chance agrees always.

        With a both right, b and c right for one of them, d both wrong, and n in all:
        chance = ((a + b)(a + c) + (c + d)(b + d)) / n^2.
        """
        first, second = self.both_right + self.first_only, self.both_right + self.second_only
        chance = (first * second + (self.count - first) * (self.count - second)) / self.count**2
        return None if chance == 1 else (self.observed - chance) / (1 - chance)

    def __str__(self) -> str:
        kappa = "undefined: both judges gave one verdict throughout" if self.kappa is None else f"{self.kappa:.3f}"
        return "\n".join(
            [
                "| | second right | second wrong |",
                "|---|--:|--:|",
                f"| first right | {self.both_right} | {self.first_only} |",
                f"| first wrong | {self.second_only} | {self.both_wrong} |",
                "",
                f"{self.count} answers, agreement {100 * self.observed:.1f} %, Cohen's kappa {kappa}",
            ]
        )


def judged(histories: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Go through all stored answers: an id that does not tell where the answer comes from, and the payload."""
    for history in histories:
        for question in history["questions"]:
            cells = [("full", 1, {"full": question["full"]})]
            cells += [(cell["selector"], cell["retention"], cell["plans"]) for cell in question["cells"]]
            for selector, retention, plans in cells:
                for plan, (text, _) in plans.items():
                    origin = f"{question['name']} {selector} {retention} {plan}"
                    values = {
                        "question": question["question"],
                        "references": [question["reference"]],
                        "candidate": text,
                        "question_type": question["kind"],
                        "question_date": history["date"],
                    }
                    payload = {name: values[name] for name in TEMPLATE["payload"]}
                    yield hashlib.sha256(origin.encode()).hexdigest()[:16], payload


def render(histories: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Write what a judge is sent for each answer, in the order of the ids: id, system and user message."""
    lines = [
        {
            "id": name,
            "system": TEMPLATE["system"],
            "user": f"{TEMPLATE['rubric']}\n\n{json.dumps(payload, ensure_ascii=False)}",
        }
        for name, payload in judged(histories)
    ]
    return sorted(lines, key=lambda line: line["id"])


def parse_verdict(text: object) -> bool:
    """Read a judge's reply: a JSON object with the one field "correct", true or false. ValueError for anything else.

    Nothing is repaired. A fence around the object, a second field, a repeated field, 1 or "true" are refused: a reply
    that has to be interpreted is no verdict.
    """
    field = TEMPLATE["verdict"]
    pairs: object = None
    if isinstance(text, str) and text.strip().startswith("{"):  # of an array of pairs the hook would make the same list
        try:
            pairs = json.loads(text, object_pairs_hook=list)
        except (ValueError, RecursionError):  # the latter of objects in objects in objects
            pairs = None
    match pairs:
        case [(name, bool(value))] if name == field:
            return value
    raise ValueError(f'verdict is {text!r}, expected {{"{field}": true}} or {{"{field}": false}}')


def read_verdicts(path: Path) -> dict[str, bool]:
    """Read a file of lines {"id": ..., "verdict": ...}, id a text; ValueError names the line that is not one.

    Lines end at a line feed alone: replies are written as they are, and may hold other characters that separate lines.
    """
    found: dict[str, bool] = {}
    with path.open(encoding="utf-8", newline="\n") as file:
        lines = [line.removesuffix("\n") for line in file]
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            name, verdict = entry["id"], entry["verdict"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path.name} line {number} is {line!r}, expected an object with id and verdict"
            ) from error
        if not isinstance(name, str):
            raise ValueError(f"{path.name} line {number} has the id {name!r}, expected a text")
        if name in found:
            raise ValueError(f"{path.name} line {number} judges {name} again, expected one verdict for each id")
        try:
            found[name] = parse_verdict(verdict)
        except ValueError as error:
            raise ValueError(f"{path.name} line {number}: {error}") from error
    return found


def agreement(first: Mapping[str, bool], second: Mapping[str, bool]) -> Agreement:
    """Count verdicts of two judges on the same answers; ValueError if they have not judged the same ones."""
    for name in sorted(first.keys() ^ second.keys())[:1]:
        raise ValueError(f"only one judge has judged {name}, expected both to judge the same answers")
    if not first:
        raise ValueError("first is empty, expected at least one verdict")
    pairs = [(first[name], second[name]) for name in first]
    kinds: Sequence[tuple[bool, bool]] = ((True, True), (True, False), (False, True), (False, False))
    return Agreement(*(pairs.count(kind) for kind in kinds))


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=(__doc__ or "").partition("\n")[0], pretty_exceptions_enable=False
)
Folder = Annotated[Path, typer.Argument(help="Where the experiment `answers` has written its results.")]
Out = Annotated[Path, typer.Option(help="The file to write.")]


@app.command("render")
def render_payloads(folder: Folder, out: Out = Path("payloads.jsonl")) -> None:
    """Write one line per stored answer, to be sent to a judge."""
    lines = render(read_results(folder))
    _write(out, lines)
    typer.echo(f"wrote {len(lines)} payloads to {out.name}")


@app.command("rule")
def judge_by_rule(
    folder: Folder,
    rule: Annotated[str, typer.Argument(help=f"{' or '.join(RULES)}.")],
    out: Out = Path("verdicts.jsonl"),
) -> None:
    """Write the verdicts of a rule on every stored answer."""
    if rule not in RULES:
        raise typer.BadParameter(f"RULE is {rule!r}, expected {' or '.join(RULES)}")
    lines = [
        {"id": name, "verdict": json.dumps({"correct": RULES[rule](payload["candidate"], payload["references"][0])})}
        for name, payload in judged(read_results(folder))
    ]
    _write(out, sorted(lines, key=lambda line: line["id"]))
    typer.echo(f"wrote {len(lines)} verdicts to {out.name}")


@app.command("agree")
def compare_judges(
    first: Annotated[Path, typer.Argument(help="Verdicts of one judge.")],
    second: Annotated[Path, typer.Argument(help="Verdicts of another.")],
) -> None:
    """Print how well two judges agree."""
    typer.echo(str(agreement(read_verdicts(first), read_verdicts(second))))


def _write(path: Path, lines: Sequence[Mapping[str, str]]) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    run(app, name="python -m kvverify.experiments.judge", usage=(ValueError, OSError))
