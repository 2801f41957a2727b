"""The settings and the numbers of the paper (Wang & Ji, CVPR 2024), to compare ours with."""

from typing import Any

from qualms.gradients.settings import Smoothing
from qualms.methods.dropout import InsertedDropout
from qualms.methods.gradients import ExGrad, GradNorm, NEGrad, REGrad, UNGrad
from qualms.methods.logits import Entropy, ExGradV
from qualms.methods.method import Method
from qualms.methods.perturb_inputs import MCAA, PerturbX
from qualms.methods.perturb_model import PerturbTheta
from qualms.methods.registry import parse
from qualms.methods.training_laplace_quam import Laplace

# λ, which decides how much more later layers count than earlier ones, by dataset.
LAMBDA = {"mnist": 0.3, "cifar10": 0.2, "svhn": 0.2, "cifar100": 0.4}
DEFAULT_LAMBDA = 0.3  # of datasets that are not in the paper
# Random draws of inputs or weights, for the scores that perturb them.
DRAWS = 100
SIGMA = 0.02  # noise level of smoothing, for pixels in [0, 1]

# Methods that are not in the paper and are compared with its methods in tables 1 and 2, by spec.
COMPARISON_SPECS = (
    # ours
    "heat",
    "coherence",
    "fisher",
    "isotropic",
    # what users would pick instead
    "msp",
    "max-logit",
    "energy",
    "gen",
    "gradnorm-huang",
    "scale",
    "ash-s",
    "lts",
    "odin",
    "rankfeat",
    "gaia",
    # rivals, most of which need training data
    "clafr",
    "knn",
    "vim",
    "mahalanobis",
    "react",
    "fdbd",
    "quam",
)


def paper_methods(
    dataset: str, smooth: Smoothing | None = None, draws: int = DRAWS
) -> dict[str, Method]:
    """Return the paper's methods by their names in its tables, with its settings for a dataset.

    Noise levels are for pixels in [0, 1].

    Args:
        dataset: The name of the dataset, which decides λ and the noise levels; datasets that are
            not in the paper have those of MNIST.
        smooth: The smoothing of REGrad*; by default with the paper's σ.
        draws: The number of draws of the methods that perturb inputs or weights.
    """
    has_many_classes = dataset == "cifar100"
    lam = LAMBDA.get(dataset, DEFAULT_LAMBDA)
    smooth = smooth or Smoothing(SIGMA)
    return {
        "NEGrad": NEGrad(),
        "UNGrad": UNGrad(),
        "GradNorm": GradNorm(),
        "ExGrad": ExGrad(),
        "Perturb x": PerturbX(sigma=0.02 if has_many_classes else 0.008, draws=draws),
        "Perturb θ": PerturbTheta(sigma=0.0003 if has_many_classes else 0.008, draws=draws),
        "MC-AA": MCAA(a=0.0005 if has_many_classes else 0.0001, draws=draws),
        "Inserted Dropout": InsertedDropout(),
        "Entropy": Entropy(),
        "ExGrad V": ExGradV(),
        "LA": Laplace(),
        "REGrad": REGrad(),
        "REGrad+layers": REGrad(layers=lam),
        "REGrad*": REGrad(layers=lam, smooth=smooth),
    }


def comparison_methods(dataset: str) -> dict[str, Method]:
    """Return the methods that tables 1 and 2 compare with the paper's, by spec, such as `energy`.

    Args:
        dataset: The name of the dataset. `quam` is left out for `cifar100`, where it would search a
            head for each of a hundred classes and each input, for hours.
    """
    methods = {spec: parse(spec) for spec in COMPARISON_SPECS}
    if dataset == "cifar100":
        del methods["quam"]
    return methods


def paper_row(method: Method) -> str:
    """Return a method's name in the paper's tables; its name in qualms if the paper lacks it.

    REGrad has names of its own with weighted layers or smoothing; the name of any other method with
    either ends in `, modified`.
    """
    if isinstance(method, REGrad):
        if method.layers is not None:
            return "REGrad*" if method.smooth else "REGrad+layers"
        return "REGrad+smooth" if method.smooth else "REGrad"
    name = method.name
    # Only the classes are compared, so the dataset does not matter.
    for paper_name, paper_method in paper_methods(dataset="").items():
        if type(paper_method) is type(method):
            name = paper_name
            break
    is_modified = method.layers is not None or method.smooth is not None
    return f"{name}, modified" if is_modified else name


