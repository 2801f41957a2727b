"""Jacobian-vector products J s of the logits with a tangent s on the weights.

`forward_mode` is exact and takes one pass with dual numbers. `central_difference` serves models
that forward mode cannot run. Neither is trusted before `find_jvp_function` (`sketch_probe.py`) has
compared it with plain autograd.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qualms.errors import QualmsError
from qualms.gradients.batch import batch_tensors, with_tensors
from qualms.gradients.function_modes import CallMode, bind_arguments, name_of, run_function
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.sketching.tangents import Tangent
from qualms.gradients.tracing.rules.recurrent_layers import Unrolled

# Positional parameters of torch's functions, as far as they are read here.
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
ATEN_EMBEDDING = ("weight", "indices", "padding_idx", "scale_grad_by_freq")
# Weights up to this size are copied, with their tangents, to the memory format of the input.
MAX_FORMATTED_BYTES = 2**24


class Jvp(NamedTuple):
    """The logits of some rows, and their derivative J s along a tangent."""

    logits: Float[Tensor, "rows c"]
    derivative: Float[Tensor, "rows c"]


JvpFunction = Callable[[nn.Module, ModelInput, Tangent], Jvp]


def forward_mode(
    model: nn.Module,
    model_input: ModelInput,
    tangent: Tangent,
    several: bool = False,
) -> Jvp:
    """The exact J s, by one pass with dual numbers.

    Args:
        model: inside `preserve_state`.
        model_input: the rows.
        tangent: s, by the parameter's name.
        several: whether `tangent` holds k tangents, [k, …] for each parameter; both results are
            then [k, rows, c].
    """
    x = batch_tensors(model_input.batch)[0]
    size = sum(s.nbytes for s in tangent.values())
    convert = _is_channels_last(x) and size <= MAX_FORMATTED_BYTES

    def reformat(t: Tensor) -> Tensor:
        if convert and t.ndim == 4:
            return t.contiguous(memory_format=torch.channels_last)
        return t

    theta: Tangent = {}
    tangents: Tangent = {}
    for name, s in tangent.items():
        theta[name] = reformat(model.get_parameter(name).detach())
        tangents[name] = reformat(s)
    logits_at = LogitsAt(model)
    jvp = partial(torch.func.jvp, lambda values: logits_at(values, model_input), (theta,))
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        attention_with_forward_rule(),
        ConstantPadding(),
        Unrolled(),
    ):
        # torch warns of the rules that it compiles on first use.
        warnings.simplefilter("ignore", DeprecationWarning)
        if several:
            # "same": noise on embeddings is drawn in the pass, one draw for all tangents.
            jvp_of_each = torch.vmap(lambda s: jvp((s,)), randomness="same")
            pair: Any = jvp_of_each(tangents)
        else:
            pair = jvp((tangents,))
    return Jvp(pair[0].detach(), pair[1].detach())


def _is_channels_last(x: Tensor) -> bool:
    if x.ndim != 4 or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def central_difference(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
    """J s as (z(θ + εs) - z(θ - εs)) / 2ε, in double precision.

    Args:
        model: inside `preserve_state`.
        model_input: the rows.
        tangent: s, by the parameter's name.
    """
    logits_at = LogitsAt(model)
    state: Tangent = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        state[name] = _to_double(t)
    batch = model_input.batch
    doubles = with_tensors(batch, map(_to_double, batch_tensors(batch)))
    model_input = replace(model_input, batch=doubles)
    tangent = {name: s.double() for name, s in tangent.items()}

    def logits_after(step: float, keep_padding: ConstantPadding) -> Tensor:
        moved = {name: state[name] + step * s for name, s in tangent.items()}
        with keep_padding:
            return logits_at(state | moved, model_input)

    step = _difference_step(state, tangent)
    padding: list[Tensor] = []
    z = logits_after(0.0, ConstantPadding(record=padding))
    ahead = logits_after(step, ConstantPadding(constants=padding))
    behind = logits_after(-step, ConstantPadding(constants=padding))
    return Jvp(z, (ahead - behind) / (2 * step))


def _difference_step(state: Tangent, tangent: Tangent) -> float:
    """The ε at which truncation and rounding of a central difference balance.

    It is relative to the size of the weights.
    """
    size = sum(float(state[name].square().sum()) for name in tangent) ** 0.5
    length = sum(float(s.square().sum()) for s in tangent.values()) ** 0.5
    eps = torch.finfo(torch.double).eps
    return eps ** (1 / 3) * max(size, 1e-3) / max(length, 1e-30)


def _to_double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()


JVP_FUNCTIONS: dict[str, JvpFunction] = {
    "forward mode": forward_mode,
    "central difference": central_difference,
}


class LogitsAt:
    """The logits of a model at other parameters and buffers, given by name.

    Tied tensors are put in all their places, each place once. torch, where it ties them, goes by
    names, and leaves other weights in a module that has two names.

    Args:
        model: whose own tensors are left in place.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.named_parameters(), *model.named_buffers())
        names = {id(t): name for name, t in tensors}
        self.inner = _LogitsModule(model)
        self.places: list[tuple[str, str]] = []  # in `inner`, and the tensor's name in the model
        for owner, m in self.inner.named_modules():
            for named in (m.named_parameters, m.named_buffers):
                for place, t in named(owner, recurse=False, remove_duplicate=False):
                    self.places.append((place, names[id(t)]))

    def __call__(self, values: dict[str, Tensor], model_input: ModelInput) -> Tensor:
        """The logits of some rows; what has no value here keeps its own."""
        there = {place: values[name] for place, name in self.places if name in values}
        logits: Tensor = torch.func.functional_call(
            self.inner,
            there,
            (model_input,),
            tie_weights=False,
        )
        return logits


