"""Jacobian-vector products J s of the logits with a tangent s on the weights.

`forward_mode` is exact and takes one pass with dual numbers. `central_difference` is for models
that forward mode cannot run. `find_jvp_function` (`sketch_probe.py`) compares either with plain
autograd before its results are used.
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

# Names of the positional parameters of torch's functions, up to the last one that is read here.
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
ATEN_EMBEDDING = ("weight", "indices", "padding_idx", "scale_grad_by_freq")
# Weights up to this size are copied, with their tangents, to the memory format of the input.
MAX_FORMATTED_BYTES = 2**24


class Jvp(NamedTuple):
    """The logits of a batch of rows, and their derivative J s along a tangent s on the weights.

    Both are [k, rows, c] if `forward_mode` was given k tangents.
    """

    logits: Float[Tensor, "rows c"]
    derivative: Float[Tensor, "rows c"]


JvpFunction = Callable[[nn.Module, ModelInput, Tangent], Jvp]


def forward_mode(
    model: nn.Module,
    model_input: ModelInput,
    tangent: Tangent,
    several: bool = False,
) -> Jvp:
    """Compute the exact J s by one pass with dual numbers (`torch.func.jvp`).

    Args:
        model: the model, inside `preserve_state`.
        model_input: the rows to run.
        tangent: the tangent s, by the parameter's name.
        several: whether `tangent` holds k tangents, [k, …] for each parameter; logits and
            derivative are then [k, rows, c].
    """
    x = batch_tensors(model_input.batch)[0]
    nbytes = sum(s.nbytes for s in tangent.values())
    convert = _is_channels_last(x) and nbytes <= MAX_FORMATTED_BYTES

    def reformat(t: Tensor) -> Tensor:
        """Copy a convolution kernel, or its tangent, to channels-last if the images are."""
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
            # "same": noise on embeddings is drawn inside the pass, one draw for all tangents.
            jvp_of_each = torch.vmap(lambda s: jvp((s,)), randomness="same")
            pair: Any = jvp_of_each(tangents)
        else:
            pair = jvp((tangents,))
    return Jvp(pair[0].detach(), pair[1].detach())


def _is_channels_last(x: Tensor) -> bool:
    """Whether `x` is a batch of images stored in channels-last format, and not contiguous too."""
    if x.ndim != 4 or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def central_difference(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
    """Approximate J s by (z(θ + εs) - z(θ - εs)) / 2ε, in double precision.

    Takes three passes: the logits at the unchanged weights are returned too.

    Args:
        model: the model, inside `preserve_state`.
        model_input: the rows to run.
        tangent: the tangent s, by the parameter's name.
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
        """Compute z(θ + step · s); `keep_padding` records or replaces embeddings of padding."""
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
    """Choose ε = eps^⅓ ‖θ‖ / ‖s‖, at which a central difference's truncation and rounding balance.

    Args:
        state: parameters and buffers of the model in double precision, by name.
        tangent: the tangent s, by the parameter's name.
    """
    size = sum(float(state[name].square().sum()) for name in tangent) ** 0.5  # ‖θ‖
    length = sum(float(s.square().sum()) for s in tangent.values()) ** 0.5  # ‖s‖
    eps = torch.finfo(torch.double).eps
    return eps ** (1 / 3) * max(size, 1e-3) / max(length, 1e-30)


def _to_double(t: Tensor) -> Tensor:
    """Convert a floating-point tensor to 64 bits; others are only detached."""
    return t.detach().double() if t.is_floating_point() else t.detach()


JVP_FUNCTIONS: dict[str, JvpFunction] = {
    "forward mode": forward_mode,
    "central difference": central_difference,
}


class LogitsAt:
    """Computes the logits of a model with other values of its parameters and buffers.

    Tied tensors are replaced in every module that holds them. `functional_call` with `tie_weights`
    goes by names instead, and keeps the old weights in a module that is reached by two names.

    Args:
        model: the model; its tensors are not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.named_parameters(), *model.named_buffers())
        names = {id(t): name for name, t in tensors}
        self.inner = _LogitsModule(model)
        # Pairs of a tensor's name in `inner` and its name in the model. A tied tensor has several
        # names in `inner`, and one in the model.
        self.places: list[tuple[str, str]] = []
        for owner, m in self.inner.named_modules():
            for named in (m.named_parameters, m.named_buffers):
                for place, t in named(owner, recurse=False, remove_duplicate=False):
                    self.places.append((place, names[id(t)]))

    def __call__(self, values: dict[str, Tensor], model_input: ModelInput) -> Tensor:
        """Compute the logits.

        Args:
            values: parameters and buffers by name; those left out keep the model's values.
            model_input: the rows to run.
        """
        replacements = {place: values[name] for place, name in self.places if name in values}
        logits: Tensor = torch.func.functional_call(
            self.inner,
            replacements,
            (model_input,),
            tie_weights=False,
        )
        return logits


class _LogitsModule(nn.Module):
    """A module that takes rows and returns checked logits, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # For this wrapper only: `eval()` would also call the `train` of the model's modules, which
        # are in evaluation mode already and may override it.
        self.training = False

    def forward(self, model_input: ModelInput) -> Tensor:
        """Compute the logits [rows, c]."""
        return forward_logits(self.model, model_input)