def _parse_table(text: str) -> dict[str, dict[str, Any]]:
    """Parse a table whose cells are separated by bars.

    Args:
        text: A line of column names, then a line for each row, which begins with the row's name. A
            cell is a number, or a pair of numbers such as `97.80/97.54`.

    Returns:
        A dict from each column's name to a dict from each row's name to the cell: a float, or a
        tuple of two floats.
    """
    lines: list[list[str]] = []
    for line in text.strip().splitlines():
        lines.append([cell.strip() for cell in line.split("|")])
    header, *body = lines
    column_names = header[1:]  # the first column holds the rows' names
    table: dict[str, dict[str, Any]] = {name: {} for name in column_names}
    for row_name, *cells in body:
        for column_name, cell in zip(column_names, cells, strict=True):
            values = tuple(map(float, cell.split("/")))
            table[column_name][row_name] = values if len(values) > 1 else values[0]
    return table


# Table 1: AUROC/AUPR in percent by in-distribution and OOD dataset; the last rows also from tables
# 4 and 6.
OOD = _parse_table("""
method           | mnist→omniglot | mnist→fashion-mnist | cifar10→svhn | cifar10→lsun
NEGrad           | 41.99/43.49    | 40.99/44.41         | 72.80/64.47  | 66.96/58.51
UNGrad           | 92.81/90.79    | 95.41/94.91         | 38.07/46.86  | 17.08/33.52
GradNorm         | 16.52/35.47    | 22.71/40.88         | 10.73/32.04  | 10.57/32.04
ExGrad           | 97.55/96.99    | 98.11/97.98         | 88.87/84.85  | 88.23/82.26
Perturb x        | 97.16/95.65    | 97.09/95.39         | 92.35/91.57  | 82.89/72.35
Perturb θ        | 97.64/97.05    | 97.99/97.64         | 89.31/85.80  | 88.33/82.99
MC-AA            | 91.23/89.40    | 95.28/95.24         | 87.56/82.22  | 82.96/71.79
Inserted Dropout | 97.52/96.88    | 97.00/95.75         | 88.84/88.01  | 88.18/86.93
Entropy          | 97.70/97.38    | 98.04/97.94         | 88.86/84.10  | 89.84/87.72
ExGrad V         | 97.70/97.39    | 98.04/97.95         | 89.04/84.64  | 89.96/88.09
LA               | 97.92/97.45    | 97.95/97.37         | 91.86/88.06  | 86.81/85.04
REGrad           | 97.80/97.54    | 98.42/98.45         | 89.64/85.75  | 90.15/87.16
REGrad+layers    | 98.01/97.86    | 98.51/98.55         | 90.33/87.45  | 90.79/88.86
REGrad*          | 98.19/97.95    | 98.78/98.79         | 92.32/89.42  | 91.11/89.93
""") | _parse_table("""
method           | svhn→cifar10 | svhn→cifar100 | cifar100→svhn | cifar100→lsun
NEGrad           | 30.26/39.13  | 30.93/39.38   | 44.62/42.52   | 43.99/42.74
UNGrad           | 68.28/69.21  | 68.34/68.95   | 44.34/43.44   | 47.46/45.41
GradNorm         | 24.49/36.56  | 25.62/37.26   | 10.67/32.11   | 27.53/36.97
ExGrad           | 88.57/85.55  | 88.25/85.21   | 79.99/72.68   | 76.93/71.00
Perturb x        | 72.76/60.60  | 73.96/62.27   | 86.49/86.76   | 41.10/44.35
Perturb θ        | 89.01/86.04  | 88.75/85.83   | 50.99/51.28   | 39.42/42.57
MC-AA            | 71.53/60.98  | 72.75/62.55   | 54.74/59.26   | 31.61/39.40
Inserted Dropout | 88.47/83.97  | 86.96/82.40   | 57.39/55.49   | 59.41/58.30
Entropy          | 89.64/87.76  | 89.09/87.25   | 53.38/55.20   | 42.28/46.07
ExGrad V         | 89.72/87.90  | 89.19/87.40   | 50.35/52.66   | 41.67/45.91
LA               | 80.73/87.46  | 88.77/86.06   | 80.09/73.63   | 76.50/71.92
REGrad           | 90.22/88.16  | 89.76/87.69   | 81.43/81.12   | 78.95/73.71
REGrad+layers    | 90.72/88.82  | 90.07/88.11   | 87.32/83.39   | 79.01/74.61
REGrad*          | 91.11/89.63  | 90.37/88.83   | 88.06/85.74   | 79.11/74.39
""")

