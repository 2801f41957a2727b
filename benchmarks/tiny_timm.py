"""Networks of timm with random weights, as small as they can be had, and inputs for them."""

from functools import cache
from typing import Any

import torch
from tiny_models import CLASSES, INPUTS
from torch import Tensor, nn

# The smallest network of each module of timm that has one below 32 million parameters.
TIMM = (
    "lambda_resnet26t", "gernet_s", "cait_xxs24_224", "coat_tiny", "convit_tiny", "convmixer_768_32", "test_convnext",
    "cpubone_nano", "crossvit_tiny_240", "csatv2", "cs3darknet_s", "davit_tiny", "deit_tiny_patch16_224",
    "densenet121", "dla46x_c", "dpn48b", "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0",
    "mnasnet_small", "efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "eva02_tiny_patch14_224", "fasternet_t0",
    "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "ghostnet_050", "hardcorenas_b", "hgnetv2_b0", "hiera_tiny_224",
    "sam2_hiera_tiny", "hrnet_w18_small", "iformer_t", "inception_next_atto", "inception_v3", "lcnetv2_small",
    "levit_128s", "lowformer_b0", "test_mambaout", "maxvit_pico_rw_256", "poolformerv2_s12", "gmlp_ti16_224",
    "lcnet_035", "mobilevit_xxs", "mobilevitv2_050", "mvitv2_tiny", "nest_tiny", "nextvit_small", "test_nfnet",
    "pit_ti_224", "pvt_v2_b0", "rdnet_tiny", "regnetx_002", "repghostnet_050", "repvit_m1", "res2next50", "resnest14d",
    "resnet10t", "resnetv2_18", "rexnet_100", "selecsls42", "legacy_seresnet18", "sequencer2d_s", "shvit_s1",
    "skresnet18", "starnet_s050", "swiftformer_xs", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224", "tiny_vit_5m_224", "tnt_s_patch16_224", "tresnet_m", "twins_svt_small", "visformer_tiny",
    "test_vit", "vit_tiny_r_s16_p8_224", "vit_srelpos_small_patch16_224", "vitamin_small_224", "volo_d1_224",
    "ese_vovnet19b_slim_dw", "legacy_xception", "xception41p", "xcit_nano_12_p8_224",
)  # fmt: skip
SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": 2},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {},
)


@cache
def imported_timm() -> Any:
    """Beside a CPU build of torch, torchvision's compiled operators do not load, and its Python
    asks for these two.
    """
    for operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float overlap) -> Tensor"
        )
    import timm

    return timm


def timm_names() -> list[str]:
    """Those of `TIMM` that the installed timm has."""
    return [name for name in TIMM if imported_timm().is_model(name)]


def timm_model(name: str) -> tuple[nn.Module, Tensor]:
    """A network of timm, of few layers and for small images where it can be had so, and inputs for
    it.
    """
    timm = imported_timm()
    size = int(timm.get_pretrained_cfg(name).input_size[1])
    failures: list[Exception] = []
    for side in sorted({32, 64, 96, 128, size}):
        for fewer in SMALLER:
            for fixed in ({"img_size": side}, {}):
                torch.manual_seed(0)
                try:
                    model = timm.create_model(name, num_classes=CLASSES, **fixed, **fewer).eval()
                    x = torch.randn(INPUTS, 3, side, side)
                    with torch.no_grad():
                        model(x)
                except Exception as failure:
                    failures.append(failure)
                    continue
                return model, x.double()
    raise failures[-1]
