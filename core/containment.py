"""What each chosen component has cost, how often it failed, and whether it may still be called.

Whoever calls a component tells its `Account` how long the call took, and whether it worked. A stranger's that fails
several times in a row goes into quarantine: it is not called again, and what needs it is refused by name. Knows no
tensors, no channels and no slots' protocols. An account is written by the one thread that calls its component; others
only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from msgspec import Struct

from ..hooks.errors import RequestFailed, Unavailable
from ..hooks.slots import PROJECT

if TYPE_CHECKING:
    from ..hooks.components import Bound
    from ..hooks.stack import Stack

QUARANTINE_AFTER: Final = 5
SLOW_CALL_S: Final = 1.0
MAX_REASON: Final = 300
MAX_NEUTRAL: Final = 16

log = structlog.get_logger()


class PluginCost(Struct, frozen=True, kw_only=True):
    """All components of one plugin in one slot, together.

    Attributes:
        seconds: spent in its calls.
        errors: calls that raised, gave back what cannot be used, or took too long.
        quarantined: components that are not called any more.
    """

    plugin: str
    slot: str
    seconds: float
    calls: int
    errors: int
    quarantined: int


class Account:
    """Of one component.

    Args:
        quarantine_after: failures in a row that are too many; 0: any number is borne.
        slow_call_s: a call that takes longer counts as a failure.

    Attributes:
        who: whose code it is, in messages.
        key: `plugin/name`, as the configuration may call it.
        seconds, calls, errors: see `PluginCost`.
        quarantined: why it is not called any more; None while it is.
    """

    __slots__ = (
        "_in_a_row",
        "_neutral",
        "_quarantine_after",
        "_slow",
        "_slow_call_s",
        "calls",
        "errors",
        "key",
        "name",
        "plugin",
        "quarantined",
        "seconds",
        "slot",
        "who",
    )

    def __init__(
        self,
        slot: str,
        plugin: str,
        name: str,
        *,
        quarantine_after: int = QUARANTINE_AFTER,
        slow_call_s: float = SLOW_CALL_S,
    ) -> None:
        self.slot = slot
        self.plugin = plugin
        self.name = name
        self.who = f"{slot.replace('_', ' ')} {name} of plugin {plugin}"
        self.key = f"{plugin}/{name}"
        self.seconds = 0.0
        self.calls = 0
        self.errors = 0
        self.quarantined: str | None = None
        self._neutral: list[object] = []
        """Parameters of which it has said that they change nothing."""
        self._quarantine_after = quarantine_after
        self._slow_call_s = slow_call_s
        self._in_a_row: dict[str, int] = {}
        self._slow = False

    def spent(self, seconds: float, method: str = "") -> None:
        """A call has come back. Say after it whether it worked.

        Args:
            method: which of the component's; each has failures in a row of its own.
        """
        self.calls += 1
        self.seconds += seconds
        self._slow = seconds > self._slow_call_s
        if self._slow:
            said = f"a call must not take longer than {self._slow_call_s:g} s, this one took {seconds:.1f} s"
            self.failed(said, method)

    def spent_apart(self, seconds: float) -> None:
        """A call has come back that ran beside the loop and beside the steps: it may take as long as it takes."""
        self.calls += 1
        self.seconds += seconds

    def worked(self, method: str = "") -> None:
        """It did what it is for: the failures before were not in a row with those that may follow."""
        if self._in_a_row and not self._slow:
            self._in_a_row.pop(method, None)

    def served_some(self) -> None:
        """The call went wrong for some of those it was made for, and not for all: an error, and no failure."""
        self.errors += 1

    def failed(self, reason: object, method: str = "") -> None:
        """The call was of no use.

        Args:
            reason: words, or what it raised.
        """
        self.errors += 1
        in_a_row = self._in_a_row[method] = self._in_a_row.get(method, 0) + 1
        said = (describe(reason) if isinstance(reason, BaseException) else str(reason))[:MAX_REASON]
        if self.quarantined is not None:
            return
        if in_a_row == 1:
            log.warning("a plugin failed", plugin=self.plugin, slot=self.slot, component=self.name, reason=said)
        if 0 < self._quarantine_after <= in_a_row:
            self.quarantined = f"it failed {in_a_row} times in a row, the last time so: {said}"
            log.error(
                "a plugin is in quarantine: it is not called any more",
                plugin=self.plugin,
                slot=self.slot,
                component=self.name,
                failures=in_a_row,
                reason=said,
            )

    def changes_nothing(self, params: object) -> None:
        """The component says so of *params*."""
        if len(self._neutral) < MAX_NEUTRAL and params not in self._neutral:
            self._neutral.append(params)

    def refuses(self, params: object) -> bool:
        """It is in quarantine, and a request with these parameters cannot do without it."""
        if self.quarantined is None or params is None:
            return False
        try:
            return params not in self._neutral
        except Exception:  # A stranger's parameters may fail to compare.
            return True

    def refusal(self) -> Unavailable:
        """What a request is told that needs it while it is in quarantine."""
        return Unavailable(
            f"the {self.who} is in quarantine, for {self.quarantined}; ask without it, or have the operator mend it",
            code="plugin_quarantined",
            plugin=self.plugin,
        )

    def failure(self, error: BaseException) -> RequestFailed:
        """What a request is told whose call has failed."""
        failed = RequestFailed(f"{self.who} failed: {describe(error)}", plugin=self.plugin)
        failed.__cause__ = error
        return failed


class Ledger:
    """The accounts of all components that were chosen. See `Account` for the arguments."""

    def __init__(self, *, quarantine_after: int = QUARANTINE_AFTER, slow_call_s: float = SLOW_CALL_S) -> None:
        self._quarantine_after = quarantine_after
        self._slow_call_s = slow_call_s
        self._accounts: dict[tuple[str, str, str, int], Account] = {}
        self._past: dict[tuple[str, str], PluginCost] = {}
        """Of those that were forgotten, by plugin and slot."""

    def account(self, slot: str, bound: Bound, *, quarantine: bool = True) -> Account:
        """The account of *bound* in *slot*; always the same one. A later stack's component has one of its own.

        Built-ins are only counted: what fails in them is ours to mend, and must not become a way to switch them off.

        Args:
            quarantine: False where nothing could take its place, such as the model's tokenizer: that is only counted.
        """
        key = (slot, bound.plugin, bound.name, bound.revision)
        if key not in self._accounts:
            after = self._quarantine_after if quarantine and not builtin(bound) else 0
            self._accounts[key] = Account(*key[:3], quarantine_after=after, slow_call_s=self._slow_call_s)
        return self._accounts[key]

    def keep(self, stacks: Iterable[Stack]) -> None:
        """Forget the accounts of what is in none of *stacks*; what it has cost still counts."""
        kept = {(slot, each.plugin, each.name, each.revision) for stack in stacks for slot, each in stack.bounds}
        for key in [key for key in list(self._accounts) if key not in kept]:
            account = self._accounts.pop(key)
            past = _total(account.plugin, account.slot, [account], self._past.get((account.plugin, account.slot)))
            self._past[account.plugin, account.slot] = msgspec.structs.replace(past, quarantined=0)

    def costs(self) -> tuple[PluginCost, ...]:
        """By plugin and slot, of everything that was chosen."""
        groups: dict[tuple[str, str], list[Account]] = {key: [] for key in self._past}
        for account in list(self._accounts.values()):
            groups.setdefault((account.plugin, account.slot), []).append(account)
        return tuple(_total(*key, accounts, self._past.get(key)) for key, accounts in sorted(groups.items()))


def _total(plugin: str, slot: str, accounts: Sequence[Account], past: PluginCost | None) -> PluginCost:
    return PluginCost(
        plugin=plugin,
        slot=slot,
        seconds=sum(each.seconds for each in accounts) + (past.seconds if past else 0.0),
        calls=sum(each.calls for each in accounts) + (past.calls if past else 0),
        errors=sum(each.errors for each in accounts) + (past.errors if past else 0),
        quarantined=sum(each.quarantined is not None for each in accounts),
    )


def builtin(bound: Bound) -> bool:
    """It came with Headrace itself."""
    return bound.distribution.partition(" ")[0] == PROJECT


def refuse_quarantined(
    ledger: Ledger, processors: Iterable[Bound], chain: Sequence[object], sampler: Bound | None
) -> None:
    """Let a request go on only if nothing that it needs is in quarantine. What it needs is never left out in silence.

    Args:
        processors: of the Stack, in running order.
        chain: the request's parameters for each; None: it does not use it.
        sampler: what draws for it; None: nothing does, it is greedy.

    Raises:
        Unavailable: names the component, its plugin and the reason.
    """
    for bound, params in zip(processors, chain, strict=True):
        account = ledger.account("logits_processor", bound)
        if account.refuses(params):
            raise account.refusal()
    if sampler is not None and (account := ledger.account("sampler", sampler)).quarantined is not None:
        raise account.refusal()


def describe(error: BaseException) -> str:
    """What was raised, in a line. A stranger's exception may fail to say what it is, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