# Operations that forward mode runs in another form than torch's.


class ConstantPadding(CallMode):
    """A function mode in which the embedding of padding is constant.

    Autograd gives the padding row of an embedding no gradient, so the embedding of padding must
    have no tangent, though other uses of the same weight do. In a central difference it keeps the
    value that it has at the unchanged weights.

    Args:
        record: list to which the outputs of embeddings with padding are appended.
        constants: recorded outputs, from which the values at padding are taken; by default the
            current output, detached.
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
        """Call `func`; in an embedding's output, values at padding are replaced by constants."""
        out = run_function(func, args, kwargs)
        if name_of(func) != "embedding":
            return out
        is_functional = func is F.embedding
        # The functional form and the one in exported graphs order their arguments differently.
        names = EMBEDDING if is_functional else ATEN_EMBEDDING
        arguments = bind_arguments(names, args, kwargs)
        if arguments.get("scale_grad_by_freq"):
            raise QualmsError("an embedding scales its gradients by frequency; use engine='exact'.")
        padding = arguments.get("padding_idx")
        # Below 0, aten's index means no padding; the functional form counts it from the end.
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
    """Inside: attention runs by `Attention`, or by torch's kernel that has a forward-mode rule.

    torch's fused attention kernels, and the fused path of its transformer layers, have none.
    """
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), DifferentiableAttention():
            yield
    finally:
        mha.set_fastpath_enabled(before)


class Attention(torch.autograd.Function):
    """Attention o = P v, P = softmax(s q kᵀ + mask), with a fast forward-mode derivative.

    torch's kernel with a forward rule takes a dozen steps, each over [tokens, tokens]. Here, with
    A = P ∘ dS, where dS = s (dq kᵀ + q dkᵀ) is one product of [dq q] and [k dk]:

        do = P dv + A v - r ∘ o,  where r is the sum of each row of A.
    """

    # `forward_mode` maps over several tangents by `vmap`.
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention o, and P, which the derivative needs.

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
            # A token whose keys are all masked gets zeros, as in torch.
            sees_none = (mask == -torch.inf).all(-1, keepdim=True)
            probs = (scores + mask).softmax(-1).masked_fill(sees_none, 0.0)
        return probs @ v, probs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the tensors and the scale that `jvp` needs."""
        q, k, v, _, ctx.scale = inputs
        out, probs = output
        ctx.mark_non_differentiable(probs)
        ctx.save_for_forward(q, k, v, out, probs)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> tuple[Tensor, None]:
        """Push the tangents of q, k and v forward to o; P gets no tangent.

        Args:
            ctx: what `setup_context` has saved.
            dq: tangent of the queries.
            dk: tangent of the keys.
            dv: tangent of the values.
            _: for the mask and the scale; unused.
        """
        q, k, v, out, probs = ctx.saved_tensors
        left = torch.cat([dq * ctx.scale, q * ctx.scale], -1)
        right = torch.cat([k, dk], -1)
        a = probs * (left @ right.mT)
        return probs @ dv + a @ v - a.sum(-1, keepdim=True) * out, None


class DifferentiableAttention(CallMode):
    """A function mode that runs `Attention` in place of torch's `scaled_dot_product_attention`.

    Calls with dropout, an additive mask or vectors for queries are left to torch.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, or `Attention` in its place, and return the result."""
        if name_of(func) != "scaled_dot_product_attention":
            return run_function(func, args, kwargs)
        arguments = bind_arguments(ATTENTION, args, kwargs)
        q, k, v = arguments["query"], arguments["key"], arguments["value"]
        mask = arguments.get("attn_mask")
        # `Attention` has no derivative for a mask of numbers.
        is_additive = mask is not None and mask.is_floating_point()
        if arguments.get("dropout_p") or q.ndim < 2 or is_additive:
            return run_function(func, args, kwargs)
        if arguments.get("enable_gqa"):
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        if arguments.get("is_causal"):
            square = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            mask = square.tril()
        if mask is not None:  # boolean: True where a key is seen
            zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
            mask = zeros.masked_fill(~mask, -torch.inf)
        scale = arguments.get("scale")
        if scale is None:
            scale = q.shape[-1] ** -0.5
        attention: Any = Attention
        return attention.apply(q, k, v, mask, scale)[0]