# Table 2, its last rows also from table 6: rAULC.
RAULC = _parse_table("""
method           | mnist  | cifar10 | svhn   | cifar100
NEGrad           | 0.143  | 0.598   | -0.861 | 0.127
UNGrad           | 0.934  | 0.840   | 0.429  | 0.403
GradNorm         | -2.810 | -1.275  | -1.176 | -0.995
ExGrad           | 0.985  | 0.893   | 0.868  | 0.841
Perturb x        | 0.985  | 0.890   | 0.830  | 0.772
Perturb θ        | 0.984  | 0.892   | 0.869  | 0.705
MC-AA            | 0.969  | 0.879   | 0.807  | 0.784
Inserted Dropout | 0.973  | 0.891   | 0.851  | 0.783
Entropy          | 0.985  | 0.893   | 0.867  | 0.863
ExGrad V         | 0.985  | 0.893   | 0.865  | 0.854
LA               | 0.983  | 0.865   | 0.857  | 0.792
REGrad           | 0.985  | 0.893   | 0.869  | 0.846
REGrad+layers    | 0.985  | 0.896   | 0.870  | 0.854
REGrad*          | 0.985  | 0.898   | 0.873  | 0.858
""")

# Table 3: accuracy in percent / negative log-likelihood, means over ten cycles of active learning.
ACTIVE = _parse_table("""
method           | mnist       | cifar10     | svhn        | cifar100
NEGrad           | 70.22/1.833 | 39.13/2.074 | 65.12/1.827 | 13.16/4.507
UNGrad           | 69.56/1.867 | 38.90/2.071 | 67.27/1.808 | 12.56/4.508
GradNorm         | 66.85/1.884 | 39.02/2.069 | 65.43/1.827 | 12.89/4.509
ExGrad           | 69.91/1.847 | 39.20/2.069 | 66.76/1.812 | 12.55/4.506
Perturb x        | 71.10/1.844 | 38.57/2.072 | 64.00/1.838 | 12.23/4.511
Perturb θ        | 71.44/1.826 | 38.97/2.070 | 66.31/1.817 | 13.17/4.506
MC-AA            | 71.69/1.809 | 38.57/2.073 | 64.56/1.831 | 12.14/4.515
Inserted Dropout | 72.84/1.836 | 38.34/2.075 | 66.99/1.811 | 12.59/4.507
Entropy          | 70.40/1.846 | 38.73/2.074 | 63.42/1.845 | 11.57/4.521
ExGrad V         | 68.53/1.881 | 38.66/2.071 | 62.32/1.856 | 11.30/4.520
LA               | 62.65/1.935 | 37.56/2.083 | 63.44/1.846 | 12.59/4.505
REGrad*          | 75.31/1.808 | 39.28/2.067 | 67.37/1.807 | 13.37/4.505
""")

