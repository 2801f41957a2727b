"""The scores, each in a file of its own, and the table of them."""

from qualms.methods.ash_s import ASHS
from qualms.methods.clafr import ClaFR
from qualms.methods.coherence import Coherence
from qualms.methods.confounding_label import ConfoundingLabel
from qualms.methods.energy import Energy
from qualms.methods.ensemble import Ensemble
from qualms.methods.entropy import Entropy
from qualms.methods.exgrad import ExGrad
from qualms.methods.exgrad_v import ExGradV
from qualms.methods.fdbd import FDBD
from qualms.methods.fisher import Fisher
from qualms.methods.gaia import GAIA
from qualms.methods.gen import GEN
from qualms.methods.gradient_score import GradientScore
from qualms.methods.gradnorm import GradNorm
from qualms.methods.gradnorm_huang import GradNormHuang
from qualms.methods.heat import Heat, HeatGeometric
from qualms.methods.inserted_dropout import InsertedDropout
from qualms.methods.isotropic import Isotropic
from qualms.methods.knn import KNN
from qualms.methods.laplace import Laplace
from qualms.methods.lts import LTS
from qualms.methods.mahalanobis import Mahalanobis
from qualms.methods.max_logit import MaxLogit
from qualms.methods.mc_aa import MCAA
from qualms.methods.mc_batchnorm import MCBatchNorm
from qualms.methods.mc_dropout import MCDropout
from qualms.methods.method import Method
from qualms.methods.msp import MSP
from qualms.methods.negrad import NEGrad
from qualms.methods.odin import ODIN
from qualms.methods.perturb_theta import PerturbTheta
from qualms.methods.perturb_x import PerturbX
from qualms.methods.quam import QUAM
from qualms.methods.rankfeat import RankFeat
from qualms.methods.react import ReAct
from qualms.methods.recommended import Recommended
from qualms.methods.registry import METHODS, list_methods, parse
from qualms.methods.regrad import REGrad
from qualms.methods.scale import SCALE
from qualms.methods.ungrad import UNGrad
from qualms.methods.vim import ViM

__all__ = [
    "ASHS",
    "FDBD",
    "GAIA",
    "GEN",
    "KNN",
    "LTS",
    "MCAA",
    "METHODS",
    "MSP",
    "ODIN",
    "QUAM",
    "SCALE",
    "ClaFR",
    "Coherence",
    "ConfoundingLabel",
    "Energy",
    "Ensemble",
    "Entropy",
    "ExGrad",
    "ExGradV",
    "Fisher",
    "GradNorm",
    "GradNormHuang",
    "GradientScore",
    "Heat",
    "HeatGeometric",
    "InsertedDropout",
    "Isotropic",
    "Laplace",
    "MCBatchNorm",
    "MCDropout",
    "Mahalanobis",
    "MaxLogit",
    "Method",
    "NEGrad",
    "PerturbTheta",
    "PerturbX",
    "REGrad",
    "RankFeat",
    "ReAct",
    "Recommended",
    "UNGrad",
    "ViM",
    "list_methods",
    "parse",
]
