"""docs/plugins/slots.md is the page that is made from the table."""

from headrace.hooks.registry import Registry
from headrace.hooks.slots import SLOTS
from headrace.hooks.slots_page import RUNS, page
from tests.docs.blocks import DOCS

REMAKE = "write it anew: python -m headrace.hooks.slots_page > docs/plugins/slots.md"


def test_the_page_in_the_documentation_is_the_one_made_from_the_slots():
    made = page(Registry.discover(environ={"HEADRACE_PLUGINS": "off"}))
    assert (DOCS / "plugins" / "slots.md").read_text(encoding="utf-8") == made, REMAKE


def test_every_slot_says_when_it_runs_where_and_for_how_long():
    assert RUNS.keys() == SLOTS.keys()
    assert all(all(facts) for facts in RUNS.values())
