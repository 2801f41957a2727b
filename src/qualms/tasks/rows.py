"""The types of rows: the numbers that tasks measure, kept in a journal and written as JSON lines.

The key `row` names the kind of a row. A type such as `OodKey` has the entries that decide the
numbers of an `OodRow`: two rows whose entries of `OodKey` are equal are the same row, which is
measured once.
"""

from typing import Literal, NotRequired, TypedDict

from qualms.tasks.row_measures import (
    CalibrationMeasures,
    CycleMeasures,
    NextTokenMeasures,
    OodMeasures,
    TokensMeasures,
)

# `in` and `from` are keywords of Python, so the body of a class cannot have them as keys.
_In = TypedDict("_In", {"in": str})
_MaybeIn = TypedDict("_MaybeIn", {"in": NotRequired[str]})
_From = TypedDict("_From", {"from": str})


class OodKey(_In):
    """`ood`: one method on one pair of datasets; `in` is the dataset that the network knows.

    Attributes:
        out: the other dataset.
        method: the method's name in tables.
        exactly: the method with all its parameters.
        seed: the seed of all random draws.
        engine: the engine that computed the gradients, with its tolerance.
        draws: what random draws depend on, as in `ScoresAbout`.
        n_in: the number of images of the known dataset.
        n_out: the number of images of the other dataset.
        images: the fingerprints of both datasets' images.
    """

    row: Literal["ood"]
    out: str
    method: str
    exactly: str
    seed: int
    engine: str
    draws: NotRequired[str]
    n_in: int
    n_out: int
    images: str


class OodRow(OodKey, OodMeasures):
    """How well a method tells one dataset from another."""


class CalibrationKey(_In):
    """`calibration`: one method on the `n` images of the dataset `in`; other keys as in `ood`."""

    row: Literal["calibration"]
    method: str
    exactly: str
    seed: int
    engine: str
    draws: NotRequired[str]
    n: int
    images: str


class CalibrationRow(CalibrationKey, CalibrationMeasures):
    """How well a method's scores rank predictions by whether they are right."""


class ScoresAbout(TypedDict):
    """What all scores of a dataset's images share.

    Attributes:
        data: the dataset.
        seed: the seed of all random draws.
        engine: the engine that computed the gradients, with its tolerance.
        draws: what random draws depend on, besides the seed: "by pixels". In rows without this
            key, they depended on an image's position.
    """

    data: str
    seed: int
    engine: str
    draws: NotRequired[str]


class ScoresKey(ScoresAbout):
    """`scores`: some consecutive images of a dataset.

    Attributes:
        first: the position of the first of these images in the dataset.
        images: the fingerprint of these images.
    """

    row: Literal["scores"]
    first: int
    images: str


class ScoresRow(ScoresKey):
    """The scores of a few images, so that they are not computed again.

    Attributes:
        methods: by name, the method with all its parameters.
        seconds: the seconds that the scores took.
        scores: by method name, a score for each image.
    """

    methods: dict[str, str]
    seconds: float
    scores: dict[str, list[float]]


class AccuracyKey(TypedDict):
    """`accuracy`: the journal's network on a dataset.

    Attributes:
        data: the dataset.
        n: the number of images.
        images: the fingerprint of the images.
        network: the network's name. Rows in a journal lack it, since a journal is about one
            network.
    """

    row: Literal["accuracy"]
    data: str
    n: int
    images: str
    network: NotRequired[str]


class AccuracyRow(AccuracyKey):
    """How often a network is right."""

    accuracy: float


class CycleAbout(_From):
    """What all cycles of active learning share; `from` identifies the weights before training."""

    data: str
    seed: int


class CycleKey(CycleAbout):
    """`cycle`: a network that was trained on the images picked so far.

    Attributes:
        method: the method that picked the images; `start` before the first pick.
        cycle: how many picks there were.
        exactly: the method with all its parameters; missing at the start.
    """

    row: Literal["cycle"]
    method: str
    cycle: int
    exactly: NotRequired[str]


class CycleRow(CycleKey, CycleMeasures):
    """How good a network is when it was trained on a number of labeled images.

    Attributes:
        labeled: the number of labeled images.
        seconds: the seconds that training and testing took.
    """

    labeled: int
    seconds: float


class PickKey(CycleAbout):
    """`pick`: the choice of a method after a cycle.

    Attributes:
        method: the method's name in tables.
        exactly: the method with all its parameters.
        cycle: how many picks there were before.
    """

    row: Literal["pick"]
    method: str
    exactly: str
    cycle: int


class PickRow(PickKey):
    """Which images get a label next: `chosen` has their positions among the training images."""

    chosen: list[int]


