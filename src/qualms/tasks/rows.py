"""What rows hold: the numbers that tasks measure, as they are yielded, kept in a journal and
written as JSON lines.

`row` says of which kind a row is. A key type has all that decides a row's numbers: rows with equal
keys are the same row, and are measured once. Shares are from 0 to 1.
"""

from typing import Literal, NotRequired, TypedDict

# `in` and `from` are words of Python, which the body of a class cannot have as keys.
_In = TypedDict("_In", {"in": str})
_MaybeIn = TypedDict("_MaybeIn", {"in": NotRequired[str]})
_From = TypedDict("_From", {"from": str})


class OodKey(_In):
    """`ood`: one method on one pair of datasets; `in` is the dataset that the network knows."""

    row: Literal["ood"]
    out: str  # the other dataset
    method: str  # the name that tables give it
    exactly: str  # the method with all its parameters
    seed: int
    engine: str
    draws: NotRequired[str]  # as in `scores`
    n_in: int  # images of each dataset
    n_out: int
    images: str  # fingerprints of both


class OodMeasures(TypedDict):
    """How well a score tells the datasets apart; OOD is the positive class, but for `aupr_in`."""

    auroc: float
    auroc_low: float  # of its 95 % interval
    auroc_high: float
    aupr_out: float
    aupr_in: float
    fpr95: float


class OodRow(OodKey, OodMeasures):
    """How well a method tells one dataset from another."""


class CalibrationKey(_In):
    """`calibration`: one method on the dataset `in`."""

    row: Literal["calibration"]
    method: str
    exactly: str
    seed: int
    engine: str
    draws: NotRequired[str]  # as in `scores`
    n: int
    images: str


class CalibrationMeasures(TypedDict):
    """Whether the certain predictions are the right ones."""

    accuracy: float
    aurc: float
    risk_at_80: float  # the share of wrong predictions among the most certain 80 %
    risk_at_90: float
    risk_at_95: float
    raulc: float | None  # None where all predictions are right, or all wrong
    raulc_low: NotRequired[float]  # of its 95 % interval
    raulc_high: NotRequired[float]
    why: NotRequired[str]  # there is no rAULC


class CalibrationRow(CalibrationKey, CalibrationMeasures):
    """How a method's certainty goes with being right."""


class ScoresAbout(TypedDict):
    """What all scores of a dataset's images share."""

    data: str
    seed: int
    engine: str
    draws: NotRequired[str]  # what they follow; rows without it are of draws by an image's place


class ScoresKey(ScoresAbout):
    """`scores`: some consecutive images of a dataset."""

    row: Literal["scores"]
    first: int  # the position of the first of them
    images: str


class ScoresRow(ScoresKey):
    """The scores of a few images, so that nobody computes them again."""

    methods: dict[str, str]  # by name, each with all its parameters
    seconds: float
    scores: dict[str, list[float]]  # by the same names


class AccuracyKey(TypedDict):
    """`accuracy`: the journal's network on a dataset."""

    row: Literal["accuracy"]
    data: str
    n: int
    images: str
    network: NotRequired[str]  # its name; not in a journal, which is all about one network


class AccuracyRow(AccuracyKey):
    """How often a network is right."""

    accuracy: float


class CycleAbout(_From):
    """What all cycles of active learning share; `from` is the fingerprint of the weights that each
    begins with.
    """

    data: str
    seed: int


class CycleKey(CycleAbout):
    """`cycle`: a network that was trained on the images picked so far."""

    row: Literal["cycle"]
    method: str  # that picked them; `start` before the first pick
    cycle: int  # how many picks there were
    exactly: NotRequired[str]  # the method with all its parameters; not at the start


class CycleMeasures(TypedDict):
    """How good the network is on test images."""

    accuracy: float
    nll: float
    nll_softmax_twice: float


class CycleRow(CycleKey, CycleMeasures):
    """How good a network is after a number of labels."""

    labeled: int
    seconds: float


class PickKey(CycleAbout):
    """`pick`: what a method asks for after a cycle."""

    row: Literal["pick"]
    method: str
    exactly: str
    cycle: int


class PickRow(PickKey):
    """Which images get a label next, by their position among the training images."""

    chosen: list[int]


class RuntimeKey(TypedDict):
    """`runtime`: one method, timed."""

    row: Literal["runtime"]
    method: str
    exactly: str
    n: int
    engine: str
    rounds: int
    device: str
    threads: int


class RuntimeRow(RuntimeKey):
    """What a method costs: medians over the rounds."""

    seconds: float
    ratio: float  # to Entropy's seconds in the same round


class TokensAbout(TypedDict):
    """What all scores of a text's tokens share."""

    data: str
    seed: int
    engine: str
    params: str  # whose gradients; empty for all


class TokensKey(TokensAbout):
    """`tokens`: some consecutive windows of a text."""

    row: Literal["tokens"]
    first: int  # the position of the first of them
    texts: str  # their fingerprint


class TokensMeasures(TypedDict):
    """What a model says of the tokens of some windows; a list for each window."""

    scores: dict[str, list[list[float]]]  # by method
    log_probs: list[list[float]]  # log p of each token, given those before it
    right: list[list[bool]]  # whether the likeliest next token is the one that follows


class TokensRow(TokensKey, TokensMeasures):
    """The scores of the tokens of a few windows, so that nobody computes them again."""

    methods: dict[str, str]  # by name, each with all its parameters
    seconds: float


class TextAbout(TypedDict):
    """What all rows about texts share."""

    seed: int
    engine: str
    params: str
    window: int  # tokens in each


class TextKey(_In, TextAbout):
    """`text`: one method on one pair of texts; `in` is the text that the model knows."""

    row: Literal["text"]
    out: str  # the other text
    method: str
    exactly: str
    span: int  # how many tokens' scores are averaged
    n_in: int  # windows of each text
    n_out: int
    texts: str  # fingerprints of both


class TextRow(TextKey, OodMeasures):
    """How well a method tells tokens, or spans of them, of one text from those of another;
    intervals over windows.
    """


class NextTokenKey(_In, TextAbout):
    """`next-token`: one method on the text `in`, of which each next token is known."""

    row: Literal["next-token"]
    method: str
    exactly: str
    n: int  # windows
    texts: str


class NextTokenMeasures(TypedDict):
    """Whether the score is high where the likeliest next token is wrong; 95 % intervals over
    windows.
    """

    accuracy: float
    auroc: float  # wrong ones are positive
    auroc_low: float
    auroc_high: float
    raulc: float
    raulc_low: float
    raulc_high: float
    prr: float  # of p(the token that follows)
    prr_low: float
    prr_high: float


class NextTokenRow(NextTokenKey, NextTokenMeasures):
    """How a method's certainty goes with the next token being right."""


class PartKey(TypedDict):
    """`part`: some consecutive images of a table that is not complete."""

    row: Literal["part"]
    of: str  # whether these are the `images` or those of the `reference`
    first: int  # the position of the first of them


class PartRow(PartKey):
    """All that a table says of a few images. Numbers are `{"dtype": "float32", "values": [0.5,
    "nan"]}`.
    """

    ids: list[int | str]
    classes: int  # how many the network tells apart
    prediction: list[int]
    confidence: dict[str, str | list[float | str]]
    scores: dict[str, dict[str, str | list[float | str]]]  # by method
    errors: dict[str, dict[str, str | list[float | str]]]
    sketched: list[str]  # the methods whose scores are estimates
    notes: dict[str, str]  # what methods say of their scores


class LeftOutRow(_MaybeIn):
    """`left out`: why a method, or the dataset `out` beside `in`, is not among the rows. It is
    never in a journal.
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
