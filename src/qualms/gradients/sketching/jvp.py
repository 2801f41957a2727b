"""Jacobian-vector products J s of the logits with a tangent s on the weights.

J is the Jacobian of the logits with respect to the parameters. `forward_mode` is exact and takes one
pass with dual numbers. `central_difference` is for models that forward mode cannot run.
`find_jvp_function` (`sketch_probe.py`) compares either with plain autograd before its results are
used.
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

# The names of the positional parameters of torch's functions, up to the last one that is read here.
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
ATEN_EMBEDDING = ("weight", "indices", "padding_idx", "scale_grad_by_freq")
# Weights of at most so many bytes are copied, with their tangents, to the input's memory format.
MAX_FORMATTED_BYTES = 2**24


class Jvp(NamedTuple):
    """The logits of a batch of rows, and their derivative J s along a tangent s on the weights.

    J is the Jacobian of the logits. Both fields are [k, rows, c] if `forward_mode` was given k
    stacked tangents.
    """

    logits: Float[Tensor, "rows c"]
    derivative: Float[Tensor, "rows c"]


JvpFunction = Callable[[nn.Module, ModelInput, Tangent], Jvp]


def forward_mode(
    model: nn.Module,
    model_input: ModelInput,
    tangent: Tangent,
    is_stacked: bool = False,
) -> Jvp:
    """Compute the exact derivative J s by one pass with dual numbers (`torch.func.jvp`).

    J is the Jacobian of the logits with respect to the parameters.

    Args:
        model: the model, inside `preserve_state`.
        model_input: the rows to run.
        tangent: the tangent s, by the parameter's name.
        is_stacked: whether `tangent` holds k tangents, [k, …] for each parameter; logits and
            derivative are then [k, rows, c].
    """
    first_input = batch_tensors(model_input.batch)[0]
    nbytes = sum(s.nbytes for s in tangent.values())
    to_channels_last = _is_channels_last(first_input) and nbytes <= MAX_FORMATTED_BYTES

    def reformat(t: Tensor) -> Tensor:
        """Copy the weight of a convolution, or its tangent, to channels-last if the images are."""
        if to_channels_last and t.ndim == 4:
            return t.contiguous(memory_format=torch.channels_last)
        return t

    weights: dict[str, Tensor] = {}
    tangents: Tangent = {}
    for name, s in tangent.items():
        weights[name] = reformat(model.get_parameter(name).detach())
        tangents[name] = reformat(s)
    logits_at = partial(LogitsAt(model), model_input=model_input)

    def jvp(s: Tangent) -> Any:
        """Compute the logits and their derivative along a single tangent s."""
        return torch.func.jvp(logits_at, (weights,), (s,))

    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        # Operations whose own forward-mode derivative is missing or not what autograd computes.
        attention_with_forward_rule(),
        ConstantPadding(),
        Unrolled(),
    ):
        # torch warns about the rules that it compiles on first use.
        warnings.simplefilter("ignore", DeprecationWarning)
        if is_stacked:
            # "same": noise on embeddings is drawn inside the pass, one draw for all tangents.
            logits, derivative = torch.vmap(jvp, randomness="same")(tangents)
        else:
            logits, derivative = jvp(tangents)
    return Jvp(logits.detach(), derivative.detach())


def _is_channels_last(x: Tensor) -> bool:
    """Whether `x` is a batch of images [b, channels, height, width] in channels-last format.

    Images of one channel or one pixel are in both formats; these do not count.
    """
    if x.ndim != 4 or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def central_difference(model: nn.Module, model_input: ModelInput, tangent: Tangent) -> Jvp:
    """Compute the logits z(θ), and approximate J s by (z(θ + εs) - z(θ - εs)) / 2ε.

    θ are the weights, and J is the Jacobian of the logits. All three passes run in double
    precision, as the difference cancels most digits of the logits.

    Args:
        model: the model, inside `preserve_state`.
        model_input: the rows to run.
        tangent: the tangent s, by the parameter's name.
    """
    logits_at = LogitsAt(model)
    state: dict[str, Tensor] = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        state[name] = _to_double(t)
    batch = model_input.batch
    doubles = with_tensors(batch, map(_to_double, batch_tensors(batch)))
    model_input = replace(model_input, batch=doubles)
    tangent = {name: s.double() for name, s in tangent.items()}

    def logits_after(step: float, constant_padding: ConstantPadding) -> Tensor:
        """Compute the logits at the weights θ + step · s, inside `constant_padding`."""
        moved = {name: state[name] + step * s for name, s in tangent.items()}
        with constant_padding:
            return logits_at(state | moved, model_input)

    step = _difference_step(state, tangent)
    embeddings: list[Tensor] = []  # at the unchanged weights
    z = logits_after(0.0, ConstantPadding(record=embeddings))
    z_ahead = logits_after(step, ConstantPadding(constants=embeddings))
    z_behind = logits_after(-step, ConstantPadding(constants=embeddings))
    return Jvp(z, (z_ahead - z_behind) / (2 * step))


def _difference_step(state: dict[str, Tensor], tangent: Tangent) -> float:
    """Choose the step ε = eps^⅓ ‖θ‖ / ‖s‖ of a central difference along a tangent s.

    With eps the machine precision, its truncation and rounding errors are then about equal.

    Args:
        state: parameters θ and buffers of the model in double precision, by name.
        tangent: the tangent s, by the parameter's name.
    """
    weights_norm = sum(float(state[name].square().sum()) for name in tangent) ** 0.5  # ‖θ‖
    tangent_norm = sum(float(s.square().sum()) for s in tangent.values()) ** 0.5  # ‖s‖
    eps = torch.finfo(torch.double).eps
    # The limits keep the step above 0 and finite if all entries are 0.
    return eps ** (1 / 3) * max(weights_norm, 1e-3) / max(tangent_norm, 1e-30)


def _to_double(t: Tensor) -> Tensor:
    """Convert a floating-point tensor to 64 bits; others are only detached."""
    return t.detach().double() if t.is_floating_point() else t.detach()


JVP_FUNCTIONS: dict[str, JvpFunction] = {
    "forward mode": forward_mode,
    "central difference": central_difference,
}


class LogitsAt:
    """Computes the logits of a model with other values of its parameters and buffers.

    Tied tensors are replaced in every module that holds them. torch's `functional_call` with
    `tie_weights=True` goes by names instead, and keeps the old weights in a module that is reached
    by two names.

    Args:
        model: the model; its tensors are not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.named_parameters(), *model.named_buffers())
        name_in_model = {id(t): name for name, t in tensors}
        self.wrapper = _LogitsModule(model)
        # Pairs of a tensor's name in `wrapper` and its name in the model. A tied tensor has several
        # names in `wrapper`, one for each module that holds it, and a single one in the model.
        self.names: list[tuple[str, str]] = []
        for prefix, module in self.wrapper.named_modules():
            for named_tensors in (module.named_parameters, module.named_buffers):
                # `remove_duplicate=False` lists a tensor under all of its names.
                for name, t in named_tensors(prefix, recurse=False, remove_duplicate=False):
                    self.names.append((name, name_in_model[id(t)]))

    def __call__(self, values: dict[str, Tensor], model_input: ModelInput) -> Tensor:
        """Compute the logits [rows, c] at given values of parameters and buffers.

        Args:
            values: values of parameters and buffers, by their name in the model; those that are
                missing keep the model's values.
            model_input: the rows to run.
        """
        replacements: dict[str, Tensor] = {}
        for name_in_wrapper, name_in_model in self.names:
            if name_in_model in values:
                replacements[name_in_wrapper] = values[name_in_model]
        # `names` lists every name of a tied tensor; `tie_weights=True` may miss one.
        logits: Tensor = torch.func.functional_call(
            self.wrapper,
            replacements,
            (model_input,),
            tie_weights=False,
        )
        return logits


