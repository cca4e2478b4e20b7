"""What a server tells about itself, in the text format of Prometheus."""

import collections
import dataclasses

from v41jax.serving.worker import Worker

MEDIA_TYPE = "text/plain; version=0.0.4"


@dataclasses.dataclass
class Counts:
    """What the server has done."""

    responses: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by status


def text(worker: Worker, counts: Counts) -> str:
    """Writes all figures; names end in _total where they only grow."""
    engine = worker.engine
    done = engine.counts
    figures = [
        ("v41jax_requests_waiting", "gauge", "Requests in the queue", {"": engine.waiting}),
        ("v41jax_requests_running", "gauge", "Requests in a slot or being prefilled", {"": engine.running}),
        ("v41jax_slots", "gauge", "Slots there are", {"": engine.layout.slots}),
        ("v41jax_prompt_tokens_total", "counter", "Prompt tokens of admitted requests", {"": done.prompt_tokens}),
        ("v41jax_reused_tokens_total", "counter", "Of them, taken from known prefixes", {"": done.reused_tokens}),
        ("v41jax_made_tokens_total", "counter", "Tokens made", {"": done.made_tokens}),
        ("v41jax_chunks_total", "counter", "Chunks of prompts run", {"": done.chunks}),
        ("v41jax_steps_total", "counter", "Decoding steps run", {"": done.steps}),
        ("v41jax_requests_finished_total", "counter", "Requests finished, by reason", _by("reason", done.finished)),
        ("v41jax_responses_total", "counter", "HTTP responses to calls, by status", _by("status", counts.responses)),
    ]
    lines = []
    for name, kind, help, values in figures:
        lines += [f"# HELP {name} {help}.", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _by(label: str, counter: collections.Counter) -> dict[str, int]:
    return {f'{{{label}="{key}"}}': value for key, value in sorted(counter.items())}
