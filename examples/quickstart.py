"""A first look: train a small network on some handwritten digits, and ask what it does not know about others.

    python examples/quickstart.py

The digits 0 to 6 of scikit-learn's bundled dataset are learnt; 7, 8 and 9 are never shown. A good score is higher for
them. Runs in a few seconds and needs no other data.
"""

import time

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import qualms
from qualms.models.cnn import paper_cnn

KNOWN = 7
METHODS = ["regrad+layers+smooth", "regrad", "exgrad", "entropy", "energy", "gen", "coherence", "laplace"]


def digits() -> tuple[Tensor, Tensor]:
    """All images, enlarged to 16x16, and their labels."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float).reshape(-1, 1, 8, 8) / 16
    return nn.functional.interpolate(x, scale_factor=2), torch.tensor(labels)


def train(x: Tensor, y: Tensor, epochs: int = 15) -> nn.Module:
    """The paper's CNN."""
    model = paper_cnn(channels=1, size=16, classes=KNOWN)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()
    return model.eval()


def main() -> None:
    """Train, score, print a table."""
    torch.manual_seed(0)
    x, y = digits()
    known, unknown = (y < KNOWN).nonzero().squeeze(1), (y >= KNOWN).nonzero().squeeze(1)
    learnt, test = known[:900], known[900:]
    model = train(x[learnt], y[learnt])
    accuracy = float((model(x[test]).argmax(1) == y[test]).float().mean())
    print(f"The paper's CNN, trained on digits 0 to {KNOWN - 1}: {accuracy:.1%} right on {len(test)} test digits.")
    print(f"How well does each score tell those from {len(unknown)} digits it has never seen?\n")

    inputs = torch.cat([x[test], x[unknown]])
    is_unknown = torch.arange(len(inputs)) >= len(test)
    start = time.perf_counter()
    scores = qualms.compare(model, inputs, METHODS, train=list(x[learnt].split(256)))
    seconds = time.perf_counter() - start
    print(f"{'score (higher = more uncertain)':34} AUROC")
    for name, values in scores.items():
        print(f"{name:34} {100 * roc_auc_score(is_unknown, values):5.1f}")
    print(f"\nAll of them for {len(inputs)} inputs in {seconds:.1f} s.")

    threshold = qualms.Threshold.from_scores(scores[METHODS[0]][: len(test)], coverage=0.95)
    let_through = threshold.accept(scores[METHODS[0]][len(test) :]).float().mean()
    print(f"Accepting 95 % of the digits it knows lets {let_through:.0%} of the unknown ones through.")


if __name__ == "__main__":
    main()