class _LogitsModule(nn.Module):
    """A module that takes rows and returns checked logits, as `functional_call` needs a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Evaluation mode for this wrapper only. `eval()` would also call the method `train` of the
        # model's modules, which are in evaluation mode already and may override it.
        self.training = False

    def forward(self, model_input: ModelInput) -> Tensor:
        """Compute the logits [rows, c]."""
        return forward_logits(self.model, model_input)


# Operations that forward mode runs in another form than torch's.


class ConstantPadding(CallMode):
    """A function mode in which embeddings of padding tokens do not depend on the weights.

    Autograd gives the padding row of an embedding's weight no gradient, so embeddings of padding
    must have no tangent, though other uses of the same weight do. In a central difference they keep
    the values that they have at the unchanged weights.

    Args:
        record: a list to which the outputs of embeddings with padding are appended; None if they
            are not recorded.
        constants: recorded outputs, one for each call in order, from which the values at padding
            are taken; by default those of the current output, detached.
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
        """Call `func`; if it is an embedding, replace values at padding by constants."""
        output = run_function(func, args, kwargs)
        if name_of(func) != "embedding":
            return output
        # `F.embedding` and the function in exported graphs order their arguments differently.
        is_functional = func is F.embedding
        names = EMBEDDING if is_functional else ATEN_EMBEDDING
        arguments = bind_arguments(names, args, kwargs)
        if arguments.get("scale_grad_by_freq"):
            raise QualmsError("an embedding scales its gradients by frequency; use engine='exact'.")
        padding = arguments.get("padding_idx")
        # An index below 0 counts from the end in `F.embedding`; in aten it means no padding.
        if padding is None or (padding < 0 and not is_functional):
            return output
        if self.record is not None:
            self.record.append(output)
        constant = next(self.constants, output.detach())
        token_ids = arguments["input" if is_functional else "indices"]
        is_padding = token_ids == padding % len(arguments["weight"])
        return torch.where(is_padding.unsqueeze(-1), constant, output)


