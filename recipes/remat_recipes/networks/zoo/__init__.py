"""Untrained networks of many libraries, tiny where these let configure them, each with arguments of one step."""

from .architecture import Architecture as Architecture
from .diffusers_networks import DIFFUSERS
from .other_networks import OTHERS
from .timm_networks import TIMM
from .torchvision_networks import TORCHVISION
from .transformers_networks import TRANSFORMERS

ARCHITECTURES: tuple[Architecture, ...] = (*TORCHVISION, *TIMM, *OTHERS, *TRANSFORMERS, *DIFFUSERS)
