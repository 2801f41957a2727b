"""Our own derivative of attention in forward mode is that of torch's kernel."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qualms.gradients.sketching.jvp import Attention, DifferentiableAttention

# torch compiles rules of its own on first use, in a way that it has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
TOKENS, WIDTH = 5, 4
SEEN = torch.tensor([[True, False, True, True, True]]).expand(TOKENS, TOKENS)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double)


@pytest.mark.parametrize("heads", [(), (3,), (2, 4)], ids=["one head", "heads", "batch of heads"])
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, True),
        ({"is_causal": True}, True),
        ({"scale": 0.3}, True),
        ({"attn_mask": SEEN}, True),
        ({"attn_mask": torch.where(SEEN, 0.5, -torch.inf).double()}, False),
    ],
    ids=["plain", "causal", "scaled", "masked", "added to"],
)
def test_values_and_derivatives_are_those_of_torch(
    heads: tuple[int, ...], options: dict[str, Any], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (drawn(*heads, TOKENS, WIDTH) for _ in range(3))
    tangents = tuple(drawn(6, *heads, TOKENS, WIDTH) for _ in range(3))
    calls = []
    apply = Attention.apply
    monkeypatch.setattr(Attention, "apply", lambda *a: (calls.append(a), apply(*a))[1])

    def several() -> tuple[Tensor, Tensor]:
        def one(*s: Tensor) -> tuple[Tensor, Tensor]:
            return torch.func.jvp(
                lambda *x: F.scaled_dot_product_attention(*x, **options), (q, k, v), s
            )

        return torch.vmap(one)(*tangents)

    with sdpa_kernel(SDPBackend.MATH):
        want = several()
        with DifferentiableAttention():
            found = several()
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    assert bool(calls) == ours


def test_queries_may_share_keys() -> None:
    torch.manual_seed(0)
    q, k, v = drawn(1, 4, TOKENS, WIDTH), drawn(1, 2, TOKENS, WIDTH), drawn(1, 2, TOKENS, WIDTH)
    s = tuple(torch.randn_like(t) for t in (q, k, v))

    def attend(*x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*x, enable_gqa=True)

    with sdpa_kernel(SDPBackend.MATH):
        want = torch.func.jvp(attend, (q, k, v), s)
        with DifferentiableAttention():
            found = torch.func.jvp(attend, (q, k, v), s)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
