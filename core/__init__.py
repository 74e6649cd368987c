"""The line: a request goes one way through six actors.

           Request        Prompt        Step          Logits        Sampled         Delta
    server ──▶ ingress ──▶ tokenize ──▶ schedule ──▶ forward ──▶ sample ──▶ stream ──▶ mailbox ──▶ server
                ▲ credits                ▲  ▲  ▲                   │           │          │
                └────────────────────────┘  │  └──── Sampled ──────┘           │          │
                                            └──────── Cancel · Park · Resume ──┴──────────┘

Each stage is one async function in the file of its name; `engine` opens the channels between them and starts
them; `compute` is the one thread that owns the model. Nouns are folders: `kv`, `model`, `kernels`.
"""

if __name__ != "headrace.core":
    raise ImportError("import headrace.core, not a bare core")