class _LogitsModule(nn.Module):
    """A module that takes rows and returns checked logits, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = False

    def forward(self, model_input: ModelInput) -> Tensor:
        """The logits of these rows."""
        return forward_logits(self.model, model_input)


# Operations that forward mode needs in another form than torch's.


class ConstantPadding(CallMode):
    """Keeps what an embedding returns for padding constant.

    It has no gradient, and so no tangent; other uses of the same weight do. For a difference it
    stays what it was at the weights themselves.

    Args:
        record: where the outputs of embeddings with padding are appended.
        constants: recorded outputs, which padding takes its values from.
    """

    def __init__(
        self,
        record: list[Tensor] | None = None,
        constants: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.record = record
        self.constants = iter(constants)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`; if it is an embedding, its padding is replaced by constants."""
        out = run_function(func, args, kwargs)
        if name_of(func) != "embedding":
            return out
        is_functional = func is F.embedding
        names = EMBEDDING if is_functional else ATEN_EMBEDDING
        arguments = bind_arguments(names, args, kwargs)
        if arguments.get("scale_grad_by_freq"):
            raise QualmsError("an embedding scales its gradients by frequency; use engine='exact'.")
        padding = arguments.get("padding_idx")
        if padding is None or (padding < 0 and not is_functional):
            return out
        if self.record is not None:
            self.record.append(out)
        constant = next(self.constants, out.detach())
        ids = arguments["input" if is_functional else "indices"]
        is_padding = ids == padding % len(arguments["weight"])
        return torch.where(is_padding.unsqueeze(-1), constant, out)


@contextmanager
def attention_with_forward_rule() -> Iterator[None]:
    """Run attention by kernels that have a forward-mode rule, by `Attention` where that serves."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), DifferentiableAttention():
            yield
    finally:
        mha.set_fastpath_enabled(before)


class Attention(torch.autograd.Function):
    """P v, P the softmax of S = s q kᵀ + mask, with a forward-mode derivative of its own.

    torch's kernel that has one takes attention apart into a dozen steps, each a pass over
    [tokens, tokens]. With A = P ∘ dS, where dS = s (dq kᵀ + q dkᵀ) is one product of [dq q] and
    [k dk], and o = P v:

        do = P dv + A v - r ∘ o,  r the sums of the rows of A.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The result, and P for the derivative.

        Args:
            q: queries [..., t, d].
            k: keys [..., u, d].
            v: values [..., u, e].
            mask: added to the scores; 0 or -inf.
            scale: s.
        """
        scores = (q * scale) @ k.mT
        if mask is None:
            probs = scores.softmax(-1)
        else:
            # A token that sees none gets nothing, as in torch.
            sees_none = (mask == -torch.inf).all(-1, keepdim=True)
            probs = (scores + mask).softmax(-1).masked_fill(sees_none, 0.0)
        return probs @ v, probs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the derivative needs."""
        q, k, v, _, ctx.scale = inputs
        out, probs = output
        ctx.mark_non_differentiable(probs)
        ctx.save_for_forward(q, k, v, out, probs)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> tuple[Tensor, None]:
        """The derivative of the result.

        Args:
            ctx: what `setup_context` has saved.
            dq: tangent of the queries.
            dk: tangent of the keys.
            dv: tangent of the values.
        """
        q, k, v, out, probs = ctx.saved_tensors
        left = torch.cat([dq * ctx.scale, q * ctx.scale], -1)
        right = torch.cat([k, dk], -1)
        a = probs * (left @ right.mT)
        return probs @ dv + a @ v - a.sum(-1, keepdim=True) * out, None


class DifferentiableAttention(CallMode):
    """Replaces attention by `Attention`, unless a call asks for something that it does not do."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, or `Attention` in its place."""
        if name_of(func) != "scaled_dot_product_attention":
            return run_function(func, args, kwargs)
        arguments = bind_arguments(ATTENTION, args, kwargs)
        q, k, v = arguments["query"], arguments["key"], arguments["value"]
        mask = arguments.get("attn_mask")
        # A mask of numbers may have a derivative.
        is_additive = mask is not None and mask.is_floating_point()
        if arguments.get("dropout_p") or q.ndim < 2 or is_additive:
            return run_function(func, args, kwargs)
        if arguments.get("enable_gqa"):
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        if arguments.get("is_causal"):
            square = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            mask = square.tril()
        if mask is not None:
            zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
            mask = zeros.masked_fill(~mask, -torch.inf)
        scale = arguments.get("scale")
        if scale is None:
            scale = q.shape[-1] ** -0.5
        attention: Any = Attention
        return attention.apply(q, k, v, mask, scale)[0]