# Table 5 and table 8: AUROC/AUPR of REGrad+layers(λ) and of REGrad+layers+smooth(σ).
SWEEPS = {
    "svhn→cifar10": {
        "λ → 0": (90.22, 88.16), "λ → ∞": (88.21, 83.92),
        "λ = 0.25": (90.65, 88.72), "λ = 0.3": (90.72, 88.82), "λ = 0.35": (90.80, 88.82),
        "σ = 0.015": (91.05, 89.55), "σ = 0.02": (91.11, 89.63), "σ = 0.025": (90.98, 89.41),
    },
    "mnist→omniglot": {
        "λ → 0": (97.80, 97.54), "λ → ∞": (97.71, 97.17),
        "λ = 0.25": (98.01, 97.86), "λ = 0.3": (98.01, 97.86), "λ = 0.35": (98.01, 97.86),
        "σ = 0.015": (98.13, 97.91), "σ = 0.02": (98.19, 97.95), "σ = 0.025": (98.18, 97.95),
    },
    "mnist→fashion-mnist": {
        "λ → 0": (98.42, 98.45), "λ → ∞": (97.70, 97.27),
        "λ = 0.25": (98.38, 98.40), "λ = 0.3": (98.51, 98.55), "λ = 0.35": (98.39, 98.41),
        "σ = 0.015": (98.74, 98.76), "σ = 0.02": (98.78, 98.79), "σ = 0.025": (98.87, 98.88),
    },
    "cifar10→svhn": {
        "λ → 0": (89.64, 85.75), "λ → ∞": (89.87, 86.76),
        "λ = 0.15": (90.29, 86.51), "λ = 0.2": (90.33, 87.45), "λ = 0.25": (90.45, 86.92),
        "σ = 0.01": (92.50, 89.08), "σ = 0.015": (92.45, 89.08), "σ = 0.02": (92.32, 89.42),
    },
    "cifar10→lsun": {
        "λ → 0": (90.15, 87.16), "λ → ∞": (90.65, 88.71),
        "λ = 0.15": (90.94, 88.11), "λ = 0.2": (90.79, 88.86), "λ = 0.25": (91.02, 88.30),
        "σ = 0.01": (91.01, 89.03), "σ = 0.015": (91.06, 89.37), "σ = 0.02": (91.11, 89.93),
    },
    "cifar100→svhn": {
        "λ → 0": (81.43, 81.12), "λ → ∞": (86.74, 82.15),
        "λ = 0.35": (87.22, 83.34), "λ = 0.4": (87.32, 83.39), "λ = 0.45": (87.38, 83.25),
        "σ = 0.015": (87.89, 84.93), "σ = 0.02": (88.06, 85.74), "σ = 0.025": (88.01, 85.52),
    },
    "cifar100→lsun": {
        "λ → 0": (78.95, 73.71), "λ → ∞": (76.93, 72.40),
        "λ = 0.35": (78.66, 74.12), "λ = 0.4": (79.01, 74.61), "λ = 0.45": (78.91, 74.57),
        "σ = 0.015": (78.98, 74.45), "σ = 0.02": (79.11, 74.39), "σ = 0.025": (78.91, 74.23),
    },
}  # fmt: skip

# Table 10: AUROC/AUPR of a vision transformer.
VIT = _parse_table("""
method    | cifar10→svhn | cifar10→lsun | cifar100→svhn | cifar100→lsun
UNGrad    | 78.77/72.51  | 84.83/76.61  | 70.20/60.06   | 72.08/60.19
GradNorm  | 53.03/58.91  | 72.84/71.04  | 56.30/54.84   | 63.76/57.20
ExGrad    | 92.41/88.06  | 89.06/86.55  | 85.47/78.91   | 85.55/79.68
Perturb θ | 89.13/81.26  | 90.70/81.59  | 84.35/77.37   | 85.70/77.74
REGrad*   | 96.62/95.69  | 94.99/94.06  | 90.22/88.61   | 88.38/85.10
""")

# Table 9: seconds for 1000 CIFAR-10 images on a ResNet-18, as the authors measured them.
RUNTIME = {
    "NEGrad": 18.73,
    "UNGrad": 33.45,
    "GradNorm": 18.54,
    "ExGrad": 34.72,
    "Perturb x": 32.56,
    "Perturb θ": 43.16,
    "MC-AA": 32.56,
    "Inserted Dropout": 16.15,
    "Entropy": 3.05,
    "ExGrad V": 2.52,
    "LA": 22.61,
    "REGrad": 33.28,
    "REGrad+layers": 29.27,
    "REGrad*": 75.87,
}
