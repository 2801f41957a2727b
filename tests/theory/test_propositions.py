"""What the paper's propositions promise, and where each stops holding. The page is docs/theory.md."""

import math

import pytest
import torch
from propositions import bound, exchange, posterior, vanishing
from torch import Tensor, nn

SIZES = (96, 384, 1536)

pytestmark = pytest.mark.slow  # half a minute


@pytest.fixture(scope="module")
def growing() -> dict[str, list[float]]:
    return posterior.growing_data(SIZES, datasets=3)


@pytest.fixture(scope="module")
def training() -> dict[str, list[float]]:
    return vanishing.training_goes_on((10, 300))


@pytest.fixture(scope="module")
def models() -> tuple[dict[str, nn.Module], Tensor]:
    return bound.trained(steps=60)


class TestNoiseOnTheWeightsAndThePosterior:
    def test_the_laplace_gaussian_nears_the_posterior_as_one_over_root_n(
        self, growing: dict[str, list[float]]
    ) -> None:
        assert posterior.slope(SIZES, growing["laplace"]) == pytest.approx(-0.5, abs=0.08)
        assert growing["laplace"][-1] < 0.015

    def test_its_uncertainty_is_right_to_one_over_n(self, growing: dict[str, list[float]]) -> None:
        assert posterior.slope(SIZES, growing["gap"]) == pytest.approx(-1.0, abs=0.15)

    def test_the_densities_do_not_meet_pointwise(self, growing: dict[str, list[float]]) -> None:
        """In two dimensions the peak rises as n, its relative error falls as 1/√n: the difference
        rises as √n.
        """
        assert posterior.slope(SIZES, growing["density"]) == pytest.approx(0.5, abs=0.05)

    def test_perturb_theta_is_the_laplace_quantity_when_its_noise_has_that_covariance(self) -> None:
        found = posterior.fitted(1536, 0)
        exact = posterior.uncertainty(found, found.laplace, posterior.PROBES)
        drawn = posterior.by_perturbation(found, posterior.PROBES, None, draws=250)
        assert float(((drawn - exact) / exact).abs().mean()) < 0.15

    def test_equal_noise_on_all_weights_never_becomes_the_posterior(self) -> None:
        found = posterior.isotropic((384, 24576), draws=60)
        assert min(found["distance"]) > 0.5
        assert found["sigma"][0] / found["sigma"][1] == pytest.approx(8, rel=0.1), (
            "σ has to shrink as 1/√n"
        )
        assert max(found["rank"]) < 0 < 0.9 < min(found["rank_laplace"])

    def test_standardized_inputs_mend_most_of_that(self) -> None:
        found = posterior.isotropic((24576,), view=posterior.STANDARDIZED, draws=60)
        assert 0.03 < found["distance"][0] < 0.1
        assert found["rank"][0] > 0.9

    def test_separable_labels_keep_the_posterior_from_becoming_gaussian(self) -> None:
        found = posterior.separable()
        assert min(found["laplace"]) > 0.3
        assert max(found["ratio"]) < 0.45, "Laplace tells less than half of the uncertainty"
        assert found["mode"][-1] > 2 * found["mode"][0], "θ* leaves for infinity"

    def test_it_takes_more_than_d_squared_labels(self) -> None:
        cubic, square, linear = (
            posterior.growing_dimension(power)["hellinger"] for power in (3, 2, 1)
        )
        assert cubic[-1] < cubic[0] / 7
        assert square[-1] == pytest.approx(square[0], rel=0.01)
        assert linear[-1] > 6 * linear[0]

    def test_but_only_d_for_the_uncertainty(self) -> None:
        linear, square = (posterior.growing_dimension(power)["gap"] for power in (1, 2))
        assert linear[-1] == pytest.approx(linear[0], rel=1e-6)
        assert square[-1] < square[0] / 50

    def test_a_wrong_model_is_certain_all_the_same(self) -> None:
        found = posterior.misspecified((96, 6144), datasets=3)
        assert found["laplace"][1] < 0.005
        assert found["level"][1] < 1e-4
        assert found["error"][1] > 0.5


