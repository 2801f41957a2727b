"""The measured entries of rows, without the entries that identify a row. Shares are from 0 to 1.

Intervals are 95 % confidence intervals.
"""

from typing import NotRequired, TypedDict


class OodMeasures(TypedDict):
    """How well a score tells two datasets apart.

    Attributes:
        auroc: the area under the ROC curve.
        auroc_low: the lower end of AUROC's interval.
        auroc_high: the upper end of AUROC's interval.
        aupr_out: the area under the precision-recall curve, with the other dataset as the positive
            class.
        aupr_in: the area under the precision-recall curve, with the known dataset as the positive
            class.
        fpr95: the false positive rate at a true positive rate of 95 %.
    """

    auroc: float
    auroc_low: float
    auroc_high: float
    aupr_out: float
    aupr_in: float
    fpr95: float


class CalibrationMeasures(TypedDict):
    """Whether the predictions with low uncertainty are the right ones.

    Attributes:
        accuracy: the share of right predictions.
        aurc: the area under the risk-coverage curve.
        risk_at_80: the share of wrong predictions among the most certain 80 %.
        risk_at_90: the share of wrong predictions among the most certain 90 %.
        risk_at_95: the share of wrong predictions among the most certain 95 %.
        raulc: the relative area under the lift curve; None where all predictions are right, or all
            wrong.
        raulc_low: the lower end of rAULC's interval.
        raulc_high: the upper end of rAULC's interval.
        why: the reason why `raulc` is None; missing otherwise.
    """

    accuracy: float
    aurc: float
    risk_at_80: float
    risk_at_90: float
    risk_at_95: float
    raulc: float | None
    raulc_low: NotRequired[float]
    raulc_high: NotRequired[float]
    why: NotRequired[str]


class CycleMeasures(TypedDict):
    """How good a network is on test images.

    Attributes:
        accuracy: the share of right predictions.
        nll: the mean negative log-likelihood of the labels.
        nll_softmax_twice: the negative log-likelihood with probabilities in place of logits, as the
            paper's numbers suggest.
    """

    accuracy: float
    nll: float
    nll_softmax_twice: float


class TokensMeasures(TypedDict):
    """Scores and predictions of a model at the tokens of some windows; a list for each window.

    Attributes:
        scores: by method, a score for each token.
        log_probs: log p of each token, given the tokens before it.
        right: at each token, whether the most likely next token is the one that follows.
    """

    scores: dict[str, list[list[float]]]
    log_probs: list[list[float]]
    right: list[list[bool]]


class NextTokenMeasures(TypedDict):
    """Whether the score is high where the most likely next token is wrong; intervals over windows.

    Attributes:
        accuracy: how often the most likely next token is the one that follows.
        auroc: the area under the ROC curve, wrong next tokens as the positive class.
        auroc_low: the lower end of AUROC's interval.
        auroc_high: the upper end of AUROC's interval.
        raulc: the relative area under the lift curve.
        raulc_low: the lower end of rAULC's interval.
        raulc_high: the upper end of rAULC's interval.
        prr: the prediction rejection ratio, with p of the token that follows as the quality.
        prr_low: the lower end of PRR's interval.
        prr_high: the upper end of PRR's interval.
    """

    accuracy: float
    auroc: float
    auroc_low: float
    auroc_high: float
    raulc: float
    raulc_low: float
    raulc_high: float
    prr: float
    prr_low: float
    prr_high: float
