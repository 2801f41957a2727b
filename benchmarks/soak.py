"""Mixed scoring in one process, for minutes: memory, files and threads must stay flat, and no
result may change.

    python benchmarks/soak.py                twenty minutes
    python benchmarks/soak.py --minutes 1    a try

Each round does all of `tasks` once: every method of the registry on a convolutional network, and
several on others, by all engines, by every way to ask; errors in between; thresholds, report pages,
networks that are built again and dropped. The first round records what each returns, to the bit: numbers,
or the sentence of a refusal. Every later one must give the same. After each round the process's
memory, open files and threads are counted.

A first quarter of the rounds is the warm-up. From there to the end, the memory after a round may
not rise by more than `RISE` megabytes, by two measures: the slope of Theil and Sen times the number
of rounds, and the median of the last quarter of all rounds less that of the second. There may be no
more files or threads in the last quarter than in the second. One line reports what was found; the exit
code is 1 if that is not as it should be. Needs psutil.
"""

import argparse
import gc
import hashlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from soak_networks import NETWORKS, Raising, images, made, words
from torch import Tensor, nn

import qualms
from qualms.data import Images
from qualms.methods import Method
from qualms.report.content import Content, Group
from qualms.report.page import write_page

MINUTES = 20.0
RISE = 8.0  # megabytes, from the end of the warm-up to the end
LEAST = 4  # rounds, one for each quarter
MEGABYTE = 2**20
FEW = [
    "regrad+layers+smooth(0.02, 2)",
    "exgrad+layers",
    "ungrad",
    "gradnorm",
    "entropy",
    "energy",
    "fisher",
]
ENGINES: tuple[Any, ...] = ("exact", "sketch", qualms.Sketch(8, "sum"))
AT_POSITIONS = ["regrad", "exgrad", "entropy"]
TRAINING = (images(40), torch.arange(40) % 5)
Task = Callable[[], Any]  # gives what must be the same each time


def tasks(folder: Path) -> dict[str, Task]:
    """All that one round does, by name."""
    nets = {name: made(name) for name in NETWORKS}
    language = made("language")
    inputs = {name: images() if NETWORKS[name].pictures else words() for name in NETWORKS}
    cnn, x, member = nets["cnn"], inputs["cnn"], made("cnn", seed=1)
    found: dict[str, Task] = {
        f"cnn, {method.name}": partial(one_method, cnn, member, x, method)
        for method in qualms.list_methods()
    }
    for name, net in nets.items():
        for engine in ENGINES:
            found[f"{name}, {engine}"] = partial(
                qualms.compare, net, inputs[name], FEW, engine=engine
            )
    for name, net in nets.items():
        found[f"{name}, the cheaper engine"] = partial(by_auto, net, inputs[name])
        found[f"{name}, in a stream"] = partial(streamed, qualms.Scorer(net, FEW[:3]), inputs[name])
        found[f"{name}, built again"] = partial(built_again, name, inputs[name])
    found["text, reference"] = partial(
        qualms.compare, nets["text"], inputs["text"], FEW, engine="reference"
    )
    found["ranked by a tolerance"] = partial(
        qualms.score, nets["vit"], inputs["vit"], "exgrad", tolerance=0.05
    )
    found["selected"] = partial(qualms.select, cnn, x, 2)
    found["language, at positions"] = partial(at_positions, language)
    found["a threshold"] = partial(with_threshold, cnn, x, folder / "threshold.json")
    found["a page"] = partial(page, cnn, x, folder / "page.html")
    return found | errors(cnn, x)


def errors(net: nn.Module, x: Tensor) -> dict[str, Task]:
    """What must be refused, each time in the same words."""
    broken = torch.where(torch.arange(len(x))[:, None, None, None] == 1, torch.nan, x)
    raising = Raising(net)
    return {
        "not a number": partial(refused, qualms.score, net, broken),
        "of no shape that fits": partial(refused, qualms.score, net, x[:, :, :2, :2]),
        "no input": partial(refused, qualms.score, net, x[:0]),
        "no method": partial(refused, qualms.score, net, x, "nothing"),
        "no engine": partial(refused, qualms.score, net, x, engine="none"),
        "a model that raises": partial(refused, qualms.compare, raising, x, FEW),
        "a model that raises, sketched": partial(
            refused, qualms.compare, raising, x, FEW, engine="sketch"
        ),
        "a stream that breaks off": partial(broken_off, net, x),
    }


def one_method(net: nn.Module, member: nn.Module, x: Tensor, method: Method) -> Any:
    """The scores of one method of the registry, or why the network has none."""
    try:
        return qualms.score(net, x, method, train=[TRAINING], models=[member])
    except qualms.QualmsError as error:
        return str(error)


def by_auto(net: nn.Module, x: Tensor) -> Any:
    """By the cheaper engine, which is a matter of time: so nothing of it is compared but that there
    are scores.
    """
    found = qualms.compare(net, x, FEW[:2], engine="auto")
    return [bool(values.isfinite().all()) for values in found.values()]


def streamed(scorer: qualms.Scorer, x: Tensor) -> Any:
    """By a scorer that stays, in batches of changing sizes."""
    return [part.scores for part in scorer.stream([x[:1], x[1:3], x[3:]])]


def built_again(name: str, x: Tensor) -> Any:
    """By a network and a scorer that go again."""
    return qualms.Scorer(made(name), FEW[:2])(x).scores


