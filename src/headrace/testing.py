"""The conformance kit for plugins: one contract a slot, and one for profiles, each loaded when it is named.

See docs/plugins/testing.md.

from headrace.testing import LogitsProcessorContract

class TestTopA(LogitsProcessorContract):
    plugin = "top_a"
    name = "top-a"
    params = [{"ratio": 0.2}, {"ratio": 0.5}]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .hooks.testing.catalog import NAMES, contract

if TYPE_CHECKING:
    from .hooks.testing.admission import AdmissionContract
    from .hooks.testing.architecture import ArchitectureContract
    from .hooks.testing.attention import AttentionContract
    from .hooks.testing.auth import AuthContract
    from .hooks.testing.chat_template import ChatTemplateContract
    from .hooks.testing.checkpoints import FakeCheckpoint
    from .hooks.testing.command import CommandContract
    from .hooks.testing.contract import Broken, Contract, run
    from .hooks.testing.executor import ExecutorContract
    from .hooks.testing.grammar import GrammarContract
    from .hooks.testing.logits_processor import LogitsProcessorContract
    from .hooks.testing.middleware import MiddlewareContract
    from .hooks.testing.model_source import ModelSourceContract
    from .hooks.testing.observer import ObserverContract
    from .hooks.testing.parsers import ReasoningParserContract, ToolParserContract
    from .hooks.testing.profile import ProfileContract
    from .hooks.testing.quantizer import QuantizerContract
    from .hooks.testing.routes import RoutesContract
    from .hooks.testing.sampler import SamplerContract
    from .hooks.testing.scheduler_policy import SchedulerPolicyContract
    from .hooks.testing.stop import StopContract
    from .hooks.testing.tokenizer import TokenizerContract
    from .hooks.testing.weight_loader import WeightLoaderContract

__all__ = [
    "AdmissionContract",
    "ArchitectureContract",
    "AttentionContract",
    "AuthContract",
    "Broken",
    "ChatTemplateContract",
    "CommandContract",
    "Contract",
    "ExecutorContract",
    "FakeCheckpoint",
    "GrammarContract",
    "LogitsProcessorContract",
    "MiddlewareContract",
    "ModelSourceContract",
    "ObserverContract",
    "ProfileContract",
    "QuantizerContract",
    "ReasoningParserContract",
    "RoutesContract",
    "SamplerContract",
    "SchedulerPolicyContract",
    "StopContract",
    "TokenizerContract",
    "ToolParserContract",
    "WeightLoaderContract",
    "contract",
    "run",
]

_HOMES = {
    "Broken": "contract",
    "Contract": "contract",
    "run": "contract",
    "FakeCheckpoint": "checkpoints",
    "ProfileContract": "profile",
}


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return contract(NAMES[name])
    if name in _HOMES:
        return getattr(import_module(f".hooks.testing.{_HOMES[name]}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
