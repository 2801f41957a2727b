"""What identifies a network in the files of a run."""

from dataclasses import replace

from torch import nn

from qualms.data import ImageTransform, Normalization
from qualms.stream.network import Network


def test_a_network_is_identified_by_what_its_transform_does_not_by_who_asked_for_it() -> None:
    network = Network(
        "mine",
        nn.Linear(4, 3),
        Normalization((0.5,), (0.5,)),
        ImageTransform((8, 8), resize=10, by="as requested"),
    )
    assert network.transform is not None
    same = replace(network, transform=replace(network.transform, by="as in the settings"))
    assert same.about == network.about
    assert network.about["transform"] == (
        "size=(8, 8), resize=10, interpolation='bilinear', channels=None"
    )
    larger = replace(network, transform=replace(network.transform, resize=12))
    assert larger.about != network.about