@contextmanager
def attention_with_forward_rule() -> Iterator[None]:
    """Inside the context, run attention by code that has a forward-mode derivative.

    That is `Attention`, or torch's unfused kernel (`SDPBackend.MATH`). torch's fused attention
    kernels, and the fused path of its transformer layers, have no such derivative.
    """
    mha: Any = torch.backends.mha
    was_enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), DifferentiableAttention():
            yield
    finally:
        mha.set_fastpath_enabled(was_enabled)


class Attention(torch.autograd.Function):
    """Attention o = P v, P = softmax(scale · q kᵀ + mask), with a fast forward-mode derivative.

    torch's kernel with a forward-mode derivative takes a dozen steps, each over [tokens, tokens].
    Here, for tangents dq, dk and dv,

        dS = scale · (dq kᵀ + q dkᵀ), computed as one product of [dq q] and [k dk],
        A = P ∘ dS, the elementwise product,
        do = P dv + A v - r ∘ o, where r is the sum of each row of A.
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
        """Compute the attention o = P v and P, which the derivative needs.

        Args:
            q: queries [..., t, d].
            k: keys [..., u, d].
            v: values [..., u, e].
            mask: 0 or -inf, added to the scores scale · q kᵀ [..., t, u]; None for no mask.
            scale: the factor of the scores.
        """
        scores = (q * scale) @ k.mT
        if mask is None:
            probs = scores.softmax(-1)
        else:
            # A query whose keys are all masked gets zeros, as in torch, instead of NaN.
            has_no_keys = (mask == -torch.inf).all(-1, keepdim=True)
            probs = (scores + mask).softmax(-1).masked_fill(has_no_keys, 0.0)
        return probs @ v, probs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the tensors and the scale that `jvp` needs.

        Args:
            ctx: torch's context of this call.
            inputs: the arguments of `forward`.
            output: the result of `forward`.
        """
        q, k, v, _, ctx.scale = inputs
        o, probs = output
        ctx.mark_non_differentiable(probs)
        ctx.save_for_forward(q, k, v, o, probs)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> tuple[Tensor, None]:
        """Push the tangents of q, k and v forward to o; P gets no tangent.

        With A = P ∘ dS (elementwise) and dS = scale · (dq kᵀ + q dkᵀ), the tangent of o is
        do = P dv + A v - r ∘ o, where r is the sum of each row of A.

        Args:
            ctx: torch's context, with what `setup_context` saved.
            dq: the tangent of the queries.
            dk: the tangent of the keys.
            dv: the tangent of the values.
            _: tangents of the mask and the scale, which have none.

        Returns:
            The tangents of the two results of `forward`.
        """
        q, k, v, o, probs = ctx.saved_tensors
        # dS is the product left · rightᵀ.
        left = torch.cat([dq * ctx.scale, q * ctx.scale], -1)
        right = torch.cat([k, dk], -1)
        a = probs * (left @ right.mT)
        d_o = probs @ dv + a @ v - a.sum(-1, keepdim=True) * o
        return d_o, None


class DifferentiableAttention(CallMode):
    """A function mode that runs `Attention` in place of torch's `scaled_dot_product_attention`.

    Calls with dropout, a floating-point mask, or a single query vector are left to torch.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`; if it is torch's attention, run `Attention` in its place."""
        if name_of(func) != "scaled_dot_product_attention":
            return run_function(func, args, kwargs)
        arguments = bind_arguments(ATTENTION, args, kwargs)
        q, k, v = arguments["query"], arguments["key"], arguments["value"]
        mask = arguments.get("attn_mask")
        # A floating-point mask may have a tangent, for which `Attention` has no derivative.
        is_additive = mask is not None and mask.is_floating_point()
        # `Attention` also has no dropout, and takes matrices of queries.
        if arguments.get("dropout_p") or q.ndim < 2 or is_additive:
            return run_function(func, args, kwargs)
        # Grouped queries: several query heads share a head of keys and values.
        if arguments.get("enable_gqa"):
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        if arguments.get("is_causal"):
            all_seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            mask = all_seen.tril()
        # From a boolean mask, True where a query sees a key, to numbers that are added.
        if mask is not None:
            zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
            mask = zeros.masked_fill(~mask, -torch.inf)
        scale = arguments.get("scale")
        if scale is None:
            scale = q.shape[-1] ** -0.5
        attention: Any = Attention  # `apply` has no type annotations
        o, _ = attention.apply(q, k, v, mask, scale)
        return o