class TestExchangeOfInputAndWeights:
    @pytest.mark.parametrize("size", [1e-6, 1.0, 100.0])
    @pytest.mark.parametrize("zeros", [0.0, 0.5])
    def test_first_layer_weights_can_do_what_any_change_of_input_does(
        self, size: float, zeros: float
    ) -> None:
        found = exchange.weights_for_input(20, 50, size, zeros)
        assert found["residual"] < 1e-14
        assert found["relative"] <= 1

    def test_the_elementwise_condition_is_not_necessary_and_fails_at_zeros(self) -> None:
        assert exchange.weights_for_input(20, 50, 1.0)["elementwise"] < 1e-14
        assert exchange.weights_for_input(20, 50, 1.0, zeros=0.5)["elementwise"] > 0.5

    @pytest.mark.parametrize("width", [1, 10, 20])
    def test_the_input_can_do_what_a_layer_no_wider_than_it_does(self, width: int) -> None:
        assert exchange.input_for_weights(20, width) < 1e-12

    @pytest.mark.parametrize("width", [25, 40, 80, 320])
    def test_a_wider_layer_leaves_a_residual(self, width: int) -> None:
        assert exchange.input_for_weights(20, width) == pytest.approx(
            math.sqrt(1 - 20 / width), rel=0.06
        )

    def test_a_convolution_allows_neither_at_its_output(self) -> None:
        found = exchange.convolution()
        assert min(found.values()) > 0.8
        assert exchange.convolution(channels=1)["input_for_weights"] < 1e-12

    def test_but_a_first_convolution_can_move_the_probabilities_anywhere(self) -> None:
        assert exchange.first_layer_rank(bound.networks()["CNN"], bound.digits()[0][:5], "0.*") == 9

    @pytest.mark.parametrize("shape", [(20, 64, 5), (4, 64, 5)])
    def test_outputs_can_be_had_from_the_input_at_rank_c_minus_1(
        self, shape: tuple[int, int, int]
    ) -> None:
        found = exchange.same_output(exchange.network(*shape), exchange.normal(3)(shape[0]))
        assert found["rank"] == 4
        assert found["residual"] < 1e-10

    @pytest.mark.parametrize(
        ("shape", "scale"), [((3, 64, 5), 1.0), ((20, 2, 5), 1.0), ((20, 64, 5), 1e3)]
    )
    def test_and_not_below_it(self, shape: tuple[int, int, int], scale: float) -> None:
        """Too few inputs, a bottleneck, saturated units."""
        found = exchange.same_output(exchange.network(*shape), scale * exchange.normal(3)(shape[0]))
        assert found["rank"] < 4
        assert found["residual"] > 0.2

    def test_the_expectations_agree_for_matched_noise_and_not_for_equal_noise(self) -> None:
        alike, different = exchange.expectations(0, draws=60), exchange.expectations(1, draws=60)
        assert max(alike["matched"], different["matched"]) < 1e-12
        assert alike["spread"] > 3
        assert different["spread"] > 100
        assert different["rank"] < 0 < alike["rank"] < 0.9


class TestVanishingGradients:
    def test_they_shrink_at_known_points_and_near_them(
        self, training: dict[str, list[float]]
    ) -> None:
        for name in ("label", "near", "exgrad"):
            assert training[name][1] < training[name][0] / 1000, name
        assert training["regrad"][1] < training["regrad"][0] / 20

    def test_those_of_other_classes_grow_so_that_an_unweighted_mean_does_too(
        self, training: dict[str, list[float]]
    ) -> None:
        assert training["ungrad"][1] > 1.5 * training["ungrad"][0]

    def test_they_stay_where_labels_are_ambiguous_though_the_model_is_right(self) -> None:
        found = vanishing.ambiguous((900,))
        assert found["error"][0] < 0.1
        assert found["mean"][0] < 0.02
        assert found["label"][0] > 1
        assert found["exgrad"][0] > found["least"][0] > 0.5
        assert found["clean"][0] < found["exgrad"][0] / 1000

    def test_exgrad_is_never_below_what_the_last_bias_gives(self) -> None:
        model, x = vanishing.perceptron(2, 16, 3, 0), vanishing.clusters(30, 0)[0]
        probs = model(x).softmax(-1).detach()
        assert bool(
            (bound.gradient_scores(model, x)["exgrad"] >= vanishing.smallest_possible(probs)).all()
        )

    def test_an_optimum_of_too_small_a_model_has_gradients_that_only_cancel(self) -> None:
        found = vanishing.too_small()
        assert found["mean"] < 1e-9
        assert found["label"] > 1

    def test_they_vanish_at_memorized_wrong_labels_and_less_so_around_them(self) -> None:
        found = vanishing.wrong_labels()
        assert found["wrong"] < 0.01 < 10 < found["true"]
        assert found["near_wrong"] > 5 * found["wrong"]
        assert found["near_wrong"] > 1000 * found["near_right"]

    def test_they_vanish_far_from_everything_that_was_learnt(self) -> None:
        found = vanishing.far_away((1.0, 10.0, 100.0))
        assert found["below"][0] < 0.5
        assert found["below"][1] > 0.8
        assert found["below"][2] == 1
        assert found["regrad"][2] < found["known"][0]


