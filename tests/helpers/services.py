"""A small network of digits behind the service: made anew in every process, the same each time."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient
from torch import nn

from qualms import Scorer, Threshold
from qualms.data import Images, ImageTransform, Normalization, load
from qualms.service.app import add_service
from qualms.service.config import ServiceConfig
from qualms.service.lifecycle import Startup
from qualms.service.scoring import (
    ScoreRequest,
    ScoreResponse,
    ScoringService,
    describe_unloaded,
    score_requests,
)
from qualms.stream.network import Network
from tests.helpers.layouts import png

REGRAD = "regrad+layers+smooth"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAME = "digits"
T = TypeVar("T")
TOKEN = "a-token-for-tests-only-1234567890"
PIXEL_STD = 0.5
BUSY = "this takes its time"  # what slow networks print


@cache
def digits() -> Images:
    return load("digits", split="test")


def network() -> Network:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 10),
    )
    with torch.no_grad():
        model[-1].weight.mul_(8)  # as confident as a trained one
    return Network(
        NAME,
        model,
        Normalization((0.5,), (PIXEL_STD,)),
        ImageTransform((8, 8), channels=1),
        class_names=NAMES,
    )


def served(methods: tuple[str, ...] = (REGRAD, "entropy"), decided: bool = True) -> ScoringService:
    """The network with its scorer; the threshold accepts half of some digits."""
    net = network()
    scorer = Scorer(net.model, list(methods), pixel_std=PIXEL_STD)
    if decided:
        known = scorer(net.inputs(digits().take(slice(0, 60)))).scores[methods[0]]
        limit = Threshold.from_scores(known, coverage=0.5, provenance=scorer.provenance)
        scorer = Scorer(net.model, list(methods), pixel_std=PIXEL_STD, threshold=limit)
    return ScoringService(NAME, net, scorer)


@cache
def usual() -> ScoringService:
    return served()


def starting(own: ScoringService | None = None) -> Startup:
    """A start of three steps in this process, of which nothing is loaded yet."""
    scorer = (own or usual()).scorer
    return Startup(
        describe_unloaded(NAME, scorer.methods, scorer.threshold), steps=3, echo=lambda _: None
    )


def started(own: ScoringService | None = None) -> Startup:
    """The same once it is ready."""
    made, start = own or usual(), starting(own)
    start.finish(made.model_info, made.network.transform)
    return start


def client(
    own: ScoringService | None = None,
    ask: Any = None,
    startup: Startup | None = None,
    hangs: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> TestClient:
    """The routes in this process, without LitServe: each request is scored by itself."""
    made, app = own or usual(), FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def asked(question: ScoreRequest) -> ScoreResponse:
        return (await asyncio.to_thread(score_requests, made, [question]))[0]

    add_service(app, startup or started(own), ServiceConfig(**settings), ask or asked, hangs)
    return TestClient(app, "http://127.0.0.1", raise_server_exceptions=False)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a thread: Playwright, in whose process this may be, leaves a loop
    running in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def pixels(number: int) -> np.ndarray:
    """One digit, [8][8]."""
    return digits().pixels[number, 0].numpy()


def upload(*numbers: int) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("images", (f"{i}.png", png(pixels(i)), "image/png")) for i in numbers]


def plain(classes: int = 10) -> nn.Module:
    """The model alone, for `qualms serve --model`."""
    assert classes == 10
    return network().model


def stubborn(classes: int = 10) -> nn.Module:
    """The same, which tells ten classes apart whatever it is asked for."""
    return network().model


def endless(classes: int = 10) -> nn.Module:
    """One that takes its time to load."""
    print(BUSY, flush=True)
    time.sleep(600)
    return network().model


def slow(classes: int = 10) -> nn.Module:
    """One that is loaded once the file that QUALMS_TEST_GO names is there."""
    while not Path(os.environ["QUALMS_TEST_GO"]).exists():
        time.sleep(0.05)
    return network().model


def broken(classes: int = 10) -> nn.Module:
    """One that cannot be loaded once the file that QUALMS_TEST_GO names is there."""
    slow(classes)
    raise ZeroDivisionError("no classes are left")


class Long(nn.Module):
    """One whose forward pass is a minute within torch, where Python heeds no signal."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(BUSY, flush=True)
        torch.linalg.svd(torch.randn(5000, 5000))
        return self.last(x.flatten(1))


def long_pass(classes: int = 10) -> nn.Module:
    return Long()


def touchy(classes: int = 10) -> nn.Module:
    """One that raises at a black image, and never comes back from a white one."""
    model = network().model

    def look(_: nn.Module, given: tuple[torch.Tensor]) -> None:
        if (given[0].amax((1, 2, 3)) < -0.9).any():  # normalized
            raise ZeroDivisionError(f"a secret in {__file__}")
        if (given[0].amin((1, 2, 3)) > 0.9).any():
            time.sleep(600)

    model[0].register_forward_pre_hook(look)
    return model


def refused(answer: Any, status: int, words: str) -> None:
    """One sentence of JSON, and nothing of how the service is made."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (sentence,) = answer.json().values()
    assert list(answer.json()) == ["error"]
    assert words in sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert ".py" not in sentence