class RuntimeKey(TypedDict):
    """`runtime`: one method, timed.

    Attributes:
        method: the method's name in tables.
        exactly: the method with all its parameters.
        n: the number of images that are scored in each round.
        engine: the engine that computes the gradients, with its tolerance.
        rounds: how often the method is timed.
        device: where the network runs.
        threads: the number of torch's threads.
    """

    row: Literal["runtime"]
    method: str
    exactly: str
    n: int
    engine: str
    rounds: int
    device: str
    threads: int


class RuntimeRow(RuntimeKey):
    """What a method costs: medians over the rounds.

    Attributes:
        seconds: the seconds for all images.
        ratio: the seconds divided by Entropy's in the same round.
    """

    seconds: float
    ratio: float


class TokensAbout(TypedDict):
    """What all scores of a text's tokens share.

    Attributes:
        data: the text.
        seed: the seed of the sketch's tangents.
        engine: the sketch.
        params: a pattern of the parameters whose gradients count; empty for all.
    """

    data: str
    seed: int
    engine: str
    params: str


class TokensKey(TokensAbout):
    """`tokens`: some consecutive windows of a text.

    Attributes:
        first: the position of the first of these windows in the text.
        texts: the fingerprint of the windows.
    """

    row: Literal["tokens"]
    first: int
    texts: str


class TokensRow(TokensKey, TokensMeasures):
    """The scores of the tokens of a few windows, so that they are not computed again.

    Attributes:
        methods: by name, the method with all its parameters.
        seconds: the seconds that the scores took.
    """

    methods: dict[str, str]
    seconds: float


class TextAbout(TypedDict):
    """What all rows about texts share.

    Attributes:
        seed: the seed of the sketch's tangents.
        engine: the sketch.
        params: a pattern of the parameters whose gradients count; empty for all.
        window: the number of tokens in a window.
    """

    seed: int
    engine: str
    params: str
    window: int


class TextKey(_In, TextAbout):
    """`text`: one method on one pair of texts; `in` is the text that the model knows.

    Attributes:
        out: the other text.
        method: the method's name in tables.
        exactly: the method with all its parameters.
        span: how many tokens' scores are averaged.
        n_in: the number of windows of the known text.
        n_out: the number of windows of the other text.
        texts: the fingerprints of both texts.
    """

    row: Literal["text"]
    out: str
    method: str
    exactly: str
    span: int
    n_in: int
    n_out: int
    texts: str


class TextRow(TextKey, OodMeasures):
    """How well a method tells spans of one text from those of another; intervals over windows."""


class NextTokenKey(_In, TextAbout):
    """`next-token`: one method on the text `in`, by whether it detects wrong next tokens.

    Attributes:
        method: the method's name in tables.
        exactly: the method with all its parameters.
        n: the number of windows.
        texts: the fingerprint of the windows.
    """

    row: Literal["next-token"]
    method: str
    exactly: str
    n: int
    texts: str


class NextTokenRow(NextTokenKey, NextTokenMeasures):
    """How well a method detects wrong next tokens."""


class PartKey(TypedDict):
    """`part`: some consecutive images of a table that is not complete.

    Attributes:
        of: `images` for the images to score, `reference` for a threshold's reference images.
        first: the position of the first of these images among all images of that group.
    """

    row: Literal["part"]
    of: str
    first: int


class PartRow(PartKey):
    """All columns of a table for a few images.

    Arrays are stored as in `{"dtype": "float32", "values": [0.5, "nan"]}`.

    Attributes:
        ids: the ids of the images.
        classes: how many classes the network outputs.
        prediction: the most probable class of each image.
        confidence: the probability of the predicted class.
        scores: by method, the scores of the images.
        errors: by method, the standard errors of the scores.
        sketched: the methods whose scores are estimates.
        notes: remarks of methods on their scores.
    """

    ids: list[int | str]
    classes: int
    prediction: list[int]
    confidence: dict[str, str | list[float | str]]
    scores: dict[str, dict[str, str | list[float | str]]]
    errors: dict[str, dict[str, str | list[float | str]]]
    sketched: list[str]
    notes: dict[str, str]


class LeftOutRow(_MaybeIn):
    """`left out`: why a method, or the dataset `out` to detect by a network for `in`, is
    not among the rows.

    This row is never in a journal.
    """

    row: Literal["left out"]
    why: str
    method: NotRequired[str]
    out: NotRequired[str]


Row = (
    OodRow
    | CalibrationRow
    | ScoresRow
    | AccuracyRow
    | CycleRow
    | PickRow
    | RuntimeRow
    | TokensRow
    | TextRow
    | NextTokenRow
    | PartRow
    | LeftOutRow
)