class TestGradientNormsBoundPerturbations:
    @pytest.mark.parametrize("name", list(bound.networks()))
    def test_the_bound_holds_for_small_noise_and_is_of_another_order(
        self, models: tuple[dict[str, nn.Module], Tensor], name: str
    ) -> None:
        found = bound.sweep(models[0][name], models[1], (0.001, 0.01), draws=30)
        assert found["broken"] == [0, 0]
        assert found["worst"][0] < 0.001
        assert found["share"][1] / found["share"][0] == pytest.approx(10, rel=0.2), "σ² against σ"

    @pytest.mark.parametrize("name", ["ReLU network", "tanh network", "CNN"])
    def test_it_breaks_for_large_noise(
        self, models: tuple[dict[str, nn.Module], Tensor], name: str
    ) -> None:
        assert bound.sweep(models[0][name], models[1], (1.0,), draws=30)["broken"][0] > 0.3

    @pytest.mark.parametrize("name", list(bound.networks()))
    def test_the_first_order_term_is_zero(
        self, models: tuple[dict[str, nn.Module], Tensor], name: str
    ) -> None:
        assert bound.first_order(models[0][name], models[1]) < 1e-13

    @pytest.mark.parametrize("swap", [False, True])
    def test_the_curvature_of_both_divergences_is_the_trace_of_squared_norms(
        self, swap: bool
    ) -> None:
        model, x = exchange.network(4, 3, 3), exchange.normal(5)(1, 4)
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        sizes = {name: p.shape for name, p in model.named_parameters()}

        def log_probs(theta: Tensor) -> Tensor:
            parts = theta.split([shape.numel() for shape in sizes.values()])
            weights = {
                name: part.reshape(shape)
                for (name, shape), part in zip(sizes.items(), parts, strict=True)
            }
            return torch.func.functional_call(model, weights, (x,))[0].log_softmax(-1)

        def divergence(theta: Tensor) -> Tensor:
            p, q = log_probs(flat), log_probs(theta)
            p, q = (q, p) if swap else (p, q)
            return (p.exp() * (p - q)).sum()

        curvature = torch.func.jacrev(torch.func.jacrev(divergence))(flat).trace()
        torch.testing.assert_close(
            bound.gradient_scores(model, x)["trace"][0], curvature, rtol=1e-9, atol=0
        )

    def test_perturb_theta_nears_that_trace_as_noise_shrinks(self) -> None:
        found = bound.sweep(
            bound.networks()["tanh network"], bound.digits()[0][:3], (0.001,), draws=200
        )
        assert found["second"][0] == pytest.approx(1, abs=0.1)
        assert found["forward"][0] == pytest.approx(1, abs=0.1)

    def test_and_leaves_it_for_large_noise(
        self, models: tuple[dict[str, nn.Module], Tensor]
    ) -> None:
        found = bound.sweep(models[0]["CNN"], models[1], (0.1,), draws=30)
        assert min(found["second"][0], found["forward"][0]) > 10

    @pytest.mark.parametrize("name", list(bound.networks()))
    def test_exgrad_is_below_and_regrad_above_the_trace(
        self, models: tuple[dict[str, nn.Module], Tensor], name: str
    ) -> None:
        found = bound.sandwich(models[0][name], models[1])
        assert found["exgrad_most"] <= 1 + 1e-12
        assert found["exgrad_least"] < 0.25, "far below for confident predictions"
        assert 1 - 1e-12 <= found["regrad_least"] <= found["regrad_most"] <= 10

    def test_small_noise_ranks_as_gradients_do_and_large_noise_backwards(
        self, models: tuple[dict[str, nn.Module], Tensor]
    ) -> None:
        model, x = models[0]["CNN"], models[1]
        assert min(bound.ranking(model, x, 0.003, draws=50).values()) > 0.95
        assert max(bound.ranking(model, x, 0.3, draws=50).values()) < 0
