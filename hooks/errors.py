"""Everything Headrace raises on purpose.

HeadraceError
├── StartError            the process cannot start; its message is shown to the operator, without a traceback
│   ├── ConfigError       headrace.toml, environment or flags
│   ├── PluginError       a plugin that was chosen cannot be used; names plugin, distribution and reason
│   ├── ModelError        a checkpoint that is missing, cut, corrupt or of an unknown kind
│   └── MemoryPlanError   the model does not fit into the memory it may use
├── RequestError          one request ends; its status and code go to the client
│   ├── BadRequest            400
│   │   └── ContextTooLong    400, code `context_length_exceeded`
│   ├── NotFound              404
│   ├── Overloaded            429, with `retry_after_s`
│   ├── Conflict              409
│   ├── RequestFailed         500, names the plugin at fault where there is one
│   ├── Unavailable           503, with `retry_after_s`: loading, draining or dead
│   └── TimedOut              504
└── EngineDied            the line has stopped; every live request has been told
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors raised on purpose."""


class StartError(HeadraceError):
    """The process cannot start as configured."""


class ConfigError(StartError):
    """A setting is wrong. The message holds one `file:line:column: key: reason` a line."""


class PluginError(StartError):
    """A chosen plugin cannot be used.

    Args:
        plugin: the name of its entry point.
        reason: what must hold and what was found.
        distribution: the pip distribution that brought it, as `name version`; empty for code in this process.
    """

    def __init__(self, plugin: str, reason: str, *, distribution: str = "") -> None:
        origin = f" ({distribution})" if distribution else ""
        super().__init__(f"plugin {plugin}{origin}: {reason}")
        self.plugin = plugin
        self.reason = reason
        self.distribution = distribution


class ModelError(StartError):
    """A checkpoint cannot be read: missing, cut, corrupt, or of a kind no plugin knows."""


class MemoryPlanError(StartError):
    """Weights, one step and the smallest useful KV cache do not fit into the memory that may be used."""


MAX_MESSAGE = 2000


def _presentable(message: str) -> str:
    """*message* as it can be sent and logged: of bounded length, for it may quote a client, and without surrogates."""
    if len(message) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        message = f"{message[:half]} … {message[-half:]}"
    return message.encode("utf-8", "replace").decode()


class RequestError(HeadraceError):
    """One request ends with this.

    Attributes:
        status: HTTP status.
        code: machine-readable code, as OpenAI's error objects have it, or None.
        param: path of the offending field, such as `messages[0].content`, or None.
        retry_after_s: seconds after which a retry has a chance, or None.
        plugin: the plugin at fault, or None.
    """

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        plugin: str | None = None,
    ) -> None:
        super().__init__(_presentable(message))
        self.code = code or type(self).code
        self.param = param
        self.retry_after_s = retry_after_s
        self.plugin = plugin


class BadRequest(RequestError):
    """The client asked for something that cannot be."""

    status = 400
    kind = "invalid_request_error"


class ContextTooLong(BadRequest):
    """The prompt does not fit into the model's context or can never fit into the KV cache."""

    code = "context_length_exceeded"


class NotFound(RequestError):
    """No such model or route."""

    status = 404
    kind = "invalid_request_error"


class Conflict(RequestError):
    """It cannot be done in the state that things are in."""

    status = 409
    kind = "invalid_request_error"


class Overloaded(RequestError):
    """The line is full. `retry_after_s` says when a place is likely free."""

    status = 429
    kind = "rate_limit_error"
    code = "overloaded"


class RequestFailed(RequestError):
    """Something of ours, or a plugin's, failed while this request ran."""

    status = 500


class Unavailable(RequestError):
    """The engine is loading, draining or dead."""

    status = 503
    code = "unavailable"


class TimedOut(RequestError):
    """The request's own deadline passed, or its reader stayed away too long."""

    status = 504
    code = "timeout"


class EngineDied(HeadraceError):
    """A stage that must not fail has failed."""