def at_positions(net: nn.Module) -> Any:
    """At all tokens of a language model, sketched; and at some, exactly."""
    ids = words()
    every = qualms.Scorer(net, AT_POSITIONS, class_dim=-1)(ids, targets=qualms.next_tokens(ids))
    some = qualms.Scorer(net, AT_POSITIONS, class_dim=-1, positions=[0, 3], engine="exact")(ids)
    return [every.scores, some.scores]


def with_threshold(net: nn.Module, x: Tensor, file: Path) -> Any:
    """What is accepted by a threshold that was written and read."""
    scorer = qualms.Scorer(net, FEW[1])
    known = scorer(x)
    qualms.Threshold.from_scores(
        known.scores[FEW[1]], coverage=0.5, provenance=scorer.provenance
    ).save(file)
    again = qualms.Scorer(net, FEW[1], threshold=qualms.Threshold.load(file))(x)
    return [again.accepted, again.percentile, again.prediction, again.confidence]


def page(net: nn.Module, x: Tensor, file: Path) -> Any:
    """A report on two groups of images, as it is written."""
    groups = []
    for name, some in (("known", x), ("unknown", x.flip(0) * 0.3)):
        scored = qualms.Scorer(net, FEW[1:5])(some)
        pixels = (some.clamp(0, 1) * 255).to(torch.uint8)
        scores = {method: values.double().numpy() for method, values in scored.scores.items()}
        groups.append(Group(name, Images(name, pixels, None), scores, scored.prediction.numpy()))
    write_page(Content("Soak", groups[0], groups[1:]), file, resamples=20)
    return file.read_bytes()


def refused(call: Callable[..., Any], *given: Any, **more: Any) -> str:
    """The sentence of an error that must come."""
    try:
        call(*given, **more)
    except (qualms.QualmsError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    raise SystemExit(f"{call.__name__} did not refuse {more or given[-1]!r}")


def broken_off(net: nn.Module, x: Tensor) -> Any:
    """A stream that nobody reads to its end."""
    return next(qualms.Scorer(net, FEW[:2]).stream([x[:2], x[2:4], x[4:]])).scores


def digest(found: Any) -> str:
    """What was found, to the bit."""
    own = hashlib.sha256()
    for part in _parts(found):
        own.update(part)
    return own.hexdigest()


def _parts(found: Any) -> Iterator[bytes]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield from (str(key).encode(), *_parts(value))
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _parts(value)
    elif isinstance(found, Tensor):
        yield f"{found.dtype} {tuple(found.shape)}".encode()
        yield found.detach().contiguous().numpy().tobytes()
    else:
        yield found if isinstance(found, bytes) else repr(found).encode()


@dataclass
class Soak:
    """What was seen so far, and what the first round gave."""

    todo: dict[str, Task]
    process: psutil.Process = field(default_factory=psutil.Process)
    first: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # megabytes after each round
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def round(self) -> None:
        """Everything once."""
        for name, task in self.todo.items():
            same = digest(task())
            if self.first.setdefault(name, same) != same:
                self.changed.append(name)
        gc.collect()
        self.memory.append(self.process.memory_info().rss / MEGABYTE)
        self.files.append(self.process.num_fds())
        self.threads.append(self.process.num_threads())

    @property
    def rises(self) -> dict[str, float]:
        """Megabytes that memory has risen by since the warm-up, by both measures."""
        later = np.array(self.memory[len(self.memory) // 4 :])
        i, j = np.triu_indices(len(later), 1)
        slope = float(np.median((later[j] - later[i]) / (j - i)))
        second, last = quarters(self.memory)
        return {"slope": slope * len(later), "medians": float(np.median(last) - np.median(second))}

    @property
    def faults(self) -> list[str]:
        """What is not as it should be."""
        found = [f"{name} gave another result" for name in dict.fromkeys(self.changed)]
        found += [
            f"memory rises by {mb:.1f} MB ({how})" for how, mb in self.rises.items() if mb > RISE
        ]
        for what, counts in (("files", self.files), ("threads", self.threads)):
            second, last = quarters(counts)
            if max(last) > max(second):
                found.append(f"the open {what} rise from {max(second)} to {max(last)}")
        return found


def quarters(values: list[Any]) -> tuple[list[Any], list[Any]]:
    """The second and the last quarter."""
    quarter = len(values) // 4
    return values[quarter : 2 * quarter], values[-quarter:]


def soak(minutes: float, folder: Path) -> Soak:
    """Rounds until the time is over, and at least a few."""
    torch.set_num_threads(1)
    running, until = Soak(tasks(folder)), time.monotonic() + 60 * minutes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qualms.SlowWarning)
        warnings.simplefilter("ignore", qualms.UnitsWarning)
        while time.monotonic() < until or len(running.memory) < LEAST:
            running.round()
    return running


def line(found: Soak, minutes: float) -> str:
    """The figure."""
    rounds, rises = len(found.memory), found.rises
    second, last = (float(np.median(part)) for part in quarters(found.memory))
    return (
        f"{minutes:.1f} minutes: {rounds} rounds of {len(found.todo)} tasks, {len(found.changed)} of "
        f"{(rounds - 1) * len(found.todo):,} results differ from the first; memory {second:.1f} MB in the second "
        f"quarter, {last:.1f} in the last ({rises['slope']:+.1f} MB by slope, {rises['medians']:+.1f} by medians, at "
        f"most {RISE:g} allowed); files {found.files[rounds // 4]} to {found.files[-1]}, threads "
        f"{found.threads[rounds // 4]} to {found.threads[-1]}"
    )


def main() -> None:
    """Run, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    given, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(given.minutes, Path(folder))
    print(line(found, (time.monotonic() - began) / 60))
    if found.faults:
        raise SystemExit("; ".join(found.faults))


if __name__ == "__main__":
    main()
